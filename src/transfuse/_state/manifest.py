"""A manifest: a state as plain data. Its tree, its leaves, their tensors and storages; no memory, no code.

Tensors and storages are columns: a dozen arrays describe a state of a hundred thousand tensors.
:func:`describe` makes the manifest of a state, and returns it together with the memory that it describes.
"""

from __future__ import annotations

import copy
import hashlib
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt
import torch
import xxhash

from transfuse._errors import UnsupportedLeaf
from transfuse._limits import Limits
from transfuse._state import live_tensors, trees
from transfuse._state.leaves import dense, values
from transfuse._state.leaves.codec import CannotCarry, Coordinate, MeshDescription, Shared
from transfuse._state.leaves.distributed import check_coordinate, read_meshes
from transfuse._state.leaves.registry import Registry
from transfuse._state.leaves.spec import is_dtensor, is_sharded
from transfuse._state.live_tensors import PLAIN
from transfuse._state.mapped_file import MappedFile
from transfuse._state.memory_maps import Mappings
from transfuse._state.region import Ints
from transfuse._state.tensors import Storages, Tensors, device_type

#: The name of a device, of a type that this process may not know.
_DEVICE = re.compile(r"[a-z][a-z0-9_]{0,31}(:[0-9]{1,3})?")


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
    tensor_storage: bytes
    tensor_dtype: bytes
    tensor_flags: bytes
    tensor_ndim: bytes
    tensor_offset: bytes
    tensor_sizes: bytes
    tensor_strides: bytes

    def digest(self) -> bytes:
        """A digest of the whole manifest except device indices ("cuda:1" counts as "cuda")."""
        return xxhash.xxh3_128_digest(msgspec.msgpack.encode(self.of_any_device()))

    def structure(self) -> bytes:
        """A digest of everything but values: a counter or a learning rate does not change it.

        A cryptographic one: what one peer has described is used for another peer that says the same digest.
        """
        return hashlib.sha256(msgspec.msgpack.encode(self.without_values())).digest()

    def without_values(self) -> Wire:
        composites = [detail for code, detail in self._coded_details() if code != Leaf.VALUE]
        return msgspec.structs.replace(self, details=composites)

    @property
    def values(self) -> list[Any]:
        """The encoded values, in order."""
        return [detail for code, detail in self._coded_details() if code == Leaf.VALUE]

    def _coded_details(self) -> Iterator[tuple[int, Any]]:
        """Each detail with its leaf's code. A peer may send too few or too many: ``decode`` refuses that."""
        return zip(self.kinds.replace(bytes([Leaf.TENSOR]), b""), self.details, strict=False)

    def of_any_device(self) -> Wire:
        """The same manifest without device indices: replicas use different devices of one type."""
        return msgspec.structs.replace(self, devices=[name.split(":")[0] for name in self.devices])


class StateEntry(NamedTuple):
    """An entry of a described state: its description, and the numbers of its tensors and storages in the whole."""

    manifest: Manifest
    rows: Ints
    storages: Ints


