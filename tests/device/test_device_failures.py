"""Peers that are lost while a state moves between accelerators: the others go on, and every call ends in time."""

from __future__ import annotations

import time
from types import ModuleType
from typing import Any

import pytest
import torch

import transfuse
from device.group import DeviceRanks, backend_of
from device.in_processes import End, Plan, take_part
from device.simple_moves import bits, causes_of, receive, send, state, zeros
from transfuse.testing.ranks import Fleet, Outcome
from wires import over_streams

pytestmark = [pytest.mark.soak, pytest.mark.usefixtures("device", "small_parcels"), pytest.mark.timeout(90)]

#: How long a transfer may go without progress, and when a test that hangs is ended.
SECONDS, DEADLINE = 1.2, 25.0

HYBRID = [pytest.param(True, False, id="hybrid"), pytest.param(True, True, id="hybrid, bound")]
ALONE = [pytest.param(False, False, id="alone"), pytest.param(False, True, id="alone, bound", marks=pytest.mark.soak)]
every_kind = pytest.mark.parametrize(("cpu", "eager"), [*HYBRID, *ALONE])
with_gloo = pytest.mark.parametrize(("cpu", "eager"), HYBRID)


def exact(seed: float = 1.0) -> dict[str, bytes]:
    return bits(state("cpu", seed=seed))


def works(ranks: DeviceRanks, source: int, receiver: int) -> None:
    """These two ranks can still move a state."""

    def work(rank: int, pg: Any) -> Any:
        if rank == source:
            send(pg, receiver, state(seed=5.0), 10.0)
        return bits(receive(pg, source, 10.0)) if rank == receiver else None

    assert ranks.run(work, deadline=DEADLINE)[receiver] == exact(5.0)


def new_group_works(cpu: bool, eager: bool) -> None:
    with DeviceRanks(2, cpu=cpu, eager=eager) as ranks:
        works(ranks, 0, 1)


def none_would_end(ranks: DeviceRanks) -> None:
    assert not any(backend_of(pg).process_would_end for pg in ranks.pgs)


def names(error: BaseException | None, rank: int, *phases: str) -> None:
    """The error blames this rank alone, and says what was going on."""
    causes = causes_of(error)
    assert set(causes) == {rank}
    assert f"rank {rank}" in str(causes[rank])
    if phases and isinstance(causes[rank], transfuse.PeerTimeout):
        assert any(phase in str(causes[rank]) for phase in phases), str(causes[rank])


# ------------------------------------------------------------------------------------------------------------- absent


@every_kind
class TestAbsent:
    def test_the_source(self, cpu: bool, eager: bool) -> None:
        def work(rank: int, pg: Any) -> Any:
            return receive(pg, 0, SECONDS, zeros(state("cpu"))) if rank == 1 else None

        with DeviceRanks(2, cpu=cpu, eager=eager) as ranks:
            end = ranks.outcomes(work, deadline=DEADLINE)[1]
            assert isinstance(end.error, transfuse.PeerTimeout)
            assert end.error.torn == ()
            assert end.seconds < 2 * SECONDS
            names(end.error, 0, "waiting for the offer", "whose turn")
            none_would_end(ranks)
        new_group_works(cpu, eager)

    def test_the_receiver(self, cpu: bool, eager: bool) -> None:
        def work(rank: int, pg: Any) -> Any:
            return send(pg, 1, state(), SECONDS) if rank == 0 else None

        with DeviceRanks(2, cpu=cpu, eager=eager) as ranks:
            end = ranks.outcomes(work, deadline=DEADLINE)[0]
            assert isinstance(end.error, transfuse.SendFailed)
            assert end.seconds < 2 * SECONDS
            names(end.error, 1, "waiting for the receiver", "offer", "want", "whose turn")
            none_would_end(ranks)
        new_group_works(cpu, eager)


@with_gloo
def test_an_absent_source_of_two_costs_nothing(cpu: bool, eager: bool) -> None:
    def work(rank: int, pg: Any) -> Any:
        if rank == 1:
            return send(pg, 2, state(), 3.0)
        return bits(receive(pg, [0, 1], 3.0)) if rank == 2 else None

    with DeviceRanks(3, cpu=cpu, eager=eager) as ranks:
        assert ranks.run(work, deadline=DEADLINE)[2] == exact()
        none_would_end(ranks)
        works(ranks, 1, 2)


