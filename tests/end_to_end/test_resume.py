"""What is left when no source remains: resumed receives, torn and untouched states."""

from __future__ import annotations

import signal
import threading
import time
from datetime import timedelta
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist

import transfuse
from gathering import MIB, Ending, Wrapped, blank, gather, state
from moves import CPU, TIMEOUT
from transfuse._memory.mutation import MutationWatch
from transfuse.testing.exact import assert_exact
from transfuse.testing.ranks import Fleet, Ranks

pytestmark = pytest.mark.usefixtures("small_parcels")


# --------------------------------------------------------------------------------------------------- none left, resume


def lose_and_resume(rank: int, in_place: bool, spoil: bool, verify: bool | None) -> Any:
    """Rank 0 dies halfway; rank 1 has a part, and goes on with rank 2 over a group of these two."""
    timeout = timedelta(seconds=8)
    rest = dist.new_group([1, 2])
    if rank == 0:
        ending = Ending(40, signal.SIGKILL, after=1.0)
        transfuse.PGTransport(ending, timeout, CPU, verify=verify).send_checkpoint([1], state(), step=3)
    if rank == 2:
        # Rank 1 comes here only when it has given up rank 0.
        return transfuse.PGTransport(cast(Any, rest), 4 * timeout, CPU).send_checkpoint([0], state(), step=3)
    target = blank(state())
    give = (lambda: target) if in_place else None
    taker = transfuse.PGTransport(cast(Any, dist.group.WORLD), timeout, CPU, give, verify=verify)
    with pytest.raises(transfuse.PeerError) as caught:
        taker.recv_checkpoint(0, step=3)
    error = caught.value
    partial = error.partial
    account = len(error.received), len(error.missing), len(error.torn), str(error)
    if spoil:
        for leaf in target.values():
            if isinstance(leaf, torch.Tensor) and leaf.is_floating_point():
                leaf.add_(1)
    again = transfuse.PGTransport(cast(Any, rest), timeout, CPU, give)
    received = again.recv_checkpoint(1, step=3, resume=partial)
    assert_exact(state(), received)
    assert again.report is not None
    return account, partial.received_bytes, again.report.kept_bytes, again.report.bytes, repr(partial)


def slow_source(pg: Any, **options: Any) -> transfuse.PGTransport:
    """A receiver that stops in the middle has the time to, also on a busy machine."""
    return transfuse.PGTransport(pg, TIMEOUT, CPU, max_bytes_per_second=8.0 * MIB, **options)


TOTAL = sum(leaf.nbytes for name, leaf in state().items() if name.startswith("w")) + 72


@pytest.mark.usefixtures("group_route")
@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("verify", [None, False])
def test_a_later_receive_fetches_only_what_is_missing(in_place: bool, verify: bool | None) -> None:
    with Fleet(3) as fleet:
        fleet.start(lose_and_resume, in_place, False, verify)
        _, received, sent = fleet.outcomes(deadline=60)
    sent.get()
    (whole, missing, torn, text), held, kept, fetched, shown = received.get()
    assert whole + missing == len(state())
    assert missing > 0
    assert whole > 1, "more than the values of the description"
    assert (torn > 0) == in_place
    assert "missing:" in text
    assert 0 < held < TOTAL
    assert kept == held
    assert fetched == TOTAL - held
    assert "Partial(step=3" in shown


@pytest.mark.usefixtures("group_route")
def test_what_was_kept_and_changed_since_is_fetched_again() -> None:
    with Fleet(3) as fleet:
        fleet.start(lose_and_resume, True, True, None)
        _, received, _ = fleet.outcomes(deadline=60)
    _, _, kept, fetched, _ = received.get()
    assert kept == 0
    assert fetched == TOTAL


