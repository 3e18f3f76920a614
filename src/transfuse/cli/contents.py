"""The contents of a state as rows to show, taken from its manifest alone: no tensor is read, or has to exist.

The manifest may come from a peer, and with it all names and values. So every unprintable character is escaped: a
terminal shows it and does not obey it.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from fnmatch import fnmatchcase
from typing import Any, NamedTuple

import msgspec
import numpy as np

from transfuse._plan.regions import lay_out
from transfuse._state import trees
from transfuse._state.leaves import spec as specs
from transfuse._state.leaves import values
from transfuse._state.leaves.blobs import ArrayMeta
from transfuse._state.leaves.block import BlockCodec, checked
from transfuse._state.leaves.codec import Coordinate, MeshDescription
from transfuse._state.leaves.dense import Flags
from transfuse._state.leaves.distributed import DTensorMeta, ShardedTensorCodec, layout_of
from transfuse._state.leaves.layout import Box, blocks_of
from transfuse._state.leaves.sparse import CompressedMeta, CooMeta
from transfuse._state.leaves.spec import Spec
from transfuse._state.leaves.subclass import WrapperMeta
from transfuse._state.manifest import Leaf, Manifest
from transfuse.cli.tables import printable

__all__ = ["Contents", "Folded", "Row", "Sharding", "Totals", "fold"]

#: How many characters of a value a row keeps.
MAX_VALUE = 200
#: How many blocks a row names: a strided shard may have a thousand.
MAX_BLOCKS = 4

_NOT_TENSORS = ("value", "array", "object")


@dataclass(frozen=True)
class Sharding:
    """How a leaf is spread over ranks, and which blocks the described rank holds."""

    #: For a DTensor: its mesh, a placement for each mesh dimension, and the rank's coordinate in the mesh.
    mesh: MeshDescription | None
    placements: tuple[str, ...]
    place: Coordinate
    #: For a ShardedTensor: how many shards it has. None for a Block.
    shards: int | None
    #: The rank's blocks of the global tensor; "…" at the end if there are more.
    blocks: tuple[str, ...]

    def __str__(self) -> str:
        held = " ".join(self.blocks) or "nothing"
        if self.mesh is None:
            return held if self.shards is None else f"{self.shards} shards: {held}"
        names = self.mesh.dim_names or [""] * len(self.mesh.shape)
        sizes = "×".join(f"{name}={n}" if name else str(n) for name, n in zip(names, self.mesh.shape, strict=True))
        held = held if self.place is not None else "nothing (outside the mesh)"
        return f"{', '.join(self.placements)} on {printable(sizes)}: {held}"


@dataclass(frozen=True)
class Row:
    """One leaf."""

    #: The path as in error messages, and the name: the keys joined by dots.
    path: str
    name: str
    #: tensor, DTensor, ShardedTensor, Block, sparse_coo, …, jagged, a wrapper's class, array, object, or value.
    kind: str
    #: The dtype of its items; for a value, its type.
    dtype: str
    #: The global shape of a sharded leaf. None for a leaf without a shape, and for jagged tensors, whose shape is data.
    shape: tuple[int, ...] | None
    #: Bytes of its elements in the described process, whether or not they share memory.
    nbytes: int
    #: "parameter", "buffer" or "".
    role: str = ""
    requires_grad: bool = False
    #: The device of its memory; "" for a value, which travels in the description.
    device: str = ""
    #: A value as text.
    value: str | None = None
    #: Numbers of storages that this leaf shares with other leaves.
    shares: tuple[int, ...] = ()
    sharding: Sharding | None = None

    @property
    def is_tensor(self) -> bool:
        return self.kind not in _NOT_TENSORS

    @property
    def label(self) -> str:
        """The name, or a stand-in if it is empty."""
        return self.name or self.path or "<root>"

    @property
    def what(self) -> str:
        """Kind and role, as briefly as possible."""
        return self.role if self.role and self.kind == "tensor" else f"{self.kind} {self.role}".rstrip()

    def to_dict(self) -> dict[str, Any]:
        sharding = None
        if self.sharding is not None:
            sharding = asdict(self.sharding) | {"mesh": self.sharding.mesh and self.sharding.mesh._asdict()}
        return {field: getattr(self, field) for field in self.__dataclass_fields__} | {"sharding": sharding}


@dataclass(frozen=True)
class Folded:
    """Several leaves whose names begin alike, folded into one row."""

    name: str
    leaves: int
    dtypes: tuple[str, ...]
    nbytes: int
    shares: tuple[int, ...]


@dataclass(frozen=True)
class Totals:
    leaves: int
    tensors: int
    #: Bytes of all leaves, and the same with shared memory counted once, which is what a transfer moves.
    bytes: int
    bytes_once: int


@dataclass(frozen=True)
class Contents:
    """The rows of a state, in the state's order."""

    rows: tuple[Row, ...]
    totals: Totals

    @classmethod
    def of(cls, manifest: Manifest) -> Contents:
        """Raises ``ValueError``, which names the leaf, if the description is invalid."""
        marks = _marks(manifest)
        names = trees.dotted(manifest.root)
        rows = []
        for leaf, (path, name) in enumerate(zip(manifest.paths, names, strict=True)):
            try:
                rows.append(_row(manifest, leaf, printable(path), printable(name), marks.get(leaf, ())))
            except ValueError as error:
                raise ValueError(f"leaf {printable(path)}: {error}") from error
        return cls(tuple(rows), _totals(rows, int(lay_out(manifest).nbytes.sum())))

    @classmethod
    def apart(cls, rows: Iterable[Row]) -> Contents:
        """The contents for leaves that share no memory."""
        kept = tuple(rows)
        return cls(kept, _totals(kept, sum(row.nbytes for row in kept)))

    def matching(self, glob: str) -> tuple[Row, ...]:
        """The rows whose name matches the pattern."""
        return tuple(row for row in self.rows if fnmatchcase(row.name, glob))


