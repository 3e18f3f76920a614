"""torch.distributed.checkpoint saves into keepers' memory, and loads from there what it would load from a directory."""

from __future__ import annotations

import functools
import gc
import os
import pathlib
import re
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict_from_keys
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import async_save as dcp_async_save
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import transfuse
from keeping import SECONDS, Home, Job, home, threaded, until  # noqa: F401
from transfuse._errors import StateError, UnsupportedLeaf
from transfuse._keeper import client
from transfuse._keeper.storage import Storage
from transfuse.dcp import DirectoryReader, KeeperReader, KeeperWriter
from transfuse.testing.exact import differences
from transfuse.testing.ranks import Fleet

GUIDE = pathlib.Path(__file__).parents[2] / "docs" / "dcp.md"

pytestmark = [
    pytest.mark.usefixtures("home"),
    pytest.mark.filterwarnings("ignore:torch.distributed is (disabled, )?unavailable or uninitialized"),
]


def on_ranks(count: int, work: Any, *arguments: Any) -> list[Any]:
    """Run this on fresh processes, which have ended when it returns."""
    with Fleet(count, timeout=SECONDS) as fleet:
        fleet.start(work, *arguments)
        return [outcome.get() for outcome in fleet.outcomes(2 * SECONDS)]


def host(number: int) -> None:
    """From now on this process is on another host: one with a keeper of its own."""
    os.environ["TRANSFUSE_KEEPER_DIR"] += f"/{number}"


# -------------------------------------------------------------------------------------------------------- the states


@functools.cache
def meshes() -> tuple[DeviceMesh, DeviceMesh]:
    ranks = dist.get_world_size()
    return init_device_mesh("cpu", (ranks,)), init_device_mesh("cpu", (2, ranks // 2))


def state(seed: int) -> dict[str, Any]:
    """Everything that DCP's planners take apart, on all ranks of the default group. The same for the same seed."""
    rank, (line, grid) = dist.get_rank(), meshes()
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(7, 9), nn.BatchNorm1d(9), nn.Linear(9, 3))
    fully_shard(model, mesh=line)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.001 * seed + 0.001)
    if seed:
        model(torch.randn(4, 7)).square().mean().backward()
        optimizer.step()
    weights, moments = get_state_dict(model, optimizer)
    random = np.random.default_rng(seed).bit_generator.state
    return {
        "model": weights,
        "optimizer": moments,
        "grid": distribute_tensor(torch.randn(6, 10), grid, [Shard(0), Shard(1)]),
        "mixed": distribute_tensor(torch.randn(5, 3).bfloat16(), grid, [Replicate(), Shard(1)]),
        "copies": distribute_tensor(torch.randn(4), line, [Replicate()]),
        "uneven": distribute_tensor(torch.randn(5, 2, dtype=torch.float64), line, [Shard(0)]),
        "plain": {"a.b": torch.randn(3, 4).t(), "part": torch.randn(10)[3:7], "none": torch.zeros(0, 2)},
        "own": torch.full((3,), float(rank * seed)),
        "list": [torch.arange(4) * seed, {"x": torch.tensor(seed)}],
        "step": seed,
        "values": {"text": "t" * seed * 1000, "big": seed << 70, "numbers": [1, 2.5, (seed, None)], "random": random},
        "inside": (torch.ones(2) * seed, np.arange(3) * seed, {"deep": b"\0" * seed}),
    }


