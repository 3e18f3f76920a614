"""Read parcels out of a source's memory, straight to their places.

This module serves every route that can read ranges of the source's memory by address. Such a route only has to
implement a :class:`TokenEntry`, a :class:`TokenLease` and a :class:`RangeReader`. The proof that a receiver reads the
right memory is a random token at the address that the entry names. The source wipes the token before its call returns,
and the receiver reads the token again after the last byte: while the token is there, so are the tensors.

If a region is one run of memory at both ends, its bytes are read straight to where they belong, many ranges in one
call, in several threads. All other regions are read into a small buffer in linear order and unpacked from there.
"""

from __future__ import annotations

import ctypes
import hmac
import secrets
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from types import TracebackType
from typing import Self, TypeVar

import msgspec
import numpy as np
import numpy.typing as npt
import torch

from transfuse._memory import packing, streams, vm
from transfuse._memory.device_copies import PinnedPair
from transfuse._plan.parcels import Extent
from transfuse._plan.regions import Cast
from transfuse._state.region import Ints, Region
from transfuse._tuning import READ_SPAN_BYTES
from transfuse._wire.route import MalformedEntry, Pull, Unreadable

TOKEN_BYTES = 32
#: Above all user-space addresses, and low enough that adding an offset within a storage does not overflow.
HIGHEST_ADDRESS = 1 << 62
#: The cost of one more range, and of one more item copied out of a span that was read whole. The unit is bytes: how
#: many could be read in the same time. benchmarks/ranges.py measures 3,400 to 4,500 and 13 to 18 (2026-11-16, one core
#: of an AMD EPYC, 8 GB/s).
RANGE_COST = 3500
ITEM_COST = 16
#: The most runs, and the most bytes of a span, that are handled at a time. The columns that describe them take memory
#: too.
MAX_RUNS = 1 << 15

Bools = npt.NDArray[np.bool_]
E = TypeVar("E")

_ITEMS = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64, 16: np.complex128}


class TokenEntry:
    """What every such entry says. (No fields of its own: a field's place on the wire is its place in the class.)"""

    __slots__ = ()

    #: A receiver that finds ``token`` at this address reads the right memory.
    token_address: int
    token: bytes
    #: For each storage, the address of its window's first byte (u64 each); 0: not readable.
    storages: bytes

    def encode(self) -> bytes:
        return msgspec.msgpack.encode(self)

    def addresses(self, storages: int) -> npt.NDArray[np.uint64]:
        """The addresses of this many storages. Raises :class:`MalformedEntry` if they cannot be."""
        if len(self.storages) % 8:
            raise MalformedEntry("a malformed description of memory: its addresses are not 8 bytes each")
        addresses = np.frombuffer(self.storages, dtype="<u8")
        if len(addresses) != storages or len(self.token) != TOKEN_BYTES:
            raise MalformedEntry(
                f"a malformed description of memory: {len(addresses)} addresses for {storages} storages, "
                f"a token of {len(self.token)} bytes (expected {TOKEN_BYTES})"
            )
        highest = max(self.token_address, int(addresses.max(initial=0)))
        if self.token_address < 0 or highest >= HIGHEST_ADDRESS:
            raise MalformedEntry(
                f"a malformed description of memory: an impossible address (the token at {self.token_address:#x}, "
                f"the highest at {highest:#x})"
            )
        return addresses


def decode(decoder: msgspec.msgpack.Decoder[E], data: bytes, what: str) -> E:
    """An entry. Raises :class:`MalformedEntry`."""
    try:
        return decoder.decode(data)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
        raise MalformedEntry(f"a malformed description of {what}: {error}") from error


