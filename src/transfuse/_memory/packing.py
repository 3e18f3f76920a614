"""Packing: copy the regions of a parcel from memory into a buffer, and from a buffer to memory.

A place is a view of memory whose row-major order is its region's linear order. A source has one place for each region.
A receiver has several if weights that are tied at the source are not tied in the target.
"""

from __future__ import annotations

import errno
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple, Protocol, TypeVar, cast

import numpy as np
import torch

from transfuse._errors import StateError, TransfuseError
from transfuse._memory import device_copies, streams, vm
from transfuse._memory.digest import digest_of, wide_digest_of
from transfuse._plan.parcels import Extent, Parcels
from transfuse._plan.regions import Regions
from transfuse._state.leaves import dense
from transfuse._state.memory_maps import Mappings
from transfuse._state.region import Form, Ints, Region, blocks
from transfuse._state.tensors import Bools
from transfuse._tuning import HASHED_BYTES

T = TypeVar("T")

_CPU = torch.device("cpu")

LARGEST_ITEM = max(dense.ITEM_TYPES)


@dataclass(frozen=True)
class RegionPlace:
    """Memory of one region. ``view`` has ``lead`` dimensions that repeat the region, then the region's own."""

    view: torch.Tensor
    lead: int = 0
    signs: dense.Signs | None = None
    #: The dtype in which the items travel, if it is not the dtype that they have here.
    wire: torch.dtype | None = None

    @property
    def item(self) -> int:
        """Bytes of one item on the wire."""
        return self.view.element_size() if self.wire is None else self.wire.itemsize

    def run(self, low: int, high: int) -> torch.Tensor | None:
        """Bytes ``[low, high)`` of the region as they lie here; None unless they are one run, as it travels."""
        view = self.view
        if self.lead or self.signs is not None or self.wire is not None or not view.is_contiguous():
            return None
        start = dense.offset_of(view) * view.element_size()
        return dense.over(view.untyped_storage(), torch.uint8, start + low, (high - low,), (1,))


class Places(Protocol):
    """Where regions lie in memory."""

    @property
    def addresses(self) -> Ints:
        """For each region, the address of its first byte if its only place is one run of main memory; otherwise 0."""

    def run(self, region: int, low: int, high: int) -> torch.Tensor | None:
        """Bytes ``[low, high)`` of a region as they lie in memory; None unless its only place is one run."""

    def places(self, region: int) -> Sequence[RegionPlace]:
        """All places of a region, whatever their layout."""

    def paths_of(self, regions: Sequence[int]) -> list[str]:
        """Paths of the leaves that have bytes in these regions."""


class Land(Places, Protocol):
    """Where parcels land."""

    def touch(self, regions: Sequence[int] | Ints) -> None: ...

    @property
    def convert(self) -> Bools:
        """Which regions are converted as they land: the bytes that lie there are not the bytes that arrived."""

    @property
    def writes_targets(self) -> bool:
        """Whether parcels may land straight in the caller's memory."""


def place_in_storage(storage: torch.UntypedStorage, window: int, region: Region) -> RegionPlace:
    """The place of a region in a storage whose window begins at byte ``window``."""
    offset = (window + region.start) // region.item
    return RegionPlace(dense.over(storage, dense.ITEM_TYPES[region.item], offset, region.sizes, region.strides))


def place_of_region(storage: torch.UntypedStorage, window: int, regions: Regions, region: int) -> RegionPlace:
    """The place of one of ``regions`` in such a storage. Its items may be converted before they are sent."""
    cast = regions.casts.get(region)
    if cast is None:
        return place_in_storage(storage, window, regions.region(region))
    offset = (window + cast.region.start) // cast.region.item
    return RegionPlace(dense.over(storage, cast.memory, offset, cast.region.sizes, cast.region.strides), wire=cast.wire)


def place_in_tensor(target: torch.Tensor, form: Form, source_flags: int) -> RegionPlace:
    """The place in ``target`` of a region that comes from a tensor of this form: the same order, other strides."""
    order = (*form.repeated, *form.order)
    view = dense.over(
        target.untyped_storage(),
        dense.ITEM_TYPES[target.element_size()],
        dense.offset_of(target),
        # A target that repeats its elements too is written once for all repetitions.
        [1 if d in form.repeated and target.stride(d) == 0 else target.size(d) for d in order],
        [target.stride(d) for d in order],
    )
    return RegionPlace(view, len(form.repeated), dense.signs_between(target, source_flags))