def save(rank: int, directory: str, hosts: int) -> None:
    host(rank * hosts // dist.get_world_size())
    kept = pathlib.Path(directory, "kept")
    kept.mkdir(exist_ok=True)
    keep = transfuse.keep(run="dcp", replicas=0, timeout=SECONDS, directory=kept, save_every=4)
    assert KeeperReader(keep).newest_step() is None
    writer = KeeperWriter(keep)
    dcp_save(state(3), storage_writer=writer, checkpoint_id=f"{directory}/step-3")
    later = state(4)
    future: Any = dcp_async_save(later, storage_writer=writer, checkpoint_id=f"{directory}/step-4.ckpt")
    later["plain"]["a.b"].zero_()  # It has been staged.
    future.result()
    for step in (3, 4):
        dcp_save(state(step), checkpoint_id=f"{directory}/{step}")
    until(lambda: [label.step for label in Storage.at(kept).labels()] == [4])
    keep.detach()


def load(rank: int, directory: str, hosts: int) -> None:
    host(rank * hosts // dist.get_world_size())
    keep = transfuse.keep(run="dcp", replicas=0, timeout=SECONDS)
    reader = KeeperReader(keep)
    assert reader.newest_step() == 4
    for step, options in ((4, {}), (3, {"checkpoint_id": "somewhere/step-3"})):
        ours, theirs = state(0), state(0)
        plain, sharded = ours["plain"]["a.b"], ours["grid"]
        dcp_load(ours, storage_reader=reader, **options)
        dcp_load(theirs, checkpoint_id=f"{directory}/{step}")
        assert not differences(ours, theirs)
        assert reader.step == ours["step"] == step
        assert ours["plain"]["a.b"] is plain
        assert ours["grid"] is sharded
        assert ours["values"]["random"] == np.random.default_rng(step).bit_generator.state
    # Without a keeper, by any number of ranks: each opens the directory.
    ours, theirs, files = state(0), state(0), DirectoryReader(f"{directory}/kept")
    dcp_load(ours, storage_reader=files)
    dcp_load(theirs, checkpoint_id=f"{directory}/4")
    assert not differences(ours, theirs)
    assert files.step == ours["step"] == 4
    with pytest.raises(CheckpointException, match="has no step 5 that is whole; steps there: 4"):
        dcp_load(state(0), storage_reader=files, checkpoint_id=5)
    missing = [("step-77", "cannot load step 77; steps that they hold: [3, 4]"), ("latest", "has no number")]
    for name, text in missing:
        with pytest.raises((CheckpointException, ValueError), match=re.escape(text)):
            dcp_load(state(0), storage_reader=reader, checkpoint_id=name)
    with pytest.raises(CheckpointException, match="Missing key"):
        dcp_load({"nothing": torch.ones(1)}, storage_reader=KeeperReader(keep))
    keep.detach()


@pytest.mark.parametrize(
    ("hosts", "ranks"),
    [(2, 2), *(pytest.param(*case, marks=pytest.mark.soak) for case in ((1, 2), (1, 4), (2, 4)))],
)
def test_what_was_saved_is_loaded_as_from_a_directory(hosts: int, ranks: int, tmp_path: pathlib.Path) -> None:
    """All four workers end in between. Two hosts are two keepers on this one, which fetch from each other over TCP."""
    on_ranks(4, save, str(tmp_path), hosts)
    on_ranks(ranks, load, str(tmp_path), hosts)


# -------------------------------------------------------------------------------------------------------- the guide


class Late(KeeperWriter):
    """Rank 1 begins to write when rank 0 waits for nobody any more."""

    def write_data(self, plan: Any, planner: Any) -> Any:
        store, rank = dist.distributed_c10d._get_default_store(), dist.get_rank()
        if rank == 1:
            store.wait(["written"])
        try:
            return super().write_data(plan, planner)
        finally:
            if rank == 0:
                store.set("written", "1")


def save_late(rank: int) -> tuple[str, int | None]:
    setattr(client, "COMMIT_PARTNER_SECONDS", 0.2)  # noqa: B010
    keep = transfuse.keep(run="late", timeout=SECONDS)
    saved = {"mine": distribute_tensor(torch.arange(4.0), init_device_mesh("cpu", (2,)), [Shard(0)])}
    dcp_save(saved, storage_writer=Late(keep, 7))
    assert keep.report is not None
    told = keep.report.outcome, KeeperReader(keep).newest_step()
    keep.close()
    return told


def test_a_rank_that_is_late_does_not_end_a_save() -> None:
    """The keeper has rank 0's part, and the step counts when rank 1's has come."""
    assert on_ranks(2, save_late) == [("pending", 7), ("committed", 7)]


def guide(rank: int, fatal_step: int) -> Any:
    *_, code = re.findall(r"^```python\n(.*?)^```", GUIDE.read_text(), re.S | re.M)
    names: dict[str, Any] = {}
    exec(compile(code, str(GUIDE), "exec"), names)
    torch.manual_seed(0)
    state = {"w": torch.randn(5), "steps": torch.zeros((), dtype=torch.int64), "seen": []}
    taken = []

    def take_step(state: dict[str, Any]) -> None:
        if state["steps"] == fatal_step:
            raise RuntimeError("the job fails")
        state["w"].mul_(1.5).add_(state["steps"])
        state["steps"] += 1
        state["seen"].append(int(state["steps"]))
        taken.append(int(state["steps"]))

    try:
        names["train"](state, 6, take_step)
    except RuntimeError:
        return taken
    return state, taken


def test_the_guide(home: Home) -> None:  # noqa: F811
    assert on_ranks(2, guide, 4) == [[1, 2, 3, 4]] * 2
    expected = torch.Generator().manual_seed(0)
    w = torch.randn(5, generator=expected)
    for step in range(6):
        w = w * 1.5 + step
    for state, taken in on_ranks(2, guide, 9):
        assert taken == [5, 6]
        assert state["seen"] == [1, 2, 3, 4, 5, 6]
        assert torch.equal(state["w"], w)
    # All ranks have closed: the keeper forgets, and nothing is left of it.
    until(lambda: not list(home.base.iterdir()))


# -------------------------------------------------------------------------------------------------- in one process


class Pickled:
    """Python could carry it, by running its code."""


@pytest.fixture
def alone(home: Home, threaded: None) -> Iterator[Job]:  # noqa: F811
    """A job of one rank, and a keeper in a thread."""
    home.start()
    with Job(1) as job:
        job.start([dict])
        yield job


def save_alone(job: Job, state: dict[str, Any], step: Any, **options: Any) -> None:
    # Plain numbers are fine as ids, too.
    dcp_save(state, storage_writer=KeeperWriter(job.keeps[0], **options), checkpoint_id=step, no_dist=True)


def failure(caught: pytest.ExceptionInfo[CheckpointException]) -> BaseException:
    ((error, _),) = caught.value.failures.values()
    return error


def test_what_keepers_do_not_take_is_refused_by_name(alone: Job) -> None:
    state: dict[str, Any] = {"w": torch.ones(2)}
    for bad, text in (
        ({"deep": {"object": Pickled()}}, "leaf deep.object: an object that only pickle can carry"),
        ({"sparse": torch.eye(3).to_sparse()}, "leaf sparse: a Tensor of layout torch.sparse_coo"),
    ):
        with pytest.raises(CheckpointException) as caught:
            save_alone(alone, state | bad, 1)
        assert isinstance(failure(caught), UnsupportedLeaf)
        assert text in str(failure(caught))
    assert KeeperReader(alone.keeps[0]).newest_step() is None
    save_alone(alone, state, 2)
    with pytest.raises(CheckpointException, match="step 2 was to be saved after step 2: steps must rise"):
        save_alone(alone, state, "again/step-2")
    with pytest.raises(CheckpointException, match="which step"):
        dcp_save(state, storage_writer=KeeperWriter(alone.keeps[0]), no_dist=True)
    assert KeeperReader(alone.keeps[0]).newest_step() == 2


def test_nested_names_and_a_whole_checkpoint_without_a_state(alone: Job, tmp_path: pathlib.Path) -> None:
    """As `_load_state_dict_from_keys` and offline tools read it: everything comes from the metadata."""
    state = {"a": {"b.c": torch.randn(3), "d": [torch.ones(2), 5, {"e": "text"}]}, "t": (1, np.arange(3))}
    save_alone(alone, state, 1)
    dcp_save(state, checkpoint_id=tmp_path, no_dist=True)
    with KeeperReader(alone.keeps[0]) as reader:
        ours = _load_state_dict_from_keys(storage_reader=reader)
    theirs = _load_state_dict_from_keys(checkpoint_id=tmp_path)
    assert not differences(ours, theirs)


class Doubling(DefaultSavePlanner):
    """Writes other values than those of the state."""

    def transform_object(self, write_item: Any, object: Any) -> Any:
        return super().transform_object(write_item, object * 2)


def test_a_planner_of_ones_own(alone: Job) -> None:
    (keep,) = alone.keeps
    state: dict[str, Any] = {"n": 4, "w": torch.arange(3)}
    dcp_save(state, storage_writer=KeeperWriter(keep, 1), planner=Doubling(), no_dist=True)
    dcp_load(state, storage_reader=KeeperReader(keep), no_dist=True)
    assert (state["n"], state["w"].tolist()) == (8, [0, 2, 4])


def test_a_load_of_nothing_and_of_something_else(alone: Job) -> None:
    (keep,) = alone.keeps
    reader = KeeperReader(keep)
    with pytest.raises(CheckpointException, match="hold no checkpoint that can be loaded"):
        dcp_load({"w": torch.ones(2)}, storage_reader=reader, no_dist=True)
    assert isinstance(reader.failure, StateError)
    keep.commit(1, state={"w": torch.ones(2)})
    with pytest.raises(CheckpointException, match="was not saved by a KeeperWriter"):
        dcp_load({"w": torch.ones(2)}, storage_reader=reader, no_dist=True)


def test_a_lost_keeper_is_an_error_unless_told_otherwise(alone: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    (keep,) = alone.keeps
    monkeypatch.setattr(keep, "_look", lambda: None)  # It is not looked for again.
    assert keep._link is not None
    keep._link.close()
    with pytest.raises(CheckpointException, match="step 1 was not saved"):
        save_alone(alone, {"w": torch.ones(2)}, 1)
    save_alone(alone, {"w": torch.ones(2)}, 2, strict=False)


def test_a_load_that_fails_leaves_no_memory_in_use(alone: Job, home: Home) -> None:  # noqa: F811
    """Whatever DCP does: after the next load, after close, and when the reader is gone."""
    (keep,) = alone.keeps
    state = {"w": torch.ones(2)}
    for step in range(1, 7):
        save_alone(alone, state, step)
        reader = KeeperReader(keep)
        with pytest.raises(CheckpointException):
            dcp_load({"other": torch.ones(2)}, storage_reader=reader, no_dist=True)
        if step % 2:
            reader.close()
        else:
            del reader
            gc.collect()
        keeper = home._threads[0][0]
        until(lambda: not any(kept.pins for kept in keeper.books.all()))  # noqa: B023
    assert KeeperReader(keep).newest_step() == 6


@pytest.mark.parametrize(
    ("make", "error"),
    [
        (lambda keep: KeeperWriter("keep"), TypeError),  # type: ignore[arg-type]
        (lambda keep: KeeperReader(None), TypeError),  # type: ignore[arg-type]
        (lambda keep: KeeperWriter(keep, "latest"), ValueError),
        (lambda keep: KeeperReader(keep, "latest"), ValueError),
    ],
)
def test_arguments(alone: Job, make: Any, error: type[Exception]) -> None:
    with pytest.raises(error):
        make(alone.keeps[0])
