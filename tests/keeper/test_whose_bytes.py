"""Which bytes are whose: states that look alike, courses that part, and what single ranks lose."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from keeping import Home, Job, home, same, threaded  # noqa: F401
from transfuse._keeper.bundles import bundle
from transfuse._keeper.process import Keeper
from transfuse._limits import Limits
from transfuse._state.leaves.distributed import DTensorMeta
from transfuse._state.manifest import describe

pytestmark = pytest.mark.usefixtures("threaded")


@pytest.fixture
def keeper(home: Home) -> Keeper:  # noqa: F811
    return home.start()


def test_what_belongs_to_the_rank_may_look_like_the_state(keeper: Keeper) -> None:
    weights, average = {"w": torch.full((1000,), 1.0)}, {"w": torch.full((1000,), 2.0)}
    with Job(1, verify=True) as job:
        job.start(same(weights), [{"rank_state": lambda: average}])
        assert job.commit(1) == ["committed"]
    weights["w"].zero_()
    got: list[Any] = []
    with Job(1, verify=True) as job:
        job.start(same(weights), [{"rank_state": lambda: average, "load_rank_state": got.append}])
        assert job.restore() == 1
    assert weights["w"].eq(1).all()
    assert got[0]["w"].eq(2).all()


def test_meshes_of_other_ranks_hold_other_shards(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two jobs of local SGD on one host: same names, shapes and coordinates, other meshes."""

    def keys(ranks: tuple[int, ...]) -> list[bytes]:
        manifest = describe({"w": torch.zeros(4)}, Limits()).manifest
        spec = ["dtensor", 0, DTensorMeta((8,), (1,), (("S", 0),), 0), []]
        monkeypatch.setattr(manifest, "detail", lambda leaf: spec, raising=False)
        manifest.shared = [("cpu", (2,), ranks, None)]  # type: ignore[list-item]
        manifest.coordinates = [(0,)]
        return bundle(manifest, None, lambda path: False)[0].keys

    assert keys((0, 1)) == keys((0, 1)) != keys((2, 3))


def test_a_course_that_begins_again_is_not_mixed_with_the_one_before(keeper: Keeper) -> None:
    now = [{"w": torch.zeros(1000)} for _ in range(2)]
    with Job(2, shared=True) as job:
        job.start(same(*now))
        for step in (1, 2):
            for state in now:
                state["w"].fill_(step)
            assert job.commit(step) == ["committed"] * 2
        # Only one rank commits the next step.
        now[0]["w"].fill_(3)
        job.all(lambda keep: keep.commit(3) if keep.rank == 0 else None)
        assert job.restore() == 2
        # Another course: step 3 is something else now, on both ranks.
        for state in now:
            assert state["w"].eq(2).all()
            state["w"].fill_(33)
        assert job.commit(3) == ["committed"] * 2
        for state in now:
            state["w"].zero_()
        assert job.restore() == 3
    assert all(state["w"].eq(33).all() for state in now)


def test_without_digests_there_is_nothing_to_compare(keeper: Keeper) -> None:
    now = {"shared": torch.arange(1 << 20, dtype=torch.float32), "plain": torch.arange(5.0)}
    before = {name: tensor.clone() for name, tensor in now.items()}
    with Job(1, verify=False, shared="*shared*") as job:
        job.start(same(now))
        assert job.commit(1) == ["committed"]
    for tensor in now.values():
        tensor.zero_()
    with Job(1, verify=True) as job:
        job.start(same(now))
        assert job.restore() == 1
    assert all(torch.equal(now[name], before[name]) for name in now)


def test_a_step_is_not_restored_without_what_belonged_to_single_ranks(keeper: Keeper) -> None:
    now = [{"w": torch.zeros(1000)} for _ in range(2)]
    owns = [{"rank_state": lambda rank=rank: {"rank": rank}} for rank in range(2)]
    with Job(2, shared=True) as job:
        job.start(same(*now), owns)
        assert job.commit(1) == ["committed"] * 2
        now[0]["w"].fill_(2)
        job.all(lambda keep: keep.commit(2) if keep.rank == 0 else None)
    got: list[Any] = []
    with Job(2, shared=True, load_rank_state=got.append) as job:
        job.start(same(*now), owns)
        assert job.restore() == 1
    assert sorted(one["rank"] for one in got) == [0, 1]
