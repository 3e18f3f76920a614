"""``heal()`` among ranks that live: who gets what, what is asked of whom, and one error for all."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import pytest
import torch

import transfuse
from moves import CPU
from tampering import Passing, Tampering
from transfuse._memory import half_healed
from transfuse._report import Report
from transfuse._wire import messages
from transfuse.testing.ranks import Outcome, Ranks

TIMEOUT = timedelta(seconds=10)
#: Where somebody waits for it to pass.
SHORT = timedelta(seconds=2)
#: Made by somebody who does not look at types, as callers do.
call: Any = transfuse.heal


class Worker:
    """What one rank has: a weight, a moment that a new one lacks, and a step."""

    def __init__(self, step: int | None, *, moment: bool = False, n: int = 1000) -> None:
        self.step = step
        value = float(step or 0)
        self.weight = torch.full((n,), value)
        self.moment = torch.full((n,), value + 0.5) if moment else None
        self.asked = 0
        self.loaded: list[Any] = []
        self.reports: list[Report] = []

    def state(self) -> dict[str, Any]:
        self.asked += 1
        return {"weight": self.weight} | ({} if self.moment is None else {"moment": self.moment})

    def load(self, state: dict[str, Any]) -> None:
        self.loaded.append(state)
        self.moment = state.get("moment")

    def heal(self, pg: Any, **options: Any) -> int | None:
        options = {"timeout": TIMEOUT, "step": self.step} | options
        step = transfuse.heal(self.state, group=pg, **options)
        if step is not None and step.report is not None:
            self.reports.append(step.report)
        return step


def healed(workers: list[Worker], wrap: Callable[[int, Any], Any] = lambda rank, pg: pg, **options: Any) -> list[Any]:
    """The outcome of each rank."""
    with Ranks(len(workers)) as ranks:
        return ranks.outcomes(lambda rank, pg: workers[rank].heal(wrap(rank, pg), **options))


def one_error(outcomes: list[Outcome[Any]]) -> transfuse.TransfuseError:
    """All ranks have raised errors of one class with one text."""
    errors = [outcome.error for outcome in outcomes]
    assert all(isinstance(error, transfuse.TransfuseError) for error in errors), errors
    assert len({(type(error), error.args[0]) for error in errors if error is not None}) == 1, errors
    assert isinstance(errors[0], transfuse.TransfuseError)
    # A rank with torn leaves names them in one more line.
    assert {str(error).split("\ntorn: ")[0] for error in errors} == {errors[0].args[0]}
    return errors[0]


@pytest.fixture(autouse=True)
def _nothing_left_behind() -> Iterator[None]:
    yield
    names = [thread.name for thread in threading.enumerate()]
    assert not [name for name in names if name.startswith("transfuse-roll-call")], names


# ---------------------------------------------------------------------------------------------------- who gets what


@pytest.mark.usefixtures("either_route")
@pytest.mark.parametrize("steps", [[7, None], [None, 7], [7, 6, None, 7], [3, 7, 7, 2], [None, None, -4]])
@pytest.mark.parametrize("atomic", [False, True])
def test_ranks_that_are_behind_receive_in_place_and_all_return_one_step(steps: list[int | None], atomic: bool) -> None:
    workers = [Worker(step) for step in steps]
    newest = max(step for step in steps if step is not None)
    assert [outcome.get() for outcome in healed(workers, atomic=atomic)] == [newest] * len(steps)
    sources = [rank for rank, step in enumerate(steps) if step == newest]
    for rank, worker in enumerate(workers):
        assert bool((worker.weight == newest).all())
        assert worker.asked == 2, "there may be collectives in it"
        (report,) = worker.reports
        if rank in sources:
            assert report.direction == "send"
        else:
            assert report.peers == tuple(sources), "from all of them at once"


def test_load_gets_the_whole_state_on_ranks_that_were_behind_and_only_there() -> None:
    workers = [Worker(5, moment=True), Worker(None), Worker(5, moment=True), Worker(4, moment=True)]
    with Ranks(4) as ranks:
        assert ranks.run(lambda rank, pg: workers[rank].heal(pg, load=workers[rank].load)) == [5] * 4
    assert [len(worker.loaded) for worker in workers] == [0, 1, 0, 1]
    for worker in workers:
        assert worker.moment is not None
        assert bool((worker.moment == 5.5).all())
    assert workers[1].loaded[0]["weight"] is workers[1].weight, "in place"


def test_stages_of_a_pipeline_each_get_their_own() -> None:
    states = [{name: torch.full((5,), value)} for value in (9.0, 0.0) for name in ("first", "second", "third")]
    with Ranks(6) as ranks:

        def work(rank: int, pg: Any) -> int | None:
            return transfuse.heal(lambda: states[rank], step=9 if rank < 3 else None, group=pg, timeout=TIMEOUT)

        assert ranks.run(work) == [9] * 6
    assert all(bool((tensor == 9).all()) for state in states for tensor in state.values())
    assert all(len(state) == 1 for state in states)


class Counting(Passing):
    """A group that counts what leaves it."""

    def __init__(self, pg: Any) -> None:
        super().__init__(pg)
        self.sent: list[bytes] = []

    def send(self, tensors: list[torch.Tensor], rank: int, tag: int) -> Any:
        self.sent.append(tensors[0].numpy().tobytes())
        return super().send(tensors, rank, tag)


@pytest.mark.parametrize("steps", [[4, 4, 4], [None, None, None], [0, 0, 0]])
def test_if_nobody_is_behind_each_rank_says_one_word_to_each_other_and_nothing_is_asked(
    steps: list[int | None],
) -> None:
    workers = [Worker(step) for step in steps]
    groups: dict[int, Counting] = {}
    outcomes = healed(workers, lambda rank, pg: groups.setdefault(rank, Counting(pg)))
    assert [outcome.get() for outcome in outcomes] == [steps[0]] * 3
    for worker in workers:
        assert worker.asked == 0
        assert not worker.reports
    for group in groups.values():
        assert [len(word) for word in group.sent] == [messages.BLOCK_BYTES] * 2
        assert all(word.startswith(messages.MAGIC) for word in group.sent), "plain bytes, no pickle"


@pytest.mark.parametrize(("restarts", "warnings"), [("0", 0), ("2", 1)])
def test_ranks_that_torchrun_has_all_started_again_are_told_what_would_hold_their_state(
    restarts: str, warnings: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", restarts)
    assert [outcome.get() for outcome in healed([Worker(None), Worker(None)])] == [None, None]
    assert len([text for text in caplog.messages if "transfuse.keep() holds its state" in text]) == warnings
    caplog.clear()
    assert [outcome.get() for outcome in healed([Worker(3), Worker(None)])] == [3, 3]
    assert not [text for text in caplog.messages if "torchrun" in text]


def test_a_rank_that_has_nothing_is_behind_one_at_step_zero() -> None:
    workers = [Worker(0), Worker(None)]
    workers[0].weight.fill_(3)
    assert [outcome.get() for outcome in healed(workers)] == [0, 0]
    assert bool((workers[1].weight == 3).all())


def test_alone_and_again_and_again() -> None:
    assert [outcome.get() for outcome in healed([Worker(8)])] == [8]
    workers = [Worker(1), Worker(None), Worker(1)]

    def work(rank: int, pg: Any) -> list[int | None]:
        found: list[int | None] = []
        for turn in range(2, 5):
            found.append(workers[rank].heal(pg))
            workers[rank].step = turn if rank == turn % 3 else found[-1]
            workers[rank].weight.fill_(float(workers[rank].step or 0))
        return [*found, workers[rank].heal(pg)]

    with Ranks(3) as ranks:
        assert ranks.run(work) == [[1, 2, 3, 4]] * 3
    assert all(bool((worker.weight == 4).all()) for worker in workers)


# --------------------------------------------------------------------------------------------- one error, on all ranks


def test_without_load_what_arrives_fresh_is_an_error_that_names_it_and_nothing_was_touched() -> None:
    workers = [Worker(5, moment=True), Worker(3, moment=True), Worker(None), Worker(5, moment=True)]
    with Ranks(4) as ranks:
        outcomes = ranks.outcomes(lambda rank, pg: workers[rank].heal(pg))
        error = one_error(outcomes)
        assert type(error) is transfuse.StateError
        assert "rank 2: StateError: 1 leaves cannot land in what state_dict() returns" in str(error)
        assert "no load= to get them: ['moment']" in str(error)
        assert "rank 1 is as it was\n  rank 2 is as it was" in str(error)
        assert bool((workers[1].weight == 3).all() and (workers[2].weight == 0).all())
        # The group is as good as before, and so are the ranks.
        assert ranks.run(lambda rank, pg: workers[rank].heal(pg, load=workers[rank].load)) == [5] * 4
    assert all(bool((worker.weight == 5).all()) for worker in workers)


def test_without_load_a_value_that_differs_is_an_error_and_one_that_does_not_is_none() -> None:
    for lr, fits in ((0.1, True), (0.2, False)):
        states = [{"w": torch.ones(3), "lr": 0.1}, {"w": torch.zeros(3), "lr": lr}]
        with Ranks(2) as ranks:

            def work(rank: int, pg: Any, states: Any = states) -> int | None:
                return transfuse.heal(lambda: states[rank], step=1 - rank, group=pg, timeout=TIMEOUT)

            outcomes = ranks.outcomes(work)
        assert bool(states[1]["w"].all()) is fits  # type: ignore[attr-defined]
        if not fits:
            assert "['lr']" in str(one_error(outcomes))


def test_with_atomic_the_vote_comes_when_everything_has_arrived() -> None:
    """Rank 2 has no load: rank 1, which has all that it needs aside by then, is not touched either."""
    workers = [Worker(5, moment=True), Worker(3, moment=True), Worker(None)]
    with Ranks(3) as ranks:
        outcomes = ranks.outcomes(
            lambda rank, pg: workers[rank].heal(pg, atomic=True, load=workers[rank].load if rank < 2 else None)
        )
    assert "rank 2: StateError: 1 leaves cannot land" in str(one_error(outcomes))
    assert bool((workers[1].weight == 3).all())
    assert not workers[1].loaded


def test_a_target_that_does_not_fit_is_everybodys_error() -> None:
    workers = [Worker(5), Worker(3), Worker(None, n=999), Worker(5)]
    error = one_error(healed(workers))
    assert isinstance(error, transfuse.TargetMismatch)
    assert error.mismatches
    assert "['weight']" in str(error)
    assert bool((workers[1].weight == 3).all())
    assert "rank 1 is as it was" in str(error)


@pytest.mark.parametrize("rank", [0, 1, 2], ids=["a source", "the other source", "a receiver"])
def test_a_state_dict_that_raises_is_everybodys_error(rank: int) -> None:
    workers = [Worker(5), Worker(5), Worker(None), Worker(4)]
    raised = ValueError("no state today")

    def state() -> dict[str, Any]:
        raise raised

    workers[rank].state = state  # type: ignore[method-assign]
    outcomes = healed(workers)
    assert f"rank {rank}: ValueError: no state today" in str(one_error(outcomes))
    assert outcomes[rank].error.__cause__ is raised
    assert all(outcomes[other].error.__cause__ is not raised for other in range(4) if other != rank)


class Interrupted(BaseException):
    """As if by Ctrl-C."""


@pytest.mark.parametrize("has_notes", [False, True])
def test_an_interrupted_rank_raises_that_and_the_others_are_told(has_notes: bool) -> None:
    """With notes of an earlier heal in this process, the state is asked for before anybody is told anything."""
    workers = [Worker(5), Worker(5), Worker(None)]
    other = {"other": torch.zeros(3)}
    if has_notes:
        half_healed.note_torn(other, ["['other']"])
        assert half_healed.has_notes()

    def state() -> dict[str, Any]:
        raise Interrupted

    workers[2].state = state  # type: ignore[method-assign]
    outcomes = healed(workers)
    half_healed.forget(other)
    assert isinstance(outcomes[2].error, Interrupted)
    assert "rank 2: Interrupted" in str(one_error(outcomes[:2]))


def test_one_that_speaks_something_else_is_named() -> None:
    def garbage(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.fill_(7) if tensor.numel() == messages.BLOCK_BYTES else tensor

    workers = [Worker(5), Worker(5), Worker(None)]
    outcomes = healed(workers, lambda rank, pg: Tampering(pg, garbage) if rank == 1 else pg, timeout=SHORT)
    for rank in (0, 2):
        assert "rank 1 is lost: rank 1, while healing: not a transfuse message" in str(outcomes[rank].error)
    assert not workers[2].weight.any()


# ------------------------------------------------------------------------------------- what a failed heal leaves behind


def test_a_load_that_raises_is_everybodys_error_and_that_rank_is_no_source_before_it_is_healed() -> None:
    def fail(state: Any) -> None:
        raise OSError("disk full")

    workers = [Worker(5), Worker(3), Worker(None)]
    with Ranks(3) as ranks:
        outcomes = ranks.outcomes(lambda rank, pg: workers[rank].heal(pg, load=fail if rank == 1 else None))
        error = one_error(outcomes)
        assert "rank 1: StateError: load() failed after everything had landed: OSError: disk full" in str(error)
        assert "rank 2 has step 5 now, whole" in str(error)
        assert "rank 1 may be half-written" in str(error)
        # Rank 0 is gone, say, and comes back with nothing. Rank 1 believes that it is at 3; nobody must get that.
        # Rank 2 has begun anew.
        workers[0].step = None
        workers[2].weight.zero_()
        error = one_error(ranks.outcomes(lambda rank, pg: workers[rank].heal(pg)))
        assert isinstance(error, transfuse.TornState)
        assert "rank 1: TornState: " in str(error)
        assert "['weight']" in str(error)
        # A caller that writes to its tensors knows what is in them.
        workers[1].weight.fill_(3)
        assert ranks.run(lambda rank, pg: workers[rank].heal(pg)) == [3, 3, 3]
    assert not half_healed.look(workers[1].state()).torn


def test_a_rank_that_had_nothing_does_not_begin_at_step_0_with_what_a_failed_heal_has_left_in_it() -> None:
    def fail(state: Any) -> None:
        raise OSError("disk full")

    workers = [Worker(5), Worker(None), Worker(None)]
    with Ranks(3) as ranks:
        one_error(ranks.outcomes(lambda rank, pg: workers[rank].heal(pg, load=fail if rank == 1 else None)))
        # Rank 0 is gone, and comes back with nothing. Rank 2 got everything, though its caller knows of no step.
        gone, workers[0] = workers[0], Worker(None)
        assert ranks.run(lambda rank, pg: workers[rank].heal(pg)) == [5, 5, 5]
        assert all(bool((worker.weight == 5).all()) for worker in workers)
        # The same, but nobody got everything.
        workers = [gone, Worker(None), Worker(None)]
        one_error(ranks.outcomes(lambda rank, pg: workers[rank].heal(pg, load=fail)))
        workers[0] = Worker(None)
        error = one_error(ranks.outcomes(lambda rank, pg: workers[rank].heal(pg)))
        assert isinstance(error, transfuse.TornState)
        for rank in (1, 2):
            assert f"rank {rank}: TornState: a heal that failed left 1 leaves half-written (['weight'])" in str(error)
        for worker in workers:
            worker.weight.zero_()
        assert ranks.run(lambda rank, pg: workers[rank].heal(pg)) == [None] * 3


def test_a_rank_that_got_everything_before_another_failed_knows_which_step_it_has() -> None:
    """It was at 3 and is at 5, but its caller was told an error and no step."""

    def fail(state: Any) -> None:
        raise OSError("disk full")

    workers = [Worker(5), Worker(3), Worker(None)]
    with Ranks(3) as ranks:
        one_error(ranks.outcomes(lambda rank, pg: workers[rank].heal(pg, load=fail if rank == 2 else None)))
        assert bool((workers[1].weight == 5).all())
        assert half_healed.look(workers[1].state()).step == 5
        workers[0].step = None
        workers[0].weight.zero_()
        assert ranks.run(lambda rank, pg: workers[rank].heal(pg)) == [5, 5, 5]
        assert bool((workers[0].weight == 5).all())
        # What is trained further counts by what its owner says.
        workers[1].weight.fill_(6)
        workers[1].step = 6
        assert ranks.run(lambda rank, pg: workers[rank].heal(pg)) == [6, 6, 6]


class CutOff(Passing):
    """A group from which nothing leaves after this number of bytes."""

    def __init__(self, pg: Any, nbytes: int) -> None:
        super().__init__(pg)
        self._left = nbytes

    def send(self, tensors: list[torch.Tensor], rank: int, tag: int) -> Any:
        is_bulk = tensors[0].nbytes > messages.BLOCK_BYTES
        self._left -= tensors[0].nbytes if is_bulk else 0
        if self._left < 0 and is_bulk:
            raise RuntimeError("cut off")
        return super().send(tensors, rank, tag)


@pytest.mark.usefixtures("group_route", "small_parcels")
@pytest.mark.parametrize("atomic", [False, True])
def test_a_transfer_that_breaks_off_names_what_is_torn_on_the_rank_and_the_rank_on_all(atomic: bool) -> None:
    workers = [Worker(5, n=1 << 20), Worker(3, n=1 << 20), Worker(5)]
    with Ranks(3) as ranks:

        def work(rank: int, pg: Any) -> int | None:
            group = CutOff(pg, 2 << 20) if rank == 0 else pg

            def state() -> object:  # The empty leaf has arrived before the rest breaks off.
                return {"empty": torch.empty(0), **workers[rank].state()} if rank < 2 else {}

            return transfuse.heal(state, step=workers[rank].step, atomic=atomic, lanes=1, group=group, timeout=SHORT)

        outcomes = ranks.outcomes(work)
    error = one_error(outcomes)
    errors: list[Any] = [outcome.error for outcome in outcomes]
    mine = errors[1]
    assert mine.torn == (() if atomic else ("['weight']",)), mine
    assert errors[0].torn == errors[2].torn == ()
    if atomic:
        assert bool((workers[1].weight == 3).all())
        assert "rank 1 is as it was" in str(error)
    else:
        assert set(workers[1].weight.tolist()) == {3.0, 5.0}
        assert "rank 1 may be half-written: ['weight']" in str(error)
        assert half_healed.look(workers[1].state()).torn == ("['weight']",)


# ------------------------------------------------------------------------------------------------------------ arguments


class Untagged(Passing):
    def name(self) -> str:
        return "nccl-like"


def test_wrong_arguments_are_refused_before_anybody_is_told_anything() -> None:
    with Ranks(1) as ranks:
        (pg,) = ranks.pgs
        with pytest.raises(TypeError, match=r"state takes a mapping of objects, .* got NoneType"):
            call(None, step=1, group=pg)
        with pytest.raises(TypeError, match="step takes an int or None"):
            call(dict, step=1.5, group=pg)
        with pytest.raises(TypeError, match="load takes a function or None"):
            call(dict, step=1, load={}, group=pg)
        with pytest.raises(TypeError, match=r"missing 1 required keyword-only argument: 'step'"):
            call(dict, group=pg)
        with pytest.raises(ValueError, match="timeout must be positive"):
            call(dict, step=1, group=pg, timeout=0)
        with pytest.raises(ValueError, match=r"heal\(\) needs a group .* with tags for main memory"):
            call(dict, step=1, group=Untagged(pg))
        with pytest.raises(TypeError, match=r"heal\(\) takes state, and everything else by name .* got 4 arguments"):
            call(pg, TIMEOUT, CPU, dict, step=1)
    with pytest.raises(TypeError, match=r"heal\(\) needs a process group: call .*init_process_group\(\) first"):
        call(dict, step=1)


@pytest.mark.parametrize(
    ("newest", "behind"), [(True, 1), (1, 1.0), (0.0, -0.0), (float("nan"), float("nan")), ({1, 9}, {9, 1})]
)
def test_values_are_compared_bit_for_bit_without_load(newest: Any, behind: Any) -> None:
    states = [{"w": torch.ones(3), "flag": newest}, {"w": torch.zeros(3), "flag": behind}]
    with Ranks(2) as ranks:
        outcomes = ranks.outcomes(
            lambda rank, pg: transfuse.heal(
                lambda: states[rank], step=7 if rank == 0 else None, group=pg, timeout=TIMEOUT
            )
        )
    if repr(newest) == repr(behind) or isinstance(newest, set):
        assert [outcome.get() for outcome in outcomes] == [7, 7]
    else:
        assert "['flag']" in str(one_error(outcomes))
        assert not states[1]["w"].any()
