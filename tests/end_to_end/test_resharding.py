"""Resharding, judged case by case; and that the judge of it is awake. Functions here run in the pool's workers."""

from __future__ import annotations

import collections
import os
import pathlib
from typing import Any

import numpy as np
import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

import resharding
import transfuse
from resharding import CAMPAIGNS, Case, Held, Move, Moved, Verdict, dcp, from_memory, naive, over_group, run
from transfuse.testing.ranks import ProcessPool

#: Of each 8 leaves: 320 pairs.
ORDINARY = range(40)


def accept(verdict: Verdict, **pairs: int) -> None:
    """No complaints, and this number of pairs judged of each move: a judge that saw nothing has nothing to say."""
    __tracebackhide__ = True
    assert not verdict.complaints, "\n".join(
        [*verdict.complaints[:10], "replay: python -m resharding --seed <case> (in tests/helpers/)"]
    )
    counted: collections.Counter[str] = collections.Counter()
    for name, count in verdict.counts.items():
        counted[name.split(":")[0]] += count
    assert counted == pairs


# --------------------------------------------------------------------------------------------------------- resharding


# The cases take turns at the routes; `make soak` has each of them by both.


def test_over_the_group(pool4: ProcessPool) -> None:
    accept(run(pool4, "anything", ORDINARY[::2], [over_group]), over_group=160)


def test_from_memory(pool4: ProcessPool) -> None:
    accept(run(pool4, "anything", ORDINARY[1::2], [from_memory]), from_memory=160)


def exact_or_refused(case: Case, rank: int, source: Held | None, target: Held | None) -> Moved | None:
    try:
        return over_group(case, rank, source, target)
    except transfuse.TransfuseError:
        refused = {leaf.path: "refused" for leaf in case.leaves}
        return None if target is None else Moved(target.state, left_out=refused)


def test_shards_that_are_no_regions_arrive_exactly_or_are_refused(pool4: ProcessPool) -> None:
    """A _StridedShard that no Shard of the same dimension follows leaves a rank with several runs of rows."""
    accept(run(pool4, "scattered", ORDINARY, [exact_or_refused]), exact_or_refused=40)


@pytest.mark.soak
@pytest.mark.parametrize("start", [0, *range(1000, 2000, 100)])
def test_many(pool4: ProcessPool, start: int) -> None:
    verdict = run(pool4, "anything", range(start, start + 100), [dcp, over_group, from_memory], deadline=600)
    print(dict(verdict.counts))
    accept(verdict, dcp=800, over_group=800, from_memory=800)


# --------------------------------------------------------------------------------------------------------- the oracle


def test_the_oracle_agrees_with_the_judge(pool4: ProcessPool) -> None:
    """The same cases through torch.distributed.checkpoint, so that what passes above is what it gives."""
    verdict = run(pool4, "anything", ORDINARY, [dcp])
    print(dict(verdict.counts))
    accept(verdict, dcp=320)
    assert verdict.counts["dcp: pairs"] >= 310
    assert not list(pathlib.Path("/dev/shm").glob(f"resharding-{os.getpid()}-*"))


@pytest.mark.parametrize("campaign", ["anything", "scattered"])
def test_the_judge_cuts_tensors_as_torch_does(campaign: str) -> None:
    """Without communication, for all ranks of a mesh, in one process."""
    dtensors = 0
    for seed in ORDINARY:
        case = CAMPAIGNS[campaign](seed)
        for leaf in case.leaves:
            whole = resharding.from_bytes(leaf.values(seed), leaf.dtype)
            for layout, ranks in ((leaf.source, case.sources), (leaf.receiver, case.receivers)):
                if layout.kind != "dtensor":
                    continue
                order = torch.tensor(layout.order).reshape(layout.mesh)
                for rank in ranks:
                    mesh = DeviceMesh("cpu", order, _init_backend=False, _rank=rank)
                    theirs = distribute_tensor(whole, mesh, layout.placements, src_data_rank=None).to_local()
                    (indices,) = layout.local(leaf.shape, rank)
                    ours = resharding.Piece.make(indices, leaf.values(seed), leaf.dtype, layout.memory).tensor
                    assert (resharding.to_bytes(ours) == resharding.to_bytes(theirs)).all(), (str(leaf), rank)
                    sizes, offsets = compute_local_shape_and_global_offset(leaf.shape, mesh, layout.placements)
                    assert sizes == theirs.shape == ours.shape
                    if ours.numel():
                        assert offsets == tuple(i[0] for i in indices)
                    dtensors += 1
    assert dtensors > 40


