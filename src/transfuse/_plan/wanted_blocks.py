"""Wanted blocks: what a receiver asks a source for, as blocks of global tensors.

The receiver need not know how the source's memory is laid out: the source finds each block in its own shards. Pure. The
bytes of a block travel in row-major order of the global tensor.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence

import msgspec
import numpy as np
import torch
import xxhash

from transfuse._plan.holdings import Holdings
from transfuse._plan.regions import Cast, Regions
from transfuse._state.leaves import dense, values
from transfuse._state.leaves.layout import Box
from transfuse._state.manifest import Manifest
from transfuse._state.region import Ints, Region


class WantedBlocks(msgspec.Struct, array_like=True, frozen=True, forbid_unknown_fields=True):
    """Columns, as little-endian bytes: for each block its leaf, the number of the tensor in the leaf, start and sizes.

    ``dtype`` is the dtype on the wire: 0 for the source's own, otherwise a number in ``dtypes``, counting from 1.
    ``begins`` marks the first block of each set of holders: there a new parcel begins.
    """

    leaf: bytes
    tensor: bytes
    ndim: bytes
    starts: bytes
    sizes: bytes
    dtype: bytes
    dtypes: list[str]
    begins: bytes

    @classmethod
    def of(
        cls,
        leaf: Ints,
        tensor: Ints,
        ndim: Ints,
        starts: Ints,
        sizes: Ints,
        wires: Sequence[torch.dtype | None],
        wire: Ints,
        begins: Ints,
    ) -> WantedBlocks:
        """Encode columns. ``wires[wire]`` is the dtype in which a block travels; None for the source's dtype."""
        names = list(dict.fromkeys(dtype for dtype in wires if dtype is not None))
        codes = np.array([0 if dtype is None else names.index(dtype) + 1 for dtype in wires], dtype=np.int64)
        return cls(
            leaf=leaf.astype("<i4").tobytes(),
            tensor=tensor.astype("<i4").tobytes(),
            ndim=ndim.astype("<u1").tobytes(),
            starts=starts.astype("<i8").tobytes(),
            sizes=sizes.astype("<i8").tobytes(),
            dtype=(codes[wire] if len(codes) else wire).astype("<u1").tobytes(),
            dtypes=list(map(values.dtype_name, names)),
            begins=begins.astype("<u1").tobytes(),
        )

    def fingerprint(self) -> int:
        digest = xxhash.xxh3_64(repr(self.dtypes).encode())
        for column in (self.leaf, self.tensor, self.ndim, self.starts, self.sizes, self.dtype, self.begins):
            digest.update(column)
        return digest.intdigest()


def merged(sizes: Sequence[int], strides: Sequence[int]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The same elements in the same order with fewer dimensions: neighbours that are one run of memory are merged."""
    result: list[tuple[int, int]] = []
    for size, stride in zip(sizes, strides, strict=True):
        if size == 1:
            continue
        if result and result[-1][1] == size * stride:
            result[-1] = (result[-1][0] * size, stride)
        else:
            result.append((size, stride))
    return tuple(n for n, _ in result), tuple(s for _, s in result)


#: A receiver that wants more bytes than this many whole states is refused: no honest receiver does.
MOST_TIMES = 64


def regions_in(holdings: Holdings, wanted_blocks: WantedBlocks) -> Regions:
    """The regions of the described rank's memory that hold these blocks; ``ValueError`` if it does not hold them.

    ``nbytes`` and ``item`` of a region that is converted are those on the wire.
    """
    leaf, tensor, ndim = (
        _unpack(c, code)
        for c, code in ((wanted_blocks.leaf, "<i4"), (wanted_blocks.tensor, "<i4"), (wanted_blocks.ndim, "<u1"))
    )
    starts, sizes, dtype = (
        _unpack(wanted_blocks.starts, "<i8"),
        _unpack(wanted_blocks.sizes, "<i8"),
        _unpack(wanted_blocks.dtype, "<u1"),
    )
    begins = _unpack(wanted_blocks.begins, "<u1")
    if not len(leaf) == len(tensor) == len(ndim) == len(dtype) == len(begins):
        raise ValueError("the columns of the wanted blocks have different lengths")
    if len(starts) != ndim.sum() or len(sizes) != ndim.sum():
        raise ValueError(f"{len(starts)} starts and {len(sizes)} sizes for blocks of {ndim.sum()} dimensions in all")
    if len(sizes) and (sizes.min() < 1 or starts.min() < 0):
        raise ValueError("a wanted block has a size below 1 or a start below 0")
    if len(dtype) and dtype.max() > len(wanted_blocks.dtypes):
        raise ValueError("a wanted block has a dtype that is not listed")
    wires = [None, *(values.dtype_named(name) for name in wanted_blocks.dtypes)]
    first = np.cumsum(ndim) - ndim
    manifest = holdings.manifest
    found, tensors = _RegionList(), manifest.tensors
    most = MOST_TIMES * float((tensors.numel * tensors.item).sum())
    columns = (leaf, tensor, first, first + ndim, dtype)
    for number, which, low, high, code in zip(*(column.tolist() for column in columns), strict=True):
        block = Box(tuple(starts[low:high].tolist()), tuple(sizes[low:high].tolist()))
        holding = holdings.of(number, which)
        if len(block.start) != len(holding.shape):
            raise ValueError(f"a block of {len(block.start)} dimensions of a tensor of {len(holding.shape)}")
        row, at = holding.find(block)
        found.add(manifest, row, at, block.sizes, wires[code])
        most -= block.numel * int(tensors.item[row])
        if most < 0:
            raise ValueError(f"the wanted blocks are more than {MOST_TIMES} times the whole state")
    return found.columns(np.cumsum(begins))


class _RegionList:
    """Regions, collected one after another."""

    def __init__(self) -> None:
        self._rows: list[tuple[int, int, int, int, int]] = []
        self._strided: dict[int, Region] = {}
        self._casts: dict[int, Cast] = {}

    def add(
        self, manifest: Manifest, row: int, at: Sequence[int], sizes: tuple[int, ...], wire: torch.dtype | None
    ) -> None:
        tensors, number = manifest.tensors, len(self._rows)
        item, strides = int(tensors.item[row]), tensors.stride(row)
        start = int(tensors.start[row]) + item * sum(map(operator.mul, at, strides))
        region = Region(start, item, *merged(sizes, strides))
        nbytes = region.nbytes
        if wire is not None:
            memory = manifest.dtype_of(row)
            if not (wire.is_floating_point and memory.is_floating_point and dense.converts(memory, wire)):
                raise ValueError(f"a tensor of {memory} cannot be sent as {wire}")
            if tensors.flags[row] & (dense.Flags.CONJUGATE | dense.Flags.NEGATIVE):
                raise ValueError("a tensor with a conjugate or negative bit cannot be converted")
            self._casts[number] = Cast(memory, wire, region)
            item, nbytes = wire.itemsize, nbytes // item * wire.itemsize
        if wire is not None or not region.contiguous:
            self._strided[number] = region
        self._rows.append((int(tensors.storage[row]), start, nbytes, item, row))

    def columns(self, space: Ints) -> Regions:
        rows = np.array(self._rows, dtype=np.int64).reshape(-1, 5)
        storage, start, nbytes, item, tensor = (np.ascontiguousarray(rows[:, i]) for i in range(5))
        return Regions(storage, space, start, nbytes, item, tensor, strided=self._strided, also={}, casts=self._casts)


def _unpack(data: bytes, code: str) -> Ints:
    return np.frombuffer(data, dtype=code).astype(np.int64)
