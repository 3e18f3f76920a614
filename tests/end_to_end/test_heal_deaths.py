"""``heal()`` in processes: sharded states, and ranks that are killed or frozen at any moment of it."""

from __future__ import annotations

import random
import time
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import transfuse
from transfuse.testing.ranks import Fleet, Outcome, ProcessPool, announce

pytestmark = [pytest.mark.timeout(200), pytest.mark.usefixtures("small_parcels")]

SECONDS = 2.0
RANKS = 4
NEWEST = 5
LEAVES = 4


def world() -> Any:
    return dist.group.WORLD


# --------------------------------------------------------------------------------------------------------------- shards


def heal_shards(rank: int, shape: tuple[int, ...], behind: list[int]) -> Any:
    """Weights that each rank has a shard of, and moments that ranks which are behind do not have yet."""
    mesh = init_device_mesh("cpu", shape)
    placements = [Replicate(), Shard(0)] if len(shape) == 2 else [Shard(0)]
    full = torch.arange(70.0).view(10, 7)
    is_new = rank in behind
    weight, moment = (distribute_tensor(one, mesh, placements) for one in (full, -full))
    state: dict[str, Any] = {"weight": weight} | ({} if is_new else {"moment": moment})
    if is_new:
        weight.to_local().zero_()
    loaded: list[Any] = []
    try:
        step = transfuse.heal(
            lambda: state,
            step=None if is_new else NEWEST,
            load=lambda got: loaded.append(got),
            group=world(),
            timeout=15.0,
        )
    except transfuse.TransfuseError as error:
        return type(error).__name__, str(error.args[0]), bool(weight.to_local().any())
    # What arrived fresh is on the target's own mesh.
    got = loaded[0] if is_new else state
    assert isinstance(got["moment"], DTensor)
    assert got["moment"].device_mesh is mesh
    assert got["weight"] is weight
    return step, torch.equal(weight.full_tensor(), full) and torch.equal(got["moment"].full_tensor(), -full)


@pytest.mark.parametrize("behind", [[2, 3], [1], [0, 3]], ids=str)
def test_hsdp_each_rank_gets_its_own_shards_from_the_replicas(pool4: ProcessPool, behind: list[int]) -> None:
    assert [one.get() for one in pool4.run(heal_shards, (2, 2), behind)] == [(NEWEST, True)] * 4


def test_fsdp_what_nobody_holds_is_not_covered_on_all_ranks(pool4: ProcessPool) -> None:
    kinds, texts, touched = zip(*(one.get() for one in pool4.run(heal_shards, (4,), [2])), strict=True)
    assert set(kinds) == {"NotCovered"}
    assert len(set(texts)) == 1
    assert "rank 2: NotCovered: " in texts[0]
    assert "['weight']" in texts[0]
    assert touched == (True, True, False, True), "rank 2 is as it was"


# --------------------------------------------------------------------------------------------------------------- deaths


class Heard(NamedTuple):
    """How heal() ended on a rank, and the least and largest value of each of its leaves."""

    step: int | None
    kind: str
    text: str
    torn: tuple[str, ...]
    values: list[tuple[float, float]]
    seconds: float


def filled(step: int | None, mib: int) -> dict[str, torch.Tensor]:
    return {f"w{i}": torch.full((mib << 16,), float(step or 0)) for i in range(LEAVES)}


def work(rank: int, steps: list[int | None], mib: int, stops: int | None, options: dict[str, Any]) -> Heard:
    """``stops``: the rank that stands still when it has moved some bytes, for somebody to come and end it."""
    state = filled(steps[rank], mib)

    def stand_still(progress: dict[int, transfuse.Progress]) -> None:
        if any(one.bytes for one in progress.values()):
            announce("moving")
            time.sleep(100)

    if rank == stops:
        options = options | {"progress": stand_still}
    dist.barrier()
    announce("begins")
    began = time.monotonic()
    torn: tuple[str, ...] = ()
    step, kind, text = None, "", ""
    try:
        step = transfuse.heal(lambda: state, step=steps[rank], group=world(), timeout=SECONDS, **options)
    except transfuse.TransfuseError as error:
        kind, text, torn = type(error).__name__, str(error.args[0]), error.torn
    seconds = time.monotonic() - began
    return Heard(step, kind, text, torn, [(float(w.min()), float(w.max())) for w in state.values()], seconds)


