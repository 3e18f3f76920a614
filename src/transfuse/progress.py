"""Progress: numbers that conversations keep and the calling thread shows."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Any, TextIO

from transfuse.phases import DONE, FAILED, MOVING, Phase

__all__ = ["Bar", "Progress", "Show", "showing"]

#: So often a bar is drawn again when nothing moves, so that its clock goes on.
STILL_SECONDS = 0.5
#: So many phases a bar names at once.
MOST_PHASES = 3


@dataclass
class Progress:
    """How far the transfer with one peer is."""

    #: What is to move. None until it is known: at a source whose receiver has others too, not before the end.
    total_bytes: int | None = None
    #: What has moved of it. Falls when parcels arrived damaged and are sent again.
    bytes: int = 0
    #: What is being done: ``doing`` of a :class:`transfuse.phases.Phase`, or "done", or "failed".
    phase: str = "starting"
    #: What need not move, since the target holds it already.
    kept_bytes: int = 0
    #: Since the call began; and since bytes began to move.
    seconds: float = 0.0
    moving_seconds: float = 0.0

    @property
    def fraction(self) -> float | None:
        """From 0 to 1; None until it is known what is to move."""
        if self.total_bytes is None:
            return None
        return self.bytes / self.total_bytes if self.total_bytes else float(self.phase == DONE)

    @property
    def bytes_per_second(self) -> float:
        """On average since bytes began to move."""
        return self.bytes / self.moving_seconds if self.bytes and self.moving_seconds else 0.0

    @property
    def seconds_left(self) -> float | None:
        """If it goes on as fast as so far; None as long as that cannot be said."""
        if self.total_bytes is None or not self.bytes_per_second:
            return None
        return (self.total_bytes - self.bytes) / self.bytes_per_second


#: What is called with all conversations' progress, by rank, from the calling thread: at least every 100 ms, and once
#: in the end. What it raises ends the transfer.
Show = Callable[[dict[int, Progress]], object]


class _View:
    """What the conversations' threads keep, as copies that stay as they are, with the time in them."""

    def __init__(self, live: Mapping[int, Progress]) -> None:
        self._live = live
        self._began = time.monotonic()
        #: When each was last seen without bytes, when it began to wait for what is wanted if it has sent nothing yet,
        #: and when it was first seen to be over.
        self._still = dict.fromkeys(live, self._began)
        self._waits: dict[int, float] = {}
        self._over: dict[int, float] = {}

    def take(self) -> dict[int, Progress]:
        now = time.monotonic()
        return {rank: self._copy(rank, live, now) for rank, live in self._live.items()}

    def _copy(self, rank: int, live: Progress, now: float) -> Progress:
        copy = replace(live)
        if copy.total_bytes is not None:
            # Its thread writes one number after the other, and may have come as far as the first.
            copy.bytes = min(copy.bytes, copy.total_bytes)
        if copy.phase in (DONE, FAILED):
            now = self._over.setdefault(rank, now)
        elif not copy.bytes:
            self._still[rank] = now
        if copy.phase == Phase.WAIT_FOR_WANT.doing:
            self._waits.setdefault(rank, now)
        elif copy.phase == Phase.SEND.doing:
            self._waits[rank] = float("inf")
        # Of a receiver that reads by itself little is heard before the end, and nothing when it begins.
        since = min(self._still[rank], self._waits.get(rank, now)) if copy.bytes else self._still[rank]
        copy.seconds, copy.moving_seconds = now - self._began, now - since
        return copy


class _Whole:
    """A terminal to which each picture of a bar goes in one piece.

    tqdm goes down to its line, draws and comes up again in several writes, between which other processes may draw.
    """

    def __init__(self, terminal: TextIO) -> None:
        self._terminal = terminal
        self._parts: list[str] = []

    def write(self, text: str) -> int:
        self._parts.append(text)
        return len(text)

    def flush(self) -> None:
        """Not before the picture is complete."""

    def commit(self) -> None:
        parts, self._parts = self._parts, []
        # A terminal that is gone is no reason to end a transfer.
        with suppress(OSError, ValueError):
            self._terminal.write("".join(parts))
            self._terminal.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._terminal, name)


class Bar:
    """A tqdm bar over all conversations, in a terminal or a notebook. Where there is neither it shows nothing."""

    def __init__(self, label: str) -> None:
        from tqdm.auto import tqdm

        self._whole = _Whole(sys.stderr) if sys.stderr is not None and sys.stderr.isatty() else None
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
            # A notebook's bar learns of a total by this alone.
            bar.reset(total)
        bar.total = total
        # A bar does not go back: where parcels are sent again it waits.
        moved = max(sum(one.bytes for one in progress.values()) - self._bytes, 0)
        if not self._bytes and moved:
            # The rate is that of bytes that move, not of the wait before.
            bar.start_t = bar.last_print_t = now - max(one.moving_seconds for one in progress.values() if one.bytes)
        self._bytes += moved
        text = _phases(progress)
        changed, self._text = text != self._text, text
        bar.set_postfix_str(text, refresh=False)
        if bar.update(moved):
            self._drawn = now
        elif changed or now - self._drawn > STILL_SECONDS:
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
        # Its last state is drawn where the cursor is, wherever it was before.
        bar.clear()
        bar.close()
        self._commit()


def _phases(progress: Mapping[int, Progress]) -> str:
    """Why nothing moves where nothing does: the phases of the conversations that wait or work on something else."""
    waiting = {rank: one.phase for rank, one in progress.items() if one.phase not in MOVING and one.phase != DONE}
    if len(set(waiting.values())) == 1 and len(waiting) == len(progress):
        return next(iter(waiting.values()))
    named = [f"{rank} {phase}" for rank, phase in waiting.items()]
    return ", ".join([*named[:MOST_PHASES], *(["…"] if len(named) > MOST_PHASES else [])])


def _line_of_terminal() -> int | None:
    """Workers that torchrun has started share a terminal: each has its own line. None: tqdm finds one."""
    local = os.environ.get("LOCAL_RANK", "")
    return int(local) if local.isdecimal() and int(local) else None


@contextmanager
def showing(option: bool | Show, label: str, progress: Mapping[int, Progress]) -> Iterator[Callable[[], object]]:
    """What the ``progress=`` option asks for: something to call now and then."""
    if option is False:
        yield lambda: None
        return
    view = _View(progress)
    if option is not True:
        yield lambda: option(view.take())
        return
    with Bar(label) as bar:
        yield lambda: bar(view.take())
