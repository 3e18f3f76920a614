"""Packing: copy the regions of a parcel from memory into a buffer, and from a buffer to memory.

A place is a view of memory whose row-major order is its region's linear order. A source has one place for each region.
A receiver has several if weights that are tied at the source are not tied in the target.
"""

from __future__ import annotations

import errno
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar, cast

import numpy as np
import torch

from transfuse._errors import StateError
from transfuse._memory import streams, vm
from transfuse._memory.digest import digest_of, wide_digest_of
from transfuse._plan.parcels import Extent, Parcels
from transfuse._plan.regions import Regions
from transfuse._state.leaves import dense
from transfuse._state.memory_maps import Mappings
from transfuse._state.region import Form, Ints, Region, blocks
from transfuse._state.tensors import Bools

T = TypeVar("T")

_CPU = torch.device("cpu")

#: How many parcels a thread takes at a time to hash.
HASHED_TOGETHER = 16


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
    memory = ranges(places, parcels, parcel) if filled.is_cpu else None
    if memory is not None:
        theirs, positions = memory
        if theirs[:, 1].sum() < filled.numel():
            filled.zero_()
        if _gather(theirs, vm.ranges(positions + filled.data_ptr(), theirs[:, 1]), places, parcels, parcel):
            return filled
    extents = _find(places, parcels, parcel)
    home = _home(places, extents)
    if home is None or home == filled.device:
        return _pack_here(places, extents, filled)
    # Pack on the device first: then there is one copy between devices for the whole parcel, and none for each tensor.
    packed = _pack_here(places, extents, torch.empty_like(filled, device=home))
    return filled.copy_(packed, non_blocking=filled.is_cpu and filled.is_pinned())


def unpack(places: Places, parcels: Parcels, parcel: int, buffer: torch.Tensor) -> None:
    """Copy a parcel's bytes from ``buffer`` to all their places.

    If these lie on an accelerator, the copies are only queued on this thread's stream: keep the buffer until then.
    """
    memory = ranges(places, parcels, parcel) if buffer.is_cpu else None
    if memory is not None:
        mine, positions = memory
        if _gather(vm.ranges(positions + buffer.data_ptr(), mine[:, 1]), mine, places, parcels, parcel, write=True):
            return
    extents = _find(places, parcels, parcel)
    home = _home(places, extents)
    if home is not None and home != buffer.device:
        # One copy between devices for the whole parcel. There it is copied to its places.
        buffer = buffer[: int(parcels.nbytes[parcel])]
        buffer = buffer.to(home, non_blocking=buffer.is_cpu and buffer.is_pinned())
    runs, slots = [], []
    for extent, run in extents:
        if run is None:
            for place in places.places(extent.region):
                _copy(place, extent, buffer, out=False)
        else:
            runs.append(run)
            slots.append(buffer[extent.position : extent.position + extent.high - extent.low])
    if runs:
        torch._foreach_copy_(runs, slots)


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


def _pack_here(places: Places, extents: _Extents, buffer: torch.Tensor) -> torch.Tensor:
    used = 0
    runs, slots = [], []
    for extent, run in extents:
        if extent.position > used:
            buffer[used : extent.position].zero_()
        used = extent.position + extent.high - extent.low
        if run is None:
            _copy(places.places(extent.region)[0], extent, buffer, out=True)
        else:
            runs.append(run)
            slots.append(buffer[extent.position : used])
    if runs:
        torch._foreach_copy_(slots, runs)
    return buffer


def digests_of(parcels: Parcels, places: Places, numbers: Sequence[int]) -> list[int]:
    """64-bit digests of parcels as they lie in memory."""
    return _hash(parcels, places, numbers, digest_of)


def wide_digests_of(parcels: Parcels, places: Places, numbers: Sequence[int]) -> list[bytes]:
    """128-bit digests of parcels as they lie in memory."""
    return _hash(parcels, places, numbers, wide_digest_of)


def _hash(parcels: Parcels, places: Places, numbers: Sequence[int], digest: Callable[[torch.Tensor], T]) -> list[T]:
    """Hash these parcels in several threads."""
    result: list[T | None] = [None] * len(numbers)
    errors: list[BaseException] = []
    supply = iter(range(0, len(numbers), HASHED_TOGETHER))
    inherited = streams.inherit()

    def work() -> None:
        try:
            with inherited(), torch.inference_mode(False), torch.no_grad():
                while not errors and (first := next(supply, None)) is not None:
                    some = numbers[first : first + HASHED_TOGETHER]
                    for i, data in enumerate(_brought(parcels, places, some), first):
                        result[i] = digest(data)
        except BaseException as error:
            errors.append(error)

    helpers = min(vm.threads(), len(numbers) // (2 * HASHED_TOGETHER)) - 1
    vm.run_in([threading.Thread(target=work, name="transfuse-hash", daemon=True) for _ in range(helpers)], work)
    if errors:
        raise errors[0]
    return cast("list[T]", result)


def _brought(parcels: Parcels, places: Places, numbers: Sequence[int]) -> Iterator[torch.Tensor]:
    """The bytes of parcels in main memory: where they lie, or copied there."""
    homes = {_home(places, _find(places, parcels, number)) for number in numbers} if streams.are_involved() else {None}
    home = homes.pop() if len(homes) == 1 else None
    if home is not None:
        # All lie on one accelerator: pack them there, and copy them together.
        sizes = [int(parcels.nbytes[number]) for number in numbers]
        packed = torch.empty(sum(sizes), dtype=torch.uint8, device=home)
        for number, slot in zip(numbers, torch.split(packed, sizes), strict=True):
            pack(places, parcels, number, slot)
        yield from torch.split(packed.cpu(), sizes)
        return
    for number in numbers:
        data = as_bytes(places, parcels, number, _CPU)
        if data is None:
            data = pack(places, parcels, number, torch.empty(int(parcels.nbytes[number]), dtype=torch.uint8))
        yield data


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
    staged = buffer[extent.position : extent.position + extent.high - extent.low].view(place.wire or view.dtype)
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

    def take(self, nbytes: int) -> torch.Tensor:
        """A buffer of at least ``nbytes`` and at most twice as many."""
        with self._lock:
            for i, buffer in enumerate(self._free):
                if nbytes <= buffer.numel() <= 2 * nbytes:
                    self._free_bytes -= buffer.numel()
                    return self._free.pop(i)
        return torch.empty(nbytes, dtype=torch.uint8, device=self.device, pin_memory=self._pinned)

    def give_back(self, buffer: torch.Tensor) -> None:
        with self._lock:
            if self._free_bytes + buffer.numel() <= self._keep_bytes:
                self._free_bytes += buffer.numel()
                self._free.append(buffer)
