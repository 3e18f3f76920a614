"""Errors reach both ends, in time, with names; and one receiver's failure is its own."""

from __future__ import annotations

import copy
import pickle
import struct
import threading
import time
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest
import torch

import transfuse
from midway import SHORT, Slow, Untagged, big_state, tampered
from moves import CPU, TIMEOUT, Pair, pair
from transfuse._wire import messages
from transfuse.testing.exact import assert_exact
from transfuse.testing.ranks import Ranks
from wires import over_streams

pytestmark = pytest.mark.usefixtures("group_route")


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
    assert cause.phase == ("waiting for the receiver" if over_streams() else "waiting for the want")
    assert "does rank 1 call recv_checkpoint() from this rank" in str(cause)


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
    assert 1 <= damaged[0] < 3, "some of three parcels come with another record"
    assert report.repaired == damaged[0]


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
        if tensor.numel() == messages.BLOCK_BYTES:
            tensor[messages.HEADER_BYTES + 20] ^= 4
        return tensor

    sent, received, _ = tampered(tamper, {f"w{i}": torch.ones(3) for i in range(5)})
    assert isinstance(received.error, transfuse.ProtocolError)
    assert "digest" in str(received.error)
    assert "digest" in str(sent.error)


def test_a_foreign_message_is_an_error_never_data() -> None:
    def tamper(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.numel() == messages.BLOCK_BYTES:
            tensor[:4] = torch.frombuffer(bytearray(b"HTTP"), dtype=torch.uint8)
        return tensor

    _, received, _ = tampered(tamper, {"w": torch.ones(3)}, timeout=SHORT)
    assert isinstance(received.error, transfuse.ProtocolError)
    assert "not a transfuse message" in str(received.error)


def test_another_wire_version_is_named() -> None:
    def tamper(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.numel() == messages.BLOCK_BYTES:
            tensor[4:6] = torch.frombuffer(bytearray(struct.pack("<H", 99)), dtype=torch.uint8)
        return tensor

    _, received, _ = tampered(tamper, {"w": torch.ones(3)}, timeout=SHORT)
    assert "wire version 99" in str(received.error)


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


def test_giving_up_an_absent_receiver_does_not_cut_off_a_slow_one() -> None:
    """On gloo an expired wait closes every connection of the rank: it must not expire while others need theirs."""
    state = {"w": torch.randn(24 << 20)}

    def work(rank: int, pg: Any) -> Any:
        timeout = timedelta(seconds=1)
        if rank == 0:
            return transfuse.PGTransport(pg, timeout, CPU, lanes=1).send_checkpoint([1, 2], state)
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
