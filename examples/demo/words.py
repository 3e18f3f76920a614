"""What the parent and its workers tell each other. Plain data; every word of a worker says when it was spoken.

Times are ``time.monotonic()``, which all processes of a machine share.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from transfuse.report import Report

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
    """What a worker knows from its birth."""

    workers: int
    width: int
    steps: int
    seed: int
    #: Where the job saves files, as one would without transfuse.
    folder: Path
    #: Whether a healing worker reads its sources' memory. Otherwise over the group, as between hosts.
    same_host: bool = False


# ------------------------------------------------------------------------------------------------ the parent to workers


@dataclass(frozen=True)
class Go:
    """Form the group of this generation and train until step ``until``.

    First begin anew from the seed, or load the file of a step, or go on with what you have: those that have the newest
    state then heal the others.
    """

    generation: int
    begin: int | Literal["seed", "as you are"]
    until: int
    #: Before which steps the state is saved.
    saves: tuple[int, ...] = ()
    #: The most that a healing worker is given by each of its sources.
    max_bytes_per_second: float | None = None


@dataclass(frozen=True)
class Over:
    """A member of this generation is dead: leave whatever you wait for."""

    generation: int


# ------------------------------------------------------------------------------------------------ workers to the parent


@dataclass(frozen=True)
class Word:
    when: float = field(default_factory=time.monotonic, kw_only=True)


@dataclass(frozen=True)
class Ready(Word):
    """Waits for a :class:`Go`."""


@dataclass(frozen=True)
class Loaded(Word):
    """Has loaded the file."""

    step: int


@dataclass(frozen=True)
class Formed(Word):
    """Is a member of the group of this generation."""

    generation: int


@dataclass(frozen=True)
class Healing(Word):
    """Begins to receive."""

    step: int
    sources: tuple[int, ...]


@dataclass(frozen=True)
class Moving(Word):
    """How far the transfer is."""

    bytes: int
    total_bytes: int
    sources: tuple[int, ...]


@dataclass(frozen=True)
class Warned(Word):
    """What the library logged as a warning."""

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
    """Has applied this step; the losses are those of all ranks, exact."""

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
    """Has left its generation, and still has the state that this step begins with (-1: none)."""

    generation: int
    step: int
    why: str


@dataclass(frozen=True)
class Finished(Word):
    """Is at the end. By path, a digest of each leaf of its state."""

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
