"""The demo's results: whether both runs were the same, bit for bit, and how long each recovery took."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, TypeVar

import torch
from examples.demo.run import Event
from examples.demo.words import (
    Done,
    Finished,
    Formed,
    Healed,
    Killed,
    Left,
    Loaded,
    Lost,
    Ready,
    Saved,
    Started,
    Word,
)

import transfuse
from transfuse._report import Report

__all__ = [
    "PARTS",
    "Outcome",
    "Recovery",
    "differences",
    "healings",
    "losses",
    "mean_losses",
    "parts_between",
    "restart",
]

#: The phases of a recovery. Either way of recovering has some of these, one after the other.
PARTS = (
    "noticing",
    "ending the others",
    "starting",
    "loading",
    "forming the group",
    "transfer",
    "steps",
)

#: The command that was measured, for captions.
COMMAND = "python -m examples.demo"

W = TypeVar("W", bound=Word)


@dataclass(frozen=True)
class Recovery:
    """From a kill until every worker has done the step that it cut off (or the next, if that one was done already)."""

    rank: int
    step: int
    #: Seconds of each phase, one after the other.
    parts: dict[str, float]
    #: How many steps had to be repeated, with the one that was cut off.
    steps: int
    reports: tuple[Report, ...] = ()

    @property
    def seconds(self) -> float:
        return sum(self.parts.values())

    def to_dict(self) -> dict[str, Any]:
        return {
            "worker": self.rank,
            "step": self.step,
            "seconds": self.seconds,
            "parts": self.parts,
            "steps": self.steps,
            "reports": [report.to_dict() for report in self.reports],
        }


@dataclass(frozen=True)
class Outcome:
    """All measurements."""

    settings: dict[str, Any]
    parameters: int
    state_bytes: int
    undisturbed: Sequence[Event]
    disturbed: Sequence[Event]
    healings: Sequence[Recovery]
    #: None unless it was asked for.
    restart: Recovery | None
    seconds: float
    #: The machine's load before the demo began.
    load: float
    #: The differences that were found, one line each.
    wrong: Sequence[str]

    @property
    def recoveries(self) -> list[Recovery]:
        """The recoveries, in the order in which they are shown."""
        return [*self.healings, *([self.restart] if self.restart else [])]

    @property
    def names(self) -> list[str]:
        """Titles of the recoveries."""
        many = len(self.healings) > 1
        healed = [f"healed ({at})" if many else "healed" for at in range(1, len(self.healings) + 1)]
        return [*healed, *(["restarted from a file"] if self.restart else [])]

    @property
    def killed_sources(self) -> int:
        return sum(event.word.healing for event in self.disturbed if isinstance(event.word, Killed))

    @property
    def caption(self) -> str:
        """When and where this was measured."""
        versions = f"torch {torch.__version__}, transfuse {transfuse.__version__}"
        busy = f"{os.cpu_count()} cores with a load of {self.load:.1f} before"
        return f"{COMMAND}, {datetime.now(UTC).date()}, {busy}, {versions}"

    def to_dict(self) -> dict[str, Any]:
        began = self.disturbed[0].word.when
        saved = [event.word for event in self.disturbed if isinstance(event.word, Saved)]
        return {
            "versions": {"transfuse": transfuse.__version__, "torch": torch.__version__},
            "machine": {"cpus": os.cpu_count(), "platform": platform.platform(), "load": self.load},
            "date": datetime.now(UTC).date().isoformat(),
            "settings": self.settings,
            "model": {"parameters": self.parameters, "state_bytes": self.state_bytes},
            "equal": not self.wrong,
            "differences": list(self.wrong),
            "losses": {
                "undisturbed": [list(row) for _, row in sorted(losses(self.undisturbed).items())],
                "killed": [list(row) for _, row in sorted(losses(self.disturbed).items())],
            },
            "kills": [
                {"worker": e.rank, "step": e.word.step, "during_healing": e.word.healing, "at": e.word.when - began}
                for e in self.disturbed
                if isinstance(e.word, Killed)
            ],
            "healings": [healing.to_dict() for healing in self.healings],
            "restart_from_file": self.restart and self.restart.to_dict(),
            "saves": [{"step": word.step, "seconds": word.seconds, "bytes": word.bytes} for word in saved],
            "seconds": self.seconds,
        }


# ---------------------------------------------------------------------------------------------------------- bit for bit


def losses(events: Iterable[Event]) -> dict[int, tuple[float, ...]]:
    """The loss of every rank, by step. A worker that reports a step reports the losses of all ranks."""
    return {e.word.step: e.word.losses for e in events if isinstance(e.word, Done)}


def mean_losses(events: Iterable[Event]) -> list[float]:
    """The job's loss at each step."""
    return [sum(row) / len(row) for _, row in sorted(losses(events).items())]


