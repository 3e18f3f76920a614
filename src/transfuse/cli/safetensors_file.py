"""States in safetensors files, which hold tensors by name and nothing else.

A tree of dicts is written with its keys joined by dots, as other readers expect. The keys themselves are kept in the
file's metadata, so that :func:`load` returns the same tree. :func:`misfits` names everything that the format cannot
hold, before a byte is written.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from transfuse._hub.safetensors_layout import DTYPES, METADATA, misnamed, why_not
from transfuse._limits import Limits
from transfuse._plan.cohorts import Cohort
from transfuse._plan.regions import lay_out
from transfuse._state import trees
from transfuse._state.leaves import values
from transfuse._state.leaves.spec import BLOCK, DTENSOR
from transfuse._state.manifest import Manifest
from transfuse._state.region import crowds
from transfuse._state.trees import Kind
from transfuse.cli.contents import Contents, Row
from transfuse.cli.errors import Failed
from transfuse.cli.tables import printable

__all__ = ["SafetensorError", "contents_of", "load", "misfits", "save"]

#: The metadata entry with the tree's keys: a JSON list with a list of keys for each tensor, in the state's order.
KEYS = "transfuse.keys"


class _HeaderEntry(msgspec.Struct):
    dtype: str
    shape: list[int]
    data_offsets: tuple[int, int]


# -------------------------------------------------------------------------------------------------------------- reading


def contents_of(path: Path) -> tuple[Contents, dict[str, str]]:
    """The contents of a file and its metadata, from its header."""
    # Not with the framework torch: it would map the whole file as writable.
    with _opened(path, "numpy") as file:
        metadata = dict(file.metadata() or {})
    # Read the header again for the sizes: opening the file has checked it.
    with path.open("rb") as raw:
        entries = json.loads(raw.read(int.from_bytes(raw.read(8), "little")))
    entries.pop(METADATA, None)
    keys = _keys(metadata, set(entries))
    rows = []
    for name, trail in keys.items():
        entry = msgspec.convert(entries[name], _HeaderEntry)
        dtype = values.dtype_name(DTYPES[entry.dtype]) if entry.dtype in DTYPES else entry.dtype
        low, high = entry.data_offsets
        path_of = "".join(f"[{key!r}]" for key in trail)
        rows.append(
            Row(printable(path_of), printable(name), "tensor", printable(dtype), tuple(entry.shape), high - low)
        )
    return Contents.apart(rows), metadata


def load(path: Path) -> dict[str, Any]:
    """The tree of tensors in a file, mapped from it."""
    with _opened(path, "pt") as file:
        keys = _keys(dict(file.metadata() or {}), set(file.keys()))
        state: dict[str, Any] = {}
        for name, trail in keys.items():
            node = state
            for key in trail[:-1]:
                node = node.setdefault(key, {})
            try:
                node[trail[-1]] = file.get_tensor(name)
            except SafetensorError as error:
                raise Failed(
                    f"{path}: {printable(name)} cannot be read as a tensor of torch: {error}; use a newer version of "
                    "torch, or copy or save the file again"
                ) from error
    return state


def _opened(path: Path, framework: str) -> Any:
    try:
        return safe_open(path, framework=framework)
    except SafetensorError as error:
        if "unknown variant" in str(error):
            raise Failed(
                f"{path} has a dtype that this version of safetensors does not know; install a newer one: {error}"
            ) from error
        raise Failed(f"{path} is damaged or incomplete: {error}; copy or save it again") from error
    except RuntimeError as error:
        raise Failed(f"{path} cannot be mapped into memory: {str(error).splitlines()[0]}") from error


def _keys(metadata: dict[str, str], names: set[str]) -> dict[str, list[str]]:
    """The keys that lead to each name: several if the metadata lists exactly these names, otherwise the name itself."""
    plain = {name: [name] for name in sorted(names)}
    try:
        trails = msgspec.json.decode(metadata.get(KEYS, "[]"), type=list[list[str]])
    except msgspec.DecodeError:
        return plain
    found = {".".join(trail): trail for trail in trails}
    # Another program may have changed the tensors and kept the metadata.
    return found if found.keys() == names and not _ambiguous(trails) else plain


def _ambiguous(trails: list[list[str]]) -> bool:
    """Whether two paths are equal, or one path leads to a tensor and to a dict."""
    leaves = Counter(map(tuple, trails))
    inner = {tuple(trail[:i]) for trail in trails for i in range(len(trail))}
    return any(count > 1 for count in leaves.values()) or bool(inner & leaves.keys()) or () in leaves


# -------------------------------------------------------------------------------------------------------------- writing


def misfits(manifest: Manifest) -> list[str]:
    """Why a state cannot be written as safetensors; empty if it can.

    A DTensor or Block counts as the whole tensor. Lost without a refusal: whether a tensor is a parameter or a buffer,
    its strides, and the class of dict that held it.
    """
    found = [*_of_tree(manifest.root)]
    if found:
        return found
    cohort, paths = Cohort(manifest, {}), manifest.paths
    whys = [(path, why_not(cohort, leaf, whole=[DTENSOR, BLOCK])) for leaf, path in enumerate(paths)]
    whys += misnamed(trees.dotted(manifest.root, longest=None), paths)
    found = [f"{printable(path)} is {printable(why)}" for path, why in whys if why is not None]
    return found or [*_tied(manifest)]


def _of_tree(root: trees.Node | None) -> Iterator[str]:
    if root is None or root.kind not in (Kind.DICT, Kind.ORDERED_DICT):
        yield "the state is no dict"
        return
    stack = [("the state", root)]
    while stack:
        path, node = stack.pop()
        if not node.children and node is not root:
            yield f"{printable(path)} is an empty dict"
        for i, (key, child) in enumerate(zip(node.keys, node.children, strict=True)):
            below = (path if path != "the state" else "") + node.label(i)
            if not isinstance(key, str):
                yield f"{printable(below)} has a key that is no str"
            if child is not None and child.kind in (Kind.DICT, Kind.ORDERED_DICT):
                stack.append((below, child))
            elif child is not None:
                yield f"{printable(below)} is a {child.kind.name.lower().replace('_', ' ')}, not a dict"


def _tied(manifest: Manifest) -> Iterator[str]:
    """Tensors that share memory. After loading they would be separate."""
    tensors, paths = manifest.tensors, manifest.paths
    if int((tensors.numel * tensors.item).sum()) == int(lay_out(manifest).nbytes.sum()):
        return
    shown = np.flatnonzero(tensors.numel > 0)
    for crowd in crowds(tensors.storage[shown], tensors.start[shown], tensors.end[shown]):
        one, other = (printable(paths[manifest.leaf_of(row)]) for row in shown[crowd[:2]].tolist())
        yield f"{one} and {other} share memory"


def save(state: Any, path: Path) -> None:
    """Write a state that has no misfits. Non-contiguous tensors are copied first."""
    root, leaves = trees.flatten(state, max_depth=Limits().max_depth)
    names = trees.dotted(root, longest=None)
    tensors = {name: leaf.detach().contiguous() for name, leaf in zip(names, leaves, strict=True)}
    keys = json.dumps([*_trails(root, [])], ensure_ascii=False)
    save_file(tensors, path, metadata={"format": "pt", KEYS: keys})


def _trails(node: trees.Node | None, keys: list[str]) -> Iterator[list[str]]:
    if node is None:
        yield keys
        return
    for key, child in zip(node.keys, node.children, strict=True):
        yield from _trails(child, [*keys, key])