class TokenLease:
    """A source's permission to read its memory. It begins with ``with`` and ends with :meth:`end` or the block."""

    def __init__(self) -> None:
        self._token = secrets.token_bytes(TOKEN_BYTES)
        self._page = ctypes.create_string_buffer(TOKEN_BYTES)

    @property
    def _window(self) -> tuple[int, int]:
        """The address of the token, and its length."""
        return ctypes.addressof(self._page), TOKEN_BYTES

    def __enter__(self) -> Self:
        ctypes.memmove(self._page, self._token, TOKEN_BYTES)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.end()

    def end(self) -> None:
        """Wipe the token, so that a receiver that still reads will notice."""
        ctypes.memset(self._page, 0, TOKEN_BYTES)


class RangeReader(ABC):
    """Reads ranges of a source's memory, proven by the token. :class:`Unreadable` if that is impossible here."""

    def __init__(self, entry: TokenEntry, storages: int, whose: str) -> None:
        """``whose``: the memory's name in errors."""
        self._proof, self._whose = entry, whose
        #: The address of each storage's window, in the address space that the source's entry names; 0: no address.
        self.storages = entry.addresses(storages)

    @abstractmethod
    def read(
        self,
        theirs: vm.Ranges,
        mine: vm.Ranges,
        *,
        begins: Callable[[int], object] = ...,
        went_on: Callable[[int], object] = ...,
    ) -> npt.NDArray[np.int64]:
        """Read ranges of the source's memory into ranges of our own. Return the rows that failed.

        ``begins(upto)`` is called before ``mine`` is written: from then on its first ``upto`` bytes, counted over all
        ranges, may be written. ``went_on(nbytes)`` is called after ``nbytes`` were read.
        """

    def recheck(self) -> None:
        """See :meth:`.route.Puller.recheck`."""
        found = np.zeros(TOKEN_BYTES, dtype=np.uint8)
        size = np.array([TOKEN_BYTES])
        theirs = vm.ranges(np.array([self._proof.token_address], dtype=np.uint64), size)
        failed = self.read(theirs, vm.ranges(np.array([found.ctypes.data]), size))
        if len(failed) or not hmac.compare_digest(found.tobytes(), self._proof.token):
            raise Unreadable(f"{self._whose} does not hold the token")

    @abstractmethod
    def close(self) -> None: ...


