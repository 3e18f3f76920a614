"""The outline of a target: everything in it that a plan depends on, without its tensors and values.

Two targets with the same outline have the same plan: their trees, the kinds of their leaves, and every column of their
tensors are equal, addresses included.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from operator import is_
from typing import Any

import msgspec
import numpy as np
import torch

from transfuse._errors import UnsupportedLeaf
from transfuse._limits import Limits
from transfuse._plan.match import Prepared
from transfuse._state import live_tensors, trees
from transfuse._state.leaves.block import is_tensor
from transfuse._state.leaves.codec import CannotCarry, Shared
from transfuse._state.leaves.registry import Registry
from transfuse._state.live_tensors import LiveTensors
from transfuse._state.memory_maps import Mappings
from transfuse._state.region import Ints


@dataclass(eq=False)
class Outline:
    """The outline of a target, and for as long as a receive needs them the tensors that it has."""

    #: For each leaf: its row among the plain tensors, or -1.
    row: Ints
    #: For each leaf that is no plain tensor: the class of a value, or None for a tensor of another class.
    classes: list[type | None]
    #: The tree, the specs of tensors of other classes, the meshes that these refer to, and this rank's coordinate in
    #: each, as bytes: they are equal only if all of that is, type for type and bit for bit.
    text: bytes
    #: The plain tensors, and the tensors inside other leaves.
    plain: LiveTensors
    inner: LiveTensors
    #: All these tensors, in this order. Empty once forgotten.
    tensors: Sequence[torch.Tensor]

    def is_like(self, other: Outline) -> bool:
        """Whether a plan for the other target is a plan for this one."""
        return (
            np.array_equal(self.row, other.row)
            and self.text == other.text
            and len(self.classes) == len(other.classes)
            and all(map(is_, self.classes, other.classes))
            and self.plain.equals(other.plain)
            and self.inner.equals(other.inner)
        )

    def can_be_written(self) -> bool:
        """Whether all memory of the target is mapped, and may be written, at this moment."""
        memory = Mappings()
        return not any(
            bool(tensors.beyond.any()) or tensors.faults(np.arange(len(tensors)), memory, write=True)
            for tensors in (self.plain, self.inner)
        )

    def numbers_of(self, tensors: Sequence[torch.Tensor | None]) -> list[int] | None:
        """The number in ``tensors`` of each of these, -1 for None; or None if one of them is not there."""
        numbers = {id(tensor): number for number, tensor in enumerate(self.tensors)}
        found = [-1 if tensor is None else numbers.get(id(tensor), -2) for tensor in tensors]
        return None if -2 in found else found

    def forget(self) -> None:
        """Drop the tensors: an outline that is remembered must not keep the target in memory."""
        self.tensors = ()


def outline(prepared: Prepared, limits: Limits) -> Outline | None:
    """The outline of a target; None if a leaf cannot be taken apart without being read, or the tree not be encoded."""
    registry, shared = Registry(limits), Shared()
    inner: list[torch.Tensor] = []
    classes: list[type | None] = []
    specs: list[Any] = []
    odd = np.flatnonzero(prepared.row < 0).tolist()
    for leaf in map(prepared.leaves.__getitem__, odd):
        if not is_tensor(leaf):
            classes.append(type(leaf))
            continue
        try:
            specs.append(registry.open(leaf, inner, shared))
            classes.append(None)
        except (CannotCarry, ValueError, RuntimeError):
            return None
    plain = prepared.leaves
    if odd:
        plain = [prepared.leaves[leaf] for leaf in np.flatnonzero(prepared.row >= 0).tolist()]
    try:
        columns = live_tensors.read(inner, roles=False)
        text = msgspec.msgpack.encode([trees.encode(prepared.root), specs, shared.items, shared.coordinates])
    except (live_tensors.Unusual, UnsupportedLeaf, ValueError, TypeError):
        return None
    return Outline(prepared.row, classes, text, prepared.tensors, columns, [*plain, *inner])
