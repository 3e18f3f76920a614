"""Several sources, sources that die, freeze or differ, and many ranks at once."""

from __future__ import annotations

import logging
import os
import re
import signal
import threading
import time
from datetime import timedelta
from typing import Any, cast

import numpy as np
import pytest
import torch
import torch.distributed as dist

import transfuse
from gathering import MIB, Ending, Wrapped, blank, gather, state
from moves import CPU, TIMEOUT
from tampering import Passing
from transfuse.testing.exact import assert_exact
from transfuse.testing.ranks import Fleet, Ranks

pytestmark = pytest.mark.usefixtures("small_parcels")


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


class FallsSilent(Passing):
    """A group from which nothing leaves after this number of sends."""

    def __init__(self, pg: Any, after: int) -> None:
        super().__init__(pg)
        self._left = after

    def send(self, tensors: list[torch.Tensor], rank: int, tag: int) -> Any:
        self._left -= 1
        if self._left < 0:
            raise RuntimeError("cut off")
        return super().send(tensors, rank, tag)


@pytest.mark.parametrize("after", [3, 4, 5, 6])
def test_a_source_that_falls_silent_while_it_describes_itself_does_not_hold_up_the_others(
    after: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its memory is to be read, and the others get no tasks for what could be read: only until it is given up."""
    monkeypatch.setenv("TRANSFUSE_BRIEF_BYTES", "1")
    target = blank(state(mib=4))
    outcomes, _ = gather(
        3,
        lambda rank: state(mib=4),
        target=target,
        timeout=timedelta(seconds=2),
        wrap=lambda rank, pg: FallsSilent(pg, after) if rank == 1 else pg,
        delta=True,
        verify=True,
    )
    assert_exact(state(mib=4), outcomes[-1].get())
    outcomes[0].get()
    outcomes[2].get()


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
    assert type(outcomes[-1].error) is transfuse.NotCovered
    assert re.search(r"\['[ab]'\]: this group talks with one source after another", str(outcomes[-1].error))
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