class Reading:
    """Reads parcels from one source: the :class:`.route.Puller` of routes that read by address."""

    def __init__(self, reader: RangeReader, pull: Pull) -> None:
        self._reader = reader
        self._cut = pull.cut
        self._landing = pull.landing
        self._staging_bytes = pull.staging_bytes
        self._rate_limit = pull.rate_limit
        self._went_on = pull.went_on
        self._timeout = pull.timeout
        regions = pull.cut.regions
        base = reader.storages[regions.storage].astype(np.uint64)
        #: The address of each region at the source, or 0.
        self._theirs = np.where(base > 0, base + regions.start.astype(np.uint64), 0)

    def recheck(self) -> None:
        self._reader.recheck()

    def close(self) -> None:
        self._reader.close()

    def readable(self) -> list[int]:
        """Numbers of the parcels whose regions all have an address at the source."""
        return np.flatnonzero(self._cut.of_all_regions(self._theirs > 0)).tolist()

    def pull(self, numbers: Sequence[int]) -> list[int]:
        """Read these parcels to their places. Return the numbers of the parcels that could not be read."""
        chosen = np.array(numbers, dtype=np.int64)
        straight = self._cut.of_all_regions(self._straight)[chosen]
        failed = self._read_straight(chosen[straight])
        return sorted(failed + self._each(chosen[~straight].tolist(), self._read_aside))

    @property
    def _straight(self) -> Bools:
        """For each region, whether it is one run of memory at both ends."""
        result = (self._landing.addresses > 0) & (self._theirs > 0)
        result[list(self._cut.regions.strided)] = False
        return result

    def _read_straight(self, chosen: npt.NDArray[np.int64]) -> list[int]:
        cut = self._cut
        if not len(chosen):
            return []
        parcel, region, low, nbytes = cut.ranges(chosen)
        theirs = vm.ranges(self._theirs[region] + low.astype(np.uint64), nbytes)
        mine = vm.ranges(self._landing.addresses[region] + low, nbytes)
        begun = [0]
        try:
            if not len(self._reader.read(*vm.join(theirs, mine), begins=begun.append, went_on=self._went_on)):
                return []
        finally:
            self._landing.touch(region[np.cumsum(nbytes) - nbytes < max(begun)])
        # Rare. Read again without joining neighbours, to find out exactly which ranges cannot be read.
        failed = self._reader.read(theirs, mine, went_on=self._rate_limit)
        packing.check_reach(self._landing, region[failed], mine[failed], write=True)
        return sorted({int(parcel[row]) for row in failed})

    def _read_aside(self, number: int, buffer: torch.Tensor) -> bool:
        """Read one parcel by way of a buffer. Return whether that was possible."""
        if not self.fetch(number, buffer):
            return False
        first = int(self._cut.first[number])
        self._landing.touch(range(first, first + int(self._cut.count[number])))
        packing.unpack(self._landing, self._cut, number, buffer)
        self._went_on(int(self._cut.payload[number]))
        return True

    def differing(self, numbers: Sequence[int]) -> list[int]:
        """Read these parcels a second time and compare with what has landed. Return the numbers that differ."""

        def same(number: int, buffer: torch.Tensor) -> bool:
            size = int(self._cut.nbytes[number])
            self._rate_limit(size)
            landed = packing.as_bytes(self._landing, self._cut, number, buffer.device)
            if landed is None:
                landed = torch.empty(size, dtype=torch.uint8, pin_memory=streams.are_involved())
                packing.pack(self._landing, self._cut, number, landed)
                streams.complete(self._timeout)
            return self.fetch(number, buffer) and torch.equal(landed, buffer[:size])

        unconverted = self._cut.of_all_regions(~self._landing.convert)
        numbers = [number for number in numbers if unconverted[number]]

        return sorted(self._each(numbers, same))

    def _each(self, numbers: Sequence[int], task: Callable[[int, torch.Tensor], bool]) -> list[int]:
        """Run a task for each parcel, in several threads with buffers each. Return the parcels that got False."""
        failed: list[int] = []
        largest = max((int(self._cut.nbytes[n]) for n in numbers), default=0)
        inherited = streams.inherit()

        def work(some: Iterator[int]) -> None:
            with inherited(), torch.inference_mode(False), torch.no_grad():
                pieces = PinnedPair(largest, streams.entered(), self._timeout)
                for number in some:
                    with pieces.turn() as buffer:
                        if not task(number, buffer):
                            failed.append(number)
                streams.complete(self._timeout)

        # A thread may hold two buffers, and columns that describe runs.
        most = self._staging_bytes // (4 * max(largest, 1))
        vm.share_out(numbers, work, min(vm.threads(), len(numbers) // 4, most), "transfuse-reader")
        return failed

    # -- one parcel in linear order

    def fetch(self, number: int, buffer: torch.Tensor) -> bool:
        """Read a parcel into a buffer, as it would arrive over the group. Return whether that was possible."""
        data = buffer.numpy()[: int(self._cut.nbytes[number])]
        data[:] = 0
        theirs: list[vm.Ranges] = []
        mine: list[vm.Ranges] = []
        for extent in self._cut.extents(number):
            base = int(self._theirs[extent.region])
            cast = self._cut.regions.casts.get(extent.region)
            if cast is not None:
                if not self._fetch_cast(base, cast, extent, buffer):
                    return False
                continue
            region = self._cut.regions.strided.get(extent.region)
            if region is not None:
                if not self._fetch_strided(base, region, extent, data):
                    return False
                continue
            size = np.array([extent.high - extent.low])
            theirs.append(vm.ranges(np.array([base + extent.low]), size))
            mine.append(vm.ranges(np.array([extent.position + data.ctypes.data]), size))
        return not theirs or not len(self._reader.read(*vm.join(np.concatenate(theirs), np.concatenate(mine))))

    def _fetch_cast(self, base: int, cast: Cast, extent: Extent, buffer: torch.Tensor) -> bool:
        """Read an extent of a region whose items have another dtype in the source's memory, and convert it."""
        item, wire = cast.region.item, cast.wire.itemsize
        low, high = extent.low // wire * item, extent.high // wire * item
        raw = torch.empty(high - low, dtype=torch.uint8)
        if not self._fetch_strided(base, cast.region, Extent(extent.region, low, high, 0), raw.numpy()):
            return False
        converted = buffer[extent.position : extent.position + extent.high - extent.low].view(cast.wire)
        converted.copy_(raw.view(cast.memory))
        return True

    def _fetch_strided(self, base: int, region: Region, extent: Extent, data: npt.NDArray[np.uint8]) -> bool:
        """Read an extent of a region that is many runs of memory, up to ``MAX_RUNS`` of them at a time."""
        run = region.item * (region.sizes[-1] if region.sizes and region.strides[-1] == 1 else 1)
        step = max(run, MAX_RUNS * run)
        for low in range(extent.low // run * run, extent.high, step):
            first, last = max(low, extent.low), min(low + step, extent.high)
            starts, sizes = _runs(region, first, last)
            into = data[extent.position + first - extent.low :][: last - first]
            if _span_is_cheaper(region, starts, sizes):
                done = self._fetch_span(base, region.item, starts, sizes, into)
            else:
                theirs = vm.ranges(starts + base, sizes)
                mine = vm.ranges(np.cumsum(sizes) - sizes + into.ctypes.data, sizes)
                done = not len(self._reader.read(*vm.join(theirs, mine)))
            if not done:
                return False
        return True

    def _fetch_span(self, base: int, item: int, starts: Ints, sizes: Ints, into: npt.NDArray[np.uint8]) -> bool:
        """Read all memory from the first run to the last, ``READ_SPAN_BYTES`` or so at a time; copy out the runs."""
        dtype = _ITEMS[item]
        spacing = max(1, int(starts.max() + sizes.max() - starts.min()) // len(starts))
        step, at = max(1, READ_SPAN_BYTES // spacing), 0
        for i in range(0, len(starts), step):
            some, lengths = starts[i : i + step], sizes[i : i + step]
            low = int(some.min())
            span = np.empty(int((some + lengths).max()) - low, dtype=np.uint8)
            theirs = vm.ranges(np.array([base + low]), np.array([span.nbytes]))
            if len(self._reader.read(theirs, vm.ranges(np.array([span.ctypes.data]), np.array([span.nbytes])))):
                return False
            counts = lengths // item
            first = (some - low) // item - (np.cumsum(counts) - counts)
            picked = np.repeat(first, counts) + np.arange(int(counts.sum()))
            nbytes = int(lengths.sum())
            into[at : at + nbytes].view(dtype)[:] = span.view(dtype)[picked]
            at += nbytes
        return True


def _runs(region: Region, low: int, high: int) -> tuple[Ints, Ints]:
    """Bytes ``[low, high)`` of a region's linear order as runs of memory: the offset and the length of each run."""
    outer, strides, run = region.sizes, region.strides, region.item
    if strides and strides[-1] == 1:
        outer, strides, run = outer[:-1], strides[:-1], run * outer[-1]
    first, last = low // run, -(-high // run)
    index = np.unravel_index(np.arange(first, last), outer) if outer else ()
    starts = np.zeros(last - first, dtype=np.int64)
    for position, stride in zip(index, strides, strict=True):
        starts += position * (stride * region.item)
    sizes = np.full(last - first, run, dtype=np.int64)
    starts[0] += low - first * run
    sizes[0] -= low - first * run
    sizes[-1] -= last * run - high
    return starts, sizes


def _span_is_cheaper(region: Region, starts: Ints, sizes: Ints) -> bool:
    nbytes = int(sizes.sum())
    span = int((starts + sizes).max() - starts.min())
    return span + nbytes // region.item * ITEM_COST < nbytes + len(starts) * RANGE_COST