def differences(undisturbed: Sequence[Event], disturbed: Sequence[Event]) -> list[str]:
    """Every way in which the second run differs from the first on any worker, and in which workers of a run differ."""
    wrong: list[str] = []
    expected = losses(undisturbed)
    for name, events in (("undisturbed", undisturbed), ("killed", disturbed)):
        # Each worker reports each step that it did, and again if it repeated the step.
        wrong += [
            f"{name} run, step {e.word.step}: worker {e.rank} has other losses"
            for e in events
            if isinstance(e.word, Done) and _bits(e.word.losses) != _bits(expected.get(e.word.step, ()))
        ]
        if missing := expected.keys() - losses(events).keys():
            wrong.append(f"{name} run: steps {sorted(missing)} are missing")
    ends = {
        (name, e.rank): e.word.digests
        for name, events in (("undisturbed", undisturbed), ("killed", disturbed))
        for e in events
        if isinstance(e.word, Finished)
    }
    first, *others = ends
    for name, rank in others:
        found, right = ends[name, rank], ends[first]
        wrong += [
            f"{name} run, worker {rank}: {path} is not that of the {first[0]} run's worker {first[1]}"
            for path in sorted(found.keys() | right.keys())
            if found.get(path) != right.get(path)
        ]
    return wrong


def _bits(values: Sequence[float]) -> list[str]:
    # Compare bits: equal floats need not have the same bits, and NaNs are not even equal.
    return [value.hex() for value in values]


# ---------------------------------------------------------------------------------------------------------------- times


class _Parts:
    """Seconds of each phase. Each phase begins where the one before ended."""

    def __init__(self, start: float) -> None:
        self._now = start
        self.seconds: dict[str, float] = {}

    def until(self, name: str, whens: Iterable[float]) -> None:
        """End this phase at the latest of these moments."""
        end = max([self._now, *whens])
        self.seconds[name] = self.seconds.get(name, 0.0) + end - self._now
        self._now = end


def parts_between(start: float, whens: Mapping[str, Iterable[float]]) -> dict[str, float]:
    """Seconds of each phase: it begins where the one before ended, and ends at the latest of its moments."""
    parts = _Parts(start)
    for name, moments in whens.items():
        parts.until(name, moments)
    return parts.seconds


def healings(events: Sequence[Event], workers: int) -> list[Recovery]:
    """One recovery for each kill, except kills during another's healing: those belong to that recovery."""
    kills = [at for at, event in enumerate(events) if isinstance(event.word, Killed) and not event.word.healing]
    return [_healing(events[at], events[at + 1 :], workers) for at in kills]


def _healing(event: Event, after: Sequence[Event], workers: int) -> Recovery:
    killed = event.word
    assert isinstance(killed, Killed)
    parts = _Parts(killed.when)
    reports: list[Report] = []
    before = killed.generation
    for generation in sorted({word.generation for word in _of(after, Formed)} - {before}):
        formed = [word.when for word in _of(after, Formed) if word.generation == generation]
        healed = [word for word in _of(after, Healed) if word.generation == generation]
        reports += [word.report for word in healed]
        parts.until("noticing", [word.when for word in _of(after, Left) if word.generation == before])
        parts.until("starting", [word.when for word in _of(after, Ready) if word.when < min(formed)])
        parts.until("forming the group", formed)
        parts.until("transfer", [word.when for word in healed])
        done = _first_done(after, generation)
        if len(done) == workers:
            parts.until("steps", done)
            break
        before = generation
    return Recovery(event.rank, killed.step, parts.seconds, 1, tuple(reports))


def restart(events: Sequence[Event]) -> Recovery:
    """The recovery of a run in which one worker was killed and all started again from the file."""
    ((at, event),) = [(at, event) for at, event in enumerate(events) if isinstance(event.word, Killed)]
    killed = event.word
    assert isinstance(killed, Killed)
    parts = _Parts(killed.when)
    # What the other workers say before the death is noticed belongs to the run that it cuts off.
    lost = next(at for at in range(at, len(events)) if isinstance(events[at].word, Lost))
    after = events[lost + 1 :]
    loaded = _of(after, Loaded)
    parts.until("noticing", [events[lost].word.when])
    parts.until("ending the others", [min(word.when for word in _of(after, Started))])
    parts.until("starting", [word.when for word in _of(after, Ready) if word.when < loaded[0].when])
    parts.until("loading", [word.when for word in loaded])
    parts.until("forming the group", [word.when for word in _of(after, Formed)])
    parts.until("steps", [word.when for word in _of(after, Done) if word.step == killed.step])
    return Recovery(event.rank, killed.step, parts.seconds, killed.step + 1 - loaded[0].step)


def _of(events: Iterable[Event], kind: type[W]) -> list[W]:
    return [event.word for event in events if isinstance(event.word, kind)]


def _first_done(events: Iterable[Event], generation: int) -> list[float]:
    """When each worker had done its first step of this generation, or had none to do."""
    done: dict[int, float] = {}
    for event in events:
        if isinstance(event.word, Done | Finished) and event.word.generation == generation:
            done.setdefault(event.rank, event.word.when)
    return list(done.values())
