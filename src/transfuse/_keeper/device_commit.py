"""The part of a commit that lies on accelerators: copies into the slot, queued beside the training.

A slot is pinned memory, so copies to it are queued and nobody waits. They run on streams of the keeper's own, behind
what the caller had queued when it called ``commit``. Queueing takes time for each tensor, so the commit's thread does
it, but for what cannot wait. A job that changes the state afterwards lets the device wait for them, not the host:
:meth:`DeviceCopy.hold_back`.

A job may still change the state on a stream that waits for nobody. So each device makes fingerprints of all that it is
about to copy, the job changes nothing before these are made, and what has landed in the slot must have the same.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial

import numpy as np
import torch

from transfuse._errors import TransfuseError
from transfuse._keeper import copying, fingerprints
from transfuse._keeper.bundle_table import COMPARED, NO_DIGEST, Bundles, StoragePlaces
from transfuse._keeper.copying import StateMemory
from transfuse._keeper.slot_file import PAGE, SlotView
from transfuse._memory import blocks, device_copies, streams
from transfuse._memory.streams import OwnStreams
from transfuse._state.region import Ints
from transfuse._state.tensors import Bools


class DeviceStillCopies(TransfuseError):
    """A device has not ended the copies of a commit in time. Until it has, nobody else may use the slot."""


class Quiet:
    """Whether accelerators may be asked how far they are.

    While the job changes its state it may also capture a CUDA graph, and then no thread of the process may ask.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._depth = self._asking = 0

    @property
    def is_kept(self) -> bool:
        return self._depth > 0

    @contextmanager
    def kept(self) -> Iterator[None]:
        """Nobody asks in this block."""
        with self._lock:
            self._depth += 1
        try:
            yield
        finally:
            with self._lock:
                self._depth -= 1

    @contextmanager
    def broken(self) -> Iterator[None]:
        """In this block others may ask all the same: the thread that changes the state waits for their answers."""
        with self._lock:
            self._asking += 1
        try:
            yield
        finally:
            with self._lock:
                self._asking -= 1

    def poll(self, done: Callable[[], bool], seconds: float) -> bool:
        """Ask until the answer is yes, but not when it is to be quiet. Such time does not count. Return the answer."""

        def ask() -> bool | None:
            with self._lock:
                is_quiet = self._depth > 0 and not self._asking
                return None if is_quiet else done()

        return streams.poll(ask, time.monotonic() + seconds)


def captures(devices: Iterable[torch.device]) -> bool:
    """Whether the caller captures a graph on one of its current streams."""
    return any(torch.accelerator.current_stream(device).is_capturing() for device in devices)


def check_no_capture(devices: Iterable[torch.device]) -> None:
    """Raise if the caller captures a graph on one of its current streams."""
    if captures(devices):
        raise TransfuseError(
            "commit() during the capture of a graph: a capture records work instead of doing it. Call commit() before "
            "the capture begins, or when it has ended"
        )


