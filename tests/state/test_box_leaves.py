"""Blocks: what they take, what they say of sharded tensors, and what a peer may not say of them."""

from __future__ import annotations

import copy
import random
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from shards import shard
from transfuse import Block, UnsupportedLeaf
from transfuse._limits import Limits
from transfuse._plan.holdings import Holdings
from transfuse._state.leaves.block import BlockCodec
from transfuse._state.leaves.codec import BuildContext
from transfuse._state.leaves.layout import Box, numel_of_all
from transfuse._state.manifest import Manifest, describe


def test_a_block_says_what_it_is() -> None:
    block = Block(torch.zeros(2, 8), start=[2, 0], shape=torch.Size([4, 8]))
    assert (block.start, block.shape) == ((2, 0), (4, 8))
    assert repr(block) == "Block([2:4, 0:8] of (4, 8), torch.float32)"
    assert repr(Block(torch.tensor(1.0), start=(), shape=())) == "Block([] of (), torch.float32)"


@pytest.mark.parametrize(
    ("tensor", "start", "shape", "text"),
    [
        (torch.zeros(3), (6,), (8,), r"the box \[6:9\] reaches beyond the global shape \(8,\)"),
        (torch.zeros(3), (-1,), (8,), "reaches beyond"),
        (torch.zeros(0), (9,), (8,), "reaches beyond"),
        (torch.zeros(3, 2), (0,), (8,), "the tensor has 2 dimensions, start 1, and shape 1"),
        (torch.zeros(()), (0,), (), "the tensor has 0 dimensions, start 1, and shape 0"),
        (torch.zeros(0, 2), (0, 0), (-1, 2), "is no shape"),
        (torch.zeros(1, 1), (0, 0), (1 << 40, 1 << 40), "is no shape"),
    ],
)
def test_a_wrong_box_is_refused_at_once(tensor: torch.Tensor, start: Any, shape: Any, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        Block(tensor, start=start, shape=shape)


def test_other_than_plain_tensors_are_refused() -> None:
    sharded = shard(torch.zeros(4), [0, 1], 0, Shard(0))
    for leaf, kind in ((sharded, "DTensor"), (torch.eye(2).to_sparse(), "Tensor"), ([0.0], "list")):
        with pytest.raises(TypeError, match=f"takes a plain strided tensor, got a {kind}"):
            Block(leaf, start=(0,), shape=(4,))  # type: ignore[arg-type]
    for start in (0, (0.0,), "0", None):
        with pytest.raises(TypeError, match="start takes whole numbers"):
            Block(torch.zeros(4), start=start, shape=(4,))  # type: ignore[arg-type]


def test_a_tensor_that_has_another_shape_meanwhile_is_named() -> None:
    block = Block(torch.zeros(4), start=(4,), shape=(8,))
    block.tensor.resize_(5)
    with pytest.raises(UnsupportedLeaf, match=r"a Block whose tensor has changed its shape: the box \[4:9\]"):
        describe({"w": block}, Limits())


def test_copies_are_blocks_of_the_same_box() -> None:
    block = copy.deepcopy(Block(torch.ones(2), start=(1,), shape=(4,)))
    assert (block.start, block.shape, block.tensor.tolist()) == ((1,), (4,), [1.0, 1.0])


# ------------------------------------------------------------------------------------ of tensors with other placements


@dataclass
class _Other:
    """A placement of a library that names its own like torch's."""

    dim: int


Shard_ = type("Shard", (_Other,), {})
Replicate_ = type("Replicate", (), {})


@given(seed=st.integers(0, 1 << 32))
def test_blocks_of_a_mesh_are_the_parts_of_the_whole(seed: int) -> None:
    draw = random.Random(seed)
    whole = torch.arange(720.0).reshape([(720,), (9, 80), (6, 8, 15)][draw.randrange(3)])
    shape = tuple(draw.randint(1, 3) for _ in range(draw.randint(1, 2)))
    ranks = torch.arange(int(np.prod(shape))).reshape(shape)
    placements: list[Any] = [draw.choice([Replicate(), Shard(draw.randrange(whole.ndim))]) for _ in shape]
    if draw.random() < 0.3:
        placements[0] = _StridedShard(draw.randrange(whole.ndim), split_factor=2)
    others = [
        Shard_(one.dim) if type(one) is Shard else Replicate_() if type(one) is Replicate else one for one in placements
    ]
    seen = torch.zeros_like(whole)
    for rank in range(ranks.numel()):
        held = shard(whole, ranks.tolist(), rank, *placements)
        coordinate = held.device_mesh.get_coordinate()
        assert coordinate is not None
        local = held.to_local()
        blocks = Block.of(held)
        for one, other in zip(blocks, Block.placed(local, whole.shape, shape, others, coordinate), strict=True):
            assert (one.start, one.shape) == (other.start, other.shape)
            assert one.tensor.data_ptr() == other.tensor.data_ptr()
            box = tuple(slice(low, low + n) for low, n in zip(one.start, one.tensor.shape, strict=True))
            assert torch.equal(one.tensor, whole[box])
            assert one.tensor.untyped_storage().data_ptr() == local.untyped_storage().data_ptr()
            seen[box] += 1
        assert sum(one.tensor.numel() for one in blocks) == local.numel()
    assert (seen == seen.flatten()[0]).all()
    assert seen.any()


def test_blocks_of_other_tensors() -> None:
    weight = nn.Parameter(torch.ones(2, 3))
    (block,) = Block.of(weight)
    assert block.tensor is weight
    assert block.start == (0, 0)
    outside = shard(torch.zeros(4), [0, 1], 2, Shard(0))
    assert Block.of(outside) == []
    with pytest.raises(ValueError, match="Partial"):
        Block.of(shard(torch.zeros(4), [0, 1], 0, Partial()))


@pytest.mark.parametrize(
    ("placements", "coordinate", "text"),
    [
        ([Shard(0)], (0, 0), "1 placements for a mesh of 2 dimensions"),
        ([Shard(0), Shard(2)], (0, 0), "unknown placement"),
        ([Shard(0), Replicate()], (0, 2), "coordinate"),
        ([Shard(0), Replicate()], (0,), "coordinate"),
        ([Shard(0), Shard(0)], (0, 0), r"the rank at \(0, 0\) holds \(1, 4\), got \(2, 4\)"),
    ],
)
def test_what_no_mesh_gives_a_rank_is_refused(placements: list[Any], coordinate: Any, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        Block.placed(torch.zeros(2, 4), (4, 4), (2, 2), placements, coordinate)


# ------------------------------------------------------------------------------------------------------------ counting


@given(st.data())
def test_elements_that_several_boxes_have_count_once(data: st.DataObject) -> None:
    shape = data.draw(st.lists(st.integers(0, 6), max_size=3).map(tuple))
    grid, boxes = np.zeros(shape, dtype=bool), []
    for _ in range(data.draw(st.integers(0, 6))):
        edges = [sorted(data.draw(st.tuples(st.integers(0, n), st.integers(0, n)))) for n in shape]
        boxes.append(Box(tuple(low for low, _ in edges), tuple(high - low for low, high in edges)))
        grid[tuple(slice(low, high) for low, high in edges)] = True
    assert numel_of_all(boxes) == int(grid.sum())


# ------------------------------------------------------------------------------------------------------------- hostile


def _tampered(block: Block, meta: Any, children: Any = (0,)) -> Manifest:
    """The manifest of a state with this Block, of which a peer says something else."""
    wire = describe({"w": block}, Limits()).manifest.encode()
    details = [["block", 0, meta, list(children)]]
    plain = msgspec.msgpack.decode(msgspec.msgpack.encode(msgspec.structs.replace(wire, details=details)))
    return Manifest.decode(msgspec.convert(plain, type(wire)), Limits())


@pytest.mark.parametrize(
    "meta",
    [
        [[6], [8]],
        [[-1], [8]],
        [[0, 0], [8]],
        [[0, 0], [8, 1]],
        [[0], [2]],
        [[0], [-8]],
        [[0], [1 << 60]],
        [[0.5], [8]],
        [[0], [8], 1],
        [[0]],
        {},
        None,
        "x",
    ],
)
def test_a_peer_s_box_is_one_of_its_tensor(meta: Any) -> None:
    """It is refused before a block is asked for, and if all comes at once, when the leaf is built."""
    block = Block(torch.zeros(3), start=(2,), shape=(8,))
    assert Holdings(_tampered(block, [[2], [8]])).of(0, 0).shape == (8,)
    manifest = _tampered(block, meta)
    refused = "malformed Block|Expected|missing|fewer|more|type"
    with pytest.raises((ValueError, msgspec.ValidationError), match=refused):
        Holdings(manifest).of(0, 0)
    with pytest.raises((ValueError, msgspec.ValidationError), match=refused):
        BlockCodec().close(meta, [torch.zeros(3)], BuildContext())


def test_a_peer_s_block_has_one_plain_tensor() -> None:
    codec, block = BlockCodec(), Block(torch.zeros(3), start=(2,), shape=(8,))
    with pytest.raises(ValueError, match="one tensor, got 2"):
        codec.promise([[2], [8]], 2, BuildContext())
    with pytest.raises(ValueError, match="consist of 2 tensors, but 1"):
        _tampered(block, [[2], [8]], [0, 0])
    with pytest.raises(ValueError, match="which has no blocks"):
        Holdings(_tampered(block, [[2], [8]], [["block", 0, [[2], [8]], [0]]])).of(0, 0)
    with pytest.raises(ValueError, match="its tensor is not plain"):
        codec.close([[2], [8]], [block], BuildContext())


def test_ranks_with_other_boxes_are_not_alike() -> None:
    def likeness(start: int) -> bytes:
        manifest = describe({"w": Block(torch.zeros(2), start=(start,), shape=(8,))}, Limits()).manifest
        return manifest.likeness(manifest.encode())

    assert likeness(0) == likeness(0) != likeness(2)
