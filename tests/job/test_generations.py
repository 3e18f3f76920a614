"""The groups of a job that goes on: ranks that die and come back at any moment, and a supervisor that restarts them."""

from __future__ import annotations

import contextlib
import os
import pathlib
import random
import signal
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import HashStore  # type: ignore[attr-defined]
from torch.utils.data import DataLoader

import transfuse
from transfuse import PeerLost, TransfuseError


def go_on(store: Any, rank: int, size: int, results: pathlib.Path, plan: dict[str, Any]) -> None:
    """Ranks that add up numbers. ``plan`` says which starts of which ranks die, and where."""
    start = store.add(f"starts of {rank}", 1)
    fatal = plan.get(f"{rank}/{start}")
    if fatal == "at once":
        os.kill(os.getpid(), signal.SIGKILL)
    state: dict[str, Any] = {"sum": torch.zeros(1), "steps": 0}
    step: int | None = None
    while True:
        try:
            transfuse.regroup(store, rank, size, timeout=30)
            if fatal == "in the group":
                os.kill(os.getpid(), signal.SIGKILL)
            step = transfuse.heal(state, step=step, timeout=30) or 0
            while step < 6:
                mine = torch.full((1,), float(step))
                dist.all_reduce(mine)
                if fatal == step:
                    os.kill(os.getpid(), signal.SIGKILL)
                state["sum"] += mine
                step += 1
            dist.barrier()
            break
        except (RuntimeError, TransfuseError):
            continue
    (results / str(rank)).write_text(f"{state['sum'].item()} {dist.get_world_size()}")


@pytest.mark.parametrize(
    "plan",
    [
        {},
        {"1/1": 3},
        {"0/1": 2, "0/2": "at once"},
        {"2/1": 4, "2/2": "in the group"},
        {"0/1": 2, "1/1": 2},
    ],
    ids=str,
)
@pytest.mark.timeout(200)
def test_a_job_goes_on_after_any_death(plan: dict[str, Any], tmp_path: pathlib.Path) -> None:
    transfuse.supervise(go_on, 3, tmp_path, plan, restarts=4, method="forkserver")
    expected = sum(3.0 * step for step in range(6))
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {
        str(rank): f"{expected} 3" for rank in range(3)
    }


def die_while_forming(store: Any, rank: int, size: int, results: pathlib.Path) -> None:
    """Rank 2 dies where all have agreed on the group, and it is not formed yet: the others' attempt fails."""
    if rank == 2 and store.add("starts of 2", 1) == 1:
        dist.init_process_group = lambda *_, **__: os.kill(os.getpid(), signal.SIGKILL)
    while True:
        with contextlib.suppress(PeerLost, TransfuseError):
            transfuse.regroup(store, rank, size, timeout=4)
            break
    dist.barrier()
    (results / str(rank)).write_text("here")


@pytest.mark.long
@pytest.mark.timeout(200)
def test_a_rank_that_dies_while_the_group_is_formed_is_met_again(tmp_path: pathlib.Path) -> None:
    """Torch counts groups that could not be formed: one that failed gave survivors and newcomer different names.

    It takes the half minute that gloo waits for an address, whatever the timeout of the group.
    """
    transfuse.supervise(die_while_forming, 3, tmp_path, method="forkserver")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["0", "1", "2"]


def die(store: Any, rank: int, size: int) -> None:
    if rank == 1:
        os._exit(3)
    time.sleep(600)


def test_a_supervisor_gives_up_and_ends_all() -> None:
    with pytest.raises(TransfuseError, match="rank 1 ended with 3, and all 1 restarts are used up"):
        transfuse.supervise(die, 2, restarts=1, method="forkserver")


def load_data(store: Any, rank: int, size: int, results: pathlib.Path) -> None:
    loader: DataLoader[Any] = DataLoader(list(range(4)), num_workers=1)  # type: ignore[arg-type]
    (results / str(rank)).write_text(str(sum(batch.item() for batch in loader)))


def test_a_rank_may_have_processes_of_its_own(tmp_path: pathlib.Path) -> None:
    transfuse.supervise(load_data, 1, tmp_path, restarts=0, method="forkserver")
    assert (tmp_path / "0").read_text() == "6"


def get_stuck(store: Any, rank: int, size: int, results: pathlib.Path) -> None:
    if rank == 1 and store.add("starts of 1", 1) == 1:
        time.sleep(600)  # In the old group, as it were.
    while True:
        with contextlib.suppress(PeerLost):  # As survivors do, who come again.
            transfuse.regroup(store, rank, size, timeout=2)
            break
    (results / str(rank)).write_text("here")
    dist.barrier()


@pytest.mark.timeout(200)
def test_a_rank_that_does_not_come_is_started_again(tmp_path: pathlib.Path) -> None:
    transfuse.supervise(get_stuck, 2, tmp_path, patience=6, method="forkserver")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["0", "1"]


def test_who_does_not_come_is_named_and_wrong_numbers_are_refused() -> None:
    store = HashStore()
    with pytest.raises(PeerLost, match=r"ranks 1, 2 have not called regroup\(\) with size=3 in 0\.3 s") as raised:
        transfuse.regroup(store, 0, 3, timeout=0.3)
    assert raised.value.rank == 1
    with pytest.raises(ValueError, match="rank must be at least 0 and below size, got rank 3 and size 3"):
        transfuse.regroup(store, 3, 3)
    store.set("ticket 0", '["another", 3, 0.0]')
    with pytest.raises(PeerLost, match=r"with size=2 in 0\.3 s: rank 0 says size=3"):
        transfuse.regroup(store, 1, 2, timeout=0.3)


def shrink(store: Any, rank: int, size: int, results: pathlib.Path) -> None:
    """A third rank never comes. The two others see that one after the other, and go on without it."""
    try:
        transfuse.regroup(store, rank, size + 1, timeout=1 + 3 * rank)
    except PeerLost:
        transfuse.regroup(store, rank, size, timeout=60)
    dist.barrier()
    (results / str(rank)).write_text(str(dist.get_world_size()))


@pytest.mark.timeout(200)
def test_ranks_that_agree_on_fewer_one_after_the_other_come_together(tmp_path: pathlib.Path) -> None:
    """A ticket for the old size is no contradiction, and a rank that has given up is not counted on."""
    transfuse.supervise(shrink, 2, tmp_path, restarts=0, method="forkserver")
    assert [(tmp_path / str(rank)).read_text() for rank in range(2)] == ["2", "2"]


@pytest.mark.soak
@pytest.mark.timeout(900)
def test_kills_at_random_moments(tmp_path: pathlib.Path) -> None:
    for seed in range(8):
        rng = random.Random(seed)
        places: list[Any] = ["at once", "in the group", *range(6)]
        plan = {f"{rng.randrange(3)}/{start}": rng.choice(places) for start in (1, 1, 2)}
        results = tmp_path / str(seed)
        results.mkdir()
        transfuse.supervise(go_on, 3, results, plan, restarts=6, method="forkserver")
        assert {path.read_text() for path in results.iterdir()} == {"45.0 3"}, plan
