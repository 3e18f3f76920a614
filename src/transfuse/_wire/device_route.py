"""The device memory route: a receiver on the source's host maps its memory of an accelerator, and copies on the device.

No byte passes through main memory. The source gives a :class:`DeviceLease`, and its entry names each allocation once
(:mod:`transfuse._memory.device_handles`). The receiver opens what it needs, queues copies on its conversation's device
streams, waits until they are done, and only then looks whether the lease was still good: as on the memory route, the
proof is the token in the source's main memory. So nothing has to be told to the source, and a receiver that is killed
leaves nothing there.

A source waits for what its devices have queued before it offers this route: no order of streams reaches into another
process.

Off unless it is asked for, until it has run on an accelerator.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

import msgspec
import numpy as np
import torch

from transfuse._errors import TransfuseError
from transfuse._memory import device_copies, device_handles, packing, streams
from transfuse._memory.device_handles import ALIGNMENT
from transfuse._memory.packing import RegionPlace
from transfuse._plan.parcels import Extent
from transfuse._state.leaves import dense
from transfuse._state.manifest import Described
from transfuse._state.region import Ints
from transfuse._state.tensors import Bools
from transfuse._tuning import DEVICE_HANDLE_BYTES, DEVICE_READ_BYTES
from transfuse._wire.memory_route import MemoryEntry, MemoryLease, Reader
from transfuse._wire.memory_route_read import HIGHEST_ADDRESS, decode
from transfuse._wire.route import MalformedEntry, Pull, Unreadable

#: More storages than these are not exported: the group brings their bytes.
MOST_STORAGES = 1 << 14

_KIND = re.compile(r"[a-z][a-z0-9_]{0,31}")

#: What a device may still be reading although nobody waits for it any more: it stays open.
_left: list[object] = []

logger = logging.getLogger("transfuse")


class DeviceEntry(msgspec.Struct, array_like=True, frozen=True, forbid_unknown_fields=True):
    """How a source's memory on accelerators can be opened."""

    #: Which process it is, and its token. It has no addresses.
    proof: MemoryEntry
    #: The type of accelerator, as torch names it.
    kind: str
    handles: list[bytes]
    #: For each storage two numbers (i64): its handle, or -1, and where in that allocation its window begins.
    storages: bytes

    @classmethod
    def decode(cls, data: bytes) -> DeviceEntry:
        entry = decode(_decoder, data, "device memory")
        if _KIND.fullmatch(entry.kind) is None:
            raise MalformedEntry(f"a malformed description of device memory: {entry.kind[:40]!r} is no type of device")
        if any(not 0 < len(name) <= DEVICE_HANDLE_BYTES for name in entry.handles):
            raise MalformedEntry("a malformed description of device memory: a handle of an impossible length")
        return entry

    def places(self, storages: int) -> tuple[Ints, Ints]:
        """The handle and the offset of each of this many storages. Raises :class:`MalformedEntry`."""
        if len(self.storages) != 16 * storages:
            raise MalformedEntry(
                f"a malformed description of device memory: {len(self.storages)} bytes for {storages} storages "
                f"(expected {16 * storages})"
            )
        handle, offset = np.frombuffer(self.storages, dtype="<i8").astype(np.int64).reshape(-1, 2).T
        if len(handle) and not (handle.min() >= -1 and handle.max() < len(self.handles)):
            raise MalformedEntry("a malformed description of device memory: a storage has a handle that was not given")
        if len(offset) and not (offset.min() >= 0 and offset.max() < HIGHEST_ADDRESS):
            raise MalformedEntry("a malformed description of device memory: an impossible offset")
        return handle, offset


# Made once, at import: if two threads make msgspec inspect a type at the same time, the process ends.
_decoder = msgspec.msgpack.Decoder(DeviceEntry)

#: A storage, and the byte of it at which the window begins.
_Window = tuple[torch.UntypedStorage, int]

