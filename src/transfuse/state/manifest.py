"""A manifest: a state as plain data. Its tree, its leaves, their tensors and storages; no memory, no code.

Tensors (the *parts* of leaves) and storages are columns: a dozen arrays describe a state of a hundred thousand tensors.
:func:`describe` makes the manifest of a state, and returns it together with the memory that it describes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt
import torch
import xxhash

from transfuse.errors import UnsupportedLeaf
from transfuse.limits import Limits
from transfuse.state import live_tensors, trees
from transfuse.state.leaves import dense, values
from transfuse.state.leaves.codec import CannotCarry, Coordinate, MeshDescription, Shared
from transfuse.state.leaves.distributed import check_place, read_meshes
from transfuse.state.leaves.registry import Registry
from transfuse.state.leaves.spec import is_dtensor, is_sharded
from transfuse.state.live_tensors import PLAIN
from transfuse.state.memory_maps import Mappings
from transfuse.state.tensors import Ints, Parts, Storages

__all__ = ["Described", "Ints", "Leaf", "Manifest", "Parts", "Storages", "describe"]


class Leaf:
    """The codes in ``Manifest.kinds``, one for each leaf."""

    VALUE = 0
    TENSOR = 1
    COMPOSITE = 2


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

    def digest(self) -> bytes:
        """A digest of the whole manifest except device indices ("cuda:1" counts as "cuda")."""
        return xxhash.xxh3_128_digest(msgspec.msgpack.encode(self.of_any_device()))

    def of_any_device(self) -> Wire:
        """The same manifest without device indices: replicas use different devices of one type."""
        return msgspec.structs.replace(self, devices=[name.split(":")[0] for name in self.devices])


class Manifest:
    """A described state."""

    def __init__(
        self,
        root: trees.Node | None,
        kinds: bytes,
        details: list[Any],
        shared: list[MeshDescription],
        dtypes: list[torch.dtype],
        parts: Parts,
        storages: Storages,
        coordinates: Sequence[Coordinate] = (),
    ) -> None:
        self.root = root
        self.kinds = kinds
        #: For each leaf that is not a plain tensor, in order: the encoded value, or the spec of a composite.
        self.details = details
        #: The meshes that leaves use, and the described rank's coordinate in each.
        self.shared = shared
        self.coordinates = coordinates
        self.dtypes = dtypes
        self.parts = parts
        self.storages = storages

    def __len__(self) -> int:
        return len(self.kinds)

    @cached_property
    def paths(self) -> trees.Paths:
        """The path of every leaf. For messages only: a transfer without an error makes no path."""
        return trees.paths(self.root)

    def dtype_of(self, part: int) -> torch.dtype:
        return self.dtypes[int(self.parts.dtype[part])]

    @cached_property
    def first_parts(self) -> Ints:
        """The number of each leaf's first part, and at the end the number of all parts."""
        first = np.zeros(len(self) + 1, dtype=np.int64)
        first[1:] = self.codes == Leaf.TENSOR
        composite = np.flatnonzero(self.codes == Leaf.COMPOSITE).tolist()
        if composite:
            counter = Registry(Limits())
            first[1:][composite] = [counter.count(self.detail(leaf)) for leaf in composite]
        return np.cumsum(first, out=first)

    @cached_property
    def codes(self) -> npt.NDArray[np.uint8]:
        """``kinds`` as a column."""
        return np.frombuffer(self.kinds, np.uint8)

    @cached_property
    def _detail_numbers(self) -> Ints:
        return np.cumsum(self.codes != Leaf.TENSOR) - 1

    def detail(self, leaf: int) -> Any:
        """The value or spec of a leaf."""
        return 0 if self.kinds[leaf] == Leaf.TENSOR else self.details[int(self._detail_numbers[leaf])]

    def leaf_of(self, part: int) -> int:
        return int(np.searchsorted(self.first_parts, part, side="right")) - 1

    def leaves_of(self, parts: npt.ArrayLike) -> Ints:
        """The leaves that these parts belong to."""
        return np.searchsorted(self.first_parts, parts, side="right") - 1

    @cached_property
    def is_sharded(self) -> bool:
        """Whether some leaf is a shard of a global tensor."""
        return any(map(is_sharded, self.details))

    def likeness(self, wire: Wire) -> bytes:
        """A digest of everything that is equal on ranks that hold different shards of one state.

        One manifest of this likeness, with another rank's coordinates in its meshes, says what that rank holds.
        """
        sharded = np.zeros(len(self.parts), dtype=bool)
        if self.is_sharded:
            spread = [
                leaf for leaf in np.flatnonzero(self.codes == Leaf.COMPOSITE).tolist() if is_dtensor(self.detail(leaf))
            ]
            for leaf in spread:
                sharded[self.first_parts[leaf] : self.first_parts[leaf + 1]] = True
        whole = np.repeat(~sharded, self.parts.ndim)
        plain = [wire.tree, wire.details, wire.shared, wire.dtypes]
        digest = xxhash.xxh3_128(msgspec.msgpack.encode(plain))
        signs = _pack(self.parts.flags & (dense.Flags.CONJUGATE | dense.Flags.NEGATIVE), "<u1")
        for column in (wire.kinds, wire.part_storage, wire.part_dtype, signs, wire.part_ndim):
            digest.update(column)
            digest.update(len(column).to_bytes(8, "little"))
        # Where whole tensors lie in their storages says which tensors are views of each other.
        digest.update(_pack(self.parts.offset[~sharded], "<i8"))
        for column in (self.parts.sizes[whole], self.parts.strides[whole]):
            digest.update(_pack(column, "<i8"))
        if self.hidden_ties:
            # A rank that cannot tell which weights are tied must not describe the state for ranks that can.
            digest.update(msgspec.msgpack.encode(self.hidden_ties))
        return digest.digest()

    @cached_property
    def hidden_ties(self) -> list[list[int]]:
        """Groups of DTensors that are tied, or neighbours in one buffer: this rank cannot tell which, because its
        shards of them are empty.

        Shards with elements show the difference by their offsets in the storage that they share.
        """
        parts = self.parts
        groups: dict[tuple[Any, ...], list[int]] = {}
        if not self.is_sharded:
            return []
        empty = parts.numel == 0
        used = np.bincount(parts.storage[empty], minlength=len(self.storages))
        for part in np.flatnonzero(empty & (used > 1)[parts.storage]).tolist():
            leaf = self.leaf_of(part)
            if is_dtensor(self.detail(leaf)):
                key = (int(parts.storage[part]), int(parts.dtype[part]), repr(self.detail(leaf)))
                groups.setdefault(key, []).append(leaf)
        return [group for group in groups.values() if len(group) > 1]

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
    def decode(cls, wire: Wire, limits: Limits, coordinates: Sequence[Coordinate] = ()) -> Manifest:
        """Read and check a peer's manifest; ``ValueError`` for anything that :func:`describe` does not write."""
        root, leaves = trees.decode(wire.tree, max_depth=limits.max_depth)
        if leaves != len(wire.kinds):
            raise ValueError(f"the tree has {leaves} leaves, but {len(wire.kinds)} are described")
        plain = wire.kinds.count(Leaf.TENSOR)
        if max(wire.kinds, default=0) > Leaf.COMPOSITE or len(wire.details) != leaves - plain:
            raise ValueError(
                f"a leaf of unknown kind, or {len(wire.details)} details for {leaves - plain} leaves that need one"
            )
        dtypes = [values.dtype_named(name) for name in wire.dtypes]
        if any(dense.is_quantized(dtype) for dtype in dtypes):
            raise ValueError("the dtypes include a quantized one, which no plain tensor has")
        storages = Storages(_unpack(wire.storage_nbytes, "<i8"), _unpack(wire.storage_device, "<u1"), wire.devices)
        if len(storages) != len(storages.device) or (len(storages) and storages.nbytes.min() < 0):
            raise ValueError("malformed storages: a negative size, or columns of different lengths")
        if len(storages) and storages.device.max() >= len(wire.devices):
            raise ValueError("a storage names a device that was not described")
        for device in wire.devices:
            if torch.device(device).type == "meta":
                raise ValueError("a storage is on the meta device and has no data")
        dtype = _unpack(wire.part_dtype, "<u1")
        if len(dtype) and dtype.max() >= len(dtypes):
            raise ValueError("a tensor names a dtype that was not described")
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
        parts.check_in(storages)
        meshes = read_meshes(wire.shared)
        if len(coordinates) > len(meshes):
            raise ValueError(f"{len(coordinates)} coordinates for {len(meshes)} described meshes")
        for mesh, place in zip(meshes, coordinates, strict=False):
            check_place(mesh, place)
        manifest = cls(root, wire.kinds, wire.details, meshes, dtypes, parts, storages, coordinates)
        if manifest.first_parts[-1] != len(parts):
            raise ValueError(
                f"the leaves consist of {manifest.first_parts[-1]} tensors, but {len(parts)} are described"
            )
        return manifest