@pytest.mark.usefixtures("either_route")
@pytest.mark.parametrize("change", ["bytes", "step", "shape"])
def test_a_source_that_has_something_else_is_not_resumed_from(change: str) -> None:
    """Same step, same manifest, other bytes: only its digests tell."""

    def work(rank: int, pg: Any) -> Any:
        sender = transfuse.PGTransport(pg, TIMEOUT, CPU)
        second = (
            state(2.0) if change == "bytes" else {**state(), "w00": torch.ones(3)} if change == "shape" else state()
        )
        if rank == 0:
            with pytest.raises(transfuse.SendFailed):
                slow_source(pg, same_host=False).send_checkpoint([1], state(), step=1)
            sender.send_checkpoint([1], second, step=2 if change == "step" else 1)
            return second

        def stop(progress: dict[int, transfuse.Progress]) -> None:
            if progress[0].bytes > 4 * MIB:
                raise transfuse.StateError("enough")

        with pytest.raises(transfuse.StateError) as caught:
            transfuse.PGTransport(pg, TIMEOUT, CPU, progress=stop).recv_checkpoint(0)
        partial = caught.value.partial
        assert partial.received_bytes >= 4 * MIB
        taker = transfuse.PGTransport(pg, TIMEOUT, CPU)
        received = taker.recv_checkpoint(0, resume=partial)
        assert taker.report is not None
        return received, taker.report.kept_bytes

    with Ranks(2, 40) as ranks:
        sent, received = ranks.outcomes(work)
    arrived, kept = received.get()
    assert_exact(sent.get(), arrived)
    # Of the changed floats nothing is kept; small may be among what is.
    assert kept < 1000


def test_without_any_source_left_the_error_maps_ranks_to_causes() -> None:
    def refuse(rank: int) -> object:
        return {"bad": lambda: rank}

    outcomes, _ = gather(2, refuse)
    error = outcomes[-1].error
    assert isinstance(error, transfuse.ReceiveFailed)
    assert set(error.causes) == {0, 1}
    assert "rank 0: PeerRefused" in str(error)
    assert "['bad']" in str(error)


def interrupted(
    pgs: Ranks, offered: dict[str, Any], target: object | None, enough: int = MIB, **options: Any
) -> transfuse.Partial:
    """What is left of a receive that its caller stops when this number of bytes is there."""

    def work(rank: int, pg: Any) -> Any:
        if rank == 0:
            with pytest.raises(transfuse.SendFailed):
                slow_source(pg, same_host=False).send_checkpoint([1], offered, step=1)
            return None

        def stop(progress: dict[int, transfuse.Progress]) -> None:
            if progress[0].bytes > enough:
                raise transfuse.StateError("enough")

        give = None if target is None else lambda: target
        with pytest.raises(transfuse.StateError) as caught:
            transfuse.PGTransport(pg, TIMEOUT, CPU, give, progress=stop, **options).recv_checkpoint(0, step=1)
        return caught.value

    error = pgs.outcomes(work)[1].get()
    assert isinstance(error.partial, transfuse.Partial)
    return error.partial


def resumed(
    pgs: Ranks, offered: dict[str, Any], target: object | None, partial: transfuse.Partial, **options: Any
) -> tuple[Any, Any]:
    def work(rank: int, pg: Any) -> Any:
        if rank == 0:
            return transfuse.PGTransport(pg, TIMEOUT, CPU).send_checkpoint([1], offered, step=1)
        taker = transfuse.PGTransport(pg, TIMEOUT, CPU, None if target is None else lambda: target, **options)
        return taker.recv_checkpoint(0, step=1, resume=partial), taker.report

    result: tuple[Any, Any] = pgs.outcomes(work)[1].get()
    return result


