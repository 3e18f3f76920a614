"""A manifest: a state as plain data. Its tree, its leaves, its parts and storages; no tensor, no code.

Parts and storages are columns (one array for each property, not one object for each tensor): a state of a hundred
thousand tensors is described by a dozen arrays.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import torch

from transfuse import trees
from transfuse.boxes import Box, Form, canonical
from transfuse.errors import UnsupportedLeaf
from transfuse.leaves import dense, values
from transfuse.leaves.codec import CannotCarry, Shared
from transfuse.leaves.kinds import Kinds
from transfuse.limits import Limits

__all__ = ["Described", "Leaf", "Manifest", "Parts", "Storages", "describe"]

Ints = npt.NDArray[np.int64]

#: No size, stride or offset is larger; products of two are checked in floating point first.
HUGE = 1 << 56


class Leaf:
    """Codes of the leaf column."""

    VALUE = 0
    TENSOR = 1
    COMPOSITE = 2


@dataclass(eq=False)
class Parts:
    """Columns of all parts. Sizes and strides of part i are ``[first[i] : first[i + 1]]`` of theirs."""

    storage: Ints
    dtype: Ints
    flags: Ints
    offset: Ints  # in items, from the start of the storage's window
    ndim: Ints
    sizes: Ints
    strides: Ints
    item: Ints  # bytes of one item

    def __len__(self) -> int:
        return len(self.storage)

    @cached_property
    def first(self) -> Ints:
        return np.concatenate([[0], np.cumsum(self.ndim)]).astype(np.int64)

    def shape(self, i: int) -> tuple[int, ...]:
        return tuple(self.sizes[self.first[i] : self.first[i + 1]].tolist())

    def stride(self, i: int) -> tuple[int, ...]:
        return tuple(self.strides[self.first[i] : self.first[i + 1]].tolist())

    def form(self, i: int) -> Form:
        return canonical(self.shape(i), self.stride(i))

    def box(self, i: int) -> tuple[Box, bool]:
        """The box of part i, and whether it overlaps itself."""
        form, item = self.form(i), int(self.item[i])
        return Box(int(self.offset[i]) * item, item, form.sizes, form.strides), form.overlapping

    @cached_property
    def _owner(self) -> Ints:
        """For each dimension, its part."""
        return np.repeat(np.arange(len(self), dtype=np.int64), self.ndim)

    @cached_property
    def numel(self) -> Ints:
        numel = np.ones(len(self), dtype=np.int64)
        np.multiply.at(numel, self._owner, self.sizes)
        return numel

    @cached_property
    def reach(self) -> Ints:
        """Items from a part's first to one past its last; 0 for an empty part."""
        reach = np.ones(len(self), dtype=np.int64)
        np.add.at(reach, self._owner, (self.sizes - 1) * self.strides)
        return np.where(self.numel > 0, reach, 0)

    @cached_property
    def start(self) -> Ints:
        """The first byte of each part in its storage's window."""
        return self.offset * self.item

    @cached_property
    def end(self) -> Ints:
        """One past the last byte of each part."""
        return self.start + self.reach * self.item

    @cached_property
    def contiguous(self) -> npt.NDArray[np.bool_]:
        """Which parts are one run of memory in row-major order."""
        result = np.ones(len(self), dtype=bool)
        for dims in np.unique(self.ndim):
            if dims == 0:
                continue
            chosen = np.flatnonzero(self.ndim == dims)
            at = self.first[chosen][:, None] + np.arange(dims)
            sizes, strides = self.sizes[at], self.strides[at]
            expected = np.ones_like(sizes)
            expected[:, :-1] = np.cumprod(sizes[:, :0:-1], axis=1)[:, ::-1]
            result[chosen] = ((strides == expected) | (sizes == 1)).all(axis=1)
        return result

    def check(self, storages: Storages) -> None:
        """Refuse columns that no describer writes. Nothing is indexed or multiplied before it is known to be safe."""
        n = len(self)
        if any(len(column) != n for column in (self.dtype, self.flags, self.offset, self.ndim, self.item)):
            raise ValueError("columns of different length")
        if n and (self.ndim.min() < 0 or self.ndim.max() > 64):
            raise ValueError("a tensor of too many dimensions")
        dims = int(self.ndim.sum())
        if len(self.sizes) != dims or len(self.strides) != dims:
            raise ValueError("sizes and strides do not match the number of dimensions")
        if n and (self.storage.min() < 0 or self.storage.max() >= len(storages)):
            raise ValueError("a tensor in a storage that was not described")
        if n and (self.flags.min() < 0 or self.flags.max() >= 64):
            raise ValueError("unknown tensor flags")
        for column in (self.offset, self.sizes, self.strides):
            if len(column) and (column.min() < 0 or column.max() > HUGE):
                raise ValueError("a size, stride or offset out of range")
        numel = np.ones(n)
        np.multiply.at(numel, self._owner, self.sizes.astype(float))
        reach = np.ones(n)
        np.add.at(reach, self._owner, np.maximum(self.sizes - 1, 0).astype(float) * self.strides.astype(float))
        if n and max(numel.max(), reach.max(), self.offset.max()) * 16 > float(HUGE):
            raise ValueError("a tensor too large to address")
        inside = (self.end <= storages.nbytes[self.storage]) | (self.numel == 0)
        if not inside.all():
            raise ValueError(f"part {int(np.argmin(inside))} reaches beyond its storage")
        if (self.start % self.item).any():
            raise ValueError("a misaligned tensor")