def _pack(column: Ints, code: str) -> bytes:
    return column.astype(code).tobytes()


def _unpack(data: bytes, code: str) -> Ints:
    return np.frombuffer(data, dtype=code).astype(np.int64)


@dataclass(eq=False)
class Described:
    """A manifest and the memory that it describes: a source sends from this."""

    manifest: Manifest
    parts: list[torch.Tensor]
    #: For each storage, the byte of torch's storage at which the window begins.
    windows: Ints
    #: The address of each window's first byte; 0 if the window is empty or not in main memory.
    addresses: Ints
    #: For each storage, the number of a part in it.
    owners: Ints

    @cached_property
    def storages(self) -> list[torch.UntypedStorage]:
        return [self.parts[part].untyped_storage() for part in self.owners.tolist()]


def describe(state: object, limits: Limits) -> Described:
    """Describe a state. :class:`UnsupportedLeaf` names the first leaf that cannot be carried exactly."""
    root, leaves = trees.flatten(state, max_depth=limits.max_depth)
    odd = [i for i, leaf in enumerate(leaves) if type(leaf) not in PLAIN] if set(map(type, leaves)) - PLAIN else []
    try:
        opened = _open(root, leaves, odd, limits)
        return _lay_down(root, opened, live_tensors.read(opened.parts))
    except (live_tensors.Unusual, UnsupportedLeaf):
        # A leaf is not what its type says, or cannot be carried. Open leaf by leaf, so that the error names the first.
        opened = _open(root, leaves, range(len(leaves)), limits)
    return _lay_down(root, opened, live_tensors.read_any(opened.parts))


