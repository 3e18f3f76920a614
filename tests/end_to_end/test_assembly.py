"""States put together from sources that hold other pieces of it, under other names, or as other types.

Random pairs of shardings are in test_resharding.py, against DCP; here is what these do not have.
"""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from shards import mesh_of, move, plain, shard
from transfuse import Concat, NotCovered, PeerError, ReceiveFailed, Rename, Slice, SourcesDiffer, Split, TargetMismatch

FLOATS = [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.float8_e4m3fn]


@pytest.fixture(params=["group", "memory", "brief"], autouse=True)
def how(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """On both routes, and with descriptions that come only on request."""
    if request.param == "brief":
        monkeypatch.setenv("TRANSFUSE_BRIEF_BYTES", "1")
    return {"same_host": request.param == "memory"}


def bits(tensor: torch.Tensor) -> list[int]:
    result: list[int] = tensor.contiguous().view(torch.uint8).flatten().tolist()
    return result


# ------------------------------------------------------------------------------------------------------- shardings


def test_one_source_that_holds_another_shard_is_not_enough(how: dict[str, Any]) -> None:
    whole = torch.randn(8, 4)
    target = {"w": shard(torch.zeros(8, 4), [2, 3], 3, Shard(0))}
    error = move({0: {"w": shard(whole, [0, 1], 0, Shard(0))}}, {3: target}, **how)[3].error
    assert isinstance(error, NotCovered)
    assert "['w']: nobody holds [4:8, 0:4]" in str(error)
    assert not plain(target["w"]).any()


def test_strided_rows_are_not_taken_for_a_region(how: dict[str, Any]) -> None:
    """Rows 0, 1, 4, 5 begin where rows 0 to 3 do, and are as many."""
    whole = torch.arange(8.0)
    source = {"w": shard(whole, [0, 1], 0, _StridedShard(0, split_factor=2))}
    assert plain(source["w"]).tolist() == [0, 1, 4, 5]
    target = {"w": shard(torch.zeros(8), [2, 3], 2, Shard(0))}
    assert isinstance(move({0: source}, {2: target}, **how)[2].error, NotCovered)
    both = {rank: {"w": shard(whole, [0, 1], rank, _StridedShard(0, split_factor=2))} for rank in (0, 1)}
    move(both, {2: target}, **how)[2].get()
    assert plain(target["w"]).tolist() == [0, 1, 2, 3]


def test_partial_comes_from_the_same_place_of_the_mesh(how: dict[str, Any]) -> None:
    """Each rank of a Partial holds a part of a sum, of the same shape as the others'."""
    parts = {rank: torch.full((4, 4), float(rank + 1)) for rank in (0, 1)}
    sources = {rank: {"w": shard(parts[rank], [0, 1], rank, Partial())} for rank in (0, 1)}
    targets = {rank: {"w": shard(torch.zeros(4, 4), [2, 3], rank, Partial())} for rank in (2, 3)}
    for rank, outcome in move(sources, targets, **how).items():
        outcome.get()
        assert torch.equal(plain(targets[rank]["w"]), parts[rank - 2])


@pytest.mark.parametrize("target", [Shard(0), Replicate(), None], ids=["shard", "replicate", "plain"])
def test_partial_goes_nowhere_else(how: dict[str, Any], target: Any) -> None:
    sources = {rank: {"w": shard(torch.ones(4, 4), [0, 1], rank, Partial())} for rank in (0, 1)}
    w = torch.zeros(4, 4) if target is None else shard(torch.zeros(4, 4), [2], 2, target)
    error = move(sources, {2: {"w": w}}, **how)[2].error
    assert isinstance(error, TargetMismatch)
    assert "Partial" in str(error)
    assert "redistribute()" in str(error)
    assert not plain(w).any()


def test_fresh_on_a_mesh_of_ones_own(how: dict[str, Any]) -> None:
    """Without a target shards are put together on mesh=, or on a mesh of one rank."""
    whole = torch.randn(7, 6)
    sources = {rank: {"w": shard(whole, [0, 1], rank, Shard(0)), "n": rank * 0} for rank in (0, 1)}
    moved = move(sources, {2: None}, **how)[2].get()
    assert torch.equal(plain(moved.state["w"]), whole)
    moved = move(sources, {3: None}, mesh=mesh_of([2, 3, 4], 3), **how)[3].get()
    assert moved.state["w"].placements == (Shard(0),)
    assert torch.equal(plain(moved.state["w"]), whole[3:6])


def test_stages_of_a_pipeline_complete_each_other(how: dict[str, Any]) -> None:
    first, second = torch.randn(5), torch.randn(6)
    target = {"first": torch.zeros(5), "second": torch.zeros(6), "step": 0}
    sources = {0: {"first": first, "step": 3}, 1: {"second": second, "step": 3}}
    moved = move(sources, {2: target}, **how)[2].get()
    assert torch.equal(target["first"], first)  # type: ignore[arg-type]
    assert torch.equal(target["second"], second)  # type: ignore[arg-type]
    assert moved.state["step"] == 3
    assert moved.report.by_source == {0: first.nbytes, 1: second.nbytes}


def test_sources_that_contradict_each_other_are_refused(how: dict[str, Any]) -> None:
    sources = {0: {"a": torch.zeros(5), "step": 3}, 1: {"a": torch.zeros(5), "step": 4}}
    error = move(sources, {2: {"a": torch.zeros(5), "step": 0}}, **how)[2].error
    assert isinstance(error, SourcesDiffer)
    assert "['step']" in str(error)


def test_tied_weights_come_once(how: dict[str, Any]) -> None:
    whole = torch.randn(8, 8)
    tied = {rank: shard(whole, [0, 1], rank, Shard(0)) for rank in (0, 1)}
    sources = {rank: {"in": tied[rank], "out": tied[rank]} for rank in (0, 1)}
    w = shard(torch.zeros(8, 8), [2], 2, Shard(0))
    moved = move(sources, {2: {"in": w, "out": w}}, **how)[2].get()
    assert torch.equal(plain(w), whole)
    assert moved.report.bytes == whole.nbytes
    apart = {name: shard(torch.zeros(8, 8), [2], 2, Shard(0)) for name in ("in", "out")}
    moved = move(sources, {2: apart}, **how)[2].get()
    assert torch.equal(plain(apart["in"]), whole)
    assert torch.equal(plain(apart["out"]), whole)
    assert moved.report.bytes == whole.nbytes


def _tied_on(whole: torch.Tensor, ranks: list[Any], rank: int) -> dict[str, Any]:
    w = shard(whole, ranks, rank, Shard(0))
    return {"in": w, "out": w}


def _emptied(state: dict[str, Any]) -> dict[str, Any]:
    """Empty shards that do not even share a storage."""
    return state | {
        "out": DTensor.from_local(
            state["out"].to_local().clone(),
            state["out"].device_mesh,
            [Shard(0)],
            run_check=False,
            shape=state["out"].shape,
            stride=state["out"].stride(),
        )
    }


@pytest.mark.parametrize("rows", [1, 3], ids="rows={}".format)
@pytest.mark.parametrize("order", [(0, 1, 2, 3), (3, 2, 1, 0)], ids=["full first", "empty first"])
@pytest.mark.parametrize("split", [False, True], ids=["one storage", "two storages"])
def test_weights_are_tied_though_some_shards_of_them_are_empty(
    how: dict[str, Any], rows: int, order: tuple[int, ...], split: bool
) -> None:
    """Ranks with empty shards cannot say what is tied, be they asked first or last; those with elements can."""
    whole = torch.randn(rows, 8)
    mesh = list(order)
    sources = {rank: _tied_on(whole, mesh, rank) for rank in mesh}
    if split:
        sources |= {rank: _emptied(sources[rank]) for rank in mesh[rows:]}
    tied = shard(torch.zeros(rows, 8), [4], 4, Shard(0))
    moved = move(sources, {4: {"in": tied, "out": tied}}, **how)[4].get()
    assert torch.equal(plain(tied), whole)
    assert moved.report.bytes == whole.nbytes
    fresh = move(sources, {4: None}, **how)[4].get().state
    assert torch.equal(plain(fresh["out"]), whole)
    assert plain(fresh["in"]).data_ptr() == plain(fresh["out"]).data_ptr()


def test_neighbours_in_one_buffer_are_not_tied_where_their_shards_are_empty(how: dict[str, Any]) -> None:
    """Empty shards of two weights in one buffer look as those of tied weights do."""
    whole = {name: torch.randn(1, 8) for name in "ab"}

    def source(rank: int) -> dict[str, Any]:
        mesh = mesh_of([1, 0], rank)
        buffer = torch.cat([whole["a"], whole["b"]]) if rank == 1 else torch.empty(0, 8)
        size = 1 if rank == 1 else 0
        return {
            name: DTensor.from_local(
                buffer[i * size : (i + 1) * size],
                mesh,
                [Shard(0)],
                run_check=False,
                shape=torch.Size((1, 8)),
                stride=(8, 1),
            )
            for i, name in enumerate("ab")
        }

    sources = {rank: source(rank) for rank in (0, 1)}
    target = {name: torch.zeros(1, 8) for name in "ab"}
    move(sources, {2: target}, **how)[2].get()
    assert all(torch.equal(target[name], whole[name]) for name in "ab")
    fresh = move(sources, {2: None}, **how)[2].get().state
    assert all(torch.equal(plain(fresh[name]), whole[name]) for name in "ab")
    memory = torch.zeros(1, 8)
    error = move(sources, {2: {"a": memory, "b": memory}}, **how)[2].error
    assert isinstance(error, TargetMismatch)
    assert "untie the targets, or tie the source" in str(error)
    assert not memory.any()


def test_tied_targets_of_what_nobody_here_holds(how: dict[str, Any]) -> None:
    """To untie the targets would not help."""
    source = _tied_on(torch.randn(1, 8), [0, 1], 1)
    tied = torch.zeros(1, 8)
    error = move({1: source}, {2: {"in": tied, "out": tied}}, **how)[2].error
    assert isinstance(error, NotCovered)
    assert "['in']: nobody holds [0:1, 0:8]" in str(error)


def test_targets_that_share_memory_are_refused(how: dict[str, Any]) -> None:
    sources = {rank: {n: shard(torch.randn(8), [0, 1], rank, Shard(0)) for n in "ab"} for rank in (0, 1)}
    memory = torch.zeros(12)
    target = {"a": memory[:8], "b": memory[4:]}
    error = move(sources, {2: target}, **how)[2].error
    assert isinstance(error, TargetMismatch)
    assert "share memory" in str(error)
    assert not memory.any()


def test_parameters_stay_parameters_and_are_told(how: dict[str, Any]) -> None:
    whole = torch.randn(6, 4)
    # (Only one: torch remembers operations on DTensors with the mesh of whichever rank did them first in a process.)
    sources = {rank: {"w": shard(whole, [0, 1], rank, Shard(0))} for rank in (0, 1)}
    parameter = nn.Parameter(shard(torch.zeros(6, 4), [2, 3], 2, Shard(1)))
    version = parameter._version
    moved = move(sources, {2: {"w": parameter}}, **how)[2].get()
    assert moved.state["w"] is parameter
    assert parameter._version > version
    assert torch.equal(plain(parameter).detach(), whole[:, :2])


def test_a_rank_is_its_own_source(how: dict[str, Any]) -> None:
    whole = torch.randn(13, 5)
    sources = {rank: {"w": shard(whole, [0, 1, 2, 3], rank, Shard(0))} for rank in range(4)}
    targets = {rank: {"w": shard(torch.zeros(13, 5), [0, 1, 2], rank, Shard(0))} for rank in range(3)}
    for rank, outcome in move(sources, targets, **how).items():
        mine = plain(shard(whole, [0, 1, 2], rank, Shard(0)))
        assert torch.equal(plain(outcome.get().target["w"]), mine)
        assert outcome.get().report.by_source.keys() >= {rank}


def test_sign_bits_are_part_of_what_sources_agree_on(how: dict[str, Any]) -> None:
    """One holds a conjugate view, the others the conjugated memory: the same values, but not the same bytes."""
    z = torch.randn(4, dtype=torch.complex64)
    sources = {0: {"z": z.conj()}, 1: {"z": z.conj().resolve_conj()}, 2: {"z": z.conj().resolve_conj()}}
    target = {"z": torch.zeros(4, dtype=torch.complex64)}
    moved = move(sources, {3: target}, **how)[3].get()
    assert torch.equal(target["z"], z.conj())
    assert set(moved.report.by_source) <= {1, 2}


def test_a_partial_is_no_replica_of_a_whole(how: dict[str, Any]) -> None:
    whole = torch.randn(500_000)
    sources = {rank: {"w": whole.clone()} for rank in (0, 1)}
    sources[2] = {"w": shard(torch.ones(500_000), [2], 2, Partial())}
    target = {"w": torch.zeros(500_000)}
    moved = move(sources, {3: target}, **how)[3].get()
    assert torch.equal(target["w"], whole)
    assert 2 not in moved.report.by_source


def test_every_source_agrees_with_every_other(how: dict[str, Any]) -> None:
    """The first has neither leaf: that the two others each fit it does not mean that they fit each other."""
    sources = {
        0: {"a": torch.ones(4)},
        1: {"b": torch.ones(4), "x": torch.ones(4)},
        2: {"c": torch.ones(4), "x": torch.ones(8)},
    }
    target = {name: torch.zeros(4) for name in "abcx"}
    error = move(sources, {3: target}, **how)[3].error
    assert isinstance(error, NotCovered)
    assert "['c']: source 2 holds it, but is not used" in str(error)
    assert not any(leaf.any() for leaf in target.values()), "nothing was written"
    del target["c"]
    move(sources, {3: target}, **how)[3].get()
    assert all(leaf.all() for leaf in target.values())


def test_who_wants_only_the_first_stage_may_name_all(how: dict[str, Any]) -> None:
    sources = {0: {"first": torch.ones(4)}, 1: {"second": torch.ones(4)}}
    for name in ("first", "second"):
        target = {name: torch.zeros(4)}
        move(sources, {2: target}, **how)[2].get()
        assert target[name].all()


@pytest.mark.parametrize("strict", [False, True])
def test_a_leaf_that_only_a_stage_has_lands_nowhere(how: dict[str, Any], strict: bool) -> None:
    sources = {0: {"first": torch.ones(4)}, 1: {"second": torch.ones(4)}}
    target = {"first": torch.zeros(4), "second": torch.zeros(4)}
    move(sources, {2: target}, strict=strict, **how)[2].get()
    assert target["first"].all()
    assert target["second"].all()
    sources[1]["extra"] = torch.full((4,), 5.0)
    target = {"first": torch.zeros(4), "second": torch.zeros(4)}
    outcome = move(sources, {2: target}, strict=strict, **how)[2]
    if strict:
        assert isinstance(outcome.error, TargetMismatch)
        assert "['extra']: missing in the target" in str(outcome.error)
    else:
        outcome.get()
        assert target["second"].tolist() == [1.0] * 4


def test_a_function_fetches_a_part_and_strict_checks_that_it_is_whole(how: dict[str, Any]) -> None:
    sources = {0: {"first": torch.ones(4), "extra": torch.ones(4)}, 1: {"second": torch.ones(4)}}
    target = {"first": torch.zeros(4), "second": torch.zeros(4)}
    move(sources, {2: target}, strict=True, map_path=lambda path: path if path in target else None, **how)[2].get()
    assert target["first"].all()
    assert target["second"].all()
    target = {"first": torch.zeros(4), "third": torch.zeros(4)}
    chosen = move(sources, {2: target}, strict=True, map_path=lambda path: path if path in target else None, **how)
    assert isinstance(error := chosen[2].error, TargetMismatch)
    assert error.mismatches == ("['third']: only in the target",)
    assert not target["first"].any()


def test_a_stage_that_is_late_is_waited_for(how: dict[str, Any]) -> None:
    sources = {0: {"first": torch.ones(4)}, 1: {"second": torch.ones(4)}}
    target = {"first": torch.zeros(4), "second": torch.zeros(4)}

    def late(rank: int, pg: Any) -> Any:
        time.sleep(2 if rank == 1 else 0)
        return pg

    move(sources, {2: target}, wrap=late, seconds=5, **how)[2].get()
    assert target["second"].all()


def test_what_is_not_sharded_comes_with_what_is(how: dict[str, Any]) -> None:
    """Repeated elements, arrays, tied weights, and what only the sources have; fresh and in place."""
    whole, tied = torch.randn(6, 4), torch.randn(3, 3)
    sources: dict[int, dict[str, Any]] = {
        rank: {
            "d": shard(whole, [0, 1], rank, Shard(0)),
            "repeated": torch.arange(3.0)[:, None].expand(3, 4),
            "array": np.arange(5000),
            "a": tied,
            "b": tied,
            "own": nn.Parameter(torch.ones(2), requires_grad=rank == 0),
        }
        for rank in (0, 1)
    }
    for target in (None, {"d": torch.zeros(6, 4), "array": None, "a": (x := torch.zeros(3, 3)), "b": x}):
        state = move(sources, {2: target}, **how)[2].get().state
        assert torch.equal(plain(state["d"]), whole)
        assert torch.equal(state["repeated"], sources[0]["repeated"])
        assert state["repeated"].stride() == (1, 0)
        assert (state["array"] == np.arange(5000)).all()
        assert torch.equal(state["a"], tied)
        assert state["a"].data_ptr() == state["b"].data_ptr()
        assert torch.equal(state["own"], torch.ones(2))


def test_tied_weights_of_sources_on_meshes_of_their_own(how: dict[str, Any]) -> None:
    """Replicas that know nothing of each other's meshes, fresh and in place."""
    whole = torch.randn(8, 4)
    sources = {rank: {n: shard(whole, [rank], rank, Shard(0)) for n in "a"} for rank in (0, 1)}
    for rank in (0, 1):
        sources[rank]["b"] = sources[rank]["a"]
    w = torch.zeros(8, 4)
    moved = move(sources, {2: {"a": w, "b": w}}, **how)[2].get()
    assert torch.equal(w, whole)
    assert moved.report.bytes == whole.nbytes
    state = move(sources, {2: None}, **how)[2].get().state
    assert plain(state["a"]).data_ptr() == plain(state["b"]).data_ptr()


def test_columns_of_one_fused_target(how: dict[str, Any]) -> None:
    q, k = torch.randn(1200, 512), torch.randn(1200, 512)
    sources = {rank: {"q": shard(q, [0, 1], rank, Shard(0)), "k": shard(k, [0, 1], rank, Shard(0))} for rank in (0, 1)}
    fused = torch.zeros(1200, 1024)
    move(sources, {2: {"q": fused[:, :512], "k": fused[:, 512:]}}, **how)[2].get()
    assert torch.equal(fused, torch.cat([q, k], dim=1))


@pytest.mark.parametrize("key", [float("nan"), (1, float("nan")), "x" * 300], ids=["nan", "tuple", "long"])
def test_keys_that_paths_do_not_tell_apart(how: dict[str, Any], key: Any) -> None:
    """A NaN equals nothing, a long name is cut short: neither makes one tensor of two."""
    other = float("nan") if isinstance(key, float) else (1, float("nan")) if isinstance(key, tuple) else "x" * 301
    first, second = torch.randn(8), torch.randn(8)
    # Meshes of their own, so that there are two descriptions.
    sources = {
        rank: {key: shard(first, [rank], rank, Shard(0)), other: shard(second, [rank], rank, Shard(0))}
        for rank in (0, 1)
    }
    target = {key: torch.zeros(8), other: torch.zeros(8)}
    move(sources, {2: target}, strict=True, **how)[2].get()
    assert [leaf.tolist() for leaf in target.values()] == [first.tolist(), second.tolist()]
    fresh = move(sources, {2: None}, **how)[2].get().state
    assert [plain(leaf).tolist() for leaf in fresh.values()] == [first.tolist(), second.tolist()]


def test_rules_find_a_nan(how: dict[str, Any]) -> None:
    whole = torch.randn(8)
    sources = {rank: {float("nan"): shard(whole, [0, 1], rank, Shard(0))} for rank in (0, 1)}
    target = {"m": {float("-nan"): torch.zeros(8)}}
    move(sources, {2: target}, map_path={"nan": "m.nan"}, strict=True, **how)[2].get()
    (got,) = target["m"].values()
    assert torch.equal(got, whole)


# --------------------------------------------------------------------------------------------------------- failures


@pytest.mark.parametrize("atomic", [False, True])
def test_a_source_that_alone_held_something_ends_the_receive(how: dict[str, Any], atomic: bool) -> None:
    """At once, and not after everybody else has been waited for."""

    class Refusing:
        def state_dict(self) -> None:
            raise RuntimeError("no state today")

    whole = torch.randn(8, 8)
    sources: dict[int, Any] = {0: {"w": shard(whole, [0, 1], 0, Shard(0))}, 1: {"w": {1, 2, Refusing()}}}
    target = {"w": shard(torch.zeros(8, 8), [2], 2, Shard(0))}
    began = time.monotonic()
    error = move(sources, {2: target}, atomic=atomic, **how)[2].error
    assert time.monotonic() - began < 9
    assert isinstance(error, NotCovered | ReceiveFailed | PeerError)
    assert not plain(target["w"]).any()


def test_a_replica_that_never_comes_is_not_missed(how: dict[str, Any]) -> None:
    whole = torch.randn(8, 8)
    mesh = [[0, 1], [2, 3]]
    sources = {rank: {"w": shard(whole, mesh, rank, Replicate(), Shard(0))} for rank in range(4)}
    target = {"w": torch.zeros(8, 8)}

    class Absent(Exception):
        pass

    def wrap(rank: int, pg: Any) -> Any:
        if rank == 3:
            raise Absent
        return pg

    moved = move(sources, {4: target}, wrap=wrap, seconds=4, **how)[4].get()
    assert torch.equal(target["w"], whole)
    assert set(moved.report.by_source) <= {0, 1, 2}


# ------------------------------------------------------------------------------------------------------------ casts


@pytest.mark.parametrize("theirs", FLOATS, ids=str)
@pytest.mark.parametrize("mine", FLOATS, ids=str)
def test_casts_are_torchs(how: dict[str, Any], theirs: torch.dtype, mine: torch.dtype) -> None:
    special = [0.0, -0.0, 1.0, -1.5, 3e-5, 448.0, 1e-40, 6e4, float("inf"), float("-inf"), float("nan"), 1 / 3]
    whole = torch.cat([torch.tensor(special), torch.randn(500)]).to(theirs)
    target = {"w": torch.zeros(2 * whole.numel(), dtype=mine)[::2], "i": torch.zeros(3, dtype=torch.int64)}
    source = {"w": whole, "i": torch.arange(3)}
    moved = move({0: source}, {1: target}, cast=True, **how)[1].get()
    assert bits(target["w"]) == bits(whole.to(mine))
    assert torch.equal(target["i"], source["i"])
    assert moved.report.bytes == whole.numel() * min(theirs.itemsize, mine.itemsize) + 24


def test_casts_of_shards(how: dict[str, Any]) -> None:
    whole = torch.randn(64, 48)
    sources = {rank: {"w": shard(whole, [0, 1], rank, Shard(1))} for rank in (0, 1)}
    target = {"w": shard(torch.zeros(64, 48, dtype=torch.bfloat16), [2, 3, 4], 3, Shard(0))}
    for delta, expected in ((False, 22 * 48 * 2), (True, 0)):
        moved = move(sources, {3: target}, cast=True, delta=delta, **how)[3].get()
        assert torch.equal(plain(target["w"]), whole[22:44].to(torch.bfloat16))
        assert moved.report.bytes == expected


def test_a_wider_target_is_always_filled_anew(how: dict[str, Any]) -> None:
    """What rounds to the source's value is not the source's value."""
    whole = torch.randn(100).bfloat16()
    target = whole.float() * (1 + 2**-12)
    assert torch.equal(target.bfloat16(), whole)
    move({0: {"w": whole}}, {1: {"w": target}}, cast=True, delta=True, **how)[1].get()
    assert torch.equal(target, whole.float())


def test_another_dtype_is_an_error_without_cast(how: dict[str, Any]) -> None:
    target = {"w": torch.zeros(4, dtype=torch.bfloat16)}
    error = move({0: {"w": torch.ones(4)}}, {1: target}, **how)[1].error
    assert isinstance(error, TargetMismatch)
    assert "dtype: source torch.float32, target torch.bfloat16" in str(error)
    error = move({0: {"w": torch.arange(4)}}, {1: target}, cast=True, **how)[1].error
    assert isinstance(error, TargetMismatch)
    assert "only floating types are converted" in str(error)
    assert not target["w"].any()


# --------------------------------------------------------------------------------------------------------- renaming


def test_fused_weights(how: dict[str, Any]) -> None:
    """Trainer names and shards to inference names and shards: q, k and v are one, gate_up is two."""
    q, k, v, gate_up, norm = torch.randn(8, 6), torch.randn(4, 6), torch.randn(4, 6), torch.randn(10, 6), torch.randn(6)
    sources = {
        rank: {
            "layers.0.q": shard(q, [0, 1], rank, Shard(0)),
            "layers.0.k": shard(k, [0, 1], rank, Shard(0)),
            "layers.0.v": shard(v, [0, 1], rank, Shard(0)),
            "layers.0.gate_up": shard(gate_up, [0, 1], rank, Shard(1)),
            "layers.0.norm": norm,
        }
        for rank in (0, 1)
    }
    rules = [
        Concat(["layers.*.q", "layers.*.k", "layers.*.v"], "model.blocks.*.qkv"),
        Split("layers.*.gate_up", ["model.blocks.*.gate", "model.blocks.*.up"]),
        Rename("layers.*.norm", "model.blocks.*.norm"),
    ]
    qkv, gate, up = torch.cat([q, k, v]), gate_up[:5], gate_up[5:]

    def blank(rank: int) -> dict[str, Any]:
        half = torch.bfloat16
        return {
            "model": {
                "blocks.0.qkv": shard(torch.zeros(16, 6, dtype=half), [2, 3, 4], rank, Shard(0)),
                "blocks.0.gate": shard(torch.zeros(5, 6, dtype=half), [2, 3, 4], rank, Shard(0)),
                "blocks.0.up": torch.zeros(5, 6, dtype=half),
                "blocks.0.norm": torch.zeros(6, dtype=half),
                "own": torch.full((2,), 7.0),
            }
        }

    targets = {rank: blank(rank) for rank in (2, 3, 4)}
    for rank, outcome in move(sources, targets, map_path=rules, cast=True, strict=False, **how).items():
        model = outcome.get().state["model"]
        assert torch.equal(plain(model["blocks.0.qkv"]), plain(shard(qkv.bfloat16(), [2, 3, 4], rank, Shard(0))))
        assert torch.equal(plain(model["blocks.0.gate"]), plain(shard(gate.bfloat16(), [2, 3, 4], rank, Shard(0))))
        assert torch.equal(model["blocks.0.up"], up.bfloat16())
        assert torch.equal(model["blocks.0.norm"], norm.bfloat16())
        assert model["own"].tolist() == [7.0, 7.0]


@pytest.mark.parametrize("options", [{"atomic": True}, {"atomic": True, "delta": True}], ids=["atomic", "and delta"])
def test_parts_of_one_target_that_lands_aside(how: dict[str, Any], options: dict[str, Any]) -> None:
    """Each rule brings a part of it, and all of them must be there in the end; tied targets too."""
    q, k = torch.randn(40, 6), torch.randn(24, 6)
    sources = {rank: {"q": shard(q, [0, 1], rank, Shard(0)), "k": k} for rank in (0, 1)}
    tied = torch.zeros(64, 6)
    target = {"qk": tied, "also": tied, "k": torch.zeros(24, 6)}
    rules = [Concat(["q", "k"], "qk"), Concat(["q", "k"], "also"), Rename("k", "k")]
    move(sources, {2: target}, map_path=rules, **options, **how)[2].get()
    assert torch.equal(tied, torch.cat([q, k]))
    assert torch.equal(target["k"], k)


def test_leaves_of_several_tensors_are_renamed_whole(how: dict[str, Any]) -> None:
    dense = torch.tensor([[0.0, 2.0], [3.0, 0.0]])
    source = {"m": {"sparse": dense.to_sparse_csr(), "rng": np.arange(3000), "w": torch.ones(3)}}
    target = {"sparse": torch.tensor([[0.0, 1.0], [1.0, 0.0]]).to_sparse_csr(), "rng": None, "w": torch.zeros(3)}
    state = move({0: source}, {1: target}, map_path={"m.*": "*"}, **how)[1].get().state
    assert torch.equal(state["sparse"].to_dense(), dense)
    assert (state["rng"] == np.arange(3000)).all()
    assert state["w"].all()


def test_a_mapping_a_callable_and_a_slice(how: dict[str, Any]) -> None:
    w = torch.randn(6, 4)
    for rules in ({"a.w": "b"}, lambda name: "b", [Rename("a.w", "b")]):
        target = {"b": torch.zeros(6, 4)}
        move({0: {"a": {"w": w}}}, {1: target}, map_path=rules, **how)[1].get()
        assert torch.equal(target["b"], w)
    target = {"b": torch.zeros(2, 4)}
    moved = move({0: {"a": {"w": w}}}, {1: target}, map_path=[Rename(Slice("a.w", 0, 3, 5), "b")], **how)[1].get()
    assert torch.equal(target["b"], w[3:5])
    assert moved.report.bytes == target["b"].nbytes


def test_rules_that_do_not_fit_are_refused_before_anything_moves(how: dict[str, Any]) -> None:
    target = {"qkv": torch.zeros(5, 4)}
    source = {"q": torch.ones(2, 4), "k": torch.ones(2, 4)}
    error = move({0: source}, {1: target}, map_path=[Concat(["q", "k"], "qkv")], **how)[1].error
    assert isinstance(error, TargetMismatch)
    assert "qkv" in str(error)
    assert not target["qkv"].any()


def test_values_are_renamed_too(how: dict[str, Any]) -> None:
    target = {"now": 0, "w": torch.zeros(2)}
    moved = move({0: {"step": 4, "w": torch.ones(2)}}, {1: target}, map_path={"step": "now"}, **how)[1].get()
    assert moved.state["now"] == 4
    assert isinstance(moved.state["w"], torch.Tensor)
    assert not isinstance(moved.state["w"], DTensor)