def as_bytes(places: Places, parcels: Parcels, parcel: int, device: torch.device) -> torch.Tensor | None:
    """A parcel's bytes where they lie, if they are one run of memory on ``device`` (no staging needed); else None."""
    if int(parcels.count[parcel]) != 1:
        return None
    (extent,) = parcels.extents(parcel)
    run = places.run(extent.region, extent.low, extent.high)
    return run if run is not None and run.device == device else None


def address_of(places: Places, parcels: Parcels, parcel: int) -> int:
    """The address of a parcel if it is one run of main memory; otherwise 0."""
    if parcels.count[parcel] != 1:
        return 0
    address = int(places.addresses[parcels.first[parcel]])
    return address and address + int(parcels.low[parcel])


def addresses_of(places: Places, parcels: Parcels) -> Ints:
    """For each parcel what :func:`address_of` returns."""
    if not len(parcels):
        return parcels.low
    base = places.addresses[parcels.first]
    result: Ints = np.where((parcels.count == 1) & (base > 0), base + parcels.low, 0)
    return result


def ranges(places: Places, parcels: Parcels, parcel: int) -> tuple[vm.Ranges, Ints] | None:
    """The ranges of main memory that hold a parcel, and the byte of the parcel at which each begins; or None."""
    regions, positions = parcels.columns(parcel)
    addresses = places.addresses[regions]
    if not addresses.all():
        return None
    if len(addresses) == 1:
        return vm.ranges(addresses + parcels.low[parcel], parcels.nbytes[parcel : parcel + 1]), positions
    return vm.ranges(addresses, parcels.regions.nbytes[regions]), positions


def pack(places: Places, parcels: Parcels, parcel: int, buffer: torch.Tensor) -> torch.Tensor:
    """Copy a parcel's bytes from their places into ``buffer``; return the slice of it that is filled.

    If the parcel lies on an accelerator and the buffer is pinned, the copy is only queued on this thread's stream.
    """
    filled = buffer[: int(parcels.nbytes[parcel])]
    if parcels.payload[parcel] < filled.numel():
        filled.zero_()
    memory = ranges(places, parcels, parcel) if filled.is_cpu else None
    if memory is not None:
        theirs, positions = memory
        if _gather(theirs, vm.ranges(positions + filled.data_ptr(), theirs[:, 1]), places, parcels, parcel):
            return filled
    _move(places, _find(places, parcels, parcel), filled, out=True)
    return filled


def unpack(places: Places, parcels: Parcels, parcel: int, buffer: torch.Tensor) -> None:
    """Copy a parcel's bytes from ``buffer`` to all their places.

    If these lie on an accelerator, the copies are only queued on this thread's stream: keep the buffer until then.
    """
    memory = ranges(places, parcels, parcel) if buffer.is_cpu else None
    if memory is not None:
        mine, positions = memory
        if _gather(vm.ranges(positions + buffer.data_ptr(), mine[:, 1]), mine, places, parcels, parcel, write=True):
            return
    _move(places, _find(places, parcels, parcel), buffer, out=False)


def unpack_some(places: Places, parcels: Parcels, parcel: int, buffer: torch.Tensor, regions: Bools) -> None:
    """As :func:`unpack`, for those of the parcel's regions alone that are chosen."""
    _move(places, [one for one in _find(places, parcels, parcel) if regions[one[0].region]], buffer, out=False)


def put(place: RegionPlace, extent: Extent, buffer: torch.Tensor) -> None:
    """Copy an extent from a buffer to one place."""
    _copy(place, extent, buffer, out=False)


#: The extents of a parcel, each with its memory if that is one run.
_Extents = list[tuple[Extent, torch.Tensor | None]]


def _find(places: Places, parcels: Parcels, parcel: int) -> _Extents:
    return [(extent, places.run(extent.region, extent.low, extent.high)) for extent in parcels.extents(parcel)]


def _home(places: Places, extents: _Extents) -> torch.device | None:
    """The accelerator on which all extents lie; None if they lie in main memory, or on several devices."""
    if not streams.are_involved():
        return None
    homes: set[torch.device] = set()
    for extent, run in extents:
        homes.update([run.device] if run is not None else (place.view.device for place in places.places(extent.region)))
    return homes.pop() if len(homes) == 1 and streams.are_entered(homes) else None


