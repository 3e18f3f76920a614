"""One run of the job: generation after generation, until every worker has finished, whichever workers are killed."""

from __future__ import annotations

import time
from collections import defaultdict
from dataclasses import dataclass
from typing import Literal, Protocol

from examples.demo.crew import Crew
from examples.demo.words import Begun, Done, Finished, Go, Killed, Lost, Moving, Over, Ready, Word

from transfuse.testing.ranks import RanksFailed

__all__ = ["Course", "Event", "Kill", "Watcher", "run"]

#: How much of a transfer has moved when one of its sources is killed.
MIDDLE = 0.35
#: The assumed time of a step until one has been seen.
STEP_SECONDS = 0.1
#: Somebody else may kill workers too, but there is a limit.
MOST_DEATHS = 100
TICK_SECONDS = 0.1
#: The step of a run that has not begun.
NONE = -1


@dataclass(frozen=True)
class Kill:
    """Send SIGKILL to this worker in this step, when this fraction of a step's time has passed."""

    rank: int
    step: int
    fraction: float = 0.4


@dataclass(frozen=True)
class Course:
    """The plan of a run."""

    until: int
    #: Begin anew from the seed, or with the file of this step.
    begin: int | Literal["seed"] = "seed"
    #: What to do about a death: the others heal the worker, or all are ended and begin again.
    remedy: Literal["heal", "restart"] = "heal"
    kills: tuple[Kill, ...] = ()
    #: For each kill, also kill a source in the middle of the healing.
    chaos: bool = False
    saves: tuple[int, ...] = ()
    max_bytes_per_second: float | None = None


@dataclass(frozen=True)
class Event:
    """One thing that a worker said, or that was done to it."""

    rank: int
    word: Word


class Watcher(Protocol):
    """An observer of a run."""

    def tell(self, event: Event) -> None:
        """Called right after an event."""

    def tick(self) -> None:
        """Called now and then, as time passes."""


def run(crew: Crew, course: Course, watcher: Watcher) -> list[Event]:
    """A run with everything that happened in it."""
    return _Run(crew, course, watcher).events()


class _Run:
    def __init__(self, crew: Crew, course: Course, watcher: Watcher) -> None:
        self._crew, self._course, self._watcher = crew, course, watcher
        self._events: list[Event] = []
        self._generation = NONE
        self._begin: int | Literal["seed", "as you are"] = course.begin
        #: Workers that are left from an earlier run wait for orders.
        self._ready = {rank for rank in crew.ranks if rank in crew}
        self._finished: set[int] = set()
        self._kills = list(course.kills)
        #: When the next kill is due.
        self._due: dict[Kill, float] = {}
        #: Whether a source is to be killed in the next healing.
        self._chaos = False
        #: Workers that were killed and whose death has not been noticed yet.
        self._dying: set[int] = set()
        self._begun: dict[int, Begun] = {}
        self._seconds: dict[int, list[float]] = defaultdict(list)
        self._deaths = 0

    def events(self) -> list[Event]:
        for rank in self._crew.ranks:
            if rank not in self._crew:
                self._note(rank, self._crew.start(rank))
        self._go_on()
        everybody = set(self._crew.ranks)
        # On a busy machine a kill may come after its victim has finished: wait for the death and what follows.
        while self._due or self._dying or self._finished != everybody or self._ready != everybody:
            pause = min(self._due.values(), default=float("inf")) - time.monotonic()
            for rank, word in self._crew.hear(max(0.0, min(TICK_SECONDS, pause))):
                self._note(rank, word)
                self._react(rank, word)
            for kill in [kill for kill, due in self._due.items() if due <= time.monotonic()]:
                del self._due[kill]
                self._chaos = self._course.chaos
                self._kill(kill.rank)
            self._watcher.tick()
        return self._events

    def _note(self, rank: int, word: Word) -> None:
        event = Event(rank, word)
        self._events.append(event)
        self._watcher.tell(event)

    def _react(self, rank: int, word: Word) -> None:
        match word:
            case Ready():
                self._ready.add(rank)
                self._go_on()
            case Begun():
                self._begun[rank] = word
                self._plan_kill(rank, word)
            case Done():
                self._seconds[rank].append(word.when - self._begun[rank].when)
            case Finished():
                self._finished.add(rank)
            case Moving() if self._chaos and MIDDLE * word.total_bytes <= word.bytes < word.total_bytes:
                self._chaos = False
                self._kill(word.sources[0], healing=True)
            case Lost():
                self._replace(rank)

    def _go_on(self) -> None:
        """Start the next generation, once all workers wait for it and not all of them are done."""
        everybody = set(self._crew.ranks)
        if self._ready != everybody or self._finished == everybody:
            return
        self._ready.clear()
        self._finished.clear()
        self._generation = self._crew.next_generation()
        course = self._course
        go = Go(self._generation, self._begin, course.until, course.saves, course.max_bytes_per_second)
        self._begin = "as you are"
        for rank in everybody:
            self._crew.order(rank, go)

    def _plan_kill(self, rank: int, begun: Begun) -> None:
        for kill in [kill for kill in self._kills if kill.rank == rank and kill.step <= begun.step]:
            self._kills.remove(kill)
            # The shortest step so far, so that the step is not over before the kill.
            usual = min(self._seconds[rank], default=STEP_SECONDS)
            self._due[kill] = begun.when + kill.fraction * usual

    def _kill(self, rank: int, *, healing: bool = False) -> None:
        if rank in self._crew and rank not in self._dying:
            self._dying.add(rank)
            step = self._begun[rank].step if rank in self._begun else 0
            self._note(rank, Killed(self._generation, step, healing))
            self._crew.kill(rank)

    def _replace(self, dead: int) -> None:
        """Handle a worker's death."""
        self._deaths += 1
        self._dying.discard(dead)
        if self._deaths > MOST_DEATHS:
            raise RanksFailed({dead: f"and others have died, {MOST_DEATHS} times in all"})
        if self._course.remedy == "heal":
            gone = {dead}
            for rank in self._crew.ranks:
                if rank != dead and rank in self._crew:
                    self._crew.order(rank, Over(self._generation))
        else:
            gone = set(self._crew.ranks)
            self._crew.end()
            self._begin = self._course.begin
        self._ready -= gone
        self._finished -= gone
        # If somebody else killed the worker first, plan another kill.
        self._kills += [kill for kill in self._due if kill.rank in gone]
        self._due = {kill: due for kill, due in self._due.items() if kill.rank not in gone}
        for rank in sorted(gone):
            self._note(rank, self._crew.start(rank))
