"""The outline of a target: everything in it that a plan depends on, without its tensors and values.

Two targets with the same outline have the same plan: their trees, the kinds of their leaves, and every column of their
tensors are equal, addresses included.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from transfuse.limits import Limits
from transfuse.plan.match import Prepared
from transfuse.state import live_tensors, trees
from transfuse.state.leaves.codec import CannotCarry, Shared
from transfuse.state.leaves.registry import Registry
from transfuse.state.live_tensors import LiveTensors
from transfuse.state.memory_maps import Mappings
from transfuse.state.tensors import Ints

__all__ = ["Outline", "outline"]


@dataclass(eq=False)
class Outline:
    """The outline of a target, and for as long as a receive needs them the tensors that it has."""

    root: trees.Node | None
    #: For each leaf: its row among the plain tensors, or -1.
    row: Ints
    #: For each leaf that is no plain tensor: the spec of a tensor of another class, or the class of a value.
    others: list[Any]
    #: The meshes that the specs refer to, and this rank's coordinate in each.
    meshes: list[Any]
    #: The plain tensors, and the tensors inside other leaves.
    plain: LiveTensors
    inner: LiveTensors
    #: All these tensors, in this order. Empty once forgotten.
    tensors: Sequence[torch.Tensor]

    def is_like(self, other: Outline) -> bool:
        """Whether a plan for the other target is a plan for this one."""
        return (
            np.array_equal(self.row, other.row)
            and _are_equal(self.others, other.others)
            and _are_equal(self.meshes, other.meshes)
            and self.plain.equals(other.plain)
            and self.inner.equals(other.inner)
            and trees.are_same(self.root, other.root)
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
        """Drop the tensors: whoever remembers the outline must not keep the target in memory."""
        self.tensors = ()


def outline(prepared: Prepared, limits: Limits) -> Outline | None:
    """The outline of a target; None if a leaf cannot be taken apart without being read."""
    registry, shared = Registry(limits), Shared()
    inner: list[torch.Tensor] = []
    others: list[Any] = []
    odd = np.flatnonzero(prepared.row < 0).tolist()
    for leaf in map(prepared.leaves.__getitem__, odd):
        if not isinstance(leaf, torch.Tensor):
            others.append(type(leaf))
            continue
        try:
            others.append(registry.open(leaf, inner, shared))
        except (CannotCarry, ValueError, RuntimeError):
            return None
    plain = prepared.leaves
    if odd:
        plain = [prepared.leaves[leaf] for leaf in np.flatnonzero(prepared.row >= 0).tolist()]
    try:
        columns = live_tensors.read(inner, roles=False)
    except live_tensors.Unusual:
        return None
    meshes = [shared.items, shared.coordinates]
    return Outline(prepared.root, prepared.row, others, meshes, prepared.tensors, columns, [*plain, *inner])


def _are_equal(one: list[Any], other: list[Any]) -> bool:
    try:
        return bool(one == other)
    except (RuntimeError, ValueError, TypeError):  # Something that cannot be compared, a tensor for example.
        return False
