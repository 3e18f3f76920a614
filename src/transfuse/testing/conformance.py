"""Run a transport through the conformance cases, all at once or one at a time."""

from __future__ import annotations

import contextlib
import traceback
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor

from transfuse.testing._failures import FAILURES
from transfuse.testing._group import Factory
from transfuse.testing._round_trips import ROUND_TRIPS
from transfuse.testing._stage import PATIENCE, Case

__all__ = ["CASES", "Case", "Results", "assert_conforms", "check"]

CASES: tuple[Case, ...] = (*ROUND_TRIPS, *FAILURES)


class Results(dict[str, Exception | None]):
    """Maps each case's name to None if the transport passed, or to the exception. Prints as a table."""

    @property
    def failed(self) -> dict[str, Exception]:
        return {name: error for name, error in self.items() if error is not None}

    def __str__(self) -> str:
        width = max(map(len, self), default=0)
        lines = [f"{name:{width}}  {'passed' if e is None else f'FAILED  {_line(e)}'}" for name, e in self.items()]
        return "\n".join((*lines, f"{len(self) - len(self.failed)} of {len(self)} cases passed"))


def check(factory: Factory, *, cases: Iterable[Case] = CASES, patience: float = PATIENCE, workers: int = 1) -> Results:
    """Run the cases, which never hang, and return the result of each.

    Args:
        factory: makes a transport, see :class:`Factory`.
        cases: all, or those that the transport is meant to pass.
        patience: seconds after which a rank that still waits has failed. Larger on a busy machine: transports whose
            peer never comes have a timeout of a quarter of it, and the process groups have all of it.
        workers: how many cases to run at once. Most of their time is spent waiting for peers that never come.
    """

    def outcome(case: Case) -> Exception | None:
        try:
            case.run(factory, patience=patience)
        except Exception as error:
            _forget(error)
            return error
        return None

    chosen = tuple(cases)
    with ThreadPoolExecutor(workers, "conformance") as pool:
        return Results(zip(map(str, chosen), pool.map(outcome, chosen), strict=True))


def assert_conforms(
    factory: Factory, *, cases: Iterable[Case] = CASES, patience: float = PATIENCE, workers: int = 1
) -> None:
    """Like :func:`check`, but raise AssertionError with every failure."""
    __tracebackhide__ = True
    chosen = {case.name: case for case in cases}
    results = check(factory, cases=chosen.values(), patience=patience, workers=workers)
    if failed := results.failed:
        lines = [f"\n{name}: {chosen[name].about}\n    {_line(error)}" for name, error in failed.items()]
        text = f"{len(failed)} of {len(results)} cases failed:{''.join(lines)}"
        raise AssertionError(text) from ExceptionGroup("the failures", list(failed.values()))


def _line(error: BaseException) -> str:
    text = " ".join(f"{type(error).__name__}: {error}".split())
    return text if len(text) <= 160 else f"{text[:150]}…"


def _forget(error: BaseException | None) -> None:
    """Release what the frames of a traceback hold: whole states, and groups with their connections."""
    while error is not None:
        with contextlib.suppress(RuntimeError):
            traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__