class _Opened(NamedTuple):
    """All leaves, opened into their parts."""

    kinds: bytes
    details: list[Any]
    shared: Shared
    parts: list[torch.Tensor]


def _open(root: trees.Node | None, leaves: list[Any], odd: Sequence[int], limits: Limits) -> _Opened:
    """Open the ``odd`` leaves. All other leaves are taken for plain tensors."""
    kinds, shared = Registry(limits), Shared()
    opened = _Opened(b"", [], shared, [])
    codes = bytearray([Leaf.TENSOR]) * len(leaves)
    done = 0
    for i in odd:
        opened.parts.extend(leaves[done:i])
        done = i + 1
        try:
            codes[i] = _open_leaf(leaves[i], kinds, shared, opened)
        except CannotCarry as reason:
            raise UnsupportedLeaf(trees.paths(root)[i], str(reason)) from reason
    opened.parts.extend(leaves[done:])
    return opened._replace(kinds=bytes(codes))


def _open_leaf(leaf: Any, kinds: Registry, shared: Shared, opened: _Opened) -> int:
    """Add a leaf's details and parts to ``opened``, and return the leaf's code."""
    if type(leaf) is torch.Tensor and leaf.layout is torch.strided:
        dense.check(leaf)
        opened.parts.append(leaf)
        return Leaf.TENSOR
    if kinds.is_value(leaf):
        try:
            opened.details.append(values.encode(leaf))
            return Leaf.VALUE
        except values.Unencodable as reason:
            if isinstance(leaf, (set, frozenset)):
                raise CannotCarry(f"a {type(leaf).__name__} with a member that is refused: {reason}") from reason
    spec = kinds.open(leaf, opened.parts, shared)
    if type(spec) is int:
        return Leaf.TENSOR
    opened.details.append(spec)
    return Leaf.COMPOSITE