@dataclass(eq=False)
class Storages:
    """Columns of all storages. A storage's window is the run of its bytes that its parts show."""

    nbytes: Ints
    device: Ints  # an index into devices
    devices: list[str]

    def __len__(self) -> int:
        return len(self.nbytes)

    def device_of(self, i: int) -> str:
        return self.devices[int(self.device[i])]


class Wire(msgspec.Struct, array_like=True, frozen=True, forbid_unknown_fields=True):
    """A manifest on the wire: columns as little-endian bytes."""

    tree: Any
    kinds: bytes
    details: list[Any]
    shared: list[Any]
    dtypes: list[str]
    devices: list[str]
    storage_nbytes: bytes
    storage_device: bytes
    part_storage: bytes
    part_dtype: bytes
    part_flags: bytes
    part_ndim: bytes
    part_offset: bytes
    part_sizes: bytes
    part_strides: bytes


class Manifest:
    """A described state."""

    def __init__(
        self,
        root: trees.Node | None,
        kinds: bytes,
        details: list[Any],
        shared: list[Any],
        dtypes: list[torch.dtype],
        parts: Parts,
        storages: Storages,
    ) -> None:
        self.root = root
        self.kinds = kinds
        #: For each leaf that is no plain tensor, in order: the encoded value, or the spec of a composite.
        self.details = details
        self.shared = shared
        self.dtypes = dtypes
        self.parts = parts
        self.storages = storages

    def __len__(self) -> int:
        return len(self.kinds)

    @cached_property
    def paths(self) -> trees.Paths:
        """The path of every leaf. For messages only: a transfer without an error never makes them."""
        return trees.paths(self.root)

    def dtype_of(self, part: int) -> torch.dtype:
        return self.dtypes[int(self.parts.dtype[part])]

    @cached_property
    def first_parts(self) -> Ints:
        """The first part of each leaf, and the number of parts at the end."""
        counts = (np.frombuffer(self.kinds, np.uint8) == Leaf.TENSOR).astype(np.int64)
        composite = [i for i, kind in enumerate(self.kinds) if kind == Leaf.COMPOSITE]
        if composite:
            counter = Kinds(Limits())
            for i in composite:
                counts[i] = counter.count(self.detail(i))
        return np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)

    @cached_property
    def _detail_numbers(self) -> Ints:
        return np.cumsum(np.frombuffer(self.kinds, np.uint8) != Leaf.TENSOR) - 1

    def detail(self, leaf: int) -> Any:
        """The value or spec of a leaf."""
        return 0 if self.kinds[leaf] == Leaf.TENSOR else self.details[int(self._detail_numbers[leaf])]

    def leaf_of(self, part: int) -> int:
        return int(np.searchsorted(self.first_parts, part, side="right")) - 1

    def encode(self) -> Wire:
        p, s = self.parts, self.storages
        return Wire(
            tree=trees.encode(self.root),
            kinds=self.kinds,
            details=self.details,
            shared=self.shared,
            dtypes=[values.dtype_name(dtype) for dtype in self.dtypes],
            devices=s.devices,
            storage_nbytes=_pack(s.nbytes, "<i8"),
            storage_device=_pack(s.device, "<u1"),
            part_storage=_pack(p.storage, "<i4"),
            part_dtype=_pack(p.dtype, "<u1"),
            part_flags=_pack(p.flags, "<u1"),
            part_ndim=_pack(p.ndim, "<u1"),
            part_offset=_pack(p.offset, "<i8"),
            part_sizes=_pack(p.sizes, "<i8"),
            part_strides=_pack(p.strides, "<i8"),
        )

    @classmethod
    def decode(cls, wire: Wire, limits: Limits) -> Manifest:
        """Read and check a manifest from a peer; ``ValueError`` for whatever :func:`describe` does not write."""
        root, leaves = trees.decode(wire.tree, max_depth=limits.max_depth)
        if leaves != len(wire.kinds):
            raise ValueError(f"{leaves} leaves in the tree, {len(wire.kinds)} described")
        plain = sum(kind == Leaf.TENSOR for kind in wire.kinds)
        if any(kind > Leaf.COMPOSITE for kind in wire.kinds) or len(wire.details) != leaves - plain:
            raise ValueError("leaves of unknown kind, or without details")
        dtypes = [values.dtype_named(name) for name in wire.dtypes]
        if any(_is_quantized(dtype) for dtype in dtypes):
            raise ValueError("a quantized dtype")
        storages = Storages(_unpack(wire.storage_nbytes, "<i8"), _unpack(wire.storage_device, "<u1"), wire.devices)
        if len(storages) != len(storages.device) or (len(storages) and storages.nbytes.min() < 0):
            raise ValueError("malformed storages")
        if len(storages) and storages.device.max() >= len(wire.devices):
            raise ValueError("a storage on a device that was not described")
        for device in wire.devices:
            if torch.device(device).type == "meta":
                raise ValueError("a storage without data")
        dtype = _unpack(wire.part_dtype, "<u1")
        if len(dtype) and dtype.max() >= len(dtypes):
            raise ValueError("a dtype that was not described")
        item = np.array([dtype.itemsize for dtype in dtypes], dtype=np.int64)[dtype] if len(dtype) else dtype
        parts = Parts(
            storage=_unpack(wire.part_storage, "<i4"),
            dtype=dtype,
            flags=_unpack(wire.part_flags, "<u1"),
            offset=_unpack(wire.part_offset, "<i8"),
            ndim=_unpack(wire.part_ndim, "<u1"),
            sizes=_unpack(wire.part_sizes, "<i8"),
            strides=_unpack(wire.part_strides, "<i8"),
            item=item,
        )
        parts.check(storages)
        manifest = cls(root, wire.kinds, wire.details, wire.shared, dtypes, parts, storages)
        if manifest.first_parts[-1] != len(parts):
            raise ValueError("leaves and tensors do not add up")
        return manifest