#: For leases of this very process, by token: its storages. A process cannot open its own memory, and need not.
_own: dict[bytes, Sequence[_Window]] = {}


class DeviceLease(MemoryLease):
    def __init__(self, seconds: float) -> None:
        """``seconds``: how long to wait for what devices have queued."""
        super().__init__()
        self._seconds = seconds

    def end(self) -> None:
        _own.pop(self._token, None)
        super().end()

    def export(self, described: Described) -> bytes | None:
        storages = described.manifest.storages
        here = np.flatnonzero(~storages.on_cpu & (storages.nbytes > 0))
        if len(here) > MOST_STORAGES:
            # The largest are worth the most.
            here = np.sort(here[np.argsort(storages.nbytes[here], kind="stable")[-MOST_STORAGES:]])
        kinds = {device.type for device in described.devices} - {"cpu"}
        if not any(map(device_handles.are_known, kinds)) or not self._are_settled(described):
            return None
        handles: dict[bytes, int] = {}
        places = np.full((len(storages), 2), (-1, 0), dtype="<i8")
        for number in here.tolist():
            handle = device_handles.exported(described.storages[number])
            if handle is not None:
                window = handle.offset + int(described.windows[number])
                places[number] = handles.setdefault(handle.name, len(handles)), window
        if not handles:
            return None
        _own[self._token] = list(zip(described.storages, described.windows.tolist(), strict=True))
        kind = described.storages[int(np.argmax(places[:, 0] >= 0))].device.type
        return msgspec.msgpack.encode(
            DeviceEntry(self.describe(np.zeros(0, dtype=np.int64)), kind, list(handles), places.tobytes())
        )

    def _are_settled(self, described: Described) -> bool:
        """Wait until what the caller's streams have queued is done."""
        used = [device for device in described.devices if device.type != "cpu"]
        try:
            streams.reach([torch.accelerator.current_stream(one).record_event() for one in used], self._seconds)
        except TransfuseError as error:
            logger.info("this source does not offer the device memory route: %s", error)
            return False
        return True


class _TheirMemory:
    """The source's memory: the :class:`.packing.Places` of regions whose allocations are open."""

    def __init__(self, entry: DeviceEntry, pull: Pull) -> None:
        self._entry = entry
        self._regions = pull.cut.regions
        self._handle, self._offset = entry.places(len(pull.manifest.storages))
        self._ends = self._offset + pull.manifest.storages.nbytes
        self._needed = np.unique(self._regions.storage)
        #: For each handle that is open, the range that is needed of its allocation, and where that begins.
        self._opened: dict[int, _Window] = {}
        #: The source's storages, if this process is the source, too.
        self._own: Sequence[_Window] | None = None
        if entry.proof.pid == os.getpid():
            self._own = _own.get(entry.proof.token, ())
            if len(self._own) != len(self._handle):
                raise Unreadable("this process has given no such lease")
        #: Main memory has addresses; this has none.
        self.addresses: Ints = np.zeros(len(self._regions), dtype=np.int64)

    @property
    def can_be_opened(self) -> Bools:
        """For each region, whether the source has a handle for its memory."""
        result: Bools = self._handle[self._regions.storage] >= 0
        return result

    def open(self, region: int, device: torch.device) -> None:
        """Open the allocation of a region on this device, unless it is open already."""
        number = int(self._handle[self._regions.storage[region]])
        if self._own is None and number not in self._opened:
            same = self._needed[self._handle[self._needed] == number]
            low = int(self._offset[same].min()) // ALIGNMENT * ALIGNMENT
            nbytes, pid = int(self._ends[same].max()) - low, self._entry.proof.pid
            try:
                opened = device_handles.opened(device, pid, self._entry.handles[number], low, nbytes)
            except (RuntimeError, OSError, ValueError) as error:
                raise Unreadable(f"memory of process {pid} cannot be opened on {device}: {error}") from error
            self._opened[number] = opened, low

    def _window(self, region: int) -> _Window:
        """The storage here in which a region lies, and where in it the window of the source's storage begins."""
        storage = int(self._regions.storage[region])
        if self._own is not None:
            return self._own[storage]
        opened, low = self._opened[int(self._handle[storage])]
        return opened, int(self._offset[storage]) - low

    def run(self, region: int, low: int, high: int) -> torch.Tensor | None:
        if region in self._regions.strided:
            return None
        storage, window = self._window(region)
        start = window + int(self._regions.start[region])
        return dense.over(storage, torch.uint8, start + low, (high - low,), (1,))

    def places(self, region: int) -> Sequence[RegionPlace]:
        return [packing.place_of_region(*self._window(region), self._regions, region)]

    def paths_of(self, regions: Sequence[int]) -> list[str]:
        return []  # The landing knows the leaves.


