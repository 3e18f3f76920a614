"""Ranks as processes, for the conformance cases in which one of them is killed."""

from __future__ import annotations

import os
import pickle
import signal
import time
from collections.abc import Callable
from typing import Any

from torch._C._distributed_c10d import PrefixStore

from transfuse.testing._group import CountingGroup, Factory
from transfuse.testing.ranks import Died, Fleet, Late, Outcome, RemoteError, store

# Importing torch takes seconds, and is not part of the test.
_START = 60.0

Work = Callable[[Factory, CountingGroup, float], Any]


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def run_processes(factory: Factory, work: Work, size: int, patience: float) -> dict[int, Outcome[Any]]:
    """Run ``work(factory, group, patience)``, a function of a module, in a process for each rank; return the outcomes.

    A rank that still runs three times ``patience`` after all have started is ended, and counts as :class:`Late`.
    """
    try:
        task = pickle.dumps((work, factory))
    except Exception as error:
        raise TypeError(
            f"this case starts processes, for which the factory must be a class or a function of a module: {error}"
        ) from error
    with Fleet(size, group=False, start=_START) as fleet:
        fleet.start(_run, size, patience, task)
        # Each process ends itself before that.
        return {rank: _judged(rank, end) for rank, end in enumerate(fleet.outcomes(_START + 4 * patience))}


def _judged(rank: int, end: Outcome[Any]) -> Outcome[Any]:
    if isinstance(end.error, Died) and end.error.signal == signal.SIGALRM:
        return Outcome(error=Late(f"rank {rank} had not ended after three times the patience"))
    return end if end.error is not None else end.get()


#: The group lives as long as its process: closing connections early would tell the other ranks something.
_kept: list[CountingGroup] = []


def _run(rank: int, size: int, patience: float, task: bytes) -> Outcome[Any]:
    # This ends the process from outside Python, whatever the transport does.
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_REAL, _START)
    work, factory = pickle.loads(task)
    group = CountingGroup(PrefixStore("conformance", store()), rank, size, patience)
    _kept.append(group)
    signal.setitimer(signal.ITIMER_REAL, 3 * patience)
    started, value, error = time.monotonic(), None, None
    try:
        value = work(factory, group, patience)
    except BaseException as caught:
        error = RemoteError(f"{type(caught).__name__}: {caught}")
    ended = Outcome(value, error, time.monotonic() - started)
    signal.setitimer(signal.ITIMER_REAL, 0)
    return ended
