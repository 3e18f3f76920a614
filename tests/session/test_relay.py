"""One to many: receivers pass parcels on, the source sends each byte once, and nobody depends on a neighbour's luck."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist

import transfuse
from moves import CPU
from tampering import Tampering
from transfuse._limits import KIB, MIB, Limits
from transfuse._plan import parcels
from transfuse._plan.regions import lay_out
from transfuse._session import receive_from_one, relay
from transfuse._session.relay import Chains
from transfuse._sizes import Sizes
from transfuse._state.manifest import describe
from transfuse._timeouts import Patience
from transfuse._wire.messages import Agreed
from transfuse.testing.exact import assert_exact
from transfuse.testing.ranks import Fleet, Outcome, Ranks, announce

TIMEOUT = timedelta(seconds=10)
NBYTES = 5 * MIB


def state() -> dict[str, Any]:
    generator = torch.Generator().manual_seed(1)
    large = torch.randn(NBYTES // 4 - 4100, generator=generator)
    return {"large": large, "small": [torch.randn(41, generator=generator) for _ in range(100)], "step": 3}


def fan_out(receivers: int, **options: Any) -> list[Outcome[Any]]:
    """Rank 0 sends to all others over the group; each returns its report."""
    expected = state()

    def work(rank: int, pg: Any) -> Any:
        mine = {name: value[rank] if isinstance(value, dict) else value for name, value in options.items()}
        delay, wrap = mine.pop("delay", 0.0), mine.pop("wrap", None)
        mover = transfuse.PGTransport(wrap(pg) if wrap else pg, TIMEOUT, CPU, same_host=False, **mine)
        time.sleep(delay)
        if rank == 0:
            mover.send_checkpoint(list(range(1, receivers + 1)), expected)
        else:
            assert_exact(expected, mover.recv_checkpoint(0))
        return mover.report

    with Ranks(receivers + 1) as ranks:
        return ranks.outcomes(work)


@pytest.fixture(autouse=True)
def another_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """The receivers, threads of this host, are on another one."""
    monkeypatch.setattr(receive_from_one, "this_host", lambda: 1)


@pytest.mark.usefixtures("patient_chains")
@pytest.mark.parametrize("receivers", [1, 2, 3, 4, 7, 16])
def test_the_source_sends_each_byte_once_however_many_receivers(receivers: int) -> None:
    sent, *received = (outcome.get() for outcome in fan_out(receivers))
    assert [report.bytes for report in received] == [sent.bytes] * receivers
    assert sum(report.relayed_bytes for report in received) == (receivers - 1) * sent.bytes
    assert all(report.verified and not report.repaired for report in received)


@pytest.mark.usefixtures("patient_chains")
@pytest.mark.parametrize("who", [0, 2])
def test_relaying_can_be_turned_off_at_either_end(who: int) -> None:
    sent, *received = (outcome.get() for outcome in fan_out(3, relay={r: r != who for r in range(4)}))
    copies = 3 if who == 0 else 2
    assert sent.bytes == copies * received[0].bytes
    if who == 2:
        assert received[1].relayed_bytes == 0


@pytest.mark.usefixtures("patient_chains")
def test_receivers_that_want_something_else_are_not_in_the_chain() -> None:
    """One compares no digests: its bursts have other records."""
    sent, *received = (outcome.get() for outcome in fan_out(4, verify={0: None, 1: None, 2: False, 3: None, 4: None}))
    assert sent.bytes == 2 * received[0].bytes
    assert received[1].relayed_bytes == 0
    assert not received[1].verified
    assert sum(report.relayed_bytes > 0 for report in received) == 2


def test_a_late_receiver_is_served_by_the_source(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Patience, "MIN_CHAIN_SECONDS", 3.0)
    monkeypatch.setattr(Patience, "MAX_CHAIN_SECONDS", 3.0)
    sent, *received = (outcome.get() for outcome in fan_out(3, delay={0: 0, 1: 0, 2: 8.0, 3: 0}))
    assert sent.bytes == 2 * received[0].bytes
    assert received[1].relayed_bytes == 0
    assert received[0].seconds < 8.0
    assert received[2].seconds < 8.0


def test_small_states_are_not_worth_a_chain() -> None:
    def work(rank: int, pg: Any) -> Any:
        mover = transfuse.PGTransport(pg, TIMEOUT, CPU, same_host=False)
        if rank == 0:
            mover.send_checkpoint([1, 2], {"w": torch.ones(1000)})
        else:
            mover.recv_checkpoint(0)
        assert mover.report is not None
        return mover.report

    with Ranks(3) as ranks:
        sent, *received = ranks.run(work)
    assert sent.bytes == 8000
    assert not any(report.relayed_bytes for report in received)


@pytest.mark.usefixtures("patient_chains")
def test_a_receiver_that_refuses_is_not_waited_for() -> None:
    expected = state()

    def work(rank: int, pg: Any) -> Any:
        target = {"large": torch.zeros(3)} if rank == 2 else None
        mover = transfuse.PGTransport(pg, TIMEOUT, CPU, None if target is None else lambda: target, same_host=False)
        if rank == 0:
            return mover.send_checkpoint([1, 2, 3], expected)
        assert_exact(expected, mover.recv_checkpoint(0))
        return mover.report

    with Ranks(4) as ranks:
        outcomes = ranks.outcomes(work)
    assert isinstance(outcomes[0].error, transfuse.SendFailed)
    assert set(outcomes[0].error.causes) == {2}
    assert isinstance(outcomes[2].error, transfuse.TargetMismatch)
    assert outcomes[1].get().bytes == outcomes[3].get().bytes == outcomes[3].get().relayed_bytes


@pytest.mark.usefixtures("patient_chains")
def test_parcels_are_passed_on_out_of_the_buffers_in_which_they_arrived(monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[bool] = []

    def take(self: Any, number: int) -> torch.Tensor | None:
        buffer = original(self, number)
        taken.append(buffer is not None)
        return buffer

    original = relay._Arrived.take
    monkeypatch.setattr(relay._Arrived, "take", take)
    fan_out(3)
    # The first receiver gets its parcels straight into its tensors, and the last one passes nothing on.
    assert any(taken)
    assert not all(taken)


def test_only_so_many_buffers_wait_to_be_passed_on() -> None:
    """With those under way, at most three. Once one was not kept, none is until that one has gone."""
    arrived, under_way = relay._Arrived(3), 0
    buffers = [torch.zeros(1) for _ in range(9)]
    assert not arrived.keep(0, buffers[0])  # There is nobody to pass it on to.
    arrived.under_way = lambda: under_way
    assert [arrived.keep(number, buffers[number]) for number in (1, 2, 3, 4)] == [True, True, True, False]
    assert [arrived.take(number) for number in (1, 2)] == buffers[1:3]
    under_way = 2
    assert not arrived.keep(5, buffers[5])
    under_way = 0
    assert not arrived.keep(6, buffers[6])
    assert [arrived.take(number) for number in (3, 4, 5, 6)] == [buffers[3], None, None, None]
    assert arrived.keep(7, buffers[7])
    arrived.close()
    assert arrived.take(7) is None
    assert not arrived.keep(8, buffers[8])


# ------------------------------------------------------------------------------------------------- neighbours that fail


class Damaging(Tampering):
    """A group that damages one parcel that it sends to another receiver."""

    _left = 1

    def tamper(self, tensor: torch.Tensor, rank: int) -> torch.Tensor:
        if rank > 0 and tensor.numel() > 16 * KIB and self._left:
            self._left -= 1
            tensor[99] ^= 1
        return tensor


@pytest.mark.usefixtures("patient_chains")
def test_what_a_neighbour_damages_comes_again_from_the_source() -> None:
    sent, *received = (outcome.get() for outcome in fan_out(3, wrap={0: None, 1: Damaging, 2: None, 3: None}))
    assert [report.repaired for report in received] == [0, 1, 1]
    assert sent.repaired == 2
    assert received[0].bytes < sent.bytes < 2 * received[0].bytes


@pytest.mark.parametrize("who", [1, 2, 3])
def test_a_receiver_that_stops_midway_does_not_stop_the_others(who: int) -> None:
    def stop(progress: dict[int, transfuse.Progress]) -> None:
        if progress[0].bytes > MIB:
            raise RuntimeError("stop here")

    outcomes = fan_out(3, progress={r: stop if r == who else False for r in range(4)}, max_bytes_per_second=8e6)
    assert isinstance(outcomes[0].error, transfuse.SendFailed)
    assert set(outcomes[0].error.causes) == {who}
    assert "stop here" in str(outcomes[0].error)
    assert isinstance(outcomes[who].error, RuntimeError)
    for rank in {1, 2, 3} - {who}:
        assert outcomes[rank].get().bytes >= NBYTES - 4100


def test_a_source_that_stops_midway_stops_all_with_its_cause() -> None:
    def stop(progress: dict[int, transfuse.Progress]) -> None:
        if any(p.bytes > MIB for p in progress.values()):
            raise RuntimeError("stop here")

    outcomes = fan_out(3, progress={0: stop, 1: False, 2: False, 3: False}, max_bytes_per_second=8e6)
    assert isinstance(outcomes[0].error, RuntimeError)
    for outcome in outcomes[1:]:
        assert isinstance(outcome.error, transfuse.PeerError)
        assert "stop here" in str(outcome.error)


def join_patiently(rank: int) -> None:
    """In a process of its own: as on a host of its own, and in a chain however late another comes."""
    setattr(receive_from_one, "this_host", lambda: rank)  # noqa: B010 - hidden from mypy
    setattr(Patience, "MIN_CHAIN_SECONDS", 5.0)  # noqa: B010
    setattr(Patience, "MAX_CHAIN_SECONDS", 5.0)  # noqa: B010


def pass_on_slowly(rank: int, timeout: float) -> Any:
    """Rank 0 sends 64 MiB to all others, at a rate at which they take about two seconds."""
    announced: list[int] = []

    def show(progress: dict[int, transfuse.Progress]) -> None:
        if progress and any(p.bytes > 8 * MIB for p in progress.values()) and not announced:
            announced.append(1)
            announce("moving")

    join_patiently(rank)
    own = torch.full((16 * MIB,), 3.0 if rank == 0 else 0.0)
    mover = transfuse.PGTransport(
        cast(Any, dist.group.WORLD),
        timedelta(seconds=timeout),
        CPU,
        lambda: {"w": own},
        same_host=False,
        max_bytes_per_second=32e6,
        progress=show,
    )
    dist.barrier()
    if rank == 0:
        mover.send_checkpoint(list(range(1, dist.get_world_size())), {"w": own})
    else:
        mover.recv_checkpoint(0)
    assert mover.report is not None
    return bool((own == 3.0).all()), mover.report.relayed_bytes


@pytest.mark.parametrize("who", [1, 2, 3])
def test_a_receiver_that_dies_midway_does_not_break_the_chain(who: int) -> None:
    with Fleet(4) as fleet:
        fleet.start(pass_on_slowly, 8.0)
        fleet.wait_for(who, "moving")
        fleet.kill(who)
        outcomes = fleet.outcomes(deadline=60)
    assert isinstance(outcomes[0].error, transfuse.SendFailed)
    assert set(outcomes[0].error.causes) == {who}
    for rank in {1, 2, 3} - {who}:
        assert outcomes[rank].get()[0] is True


def test_a_receiver_that_freezes_midway_is_left_and_the_others_finish() -> None:
    with Fleet(4) as fleet:
        fleet.start(pass_on_slowly, 6.0)
        fleet.wait_for(2, "moving")
        fleet.freeze(2)
        first, last = fleet.outcomes(deadline=60, ranks=[1, 3])
        assert first.get()[0] is True
        assert last.get()[0] is True
        (sent,) = fleet.outcomes(deadline=60, ranks=[0])
    assert isinstance(sent.error, transfuse.SendFailed)
    assert set(sent.error.causes) == {2}
    assert isinstance(sent.error.causes[2], transfuse.PeerTimeout)


def test_a_source_that_freezes_is_given_up_by_all_of_its_chain() -> None:
    with Fleet(3) as fleet:
        fleet.start(pass_on_slowly, 3.0)
        fleet.wait_for(2, "moving")
        fleet.freeze(0)
        started = time.monotonic()
        outcomes = fleet.outcomes(deadline=40, ranks=[1, 2])
        assert time.monotonic() - started < 15
    assert all(isinstance(outcome.error, transfuse.PeerTimeout) for outcome in outcomes)
    assert all("rank 0" in str(outcome.error) for outcome in outcomes)


def overwrite_after_return(rank: int) -> Any:
    """As above without digests; a receiver that has returned goes on to use its tensor."""
    join_patiently(rank)
    own = torch.full((16 * MIB,), 3.0 if rank == 0 else 0.0)
    group = cast(Any, dist.group.WORLD)
    mover = transfuse.PGTransport(
        group,
        timedelta(seconds=2),
        CPU,
        lambda: {"w": own},
        same_host=False,
        verify=False,
        max_bytes_per_second=64e6,
        progress=lambda progress: announce("moving") if any(p.bytes > 8 * MIB for p in progress.values()) else None,
    )
    dist.barrier()
    if rank == 0:
        mover.send_checkpoint([1, 2], {"w": own})
        return None
    mover.recv_checkpoint(0)
    if rank == 1:
        own.fill_(7.0)
        announce("overwritten")
        time.sleep(4)
    return bool((own == 3.0).all())


def test_what_a_receiver_does_with_its_tensors_afterwards_never_reaches_a_neighbour() -> None:
    with Fleet(3) as fleet:
        fleet.start(overwrite_after_return)
        fleet.wait_for(2, "moving")
        fleet.freeze(2)
        fleet.wait_for(1, "overwritten")
        fleet.thaw(2)
        (neighbour,) = fleet.outcomes(deadline=60, ranks=[2])
    if neighbour.error is None:  # It was frozen for less than the timeout, and got the rest elsewhere.
        assert neighbour.value is True
    else:
        assert isinstance(neighbour.error, transfuse.PeerError)
        assert neighbour.error.torn == ("['w']",)


# ------------------------------------------------------------------------------------------------------- pure parts


def lined_up(members: list[tuple[int, str, int]]) -> dict[int, Agreed]:
    """Rank, key and host of each; what each is told."""
    chains = Chains([rank for rank, _, _ in members], 64 * MIB, 100.0)
    with ThreadPoolExecutor(len(members)) as threads:
        told = {rank: threads.submit(chains.join, rank, key, host) for rank, key, host in members}
    return {rank: future.result()[0] for rank, future in told.items()}


def test_neighbours_in_a_chain_share_a_host_and_a_want() -> None:
    told = lined_up([(1, "a", 20), (2, "a", 10), (3, "b", 10), (4, "a", 20), (5, "a", 10)])
    order = {
        rank: (agreed.upstream and agreed.upstream.rank, agreed.downstream and agreed.downstream.rank)
        for rank, agreed in told.items()
    }
    assert order == {2: (None, 5), 5: (2, 1), 1: (5, 4), 4: (1, None), 3: (None, None)}
    assert told[2].downstream is not None
    assert told[5].upstream is not None
    assert told[2].downstream.tag == told[5].upstream.tag
    assert told[2].downstream.transfer == told[5].upstream.transfer
    assert told[5].patience < told[1].patience < told[4].patience < 100.0


def test_a_chain_does_not_wait_long_for_the_absent() -> None:
    chains = Chains([1, 2], 64 * MIB, 100.0)
    started = time.monotonic()
    assert chains.join(1, "a", 1)[0] == Agreed(None, None, 25.0)
    assert time.monotonic() - started < 5.0


def test_receivers_on_the_sources_host_are_not_chained(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(receive_from_one, "this_host", relay.this_host)
    sent, *received = (outcome.get() for outcome in fan_out(3))
    assert sent.bytes == 3 * received[0].bytes
    assert not any(report.relayed_bytes for report in received)


def test_parcels_shrink_as_a_chain_grows() -> None:
    limits = Limits()
    sizes = Sizes(limits)
    assert sizes.offered(4, chained_bytes=64 * MIB).parcel_bytes == 1 * MIB
    assert sizes.offered(8, chained_bytes=64 * MIB).parcel_bytes == 512 * KIB
    assert sizes.offered(4, chained_bytes=64 << 30).parcel_bytes == limits.parcel_bytes
    assert sizes.offered(4, chained_bytes=1 * MIB).parcel_bytes == limits.min_chained_bytes


@pytest.mark.parametrize("peers", [1, 2, 16, 100])
def test_staging_for_all_receivers_stays_within_its_budget(peers: int) -> None:
    limits = Limits()
    rules = Sizes(limits)
    for sizes in (rules.offered(peers), rules.offered(peers, chained_bytes=1 << 30), rules.offered(peers, rate=1e8)):
        assert peers * sizes.staged_bytes * sizes.bursts_ahead * 2 <= limits.staging_bytes
        assert sizes.parcel_bytes <= sizes.staged_bytes <= sizes.burst_bytes


def test_bursts_hold_less_of_what_passes_through_staging() -> None:
    """Two large runs, then small boxes that are packed."""
    state = {"a": torch.zeros(4 * MIB), "b": torch.zeros(4 * MIB), "c": [torch.zeros(20_000) for _ in range(200)]}
    cut = parcels.cut(lay_out(describe(state, Limits()).manifest), 2 * MIB)
    groups = parcels.bursts(cut, range(len(cut)), parcels.Most(16 * MIB, 4 * MIB))
    assert [n for group in groups for n in group] == list(range(len(cut)))
    for group in groups:
        assert cut.nbytes[group].sum() <= 16 * MIB
        assert cut.nbytes[group][cut.staged[group]].sum() <= 4 * MIB
    assert len(groups[0]) == 8
    assert cut.staged[groups[-1]].all()