class DeviceCopy:
    """The queued copies of one commit."""

    def __init__(
        self,
        own: OwnStreams,
        quiet: Quiet,
        memory: StateMemory,
        bundles: Bundles,
        storages: StoragePlaces,
        slot: SlotView,
    ) -> None:
        self._own, self._quiet, self._slot, self._memory = own, quiet, slot, memory
        self._bundles, self._of = bundles, storages
        self._places: Ints = bundles.places[storages.bundles] + storages.places
        #: Which bundles land in the slot by queued copies.
        self.landing: Bools = slot.is_pinned & memory.on_one_device(len(bundles), storages) & (bundles.places >= 0)
        #: The storages that do. Their memory is the commit's until they have landed.
        self._storages: Ints = memory.elsewhere[self.landing[storages.bundles[memory.elsewhere]]]
        self.devices = memory.devices_of(self._storages)
        #: Whether a device may still write to the slot.
        self._is_under_way = False
        #: The moments after which the copies that could not wait have landed, and all copies.
        self._first: dict[torch.device, torch.Event] = {}
        self._last: dict[torch.device, torch.Event] = {}
        #: The fingerprints of what was copied later, and the moments after which they have been made.
        self._prints: list[fingerprints.DeviceFingerprints] = []
        self._printed: dict[torch.device, torch.Event] = {}

    def begin(self, first: Bools) -> None:
        """In the caller's thread: go on after what it has queued, and queue the copies of the bundles ``first``."""
        self._own.follow(self.devices)
        self._is_under_way = True
        brought = {storage: self._memory.bring(storage) for storage in self._chosen(first)}
        if brought:
            with self._own.entered(self.devices):
                device_copies.to_host(self._runs(brought), PAGE)
                self._first = self._own.events(self.devices)

    def queue(self, rest: Bools, *, fingerprinted: bool) -> None:
        """In any thread, before the state changes: queue the copies of these bundles, which are all others.

        ``fingerprinted``: make fingerprints of them first, if the devices have room for that.
        """
        brought = {storage: self._memory.bring(storage) for storage in self._chosen(rest)}
        with self._own.entered(self.devices):
            if fingerprinted:
                with suppress(torch.OutOfMemoryError):
                    self._prints = fingerprints.queue(
                        self._memory, self._bundles, self._of, np.flatnonzero(self.landing & rest), brought.__getitem__
                    )
                    self._printed = self._own.events(self.devices)
            device_copies.to_host(self._runs(brought), PAGE)
            self._last = self._own.events(self.devices)

    def _chosen(self, bundles: Bools) -> list[int]:
        chosen: list[int] = self._storages[bundles[self._of.bundles[self._storages]]].tolist()
        return chosen

    def _runs(self, brought: Mapping[int, torch.Tensor]) -> Iterator[device_copies.Run]:
        # What lies between two storages of one device is padding: a bundle of several devices is not among these, and
        # each bundle begins a page.
        whole = torch.frombuffer(self._slot.memory, dtype=torch.uint8)
        for at, data in zip(self._places[list(brought)].tolist(), brought.values(), strict=True):
            yield data, whole[at : at + data.numel()]

    def are_fingerprinted(self, seconds: float) -> bool:
        """Wait until the devices have made the fingerprints. False: there are none, or not within ``seconds``."""
        printed = self._printed
        return bool(printed) and self._quiet.poll(lambda: all(event.query() for event in printed.values()), seconds)

    def hold_back(self, *, for_all: bool) -> None:
        """Let the caller's current streams wait for the copies that could not wait, or for all of them."""
        for device, event in (self._last if for_all else self._first).items():
            torch.accelerator.current_stream(device).wait_event(event)

    @property
    def is_known_to_have_landed(self) -> bool:
        return not self._is_under_way

    def has_landed(self) -> bool:
        """Whether all copies have landed. This asks the devices."""
        if self._is_under_way and not self._last:
            self._last = self._own.events(self.devices)  # An exception came when some copies had been queued.
        if not all(event.query() for event in self._last.values()):
            return False
        self._last, self._first, self._is_under_way = {}, {}, False
        return True

    def land(self, seconds: float) -> None:
        """Wait until all copies have landed."""
        if not self._quiet.poll(self.has_landed, seconds):
            raise DeviceStillCopies(
                f"{', '.join(map(str, self.devices))}: what was queued before commit(), and the copies into the "
                f"keeper's slot, have not ended after {seconds:g} s. Raise timeout= of keep() if a step takes that long"
            )

    def differs(self, workers: int) -> bool:
        """Whether something else has landed than there was at first: it was changed before it was copied."""
        found: list[bool] = []

        def compare(piece: fingerprints.FingerprintedPiece, sums: Ints) -> None:
            at = int(self._bundles.places[piece.number]) + piece.low
            if not np.array_equal(fingerprints.sums_of(self._slot.bytes[at : at + piece.nbytes]), sums):
                found.append(True)

        tasks = [
            partial(compare, piece, sums)
            for _, pieces, rows in self._prints
            for piece, sums in zip(pieces, rows.numpy(), strict=True)
        ]
        blocks.run(tasks, workers)
        return bool(found)


def guess(
    own: OwnStreams, memory: StateMemory, bundles: Bundles, storages: StoragePlaces, seconds: float
) -> list[bytes]:
    """For each bundle, what shows whether another rank of this host may hold the same. Digests decide later."""
    check_no_capture(memory.devices)
    there = memory.on_one_device(len(bundles), storages) & np.isin(bundles.modes, COMPARED)
    own.follow(memory.devices)
    with own.entered(memory.devices):
        here = np.flatnonzero(~there)
        digests = copying.copy(memory, bundles, storages, None, digests=False, only=here, seconds=seconds)
        try:
            found = fingerprints.queue(memory, bundles, storages, np.flatnonzero(there))
            streams.complete(seconds)
            prints = fingerprints.short(found)
        except torch.OutOfMemoryError:
            prints = {}  # Such bundles are not shared until there is a new layout.
    return [prints.get(number, digest) for number, digest in enumerate(digests or [NO_DIGEST] * len(bundles))]