def test_cases_are_of_all_kinds() -> None:
    cases = [Case.draw(seed) for seed in ORDINARY]
    leaves = [leaf for case in cases for leaf in case.leaves]
    layouts = [layout for leaf in leaves for layout in (leaf.source, leaf.receiver)]
    assert {leaf.dtype for leaf in leaves} == set(resharding.DTYPES)
    assert {len(leaf.shape) for leaf in leaves} == set(range(5))
    assert {(leaf.source.kind, leaf.receiver.kind) for leaf in leaves} == {
        (a, b) for a in ("plain", "dtensor", "sharded") for b in ("plain", "dtensor", "sharded")
    }
    assert {len(layout.mesh) for layout in layouts} == set(range(4))
    assert {len(layout.order) for layout in layouts} == set(range(5))
    assert {layout.memory for layout in layouts} == {"contiguous", "transposed", "offset", "gaps"}
    assert any(list(layout.order) != sorted(layout.order) for layout in layouts)
    said = {"".join(map(str, layout.placements)) for layout in layouts}
    assert {"RS(0)", "_S(0, 2)S(0)", "S(0)S(0)", "S(0)S(1)", "RRS(0)"} <= said
    assert sum(bool(set(case.sources) & set(case.receivers)) for case in cases) in range(10, 25)
    assert sum(0 in leaf.shape for leaf in leaves) > 5
    pieces = [i for c in cases for leaf in c.leaves for r in c.receivers for i in leaf.receiver.local(leaf.shape, r)]
    assert sum(not all(indices) for indices in pieces) > 20
    assert str(Case.draw(7)) == str(Case.draw(7)) != str(Case.draw(8))


# ---------------------------------------------------------------------------------------------- is the judge awake?


def _first(case: Case, rank: int, target: Held | None) -> torch.Tensor | None:
    """The first local tensor with elements at the first receiver that has one; others leave theirs alone."""
    if target is None or rank != case.receivers[0]:
        return None
    return next((p.tensor for pieces in target.pieces.values() for p in pieces if p.tensor.numel()), None)


def flips_a_bit(case: Case, rank: int, source: Held | None, target: Held | None) -> Moved | None:
    moved = naive(case, rank, source, target)
    if (tensor := _first(case, rank, target)) is not None:
        values = resharding.to_bytes(tensor)
        values.reshape(-1)[-1] ^= 1
        tensor.copy_(resharding.from_bytes(values, tensor.dtype))
    return moved


def swaps_shards(case: Case, rank: int, source: Held | None, target: Held | None) -> Moved | None:
    """Every receiver gets what the next one should."""
    moved = naive(case, rank, source, target)
    if target is not None:
        after = case.receivers[(case.receivers.index(rank) + 1) % len(case.receivers)]
        for leaf in case.leaves:
            theirs = leaf.receiver.local(leaf.shape, after)
            for mine, indices in zip(target.pieces[leaf.path], theirs, strict=False):
                other = resharding.Piece.make(indices, leaf.values(case.seed), leaf.dtype, "contiguous").tensor
                if mine.tensor.shape == other.shape:
                    mine.tensor.copy_(other)
    return moved


def writes_beside(case: Case, rank: int, source: Held | None, target: Held | None) -> Moved | None:
    moved = naive(case, rank, source, target)
    for piece in (p for pieces in (target.pieces.values() if target else ()) for p in pieces):
        if len(piece.base) > piece.tensor.numel() > 0:
            kept = piece.tensor.clone()
            piece.base.zero_()
            piece.tensor.copy_(kept)
    return moved


def leaves_one_out(case: Case, rank: int, source: Held | None, target: Held | None) -> Moved | None:
    poisoned = Held.make(case, rank, "receiver", poisoned=True) if target is not None else None
    moved = naive(case, rank, source, target)
    tensor, was = _first(case, rank, target), _first(case, rank, poisoned)
    if tensor is not None and was is not None:
        tensor.copy_(was)
    return moved


