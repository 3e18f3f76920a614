"""Local blocks: which blocks of a global tensor the tensors of a target hold on this rank."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed._shard.sharded_tensor.api import ShardedTensor

from transfuse._state.leaves import dense
from transfuse._state.leaves.block import Block, box_of
from transfuse._state.leaves.codec import CannotCarry, Coordinate, Shared, tensor_type
from transfuse._state.leaves.distributed import DTensorCodec, layout_in
from transfuse._state.leaves.dtensors import is_dtensor
from transfuse._state.leaves.layout import Box, Layout, blocks_of
from transfuse._state.leaves.spec import Spec, is_sharded, of_plain_tensors

#: A block of a global tensor, and where in a local tensor it begins.
LocalBlock = tuple[Box, tuple[int, ...]]


class LocalTensors(NamedTuple):
    """A target that is one tensor, plain or sharded."""

    #: The global shape.
    shape: tuple[int, ...]
    #: The tensors of this rank, each with the blocks that it holds.
    tensors: Sequence[tuple[torch.Tensor, Sequence[LocalBlock]]]
    #: Of a DTensor: its layout, and this rank's coordinate in the mesh.
    layout: Layout | None = None
    coordinate: Coordinate = None


class LocalBlocks:
    """Opens targets. The blocks of each layout are computed once."""

    def __init__(self, shared: Shared) -> None:
        self._shared = shared
        self._known: dict[int, list[LocalBlock]] = {}

    def open(self, spec: Any, target: Any) -> LocalTensors | None:
        """The tensors of a target for a leaf with this spec; None for a leaf or target that is a composite."""
        plain = type(spec) is int
        sharded = is_sharded(spec)
        if sharded and not of_plain_tensors(spec):
            raise CannotCarry(f"a {Spec(*spec).codec} of other than plain tensors comes only from its own shard")
        dense.check_initialized(target)
        if dense.is_plain(target):
            dense.check(target)
            if not plain and not sharded:
                return None
            shape = tuple(target.shape)
            start = (0,) * len(shape)
            return LocalTensors(shape, [(target, [(Box(start, shape), start)])])
        if is_dtensor(target):
            if not plain and not sharded:
                return None
            local = target._local_tensor
            if isinstance(local, AsyncCollectiveTensor):
                local = local.wait()
            if not dense.is_plain(local):
                raise CannotCarry(f"a DTensor of {tensor_type(local)}, which gets only its own shard")
            dense.check(local)
            DTensorCodec().open(target, self._shared)  # Raises if the local tensor is not this rank's shard.
            layout, mesh = layout_in(target, self._shared)
            coordinate = self._shared.coordinates[mesh]
            blocks = self._known.get(id(layout))
            if blocks is None:
                blocks = self._known[id(layout)] = blocks_at(layout, coordinate)
            return LocalTensors(tuple(target.shape), [(local, blocks)], layout, coordinate)
        if isinstance(target, (Block, ShardedTensor)):
            if not plain and not sharded:
                return None
            return _of_boxes(target)
        if plain or sharded:
            kind = tensor_type(target) if isinstance(target, torch.Tensor) else f"value of type {type(target).__name__}"
            raise CannotCarry(f"it is a {kind}, and the source's a tensor; put a tensor in its place")
        return None


def _of_boxes(target: Block | ShardedTensor) -> LocalTensors:
    """A target that says itself which boxes it has."""
    try:
        held = Block.of(target)
    except (TypeError, ValueError) as reason:
        raise CannotCarry(str(reason)) from reason
    for one in held:
        dense.check(one.tensor)
    shape = target.shape if isinstance(target, Block) else tuple(target.metadata().size)
    return LocalTensors(shape, [(one.tensor, [(box_of(one), (0,) * one.tensor.ndim)]) for one in held])


def blocks_at(layout: Layout, coordinate: Coordinate) -> list[LocalBlock]:
    """The blocks that the rank at this coordinate holds; none for a rank outside the mesh."""
    return [] if coordinate is None else list(blocks_of(layout.runs(coordinate)))


def global_shape(leaf: Any) -> tuple[int, ...] | None:
    """The global shape of a target that is one tensor, plain or sharded; None for every other target."""
    if isinstance(leaf, ShardedTensor):
        return tuple(leaf.metadata().size)
    return tuple(leaf.shape) if isinstance(leaf, Block) or is_dtensor(leaf) or dense.is_plain(leaf) else None
