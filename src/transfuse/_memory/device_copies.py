"""Copies between accelerators and pinned main memory: queued, few of them, and nobody waits.

What is queued here runs on the streams that are current in this thread, one for each device. Keep both ends of a copy
until these streams have passed it: record an event afterwards, or use :class:`PinnedPair`. The memory that is taken on
a device is taken and used on one stream, so its allocator may have it back at once.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple, TypeVar

import torch

from transfuse._memory import streams
from transfuse._state.leaves import dense
from transfuse._tuning import (
    DEVICE_LARGE_BYTES,
    DEVICE_PADDING_BYTES,
    DEVICE_PIECE_BYTES,
    DEVICE_ROOM_SECONDS,
    DEVICE_SAMPLE_SECONDS,
    DEVICE_STAGING_BYTES,
)

T = TypeVar("T")

#: Bytes on a device, and as many in pinned main memory. Both are one run of memory, as tensors of dtype uint8.
Run = tuple[torch.Tensor, torch.Tensor]


def to_host(runs: Iterable[Run], padding: int = DEVICE_PADDING_BYTES) -> None:
    """Queue copies from devices to main memory.

    Small runs that follow each other in one tensor of main memory are packed on the device first, and copied by one
    call. Fewer than ``padding`` bytes may lie between two such runs: they are overwritten with zeros, or left alone.
    """
    _queue(runs, padding, outward=True)


def to_device(runs: Iterable[Run], padding: int = DEVICE_PADDING_BYTES) -> None:
    """Queue copies from main memory to devices, in the same way. What lies between two runs is read, too."""
    _queue(runs, padding, outward=False)


def _queue(runs: Iterable[Run], padding: int, *, outward: bool) -> None:
    small: defaultdict[tuple[torch.device, int], list[tuple[int, Run]]] = defaultdict(list)
    for run in runs:
        there, here = run
        if there.numel() >= DEVICE_LARGE_BYTES:
            _copy(there, here, outward)
        elif there.numel():
            small[there.device, here.untyped_storage().data_ptr()].append((dense.offset_of(here), run))
    for some in small.values():
        some.sort(key=_first)
        _queue_small([start for start, _ in some], [run for _, run in some], padding, outward=outward)


def _first(pair: tuple[int, Run]) -> int:
    return pair[0]


def _queue_small(starts: Sequence[int], runs: Sequence[Run], padding: int, *, outward: bool) -> None:
    """Copy runs between one device and one tensor of main memory, in the order of their places there."""
    ends = [start + run[0].numel() for start, run in zip(starts, runs, strict=True)]
    most, first = DEVICE_PIECE_BYTES, 0
    while first < len(runs):
        low, last = starts[first], first + 1
        while last < len(runs) and starts[last] - ends[last - 1] < padding and ends[last] - low <= most:
            last += 1
        nbytes = ends[last - 1] - low
        there, here = runs[first]
        if last == first + 1:
            _copy(there, here, outward)
        else:
            padded = outward and sum(run[0].numel() for run in runs[first:last]) < nbytes
            packed = room_on(there.device, nbytes, zeroed=padded)
            if packed is None:
                # The device is full: smaller pieces, and at last each run by itself. It stays full for the rest, too.
                most = nbytes // 2 if nbytes >= 2 * DEVICE_LARGE_BYTES else 0
                continue
            whole = here.as_strided((nbytes,), (1,))
            # One call for all of them: what they hold, and what lies before the next.
            gaps = [*(starts[i + 1] - ends[i] for i in range(first, last - 1)), 0]
            slots = packed.split_with_sizes(
                [size for i in range(first, last) for size in (ends[i] - starts[i], gaps[i - first])]
            )[::2]
            tensors = [run[0] for run in runs[first:last]]
            if outward:
                torch._foreach_copy_(slots, tensors)
                whole.copy_(packed, non_blocking=True)
            else:
                packed.copy_(whole, non_blocking=True)
                torch._foreach_copy_(tensors, slots)
            del packed, slots  # Its place is for the next piece.
        first = last


def _copy(there: torch.Tensor, here: torch.Tensor, outward: bool) -> None:
    if outward:
        here.copy_(there, non_blocking=True)
    else:
        there.copy_(here, non_blocking=True)


def within(runs: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> None:
    """Queue copies between memory of devices: the second tensor of each pair into the first, small ones together."""
    small: tuple[list[torch.Tensor], list[torch.Tensor]] = [], []
    for target, source in runs:
        if target.numel() >= DEVICE_LARGE_BYTES:
            target.copy_(source, non_blocking=True)
        else:
            small[0].append(target)
            small[1].append(source)
    if small[0]:
        torch._foreach_copy_(small[0], small[1], non_blocking=True)


def room_on(device: torch.device, nbytes: int, *, zeroed: bool = False) -> torch.Tensor | None:
    """Memory of a device; None if the device is full."""
    try:
        return (torch.zeros if zeroed else torch.empty)(nbytes, dtype=torch.uint8, device=device)
    except torch.OutOfMemoryError:
        return None


def fill(target: torch.Tensor, source: torch.Tensor) -> None:
    """Copy a tensor into another one of the same shape and dtype; to a device as :func:`from_ordinary` does."""
    if target.is_cpu or not source.is_cpu or not source.numel():
        target.copy_(source)
        return
    whole = source.resolve_conj().resolve_neg().contiguous()
    is_run = target.is_contiguous() and not target.is_conj() and not target.is_neg()
    there = target if is_run else torch.empty_like(whole, device=target.device)
    from_ordinary([(there.view(-1).view(torch.uint8), whole.view(-1).view(torch.uint8))], DEVICE_SAMPLE_SECONDS)
    if not is_run:
        target.copy_(there)


def await_room_on(device: torch.device, nbytes: int) -> torch.Tensor:
    """A little memory of a full device, zeroed. Other threads use memory there for a moment only: wait for it."""
    found: list[torch.Tensor] = []

    def look() -> bool:
        room = room_on(device, nbytes, zeroed=True)
        found.extend([] if room is None else [room])
        return bool(found)

    if not streams.poll(look, time.monotonic() + DEVICE_ROOM_SECONDS):
        raise torch.OutOfMemoryError(f"{device} has had no {nbytes} free bytes for {DEVICE_ROOM_SECONDS:g} s")
    return found[0]


class PinnedPair:
    """Two buffers of pinned main memory, used in turn: one is under way to or from a device, the host uses the other.

    For one thread. ``seconds``: how long a piece may be under way. Without devices there is one buffer, in ordinary
    memory.
    """

    def __init__(self, nbytes: int, devices: Iterable[torch.device], seconds: float) -> None:
        self._devices, self._seconds = list(devices), seconds
        self._buffers = [
            torch.empty(nbytes, dtype=torch.uint8, pin_memory=bool(self._devices))
            for _ in range(2 if self._devices else 1)
        ]
        #: For each buffer, the moments after which the devices no longer use it.
        self._used: list[list[torch.Event]] = [[], []]
        self._turn = 0

    @contextmanager
    def turn(self) -> Iterator[torch.Tensor]:
        """The other buffer, once no device uses it. What is queued in the block may use it after the block."""
        self._turn = (self._turn + 1) % len(self._buffers)
        self.reach(self._turn)
        try:
            yield self._buffers[self._turn]
        finally:
            self._used[self._turn] = [torch.accelerator.current_stream(one).record_event() for one in self._devices]

    def ahead(self, items: Iterable[T], bring: Callable[[T, torch.Tensor], None]) -> Iterator[tuple[T, torch.Tensor]]:
        """Let ``bring(item, buffer)`` queue copies from the devices. Yield each item when its bytes are there.

        The next item is on its way meanwhile. The buffer's bytes are yours until you ask for the next.
        """
        waiting: list[tuple[T, int]] = []
        for item in items:
            with self.turn() as buffer:
                bring(item, buffer)
            waiting.append((item, self._turn))
            if len(waiting) == len(self._buffers):
                yield self._there(*waiting.pop(0))
        for item, turn in waiting:
            yield self._there(item, turn)

    def _there(self, item: T, turn: int) -> tuple[T, torch.Tensor]:
        self.reach(turn)
        return item, self._buffers[turn]

    def reach(self, turn: int) -> None:
        """Wait until no device uses a buffer any more."""
        used, self._used[turn] = self._used[turn], []
        streams.reach(used, self._seconds)

    def reach_all(self) -> None:
        """Wait until no device uses either buffer any more."""
        for turn in range(len(self._buffers)):
            self.reach(turn)


def from_ordinary(runs: Sequence[Run], seconds: float) -> None:
    """Copy to devices out of main memory that is not pinned. Return when all is there; raise after ``seconds``."""
    pieces, batches = _staged(runs, seconds)
    for batch in batches:
        with pieces.turn() as buffer:
            slots = batch.slots(buffer)
            for (_, here), slot in zip(batch.runs, slots, strict=True):
                slot.copy_(here)
            to_device([(there, slot) for (there, _), slot in zip(batch.runs, slots, strict=True)])
    pieces.reach_all()


def to_ordinary(runs: Sequence[Run], seconds: float) -> None:
    """Copy from devices into main memory that is not pinned, in the same way."""

    def bring(batch: _Staged, buffer: torch.Tensor) -> None:
        to_host([(there, slot) for (there, _), slot in zip(batch.runs, batch.slots(buffer), strict=True)])

    pieces, batches = _staged(runs, seconds)
    for batch, buffer in pieces.ahead(batches, bring):
        for (_, here), slot in zip(batch.runs, batch.slots(buffer), strict=True):
            here.copy_(slot)


class _Staged(NamedTuple):
    """Runs, or ranges of them, that fit into a buffer together, and where each begins there."""

    runs: list[Run]
    starts: list[int]

    def slots(self, buffer: torch.Tensor) -> list[torch.Tensor]:
        return [buffer[start : start + there.numel()] for start, (there, _) in zip(self.starts, self.runs, strict=True)]


def _staged(runs: Sequence[Run], seconds: float) -> tuple[PinnedPair, list[_Staged]]:
    result = [_Staged([], [])]
    used = 0
    for there, here in runs:
        low = 0
        while low < there.numel():
            if used >= DEVICE_STAGING_BYTES:
                result.append(_Staged([], []))
                used = 0
            high = min(there.numel(), low + DEVICE_STAGING_BYTES - used)
            result[-1].runs.append((there[low:high], here[low:high]))
            result[-1].starts.append(used)
            used += -(-(high - low) // DEVICE_PADDING_BYTES) * DEVICE_PADDING_BYTES
            low = high
    largest = used if len(result) == 1 else DEVICE_STAGING_BYTES
    return PinnedPair(largest, {there.device for there, _ in runs}, seconds), result
