"""``Block``: a tensor that is a box of a global tensor, without a mesh. And how it travels."""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from typing import Any, final

import msgspec
import torch
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed._shard.sharded_tensor.api import ShardedTensor

from transfuse._state.leaves import dense
from transfuse._state.leaves.codec import BuildContext, CannotCarry, MeshDescription, Opened, Shared, tensor_type
from transfuse._state.leaves.distributed import HUGE, check_coordinate, check_placement, encode_placement
from transfuse._state.leaves.dtensors import is_dtensor
from transfuse._state.leaves.layout import Box, Layout, blocks_of
from transfuse._state.leaves.spec import BLOCK


@final
class Block:
    """A tensor that is a box of a global tensor: ``shape`` is the global shape, and ``start`` where the box begins.

    At a source it says what this rank holds of a leaf, and in a target what this rank wants of it. The two sides need
    no mesh, and not the same boxes: plain tensors, DTensors, ShardedTensors and Blocks of sources fill the boxes of a
    receiver. Ranks that hold the same elements are replicas of them.

    >>> Block(torch.zeros(2, 8), start=(2, 0), shape=(4, 8))
    Block([2:4, 0:8] of (4, 8), torch.float32)

    Args:
        tensor: a plain strided tensor, such as a parameter or a view. What arrives lands in its memory.
        start: for each dimension, the index in the global tensor at which the box begins.
        shape: the shape of the global tensor.
    """

    def __init__(self, tensor: torch.Tensor, *, start: Sequence[int], shape: Sequence[int]) -> None:
        if not dense.is_plain(tensor):
            kind = tensor_type(tensor) if isinstance(tensor, torch.Tensor) else type(tensor).__name__
            raise TypeError(f"Block takes a plain strided tensor, got a {kind}: Block.of() takes sharded tensors apart")
        self.tensor = tensor
        self.start, self.shape = _numbers("start", start), _numbers("shape", shape)
        problem = _outside(box_of(self), self.shape)
        if problem:
            raise ValueError(f"Block: {problem}")

    def __repr__(self) -> str:
        return f"Block({box_of(self)} of {self.shape}, {self.tensor.dtype})"

    @classmethod
    def of(cls, leaf: torch.Tensor | Block) -> list[Block]:
        """What this rank holds of a DTensor or ShardedTensor, as Blocks over the same memory.

        There are several if its elements are not one box, and none if it holds nothing. A plain tensor is one Block.
        """
        if isinstance(leaf, Block):
            # Made anew: its tensor may have another shape now.
            return [cls(leaf.tensor, start=leaf.start, shape=leaf.shape)]
        if isinstance(leaf, ShardedTensor):
            shape = tuple(leaf.metadata().size)
            return [cls(one.tensor, start=one.metadata.shard_offsets, shape=shape) for one in leaf.local_shards()]
        if is_dtensor(leaf):
            mesh, local = leaf.device_mesh, leaf._local_tensor
            coordinate = mesh.get_coordinate()
            if coordinate is None:
                return []
            local = local.wait() if isinstance(local, AsyncCollectiveTensor) else local
            return cls.placed(local, leaf.shape, tuple(mesh.shape), leaf.placements, coordinate)
        return [cls(leaf, start=(0,) * leaf.ndim, shape=leaf.shape)]

    @classmethod
    def placed(
        cls,
        tensor: torch.Tensor,
        shape: Sequence[int],
        mesh_shape: Sequence[int],
        placements: Sequence[Any],
        coordinate: Sequence[int],
    ) -> list[Block]:
        """What a rank holds that is at this coordinate of a mesh, without the mesh. ``tensor`` is all that it holds.

        Placements are those of torch, or of a library that names them alike and cuts as ``torch.chunk`` does.
        """
        sizes, dims = _numbers("mesh_shape", mesh_shape), _numbers("shape", shape)
        place, codes = _numbers("coordinate", coordinate), tuple(map(_code, placements))
        described = MeshDescription("cpu", sizes, tuple(range(math.prod(sizes))), None)
        if len(codes) != len(sizes):
            raise ValueError(f"Block: {len(codes)} placements for a mesh of {len(sizes)} dimensions")
        for code in codes:
            check_placement(code, len(dims))
        check_coordinate(described, place)
        layout = Layout(dims, described, codes)
        if layout.partial:
            raise ValueError("Block: a Partial placement has no value of its own; redistribute() the DTensor first")
        expected = layout.local_shape(place)
        if tuple(tensor.shape) != expected:
            raise ValueError(f"Block: the rank at {place} holds {expected}, got {tuple(tensor.shape)}")
        found = []
        for box, at in blocks_of(layout.runs(place)):
            part = tensor
            for dim, (low, size) in enumerate(zip(at, box.sizes, strict=True)):
                part = part if size == part.shape[dim] else part.detach().narrow(dim, low, size)
            found.append(cls(part, start=box.start, shape=layout.shape))
        return found