def _pack(column: Ints, code: str) -> bytes:
    return column.astype(code).tobytes()


def _unpack(data: bytes, code: str) -> Ints:
    return np.frombuffer(data, dtype=code).astype(np.int64)


def _is_quantized(dtype: torch.dtype) -> bool:
    return dtype in (torch.qint8, torch.quint8, torch.qint32, torch.quint4x2, torch.quint2x4)


@dataclass
class Described:
    """A manifest and the memory it describes: what a source serves from."""

    manifest: Manifest
    parts: list[torch.Tensor]
    storages: list[torch.UntypedStorage]
    #: The byte of the real storage at which each window begins.
    windows: Ints


def describe(state: object, limits: Limits) -> Described:
    """Describe a state. :class:`UnsupportedLeaf` names the first leaf that cannot be carried exactly."""
    root, leaves = trees.flatten(state, max_depth=limits.max_depth)
    kinds = Kinds(limits)
    shared = Shared()
    codes = bytearray(len(leaves))
    details: list[Any] = []
    parts: list[torch.Tensor] = []
    for i, leaf in enumerate(leaves):
        try:
            if type(leaf) is torch.Tensor and leaf.layout is torch.strided:
                dense.check(leaf)
                parts.append(leaf)
                codes[i] = Leaf.TENSOR
                continue
            if kinds.is_value(leaf):
                try:
                    details.append(values.encode(leaf))
                    codes[i] = Leaf.VALUE
                    continue
                except values.Unencodable as reason:
                    if isinstance(leaf, (set, frozenset)):
                        raise CannotCarry(f"a {type(leaf).__name__} of which a member is refused: {reason}") from reason
            spec = kinds.open(leaf, parts, shared)
        except CannotCarry as reason:
            raise UnsupportedLeaf(trees.paths(root)[i], str(reason)) from reason
        if type(spec) is int:
            codes[i] = Leaf.TENSOR
        else:
            codes[i] = Leaf.COMPOSITE
            details.append(spec)
    return _describe_parts(root, bytes(codes), details, shared, parts)