def _totals(rows: Sequence[Row], once: int) -> Totals:
    return Totals(len(rows), sum(row.is_tensor for row in rows), sum(row.nbytes for row in rows), once)


def fold(rows: Iterable[Row], depth: int) -> list[Row | Folded]:
    """Fold rows whose names have more than ``depth`` steps between dots: one row for each common beginning.

    A row that is alone with its beginning stays as it is: folding it would hide something and save nothing.
    """
    groups: dict[str, list[Row]] = {}
    for row in rows:
        groups.setdefault(".".join(row.name.split(".")[:depth]), []).append(row)
    result: list[Row | Folded] = []
    for name, group in groups.items():
        if len(group) == 1:
            result.append(group[0])
            continue
        dtypes = tuple(dict.fromkeys(row.dtype for row in group if row.is_tensor))
        marks = tuple(sorted({mark for row in group for mark in row.shares}))
        result.append(Folded(name, len(group), dtypes, sum(row.nbytes for row in group), marks))
    return result


# ------------------------------------------------------------------------------------------------------------- sharing


def _marks(manifest: Manifest) -> dict[int, tuple[int, ...]]:
    """For each leaf that shares storages with other leaves, the numbers of these storages."""
    tensors = manifest.tensors
    shown = np.flatnonzero(tensors.numel > 0)
    users = np.unique(np.stack([tensors.storage[shown], manifest.leaves_of(shown)], axis=1), axis=0)
    storages, counts = np.unique(users[:, 0], return_counts=True)
    common = users[np.isin(users[:, 0], storages[counts > 1])]
    # Storages are numbered in the order in which leaves mention them.
    numbers: dict[int, int] = {}
    found: dict[int, list[int]] = {}
    for storage, leaf in common[np.lexsort((common[:, 0], common[:, 1]))].tolist():
        found.setdefault(leaf, []).append(numbers.setdefault(storage, len(numbers) + 1))
    return {leaf: tuple(marks) for leaf, marks in found.items()}


# ---------------------------------------------------------------------------------------------------------- one leaf


class _Seen(NamedTuple):
    """What the spec alone says about a leaf, without looking at its tensors."""

    kind: str
    dtype: str
    shape: tuple[int, ...] | None
    sharding: Sharding | None = None


def _row(manifest: Manifest, leaf: int, path: str, name: str, shares: tuple[int, ...]) -> Row:
    if manifest.kinds[leaf] == Leaf.VALUE:
        kind, text = _value(manifest.detail(leaf))
        return Row(path, name, "value", kind, None, 0, value=text)
    first, end = manifest.first_tensors[leaf : leaf + 2].tolist()
    tensors, storages, spec = manifest.tensors, manifest.storages, manifest.detail(leaf)
    seen = _look(manifest, spec, iter(range(first, end)))
    flags = int(tensors.flags[first]) if type(spec) is int else Spec(*spec).flags
    devices = dict.fromkeys(storages.devices[i] for i in storages.device[tensors.storage[first:end]].tolist())
    return Row(
        path,
        name,
        printable(seen.kind),
        printable(seen.dtype),
        seen.shape,
        nbytes=int((tensors.numel[first:end] * tensors.item[first:end]).sum()),
        role="parameter" if flags & Flags.PARAMETER else "buffer" if flags & Flags.BUFFER else "",
        requires_grad=bool(flags & Flags.REQUIRES_GRAD),
        device=printable(", ".join(devices)),
        shares=shares,
        sharding=seen.sharding,
    )


