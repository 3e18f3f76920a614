"""Progress: numbers that the conversations' threads update and the calling thread shows."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Any, TextIO

from transfuse._phases import DONE, FAILED, MOVING, Phase
from transfuse._tuning import PROGRESS_STILL_SECONDS

#: The most phases that a bar names at once.
MOST_PHASES = 3


#: Guards the bytes that several threads count.
_counting = threading.Lock()


@dataclass
class Progress:
    """How far the transfer with one peer is."""

    #: Bytes to move. None until known. A source whose receiver has other sources too knows it only at the end.
    total_bytes: int | None = None
    #: Bytes that have moved. Falls when parcels arrived damaged and are sent again.
    bytes: int = 0
    #: The current phase: ``doing`` of a :class:`transfuse._phases.Phase`, or "done", or "failed".
    phase: str = "starting"
    #: Bytes that need not move, since the target holds them already.
    kept_bytes: int = 0
    #: Seconds since the call began, and since bytes began to move.
    seconds: float = 0.0
    moving_seconds: float = 0.0

    def advance(self, nbytes: int) -> None:
        """Count bytes that have moved. Several threads may do so."""
        with _counting:
            self.bytes += nbytes

    @property
    def fraction(self) -> float | None:
        """From 0 to 1; None until ``total_bytes`` is known."""
        if self.total_bytes is None:
            return None
        return self.bytes / self.total_bytes if self.total_bytes else float(self.phase == DONE)

    @property
    def bytes_per_second(self) -> float:
        """The average since bytes began to move."""
        return self.bytes / self.moving_seconds if self.bytes and self.moving_seconds else 0.0

    @property
    def seconds_left(self) -> float | None:
        """Seconds to the end at the average rate so far; None while the total or the rate is unknown."""
        if self.total_bytes is None or not self.bytes_per_second:
            return None
        return (self.total_bytes - self.bytes) / self.bytes_per_second


#: A function that the calling thread calls with the progress of all conversations, by rank: at least every 100 ms, and
#: once at the end. An exception that it raises ends the transfer.
Show = Callable[[dict[int, Progress]], object]


class _View:
    """Takes copies of the live progress that the conversations' threads update, and adds the times."""

    def __init__(self, live: Mapping[int, Progress]) -> None:
        self._live = live
        self._began = time.monotonic()
        #: For each rank: when it was last seen without bytes; when it began to wait for the want (infinity once it
        #: sends); and when it was first seen to be over.
        self._still = dict.fromkeys(live, self._began)
        self._waits: dict[int, float] = {}
        self._over: dict[int, float] = {}

    def take(self) -> dict[int, Progress]:
        now = time.monotonic()
        return {rank: self._copy(rank, live, now) for rank, live in self._live.items()}

    def _copy(self, rank: int, live: Progress, now: float) -> Progress:
        copy = replace(live)
        if copy.total_bytes is not None:
            # The conversation's thread updates the two numbers one after the other, and may be between them.
            copy.bytes = min(copy.bytes, copy.total_bytes)
        if copy.phase in (DONE, FAILED):
            now = self._over.setdefault(rank, now)
        elif not copy.bytes:
            self._still[rank] = now
        if copy.phase == Phase.WAIT_FOR_WANT.doing:
            self._waits.setdefault(rank, now)
        elif copy.phase == Phase.SEND.doing:
            self._waits[rank] = float("inf")
        # A receiver that reads the source's memory itself reports little before its end, and not when it begins.
        since = min(self._still[rank], self._waits.get(rank, now)) if copy.bytes else self._still[rank]
        copy.seconds, copy.moving_seconds = now - self._began, now - since
        return copy


