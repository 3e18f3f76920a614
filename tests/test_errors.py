"""Errors reach both ends, in time, with names; and one receiver's failure is its own."""

from __future__ import annotations

import copy
import os
import pickle
import signal
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist

import hostile
import transfuse
from moves import CPU, TIMEOUT, Pair, pair
from tampering import Passing, Tampering
from transfuse.limits import Limits
from transfuse.memory import packing as places
from transfuse.session import accepting, negotiation, source
from transfuse.session.receive import Receive
from transfuse.testing.exact import assert_exact
from transfuse.testing.ranks import Fleet, Ranks, announce
from transfuse.wire import messages
from transfuse.wire.channel import Line
from transfuse.wire.group import FIRST_TAG, Group

pytestmark = pytest.mark.usefixtures("group_route")

SHORT = timedelta(seconds=1.5)


@pytest.fixture
def two() -> Iterator[Pair]:
    with pair() as ranks:
        yield ranks


def test_steps_that_differ_are_an_error_at_both_ends_before_data(two: Pair) -> None:
    own = torch.zeros(2)
    sent, received = two.errors({"w": torch.ones(2)}, {"w": own}, source_step=3, step=4)
    assert isinstance(received, transfuse.StepMismatch)
    assert isinstance(sent, transfuse.SendFailed)
    assert isinstance(sent.causes[1], transfuse.StepMismatch)
    assert "step 3" in str(received)
    assert "step 4" in str(sent)
    assert not own.any()


@pytest.mark.parametrize(("mine", "theirs"), [(3, None), (3, 3), (None, None)])
def test_a_receiver_that_names_no_step_takes_any(two: Pair, mine: int | None, theirs: int | None) -> None:
    assert two.move({"n": 1}, source_step=mine, step=theirs) == {"n": 1}


def test_a_receiver_without_a_source_times_out() -> None:
    with Ranks(2) as ranks:
        started = time.monotonic()
        outcomes = ranks.outcomes(
            lambda rank, pg: transfuse.PGTransport(pg, SHORT, CPU).recv_checkpoint(0) if rank == 1 else None
        )
    error = outcomes[1].error
    assert isinstance(error, transfuse.PeerTimeout)
    assert isinstance(error, TimeoutError)
    assert "timed out" in str(error)
    assert "rank 0" in str(error)
    assert "waiting for the offer" in str(error)
    assert 1.4 < error.seconds < 3.0
    assert time.monotonic() - started < 6.0


def test_a_source_without_a_receiver_times_out() -> None:
    with Ranks(2) as ranks:
        outcomes = ranks.outcomes(
            lambda rank, pg: transfuse.PGTransport(pg, SHORT, CPU).send_checkpoint([1], {"a": 1}) if rank == 0 else None
        )
    error = outcomes[0].error
    assert isinstance(error, transfuse.SendFailed)
    cause = error.causes[1]
    assert isinstance(cause, transfuse.PeerTimeout)
    assert cause.rank == 1
    assert "waiting for the want" in str(cause)


def test_wrong_arguments_are_refused_at_once() -> None:
    with Ranks(2) as ranks:
        transport = transfuse.PGTransport(ranks.pgs[0], TIMEOUT, CPU)
        with pytest.raises(ValueError, match="twice"):
            transport.send_checkpoint([1, 1], {})
        with pytest.raises(ValueError, match="not in the group of 2"):
            transport.recv_checkpoint(2)
        with pytest.raises(TypeError, match="src_rank takes a rank"):
            transport.recv_checkpoint("1")  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="positive"):
            transfuse.PGTransport(ranks.pgs[0], timedelta(0), CPU)
        with pytest.raises(TypeError, match="gamma"):
            transfuse.PGTransport(ranks.pgs[0], TIMEOUT, CPU, gamma=True)  # type: ignore[call-arg]
        transport.send_checkpoint([], {"a": 1})
        assert transport.report is not None
        assert transport.report.bytes == 0


def big_state() -> dict[str, torch.Tensor]:
    return {f"w{i:02}": torch.full((1 << 20,), float(i)) for i in range(80)}