def _value(detail: Any) -> tuple[str, str]:
    """A value's type, and the value as text."""
    try:
        value = values.decode(detail)
    except ValueError as error:
        # Usually a class that is not imported here: the value can be carried, but not shown.
        return "?", printable(f"<{error}>")[:MAX_VALUE]
    try:
        text = repr(value)
    except Exception:  # such as an int with more digits than Python prints
        text = f"<{type(value).__name__}>"
    text = text if len(text) <= MAX_VALUE else text[: MAX_VALUE - 1] + "…"
    return "None" if value is None else printable(type(value).__name__), printable(text)


def _look(manifest: Manifest, spec: Any, rows: Iterator[int]) -> _Seen:
    """The leaf that a spec describes. Takes the numbers of the leaf's tensors from ``rows``."""
    if type(spec) is int:
        row = next(rows)
        return _Seen("tensor", values.dtype_name(manifest.dtype_of(row)), manifest.tensors.shape(row))
    codec, _, meta, children = Spec(*spec)
    inner = [_look(manifest, child, rows) for child in children]
    match codec, inner:
        case specs.DTENSOR, [local]:
            return _Seen(_of("DTensor", local), local.dtype, *_dtensor(manifest, meta))
        case specs.SHARDED_TENSOR, _:
            sharded = ShardedTensorCodec.read(meta)
            held = _some(Box(*sharded.shards[i][:2]) for i in sharded.local)
            kind = _of("ShardedTensor", *inner[:1])
            return _Seen(kind, sharded.dtype, sharded.sizes, Sharding(None, (), None, len(sharded.shards), held))
        case specs.BLOCK, [local]:
            block = BlockCodec.read(meta)
            held = (str(checked(Box(block.start, local.shape or ()), block.shape)),)
            return _Seen(_of("Block", local), local.dtype, block.shape, Sharding(None, (), None, None, held))
        case "coo", [_, items]:
            return _Seen(_of("sparse_coo", items), items.dtype, msgspec.convert(meta, CooMeta).sizes)
        case "compressed", [_, _, items]:
            compressed = msgspec.convert(meta, CompressedMeta)
            return _Seen(_of(compressed.layout.removeprefix("torch."), items), items.dtype, compressed.sizes)
        case "jagged", [items, *_]:
            return _Seen(_of("jagged", items), items.dtype, None)
        case "wrapper", _:
            wrapper = msgspec.convert(meta, WrapperMeta)
            dtypes = dict.fromkeys(child.dtype for child in inner)
            return _Seen(wrapper.cls.replace(":", ".").rpartition(".")[2], ", ".join(dtypes), wrapper.sizes)
        case "array", _:
            array = msgspec.convert(meta, ArrayMeta)
            return _Seen("array", array.dtype if isinstance(array.dtype, str) else "structured", array.shape)
        case "text", _:
            return _Seen("value", str(meta), None)
        case "object", _:
            return _Seen("object", str(meta)[:MAX_VALUE], None)
    raise ValueError("a leaf with other tensors than its kind has")


def _of(kind: str, *items: _Seen) -> str:
    """A composite's kind, and the kind of its items unless these are plain tensors."""
    return f"{kind} of {items[0].kind}" if items and items[0].kind != "tensor" else kind


def _dtensor(manifest: Manifest, meta: Any) -> tuple[tuple[int, ...], Sharding]:
    layout, number = layout_of(meta, manifest.shared), msgspec.convert(meta, DTensorMeta).mesh
    place = manifest.coordinates[number] if number < len(manifest.coordinates) else None
    blocks = _some(() if place is None else (block for block, _ in blocks_of(layout.runs(place))))
    return layout.shape, Sharding(layout.mesh, tuple(map(_placement, layout.placements)), place, None, blocks)


def _placement(code: tuple[str | int, ...]) -> str:
    match code:
        case ("R",):
            return "Replicate()"
        case ("S", dim):
            return f"Shard({dim})"
        case ("X", dim, factor):
            return f"_StridedShard({dim}, {factor})"
    return f"Partial({code[1]})"


def _some(blocks: Iterable[Box]) -> tuple[str, ...]:
    first = [str(block) for block in itertools.islice(blocks, MAX_BLOCKS + 1)]
    return tuple(first) if len(first) <= MAX_BLOCKS else (*first[:MAX_BLOCKS], "…")
