"""Check bit for bit that what arrived is what was sent. By digests, so that no receiver has to keep a second copy."""

from __future__ import annotations

from typing import Any

import torch
import xxhash
from torch.utils._pytree import keystr, tree_flatten_with_path

from benchmarks.compare.peers import tensors_of

__all__ = ["Digests", "differences", "digests"]

#: By path: a tensor's dtype, shape and XXH3 of its bytes, or another leaf's repr.
Digests = dict[str, tuple[object, ...]]

#: A wrong move rarely has just one wrong tensor.
MOST_LINES = 5


def digests(state: object) -> Digests:
    """The digests of a tree, or of tensors in a dict whose keys are paths."""
    leaves, _ = tree_flatten_with_path(state)
    return {keystr(path): digest(leaf) for path, leaf in leaves}


def digest(leaf: Any) -> tuple[object, ...]:
    if not isinstance(leaf, torch.Tensor):
        return (repr(leaf),)
    raw = leaf.detach().contiguous().view(-1).view(torch.uint8).numpy()
    return str(leaf.dtype), tuple(leaf.shape), xxhash.xxh3_64_intdigest(raw.data)


def differences(expected: Digests, unique: set[str], got: object, whole: bool, target: object | None) -> list[str]:
    """One line for each error in ``got``.

    ``unique`` are the paths that ``got`` must have; ``got`` need not be ``whole``. With ``target``, its tensors must be
    the ones that ``got`` holds.
    """
    flat = isinstance(got, dict) and got.keys() == unique
    found = {path: digest(leaf) for path, leaf in got.items()} if flat and isinstance(got, dict) else digests(got)
    paths = set(expected) if whole else unique
    lines = [f"{path} is missing" for path in sorted(paths - set(found))]
    lines += [f"{path} differs" for path in found if found[path] != expected.get(path)]
    if target is not None:
        own, came = ({t.data_ptr() for t in tensors_of(state).values()} for state in (target, got))
        lines += [f"{len(own - came)} tensors are not the target's own"] if own - came else []
    return lines[:MOST_LINES] + ([f"and {len(lines) - MOST_LINES} more"] if len(lines) > MOST_LINES else [])
