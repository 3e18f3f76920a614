"""The messages between the parent and its workers. Plain data; every message of a worker says when it was sent.

Times are ``time.monotonic()``, which all processes of a machine share.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from transfuse._report import Report

__all__ = [
    "Begun",
    "Done",
    "Finished",
    "Formed",
    "Go",
    "Healed",
    "Healing",
    "Killed",
    "Left",
    "Loaded",
    "Lost",
    "Moving",
    "Over",
    "Ready",
    "Saved",
    "Settings",
    "Started",
    "Warned",
    "Word",
]


@dataclass(frozen=True)
class Settings:
    """What a worker is told when it starts."""

    workers: int
    width: int
    steps: int
    seed: int
    #: The directory where the job saves files, as one would without transfuse.
    folder: Path
    #: Whether a healing worker reads its sources' memory. If not, bytes go over the group, as between hosts.
    same_host: bool = False


# ------------------------------------------------------------------------------------------------ the parent to workers


@dataclass(frozen=True)
class Go:
    """Form the group of this generation and train until step ``until``.

    First begin anew from the seed, load the file of a step, or go on with the present state: then the workers with the
    newest state heal the others.
    """

    generation: int
    begin: int | Literal["seed", "as you are"]
    until: int
    #: Save the state before these steps.
    saves: tuple[int, ...] = ()
    #: Rate limit of each source of a healing worker.
    max_bytes_per_second: float | None = None


@dataclass(frozen=True)
class Over:
    """A member of this generation is dead: abandon whatever you are waiting for."""

    generation: int


# ------------------------------------------------------------------------------------------------ workers to the parent


@dataclass(frozen=True)
class Word:
    when: float = field(default_factory=time.monotonic, kw_only=True)


@dataclass(frozen=True)
class Ready(Word):
    """The worker waits for a :class:`Go`."""


@dataclass(frozen=True)
class Loaded(Word):
    """The worker has loaded the file."""

    step: int


@dataclass(frozen=True)
class Formed(Word):
    """The worker is a member of this generation's group."""

    generation: int


@dataclass(frozen=True)
class Healing(Word):
    """The worker begins to receive."""

    step: int
    sources: tuple[int, ...]


@dataclass(frozen=True)
class Moving(Word):
    """The progress of the worker's transfer."""

    bytes: int
    total_bytes: int
    sources: tuple[int, ...]


@dataclass(frozen=True)
class Warned(Word):
    """A warning that the library logged."""

    text: str


@dataclass(frozen=True)
class Healed(Word):
    generation: int
    step: int
    report: Report


@dataclass(frozen=True)
class Begun(Word):
    step: int


@dataclass(frozen=True)
class Done(Word):
    """The worker has applied this step. The losses are those of all ranks, exact."""

    generation: int
    step: int
    losses: tuple[float, ...]


@dataclass(frozen=True)
class Saved(Word):
    step: int
    seconds: float
    bytes: int


@dataclass(frozen=True)
class Left(Word):
    """The worker has left its generation, and still has the state with which this step begins (-1: none)."""

    generation: int
    step: int
    why: str


@dataclass(frozen=True)
class Finished(Word):
    """The worker has finished. Holds a digest of each leaf of its state, by path."""

    generation: int
    digests: dict[str, str]


# ------------------------------------------------------------------------------- what the parent itself does or notices


@dataclass(frozen=True)
class Started(Word):
    pid: int


@dataclass(frozen=True)
class Killed(Word):
    """SIGKILL has been sent. ``healing``: to a source, in the middle of a transfer."""

    generation: int
    step: int
    healing: bool = False


@dataclass(frozen=True)
class Lost(Word):
    """A worker's process has ended."""

    how: str
