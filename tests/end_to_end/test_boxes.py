"""Blocks as sources and as targets: what arrives equals a slice of the global tensor, and nothing else travels."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard

import transfuse
from shards import move, plain, shard
from tampering import Passing
from transfuse import Block, NotCovered, Rename, Slice, TargetMismatch
from transfuse.testing.ranks import Ranks

TOKEN = "t" * 40


def cut(whole: torch.Tensor, start: tuple[int, ...], sizes: tuple[int, ...]) -> torch.Tensor:
    return whole[tuple(slice(low, low + n) for low, n in zip(start, sizes, strict=True))]


def block(whole: torch.Tensor, start: tuple[int, ...], sizes: tuple[int, ...]) -> Block:
    return Block(cut(whole, start, sizes).clone(), start=start, shape=whole.shape)


def wanted(whole: torch.Tensor, start: tuple[int, ...], sizes: tuple[int, ...]) -> Block:
    return Block(torch.zeros(sizes, dtype=whole.dtype), start=start, shape=whole.shape)


def fetch(sources: list[Any], target: Any, **options: Any) -> transfuse.Fetched:
    """From servers of these states, one each."""
    servers = [transfuse.serve(state, step=lambda: 5, token=TOKEN, timeout=20) for state in sources]
    try:
        found: transfuse.Fetched = transfuse.fetch(
            [one.address for one in servers], target, token=TOKEN, timeout=20, **options
        )
        return found
    finally:
        for one in servers:
            one.close(cancel=True)


# ------------------------------------------------------------------------------------------------------- random boxes

MEMORY = ["contiguous", "transposed", "gaps"]


def lay(values: torch.Tensor, memory: str) -> torch.Tensor:
    """The same values in memory of another kind."""
    if memory == "transposed":
        dims = list(reversed(range(values.ndim)))
        return values.permute(dims).contiguous().permute(dims)
    if memory == "gaps":
        return torch.stack([values, torch.zeros_like(values)], -1)[..., 0]
    return values.clone()


def tiles(draw: random.Random, shape: tuple[int, ...], count: int) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Boxes that cover a tensor, some grown beyond their part and some empty."""
    boxes = [((0,) * len(shape), shape)]
    while shape and len(boxes) < count:
        start, sizes = boxes.pop(draw.randrange(len(boxes)))
        d = draw.randrange(len(shape))
        at = draw.randint(0, sizes[d])
        boxes.append((start, (*sizes[:d], at, *sizes[d + 1 :])))
        boxes.append(((*start[:d], start[d] + at, *start[d + 1 :]), (*sizes[:d], sizes[d] - at, *sizes[d + 1 :])))
    boxes += [((0,) * len(shape), shape)] * (count - len(boxes))
    grown = []
    for start, sizes in boxes:
        low = tuple(draw.randint(0, s) if draw.random() < 0.2 else s for s in start)
        ends = (s + n for s, n in zip(start, sizes, strict=True))
        high = (draw.randint(e, n) if draw.random() < 0.2 else e for e, n in zip(ends, shape, strict=True))
        grown.append((low, tuple(h - s for h, s in zip(high, low, strict=True))))
    return grown


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 1 << 32))
def test_random_boxes_arrive_as_numpy_slices_them(seed: int) -> None:
    draw = random.Random(seed)
    count, receivers = draw.randint(1, 3), draw.randint(1, 2)
    ranks = list(range(count, count + receivers))
    sources: dict[int, Any] = {rank: {} for rank in range(count)}
    targets: dict[int, Any] = {rank: {} for rank in ranks}
    expected: dict[int, dict[str, np.ndarray[Any, Any]]] = {rank: {} for rank in ranks}
    for name in ("a", "b", "c"):
        shape = tuple(draw.randint(0 if draw.random() < 0.1 else 1, 7) for _ in range(draw.randint(0, 3)))
        dtype = draw.choice([torch.float32, torch.int64, torch.bool])
        whole = torch.from_numpy(np.random.default_rng(seed).integers(0, 50, shape)).to(dtype)
        as_numpy = whole.numpy()
        for rank, (start, sizes) in enumerate(tiles(draw, shape, count)):
            sources[rank][name] = Block(lay(cut(whole, start, sizes), draw.choice(MEMORY)), start=start, shape=shape)
        kind = draw.choice(["box", "box", "whole", "dtensor"]) if shape else draw.choice(["box", "whole"])
        for rank in ranks:
            if kind == "dtensor":
                d = draw.randrange(len(shape)) if rank == ranks[0] else targets[ranks[0]][name].placements[0].dim
                targets[rank][name] = shard(torch.zeros_like(whole), ranks, rank, Shard(d))
                expected[rank][name] = plain(shard(whole, ranks, rank, Shard(d))).numpy()
                continue
            edges = [sorted((draw.randint(0, n), draw.randint(0, n))) for n in shape]
            box = tuple(slice(low, high) for low, high in edges) if kind == "box" else tuple(map(slice, shape))
            expected[rank][name] = as_numpy[box]
            mine = lay(torch.zeros(expected[rank][name].shape, dtype=dtype), draw.choice(MEMORY))
            if kind == "box":
                targets[rank][name] = Block(mine, start=[low for low, _ in edges], shape=shape)
            else:
                targets[rank][name] = mine
    options: dict[str, Any] = {"same_host": draw.random() < 0.5, "atomic": draw.random() < 0.3}
    options["delta"] = draw.random() < 0.3
    for rank, outcome in move(sources, targets, **options).items():
        moved = outcome.get()
        for name, values in expected[rank].items():
            leaf = targets[rank][name]
            got = plain(leaf.tensor if isinstance(leaf, Block) else leaf)
            assert np.array_equal(got.numpy(), values), (rank, name)
            assert moved.state[name] is leaf
        nbytes = sum(values.nbytes for values in expected[rank].values())
        assert moved.report.bytes + moved.report.kept_bytes == nbytes
        assert options["delta"] or not moved.report.kept_bytes