def test_a_receivers_failure_midway_reaches_the_source_within_a_burst(two: Pair) -> None:
    """The receiver's progress callback raises: its error at its own end, its cause at the other."""
    calls: list[int] = []

    def interrupt(progress: dict[int, transfuse.Progress]) -> None:
        calls.append(progress[0].bytes)
        if progress[0].bytes > 0:
            raise RuntimeError("stop here")

    started = time.monotonic()
    sent, received = two.errors(big_state(), {k: torch.zeros(1 << 20) for k in big_state()}, progress=interrupt)
    assert time.monotonic() - started < TIMEOUT.total_seconds()
    assert isinstance(received, RuntimeError)
    assert "stop here" in str(sent)
    assert isinstance(sent, transfuse.SendFailed)
    assert isinstance(sent.causes[1], transfuse.PeerRefused)
    assert two.move({"still": "usable"}) == {"still": "usable"}


def test_a_sources_failure_midway_reaches_the_receiver_within_a_burst(two: Pair) -> None:
    def interrupt(progress: dict[int, transfuse.Progress]) -> None:
        if progress[1].bytes > 0:
            raise RuntimeError("stop here")

    target = {name: torch.full((1 << 20,), -1.0) for name in big_state()}
    sent, received = two.errors(big_state(), target, source={"progress": interrupt})
    assert isinstance(sent, RuntimeError)
    assert isinstance(received, transfuse.PeerRefused)
    assert "stop here" in str(received)
    touched = {f"['{name}']" for name, t in target.items() if not (t == -1.0).all()}
    assert touched <= set(received.torn)
    assert len(received.torn) < 80
    assert two.move({"still": "usable"}) == {"still": "usable"}


def tampered(
    tamper: Any, state: object, target: object | None = None, timeout: timedelta = TIMEOUT
) -> tuple[Any, Any, Any]:
    """Send through a tampering group; outcomes and the receiver's report."""
    with Ranks(2) as ranks:
        reports = {}

        def work(rank: int, pg: Any) -> Any:
            if rank == 0:
                return transfuse.PGTransport(Tampering(pg, tamper), timeout, CPU).send_checkpoint([1], state)
            transport = transfuse.PGTransport(pg, timeout, CPU, None if target is None else lambda: target)
            try:
                return transport.recv_checkpoint(0)
            finally:
                reports[1] = transport.report

        sent, received = ranks.outcomes(work)
        return sent, received, reports[1]