@with_gloo
def test_an_absent_receiver_of_three_does_not_disturb_the_others(cpu: bool, eager: bool) -> None:
    def work(rank: int, pg: Any) -> Any:
        if rank == 0:
            return send(pg, [1, 2, 3], state(), SECONDS)
        return bits(receive(pg, 0, SECONDS)) if rank != 3 else None

    with DeviceRanks(4, cpu=cpu, eager=eager) as ranks:
        sent, one, two, _ = ranks.outcomes(work, deadline=DEADLINE)
        assert one.get() == two.get() == exact()
        names(sent.error, 3)
        none_would_end(ranks)
    new_group_works(cpu, eager)


# ------------------------------------------------------------------------------------------------- frozen accelerators


def frozen(
    ranks: DeviceRanks, sources: list[int], receivers: list[int], lost: int, *, target: bool = True, midway: bool = True
) -> tuple[list[Outcome[Any]], dict[int, Any]]:
    """Move a state; the accelerator of ``lost`` freezes midway, or before. The outcomes, and the receivers' targets."""
    targets: dict[int, Any] = {}

    def work(rank: int, pg: Any) -> Any:
        def show(progress: dict[int, transfuse.Progress]) -> None:
            if rank == lost and any(one.bytes for one in progress.values()):
                backend_of(pg).freeze()

        if rank == lost and not midway:
            backend_of(pg).freeze()
        if rank in sources:
            rate = 12.0 * (1 << 20) * len(receivers)
            return send(pg, receivers, state(), SECONDS, progress=show, max_bytes_per_second=rate)
        targets[rank] = zeros(state("cpu")) if target else None
        return bits(receive(pg, sources, SECONDS, targets[rank], progress=show))

    return ranks.outcomes(work, deadline=DEADLINE), targets


def stay(ranks: DeviceRanks, lost: int, targets: dict[int, Any]) -> None:
    """Nothing is written to the targets when the lost rank comes back."""
    reads: list[Any] = []
    for thawed in (False, True):
        if thawed:
            backend_of(ranks.pgs[lost]).thaw()
            time.sleep(0.3)
        reads.append(ranks.run(lambda rank, pg: bits(targets[rank]) if targets.get(rank) else None, deadline=DEADLINE))
    assert reads[0] == reads[1]


@pytest.mark.parametrize("midway", [True, pytest.param(False, marks=pytest.mark.soak)])
@every_kind
def test_a_frozen_source(cpu: bool, eager: bool, midway: bool) -> None:
    with DeviceRanks(2, cpu=cpu, eager=eager) as ranks:
        (sent, received), targets = frozen(ranks, [0], [1], 0, midway=midway)
        names(received.error, 0)
        names(sent.error, 1)
        assert max(sent.seconds, received.seconds) < 3.5 * SECONDS
        stay(ranks, 0, targets)
    new_group_works(cpu, eager)


@pytest.mark.parametrize("midway", [True, pytest.param(False, marks=pytest.mark.soak)])
@every_kind
def test_a_frozen_receiver(cpu: bool, eager: bool, midway: bool) -> None:
    with DeviceRanks(2, cpu=cpu, eager=eager) as ranks:
        (sent, received), _ = frozen(ranks, [0], [1], 1, midway=midway)
        names(sent.error, 1)
        names(received.error, 0)
        assert max(sent.seconds, received.seconds) < 3.5 * SECONDS
        none_would_end(ranks)
    new_group_works(cpu, eager)


@pytest.mark.parametrize("target", [True, False])
@with_gloo
def test_a_frozen_source_of_two(cpu: bool, eager: bool, target: bool) -> None:
    with DeviceRanks(3, cpu=cpu, eager=eager) as ranks:
        (_, other, received), targets = frozen(ranks, [0, 1], [2], 0, target=target, midway=False)
        assert received.get() == exact()
        other.get()
        stay(ranks, 0, targets)
        none_would_end(ranks)
        works(ranks, 1, 2)