def judge(steps: list[int | None], victim: int, atomic: bool, outcomes: list[Outcome[Any]]) -> str:
    """All who live have ended alike, in time, and whatever is a mix is named. Returns the error's text."""
    live = [rank for rank in range(RANKS) if rank != victim]
    heard: dict[int, Heard] = {rank: one.get() for rank, one in zip(live, outcomes, strict=True)}
    assert len({(one.step, one.kind, one.text) for one in heard.values()}) == 1, heard
    for rank, one in heard.items():
        old, new = float(steps[rank] or 0), float(NEWEST)
        assert one.seconds < 20 * SECONDS
        if one.step is not None:
            assert one.step == NEWEST
            assert one.values == [(new, new)] * LEAVES
        mixed = [f"['w{i}']" for i, pair in enumerate(one.values) if pair not in ((old, old), (new, new))]
        assert set(mixed) <= set(one.torn), (rank, one)
        assert one.torn or len(set(one.values)) == 1, (rank, one)
        assert not (atomic and one.torn), (rank, one)
        if f"rank {rank} has step {NEWEST} now, whole" in one.text:
            assert one.values == [(new, new)] * LEAVES
        if f"rank {rank} is as it was" in one.text:
            assert one.values == [(old, old)] * LEAVES
    return heard[live[0]].text


@pytest.mark.parametrize("how", ["kill", "freeze"])
@pytest.mark.parametrize(("victim", "atomic"), [(0, False), (1, True), (2, False), (3, True)])
def test_a_source_or_a_receiver_that_is_lost_in_the_middle(how: str, victim: int, atomic: bool) -> None:
    """Ranks 0 and 1 send, 2 and 3 receive. Bytes are moving when one of them is lost."""
    steps: list[int | None] = [NEWEST, NEWEST, 3, None]
    options = {"same_host": False, "atomic": atomic, "lanes": 1}
    with Fleet(RANKS) as fleet:
        fleet.start(work, steps, 4, victim, options)
        fleet.wait_for(victim, "moving")
        (fleet.kill if how == "kill" else fleet.freeze)(victim)
        text = judge(steps, victim, atomic, fleet.outcomes(60, [r for r in range(RANKS) if r != victim]))
    assert f"rank {victim} is lost: rank {victim}" in text


def at_random(seed: int) -> None:
    chosen = random.Random(seed)
    victim = chosen.randrange(RANKS)
    behind = chosen.choice([[3], [1, 3], [1, 2, 3], [0], [0, 2], []])
    steps = [chosen.choice([None, 3]) if rank in behind else NEWEST for rank in range(RANKS)]
    options = {"same_host": chosen.random() < 0.4, "atomic": chosen.random() < 0.4}
    delay = chosen.choice([0.005, 0.1, 0.7]) * chosen.random()
    with Fleet(RANKS) as fleet:
        fleet.start(work, steps, 32, None, options)
        fleet.wait_for(victim, "begins")
        time.sleep(delay)  # Any moment will do.
        (fleet.kill if chosen.random() < 0.5 else fleet.freeze)(victim)
        outcomes = fleet.outcomes(60, [rank for rank in range(RANKS) if rank != victim])
    # If nobody is behind, one word of each rank is all: one that dies while it says it may have told some.
    if behind:
        judge(steps, victim, options["atomic"], outcomes)


@pytest.mark.parametrize("seed", [1, 4])
def test_at_a_random_moment(seed: int) -> None:
    at_random(seed)


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(100, 160))
def test_at_many_random_moments(seed: int) -> None:
    at_random(seed)
