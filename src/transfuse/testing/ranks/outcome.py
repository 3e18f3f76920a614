"""The outcome of a rank: a value or an error; and the launcher's own errors."""

from __future__ import annotations

import signal
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Generic, TypeVar

__all__ = ["Died", "Late", "Outcome", "RanksFailed", "RemoteError", "how_it_ended"]

T = TypeVar("T")


@dataclass(frozen=True)
class Outcome(Generic[T]):
    """The outcome of one rank: a value or an error, and how many seconds its function took."""

    value: T | None = None
    error: BaseException | None = None
    seconds: float = field(default=0.0, compare=False, repr=False)

    def get(self) -> T:
        """Return the value, or raise the error."""
        if self.error is not None:
            raise self.error
        return self.value  # type: ignore[return-value]


class Late(AssertionError):
    """A rank has not ended by its deadline."""


class Died(Exception):
    """A process ended before its function did. ``signal`` is the signal that ended it, or None."""

    def __init__(self, rank: int, exitcode: int | None) -> None:
        self.rank, self.exitcode = rank, exitcode
        self.signal = -exitcode if exitcode is not None and exitcode < 0 else None
        how = f"died with signal {self.signal}" if self.signal else f"exited with code {exitcode}"
        super().__init__(f"rank {rank} {how}")


class RemoteError(Exception):
    """Stands for an error or a value of another process that cannot be pickled."""

    def __init__(self, summary: str, traceback: str = "") -> None:
        self.summary, self.traceback = summary, traceback
        super().__init__(summary, traceback)

    def __str__(self) -> str:
        return f"{self.summary}\n{self.traceback}".rstrip()


class RanksFailed(Exception):
    """Some ranks raised or died. ``causes`` maps rank to what is known; tracebacks are in the notes."""

    def __init__(self, causes: Mapping[int, str]) -> None:
        self.causes = dict(causes)
        super().__init__("; ".join(f"rank {rank} {cause}" for rank, cause in sorted(self.causes.items())))

    @classmethod
    def of(cls, errors: Mapping[int, BaseException]) -> RanksFailed:
        failed = cls({rank: _cause(error) for rank, error in errors.items()})
        for rank, error in sorted(errors.items()):
            notes = [*getattr(error, "__notes__", ()), getattr(error, "traceback", "")]
            for note in filter(None, notes):
                failed.add_note(f"rank {rank}, {note}")
        return failed


def _cause(error: BaseException) -> str:
    if isinstance(error, Died):
        return f"died: {how_it_ended(error.exitcode)}"
    if isinstance(error, RemoteError):
        return f"failed: {error.summary}"
    return f"failed: {type(error).__name__}: {error}"


def how_it_ended(exitcode: int | None) -> str:
    """An exit code in words."""
    if exitcode is not None and exitcode < 0:
        with suppress(ValueError):
            return f"signal {signal.Signals(-exitcode).name}"
    return f"exit code {exitcode}"
