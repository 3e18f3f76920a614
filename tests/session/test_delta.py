"""Delta: what a receiver already has does not travel."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.distributed.tensor import Replicate, Shard

from shards import move, plain, shard

MIB = 1 << 20


def clustered(whole: torch.Tensor, share: float, clusters: int, seed: int = 0) -> torch.Tensor:
    """The same with so large a share of its elements changed, in a few places."""
    changed, generator = whole.clone(), torch.Generator().manual_seed(seed)
    length = int(whole.numel() * share / clusters)
    for _ in range(clusters):
        start = int(torch.randint(whole.numel() - length, (1,), generator=generator))
        changed.view(-1)[start : start + length] += 1
    return changed


@pytest.fixture(params=[False, True], ids=["group", "memory"])
def same_host(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


def test_nothing_changed_moves_nothing(same_host: bool) -> None:
    whole = torch.randn(2 * MIB)
    (moved,) = [
        o.get() for o in move({0: {"w": whole}}, {1: {"w": whole.clone()}}, delta=True, same_host=same_host).values()
    ]
    assert torch.equal(moved.state["w"], whole)
    assert (moved.report.bytes, moved.report.kept_bytes) == (0, whole.nbytes)
    assert "kept" in str(moved.report)


def test_a_few_changes_move_a_few_blocks(same_host: bool) -> None:
    whole = torch.randn(16 * MIB)
    target = clustered(whole, 0.01, 4)
    moved = move({0: {"w": whole}}, {1: {"w": target}}, delta=True, same_host=same_host)[1].get()
    assert torch.equal(target, whole)
    assert 0 < moved.report.bytes <= 0.03 * whole.nbytes
    assert moved.report.bytes + moved.report.kept_bytes == whole.nbytes


def test_everything_changed_moves_everything_once(same_host: bool) -> None:
    whole = torch.randn(MIB)
    target = whole + 1
    moved = move({0: {"w": whole}}, {1: {"w": target}}, delta=True, same_host=same_host)[1].get()
    assert torch.equal(target, whole)
    assert (moved.report.bytes, moved.report.kept_bytes) == (whole.nbytes, 0)


@pytest.mark.parametrize("options", [{}, {"atomic": True}, {"verify": True}], ids=["", "atomic", "verified"])
def test_with_other_shardings_and_several_sources(same_host: bool, options: dict[str, Any]) -> None:
    """Two shards and two replicas of each into three shards along the other dimension."""
    whole = torch.randn(512, 900)
    held = whole.clone()
    held[100, 300:600] = 7.0
    mesh = [[0, 1], [2, 3]]
    sources = {rank: {"w": shard(whole, mesh, rank, Replicate(), Shard(0))} for rank in range(4)}
    targets = {rank: {"w": shard(held, [4, 5, 6], rank, Shard(1))} for rank in (4, 5, 6)}
    for rank, outcome in move(sources, targets, delta=True, same_host=same_host, **options).items():
        moved = outcome.get()
        mine = plain(shard(whole, [4, 5, 6], rank, Shard(1)))
        assert torch.equal(plain(moved.target["w"]), mine)
        assert moved.report.bytes + moved.report.kept_bytes == mine.nbytes
        assert moved.report.bytes < mine.nbytes
        assert (moved.report.bytes > 0) == (rank == 5)


def test_tied_transposed_and_tiny_leaves(same_host: bool) -> None:
    tied = torch.randn(300, 200)
    state: dict[str, Any] = {
        "a": tied,
        "b": tied,
        "t": torch.randn(64, 48).t(),
        "s": torch.tensor(3.0),
        "e": torch.empty(0),
        "n": 5,
    }
    other = torch.randn(300, 200)
    target = {"a": other, "b": other, "t": state["t"].clone(), "s": torch.tensor(3.0), "e": torch.empty(0), "n": 4}
    moved = move({0: state}, {1: target}, delta=True, same_host=same_host)[1].get()
    for name in ("a", "b", "t", "s", "e"):
        assert torch.equal(target[name], state[name]), name
    assert moved.state["n"] == 5
    assert moved.report.bytes >= tied.nbytes


def test_targets_that_are_not_tied_as_the_source_is(same_host: bool) -> None:
    """One of the two holds the right bytes already: that says nothing about the other."""
    tied = torch.randn(1000)
    target = {"a": tied.clone(), "b": torch.zeros(1000)}
    move({0: {"a": tied, "b": tied}}, {1: target}, delta=True, same_host=same_host)[1].get()
    assert torch.equal(target["a"], tied)
    assert torch.equal(target["b"], tied)


def test_without_a_target_everything_comes() -> None:
    whole = torch.randn(1000)
    moved = move({0: {"w": whole}}, {1: None}, delta=True)[1].get()
    assert torch.equal(moved.state["w"], whole)
    assert (moved.report.bytes, moved.report.kept_bytes) == (whole.nbytes, 0)


def test_negative_zero_and_nan_are_bits(same_host: bool) -> None:
    """What compares equal is not the same, and what does not may be."""
    whole, target = torch.tensor([0.0, float("nan"), 1.0]), torch.tensor([-0.0, float("nan"), 1.0])
    moved = move({0: {"w": whole}}, {1: {"w": target}}, delta=True, same_host=same_host)[1].get()
    assert target.view(torch.int32).tolist() == whole.view(torch.int32).tolist()
    assert moved.report.bytes == whole.nbytes
