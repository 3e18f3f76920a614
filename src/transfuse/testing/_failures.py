"""Conformance cases for failures: the right ends fail, in time, and say why."""

from __future__ import annotations

import signal
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor

from transfuse.testing._group import CPU, CountingGroup, Factory
from transfuse.testing._processes import die, run_processes
from transfuse.testing._stage import Cases, Stage, expect, expect_failed, expect_name, expect_rank, value
from transfuse.testing._states import numbers
from transfuse.testing.exact import assert_exact, differences
from transfuse.testing.ranks import Died, Late, Outcome

FAILURES = Cases()
_case = FAILURES.case


def _state(count: int = 24) -> dict[str, Tensor]:
    """A state in many pieces, larger than the sockets' buffers."""
    return {f"w{i:02}": torch.full((1 << 18,), float(i + 1)) for i in range(count)}


_HALF = 12 << 20


# Several receivers


@_case("several/all", "All receivers get everything.")
def _all(stage: Stage) -> None:
    state = {"w": numbers(300_000), "l": [numbers(10, seed=i) for i in range(20)], "n": 3}
    receivers = range(1, 5)
    with stage.ranks(5) as ranks:
        jobs = {0: stage.source(state, receivers)} | {rank: stage.receiver() for rank in receivers}
        arrived = stage.all_well(ranks, jobs)
    for rank in receivers:
        assert_exact(state, arrived[rank])


def _one_of_three(stage: Stage, second: Any) -> dict[int, Outcome[Any]]:
    """Send to ranks 1, 2 and 3. Rank 2 receives into ``target``, or is absent if that is None."""
    state = _state(4)
    with stage.ranks(4) as ranks:
        jobs = {rank: stage.receiver(timeout=stage.short) for rank in (1, 3)}
        if second is not None:
            jobs[2] = stage.receiver(second, stage.short)
        return ranks.run({0: stage.source(state, (1, 2, 3), stage.short), **jobs}, stage.limit)


def _others_are_fine(ended: dict[int, Outcome[Any]]) -> Exception:
    """Check that the others have everything and the source raised; return its error."""
    for rank in (1, 3):
        assert_exact(_state(4), value(ended[rank]))
    return expect_failed(ended[0])


_UNFIT = {"w00": torch.zeros(3)}


@_case("several/one-refuses", "A receiver that refuses fails alone: the others get everything, the source raises.")
def _one_refuses(stage: Stage) -> None:
    ended = _one_of_three(stage, _UNFIT)
    expect_failed(ended[2])
    _others_are_fine(ended)


@_case("several/one-absent", "A receiver that does not come fails alone, and the source raises after its timeout.")
def _one_absent(stage: Stage) -> None:
    _others_are_fine(_one_of_three(stage, None))


@_case("several/error-names-the-rank", "The source's error names the receiver that failed.")
def _names_the_rank(stage: Stage) -> None:
    expect_rank(expect_failed(_one_of_three(stage, _UNFIT)[0]), 2)


@_case("several/sender-cannot-encode", "Every receiver hears of what the source cannot send.")
def _several_cannot_encode(stage: Stage) -> None:
    with stage.ranks(3) as ranks:
        jobs = {0: stage.source({"culprit": lambda: 3}, (1, 2)), 1: stage.receiver(), 2: stage.receiver()}
        for end in ranks.run(jobs, stage.limit).values():
            expect_failed(end)


# Timeouts: the transport's own, which is shorter than the group's.


@_case("timeout/no-source", "A receiver whose source does not come raises after its timeout.")
def _no_source(stage: Stage) -> None:
    with stage.ranks(2) as ranks:
        expect_failed(ranks.run({1: stage.receiver(timeout=stage.short)}, stage.limit)[1])


@_case("timeout/no-receiver", "A source whose receiver does not come raises after its timeout.")
def _no_receiver(stage: Stage) -> None:
    with stage.ranks(2) as ranks:
        expect_failed(ranks.run({0: stage.source(_state(2), timeout=stage.short)}, stage.limit)[0])


def _stall(stage: Stage, stalls: int, judged: int) -> None:
    def trap(group: CountingGroup) -> None:
        if max(group.sent, group.received) > _HALF:
            group.closed.wait(60)
            raise ConnectionError("this rank was made to stall")

    with stage.ranks(2) as ranks:
        ranks.groups[stalls].trap = trap
        jobs = {0: stage.source(_state(), timeout=stage.short), 1: stage.receiver(timeout=stage.short)}
        expect_failed(ranks.run(jobs, stage.limit, only=judged)[judged])


@_case("timeout/source-stalls", "A receiver whose source stops midway raises after its timeout.")
def _source_stalls(stage: Stage) -> None:
    _stall(stage, 0, 1)


@_case("timeout/receiver-stalls", "A source whose receiver stops midway raises after its timeout.")
def _receiver_stalls(stage: Stage) -> None:
    _stall(stage, 1, 0)


@_case("timeout/slow-is-not-late", "A transfer that takes longer than the timeout but moves on is not given up.")
def _slow(stage: Stage) -> None:
    state, paused = _state(), 0

    def slow(group: CountingGroup) -> None:
        # Pause for an eighth of the timeout every 2 MiB: in all 1.5 timeouts, at a time at most a quarter of one.
        nonlocal paused
        pauses = group.sent // (2 << 20)
        group.closed.wait(min(pauses - paused, 2) * stage.short / 8)
        paused = pauses

    with stage.ranks(2) as ranks:
        ranks.groups[0].trap = slow
        jobs = {0: stage.source(state, timeout=stage.short), 1: stage.receiver(timeout=stage.short)}
        assert_exact(state, stage.all_well(ranks, jobs)[1])