class _WholeDrawings:
    """A terminal that gets each drawing of a bar in one write.

    tqdm moves down to its line, draws and moves up again in several writes. Other processes may draw between them.
    """

    def __init__(self, terminal: TextIO) -> None:
        self._terminal = terminal
        self._parts: list[str] = []

    def write(self, text: str) -> int:
        self._parts.append(text)
        return len(text)

    def flush(self) -> None:
        """Do nothing: ``commit`` writes, once the drawing is complete."""

    def commit(self) -> None:
        parts, self._parts = self._parts, []
        # A transfer does not fail because its terminal is gone.
        with suppress(OSError, ValueError):
            self._terminal.write("".join(parts))
            self._terminal.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._terminal, name)


class Bar:
    """A tqdm bar over all conversations, in a terminal or a notebook. Without either it shows nothing."""

    def __init__(self, label: str) -> None:
        from tqdm.auto import tqdm

        self._whole = _WholeDrawings(sys.stderr) if sys.stderr is not None and sys.stderr.isatty() else None
        self._tqdm: Any = tqdm(
            desc=label,
            unit="B",
            unit_scale=True,
            unit_divisor=1024,
            miniters=1,
            dynamic_ncols=True,
            disable=None,
            file=self._whole,
            position=_line_of_terminal(),
        )
        self._commit()
        self._bytes, self._text = 0, ""
        self._drawn = time.time()

    def __call__(self, progress: Mapping[int, Progress]) -> None:
        bar, now = self._tqdm, time.time()
        if bar.disable:
            return
        known = [one.total_bytes for one in progress.values() if one.total_bytes is not None]
        total = sum(known) if len(known) == len(progress) else None
        if total != bar.total and total is not None and not self._bytes:
            # A notebook's bar takes a new total only from reset().
            bar.reset(total)
        bar.total = total
        # A bar does not go back. While parcels are sent again, it stands still.
        moved = max(sum(one.bytes for one in progress.values()) - self._bytes, 0)
        if not self._bytes and moved:
            # The rate counts from the first byte, without the wait before it.
            bar.start_t = bar.last_print_t = now - max(one.moving_seconds for one in progress.values() if one.bytes)
        self._bytes += moved
        text = _phases(progress)
        changed, self._text = text != self._text, text
        bar.set_postfix_str(text, refresh=False)
        if bar.update(moved):
            self._drawn = now
        elif changed or now - self._drawn > PROGRESS_STILL_SECONDS:
            bar.refresh()
            self._drawn = now
        self._commit()

    def _commit(self) -> None:
        if self._whole is not None:
            self._whole.commit()

    def __enter__(self) -> Bar:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        bar = self._tqdm
        bar.set_postfix_str("" if kind is None else f"failed: {kind.__name__}", refresh=False)
        # close() draws the last state where the cursor is, so the old drawing is cleared first.
        bar.clear()
        bar.close()
        self._commit()


def _phases(progress: Mapping[int, Progress]) -> str:
    """The phases of the conversations that move no bytes now and are not done."""
    waiting = {rank: one.phase for rank, one in progress.items() if one.phase not in MOVING and one.phase != DONE}
    if len(set(waiting.values())) == 1 and len(waiting) == len(progress):
        return next(iter(waiting.values()))
    named = [f"{rank} {phase}" for rank, phase in waiting.items()]
    return ", ".join([*named[:MOST_PHASES], *(["…"] if len(named) > MOST_PHASES else [])])


def _line_of_terminal() -> int | None:
    """The terminal line of this worker: torchrun's workers share a terminal. None: tqdm finds a line."""
    local = os.environ.get("LOCAL_RANK", "")
    return int(local) if local.isdecimal() and int(local) else None


@contextmanager
def showing(option: bool | Show, label: str, progress: Mapping[int, Progress]) -> Iterator[Callable[[], object]]:
    """Set up what the ``progress=`` option asks for, and give a function that shows the progress when called."""
    if option is False:
        yield lambda: None
        return
    view = _View(progress)
    if option is not True:
        yield lambda: option(view.take())
        return
    with Bar(label) as bar:
        yield lambda: bar(view.take())