# ----------------------------------------------------------------------------------------------------- kinds of leaves


@pytest.mark.parametrize("same_host", [True, False])
def test_only_the_box_travels_whatever_the_sources_hold(same_host: bool) -> None:
    whole = torch.arange(96.0).reshape(8, 12)
    kinds: list[list[Any]] = [
        [whole],
        [shard(whole, [0, 1], rank, Shard(1)) for rank in (0, 1)],
        [block(whole, (0, 0), (5, 12)), block(whole, (3, 0), (5, 12))],
    ]
    for leaves in kinds:
        mine = wanted(whole, (2, 5), (4, 3))
        fetched = fetch([{"w": leaf, "n": 1} for leaf in leaves], {"w": mine, "n": 0}, same_host=same_host)
        assert torch.equal(mine.tensor, whole[2:6, 5:8])
        assert fetched.report.bytes == 4 * 3 * 4
        assert fetched.state == {"w": mine, "n": 1}


def test_boxes_of_parameters_views_and_other_types() -> None:
    whole = torch.randn(6, 8)
    weight = nn.Parameter(torch.zeros(3, 8))
    buffer, flat = torch.zeros(6, 4, dtype=torch.bfloat16), torch.zeros(20)
    version = weight._version
    target = {
        "a": Block(weight, start=(3, 0), shape=(6, 8)),
        "b": Block(buffer.t(), start=(2, 1), shape=(6, 8)),
        "c": Block(flat[4:10], start=(1,), shape=(8,)),
        "d": Block(torch.zeros(()), start=(), shape=()),
        "e": Block(torch.empty(0, 8), start=(6, 0), shape=(6, 8)),
    }
    source = {"a": whole, "b": whole, "c": whole[0], "d": whole[0, 0], "e": whole}
    fetched = fetch([source], target, cast=True)
    assert torch.equal(weight, whole[3:])
    assert weight.requires_grad
    assert weight._version > version
    assert torch.equal(buffer.t(), whole[2:6, 1:7].bfloat16())
    assert torch.equal(flat[4:10], whole[0, 1:7])
    assert not flat[:4].any()
    assert not flat[10:].any()
    assert torch.equal(target["d"].tensor, whole[0, 0])
    assert fetched.report.bytes == (24 * 4) + (24 * 2) + (6 * 4) + 4


