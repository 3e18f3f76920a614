"""Threads in every order: a deterministic scheduler over the critical sections of one condition.

The threads are real, but one runs at a time, from one acquisition of the condition to the next. Which one goes on there
is a choice; :func:`explore` runs a scenario once for every sequence of choices, depth first. Left to itself the running
thread goes on, and when it stops the first of the others does. With a bound, every order is run that deviates from this
no more often than that; most races need one or two. Without a bound, every order there is.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Self

__all__ = ["Director", "Judge", "Stuck", "explore"]

#: Gets how each thread ended, in the order in which they were started, and raises if that is wrong.
Judge = Callable[[list[BaseException | None]], object]

#: How often all threads may wait at once, until their waits expire, before they count as stuck.
QUIET_ROUNDS = 3


class Stuck(AssertionError):
    """All threads wait, again and again, and nobody changes anything."""


@dataclass
class _Thread:
    thread: threading.Thread
    go: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))
    ready: bool = True
    ended: bool = False
    error: BaseException | None = None


@dataclass(frozen=True)
class _Choice:
    """Which of how many threads went on."""

    index: int
    options: int


class ScheduledCondition:
    """Looks like a :class:`threading.Condition` over a reentrant lock. Every outermost acquisition is a choice."""

    def __init__(self, director: Director) -> None:
        self._director = director
        self._depth = 0
        self._owner: _Thread | None = None
        self._waiting: list[_Thread] = []

    def __enter__(self) -> Self:
        if self._depth == 0 or self._director.running is not self._owner:
            self._director.pause()
            assert self._depth == 0, "one thread runs at a time, and leaves the lock before it stops"
            self._owner = self._director.running
        self._depth += 1
        return self

    def __exit__(self, *_: object) -> None:
        self._depth -= 1

    def wait(self, timeout: float | None = None) -> bool:
        depth, self._depth = self._depth, 0
        me = self._director.running
        assert me is not None
        me.ready = False
        self._waiting.append(me)
        self._director.pause()
        self._depth, self._owner = depth, me
        return True

    def notify_all(self) -> None:
        self._director.quiet = 0
        for thread in self._waiting:
            thread.ready = True
        self._waiting.clear()

    def expire(self) -> None:
        """All waits are over."""
        for thread in self._waiting:
            thread.ready = True
        self._waiting.clear()


class Director:
    """One run of a scenario."""

    def __init__(self, prefix: Sequence[int]) -> None:
        self._prefix = prefix
        self._threads: list[_Thread] = []
        self._stopped = threading.Semaphore(0)
        self.choices: list[_Choice] = []
        self.running: _Thread | None = None
        self.quiet = 0
        self.condition = ScheduledCondition(self)

    def start(self, work: Callable[[], object]) -> None:
        """Add a thread, which runs once :meth:`run` does."""

        def run() -> None:
            one.go.acquire()
            try:
                work()
            except BaseException as error:
                one.error = error
            one.ended, one.ready = True, False
            self._stopped.release()

        one = _Thread(threading.Thread(target=run, daemon=True))
        self._threads.append(one)
        one.thread.start()

    def pause(self) -> None:
        """In a thread of the scenario: let the director choose who goes on. Outside of a run nothing is scheduled."""
        me = self.running
        if me is None or me.thread is not threading.current_thread():
            return
        self._stopped.release()
        me.go.acquire()

    def run(self) -> list[BaseException | None]:
        """Run all threads to their ends; how each ended."""
        while not all(one.ended for one in self._threads):
            ready = [one for one in self._threads if one.ready]
            if not ready:
                self.quiet += 1
                if self.quiet > QUIET_ROUNDS:
                    raise Stuck(f"nobody goes on; choices so far: {[choice.index for choice in self.choices]}")
                self.condition.expire()
                continue
            ready.sort(key=lambda one: one is not self.running)  # The first choice is to go on.
            at = len(self.choices)
            index = self._prefix[at] if at < len(self._prefix) else 0
            self.choices.append(_Choice(index, len(ready)))
            self.running = ready[index]
            self.running.go.release()
            self._stopped.acquire()
        self.running = None
        return [one.error for one in self._threads]


def explore(scenario: Callable[[Director], Judge], *, deviations: int | None = None) -> int:
    """Run a scenario in every order, each time from the beginning; how many there were.

    ``scenario`` starts its threads and returns what judges their ends. Its error says by which choices to get there.
    """
    prefix: list[int] | None = []
    runs = 0
    while prefix is not None:
        director = Director(prefix)
        judge = scenario(director)
        runs += 1
        try:
            judge(director.run())
        except BaseException as error:
            error.add_note(f"order number {runs}: {[choice.index for choice in director.choices]}")
            raise
        prefix = _next_prefix(director.choices, deviations)
    return runs


def _next_prefix(choices: Sequence[_Choice], deviations: int | None) -> list[int] | None:
    """The choices of the next run: as late as possible another than before."""
    for at in reversed(range(len(choices))):
        before = [choice.index for choice in choices[:at]]
        affordable = deviations is None or sum(index > 0 for index in before) < deviations
        if choices[at].index + 1 < choices[at].options and affordable:
            return [*before, choices[at].index + 1]
    return None