class Manifest:
    """A described state."""

    def __init__(
        self,
        root: trees.Node | None,
        tree: Any,
        kinds: bytes,
        details: list[Any],
        shared: list[MeshDescription],
        dtypes: list[torch.dtype],
        tensors: Tensors,
        storages: Storages,
        coordinates: Sequence[Coordinate] = (),
    ) -> None:
        #: The digest of its structure once it is known, and, if the manifest came over the wire, the likeness of its
        #: structure, which is the same for all ranks that hold shards of one state.
        self.structure = b""
        self.structure_likeness = b""
        self._encoded: Wire | None = None
        self.root = root
        #: The tree in its form on the wire, made when the state was described: nothing that changes later changes it.
        self.tree = tree
        self.kinds = kinds
        #: For each leaf that is not a plain tensor, in order: the encoded value, or the spec of a composite.
        self.details = details
        #: The meshes that leaves use, and the described rank's coordinate in each.
        self.shared = shared
        self.coordinates = coordinates
        self.dtypes = dtypes
        self.tensors = tensors
        self.storages = storages

    def __len__(self) -> int:
        return len(self.kinds)

    @cached_property
    def paths(self) -> trees.Paths:
        """The path of every leaf. For messages only: a transfer without an error makes no path."""
        return trees.paths(self.root)

    def dtype_of(self, row: int) -> torch.dtype:
        return self.dtypes[int(self.tensors.dtype[row])]

    @cached_property
    def first_tensors(self) -> Ints:
        """The number of each leaf's first tensor, and at the end the number of all tensors."""
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

    def with_values(self, given: Sequence[Any], coordinates: Sequence[Coordinate]) -> Manifest:
        """The same structure with other values, at other coordinates; ``ValueError`` if they do not fit."""
        described = self.codes[self.codes != Leaf.TENSOR].tolist()
        if described.count(Leaf.VALUE) != len(given):
            raise ValueError(f"{len(given)} values for {described.count(Leaf.VALUE)} leaves that are values")
        _check_coordinates(self.shared, coordinates)
        supply = iter(given)
        result = copy.copy(self)
        result.details = [
            next(supply) if code == Leaf.VALUE else detail for code, detail in zip(described, self.details, strict=True)
        ]
        result.coordinates = coordinates
        return result

    def entry(self, key: object) -> StateEntry:
        """The description of one entry of a mapping alone. ``KeyError`` if the state has none of this key."""
        root = self.root
        if root is None or root.kind not in trees.MAPPINGS or key not in root.keys:
            raise KeyError(key)
        number = root.keys.index(key)
        first = sum(map(trees.leaves_below, root.children[:number]))
        last = first + trees.leaves_below(root.children[number])
        rows = np.arange(self.first_tensors[first], self.first_tensors[last])
        tensors, storages = self.tensors, self.storages
        used = np.unique(tensors.storage[rows])
        dimensions = tensors.dimensions(rows)
        details = np.count_nonzero(self.codes[:first] != Leaf.TENSOR)
        manifest = Manifest(
            root.children[number],
            trees.encode(root.children[number]),
            self.kinds[first:last],
            self.details[details : details + np.count_nonzero(self.codes[first:last] != Leaf.TENSOR)],
            self.shared,
            dtypes=self.dtypes,
            tensors=Tensors(
                ndim=tensors.ndim[rows],
                sizes=tensors.sizes[dimensions],
                strides=tensors.strides[dimensions],
                storage=np.searchsorted(used, tensors.storage[rows]),
                dtype=tensors.dtype[rows],
                flags=tensors.flags[rows],
                offset=tensors.offset[rows],
                item=tensors.item[rows],
            ),
            storages=Storages(storages.nbytes[used], storages.device[used], storages.devices),
            coordinates=self.coordinates,
        )
        return StateEntry(manifest, rows, used)

    def leaf_of(self, row: int) -> int:
        return int(np.searchsorted(self.first_tensors, row, side="right")) - 1

    def leaves_of(self, rows: npt.ArrayLike) -> Ints:
        """The leaves that these tensors belong to."""
        return np.searchsorted(self.first_tensors, rows, side="right") - 1

    @cached_property
    def is_sharded(self) -> bool:
        """Whether some leaf is a shard of a global tensor."""
        return any(map(is_sharded, self.details))

    def likeness(self, wire: Wire) -> bytes:
        """A digest of everything that is equal on ranks that hold different shards of one state.

        One manifest of this likeness, with another rank's coordinates in its meshes, says what that rank holds.
        """
        sharded = np.zeros(len(self.tensors), dtype=bool)
        if self.is_sharded:
            spread = [
                leaf for leaf in np.flatnonzero(self.codes == Leaf.COMPOSITE).tolist() if is_dtensor(self.detail(leaf))
            ]
            for leaf in spread:
                sharded[self.first_tensors[leaf] : self.first_tensors[leaf + 1]] = True
        whole = np.repeat(~sharded, self.tensors.ndim)
        plain = [wire.tree, wire.details, wire.shared, wire.dtypes]
        digest = xxhash.xxh3_128(msgspec.msgpack.encode(plain))
        signs = _pack(self.tensors.flags & (dense.Flags.CONJUGATE | dense.Flags.NEGATIVE), "<u1")
        for column in (wire.kinds, wire.tensor_storage, wire.tensor_dtype, signs, wire.tensor_ndim):
            digest.update(column)
            digest.update(len(column).to_bytes(8, "little"))
        # Where whole tensors lie in their storages says which tensors are views of each other.
        digest.update(_pack(self.tensors.offset[~sharded], "<i8"))
        for column in (self.tensors.sizes[whole], self.tensors.strides[whole]):
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
        tensors = self.tensors
        groups: dict[tuple[Any, ...], list[int]] = {}
        if not self.is_sharded:
            return []
        empty = tensors.numel == 0
        used = np.bincount(tensors.storage[empty], minlength=len(self.storages))
        for row in np.flatnonzero(empty & (used > 1)[tensors.storage]).tolist():
            leaf = self.leaf_of(row)
            if is_dtensor(self.detail(leaf)):
                key = (int(tensors.storage[row]), int(tensors.dtype[row]), repr(self.detail(leaf)))
                groups.setdefault(key, []).append(leaf)
        return [group for group in groups.values() if len(group) > 1]

    def encode(self) -> Wire:
        if self._encoded is None:
            encoded = self._encode()
            self.structure = encoded.structure()
            self._encoded = encoded  # Last: an interrupt leaves no form without its digest.
        # Copies of this manifest have other values.
        return msgspec.structs.replace(self._encoded, details=self.details)

    def _encode(self) -> Wire:
        tensors, storages = self.tensors, self.storages
        return Wire(
            tree=self.tree,
            kinds=self.kinds,
            details=self.details,
            shared=self.shared,
            dtypes=[values.dtype_name(dtype) for dtype in self.dtypes],
            devices=storages.devices,
            storage_nbytes=_pack(storages.nbytes, "<i8"),
            storage_device=_pack(storages.device, "<u1"),
            tensor_storage=_pack(tensors.storage, "<i4"),
            tensor_dtype=_pack(tensors.dtype, "<u1"),
            tensor_flags=_pack(tensors.flags, "<u1"),
            tensor_ndim=_pack(tensors.ndim, "<u1"),
            tensor_offset=_pack(tensors.offset, "<i8"),
            tensor_sizes=_pack(tensors.sizes, "<i8"),
            tensor_strides=_pack(tensors.strides, "<i8"),
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
            if not _DEVICE.fullmatch(device):
                raise ValueError(f"{device[:40]!r} is no name of a device")
            if device_type(device) == "meta":
                raise ValueError("a storage is on the meta device and has no data")
        dtype = _unpack(wire.tensor_dtype, "<u1")
        if len(dtype) and dtype.max() >= len(dtypes):
            raise ValueError("a tensor names a dtype that was not described")
        item = np.array([dtype.itemsize for dtype in dtypes], dtype=np.int64)[dtype] if len(dtype) else dtype
        tensors = Tensors(
            storage=_unpack(wire.tensor_storage, "<i4"),
            dtype=dtype,
            flags=_unpack(wire.tensor_flags, "<u1"),
            offset=_unpack(wire.tensor_offset, "<i8"),
            ndim=_unpack(wire.tensor_ndim, "<u1"),
            sizes=_unpack(wire.tensor_sizes, "<i8"),
            strides=_unpack(wire.tensor_strides, "<i8"),
            item=item,
        )
        tensors.check_in(storages)
        meshes = read_meshes(wire.shared)
        _check_coordinates(meshes, coordinates)
        manifest = cls(
            root,
            wire.tree,
            wire.kinds,
            wire.details,
            meshes,
            dtypes=dtypes,
            tensors=tensors,
            storages=storages,
            coordinates=coordinates,
        )
        if manifest.first_tensors[-1] != len(tensors):
            raise ValueError(
                f"the leaves consist of {manifest.first_tensors[-1]} tensors, but {len(tensors)} are described"
            )
        return manifest


def _composites(kinds: bytes, details: Sequence[Any]) -> list[Any]:
    described = kinds.replace(bytes([Leaf.TENSOR]), b"")
    return [detail for code, detail in zip(described, details, strict=True) if code == Leaf.COMPOSITE]


def _check_coordinates(meshes: Sequence[MeshDescription], coordinates: Sequence[Coordinate]) -> None:
    if len(coordinates) > len(meshes):
        raise ValueError(f"{len(coordinates)} coordinates for {len(meshes)} described meshes")
    for mesh, coordinate in zip(meshes, coordinates, strict=False):
        check_coordinate(mesh, coordinate)


def _pack(column: Ints, code: str) -> bytes:
    return column.astype(code).tobytes()


def _unpack(data: bytes, code: str) -> Ints:
    return np.frombuffer(data, dtype=code).astype(np.int64)


@dataclass(eq=False)
class Described:
    """A manifest and the memory that it describes: a source sends from this."""

    manifest: Manifest
    tensors: list[torch.Tensor]
    #: For each storage, the byte of torch's storage at which the window begins.
    windows: Ints
    #: The address of each window's first byte; 0 if the window is empty or not in main memory.
    addresses: Ints
    #: For each storage, the number of a tensor in it.
    owners: Ints
    #: What ``data_ptr()`` of each tensor has returned.
    pointers: Ints
    #: The files that the memory is mapped from, if all of it is.
    files: Sequence[MappedFile] = ()

    @property
    def devices(self) -> list[torch.device]:
        """The devices on which the state lies."""
        return [torch.device(name) for name in self.manifest.storages.devices]

    @cached_property
    def storages(self) -> list[torch.UntypedStorage]:
        return [self.tensors[row].untyped_storage() for row in self.owners.tolist()]


@dataclass(eq=False)
class LastDescription:
    """The description that was made last, without its tensors. The next one is the same if every column is.

    Everything else but the values is compared by its bytes on the wire. Python's ``==`` takes 1, 1.0 and True for
    equal, and an object for equal to itself however it has changed.
    """

    last: tuple[live_tensors.LiveTensors, bytes, Described] | None = None

    def again(self, root: trees.Node | None, opened: _OpenedTree, found: live_tensors.LiveTensors) -> Described | None:
        """The same description for these tensors and values; None if anything else than values differs."""
        if self.last is None:
            return None
        columns, text, last = self.last
        if not found.equals(columns) or opened.text() != text:
            return None
        manifest = copy.copy(last.manifest)
        manifest.root, manifest.details = root, opened.details
        return replace(last, manifest=manifest, tensors=opened.tensors)

    def keep(self, columns: live_tensors.LiveTensors, opened: _OpenedTree, described: Described) -> None:
        self.last = columns, opened.text(), replace(described, tensors=[])


def describe(state: object, limits: Limits, last: LastDescription | None = None) -> Described:
    """Describe a state. :class:`UnsupportedLeaf` names the first leaf that cannot be carried exactly.

    With ``last``, what was computed for the description before is used again if every column is the same.
    """
    root, leaves = trees.flatten(state, max_depth=limits.max_depth)
    odd = [i for i, leaf in enumerate(leaves) if type(leaf) not in PLAIN] if set(map(type, leaves)) - PLAIN else []
    try:
        opened = _open(root, leaves, odd, limits)
        found = live_tensors.read(opened.tensors)
        again = None if last is None else last.again(root, opened, found)
        if again is not None:
            _check_readable(again.manifest, found)
            return again
        described = _lay_down(root, opened, found)
        if last is not None:
            last.keep(found, opened, described)
        return described
    except (live_tensors.Unusual, UnsupportedLeaf):
        # A leaf is not what its type says, or cannot be carried. Open leaf by leaf, so that the error names the first.
        opened = _open(root, leaves, range(len(leaves)), limits)
    return _lay_down(root, opened, live_tensors.read_any(opened.tensors))


class _OpenedTree(NamedTuple):
    """The tree in its form on the wire, and all leaves, opened into their tensors."""

    tree: Any
    kinds: bytes
    details: list[Any]
    shared: Shared
    tensors: list[torch.Tensor]

    def text(self) -> bytes:
        """Everything but tensors and values, as bytes: equal only if it is equal type for type and bit for bit."""
        composites, shared = _composites(self.kinds, self.details), self.shared
        return msgspec.msgpack.encode([self.tree, self.kinds, composites, shared.items, shared.coordinates])


def _open(root: trees.Node | None, leaves: list[Any], odd: Sequence[int], limits: Limits) -> _OpenedTree:
    """Open the ``odd`` leaves. All other leaves are taken for plain tensors."""
    registry, shared = Registry(limits), Shared()
    opened = _OpenedTree(None, b"", [], shared, [])
    codes = bytearray([Leaf.TENSOR]) * len(leaves)
    done = 0
    for i in odd:
        opened.tensors.extend(leaves[done:i])
        done = i + 1
        try:
            codes[i] = _open_leaf(leaves[i], registry, shared, opened)
        except CannotCarry as reason:
            raise UnsupportedLeaf(trees.paths(root)[i], str(reason)) from reason
    opened.tensors.extend(leaves[done:])
    return opened._replace(tree=trees.encode(root), kinds=bytes(codes))


def _open_leaf(leaf: Any, registry: Registry, shared: Shared, opened: _OpenedTree) -> int:
    """Add a leaf's details and tensors to ``opened``, and return the leaf's code."""
    if type(leaf) is torch.Tensor and leaf.layout is torch.strided:
        dense.check(leaf)
        opened.tensors.append(leaf)
        return Leaf.TENSOR
    if registry.is_value(leaf):
        try:
            opened.details.append(values.encode(leaf))
            return Leaf.VALUE
        except values.Unencodable as reason:
            if isinstance(leaf, (set, frozenset)):
                raise CannotCarry(f"a {type(leaf).__name__} with a member that is refused: {reason}") from reason
    spec = registry.open(leaf, opened.tensors, shared)
    if type(spec) is int:
        return Leaf.TENSOR
    opened.details.append(spec)
    return Leaf.COMPOSITE


def _lay_down(root: trees.Node | None, opened: _OpenedTree, found: live_tensors.LiveTensors) -> Described:
    """Number the storages, find the window of each, and compute each tensor's offset in its window."""
    number, owners = _number(found.device, found.storage_key, found.storage_nbytes)
    start, end = found.offset * found.item, (found.offset + found.reach) * found.item
    windows, ends = _windows(number, len(owners), start, end, found)
    nbytes = np.maximum(ends - windows, 0)
    offset = found.offset - windows[number] // found.item
    # An empty tensor shows no byte, so its offset may lie anywhere; move it into the window.
    offset = np.where(found.numel > 0, offset, np.clip(offset, 0, nbytes[number] // found.item))
    tensors = Tensors(
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
        root,
        opened.tree,
        opened.kinds,
        opened.details,
        meshes.items,
        dtypes=found.dtypes,
        tensors=tensors,
        storages=storages,
        coordinates=meshes.coordinates,
    )
    if found.beyond.any():
        leaf = manifest.leaf_of(int(np.argmax(found.beyond)))
        raise UnsupportedLeaf(manifest.paths[leaf], f"{dense.FREED.format('its')}; gather it first")
    _check_readable(manifest, found)
    addresses = np.where(storages.on_cpu & (nbytes > 0), found.storage_key[owners] + windows, 0)
    return Described(manifest, opened.tensors, windows, addresses, owners, found.address)


def _check_readable(manifest: Manifest, found: live_tensors.LiveTensors) -> None:
    gone = found.faults(np.arange(len(found)), Mappings(), write=False)
    if gone:
        row, why = next(iter(gone.items()))
        raise UnsupportedLeaf(manifest.paths[manifest.leaf_of(row)], f"its memory cannot be read: {why}")


def _number(device: Ints, key: Ints, nbytes: Ints) -> tuple[Ints, Ints]:
    """Number storages in the order of their first tensors. Returns each tensor's storage, and a tensor of each storage.

    Two of torch's storages over the same memory (an array passed to ``from_numpy`` twice) count as one, with the size
    of the larger.
    """
    order = np.lexsort((key, device))
    new = np.ones(len(key), dtype=bool)
    new[1:] = (np.diff(key[order]) != 0) | (np.diff(device[order]) != 0)
    first = order[new]
    position = np.empty(len(first), dtype=np.int64)
    position[np.argsort(first)] = np.arange(len(first))
    number = np.empty(len(key), dtype=np.int64)
    number[order] = position[np.cumsum(new) - 1]
    owners = np.sort(first)
    if (nbytes != nbytes[owners][number]).any():
        largest = np.lexsort((-nbytes, number))
        owners = largest[np.searchsorted(number[largest], np.arange(len(owners)))]
    return number, owners


def _windows(number: Ints, count: int, start: Ints, end: Ints, found: live_tensors.LiveTensors) -> tuple[Ints, Ints]:
    """For each storage, the first byte that a tensor shows, aligned to the largest item, and one past the last byte."""
    nowhere = np.iinfo(np.int64).max
    low, high = np.full(count, nowhere, dtype=np.int64), np.zeros(count, dtype=np.int64)
    largest = np.ones(count, dtype=np.int64)
    shown = found.numel > 0
    np.minimum.at(low, number[shown], start[shown])
    np.maximum.at(high, number[shown], end[shown])
    np.maximum.at(largest, number, found.item)
    low[low == nowhere] = 0
    return low - low % largest, high