@pytest.mark.usefixtures("either_route")
@pytest.mark.parametrize("delta", [False, True], ids=["all", "delta"])
@pytest.mark.parametrize("atomic", [False, True], ids=["torn", "atomic"])
@pytest.mark.parametrize("assembled", [False, True], ids=["as it is", "assembled"])
def test_whatever_has_arrived_is_left_and_only_the_rest_is_fetched(assembled: bool, atomic: bool, delta: bool) -> None:
    offered = {f"w{i}": torch.randn(MIB // 4, generator=torch.Generator().manual_seed(i)) for i in range(8)}
    total = sum(tensor.nbytes for tensor in offered.values())
    own = {f"own.{name}" if assembled else name: torch.zeros(MIB // 4) for name in offered}
    options: dict[str, Any] = {"atomic": atomic, "delta": delta}
    if assembled:
        options["map_path"] = {"*": "own.*"}
    with Ranks(2, 40) as ranks:
        partial = interrupted(ranks, offered, own, 2 * MIB, **options)
        assert 0 < partial.received_bytes < total
        assert bool(partial.torn) != atomic
        assert any(bool(tensor.any()) for tensor in own.values()) != atomic
        received, report = resumed(ranks, offered, own, partial, **options)
    # With delta also what was under way when the receive ended, and had landed.
    assert report.kept_bytes >= partial.received_bytes if delta else report.kept_bytes == partial.received_bytes
    assert report.bytes == total - report.kept_bytes
    for name, tensor in offered.items():
        mine = f"own.{name}" if assembled else name
        assert torch.equal(own[mine], tensor), name
        assert received[mine] is own[mine]


@pytest.mark.usefixtures("either_route")
def test_a_partial_of_copies_serves_other_targets_and_is_not_taken_for_targets() -> None:
    """What lies in copies is known by its digests, not by where the copies were meant to go."""
    offered = {f"w{i}": torch.randn(MIB // 4) for i in range(8)}
    rules = {"*": "own.*"}
    with Ranks(2, 40) as ranks:
        for atomic in (True, False):
            first = {f"own.{name}": torch.zeros(MIB // 4) for name in offered}
            partial = interrupted(ranks, offered, first, 2 * MIB, atomic=True, map_path=rules)
            other = {f"own.{name}": torch.zeros(MIB // 4) for name in offered}
            _, report = resumed(ranks, offered, other, partial, atomic=atomic, map_path=rules)
            assert report.kept_bytes == (partial.received_bytes if atomic else 0)
            assert all(torch.equal(other[f"own.{name}"], tensor) for name, tensor in offered.items())
            assert not any(tensor.any() for tensor in first.values())


@pytest.mark.usefixtures("either_route")
@pytest.mark.parametrize("shape", ["tied", "repeated"])
def test_what_lies_in_several_places_is_not_kept_for_what_lies_in_one(shape: str) -> None:
    """A target that was changed in its second place has the first one's digest."""
    base = torch.randn(MIB // 4)
    if shape == "tied":
        offered = {"a": base, "b": base, "z": torch.randn(4 * MIB)}
        target = {"a": torch.zeros(MIB // 4), "b": torch.zeros(MIB // 4), "z": torch.zeros(4 * MIB)}
    else:
        offered = {"a": base[:1000].expand(50, 1000), "z": torch.randn(4 * MIB)}
        target = {"a": torch.zeros(50, 1000), "z": torch.zeros(4 * MIB)}
    with Ranks(2, 40) as ranks:
        partial = interrupted(ranks, offered, target, 2 * MIB)
        (target["b"] if shape == "tied" else target["a"][1:]).zero_()
        received, report = resumed(ranks, offered, target, partial)
    assert report.kept_bytes > 0
    for name, tensor in offered.items():
        assert torch.equal(received[name], tensor), name


def test_a_partial_serves_once() -> None:
    """Its memory then belongs to the state that came of it."""
    with Ranks(2, 40) as ranks:
        partial = interrupted(ranks, state(), None)
        received, _ = resumed(ranks, state(), None, partial)
        assert_exact(state(), received)
        with pytest.raises(ValueError, match="resumed from before"):
            transfuse.PGTransport(cast(Any, ranks.pgs[1]), TIMEOUT, CPU).recv_checkpoint(0, resume=partial)


def test_a_resume_that_finds_no_source_gives_the_partial_back_and_keeps_the_state_torn() -> None:
    target = blank(state())
    with Ranks(2, 40) as ranks:
        partial = interrupted(ranks, state(), target)
        assert partial.torn

        def work(rank: int, pg: Any) -> Any:
            if rank == 0:
                with pytest.raises(transfuse.UnsupportedLeaf):
                    transfuse.PGTransport(pg, TIMEOUT, CPU).send_checkpoint([1], {"bad": lambda: 1})
                with pytest.raises(transfuse.PeerRefused, match="TornState"):
                    transfuse.PGTransport(pg, TIMEOUT, CPU).recv_checkpoint(1)
                return None
            mover = transfuse.PGTransport(pg, TIMEOUT, CPU, lambda: target)
            with pytest.raises(transfuse.PeerRefused) as caught:
                mover.recv_checkpoint(0, resume=partial)
            with pytest.raises(transfuse.TornState):
                mover.send_checkpoint([0], target)
            return caught.value

        error = ranks.outcomes(work)[1].get()
        assert error.partial is partial
        assert error.torn == partial.torn


@pytest.mark.usefixtures("group_route")
def test_leaves_that_see_the_memory_of_a_missing_one_are_missing_too() -> None:
    whole = torch.randn(8 * MIB)
    offered = {"a": torch.randn(MIB), "z": whole, "view": whole[7:500:3], "tied": whole}
    own = torch.zeros(8 * MIB)
    target = {"a": torch.zeros(MIB), "z": own, "view": own[7:500:3], "tied": own}

    def work(rank: int, pg: Any) -> Any:
        if rank == 0:
            with pytest.raises(transfuse.SendFailed):
                slow_source(pg).send_checkpoint([1], offered)
            return None

        def stop(progress: dict[int, transfuse.Progress]) -> None:
            if progress[0].bytes > 5 * MIB:
                raise transfuse.StateError("enough")

        with pytest.raises(transfuse.StateError) as caught:
            transfuse.PGTransport(pg, TIMEOUT, CPU, lambda: target, progress=stop).recv_checkpoint(0)
        return caught.value

    with Ranks(2, 40) as ranks:
        error = ranks.outcomes(work)[1].get()
    assert list(error.received) == ["['a']"]
    assert list(error.missing) == ["['z']", "['view']", "['tied']"]


# --------------------------------------------------------------------------------------------------------- torn states


@pytest.mark.usefixtures("group_route")
def test_a_transport_whose_target_is_torn_is_no_source_until_it_has_received() -> None:
    target = blank(state())

    def work(rank: int, pg: Any) -> Any:
        if rank == 0:
            sender = transfuse.PGTransport(pg, TIMEOUT, CPU)
            with pytest.raises(transfuse.SendFailed):
                slow_source(pg).send_checkpoint([1], state())
            with pytest.raises(transfuse.PeerRefused, match=r"TornState.*half-written"):
                sender.recv_checkpoint(1)
            sender.send_checkpoint([1], state())
            return sender.recv_checkpoint(1)

        def stop(progress: dict[int, transfuse.Progress]) -> None:
            if stopping and progress[0].bytes > 2 * MIB:
                stopping.clear()
                raise transfuse.StateError("enough")

        stopping = [True]
        taker = transfuse.PGTransport(pg, TIMEOUT, CPU, lambda: target, progress=stop)
        with pytest.raises(transfuse.StateError) as caught:
            taker.recv_checkpoint(0)
        changed = {f"['{name}']" for name, leaf in target.items() if torch.is_tensor(leaf) and leaf.any()}
        assert changed <= set(caught.value.torn)
        with pytest.raises(transfuse.TornState) as torn:
            taker.send_checkpoint([0], target)
        assert torn.value.leaves == caught.value.torn
        taker.recv_checkpoint(0)
        taker.send_checkpoint([0], target)
        return None

    with Ranks(2, 40) as ranks:
        sent, received = ranks.outcomes(work)
    received.get()
    assert_exact(state(), {**sent.get(), "lr": 0.1})


@pytest.mark.usefixtures("group_route")
def test_atomic_leaves_every_target_as_it_was_when_all_sources_are_lost() -> None:
    target = blank(state())

    def damage(tensor: torch.Tensor) -> torch.Tensor | None:
        if tensor.numel() < 100_000:
            return None
        changed = tensor.clone()
        changed[5] ^= 1
        return changed

    outcomes, report = gather(
        2, target=target, atomic=True, wrap=lambda rank, pg: Wrapped(pg, damage) if rank < 2 else pg
    )
    error = outcomes[-1].error
    assert isinstance(error, transfuse.ReceiveFailed)
    assert all(isinstance(cause, transfuse.CorruptData) for cause in error.causes.values())
    assert "['w" in str(error)
    assert error.torn == ()
    assert report.torn == ()
    assert not any(leaf.any() for leaf in target.values() if torch.is_tensor(leaf))


@pytest.mark.usefixtures("either_route")
def test_an_atomic_receive_that_is_stopped_at_the_last_moment_touches_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Everything is here; only the source's last word is missing."""
    target, stop = blank(state()), threading.Event()

    def hold(mutation_watch: MutationWatch, seconds: float = 0) -> list[str]:
        stop.set()
        time.sleep(0.5)
        return []

    monkeypatch.setattr(MutationWatch, "changed", hold)

    def show(progress: dict[int, transfuse.Progress]) -> None:
        if stop.is_set():
            raise KeyError("stop")

    def work(rank: int, pg: Any) -> Any:
        if rank == 0:
            return transfuse.PGTransport(pg, TIMEOUT, CPU).send_checkpoint([1], state())
        return transfuse.PGTransport(pg, TIMEOUT, CPU, lambda: target, atomic=True, progress=show).recv_checkpoint(0)

    with Ranks(2, 40) as ranks:
        received = ranks.outcomes(work)[1]
    assert isinstance(received.error, KeyError)
    assert not any(leaf.any() for leaf in target.values() if torch.is_tensor(leaf))