@with_gloo
def test_a_frozen_receiver_of_three(cpu: bool, eager: bool) -> None:
    with DeviceRanks(4, cpu=cpu, eager=eager) as ranks:
        (sent, one, two, _), _ = frozen(ranks, [0], [1, 2, 3], 3)
        assert one.get() == two.get() == exact()
        names(sent.error, 3)
        none_would_end(ranks)
        works(ranks, 0, 1)
        works(ranks, 2, 0)


# --------------------------------------------------------------------------------------------------- lost processes


def lose(plan: Plan, how: str) -> dict[int, End]:
    """Run a plan, kill or freeze its lost rank midway, and thaw it after the others have ended; the others' ends."""
    n = len({*plan.sources, *plan.receivers})
    with Fleet(n, group=False) as fleet:
        fleet.start(take_part, plan)
        fleet.wait_for(plan.lost, "moving", DEADLINE)
        (fleet.kill if how == "killed" else fleet.freeze)(plan.lost)
        others = [rank for rank in range(n) if rank != plan.lost]
        for rank in others:
            fleet.wait_for(rank, "ended", DEADLINE)
        if how == "frozen":
            fleet.thaw(plan.lost)
        for rank in others:
            fleet.tell(rank, "go on")
        return {rank: end.get() for rank, end in zip(others, fleet.outcomes(DEADLINE, others), strict=True)}


def check(plan: Plan, how: str, ends: dict[int, End]) -> None:
    """What holds for every lost process."""
    for rank, end in ends.items():
        assert end.changed == (), end
        assert end.again, end
        assert end.seconds < 3.5 * plan.seconds, end
        assert not end.process_would_end
        alone = (plan.sources if rank in plan.receivers else plan.receivers) == (plan.lost,)
        if alone or rank in plan.sources:
            if plan.lost in (plan.receivers if rank in plan.sources else plan.sources):
                names(end.error, plan.lost)
        else:
            assert end.error is None, end.error
            assert end.exact
    # A killed process is noticed at once where there is gloo, or a stream.
    if how == "killed" and (plan.cpu or (over_streams() and not plan.absent)) and len(ends) == 1:
        assert next(iter(ends.values())).seconds < plan.seconds + 1.0


HOW = pytest.mark.parametrize("how", ["killed", "frozen"])


@HOW
@pytest.mark.parametrize(("cpu", "eager"), [HYBRID[0], HYBRID[1], ALONE[0]])
def test_a_source_that_is_lost(how: str, cpu: bool, eager: bool) -> None:
    plan = Plan(cpu, eager, (0,), (1,), 0)
    check(plan, how, lose(plan, how))


@HOW
@with_gloo
def test_a_receiver_of_three_that_is_lost(how: str, cpu: bool, eager: bool) -> None:
    # A wait on gloo that runs out closes this rank's connections to all others. Only a frozen receiver causes one.
    plan = Plan(cpu, eager, (0,), (1, 2, 3), 3, same_group=how == "killed")
    check(plan, how, lose(plan, how))


@HOW
@with_gloo
def test_a_source_of_two_that_is_lost(how: str, cpu: bool, eager: bool) -> None:
    plan = Plan(cpu, eager, (0, 1), (2,), 0, same_group=True)
    check(plan, how, lose(plan, how))


@pytest.mark.parametrize(("cpu", "eager"), [HYBRID[0], ALONE[1]])
def test_a_source_that_is_killed_before_its_offer(cpu: bool, eager: bool) -> None:
    plan = Plan(cpu, eager, (0,), (1,), 0, absent=True)
    check(plan, "killed", lose(plan, "killed"))


