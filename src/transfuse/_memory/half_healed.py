"""What a failed heal has left in this process's tensors, for the next heal to know.

A heal that fails has told the caller no step. Yet tensors may hold a mix of old and new values, or all of the new ones;
the caller's own step counter fits neither. Tensors that are written to afterwards count as the caller's again.
"""

from __future__ import annotations

import threading
from collections.abc import Collection, Iterator
from typing import Any, NamedTuple
from weakref import ReferenceType, WeakKeyDictionary, ref

import torch

from transfuse._limits import Limits
from transfuse._state import trees
from transfuse._state.leaves.block import tensor_in
from transfuse._state.leaves.dtensors import is_dtensor


class Truth(NamedTuple):
    """What is known of a state: leaves that are half-written, or the step that all of it was received at."""

    torn: tuple[str, ...] = ()
    step: int | None = None


class _WholeState(NamedTuple):
    step: int
    versions: list[tuple[ReferenceType[torch.UntypedStorage], int]]


_lock = threading.Lock()
#: Half-written storages, each with its version then.
_torn: WeakKeyDictionary[torch.UntypedStorage, int] = WeakKeyDictionary()
#: States that are whole, and of another step than the caller was told.
_whole: list[_WholeState] = []


def has_notes() -> bool:
    return bool(_torn or _whole)


def note_torn(state: object, paths: Collection[str]) -> None:
    with _lock:
        _torn.update({storage: version for path, storage, version in _storages(state) if path in paths})


def note_whole(state: object, step: int) -> None:
    with _lock:
        _whole.append(_WholeState(step, [(ref(storage), version) for _, storage, version in _storages(state)]))


def forget(state: object) -> None:
    """All of this state is as its owner believes."""
    with _lock:
        storages = {id(storage): storage for _, storage, _ in _storages(state)}
        for storage in storages.values():
            _torn.pop(storage, None)
        _whole[:] = [one for one in _whole if not any(id(storage()) in storages for storage, _ in one.versions)]


def look(state: object) -> Truth:
    """What is known of a state, as far as nobody has written to it since."""
    with _lock:
        found = list(_storages(state))
        torn = tuple(path for path, storage, version in found if _torn.get(storage) == version)
        now = {id(storage): version for _, storage, version in found}
        _whole[:] = [one for one in _whole if all(storage() is not None for storage, _ in one.versions)]
        steps = [one.step for one in _whole if all(now.get(id(s())) == version for s, version in one.versions)]
        return Truth(torn, steps[-1] if steps and not torn else None)


def _storages(state: object) -> Iterator[tuple[str, torch.UntypedStorage, int]]:
    root, leaves = trees.flatten(state, max_depth=Limits.from_environment().max_depth)
    for path, leaf in zip(trees.paths(root), leaves, strict=True):
        tensor: Any = leaf._local_tensor if is_dtensor(leaf) else tensor_in(leaf)
        if isinstance(tensor, torch.Tensor) and tensor.layout is torch.strided:
            try:
                yield path, tensor.untyped_storage(), tensor._version
            except (RuntimeError, NotImplementedError):
                continue  # It has no storage, or no versions (inference mode).
