"""What a job can know of a kept step before it restores it; and a job of one process, without a group."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import transfuse
from keeping import SECONDS, Home, Job, home, same, threaded  # noqa: F401
from transfuse._errors import TransfuseError
from transfuse._keeper.process import Keeper

pytestmark = pytest.mark.usefixtures("threaded")


@pytest.fixture
def keeper(home: Home) -> Keeper:  # noqa: F811
    return home.start()


def untouchable() -> Any:
    raise AssertionError("look() asked for the state")


def commit(n: int, steps: int) -> None:
    """A job that commits these steps, and is killed."""
    with Job(n) as job:
        job.start(
            same(*(torch.arange(10.0) for _ in range(n))),
            [{"rank_state": lambda rank=rank: {"rank": rank}} for rank in range(n)],
        )
        for step in range(1, steps + 1):
            assert job.commit(step) == ["committed"] * n


def test_look_tells_the_step_and_what_is_the_ranks_own(keeper: Keeper) -> None:
    commit(2, 3)
    with Job(2) as job:
        job.start([untouchable, untouchable], [{"load_rank_state": untouchable}] * 2)
        for _ in range(2):
            found = job.all(lambda keep: keep.look())
            assert found == [transfuse.KeptStep(3, {rank: {"rank": rank}}, 2) for rank in range(2)]


def test_a_job_of_another_size_is_told_so_on_all_ranks(keeper: Keeper) -> None:
    commit(2, 3)
    with Job(3) as job:
        job.start([untouchable] * 3)
        owns = {rank: {"rank": rank} for rank in range(2)}
        assert job.all(lambda keep: keep.look()) == [transfuse.KeptStep(3, owns, 2)] * 3


def test_there_is_nothing_to_look_at(keeper: Keeper) -> None:
    with Job(2) as job:
        job.start([untouchable] * 2)
        assert job.all(lambda keep: keep.look()) == [None, None]


def test_a_restore_follows_a_look(keeper: Keeper) -> None:
    commit(2, 3)
    with Job(2) as job:
        now = [torch.zeros(10), torch.zeros(10)]
        job.start(same(*now))
        assert {one.step for one in job.all(lambda keep: keep.look()) if one is not None} == {3}
        assert job.restore() == 3
        assert all(torch.equal(one, torch.arange(10.0)) for one in now)


def test_one_process_needs_no_group(keeper: Keeper, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    weights = torch.arange(5.0)
    keep = transfuse.keep(lambda: weights, run="job", timeout=SECONDS)
    assert (keep.rank, keep.world_size) == (0, 1)
    assert keep.restore() is None
    assert keep.commit(1) is not None
    keep.detach()
    weights.zero_()
    with transfuse.keep(lambda: weights, run="job", timeout=SECONDS) as again:
        assert again.restore() == 1
    assert torch.equal(weights, torch.arange(5.0))


def test_one_of_several_processes_needs_one(keeper: Keeper, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(TransfuseError, match="needs the job's process group"):
        transfuse.keep(dict, run="job")
