"""The part of a commit that lies on accelerators: copies into the slot, queued beside the training.

A slot is pinned memory, so copies to it are queued and nobody waits. They run on streams of the keeper's own, behind
what the caller had queued when it called ``commit``. Queueing takes time for each tensor, so the commit's thread does
it, but for what cannot wait. A job that changes the state afterwards lets the device wait for them, not the host:
:meth:`DeviceCopy.hold_back`.

A job may still change the state on a stream that waits for nobody. So a few bytes of some tensors are remembered on the
caller's own streams, and compared with what has landed in the slot. That is a net, not a proof.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

import numpy as np
import torch

from transfuse._errors import TransfuseError
from transfuse._keeper import copying
from transfuse._keeper.bundle_table import COMPARED, NO_DIGEST, Bundles, StoragePlaces
from transfuse._keeper.copying import StateMemory
from transfuse._keeper.slot_file import PAGE, SlotView
from transfuse._memory import device_copies, streams
from transfuse._memory.streams import OwnStreams
from transfuse._state.region import Ints
from transfuse._state.tensors import Bools
from transfuse._tuning import DEVICE_PIECE_BYTES, NET_SAMPLE_BYTES, NET_SAMPLES


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
        until = time.monotonic() + seconds
        while True:
            with self._lock:
                is_quiet = self._depth > 0 and not self._asking
                if not is_quiet and done():
                    return True
            began = time.monotonic()
            if began > until:
                return False
            time.sleep(streams.LONGEST_PAUSE)
            if is_quiet:
                until += time.monotonic() - began


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
        self._of_storage, self._nbytes = storages.bundles, memory.nbytes
        self._places: Ints = bundles.places[storages.bundles] + storages.places
        #: Which bundles land in the slot by queued copies.
        self.landing: Bools = slot.is_pinned & memory.on_one_device(len(bundles), storages) & (bundles.places >= 0)
        #: The storages that do. Their memory is the commit's until they have landed.
        self._storages: Ints = memory.elsewhere[self.landing[self._of_storage[memory.elsewhere]]]
        self.devices = memory.devices_of(self._storages)
        #: Whether a device may still write to the slot.
        self._is_under_way = False
        #: The moments after which the copies that could not wait have landed, and all copies.
        self._first: dict[torch.device, torch.Event] = {}
        self._last: dict[torch.device, torch.Event] = {}
        #: For each device: storages, the first bytes of each as the caller's stream saw them, and a place for them.
        self._net: list[tuple[list[int], torch.Tensor, torch.Tensor]] = []
        #: Whether each device had room for it.
        self.has_net = True

    def begin(self, first: Bools) -> None:
        """In the caller's thread: go on after what it has queued, and queue the copies of the bundles ``first``."""
        self._cast_net()
        self._own.follow(self.devices)
        self._is_under_way = True
        if first[self._of_storage[self._storages]].any():
            with self._own.entered(self.devices):
                device_copies.to_host(self._runs(first), PAGE)
                self._first = self._own.events(self.devices)

    def queue(self, rest: Bools) -> None:
        """In any thread, before the state changes: queue the copies of these bundles, which are all others."""
        with self._own.entered(self.devices):
            device_copies.to_host(self._runs(rest), PAGE)
            for _, samples, pinned in self._net:
                pinned.copy_(samples, non_blocking=True)
            self._last = self._own.events(self.devices)

    def _runs(self, chosen: Bools) -> Iterator[device_copies.Run]:
        # What lies between two storages of one device is padding: a bundle of several devices is not among these, and
        # each bundle begins a page.
        whole = torch.frombuffer(self._slot.memory, dtype=torch.uint8)
        some = self._storages[chosen[self._of_storage[self._storages]]]
        places, sizes = self._places[some].tolist(), self._nbytes[some].tolist()
        for storage, at, nbytes in zip(some.tolist(), places, sizes, strict=True):
            yield self._memory.bring(storage), whole[at : at + nbytes]

    def _cast_net(self) -> None:
        for device in self.devices:
            found = self._memory.on(device, self._storages).tolist()
            # Spread over all of them, and always the last: it is copied last.
            some = [*found[:: -(-len(found) // NET_SAMPLES)], found[-1]]
            try:
                sizes = np.minimum(self._nbytes[some], NET_SAMPLE_BYTES).tolist()
                samples = torch.empty(sum(sizes), dtype=torch.uint8, device=device)
                first = [self._memory.bring(storage)[:NET_SAMPLE_BYTES] for storage in some]
                torch._foreach_copy_(samples.split_with_sizes(sizes), first)
            except torch.OutOfMemoryError:
                self.has_net = False
                return
            self._net.append((some, samples, torch.empty(samples.numel(), dtype=torch.uint8, pin_memory=True)))

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

    def differs(self) -> bool:
        """Whether something else has landed than the caller's streams had seen: it was changed before it was copied."""
        for storages, _, pinned in self._net:
            sizes = np.minimum(self._nbytes[storages], NET_SAMPLE_BYTES)
            landed = [
                self._slot.bytes[at : at + size]
                for at, size in zip(self._places[storages].tolist(), sizes.tolist(), strict=True)
            ]
            if not np.array_equal(np.concatenate(landed), pinned.numpy()):
                return True
        return False


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
            prints = _fingerprints(memory, bundles, storages, np.flatnonzero(there), seconds)
        except torch.OutOfMemoryError:
            prints = {}  # Such bundles are not shared until there is a new layout.
    return [prints.get(number, digest) for number, digest in enumerate(digests or [NO_DIGEST] * len(bundles))]


def _fingerprints(
    memory: StateMemory, bundles: Bundles, storages: StoragePlaces, numbers: Ints, seconds: float
) -> dict[int, bytes]:
    """Numbers that show which bundles on devices may be equal to another rank's, made where the bundles lie.

    They are no digests: columns of words are added up, and the sums are weighed. This thread has entered streams on the
    devices.
    """
    if not len(numbers):
        return {}
    columns = 512
    weights = torch.from_numpy(np.random.default_rng(1).integers(1, 1 << 62, (2, columns))).pin_memory()
    order = np.argsort(storages.bundles, kind="stable")
    first = np.searchsorted(storages.bundles[order], [*range(len(bundles)), len(bundles)])
    found: dict[torch.device, list[tuple[int, torch.Tensor]]] = {}
    for number in numbers.tolist():
        mine = [one for one in order[first[number] : first[number + 1]].tolist() if memory.nbytes[one]]
        data = [memory.bring(storage) for storage in mine]
        nbytes, device = int(bundles.nbytes[number]), data[0].device
        sums = torch.zeros(columns, dtype=torch.int64, device=device)
        for low in range(0, nbytes, DEVICE_PIECE_BYTES):
            size = min(nbytes - low, DEVICE_PIECE_BYTES)
            words = torch.zeros(-(-size // (8 * columns)) * columns, dtype=torch.int64, device=device)
            room = words.view(torch.uint8)
            # Either one large storage, a piece at a time, or several small ones, which fit in whole.
            parts = [data[0][low : low + size]] if len(data) == 1 else data
            places = [0] if len(data) == 1 else storages.places[mine].tolist()
            torch._foreach_copy_([room[at : at + part.numel()] for at, part in zip(places, parts, strict=True)], parts)
            sums = sums * 31 + words.view(-1, columns).sum(0)
        weighed = (weights.to(device, non_blocking=True) * sums).sum(1)
        found.setdefault(device, []).append((number, weighed))
    result: dict[int, bytes] = {}
    for pairs in found.values():
        pinned = torch.empty((len(pairs), 2), dtype=torch.int64, pin_memory=True)
        pinned.copy_(torch.stack([weighed for _, weighed in pairs]), non_blocking=True)
        streams.complete(seconds)
        result |= {number: row.tobytes() for (number, _), row in zip(pairs, pinned.numpy(), strict=True)}
    return result
