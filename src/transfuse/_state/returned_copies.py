"""Whether a ``state_dict`` callable returns the tensors themselves or copies, and whether ``load`` has put these back.

What lands in a copy has not landed in the model. Two results that are alive at the same time tell: the tensors
themselves lie in the same memory both times, and copies do not.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch

from transfuse._errors import StateError
from transfuse._limits import Limits
from transfuse._state import trees
from transfuse._state.leaves import dense
from transfuse._state.leaves.block import is_tensor
from transfuse._state.leaves.codec import CannotCarry, Shared
from transfuse._state.leaves.registry import Registry

#: A leaf's path, and how many leaves before it have the same one: a path shows only the beginning of a long key.
_Key = tuple[str, int]


class ReturnedCopies:
    """The leaves of ``target`` that are copies: in ``again``, another result of the same callable, they lie elsewhere.

    It holds the tensors of these leaves, and of no others.
    """

    def __init__(self, target: object, again: object) -> None:
        self._copies: dict[_Key, list[torch.Tensor]] = {}
        if target is again:
            return
        others = _by_path(again)
        for key, leaf in _by_path(target).items():
            other = others.get(key)
            if is_tensor(leaf) and not _is_quickly_seen_to_be_same(leaf, other):
                tensors = _open(leaf)
                if _places(tensors) != _places(_open(other)):
                    self._copies[key] = tensors

    @property
    def paths(self) -> list[str]:
        return [path for path, _ in self._copies]

    def refuse(self) -> None:
        """For callers without a ``load``: raise if there are copies, and name them."""
        if self._copies:
            raise StateError(
                f"state_dict() returned copies of {len(self._copies)} leaves: {self._names(list(self._copies))}. What "
                "lands there does not reach the model. Return the tensors themselves, or give load= that takes them"
            )

    def check_taken(self, state_dict: Callable[[], object]) -> None:
        """After ``load``: raise if another call does not return what has landed in the copies, bit for bit."""
        if not self._copies:
            return
        now = _by_path(state_dict())
        lost = [key for key, tensors in self._copies.items() if not _are_equal(tensors, _open(now.get(key)))]
        if lost:
            raise StateError(
                f"{len(lost)} leaves were not taken by load= or load_state_dict(): {self._names(lost)}. state_dict() "
                "returned copies of them, and afterwards it returns other values than those that arrived. Load these "
                "leaves too, or let state_dict() return the tensors themselves"
            )

    @staticmethod
    def _names(keys: list[_Key]) -> str:
        return ", ".join(path for path, _ in keys[:10]) + (", …" if len(keys) > 10 else "")


def _by_path(tree: object) -> dict[_Key, Any]:
    root, leaves = trees.flatten(tree, max_depth=Limits.from_environment().max_depth)
    found: dict[_Key, Any] = {}
    seen: Counter[str] = Counter()
    for path, leaf in zip(trees.paths(root), leaves, strict=True):
        found[path, seen[path]] = leaf
        seen[path] += 1
    return found


def _is_quickly_seen_to_be_same(leaf: object, other: object) -> bool:
    if leaf is other:
        return True
    return dense.is_plain(leaf) and dense.is_plain(other) and leaf.data_ptr() == other.data_ptr()  # type: ignore[attr-defined]


def _open(leaf: object) -> list[torch.Tensor]:
    """The plain tensors of a leaf. There are none if it is no tensor, or one that does not travel: others name it."""
    tensors: list[torch.Tensor] = []
    if is_tensor(leaf):
        with suppress(CannotCarry):
            Registry(Limits.from_environment()).open(leaf, tensors, Shared())
    return tensors


def _places(tensors: list[torch.Tensor]) -> list[tuple[torch.device, int]]:
    return [(tensor.device, dense.start_of(tensor)) for tensor in tensors if tensor.numel()]


def _are_equal(some: list[torch.Tensor], others: list[torch.Tensor]) -> bool:
    if len(some) != len(others):
        return False
    return all(
        (one.shape, one.dtype) == (other.shape, other.dtype) and torch.equal(_bytes(one), _bytes(other))
        for one, other in zip(some, others, strict=True)
    )


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return dense.raw(tensor.detach().resolve_conj().resolve_neg()).contiguous().reshape(-1).view(torch.uint8)