def test_boxes_of_one_leaf_under_several_names() -> None:
    whole = torch.arange(40.0).reshape(5, 8)
    halves = {"w": {"low": wanted(whole, (0, 0), (3, 8)), "high": wanted(whole, (3, 0), (2, 8))}}
    rules = [Rename(Slice("w", dim=0, start=0), f"w.{name}") for name in ("low", "high")]
    fetched = fetch([{"w": whole}], halves, map_path=rules)
    assert torch.equal(torch.cat([halves["w"]["low"].tensor, halves["w"]["high"].tensor]), whole)
    assert fetched.report.bytes == whole.nbytes


def test_a_slice_of_a_slice_names_a_box() -> None:
    whole = torch.arange(40.0).reshape(5, 8)
    mine = torch.zeros(2, 3)
    box = Slice(Slice("w", dim=0, start=1, stop=4), dim=1, start=4, stop=7)
    parts = [{"w": block(whole, (0, 0), (3, 8))}, {"w": block(whole, (2, 0), (3, 8))}]
    fetched = fetch(parts, {"w": mine}, map_path=[Rename(Slice(box, dim=0, start=1), "w")])
    assert torch.equal(mine, whole[2:4, 4:7])
    assert fetched.report.bytes == mine.nbytes
    with pytest.raises(TargetMismatch, match=r"slice 2:5 is out of range: expected at most 3, the size along dim 0 of"):
        fetch([{"w": whole}], {"w": mine}, map_path=[Rename(Slice(box, dim=0, start=2, stop=5), "w")])


# --------------------------------------------------------------------------------------------------- without a target


def test_without_a_target_a_block_arrives() -> None:
    """The box that all sources hold; and if they hold several, the whole as one."""
    whole = torch.arange(40.0).reshape(5, 8)
    parts = [{"w": block(whole, (0, 0), (3, 8)), "v": 1}, {"w": block(whole, (2, 0), (3, 8)), "v": 1}]
    for states, start, shape in (([parts[0]], 0, 3), ([parts[1]] * 2, 2, 3), (parts, 0, 5)):
        got = fetch(states, None).state["w"]
        assert isinstance(got, Block)
        assert (got.start, got.shape) == ((start, 0), (5, 8))
        assert torch.equal(got.tensor, whole[start : start + shape])
    with pytest.raises(NotCovered, match=r"\['w'\]: nobody holds \[2:5, 0:8\]"):
        fetch([{"w": block(whole, (0, 0), (2, 8))}], {"w": torch.zeros(5, 8)})


def test_tied_blocks_stay_tied() -> None:
    whole = torch.arange(8.0)
    halves = [Block(whole[:4], start=(0,), shape=(8,)), Block(whole[4:], start=(4,), shape=(8,))]
    got = fetch([{"a": one, "b": one} for one in halves], None).state
    assert torch.equal(got["a"].tensor, whole)
    assert got["a"].tensor.data_ptr() == got["b"].tensor.data_ptr()


# ------------------------------------------------------------------------------------------------------ what is refused


@pytest.mark.parametrize(
    ("theirs", "mine", "text"),
    [
        (torch.zeros(8), Block(torch.zeros(2), start=(0,), shape=(9,)), r"global shape: source \(8,\), target \(9,\)"),
        (torch.zeros(8), Block(torch.zeros(2).int(), start=(0,), shape=(8,)), "dtype: source torch.float32"),
        (5, Block(torch.zeros(2), start=(0,), shape=(8,)), "source is a value of type int, target is a tensor"),
        (Block(torch.zeros(2), start=(0,), shape=(8,)), 5, "target"),
        (torch.eye(3).to_sparse(), Block(torch.zeros(1, 3), start=(0, 0), shape=(3, 3)), "kind: source is a coo"),
        (Block(torch.zeros(2), start=(0,), shape=(8,)), Block(torch.zeros(2), start=(0,), shape=(9,)), "global shape"),
    ],
)
def test_what_does_not_fit_is_named_and_nothing_is_written(theirs: Any, mine: Any, text: str) -> None:
    beside = torch.zeros(3)
    with pytest.raises(TargetMismatch, match=text):
        fetch([{"w": theirs, "x": torch.ones(3)}], {"w": mine, "x": beside})
    assert not beside.any()