def changes_the_source(case: Case, rank: int, source: Held | None, target: Held | None) -> Moved | None:
    moved = naive(case, rank, source, target)
    if source is not None:
        for piece in (p for pieces in source.pieces.values() for p in pieces):
            inverse = ~resharding.to_bytes(piece.tensor) & np.uint8(1)
            piece.tensor.copy_(resharding.from_bytes(inverse, piece.tensor.dtype))
    return moved


def gives_fresh_tensors(case: Case, rank: int, source: Held | None, target: Held | None) -> Moved | None:
    moved = naive(case, rank, source, target)
    if moved is not None:
        moved.arrived["model"] = {k: v.detach() for k, v in moved.arrived["model"].items() if isinstance(v, DTensor)}
    return moved


def forgets_the_step(case: Case, rank: int, source: Held | None, target: Held | None) -> Moved | None:
    moved = naive(case, rank, source, target)
    if moved is not None:
        moved.arrived["step"] = 0
    return moved


def _miscount(case: Case, rank: int, source: Held | None, target: Held | None, **wrong: Any) -> Moved | None:
    moved = naive(case, rank, source, target)
    if moved is not None:
        assert moved.nbytes is not None
        moved.nbytes += wrong.get("nbytes", 0)
        moved.by_source = {s + wrong.get("shift", 0): n + wrong.get("part", 0) for s, n in moved.by_source.items()}
    return moved


def moves_a_byte_more(case: Case, rank: int, source: Held | None, target: Held | None) -> Moved | None:
    return _miscount(case, rank, source, target, nbytes=1, part=1)


def moves_a_byte_less(case: Case, rank: int, source: Held | None, target: Held | None) -> Moved | None:
    return _miscount(case, rank, source, target, nbytes=-1, part=-1)


def says_too_much_of_a_source(case: Case, rank: int, source: Held | None, target: Held | None) -> Moved | None:
    return _miscount(case, rank, source, target, part=8)


def names_a_stranger(case: Case, rank: int, source: Held | None, target: Held | None) -> Moved | None:
    return _miscount(case, rank, source, target, shift=7)


def raises_at_one(case: Case, rank: int, source: Held | None, target: Held | None) -> Moved | None:
    if rank == case.receivers[0]:
        raise ZeroDivisionError("planted")
    return None if target is None else Moved(target.state, target.nbytes, {case.sources[0]: target.nbytes})


def test_the_reference_passes(pool4: ProcessPool) -> None:
    accept(run(pool4, "anything", ORDINARY, [naive]), naive=320)
    accept(run(pool4, "scattered", ORDINARY, [naive]), naive=40)


@pytest.mark.parametrize(
    ("planted", "said"),
    [
        (flips_a_bit, "1 of "),
        (swaps_shards, "elements are wrong"),
        (writes_beside, "elements around the local tensor were written"),
        (leaves_one_out, "elements are wrong"),
        (changes_the_source, "the source has changed"),
        (gives_fresh_tensors, "not the receiver's own object"),
        (forgets_the_step, "step is 0"),
        (moves_a_byte_more, "bytes, where"),
        (moves_a_byte_less, "bytes, where"),
        (says_too_much_of_a_source, "in all"),
        (names_a_stranger, "some of which are no sources"),
        (raises_at_one, "planted"),
    ],
)
def test_what_is_planted_is_found(pool4: ProcessPool, planted: Move, said: str) -> None:
    """In every case where it makes a difference, by name, and nothing else is said."""
    seeds = range(6)
    verdict = run(pool4, "disjoint", seeds, [planted])
    assert verdict.complaints
    if planted is not gives_fresh_tensors:  # Which leaves some out besides.
        assert not [line for line in verdict.complaints if said not in line]
    if planted not in (swaps_shards, writes_beside, raises_at_one):
        assert {seed for seed in seeds for line in verdict.complaints if f"case {seed}," in line} == set(seeds)
    # The next one starts anew.
    accept(run(pool4, "disjoint", [6], [naive]), naive=8)