def _describe_parts(
    root: trees.Node | None, kinds: bytes, details: list[Any], shared: Shared, parts: list[torch.Tensor]
) -> Described:
    numbers: dict[int, int] = {}
    storages: list[torch.UntypedStorage] = []
    devices: dict[str, int] = {}
    storage_device: list[int] = []
    dtypes: dict[torch.dtype, int] = {}
    storage_of: list[int] = []
    dtype_of: list[int] = []
    flags: list[int] = []
    offsets: list[int] = []
    ndims: list[int] = []
    sizes: list[int] = []
    strides: list[int] = []
    for tensor in parts:
        storage = tensor.untyped_storage()
        number = numbers.setdefault(storage._cdata, len(storages))
        if number == len(storages):
            storages.append(storage)
            storage_device.append(devices.setdefault(str(tensor.device), len(devices)))
        storage_of.append(number)
        dtype_of.append(dtypes.setdefault(tensor.dtype, len(dtypes)))
        flags.append(dense.flags_of(tensor))
        offsets.append(dense.offset_of(tensor))
        shape = tensor.shape
        ndims.append(len(shape))
        sizes += shape
        strides += tensor.stride()
    ints: Callable[[list[int]], Ints] = lambda column: np.array(column, dtype=np.int64)  # noqa: E731
    item = ints([dtype.itemsize for dtype in dtypes])
    columns = Parts(
        storage=ints(storage_of),
        dtype=ints(dtype_of),
        flags=ints(flags),
        offset=ints(offsets),
        ndim=ints(ndims),
        sizes=ints(sizes),
        strides=ints(strides),
        item=item[ints(dtype_of)] if parts else ints([]),
    )
    real = ints([storage.nbytes() for storage in storages])
    beyond = np.flatnonzero((columns.end > real[columns.storage]) & (columns.numel > 0)) if parts else ints([])
    windows, ends = _windows(columns, len(storages))
    nbytes = np.maximum(ends - windows, 0)
    if parts:
        shifted = columns.offset - windows[columns.storage] // columns.item
        # An empty part shows nothing, and may have pointed anywhere.
        empty = np.clip(shifted, 0, nbytes[columns.storage] // columns.item)
        columns = replace(columns, offset=np.where(columns.numel > 0, shifted, empty))
    manifest = Manifest(
        root,
        kinds,
        details,
        shared.items,
        list(dtypes),
        columns,
        Storages(nbytes, ints(storage_device), list(devices)),
    )
    if len(beyond):
        leaf = manifest.leaf_of(int(beyond[0]))
        raise UnsupportedLeaf(
            manifest.paths[leaf], "its storage has been freed or shrunk (an unsharded FSDP parameter?); gather it first"
        )
    return Described(manifest, parts, storages, windows)


def _windows(parts: Parts, storages: int) -> tuple[Ints, Ints]:
    """For each storage, the first byte that a part shows (aligned to its largest item), and one past the last."""
    low = np.full(storages, np.iinfo(np.int64).max, dtype=np.int64)
    high = np.zeros(storages, dtype=np.int64)
    largest = np.ones(storages, dtype=np.int64)
    shown = parts.numel > 0
    np.minimum.at(low, parts.storage[shown], parts.start[shown])
    np.maximum.at(high, parts.storage[shown], parts.end[shown])
    np.maximum.at(largest, parts.storage, parts.item)
    low[low == np.iinfo(np.int64).max] = 0
    return low - low % largest, high