@pytest.mark.soak
@HOW
@pytest.mark.parametrize("waits", ["stream", "host", "nccl"])
@pytest.mark.parametrize("absent", [True, False])
@pytest.mark.parametrize("in_place", [True, False])
@pytest.mark.parametrize("lost", ["source of one", "receiver of one", "source of two", "receiver of three"])
@every_kind
def test_lost_processes_of_every_kind(
    cpu: bool, eager: bool, lost: str, in_place: bool, absent: bool, waits: Any, how: str
) -> None:
    who, number = lost.split(" of ")
    if not cpu and number != "one":
        pytest.skip("without gloo nothing is promised to the others")
    several = {"one": 1, "two": 2, "three": 3}[number]
    sources = tuple(range(several)) if who == "source" else (0,)
    receivers = tuple(len(sources) + n for n in range(several if who == "receiver" else 1))
    gone = 0 if who == "source" else receivers[-1]
    plan = Plan(cpu, eager, sources, receivers, gone, absent=absent, in_place=in_place, waits=waits)
    check(plan, how, lose(plan, how))


# ----------------------------------------------------------------------------------------- what the caller itself does


@with_gloo
def test_fresh_memory_is_not_written_to_while_the_callers_stream_may_still_use_it(
    cpu: bool, eager: bool, device: ModuleType
) -> None:
    def work(rank: int, pg: Any) -> Any:
        if rank == 0:
            time.sleep(0.3)
            return send(pg, 1, state(), 5.0)
        # Meanwhile the caller's stream falls behind. What is allocated there is overwritten in its order.
        calls = iter([0.3] * 3)
        return bits(receive(pg, 0, 5.0, progress=lambda _: device.sleep(next(calls, 0.0))))

    with DeviceRanks(2, cpu=cpu, eager=eager) as ranks:
        assert ranks.run(work, deadline=DEADLINE)[1] == exact()


@every_kind
class TestTheGroupStaysUsable:
    @pytest.mark.parametrize("who", [0, 1])
    def test_after_an_interrupt(self, cpu: bool, eager: bool, who: int) -> None:
        def show(progress: dict[int, transfuse.Progress]) -> None:
            if any(one.bytes for one in progress.values()):
                raise KeyboardInterrupt

        def work(rank: int, pg: Any) -> Any:
            shown = show if rank == who else False
            if rank == 0:
                return send(pg, 1, state(), 5.0, max_bytes_per_second=12.0 * (1 << 20), progress=shown)
            return receive(pg, 0, 5.0, zeros(state("cpu")), progress=shown)

        with DeviceRanks(2, cpu=cpu, eager=eager) as ranks:
            ends = ranks.outcomes(work, deadline=DEADLINE)
            assert isinstance(ends[who].error, KeyboardInterrupt)
            refused = causes_of(ends[1 - who].error)[who]
            assert isinstance(refused, transfuse.PeerRefused)
            assert refused.kind == "KeyboardInterrupt"
            assert max(end.seconds for end in ends) < 4.0
            none_would_end(ranks)
            works(ranks, 0, 1)

    def test_after_a_source_that_changes(self, cpu: bool, eager: bool) -> None:
        def work(rank: int, pg: Any) -> Any:
            tensors = state()

            def show(progress: dict[int, transfuse.Progress]) -> None:
                if any(one.bytes for one in progress.values()):
                    tensors["w0"].add_(1.0)

            if rank == 0:
                return send(pg, 1, tensors, 5.0, max_bytes_per_second=12.0 * (1 << 20), progress=show)
            return receive(pg, 0, 5.0)

        with DeviceRanks(2, cpu=cpu, eager=eager) as ranks:
            sent, received = ranks.outcomes(work, deadline=DEADLINE)
            assert isinstance(causes_of(sent.error)[1], transfuse.SourceMutated)
            assert isinstance(received.error, transfuse.SourceMutated)
            assert "w0" in str(received.error)
            none_would_end(ranks)
            works(ranks, 0, 1)

    def test_after_a_target_that_does_not_fit(self, cpu: bool, eager: bool) -> None:
        def work(rank: int, pg: Any) -> Any:
            if rank == 0:
                return send(pg, 1, state(), 5.0)
            return receive(pg, 0, 5.0, {**zeros(state("cpu")), "w0": torch.zeros(3, device="phantom")})

        with DeviceRanks(2, cpu=cpu, eager=eager) as ranks:
            sent, received = ranks.outcomes(work, deadline=DEADLINE)
            assert isinstance(received.error, transfuse.TargetMismatch)
            assert isinstance(causes_of(sent.error)[1], transfuse.PeerRefused)
            none_would_end(ranks)
            works(ranks, 0, 1)