def _lay_down(root: trees.Node | None, opened: _Opened, found: live_tensors.LiveTensors) -> Described:
    """Number the storages, find the window of each, and compute each part's offset in its window."""
    number, owners = _number(found.device, found.storage_key, found.storage_nbytes)
    start, end = found.offset * found.item, (found.offset + found.reach) * found.item
    windows, ends = _windows(number, len(owners), start, end, found)
    nbytes = np.maximum(ends - windows, 0)
    offset = found.offset - windows[number] // found.item
    # An empty part shows no byte, so its offset may lie anywhere; move it into the window.
    offset = np.where(found.numel > 0, offset, np.clip(offset, 0, nbytes[number] // found.item))
    parts = Parts(
        ndim=found.ndim,
        sizes=found.sizes,
        strides=found.strides,
        storage=number,
        dtype=found.dtype,
        flags=found.flags,
        offset=offset,
        item=found.item,
    )
    storages = Storages(nbytes, found.device[owners], found.devices)
    meshes = opened.shared
    manifest = Manifest(
        root, opened.kinds, opened.details, meshes.items, found.dtypes, parts, storages, meshes.coordinates
    )
    if found.beyond.any():
        leaf = manifest.leaf_of(int(np.argmax(found.beyond)))
        raise UnsupportedLeaf(manifest.paths[leaf], f"{dense.FREED.format('its')}; gather it first")
    gone = found.faults(np.arange(len(found)), Mappings(), write=False)
    if gone:
        part, why = next(iter(gone.items()))
        raise UnsupportedLeaf(manifest.paths[manifest.leaf_of(part)], f"its memory cannot be read: {why}")
    addresses = np.where(storages.on_cpu & (nbytes > 0), found.storage_key[owners] + windows, 0)
    return Described(manifest, opened.parts, windows, addresses, owners)


def _number(device: Ints, key: Ints, nbytes: Ints) -> tuple[Ints, Ints]:
    """Number storages in the order of their first parts. Returns the storage of each part, and a part of each storage.

    Two of torch's storages over the same memory (an array passed to ``from_numpy`` twice) count as one, with the size
    of the larger.
    """
    order = np.lexsort((key, device))
    new = np.ones(len(key), dtype=bool)
    new[1:] = (np.diff(key[order]) != 0) | (np.diff(device[order]) != 0)
    first = order[new]
    place = np.empty(len(first), dtype=np.int64)
    place[np.argsort(first)] = np.arange(len(first))
    number = np.empty(len(key), dtype=np.int64)
    number[order] = place[np.cumsum(new) - 1]
    owners = np.sort(first)
    if (nbytes != nbytes[owners][number]).any():
        largest = np.lexsort((-nbytes, number))
        owners = largest[np.searchsorted(number[largest], np.arange(len(owners)))]
    return number, owners


def _windows(number: Ints, count: int, start: Ints, end: Ints, found: live_tensors.LiveTensors) -> tuple[Ints, Ints]:
    """For each storage, the first byte that a part shows, aligned to the largest item, and one past the last byte."""
    nowhere = np.iinfo(np.int64).max
    low, high = np.full(count, nowhere, dtype=np.int64), np.zeros(count, dtype=np.int64)
    largest = np.ones(count, dtype=np.int64)
    shown = found.numel > 0
    np.minimum.at(low, number[shown], start[shown])
    np.maximum.at(high, number[shown], end[shown])
    np.maximum.at(largest, number, found.item)
    low[low == nowhere] = 0
    return low - low % largest, high
