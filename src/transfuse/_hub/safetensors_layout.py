"""A state as safetensors files: which tensor lies at which byte of which file. Touches no tensor's bytes.

A file is the length of its header in 8 bytes, the header in JSON, then the tensors without gaps. All files of a state
lie one after the other in one piece of memory, each with its tensors aligned.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import prod
from typing import NamedTuple

import torch

from transfuse._errors import StateError, UnsupportedLeaf
from transfuse._plan.cohorts import Cohort
from transfuse._state.leaves import values
from transfuse._state.leaves.spec import BLOCK, DTENSOR, SHARDED_TENSOR, Spec, of_plain_tensors

#: The format's names of dtypes.
DTYPES = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "U16": torch.uint16,
    "I16": torch.int16,
    "U32": torch.uint32,
    "I32": torch.int32,
    "U64": torch.uint64,
    "I64": torch.int64,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "F64": torch.float64,
    "C64": torch.complex64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
    "F8_E8M0": torch.float8_e8m0fnu,
}
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}

#: What the Hub calls the file of a model that is one file, one of several files, and the list of which tensor is where.
ONLY_NAME, SHARD_NAME, INDEX_NAME = (
    "model.safetensors",
    "model-{:05}-of-{:05}.safetensors",
    "model.safetensors.index.json",
)
#: The format's own key in a header.
METADATA = "__metadata__"
#: Where the tensors of a file begin in memory, and what a header's length is a multiple of.
ALIGNMENT, HEADER_ALIGNMENT = 64, 8
#: The largest header that the safetensors library reads.
MAX_HEADER_BYTES = 100_000_000


class Entry(NamedTuple):
    """One tensor of a state."""

    name: str
    #: How messages name the leaf.
    path: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    #: If this is a tied weight: the name of the tensor that holds its bytes.
    alias_of: str | None = None

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class File:
    """One safetensors file in memory."""

    name: str
    #: The first byte of the file in memory, and its size.
    start: int
    nbytes: int
    #: The file's bytes in front of the tensors.
    header: bytes
    #: The tensors in the order of their bytes, and where each begins in memory.
    entries: tuple[Entry, ...]
    places: tuple[int, ...]


@dataclass(frozen=True)
class FileLayout:
    """All files of a state."""

    #: What the layout was made from: with the same entries it can be used again.
    entries: tuple[Entry, ...]
    files: tuple[File, ...]
    #: The memory that all files take.
    nbytes: int
    #: The index of several files; None if there is one.
    index: bytes | None

    def sizes(self) -> dict[str, int]:
        """The names and sizes of all files."""
        sizes = {file.name: file.nbytes for file in self.files}
        return sizes if self.index is None else sizes | {INDEX_NAME: len(self.index)}


def why_not(cohort: Cohort, leaf: int, *, whole: Collection[str] = (DTENSOR, SHARDED_TENSOR, BLOCK)) -> str | None:
    """What a leaf is, if no file can hold it. ``whole``: the kinds of shards that become whole tensors."""
    detail = cohort.manifest.detail(leaf)
    if cohort.is_value(leaf):
        return "a value, not a plain tensor"
    if detail and (Spec(*detail).codec not in whole or not of_plain_tensors(detail)):
        return f"a {Spec(*detail).codec}, not a plain tensor"
    return why_not_dtype(cohort.dtype(leaf, 0), signed_view=bool(cohort.signs(leaf, 0)))


def why_not_dtype(dtype: torch.dtype, *, signed_view: bool) -> str | None:
    """What a plain tensor is, if no file can hold it."""
    if dtype not in DTYPE_NAMES:
        return f"{values.dtype_name(dtype)}, which safetensors does not have"
    return "a conjugate or negative view, which safetensors does not have: resolve it first" if signed_view else None


def misnamed(names: Iterable[str], paths: Sequence[str]) -> Iterator[tuple[str, str]]:
    """The paths of the tensors that no file can hold under these names, and how each is called."""
    seen: dict[str, int] = {}
    for number, name in enumerate(names):
        first = seen.setdefault(name, number)
        if name == METADATA:
            yield paths[number], f"called {METADATA}, which is safetensors' own: give it another key"
        elif first != number:
            yield paths[number], f"called {name!r}, as {paths[first]} is: give one another key"
        elif not _is_utf8(name):
            yield paths[number], "called what UTF-8 cannot write: give it another key"


def _is_utf8(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def lay_out(entries: Sequence[Entry], max_shard_bytes: int) -> FileLayout:
    """Lay out a state in files of at most ``max_shard_bytes`` of tensors. A larger tensor has a file of its own."""
    if not entries:
        raise StateError("the state has no tensors: there is nothing that a safetensors file could hold")
    for path, why in misnamed([entry.name for entry in entries], [entry.path for entry in entries]):
        raise UnsupportedLeaf(path, why)
    shards: list[list[Entry]] = [[]]
    room = max_shard_bytes
    for entry in entries:
        if entry.alias_of is not None:
            continue
        if shards[-1] and entry.nbytes > room:
            shards.append([])
            room = max_shard_bytes
        shards[-1].append(entry)
        room -= entry.nbytes
    count = len(shards)
    names = [ONLY_NAME] if count == 1 else [SHARD_NAME.format(i + 1, count) for i in range(count)]
    shard_of = {entry.name: i for i, shard in enumerate(shards) for entry in shard}
    aliases: list[dict[str, str]] = [{} for _ in shards]
    for entry in entries:
        if entry.alias_of is not None:
            aliases[shard_of[entry.alias_of]][entry.name] = entry.alias_of
    files, end = [], 0
    for i, (name, shard) in enumerate(zip(names, shards, strict=True)):
        files.append(_file(name, shard, aliases[i], end))
        end = files[-1].start + files[-1].nbytes
    index = None
    if count > 1:
        where = {entry.name: name for name, shard in zip(names, shards, strict=True) for entry in shard}
        total = sum(entry.nbytes for shard in shards for entry in shard)
        index = json.dumps({"metadata": {"total_size": total}, "weight_map": where}, indent=2).encode()
    return FileLayout(tuple(entries), tuple(files), end, index)


def _file(name: str, shard: Sequence[Entry], aliases: dict[str, str], end: int) -> File:
    # Large items first: then each tensor is aligned to its items, without gaps, which the format does not allow.
    ordered = sorted(shard, key=lambda entry: -entry.dtype.itemsize)
    # Aliases are written as safetensors.torch.save_model writes them.
    header: dict[str, object] = {METADATA: {**aliases, "format": "pt"}}
    offsets, at = [], 0
    for entry in ordered:
        header[entry.name] = {
            "dtype": DTYPE_NAMES[entry.dtype],
            "shape": list(entry.shape),
            "data_offsets": [at, at + entry.nbytes],
        }
        offsets.append(at)
        at += entry.nbytes
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % HEADER_ALIGNMENT)
    if len(text) > MAX_HEADER_BYTES:
        raise StateError(f"{len(shard)} tensors make a header that no reader accepts: use a smaller max_shard_bytes")
    text = len(text).to_bytes(8, "little") + text
    data = -(-(end + len(text)) // ALIGNMENT) * ALIGNMENT
    places = tuple(data + offset for offset in offsets)
    return File(name, data - len(text), len(text) + at, text, tuple(ordered), places)