# Refusal: both ends hear of it, long before the timeout.


@_case("refusal/sender-cannot-encode", "A leaf that cannot be sent fails at both ends, long before the timeout.")
def _cannot_encode(stage: Stage) -> None:
    stage.refused({"fine": numbers(3), "culprit": lambda: 3})


@_case("refusal/sender-names-the-leaf", "The source's error names the leaf that cannot be sent.")
def _sender_names(stage: Stage) -> None:
    with stage.ranks(2) as ranks:
        jobs = {0: stage.source({"fine": numbers(3), "culprit": lambda: 3}), 1: stage.receiver()}
        expect_name(expect_failed(ranks.run(jobs, stage.limit, only=0)[0]), "culprit")


@_case("refusal/receiver-hears-the-leaf", "The receiver's error names the leaf that the source cannot send.")
def _receiver_names(stage: Stage) -> None:
    expect_name(stage.refused({"fine": numbers(3), "culprit": lambda: 3})[1], "culprit")


@_case("refusal/callback-raises", "A callback that raises fails at both ends, long before the timeout.")
def _callback_raises(stage: Stage) -> None:
    def fail() -> Any:
        raise RuntimeError("the model is not there yet")

    _, received = stage.refused({"w": numbers(3)}, fail)
    expect("the model is not there yet" in str(received), f"the receiver raised something else: {received!r}")


def _refuses(name: str, about: str, make: Callable[[], Tensor]) -> None:
    def body(stage: Stage) -> None:
        sent, received = stage.refused({"culprit": numbers(4)}, lambda: {"culprit": make()})
        expect_name(sent, "culprit")
        expect_name(received, "culprit")

    _case(f"refusal/{name}", about)(body)


_refuses("dtype", "A target of another dtype fails by name at both ends.", lambda: torch.zeros(4, dtype=torch.int32))
_refuses("shape", "A target of another shape fails by name at both ends.", lambda: torch.zeros(2, 2))
_refuses("size", "A target of another size fails by name at both ends.", lambda: torch.zeros(5))


_sprung: set[int] = set()


def _spring(trap: int) -> None:
    _sprung.add(trap)


class _Trap:
    """Unpickling it runs code that the sender chose."""

    def __reduce__(self) -> tuple[Any, ...]:
        return _spring, (id(self),)


@_case("refusal/nothing-executes", "A leaf that would run code where it is unpickled does not run it.")
def _nothing_executes(stage: Stage) -> None:
    trap = _Trap()
    with stage.ranks(2) as ranks:
        ranks.run({0: stage.source({"culprit": trap}), 1: stage.receiver()}, stage.limit, all_well=True)
    sprung = id(trap) in _sprung
    _sprung.discard(id(trap))
    expect(not sprung, "the receiver ran code that the source chose")


# Death: processes that are killed while bytes move.


def _die_midway(group: CountingGroup) -> None:
    if max(group.sent, group.received) > _HALF:
        die()


def _work(factory: Factory, group: CountingGroup, patience: float, doomed: int) -> list[str]:
    """Rank 0 sends to all others, and one rank is killed midway; each receiver returns the differences it found."""
    if group.rank() == doomed:
        group.trap = _die_midway
    transport = factory(group, timedelta(seconds=patience / 4), CPU)
    if group.rank() == 0:
        transport.send_checkpoint(list(range(1, group.size())), _state())
        return []
    return differences(_state(), transport.recv_checkpoint(0))


def _lose_source(factory: Factory, group: CountingGroup, patience: float) -> list[str]:
    return _work(factory, group, patience, 0)


def _lose_receiver(factory: Factory, group: CountingGroup, patience: float) -> list[str]:
    return _work(factory, group, patience, 1)


def _killed(end: Outcome[Any]) -> None:
    if isinstance(end.error, Late):
        raise end.error
    expect(
        isinstance(end.error, Died) and end.error.signal == signal.SIGKILL,
        f"it was not killed midway, because too few bytes passed through its group: {end}",
    )


def _raised(end: Outcome[Any], limit: float) -> Exception:
    error = expect_failed(end)
    expect(not isinstance(error, Died), f"it died too: {error}")
    expect(end.seconds <= limit, f"it raised only after {end.seconds:.1f} s: {error}")
    return error


@_case("death/source-killed", "A receiver whose source is killed midway raises within its timeout.")
def _source_killed(stage: Stage) -> None:
    ended = run_processes(stage.factory, _lose_source, 2, stage.patience)
    _killed(ended[0])
    _raised(ended[1], stage.patience)


@_case("death/receiver-killed", "A receiver that is killed midway dies alone: the others get everything.")
def _receiver_killed(stage: Stage) -> None:
    ended = run_processes(stage.factory, _lose_receiver, 4, stage.patience)
    _killed(ended[1])
    for rank in (2, 3):
        expect(value(ended[rank]) == [], f"rank {rank} has not what was sent: {ended[rank].value}")
    _raised(ended[0], stage.patience)


@_case("death/error-names-the-rank", "The source's error names the receiver that was killed.")
def _death_names_the_rank(stage: Stage) -> None:
    ended = run_processes(stage.factory, _lose_receiver, 2, stage.patience)
    _killed(ended[1])
    expect_rank(_raised(ended[0], stage.patience), 1)