def _move(places: Places, extents: _Extents, buffer: torch.Tensor, *, out: bool) -> None:
    """Copy extents from their places into a buffer, or (not ``out``) from there to their places."""
    home = _home(places, extents)
    pairs = None if home == buffer.device else _pairs(extents, buffer)
    if pairs is not None:
        (device_copies.to_host if out else device_copies.to_device)(pairs)
    elif home is None or home == buffer.device:
        _move_here(places, extents, buffer, out=out)
    else:
        _move_by_device(places, extents, buffer, home, out=out, queued=buffer.is_cpu and buffer.is_pinned())


def _pairs(extents: _Extents, buffer: torch.Tensor) -> list[device_copies.Run] | None:
    """Extents with their bytes in a pinned buffer; None unless each is one run on an accelerator."""
    if not streams.are_involved() or not buffer.is_cpu or not buffer.is_pinned():
        return None
    pairs = [(run, _slot(extent, buffer)) for extent, run in extents if run is not None and not run.is_cpu]
    return pairs if len(pairs) == len(extents) and streams.are_entered(run.device for run, _ in pairs) else None


def _slot(extent: Extent, buffer: torch.Tensor) -> torch.Tensor:
    return buffer[extent.position : extent.position + extent.high - extent.low]


def _move_here(places: Places, extents: _Extents, buffer: torch.Tensor, *, out: bool) -> None:
    runs, slots = [], []
    for extent, run in extents:
        if run is not None:
            runs.append(run)
            slots.append(_slot(extent, buffer))
        else:
            for place in places.places(extent.region)[: 1 if out else None]:
                _copy(place, extent, buffer, out=out)
    if runs:
        torch._foreach_copy_(slots if out else runs, runs if out else slots)


def _move_by_device(
    places: Places, extents: _Extents, buffer: torch.Tensor, home: torch.device, *, out: bool, queued: bool
) -> None:
    """Copy extents between their places on a device and a buffer elsewhere, by way of memory of the device.

    Then there is one copy between devices for all of them. If the device is full: in two halves, and so on.
    ``queued``: the buffer is pinned, so the copy need not be waited for.
    """
    begin, last, run = extents[0][0].position, extents[-1][0], extents[0][1]
    there = buffer[begin : last.position + last.high - last.low]
    if len(extents) == 1 and run is not None:
        (there if out else run).copy_(run if out else there, non_blocking=queued)
        return
    packed = device_copies.room_on(home, there.numel(), zeroed=out)
    if packed is None:
        halves = _halves(extents)
        for half in halves:
            _move_by_device(places, half, buffer, home, out=out, queued=queued)
        if halves:
            return
        packed = device_copies.await_room_on(home, there.numel())
    moved = [(extent._replace(position=extent.position - begin), run) for extent, run in extents]
    if out:
        _move_here(places, moved, packed, out=True)
        there.copy_(packed, non_blocking=queued)
    else:
        packed.copy_(there, non_blocking=queued)
        _move_here(places, moved, packed, out=False)


class TensorPlaces:
    """The places of regions of which each is one tensor, row by row."""

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self._places = [RegionPlace(dense.raw(tensor)) for tensor in tensors]
        self.addresses: Ints = np.zeros(len(tensors), dtype=np.int64)

    def run(self, region: int, low: int, high: int) -> None:
        return None

    def places(self, region: int) -> Sequence[RegionPlace]:
        return [self._places[region]]

    def paths_of(self, regions: Sequence[int]) -> list[str]:
        return []


def bring(tensor: torch.Tensor, low: int, high: int, buffer: torch.Tensor) -> None:
    """Queue a copy of bytes ``[low, high)`` of a tensor on a device, as they are row by row, into pinned memory.

    They are made one run on the device first; if it is full, in smaller pieces.
    """
    extent = Extent(0, low, high, 0)
    _move_by_device(TensorPlaces([tensor]), [(extent, None)], buffer, tensor.device, out=True, queued=True)