def box_of(block: Block) -> Box:
    """The box that a Block's tensor is."""
    return Box(block.start, tuple(block.tensor.shape))


def is_tensor(leaf: object) -> bool:
    """Whether a leaf is a tensor of any kind, or a Block of one."""
    return isinstance(leaf, (torch.Tensor, Block))


def tensor_in(leaf: Any) -> Any:
    """A Block's tensor; every other leaf as it is."""
    return leaf.tensor if isinstance(leaf, Block) else leaf


def _numbers(name: str, given: Sequence[int]) -> tuple[int, ...]:
    try:
        return tuple(map(operator.index, given))
    except TypeError:
        raise TypeError(f"Block: {name} takes whole numbers, one for each dimension, got {given!r}") from None


def _code(placement: Any) -> tuple[str | int, ...]:
    """The code of a placement of torch, or of a library that names its placements alike."""
    match type(placement).__name__:
        case "Replicate":
            return ("R",)
        case "Shard":
            return ("S", operator.index(placement.dim))
    return encode_placement(placement)


def _outside(box: Box, shape: tuple[int, ...]) -> str:
    """Why a box is none of a tensor of this shape; empty if it is one."""
    if not len(box.start) == len(box.sizes) == len(shape):
        return f"the tensor has {len(box.sizes)} dimensions, start {len(box.start)}, and shape {len(shape)}"
    if any(size < 0 for size in shape) or math.prod(shape) > HUGE:
        return f"{shape} is no shape of a tensor"
    if any(low < 0 or low + n > size for low, n, size in zip(box.start, box.sizes, shape, strict=True)):
        return f"the box {box} reaches beyond the global shape {shape}"
    return ""


def checked(box: Box, shape: tuple[int, ...]) -> Box:
    """A peer's box; ``ValueError`` if it is none of a tensor of this shape."""
    problem = _outside(box, shape)
    if problem:
        raise ValueError(f"a malformed Block: {problem}")
    return box


class BlockMeta(msgspec.Struct, array_like=True, frozen=True, forbid_unknown_fields=True):
    """The box's sizes are those of the child."""

    start: tuple[int, ...]
    shape: tuple[int, ...]


class BlockCodec:
    name = BLOCK
    checks_data = False

    def takes(self, leaf: object) -> bool:
        return isinstance(leaf, Block)

    def open(self, leaf: Block, shared: Shared) -> Opened:
        problem = _outside(box_of(leaf), leaf.shape)
        if problem:
            raise CannotCarry(f"a Block whose tensor has changed its shape: {problem}; make a new Block")
        return Opened(BlockMeta(leaf.start, leaf.shape), [leaf.tensor])

    @staticmethod
    def read(meta: Any) -> BlockMeta:
        """Read a peer's description; ``ValueError`` for what no codec writes."""
        m = msgspec.convert(meta, BlockMeta)
        checked(Box(m.start, (0,) * len(m.start)), m.shape)
        return m

    def promise(self, meta: Any, children: int, build_context: BuildContext) -> None:
        self.read(meta)
        if children != 1:
            raise ValueError(f"a Block has one tensor, got {children}")

    def close(self, meta: Any, children: list[Any], build_context: BuildContext) -> Block:
        """The Block that was described, or the whole tensor as one if that has arrived."""
        m, (tensor,) = self.read(meta), children
        if not dense.is_plain(tensor):
            raise ValueError("a malformed Block: its tensor is not plain")
        if tuple(tensor.shape) == m.shape:
            return Block(tensor, start=(0,) * len(m.shape), shape=m.shape)
        checked(Box(m.start, tuple(tensor.shape)), m.shape)
        return Block(tensor, start=m.start, shape=m.shape)

    def differences(
        self, source: Any, target: BlockMeta, build_context: BuildContext, target_shared: Shared
    ) -> list[str]:
        m = self.read(source)
        if m.shape != target.shape:
            return [f"global shape: source {m.shape}, target {target.shape}"]
        if m.start != target.start:
            return [f"box: the source's begins at {m.start}, the target's at {target.start}"]
        return []

    def settle(self, meta: Any, target: Any) -> None:
        pass