class DeviceReading:
    """Copies parcels from a source's accelerators to ours: the :class:`.route.Puller` of this route."""

    def __init__(self, entry: DeviceEntry, pull: Pull) -> None:
        #: The devices of this kind on which this thread has streams of its own.
        self._devices = {device for device in streams.entered() if device.type == entry.kind}
        theirs = _TheirMemory(entry, pull)
        if not self._devices:
            raise Unreadable(f"nothing of this receive lies on {entry.kind}")
        self._theirs = theirs
        self._cut, self._landing, self._pull = pull.cut, pull.landing, pull
        self._proof = Reader(entry.proof, 0)

    def readable(self) -> list[int]:
        """Numbers of the parcels whose memory has handles, and that may land on a device."""
        good = self._theirs.can_be_opened & (self._landing.addresses == 0)
        return np.flatnonzero(self._cut.of_all_regions(good)).tolist()

    def pull(self, numbers: Sequence[int]) -> list[int]:
        """Copy these parcels to their places. Return the numbers of those that do not lie on devices here."""
        failed: list[int] = []
        for batch in self._batches(numbers):
            try:
                unmoved = self._queue(batch)
            finally:
                self._complete()
            moved = np.setdiff1d(batch, unmoved)
            if len(moved):
                self._pull.went_on(int(self._cut.payload[moved].sum()))
            failed += unmoved
        return failed

    def _complete(self) -> None:
        """Wait until no copy that was queued is under way."""
        try:
            streams.complete(self._pull.timeout)
        except TransfuseError:
            _left.append(self._theirs)
            raise

    def _batches(self, numbers: Sequence[int]) -> Iterator[list[int]]:
        """Parcels that are queued together: of as many bytes as may move at once, and of one parcel at least."""
        most, sizes = self._pull.at_once(DEVICE_READ_BYTES), self._cut.nbytes[np.asarray(numbers, dtype=np.int64)]
        begins = np.flatnonzero(np.diff((np.cumsum(sizes) - sizes) // most, prepend=-1))
        for first, last in pairwise([*begins.tolist(), len(numbers)]):
            yield list(numbers[first:last])

    def _queue(self, numbers: Sequence[int]) -> list[int]:
        """Queue the copies of these parcels. Return the numbers of those for which none were queued."""
        runs: list[tuple[torch.Tensor, torch.Tensor]] = []
        unmoved: list[int] = []
        for some, extents in self._joined(numbers):
            ends = self._ends(extents)
            if ends is None:
                unmoved += some
                continue
            for number in some:
                first = int(self._cut.first[number])
                self._landing.touch(range(first, first + int(self._cut.count[number])))
            if ends.runs is not None:
                runs += ends.runs
            else:
                unmoved += [number for number in some if not self._by_way_of(ends.device, number)]
        device_copies.within(runs)
        return unmoved

    def _joined(self, numbers: Sequence[int]) -> list[tuple[list[int], list[Extent]]]:
        """Parcels with their extents. Those that follow each other in one region are joined."""
        result: list[tuple[list[int], list[Extent]]] = []
        for number in numbers:
            extents = list(self._cut.extents(number))
            (region, low, high, _), last = extents[0], result[-1][1][0] if result else None
            follows = last is not None and len(extents) == len(result[-1][1]) == 1
            if follows and last is not None and (last.region, last.high) == (region, low):
                result[-1][0].append(number)
                result[-1][1][0] = last._replace(high=high)
            else:
                result.append(([number], extents))
        return result

    def _ends(self, extents: Sequence[Extent]) -> _RunEnds | None:
        """Where these extents lie at both ends. None if not all of them land on our devices."""
        runs: list[tuple[torch.Tensor, torch.Tensor]] | None = []
        homes: list[torch.device] = []
        for region, low, high, _ in extents:
            mine = self._landing.run(region, low, high)
            places = () if mine is not None else self._landing.places(region)
            lands = [place.view.device for place in places] if mine is None else [mine.device]
            if not lands or not self._devices.issuperset(lands):
                return None
            homes += lands
            self._theirs.open(region, lands[0])
            theirs = self._theirs.run(region, low, high)
            here = [place.run(low, high) for place in places] if mine is None else [mine]
            if theirs is None or runs is None or any(one is None for one in here):
                runs = None
            else:
                runs += [(one, theirs) for one in here if one is not None]
        return _RunEnds(homes[0], runs)

    def _by_way_of(self, device: torch.device, number: int) -> bool:
        """Queue the copies of a parcel by way of a buffer on a device. False: the device is full."""
        buffer = device_copies.room_on(device, int(self._cut.nbytes[number]))
        if buffer is None:
            return False
        packing.pack(self._theirs, self._cut, number, buffer)
        packing.unpack(self._landing, self._cut, number, buffer)
        return True

    def differing(self, numbers: Sequence[int]) -> list[int]:
        """Read these parcels a second time, and compare them on the device with what has landed."""
        unconverted = self._cut.of_all_regions(~self._landing.convert)
        result: list[int] = []
        for batch in self._batches([number for number in numbers if unconverted[number]]):
            self._pull.rate_limit(int(self._cut.nbytes[np.asarray(batch)].sum()))
            try:
                differ = [self._differs(number) for number in batch]
            except torch.OutOfMemoryError as error:
                raise Unreadable(f"a device is too full for a second read: {error}") from error
            here = [torch.empty(1, dtype=torch.uint8) for _ in differ]
            device_copies.to_ordinary(list(zip(differ, here, strict=True)), self._pull.timeout)
            result += [number for number, one in zip(batch, here, strict=True) if one.item()]
        return result

    def _differs(self, number: int) -> torch.Tensor:
        """A byte on a device: whether a parcel at the source differs from what has landed."""
        extents = list(self._cut.extents(number))
        ends = self._ends(extents)
        assert ends is not None  # They have landed.
        if ends.runs is not None and len(extents) == 1:
            mine, theirs = ends.runs[0]  # Of several places the first is as good as any.
        else:
            nbytes = int(self._cut.nbytes[number])
            mine, theirs = (torch.empty(nbytes, dtype=torch.uint8, device=ends.device) for _ in range(2))
            packing.pack(self._landing, self._cut, number, mine)
            packing.pack(self._theirs, self._cut, number, theirs)
        return (mine != theirs.to(mine.device)).any().view(torch.uint8).view(1)

    def recheck(self) -> None:
        self._proof.recheck()

    def close(self) -> None:
        self._proof.close()


class _RunEnds(NamedTuple):
    """Where extents lie: a device on which one of them lands, and the runs here and there, if all are runs."""

    device: torch.device
    runs: list[tuple[torch.Tensor, torch.Tensor]] | None


class DeviceRoute:
    name = "device_memory"
    same_host = True
    #: It has never run on an accelerator.
    opt_in = True
    compared = False

    def lease(self, seconds: float) -> DeviceLease:
        return DeviceLease(seconds)

    def open(self, entry: bytes, pull: Pull) -> DeviceReading:
        return DeviceReading(DeviceEntry.decode(entry), pull)