@pytest.mark.parametrize("where", ["large", "packed", "strided"])
def test_a_damaged_parcel_is_asked_for_again(where: str) -> None:
    state = {
        "large": torch.randn(1 << 20),
        "packed": [torch.randn(10), torch.randn(20)],
        "strided": torch.randn(2, 1 << 20)[:, ::2],
    }
    mine = {where: state[where]}
    size = 4 * (1 << 20) if where != "packed" else 120
    damaged: list[int] = []

    def tamper(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.numel() == size and not damaged:
            damaged.append(1)
            tensor[7] ^= 1
        return tensor

    sent, received, report = tampered(tamper, mine)
    sent.get()
    assert_exact(mine, received.get())
    assert damaged
    assert report.repaired == 1


def test_damaged_digests_cost_no_more_than_their_parcels() -> None:
    """They are sealed apart from the record that they come with: that one still says how it goes on."""
    state, damaged = {"w": torch.randn(3 << 20)}, list[int]()

    def tamper(tensor: torch.Tensor) -> torch.Tensor:
        head = messages.HEADER_BYTES
        if head < tensor.numel() < 1000 and int(tensor[6]) == messages.Message.SENT and not damaged:
            damaged.append((tensor.numel() - head) // 8 - 1)
            tensor[head] ^= 1
        return tensor

    sent, received, report = tampered(tamper, state)
    sent.get()
    assert_exact(state, received.get())
    assert damaged == [2], "one of three parcels comes in another burst"
    assert report.repaired == 2


def test_damage_that_stays_is_an_error_that_names_the_leaf() -> None:
    state = {"fine": torch.randn(1 << 20), "bad": torch.full((1 << 20,), 2.0)}

    def tamper(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.numel() == 4 << 20 and tensor[3] == 64 and tensor[7] == 64:
            tensor[9] ^= 1
        return tensor

    own = {"fine": torch.zeros(1 << 20), "bad": torch.zeros(1 << 20)}
    sent, received, report = tampered(tamper, state, own)
    assert isinstance(received.error, transfuse.CorruptData)
    assert received.error.leaves == ("['bad']",)
    assert "['bad']" in str(received.error)
    assert "['fine']" not in str(received.error).split("torn")[0]
    assert set(received.error.torn) == {"['fine']", "['bad']"}
    assert "['bad']" in str(sent.error)
    assert report.repaired == 3


def test_a_damaged_control_message_is_an_error_never_data() -> None:
    def tamper(tensor: torch.Tensor) -> torch.Tensor:
        if 100 < tensor.numel() < 1000:
            tensor[50] ^= 4
        return tensor

    sent, received, _ = tampered(tamper, {f"w{i}": torch.ones(3) for i in range(5)})
    assert isinstance(received.error, transfuse.ProtocolError)
    assert "digest" in str(received.error)
    assert "digest" in str(sent.error)


def test_a_foreign_message_is_an_error_never_data() -> None:
    def tamper(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.numel() == messages.HEADER_BYTES:
            tensor[:4] = torch.frombuffer(bytearray(b"HTTP"), dtype=torch.uint8)
        return tensor

    _, received, _ = tampered(tamper, {"w": torch.ones(3)}, timeout=SHORT)
    assert isinstance(received.error, transfuse.ProtocolError)
    assert "not a transfuse message" in str(received.error)


def test_another_wire_version_is_named() -> None:
    def tamper(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.numel() == messages.HEADER_BYTES:
            tensor[4:6] = torch.frombuffer(bytearray(struct.pack("<H", 9)), dtype=torch.uint8)
        return tensor

    _, received, _ = tampered(tamper, {"w": torch.ones(3)}, timeout=SHORT)
    assert "wire version 9" in str(received.error)


def test_verify_can_be_turned_off_and_insisted_upon(two: Pair) -> None:
    assert two.move({"w": torch.ones(2)}, verify=False)["w"].sum() == 2
    assert two.move({"w": torch.ones(2)}, source={"verify": False})["w"].sum() == 2
    _, received = two.errors({"w": torch.ones(2)}, source={"verify": False}, verify=True)
    assert isinstance(received, transfuse.StateError)


def test_a_fresh_receive_beyond_the_cap_is_refused_before_it_allocates(two: Pair) -> None:
    sent, received = two.errors({"w": torch.ones(1000)}, max_receive_bytes=3999)
    assert isinstance(received, transfuse.LimitExceeded)
    assert "4000" in str(received)
    assert "3999" in str(sent)
    own = torch.zeros(1000)
    two.move({"w": torch.ones(1000)}, {"w": own}, max_receive_bytes=3999)
    assert own.all()


# ------------------------------------------------------------------------------------------------- several receivers


def test_several_receivers_one_refusing_one_absent() -> None:
    state = {"w": torch.randn(2_000_000), "n": 3}

    def work(rank: int, pg: Any) -> Any:
        if rank == 0:
            return transfuse.PGTransport(pg, SHORT, CPU).send_checkpoint([1, 2, 3, 4], state)
        if rank == 2:
            return None  # Absent.
        target = {"w": torch.zeros(3)} if rank == 3 else {"w": torch.zeros(2_000_000)}
        return transfuse.PGTransport(pg, SHORT, CPU, lambda: target).recv_checkpoint(0)

    with Ranks(5) as ranks:
        outcomes = ranks.outcomes(work)
    for healthy in (1, 4):
        assert_exact(state, outcomes[healthy].get(), in_place=True)
    error = outcomes[0].error
    assert isinstance(error, transfuse.SendFailed)
    assert set(error.causes) == {2, 3}
    assert error.completed == (1, 4)
    assert isinstance(error.causes[2], transfuse.PeerTimeout)
    assert isinstance(error.causes[3], transfuse.PeerRefused)
    assert "['w']" in str(error)


class Slow:
    """A group whose receives of parcels take their time."""

    def __init__(self, pg: Any, seconds: float) -> None:
        self._pg, self._seconds = pg, seconds

    def name(self) -> str:
        return "gloo"

    def rank(self) -> int:
        return int(self._pg.rank())

    def send(self, tensors: list[torch.Tensor], rank: int, tag: int) -> Any:
        return self._pg.send(tensors, rank, tag)

    def recv(self, tensors: list[torch.Tensor], rank: int, tag: int) -> Any:
        if tensors[0].numel() > 1 << 16:
            time.sleep(self._seconds)
        return self._pg.recv(tensors, rank, tag)


def test_giving_up_an_absent_receiver_does_not_cut_off_a_slow_one() -> None:
    """On gloo an expired wait closes every connection of the rank: it must not expire while others need theirs."""
    state = {"w": torch.randn(24 << 20)}

    def work(rank: int, pg: Any) -> Any:
        timeout = timedelta(seconds=1)
        if rank == 0:
            return transfuse.PGTransport(pg, timeout, CPU).send_checkpoint([1, 2], state)
        if rank == 2:
            return None
        started = time.monotonic()
        arrived = transfuse.PGTransport(Slow(pg, 0.03), timeout, CPU).recv_checkpoint(0)
        assert time.monotonic() - started > 2.0, "the case is meant to outlast the timeout"
        return arrived

    with Ranks(3) as ranks:
        outcomes = ranks.outcomes(work)
    assert_exact(state, outcomes[1].get())
    error = outcomes[0].error
    assert isinstance(error, transfuse.SendFailed)
    assert isinstance(error.causes[2], transfuse.PeerTimeout)
    assert error.completed == (1,)


def test_a_failure_to_encode_reaches_every_receiver() -> None:
    def work(rank: int, pg: Any) -> Any:
        transport = transfuse.PGTransport(pg, TIMEOUT, CPU)
        return transport.send_checkpoint([1, 2], {"f": lambda: 1}) if rank == 0 else transport.recv_checkpoint(0)

    with Ranks(3) as ranks:
        started = time.monotonic()
        outcomes = ranks.outcomes(work)
    assert time.monotonic() - started < 5.0
    assert isinstance(outcomes[0].error, transfuse.UnsupportedLeaf)
    for rank in (1, 2):
        assert "['f']" in str(outcomes[rank].error)


def test_many_receivers() -> None:
    state = {"w": torch.randn(300_000), "l": [torch.randn(10) for _ in range(20)]}

    def work(rank: int, pg: Any) -> Any:
        transport = transfuse.PGTransport(pg, TIMEOUT, CPU)
        return transport.send_checkpoint(range(1, 9), state) if rank == 0 else transport.recv_checkpoint(0)

    with Ranks(9) as ranks:
        for arrived in ranks.run(work)[1:]:
            assert_exact(state, arrived)


def test_concurrent_transfers_between_the_same_ranks_do_not_mix() -> None:
    """Both directions at once, and two transfers the same way, each from a thread of its own."""
    states = {i: {"w": torch.full((500_000,), float(i)), "i": i} for i in range(4)}

    def work(rank: int, pg: Any) -> dict[int, Any]:
        found: dict[int, Any] = {}

        def send(i: int) -> None:
            transfuse.PGTransport(pg, TIMEOUT, CPU).send_checkpoint([1 - rank], states[i])

        def receive(i: int) -> None:
            found[i] = transfuse.PGTransport(pg, TIMEOUT, CPU).recv_checkpoint(1 - rank)

        jobs = [(send, rank * 2), (send, rank * 2 + 1), (receive, 0), (receive, 1)]
        threads = [threading.Thread(target=job, args=(i,)) for job, i in jobs]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return found

    with Ranks(2) as ranks:
        for rank, found in enumerate(ranks.run(work)):
            numbers = sorted(state["i"] for state in found.values())
            assert numbers == [2 - rank * 2, 3 - rank * 2]
            for state in found.values():
                assert_exact(states[state["i"]], state)


class Untagged:
    """A group that, like NCCL, ignores tags and runs what was posted for a pair in order."""

    def __init__(self, pg: Any) -> None:
        self._pg = pg

    def rank(self) -> int:
        return int(self._pg.rank())

    def send(self, tensors: list[torch.Tensor], rank: int, tag: int) -> Any:
        return self._pg.send(tensors, rank, 0)

    def recv(self, tensors: list[torch.Tensor], rank: int, tag: int) -> Any:
        return self._pg.recv(tensors, rank, 0)


def test_a_group_without_tags_takes_transfers_in_turn() -> None:
    states = {i: {"w": torch.full((12_000_000,), float(i)), "i": i, "s": [torch.ones(5)] * 3} for i in range(2)}

    def work(rank: int, pg: Any) -> Any:
        group = Untagged(pg)
        result = {}

        def send() -> None:
            transfuse.PGTransport(group, TIMEOUT, CPU).send_checkpoint([1 - rank], states[rank])

        def receive() -> None:
            result["state"] = transfuse.PGTransport(group, TIMEOUT, CPU).recv_checkpoint(1 - rank)

        threads = [threading.Thread(target=job) for job in ((send, receive) if rank == 0 else (receive, send))]
        for thread in threads:
            thread.start()
            time.sleep(0.05)
        for thread in threads:
            thread.join()
        return result["state"]

    with Ranks(2) as ranks:
        for rank, arrived in enumerate(ranks.run(work)):
            assert_exact(states[1 - rank], arrived)


def test_errors_survive_pickling_and_copying() -> None:
    samples: list[transfuse.TransfuseError] = [
        transfuse.PeerTimeout(3, "waiting", 1.5),
        transfuse.PeerRefused(1, "X", "because"),
        transfuse.UnsupportedLeaf("['a']", "no"),
        transfuse.TargetMismatch(["a", "b"]),
        transfuse.CorruptData(2, ["['w']"], "bad"),
        transfuse.SourceMutated(2, ["['w']"], "changed"),
        transfuse.SourcesDiffer("step 1 against 2"),
        transfuse.TornState(["['w']"]),
        transfuse.SendFailed({1: transfuse.PeerLost(1, "gone")}, [2]),
        transfuse.ReceiveFailed({1: transfuse.PeerLost(1, "gone")}),
    ]
    for error in samples:
        error.torn, error.received, error.missing = ("['x']",), ("['y']",), ("['x']", "['z']")
        for again in (pickle.loads(pickle.dumps(error)), copy.copy(error)):
            assert type(again) is type(error)
            assert str(again) == str(error)
            assert (again.torn, again.received, again.missing) == (error.torn, error.received, error.missing)


# ---------------------------------------------------------------------------------------------- processes that die


def move_slowly(rank: int, count: int) -> Any:
    """Rank 0 sends ``count`` tensors of 4 MiB, the others receive in place; both announce when bytes move."""
    announced: list[int] = []

    def show(progress: dict[int, transfuse.Progress]) -> None:
        if any(p.bytes for p in progress.values()) and not announced:
            announced.append(1)
            announce("moving")

    tensors = {f"w{i:03}": torch.full((1 << 20,), float(i + 1 if rank == 0 else 0)) for i in range(count)}
    world = cast(Any, dist.group.WORLD)
    transport = transfuse.PGTransport(world, timedelta(seconds=6), CPU, lambda: tensors, progress=show)
    dist.barrier()
    if rank == 0:
        transport.send_checkpoint(list(range(1, dist.get_world_size())), tensors)
        return None
    try:
        transport.recv_checkpoint(0)
    except transfuse.TransfuseError as error:
        touched = {f"['{name}']" for name, tensor in tensors.items() if tensor.any()}
        return type(error).__name__, str(error), touched, set(error.torn)
    return all(bool((tensor == i + 1).all()) for i, tensor in enumerate(tensors.values()))


def test_a_source_that_dies_midway_leaves_an_error_that_lists_the_torn_leaves() -> None:
    with Fleet(2) as fleet:
        fleet.start(move_slowly, 250)
        fleet.wait_for(1, "moving")
        fleet.kill(0)
        died, received = fleet.outcomes(deadline=30)
    assert died.error is not None
    name, text, touched, torn = received.get()
    assert name in ("PeerLost", "PeerTimeout")
    assert "rank 0" in text
    assert touched <= torn
    assert 0 < len(torn) < 250
    assert len(torn - touched) <= 8, "beyond what was touched, only what was posted ahead"


def test_a_source_that_freezes_is_given_up_within_the_timeout() -> None:
    with Fleet(2) as fleet:
        fleet.start(move_slowly, 250)
        fleet.wait_for(1, "moving")
        fleet.freeze(0)
        started = time.monotonic()
        (received,) = fleet.outcomes(deadline=30, ranks=[1])
        assert time.monotonic() - started < 12
    name, text, touched, torn = received.get()
    assert name == "PeerTimeout"
    assert "timed out" in text
    assert touched <= torn


def test_a_receiver_that_dies_does_not_disturb_the_others() -> None:
    with Fleet(4) as fleet:
        fleet.start(move_slowly, 60)
        fleet.wait_for(2, "moving")
        fleet.kill(2)
        outcomes = fleet.outcomes(deadline=60)
    assert isinstance(outcomes[0].error, transfuse.SendFailed)
    assert set(outcomes[0].error.causes) == {2}
    assert outcomes[1].get() is True
    assert outcomes[3].get() is True


def test_a_receiver_that_plans_for_longer_than_the_timeout_shows_signs_of_life(monkeypatch: pytest.MonkeyPatch) -> None:
    """The source's timeout is 1 s; the receiver thinks for 3."""
    accept = accepting.accept

    def slowly(*args: Any) -> Any:
        time.sleep(3)
        return accept(*args)

    monkeypatch.setattr(negotiation, "accept", slowly)
    with pair() as two:
        state = {"w": torch.randn(1000)}
        assert_exact(state, two.move(state, timeout=timedelta(seconds=1)))


def test_signs_of_life_keep_to_the_shorter_of_two_timeouts(monkeypatch: pytest.MonkeyPatch) -> None:
    """The source waits for 1 s, the receiver would for 20; it thinks for 3."""
    accept = accepting.accept

    def slowly(*args: Any) -> Any:
        time.sleep(3)
        return accept(*args)

    def work(rank: int, pg: Any) -> Any:
        transport = transfuse.PGTransport(pg, timedelta(seconds=1 if rank == 0 else 20), CPU)
        return transport.send_checkpoint([1], {"n": 1}) if rank == 0 else transport.recv_checkpoint(0)

    monkeypatch.setattr(negotiation, "accept", slowly)
    with Ranks(2) as ranks:
        assert ranks.run(work)[1] == {"n": 1}


@pytest.mark.parametrize("who", ["source", "receiver", "both"])
@pytest.mark.parametrize("tagged", [True, False])
def test_a_cancel_at_any_burst_ends_both_and_leaves_the_group_usable(who: str, tagged: bool) -> None:
    """States of one to six bursts, three under way, cancelled at every tick by either end or both."""
    with Ranks(2) as ranks, pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRANSFUSE_BURST_BYTES", str(1 << 16))
        patch.setenv("TRANSFUSE_PARCEL_BYTES", str(1 << 16))
        for bursts in range(1, 7):
            state = {"w": torch.full((bursts << 14,), 1.0)}
            for tick in range(1, bursts + 1):
                outcomes = ranks.outcomes(cancel_at, [state] * 2, [tick] * 2, [who] * 2, [tagged] * 2)
                for outcome in outcomes:
                    text = f"{bursts} bursts, cancelled at {tick}: {outcome.error!r}"
                    assert outcome.error is None or "stop" in str(outcome.error), text
                again = ranks.run(cancel_at, [state] * 2, [99] * 2, [who] * 2, [tagged] * 2)
                assert_exact(state, again[1])


def cancel_at(rank: int, pg: Any, state: Any, tick: int, who: str, tagged: bool) -> Any:
    ticks = []

    def show(progress: dict[int, transfuse.Progress]) -> None:
        ticks.append(1)
        if sum(p.bytes for p in progress.values()) >= tick << 16:
            raise RuntimeError("stop")

    wants = who == "both" or (who == "source") is (rank == 0)
    transport = transfuse.PGTransport(pg if tagged else Untagged(pg), TIMEOUT, CPU, progress=show if wants else False)
    return transport.send_checkpoint([1], state) if rank == 0 else transport.recv_checkpoint(0)


class Dying(Passing):
    """The world's group; its process dies when it begins to wait for the first answer to a burst."""

    def __init__(self) -> None:
        super().__init__(dist.group.WORLD)
        self._headers = 0

    def recv(self, tensors: list[torch.Tensor], rank: int, tag: int) -> Any:
        self._headers += tensors[0].numel() == messages.HEADER_BYTES
        if self._headers == 2:
            time.sleep(1.0)
            os.kill(os.getpid(), signal.SIGKILL)
        return super().recv(tensors, rank, tag)


def die_after_the_last_burst(rank: int) -> Any:
    timeout = timedelta(seconds=6)
    if rank == 0:
        transfuse.PGTransport(Dying(), timeout, CPU).send_checkpoint([1], {"w": torch.full((2 << 20,), 3.0)})
    own = torch.zeros(2 << 20)
    transfuse.PGTransport(cast(Any, dist.group.WORLD), timeout, CPU, lambda: {"w": own}).recv_checkpoint(0)
    return bool((own == 3.0).all())


def test_a_receiver_that_holds_everything_succeeds_though_its_source_is_gone() -> None:
    with Fleet(2) as fleet:
        fleet.start(die_after_the_last_burst)
        died, received = fleet.outcomes(deadline=40)
    assert died.error is not None
    assert received.get() is True


def test_a_receiver_that_builds_for_long_shows_signs_of_life(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    build = Receive._build

    def slowly(*args: Any) -> Any:
        time.sleep(3)
        return build(*args)

    monkeypatch.setattr(Receive, "_build", slowly)
    with pair() as two:
        state = {"w": torch.randn(1000)}
        assert_exact(state, two.move(state, timeout=timedelta(seconds=1)))


def test_a_call_that_was_interrupted_touches_nothing_afterwards(monkeypatch: pytest.MonkeyPatch) -> None:
    """The caller gives up while the receiver plans: no byte may land after the call has raised."""
    accept = accepting.accept

    def slowly(*args: Any) -> Any:
        time.sleep(2.5)
        return accept(*args)

    monkeypatch.setattr(negotiation, "accept", slowly)
    own = torch.zeros(1000)

    def interrupt(progress: dict[int, transfuse.Progress]) -> None:
        if progress[0].phase == "planning":
            raise RuntimeError("stop")

    with pair() as two:
        sent, received = two.errors({"w": torch.ones(1000)}, {"w": own}, progress=interrupt)
        time.sleep(2.5)
        assert not own.any()
    assert "stop" in str(received)
    assert "stop" in str(sent)


@pytest.mark.parametrize("same", [True, False])
@pytest.mark.parametrize("verify", [None, False])
def test_what_was_kept_counts_only_once_a_source_has_confirmed_it(two: Pair, verify: bool | None, same: bool) -> None:
    """The source has gone on meanwhile, or not, without saying a step; it compares also if it verifies nothing."""
    own = {name: torch.full((1 << 20,), -1.0) for name in big_state()}

    def interrupt(progress: dict[int, transfuse.Progress]) -> None:
        if progress[1].bytes > 0:
            raise RuntimeError("stop here")

    _, error = two.errors(big_state(), own, source={"progress": interrupt})
    assert isinstance(error, transfuse.PeerRefused)
    assert error.partial is not None
    later = {name: tensor + (0 if same else 1000) for name, tensor in big_state().items()}

    def work(rank: int, pg: Any) -> Any:
        mover = transfuse.PGTransport(pg, TIMEOUT, CPU, lambda: own, verify=verify if rank == 0 else None)
        if rank == 0:
            return mover.send_checkpoint([1], later)
        assert_exact(later, mover.recv_checkpoint(0, resume=error.partial), in_place=True)
        assert mover.report is not None
        return mover.report.kept_bytes

    kept = two.ranks.run(work)[1]
    assert kept == (error.partial.received_bytes if same else 0)


@pytest.mark.parametrize("silent", [True, False])
def test_what_was_kept_is_no_state_if_its_source_leaves_before_it_has_compared_it(two: Pair, silent: bool) -> None:
    state, before = {"w": torch.ones(1000)}, set(threading.enumerate())

    def build(*_: object) -> None:
        raise transfuse.StateError("cannot be built")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Receive, "_build", build)
        _, error = two.errors(state, timeout=SHORT)
    assert isinstance(error, transfuse.StateError)
    assert error.partial.received_bytes == 4000

    def leave(*_: object) -> None:
        time.sleep(2 * SHORT.total_seconds() if silent else 0)
        raise transfuse.StateError("no more")

    def work(rank: int, pg: Any) -> Any:
        mover = transfuse.PGTransport(pg, SHORT, CPU)
        return mover.send_checkpoint([1], state) if rank == 0 else mover.recv_checkpoint(0, resume=error.partial)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(source._Serving, "_compare", leave)
        received = two.ranks.outcomes(work)[1].error
    if silent:
        assert isinstance(received, transfuse.PeerTimeout)
        assert received.seconds > 0.9 * SHORT.total_seconds()
    else:
        assert isinstance(received, transfuse.PeerRefused)
    assert not [thread for thread in set(threading.enumerate()) - before if thread.name.startswith("transfuse")]


def test_an_interrupted_receive_still_says_what_it_tore(two: Pair) -> None:
    target = {name: torch.full((1 << 20,), -1.0) for name in big_state()}

    def interrupt(progress: dict[int, transfuse.Progress]) -> None:
        if progress[0].bytes > 0:
            raise KeyboardInterrupt

    _, received = two.errors(big_state(), target, progress=interrupt)
    assert isinstance(received, KeyboardInterrupt)
    assert "['w00']" in "".join(received.__notes__)


def test_a_process_that_ends_after_a_failed_send_exits_cleanly(tmp_path: Path) -> None:
    """No thread of a call may outlive it and take the group down while the interpreter ends."""
    script = """
import datetime, os, signal, sys, time
import torch, torch.distributed as dist, transfuse

def work(rank, store):
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    if rank == 1:
        signal.pause()
    try:
        timeout = datetime.timedelta(seconds=0.5)
        transfuse.PGTransport(dist.group.WORLD, timeout, torch.device("cpu")).send_checkpoint([1], {"a": 1})
    except transfuse.SendFailed:
        sys.exit(7)

for attempt in range(3):
    pids = []
    for rank in range(2):
        pids.append(os.fork())
        if not pids[-1]:
            work(rank, f"{sys.argv[1]}{attempt}")
    _, status = os.waitpid(pids[0], 0)
    os.kill(pids[1], signal.SIGKILL)
    os.waitpid(pids[1], 0)
    assert os.waitstatus_to_exitcode(status) == 7, status
"""
    # One process imports torch, and its forks end as any interpreter does.
    words = [sys.executable, "-W", "ignore", "-c", script, str(tmp_path / "store")]
    environment = os.environ | {"GLOO_SOCKET_IFNAME": "lo"}
    done = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("which", [0, 2, 4])
def test_a_parcel_that_cannot_be_packed_never_passes_for_one_that_could(
    which: int, two: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also in the last burst: five bursts, packing fails in one of them."""
    calls: list[int] = []
    pack = places.pack

    def fail(memory: Any, *args: Any) -> Any:
        if isinstance(memory, source._Memory):
            calls.append(1)
            if len(calls) == which + 1:
                raise RuntimeError("out of memory")
        return pack(memory, *args)

    monkeypatch.setattr(places, "pack", fail)
    monkeypatch.setenv("TRANSFUSE_BURST_BYTES", str(1 << 16))
    monkeypatch.setenv("TRANSFUSE_PARCEL_BYTES", str(1 << 16))
    sent, received = two.errors({"w": torch.ones(10 << 14)[::2]})
    assert "out of memory" in str(sent)
    assert "out of memory" in str(received)
    assert two.move({"still": "usable"}) == {"still": "usable"}


class DamagedAnswer(Tampering):
    """A group that damages the first answer to a burst."""

    _left = 1

    def tamper(self, tensor: torch.Tensor, rank: int) -> torch.Tensor:
        if self._left and tensor.numel() == messages.HEADER_BYTES and int(tensor[6]) == messages.Message.GOT:
            self._left -= 1
            tensor[-1] ^= 1
        return tensor


def test_a_receiver_that_talks_nonsense_does_not_spoil_the_digests_of_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRANSFUSE_PARCEL_BYTES", str(256 << 10))
    monkeypatch.setenv("TRANSFUSE_BURST_BYTES", str(1 << 20))
    state = {"w": torch.randn(2 << 20)}

    def work(rank: int, pg: Any) -> Any:
        mover = transfuse.PGTransport(DamagedAnswer(pg) if rank == 1 else pg, TIMEOUT, CPU, relay=False)
        if rank == 0:
            return mover.send_checkpoint([1, 2], state)
        time.sleep(1.0 if rank == 2 else 0.0)
        assert_exact(state, mover.recv_checkpoint(0))
        return mover.report

    with Ranks(3) as ranks:
        outcomes = ranks.outcomes(work)
    assert isinstance(outcomes[0].error, transfuse.SendFailed)
    assert set(outcomes[0].error.causes) == {1}
    assert outcomes[2].get().repaired == 0


def test_signs_of_life_with_progress_are_listened_to_for_as_long_as_it_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of those without, only so many in a row."""
    monkeypatch.setenv("TRANSFUSE_MAX_WORKING_RECORDS", "2")
    monkeypatch.setenv("TRANSFUSE_SAME_HOST", "1")
    state = {"w": torch.randn(12 << 20)}
    with pair() as two:
        options = {"max_bytes_per_second": 16e6}
        assert_exact(state, two.move(state, source=options, timeout=timedelta(seconds=1)))


@pytest.mark.parametrize(("notes", "total"), [([0, 0], 1 << 20), ([1, 2], 1 << 20), ([1 << 40, 1 << 41], 0)])
def test_a_peer_that_only_says_it_is_working_is_given_up(notes: list[int], total: int) -> None:
    """However its count of bytes rises: a byte at a time is no progress, and more than there are is none either."""
    limits = Limits(max_working_records=2)
    signs = b"".join(messages.seal(messages.Message.WORKING, 1, note, b"") for note in notes)
    line = Line(Group(hostile.Stream(signs), CPU), 3, 1.0, limits)
    line.transfer, line.tag, line.most_bytes = 1, FIRST_TAG, total
    with pytest.raises(transfuse.ProtocolError, match="never that it is done"):
        line.expect(messages.Message.WANT)


@pytest.mark.parametrize("staging", [1 << 20, 16 << 20])
def test_a_small_staging_budget_is_kept_to(monkeypatch: pytest.MonkeyPatch, staging: int) -> None:
    monkeypatch.setenv("TRANSFUSE_STAGING_BYTES", str(staging))
    state = {"w": torch.randn(8 << 20), "s": torch.randn(1000, 1000)[:, ::2]}
    with pair() as two:
        assert_exact(state, two.move(state))