def _halves(extents: _Extents) -> list[_Extents]:
    """Two halves of the extents; none if there is only one item."""
    if len(extents) > 1:
        return [extents[: len(extents) // 2], extents[len(extents) // 2 :]]
    region, low, high, position = extents[0][0]
    half = (high - low) // 2 // LARGEST_ITEM * LARGEST_ITEM
    if not half:
        return []
    return [
        [(Extent(region, low, low + half, position), None)],
        [(Extent(region, low + half, high, position + half), None)],
    ]


def digests_of(parcels: Parcels, places: Places, numbers: Sequence[int], seconds: float) -> list[int]:
    """64-bit digests of parcels as they lie in memory. ``seconds``: how long a copy from a device may take."""
    return visit(parcels, places, numbers, lambda i, data, is_copy: digest_of(data), seconds)


def wide_digests_of(parcels: Parcels, places: Places, numbers: Sequence[int], seconds: float) -> list[bytes]:
    """128-bit digests of parcels as they lie in memory."""
    return visit(parcels, places, numbers, lambda i, data, is_copy: wide_digest_of(data), seconds)


def visit(
    parcels: Parcels,
    places: Places,
    numbers: Sequence[int],
    look: Callable[[int, torch.Tensor, bool], T],
    seconds: float,
    *,
    writes: bool = False,
) -> list[T]:
    """Look at these parcels in several threads, in batches: a device brings the next one meanwhile.

    ``look(i, data, is_copy)`` gets the place of a number in ``numbers``, the parcel's bytes in main memory, and whether
    these are a copy, which is its own until it returns. ``writes``: it may queue copies out of that to devices.
    """
    result: list[T | None] = [None] * len(numbers)
    inherited = streams.inherit()
    batches = _batches(parcels, numbers)
    largest = max((batch.nbytes for batch in batches), default=0)

    def work(some: Iterator[_Batch]) -> None:
        with inherited(), torch.inference_mode(False), torch.no_grad():
            pieces = device_copies.PinnedPair(largest, streams.entered(), seconds)
            for batch, buffer in pieces.ahead(some, partial(_bring, parcels, places)):
                for i, (number, start) in enumerate(batch.parcels, batch.first):
                    data = as_bytes(places, parcels, number, _CPU)
                    if data is None:
                        result[i] = look(i, buffer[start : start + parcels.nbytes[number]], True)
                    else:
                        result[i] = look(i, data, False)
                if writes:
                    streams.complete(seconds)

    vm.share_out(batches, work, min(vm.threads(), len(batches) // 2), "transfuse-hash")
    return cast("list[T]", result)


class _Batch(NamedTuple):
    """Parcels that are hashed together: the place of the first in the question, and of each in a buffer."""

    first: int
    parcels: Sequence[tuple[int, int]]
    nbytes: int


def _batches(parcels: Parcels, numbers: Sequence[int]) -> list[_Batch]:
    # Where each parcel would end if all lay in one buffer, each aligned for items of any size.
    ends = np.cumsum(-(-parcels.nbytes[np.asarray(numbers, dtype=np.int64)] // LARGEST_ITEM) * LARGEST_ITEM)
    begins, result, first = [0, *ends.tolist()], [], 0
    while first < len(numbers):
        last = max(first + 1, int(np.searchsorted(ends, begins[first] + HASHED_BYTES, side="right")))
        some = [(numbers[i], begins[i] - begins[first]) for i in range(first, last)]
        result.append(_Batch(first, some, begins[last] - begins[first]))
        first = last
    return result


def _bring(parcels: Parcels, places: Places, batch: _Batch, buffer: torch.Tensor) -> None:
    """Copy a batch into a buffer: together if it lies on one accelerator. Runs of main memory stay there."""
    if streams.are_involved():
        extents = [(extent, places.run(*extent[:3])) for extent in _joined(parcels, batch)]
        if _home(places, extents) is not None:
            if any(parcels.payload[number] < parcels.nbytes[number] for number, _ in batch.parcels):
                buffer.zero_()
            _move(places, extents, buffer, out=True)
            return
    for number, start in batch.parcels:
        if as_bytes(places, parcels, number, _CPU) is None:
            pack(places, parcels, number, buffer[start:])


def _joined(parcels: Parcels, batch: _Batch) -> list[Extent]:
    """The extents of a batch at their places in the buffer. Those that follow each other in a region are one."""
    result: list[Extent] = []
    for number, start in batch.parcels:
        for region, low, high, position in parcels.extents(number):
            last = result[-1] if result else None
            if last is not None and (last.region, last.high, last.position - last.low) == (region, low, start - low):
                result[-1] = last._replace(high=high)
            else:
                result.append(Extent(region, low, high, start + position))
    return result


def check_reach(places: Places, regions: Ints, memory: vm.Ranges, *, write: bool) -> None:
    """Raise if memory of one of these regions can no longer be read (with ``write``: written).

    It was checked when the transfer began. So somebody has unmapped or protected the memory since then.
    """
    start, nbytes = memory.astype(np.int64).T
    found = Mappings().faults(start, start + nbytes, write=write)
    if found:
        paths = places.paths_of(regions[list(found)].tolist())
        some = ", ".join(paths[:10]) + (", …" if len(paths) > 10 else "")
        raise StateError(
            f"leaves {some}: their memory could no longer be {'written' if write else 'read'} in the middle of the "
            f"transfer: {next(iter(found.values()))}; keep it mapped until the transfer has ended"
        )


def _gather(
    theirs: vm.Ranges, mine: vm.Ranges, places: Places, parcels: Parcels, parcel: int, *, write: bool = False
) -> bool:
    """Copy by address within this process, many ranges in one call and no tensor objects. False: not possible here."""
    if not vm.AVAILABLE:
        return False
    try:
        vm.copy(theirs, mine)
    except OSError as error:
        if error.errno == errno.EFAULT:
            # If this process may not touch the memory, torch's copy would end the process.
            regions, _ = parcels.columns(parcel)
            check_reach(places, np.arange(regions.start, regions.stop), mine if write else theirs, write=write)
        return False  # A container may forbid process_vm_readv.
    return True


def _copy(place: RegionPlace, extent: Extent, buffer: torch.Tensor, *, out: bool) -> None:
    view, item = place.view, place.item
    staged = _slot(extent, buffer).view(place.wire or view.dtype)
    at = 0
    for first, shape in blocks(view.shape[place.lead :], extent.low // item, extent.high // item):
        section = view
        for dim, (start, length) in enumerate(zip(first, shape, strict=True), place.lead):
            section = section.narrow(dim, start, length)
        count = 1
        for length in shape:
            count *= length
        mirror = staged[at : at + count].view(shape)
        if out:
            mirror.copy_(section[(0,) * place.lead])
            if place.signs is not None:
                place.signs.flip(staged[at : at + count])
        elif place.signs is not None:
            flipped = staged[at : at + count].clone()
            place.signs.flip(flipped)
            section.copy_(flipped.view(shape))
        else:
            section.copy_(mirror)
        at += count


class Staging:
    """The buffers of one conversation. A parcel under way has a buffer; a few free buffers are kept for the next.

    A receiver that passes parcels on has one for both its neighbours, so several threads may use it.

    Buffers in main memory are pinned if the conversation involves an accelerator, so that copies need not wait.
    """

    def __init__(self, keep_bytes: int, device: torch.device) -> None:
        self._keep_bytes = keep_bytes
        self.device = device
        self._pinned = device.type == "cpu" and streams.are_involved()
        self._free: list[torch.Tensor] = []
        self._free_bytes = 0
        self._lock = threading.Lock()
        self._stopgap: torch.Tensor | None = None

    def reserve(self, sizes: Iterable[int], most: int) -> bool:
        """Whether a device has room for buffers of these sizes, ``most`` bytes at a time. One is set aside.

        Others may take the room all the same: then :meth:`take` raises, and there is still :meth:`stopgap`.
        """
        needed = [] if self.device.type == "cpu" else list(sizes)
        if not needed:
            return True
        self._stopgap = device_copies.room_on(self.device, max(needed))
        # The allocator keeps what is freed here for the buffers.
        return self._stopgap is not None and device_copies.room_on(self.device, min(sum(needed), most)) is not None

    def stopgap(self, nbytes: int) -> torch.Tensor:
        """A buffer whose bytes do not matter: what the other end expects although this one has failed."""
        return self.take(nbytes) if self._stopgap is None or self._stopgap.numel() < nbytes else self._stopgap

    def take(self, nbytes: int) -> torch.Tensor:
        """A buffer of at least ``nbytes`` and at most twice as many."""
        with self._lock:
            for i, buffer in enumerate(self._free):
                if nbytes <= buffer.numel() <= 2 * nbytes:
                    self._free_bytes -= buffer.numel()
                    return self._free.pop(i)
        try:
            return torch.empty(nbytes, dtype=torch.uint8, device=self.device, pin_memory=self._pinned)
        except torch.OutOfMemoryError as error:
            raise TransfuseError(
                f"{self.device} has no {nbytes} free bytes for staging any more, which it had when the two ranks "
                "agreed on its backend: leave it more memory, or pass device='cpu'"
            ) from error

    def give_back(self, buffer: torch.Tensor) -> None:
        with self._lock:
            if buffer is not self._stopgap and self._free_bytes + buffer.numel() <= self._keep_bytes:
                self._free_bytes += buffer.numel()
                self._free.append(buffer)