def test_targets_that_share_memory_and_want_other_elements_collide() -> None:
    memory = torch.zeros(4)
    target = {"a": Block(memory, start=(0,), shape=(8,)), "b": Block(memory, start=(4,), shape=(8,))}
    with pytest.raises(TargetMismatch, match="share memory"):
        fetch([{"a": torch.arange(8.0), "b": torch.arange(8.0)}], target)


# ------------------------------------------------------------------------------------------------- delta, atomic, again


def test_what_is_here_stays() -> None:
    whole = torch.randn(1 << 17)
    mine = Block(whole[1000:100_000].clone(), start=(1000,), shape=whole.shape)
    mine.tensor[-1] += 1
    fetched = fetch([{"w": whole}], {"w": mine}, delta=True)
    assert torch.equal(mine.tensor, whole[1000:100_000])
    assert 0 < fetched.report.bytes < mine.tensor.nbytes / 2
    assert fetched.report.bytes + fetched.report.kept_bytes == mine.tensor.nbytes


def test_a_plan_for_boxes_is_used_again() -> None:
    whole = torch.zeros(8, 8)
    with transfuse.serve({"w": whole}, token=TOKEN, timeout=20) as server:
        for value in (1.0, 2.0):
            with server.mutating():
                whole.fill_(value)
            mine = wanted(whole, (2, 2), (3, 3))
            other = wanted(whole, (3, 2), (3, 3))
            for one in (mine, other):
                transfuse.fetch(server.address, {"w": one}, token=TOKEN, timeout=20)
                assert (one.tensor == value).all()


class Failing(Passing):
    """A source that fails when its first bytes should leave."""

    def send(self, tensors: list[torch.Tensor], rank: int, tag: int) -> Any:
        if sum(one.numel() * one.element_size() for one in tensors) > 1 << 13:
            raise RuntimeError("this source fails now")
        return super().send(tensors, rank, tag)


@pytest.mark.parametrize("atomic", [False, True])
def test_replicas_of_a_box_replace_a_source_that_fails(atomic: bool) -> None:
    whole = torch.randn(1 << 19)
    third = len(whole) // 3
    # Every element is held twice, by boxes that overlap.
    parts = [((0,), (2 * third,)), ((third,), (len(whole) - third,)), ((0,), (third + 5,))]
    parts.append(((2 * third - 5,), (len(whole) - 2 * third + 5,)))
    sources = {rank: {"w": block(whole, *part)} for rank, part in enumerate(parts)}
    mine = wanted(whole, (100,), (len(whole) - 200,))
    moved = move(
        sources,
        {4: {"w": mine}},
        wrap=lambda rank, pg: Failing(pg) if rank == 0 else pg,
        atomic=atomic,
    )[4].get()
    assert torch.equal(mine.tensor, whole[100:-100])
    assert set(moved.report.failed) == {0}
    assert not moved.report.by_source.get(0)


def test_healing_of_ranks_that_hold_boxes() -> None:
    """Two replicas of two halves; one rank of each half is new."""
    whole = torch.arange(10.0)

    def work(rank: int, pg: Any) -> Any:
        start, size = ((0,), (6,)) if rank % 2 == 0 else ((6,), (4,))
        new = rank >= 2
        mine = wanted(whole, start, size) if new else block(whole, start, size)
        beside = torch.full((3,), 0.0 if new else 7.0)
        state = {"moment": mine, "plain": beside}
        step = transfuse.heal(lambda: state, group=pg, step=None if new else 4, timeout=20)
        assert step == 4
        assert torch.equal(mine.tensor, cut(whole, start, size))
        assert beside.tolist() == [7.0] * 3
        return step.report.bytes if step.report is not None and new else None

    with Ranks(4) as ranks:
        found = [outcome.get() for outcome in ranks.outcomes(work)]
    assert found == [None, None, 6 * 4 + 12, 4 * 4 + 12]


def test_dtensors_take_from_blocks_and_give_to_them() -> None:
    whole = torch.arange(30.0).reshape(5, 6)
    target = shard(torch.zeros(5, 6), [2, 3], 2, Replicate())
    assert isinstance(target, DTensor)
    move({0: {"w": block(whole, (0, 0), (5, 4))}, 1: {"w": block(whole, (0, 3), (5, 3))}}, {2: {"w": target}})[2].get()
    assert torch.equal(plain(target), whole)
