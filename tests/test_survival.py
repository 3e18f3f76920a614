"""Several sources, sources that die, freeze, differ or change, and what is left when none remains."""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, cast

import numpy as np
import pytest
import torch
import torch.distributed as dist

import transfuse
from moves import CPU, TIMEOUT
from tampering import Passing
from transfuse.limits import Limits
from transfuse.memory.mutation import Vigil
from transfuse.state.manifest import describe
from transfuse.testing.exact import assert_exact
from transfuse.testing.ranks import Fleet, Outcome, Ranks
from transfuse.wire import messages

MIB = 1 << 20


@pytest.fixture(autouse=True)
def small_parcels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRANSFUSE_PARCEL_BYTES", str(256 << 10))
    monkeypatch.setenv("TRANSFUSE_BURST_BYTES", str(512 << 10))


def state(scale: float = 1.0, mib: int = 8) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(7)
    tensors: dict[str, Any] = {f"w{i:02}": torch.randn(MIB // 8, generator=generator) * scale for i in range(2 * mib)}
    return {**tensors, "tied": tensors["w03"], "view": tensors["w05"][10:500:2], "small": torch.arange(9), "lr": 0.1}


def blank(like: dict[str, Any]) -> dict[str, Any]:
    """A target of the same shape, in memory of its own, tied alike."""
    own = {name: torch.zeros_like(leaf) for name, leaf in like.items() if name.startswith("w")}
    return {
        **own,
        "tied": own["w03"],
        "view": own["w05"][10:500:2],
        "small": torch.zeros(9, dtype=torch.int64),
        "lr": 0,
    }


Work = Callable[[int, Any], Any]


def gather(
    sources: int,
    offered: Callable[[int], object] = lambda rank: state(),
    *,
    target: object | None = None,
    wrap: Callable[[int, Any], Any] = lambda rank, pg: pg,
    steps: Sequence[int | None] | None = None,
    step: int | None = None,
    timeout: timedelta = TIMEOUT,
    **options: Any,
) -> tuple[list[Outcome[Any]], Any]:
    """Ranks 0, 1, … are sources of the last one; the outcomes, and the receiver's report."""
    reports: list[Any] = []

    def work(rank: int, pg: Any) -> Any:
        if rank < sources:
            sender = transfuse.PGTransport(wrap(rank, pg), timeout, CPU)
            return sender.send_checkpoint([sources], offered(rank), step=None if steps is None else steps[rank])
        taker = transfuse.PGTransport(
            wrap(rank, pg), timeout, CPU, None if target is None else lambda: target, **options
        )
        try:
            return taker.recv_checkpoint(list(range(sources)), step=step)
        finally:
            reports.append(taker.report)

    with Ranks(sources + 1, 40) as ranks:
        return ranks.outcomes(work), reports[0]


class Wrapped(Passing):
    """A group of which a test sees every send before it is posted, and may put another tensor in its place."""

    def __init__(self, pg: Any, on_send: Callable[[torch.Tensor], torch.Tensor | None]) -> None:
        super().__init__(pg)
        self._on_send = on_send

    def send(self, tensors: list[torch.Tensor], rank: int, tag: int) -> Any:
        changed = self._on_send(tensors[0])
        return super().send(tensors if changed is None else [changed], rank, tag)


# ----------------------------------------------------------------------------------------------------- several sources


@pytest.mark.usefixtures("either_route")
@pytest.mark.parametrize("sources", [2, 3, 5])
@pytest.mark.parametrize("atomic", [False, True])
def test_each_of_several_sources_brings_a_part_and_no_byte_comes_twice(sources: int, atomic: bool) -> None:
    target = blank(state())
    outcomes, report = gather(sources, target=target, atomic=atomic)
    assert_exact(state(), outcomes[-1].get())
    assert_exact(state(), {**target, "lr": 0.1})
    for outcome in outcomes[:-1]:
        outcome.get()
    unique = sum(leaf.nbytes for name, leaf in state().items() if name.startswith("w")) + 72
    assert report.bytes == sum(report.by_source.values()) == unique
    if report.route == "group":
        assert set(report.by_source) == set(range(sources)), "with that many bursts everybody gets some"


def test_a_tensor_that_only_a_refused_source_has_does_not_keep_its_old_values() -> None:
    target = {"a": torch.zeros(5), "b": torch.zeros(6)}
    stages = [{"a": torch.ones(5)}, {"b": torch.ones(6)}]
    outcomes, _ = gather(2, lambda rank: stages[rank], target=target, steps=[5, 4], step=5)
    error = outcomes[-1].error
    assert isinstance(error, transfuse.NotCovered)
    assert "['b']: source 1 holds it, but is not used: the source sends step 4" in str(error)
    assert not target["a"].any(), "nothing was written"
    assert all(isinstance(outcome.error, transfuse.SendFailed) for outcome in outcomes[:2])
    # The same under rules, and of what is no tensor.
    for rules, other in ((None, {"b": 7}), (None, {"b": np.ones(6)}), ({"**": "**"}, {"b": torch.ones(6)})):
        stages[1] = other  # type: ignore[assignment]
        held = {"a": torch.zeros(5), "b": torch.zeros(6) if rules else 0}
        outcomes, _ = gather(2, lambda rank: stages[rank], target=held, steps=[5, 4], step=5, map_path=rules)
        assert isinstance(outcomes[-1].error, transfuse.NotCovered), other
        assert "['b']: source 1 holds it, but is not used" in str(outcomes[-1].error)
    stages[1] = {"b": torch.ones(6)}
    # A replica of the same step makes it whole, whatever the other one's step is.
    stages.append(stages[1])
    outcomes, _ = gather(3, lambda rank: stages[rank], target=target, steps=[5, 4, 5], step=5)
    outcomes[-1].get()
    assert bool(target["a"].all() and target["b"].all())


def test_without_a_majority_nobody_is_right() -> None:
    target = {"a": torch.zeros(5)}
    outcomes, _ = gather(5, lambda rank: {"a": torch.full((5,), float(rank))}, target=target, steps=[5, 5, 6, 7, 8])
    assert isinstance(outcomes[-1].error, transfuse.SourcesDiffer)
    assert "2 of 5 agree" in str(outcomes[-1].error)
    assert not target["a"].any()


class OneByOne(Passing):
    """A group that carries one operation at a time, as torchft's in a child process do."""

    def getBackendName(self) -> str:  # noqa: N802 - torch's name
        return "torchft-baby-gloo"


def test_a_group_that_hears_one_source_at_a_time_does_not_leave_out_the_others() -> None:
    target = {"a": torch.zeros(5), "b": torch.zeros(6)}
    stages = [{"a": torch.ones(5)}, {"b": torch.ones(6)}]
    outcomes, _ = gather(2, lambda rank: stages[rank], target=target, wrap=lambda rank, pg: OneByOne(pg))
    assert isinstance(outcomes[-1].error, transfuse.NotCovered)
    assert "['b']: over this group sources are heard one after another" in str(outcomes[-1].error)
    assert not target["a"].any()


def test_a_slow_source_brings_less(group_route: None) -> None:
    def slowly(rank: int, pg: Any) -> Any:
        def pause(tensor: torch.Tensor) -> None:
            if tensor.numel() > 100_000:
                time.sleep(0.02)

        return Wrapped(pg, pause) if rank == 1 else pg

    outcomes, report = gather(2, wrap=slowly)
    assert_exact(state(), outcomes[-1].get())
    assert report.by_source[1] < report.by_source[0] / 2


def test_a_source_that_differs_is_dropped_with_a_warning_that_names_the_difference(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def offered(rank: int) -> object:
        return {**state(), "w04": torch.zeros(7)} if rank == 1 else state()

    with caplog.at_level(logging.WARNING, "transfuse"):
        outcomes, report = gather(3, offered)
    assert_exact(state(), outcomes[-1].get())
    assert 1 not in report.by_source
    (line,) = [record.getMessage() for record in caplog.records if "is not used" in record.getMessage()]
    assert "source 1" in line
    assert "['w04']" in line
    assert f"[{MIB // 8}]" in line
    assert "[7]" in line
    assert isinstance(outcomes[1].error, transfuse.SendFailed)
    assert "w04" in str(outcomes[1].error)


def test_a_value_that_differs_is_a_difference_too() -> None:
    outcomes, _ = gather(2, lambda rank: {**state(), "lr": 0.1 * rank})
    error = outcomes[-1].error
    assert isinstance(error, transfuse.SourcesDiffer)
    assert "['lr']" in str(error)
    for outcome in outcomes[:-1]:
        assert isinstance(outcome.error, transfuse.SendFailed)
        assert "SourcesDiffer" in str(outcome.error)


def test_sources_of_another_step_do_not_count() -> None:
    outcomes, report = gather(3, steps=[4, 5, 4], step=5)
    assert_exact(state(), outcomes[-1].get())
    assert set(report.by_source) == {1}
    outcomes, report = gather(3, steps=[4, 5, 4])
    assert_exact(state(), outcomes[-1].get())
    assert 1 not in report.by_source
    outcomes, _ = gather(2, steps=[4, 5])
    assert isinstance(outcomes[-1].error, transfuse.SourcesDiffer)
    assert "step 4 against 5" in str(outcomes[-1].error)
    outcomes, _ = gather(2, steps=[4, 4], step=5)
    assert isinstance(outcomes[-1].error, transfuse.ReceiveFailed)
    assert all(isinstance(cause, transfuse.StepMismatch) for cause in outcomes[-1].error.causes.values())


def test_a_source_without_digests_does_not_spoil_those_of_the_others(group_route: None) -> None:
    def work(rank: int, pg: Any) -> Any:
        if rank < 2:
            sender = transfuse.PGTransport(pg, TIMEOUT, CPU, verify=None if rank else False)
            return sender.send_checkpoint([2], state())
        taker = transfuse.PGTransport(pg, TIMEOUT, CPU, verify=True)
        return taker.recv_checkpoint([0, 1]), taker.report

    with Ranks(3, 40) as ranks:
        without, sent, received = ranks.outcomes(work)
    arrived, report = received.get()
    assert_exact(state(), arrived)
    assert set(report.by_source) == {1}
    assert report.verified
    sent.get()
    assert "offers no digests" in str(without.error)


def test_a_source_that_never_comes_is_not_waited_for_and_the_group_stays_usable() -> None:
    """And its first word, when it comes after all, belongs to the next receive."""

    def work(rank: int, pg: Any) -> Any:
        transport = transfuse.PGTransport(pg, timedelta(seconds=4), CPU)
        if rank == 2:
            first = transport.recv_checkpoint([0, 1])
            called.set()
            return first, transport.recv_checkpoint([0, 1], step=9)
        if rank == 0:
            transport.send_checkpoint([2], {"w": torch.ones(1000)})
        called.wait(30)
        return transport.send_checkpoint([2], {"w": torch.full((1000,), 2.0)}, step=9)

    called = threading.Event()
    with Ranks(3, 40) as ranks:
        *sent, received = ranks.outcomes(work)
    first, second = received.get()
    assert bool((first["w"] == 1).all())
    assert bool((second["w"] == 2).all())
    for outcome in sent:
        outcome.get()


def test_a_failing_target_refuses_every_source() -> None:
    outcomes, _ = gather(2, target={**blank(state()), "w00": torch.zeros(3)})
    assert isinstance(outcomes[-1].error, transfuse.TargetMismatch)
    for outcome in outcomes[:-1]:
        assert isinstance(outcome.error, transfuse.SendFailed)
        assert "TargetMismatch" in str(outcome.error)


# --------------------------------------------------------------------------------------------------- death and silence


class Ending(Passing):
    """The world's group; its process ends itself, or freezes, at the send with a certain number."""

    def __init__(self, number: int, how: signal.Signals) -> None:
        super().__init__(dist.group.WORLD)
        self._left, self._how = number, how

    def send(self, tensors: list[torch.Tensor], rank: int, tag: int) -> Any:
        self._left -= 1
        if self._left == 0:
            os.kill(os.getpid(), self._how)
        return super().send(tensors, rank, tag)


def end_one_source(rank: int, number: int, how: signal.Signals, seconds: float, repeat: bool) -> Any:
    """Rank 0 ends at its nth send; rank 2 receives in place from 0 and 1, then from 1 alone."""
    timeout = timedelta(seconds=seconds)
    world = cast(Any, dist.group.WORLD)
    if rank == 0:
        transfuse.PGTransport(Ending(number, how), timeout, CPU).send_checkpoint([2], state())
        return None
    if rank == 1:
        sender = transfuse.PGTransport(world, timeout, CPU)
        sender.send_checkpoint([2], state())
        if repeat:
            sender.send_checkpoint([2], {"again": torch.ones(5)})
        return None
    target = blank(state())
    taker = transfuse.PGTransport(world, timeout, CPU, lambda: target)
    started = time.monotonic()
    received = taker.recv_checkpoint([0, 1])
    elapsed = time.monotonic() - started
    assert_exact(state(), received)
    assert_exact(state(), {**target, "lr": 0.1})
    again = transfuse.PGTransport(world, timeout, CPU).recv_checkpoint(1) if repeat else None
    report = taker.report
    assert report is not None
    return report.bytes, report.by_source, elapsed, again


#: Header, chunk and mark of the offer are sends 1 to 3, AGREED is 4 and 5 and a mark, then come bursts.
POINTS = {"before the offer": 1, "within the offer": 2, "before it agrees": 4, "in a burst": 9, "before a record": 10}


@pytest.mark.usefixtures("group_route")
@pytest.mark.parametrize("point", POINTS)
def test_what_a_dead_source_owed_comes_from_the_other_and_nothing_comes_twice(point: str) -> None:
    with Fleet(3) as fleet:
        fleet.start(end_one_source, POINTS[point], signal.SIGKILL, 8.0, True)
        died, sent, received = fleet.outcomes(deadline=40)
    assert died.error is not None
    sent.get()
    nbytes, by_source, _, again = received.get()
    assert sum(by_source.values()) == nbytes
    assert nbytes == sum(leaf.nbytes for name, leaf in state().items() if name.startswith("w")) + 72
    assert bool((again["again"] == 1).all())


@pytest.mark.usefixtures("group_route")
@pytest.mark.parametrize("point", ["before the offer", "before it agrees", "in a burst"])
def test_a_frozen_source_is_left_after_half_the_timeout(point: str) -> None:
    with Fleet(3) as fleet:
        fleet.start(end_one_source, POINTS[point], signal.SIGSTOP, 3.0, True)
        sent, received = fleet.outcomes(deadline=40, ranks=[1, 2])
    sent.get()
    _, by_source, elapsed, again = received.get()
    assert by_source[1] > 0
    assert elapsed < 3.0 * 1.5 + 2.0
    assert bool((again["again"] == 1).all()), "the group can still be used"


def end_while_read(rank: int, how: signal.Signals) -> Any:
    """On the memory route: rank 0 ends while rank 2 reads from it; which then reads from rank 1."""
    timeout, world = timedelta(seconds=8), cast(Any, dist.group.WORLD)
    pids: list[Any] = [None] * 3
    dist.all_gather_object(pids, os.getpid())
    if rank < 2:
        full = {"w": torch.full((32 * MIB,), 3.0)}
        return transfuse.PGTransport(world, timeout, CPU, max_bytes_per_second=3e8).send_checkpoint([2], full)
    target = {"w": torch.zeros(32 * MIB)}
    seen: list[int] = []

    def show(progress: dict[int, transfuse.Progress]) -> None:
        busy = [source for source in (0, 1) if progress[source].bytes > 0]
        if not seen and busy:
            seen.extend(busy)
            os.kill(pids[busy[0]], how)

    taker = transfuse.PGTransport(world, timeout, CPU, lambda: target, progress=show)
    taker.recv_checkpoint([0, 1])
    assert taker.report is not None
    return bool((target["w"] == 3).all()), taker.report.by_source, seen, taker.report.route


def test_a_source_that_dies_while_its_memory_is_read_is_replaced() -> None:
    with Fleet(3) as fleet:
        fleet.start(end_while_read, signal.SIGKILL)
        *sent, received = fleet.outcomes(deadline=60)
    exact, by_source, seen, route = received.get()
    assert exact
    assert route == "memory"
    (killed, *_) = seen
    assert by_source[1 - killed] > 0
    assert sum(by_source.values()) == 128 * MIB
    sent[1 - killed].get()


def test_a_frozen_source_can_still_be_read() -> None:
    with Fleet(3) as fleet:
        fleet.start(end_while_read, signal.SIGSTOP)
        (received,) = fleet.outcomes(deadline=60, ranks=[2])
    exact, by_source, seen, route = received.get()
    assert exact
    assert route == "memory"
    assert by_source == {seen[0]: 128 * MIB}


# --------------------------------------------------------------------------------------------------- none left, resume


def lose_and_resume(rank: int, in_place: bool, spoil: bool, verify: bool | None) -> Any:
    """Rank 0 dies halfway; rank 1 has a part, and goes on with rank 2 over a group of these two."""
    timeout = timedelta(seconds=8)
    rest = dist.new_group([1, 2])
    if rank == 0:
        transfuse.PGTransport(Ending(40, signal.SIGKILL), timeout, CPU, verify=verify).send_checkpoint(
            [1], state(), step=3
        )
    if rank == 2:
        return transfuse.PGTransport(cast(Any, rest), timeout, CPU).send_checkpoint([0], state(), step=3)
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
                transfuse.PGTransport(pg, TIMEOUT, CPU, same_host=False).send_checkpoint([1], state(), step=1)
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
    """What is left of a receive that its caller stops when so many bytes are there."""

    def work(rank: int, pg: Any) -> Any:
        if rank == 0:
            with pytest.raises(transfuse.SendFailed):
                transfuse.PGTransport(pg, TIMEOUT, CPU, same_host=False).send_checkpoint([1], offered, step=1)
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
                transfuse.PGTransport(pg, TIMEOUT, CPU).send_checkpoint([1], offered)
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
                sender.send_checkpoint([1], state())
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

    def hold(vigil: Vigil) -> list[str]:
        stop.set()
        time.sleep(0.5)
        return []

    monkeypatch.setattr(Vigil, "changed", hold)

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


# ---------------------------------------------------------------------------------------------------------- corruption


@pytest.mark.usefixtures("group_route")
@pytest.mark.parametrize("what", ["parcel", "digests"])
def test_a_damaged_parcel_or_digest_comes_again(what: str) -> None:
    damaged: list[int] = []

    def damage(tensor: torch.Tensor) -> torch.Tensor | None:
        is_parcel = tensor.numel() > 100_000
        is_record = messages.HEADER_BYTES < tensor.numel() < 400 and int(tensor[6]) == messages.Message.SENT
        if len(damaged) > 2 or not (is_parcel if what == "parcel" else is_record):
            return None
        damaged.append(1)
        changed = tensor.clone()
        changed[-9] ^= 4
        return changed

    for sources in (1, 2):
        damaged.clear()
        outcomes, report = gather(sources, wrap=lambda rank, pg: Wrapped(pg, damage) if rank == 0 else pg)
        assert_exact(state(), outcomes[-1].get())
        assert report.repaired >= len(damaged) > 0


@pytest.mark.usefixtures("group_route")
def test_a_source_that_damages_everything_is_dropped_and_the_other_brings_it() -> None:
    def damage(tensor: torch.Tensor) -> torch.Tensor | None:
        if tensor.numel() < 100_000:
            return None
        changed = tensor.clone()
        changed[0] ^= 1
        return changed

    outcomes, report = gather(2, wrap=lambda rank, pg: Wrapped(pg, damage) if rank == 0 else pg)
    assert_exact(state(), outcomes[-1].get())
    assert report.repaired > 0


# ------------------------------------------------------------------------------------------------------ moving sources


def moving(source: dict[str, Any], how: str, after: int) -> Callable[[torch.Tensor], None]:
    """Changes a tensor of the source after so many large sends."""
    left = [after]

    def step(tensor: torch.Tensor) -> None:
        if tensor.numel() > 100_000:
            left[0] -= 1
            if left[0] == 0:
                if how == "optimizer":
                    source["w09"].add_(1.0)
                else:
                    source["w09"].numpy()[:] += 1.0  # As a fused optimizer does: no version counter notices.

    return step


@pytest.mark.usefixtures("group_route")
@pytest.mark.parametrize("how", ["optimizer", "fused"])
@pytest.mark.parametrize("verify", [None, False])
@pytest.mark.parametrize("after", [2, 30])
def test_a_source_that_is_changed_while_it_sends_is_blamed_by_name(how: str, verify: bool | None, after: int) -> None:
    """Before the changed tensor is sent, and after."""

    def work(rank: int, pg: Any) -> Any:
        if rank == 1:
            return transfuse.PGTransport(pg, TIMEOUT, CPU, verify=verify).recv_checkpoint(0)
        source = state()
        group = Wrapped(pg, moving(source, how, after))
        return transfuse.PGTransport(group, TIMEOUT, CPU, verify=verify).send_checkpoint([1], source)

    with Ranks(2, 40) as ranks:
        sent, received = ranks.outcomes(work)
    assert isinstance(sent.error, transfuse.SendFailed)
    assert isinstance(sent.error.causes[1], transfuse.SourceMutated)
    assert "['w09']" in sent.error.causes[1].leaves
    assert isinstance(received.error, transfuse.SourceMutated)
    assert "['w09']" in str(received.error)
    assert "before send_checkpoint has returned" in str(received.error)
    assert received.error.partial is None, "nothing that it sent is worth keeping"


@pytest.mark.parametrize("how", ["optimizer", "fused"])
def test_a_source_that_is_changed_while_its_memory_is_read_is_blamed_too(how: str) -> None:
    source = state()

    def show(progress: dict[int, transfuse.Progress]) -> None:
        if progress[0].bytes and not moved:
            moved.append(1)
            if how == "optimizer":
                source["w09"].add_(1.0)
            else:
                source["w09"].numpy()[:] += 1.0

    moved: list[int] = []

    def work(rank: int, pg: Any) -> Any:
        if rank == 1:
            return transfuse.PGTransport(pg, TIMEOUT, CPU, progress=show).recv_checkpoint(0)
        return transfuse.PGTransport(pg, TIMEOUT, CPU, max_bytes_per_second=32e6).send_checkpoint([1], source)

    with Ranks(2, 40) as ranks:
        sent, received = ranks.outcomes(work)
    assert isinstance(received.error, transfuse.SourceMutated)
    assert "['w09']" in str(received.error)
    assert isinstance(sent.error, transfuse.SendFailed)


@pytest.mark.usefixtures("group_route")
def test_what_a_changed_source_brought_comes_again_from_the_other() -> None:
    def work(rank: int, pg: Any) -> Any:
        if rank == 2:
            taker = transfuse.PGTransport(pg, TIMEOUT, CPU)
            return taker.recv_checkpoint([0, 1]), taker.report
        source = state()
        group = Wrapped(pg, moving(source, "fused", 6)) if rank == 0 else pg
        return transfuse.PGTransport(group, TIMEOUT, CPU).send_checkpoint([2], source)

    with Ranks(3, 40) as ranks:
        changed, sent, received = ranks.outcomes(work)
    arrived, _ = received.get()
    assert_exact(state(), arrived)
    sent.get()
    assert isinstance(changed.error, transfuse.SendFailed)


def watched() -> dict[str, torch.Tensor]:
    with torch.inference_mode():
        inferred = torch.randn(100)
    return {
        "large": torch.randn(10_000),
        "scalar": torch.tensor(3),
        "strided": torch.randn(100, 100)[:, ::2],
        "askew": torch.arange(200, dtype=torch.uint8)[3:],
        "half": torch.randn(33).half(),
        "inferred": inferred,
        "empty": torch.empty(0),
    }


def write_through_numpy(tensor: torch.Tensor) -> None:
    array = tensor.numpy()
    array += 1


CHANGES: dict[str, Callable[[torch.Tensor], object]] = {
    "in place": lambda tensor: tensor.add_(1),
    "without a version": write_through_numpy,
    "freed": lambda tensor: tensor.untyped_storage().resize_(0),
    "elsewhere": lambda tensor: setattr(tensor, "data", tensor.clone()),
}


def test_a_vigil_looks_at_every_view_of_a_storage_and_all_over_it() -> None:
    for _ in range(20):
        base, square = torch.randn(1000), torch.randn(64, 64)
        state = {"head": base[:10], "tail": base[10:], "square": square.t()}
        vigil = Vigil(describe(state, Limits()))
        base.numpy()[10:] += 1
        square.numpy()[1:] += 1
        assert vigil.changed() == ["['tail']", "['square']"]


@pytest.mark.parametrize("name", [name for name in watched() if name != "empty"])
@pytest.mark.parametrize("change", CHANGES)
def test_a_vigil_notices_whatever_is_done_to_a_tensor(name: str, change: str) -> None:
    state = watched()
    vigil = Vigil(describe(state, Limits()))
    assert vigil.changed() == []
    if name == "inferred" and change != "without a version":
        with torch.inference_mode():
            CHANGES[change](state[name])
    else:
        CHANGES[change](state[name])
    assert vigil.changed() == [f"['{name}']"]


def test_a_source_whose_neighbours_in_memory_change_is_not_blamed() -> None:
    """Bytes between the leaves are not its business."""
    whole = torch.randn(4 * MIB)
    source = {"even": whole[::2], "head": whole[:4], "part": torch.randn(MIB)}

    def busy(tensor: torch.Tensor) -> None:
        whole.numpy()[5::2] += 1.0

    def work(rank: int, pg: Any) -> Any:
        if rank == 1:
            return transfuse.PGTransport(pg, TIMEOUT, CPU).recv_checkpoint(0)
        return transfuse.PGTransport(Wrapped(pg, busy), TIMEOUT, CPU, same_host=False).send_checkpoint([1], source)

    with Ranks(2, 40) as ranks:
        sent, received = ranks.outcomes(work)
    assert_exact(source, received.get())
    sent.get()


# -------------------------------------------------------------------------------------------------------- cancellation


def our_threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("transfuse")]


@pytest.mark.usefixtures("group_route")
@pytest.mark.parametrize("who", ["receiver", "source"])
def test_an_exception_in_the_progress_callback_ends_the_transfer_at_all_ends(who: str) -> None:
    def stop(progress: dict[int, transfuse.Progress]) -> None:
        if any(p.bytes for p in progress.values()):
            raise KeyError("stop")

    def work(rank: int, pg: Any) -> Any:
        show: Any = stop if (rank == 2) == (who == "receiver") and rank != 1 else False
        # Slow enough for the callback to see some of it long before it is over.
        slow = {"max_bytes_per_second": 8.0 * MIB} if rank < 2 else {}
        transport = transfuse.PGTransport(pg, TIMEOUT, CPU, progress=show, **slow)
        if rank == 2:
            return transport.recv_checkpoint([0, 1])
        return transport.send_checkpoint([2], state())

    started = time.monotonic()
    with Ranks(3, 40) as ranks:
        first, second, received = ranks.outcomes(work)
        assert time.monotonic() - started < TIMEOUT.total_seconds() / 2
        if who == "receiver":
            assert isinstance(received.error, KeyError)
            assert isinstance(first.error, transfuse.SendFailed)
            assert isinstance(second.error, transfuse.SendFailed)
            assert "KeyError" in str(first.error)
        else:
            assert isinstance(first.error, KeyError)
            assert_exact(state(), received.get())
            second.get()
        assert our_threads() == []

        def again(rank: int, pg: Any) -> Any:
            transport = transfuse.PGTransport(pg, TIMEOUT, CPU)
            return transport.recv_checkpoint([0, 1]) if rank == 2 else transport.send_checkpoint([2], state())

        assert_exact(state(), ranks.outcomes(again)[2].get())


def test_the_first_word_after_an_interrupt_belongs_to_the_next_call() -> None:
    """The receive that was posted for it cannot be taken back."""
    go = threading.Event()

    def work(rank: int, pg: Any) -> Any:
        if rank == 0:
            go.wait(20)
            return transfuse.PGTransport(pg, TIMEOUT, CPU).send_checkpoint([1], {"w": torch.ones(10)})

        def stop(progress: dict[int, transfuse.Progress]) -> None:
            waited.append(progress[0].phase)
            if waited.count("waiting for the offer") == 3:
                raise KeyboardInterrupt

        waited: list[str] = []
        with pytest.raises(KeyboardInterrupt):
            transfuse.PGTransport(pg, TIMEOUT, CPU, progress=stop).recv_checkpoint(0)
        go.set()
        return transfuse.PGTransport(pg, TIMEOUT, CPU).recv_checkpoint(0)

    with Ranks(2, 40) as ranks:
        sent, received = ranks.outcomes(work)
        assert bool((received.get()["w"] == 1).all())
        sent.get()
        deadline = time.monotonic() + 30
        while our_threads() and time.monotonic() < deadline:
            time.sleep(0.05)
        assert our_threads() == []


def test_an_absent_source_costs_one_thread_however_often_it_stays_away() -> None:
    def work(rank: int, pg: Any) -> Any:
        for turn in range(4):
            mover = transfuse.PGTransport(pg, timedelta(seconds=1), CPU)
            if rank == 0:
                mover.send_checkpoint([1], {"w": torch.full((10,), float(turn))})
            elif rank == 1:
                assert float(mover.recv_checkpoint([0, 2])["w"][0]) == turn
        if rank == 1:
            time.sleep(0.5)
            return our_threads()
        return None

    with Ranks(3, 40) as ranks:
        _, threads, _ = ranks.outcomes(work)
        assert threads.get().count("transfuse-peer-2") == 1

        def late(rank: int, pg: Any) -> Any:
            """It comes after all, and its word is heard by whoever listens next."""
            mover = transfuse.PGTransport(pg, TIMEOUT, CPU)
            if rank == 2:
                return mover.send_checkpoint([1], {"w": torch.ones(10)})
            return mover.recv_checkpoint(2) if rank == 1 else None

        assert bool((ranks.outcomes(late)[1].get()["w"] == 1).all())


# ---------------------------------------------------------------------------------------------------------- concurrent


@pytest.mark.usefixtures("either_route")
def test_many_ranks_at_once_in_any_order_neither_mix_nor_deadlock() -> None:
    """Sources 0 and 1 serve 2 and 3, each in another order, while 2 and 3 serve 0 and 1; each wants both."""

    def work(rank: int, pg: Any) -> Any:
        mine, others = ([0, 1], [2, 3]) if rank < 2 else ([2, 3], [0, 1])
        theirs = others if rank % 2 else others[::-1]
        results: dict[str, Any] = {}

        def send() -> None:
            transfuse.PGTransport(pg, TIMEOUT, CPU).send_checkpoint(theirs, state(float(mine[0] + 1)))

        sender = threading.Thread(target=send)
        sender.start()
        results["state"] = transfuse.PGTransport(pg, TIMEOUT, CPU).recv_checkpoint(theirs)
        sender.join()
        return results["state"]

    with Ranks(4, 60) as ranks:
        for _ in range(3):
            outcomes = ranks.outcomes(work)
            for rank, outcome in enumerate(outcomes):
                assert_exact(state(3.0 if rank < 2 else 1.0), outcome.get())


def test_transfers_on_several_groups_at_once_do_not_mix() -> None:
    with Ranks(3, 60) as one, Ranks(3, 60) as other:

        def work(rank: int, pg: Any) -> Any:
            groups = (one.pgs[rank], other.pgs[rank])
            arrived: list[Any] = [None, None]

            def talk(which: int) -> None:
                transport = transfuse.PGTransport(cast(Any, groups[which]), TIMEOUT, CPU)
                if rank == 2:
                    arrived[which] = transport.recv_checkpoint([0, 1])
                else:
                    transport.send_checkpoint([2], state(which + 1.0))

            threads = [threading.Thread(target=talk, args=(which,)) for which in (0, 1)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            return arrived

        arrived = one.outcomes(work)[2].get()
        assert_exact(state(1.0), arrived[0])
        assert_exact(state(2.0), arrived[1])
