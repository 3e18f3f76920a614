"""torch.distributed.checkpoint loads from live ranks what it would have loaded from a directory."""

from __future__ import annotations

import gc
import pathlib
import re
import shutil
import tempfile
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any, cast

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadPlan, ReadItem
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict_from_keys, load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

import transfuse
from transfuse.dcp import PeerReader
from transfuse.testing.exact import differences
from transfuse.testing.ranks import Fleet, Outcome, ProcessPool, Ranks, announce
from wires import is_of_a_transfer

pytestmark = [
    # Threads of one process are no ranks to torch.distributed: they load without it.
    pytest.mark.filterwarnings("ignore:torch.distributed is (disabled, )?unavailable or uninitialized"),
]

GUIDE = pathlib.Path(__file__).parents[2] / "docs" / "dcp.md"
CPU = torch.device("cpu")
#: For what goes well; for what fails by running out of it.
TIMEOUT, SHORT = 30.0, 3.0


def transport(pg: Any, seconds: float = TIMEOUT, **options: Any) -> transfuse.PGTransport:
    return transfuse.PGTransport(pg, timedelta(seconds=seconds), CPU, **options)


def values(outcomes: list[Outcome[Any]]) -> list[Any]:
    for outcome in outcomes:
        if outcome.error is not None:
            for rank, other in enumerate(outcomes):
                outcome.error.add_note(f"rank {rank}: {other.error!r}")
    return [outcome.get() for outcome in outcomes]


@pytest.fixture(autouse=True)
def _no_thread_is_left() -> Iterator[None]:
    before = set(threading.enumerate())  # Another test of this process may have abandoned a neighbour.
    yield
    until = time.monotonic() + 5
    while left := [t.name for t in set(threading.enumerate()) - before if is_of_a_transfer(t)]:
        assert time.monotonic() < until, left
        time.sleep(0.05)


# ---------------------------------------------------------------------------------------------------- in one process


class Pair:
    """A source and a receiver, which load once each time they are asked to."""

    def __init__(self, ranks: Ranks, seconds: float = TIMEOUT, reader: dict[str, Any] | None = None, **options: Any):
        self.ranks = ranks
        self.sources = [transport(pg, seconds) for pg in ranks.pgs]
        self.reader = PeerReader(transport(ranks.pgs[-1], seconds, **options), list(range(ranks.n - 1)), **reader or {})

    def load(self, states: Any, target: Any, planner: Any = None, step: int | None = None) -> list[Outcome[Any]]:
        """What becomes of each; all sources have the same state, or each its own."""
        last = self.ranks.n - 1

        def run(rank: int, pg: Any) -> None:
            if rank < last:
                state = states[rank] if isinstance(states, list) else states
                self.sources[rank].send_checkpoint([last], state, step=step)
            else:
                with self.reader:
                    load(target, storage_reader=self.reader, planner=planner, no_dist=True)

        return self.ranks.outcomes(run)


def failure(outcome: Outcome[Any]) -> tuple[BaseException, str]:
    """The error of the only rank, and all that the user reads."""
    assert isinstance(outcome.error, CheckpointException), outcome
    (error, _), *others = outcome.error.failures.values()
    assert not others
    return error, str(outcome.error)


def state() -> dict[str, Any]:
    """Everything that DCP takes apart, and that it does not."""
    torch.manual_seed(0)
    return {
        "model": OrderedDict({"a.weight": torch.randn(7, 5), "a.bias": torch.randn(7).bfloat16()}),
        "scalar": torch.tensor(3.5, dtype=torch.float64),
        "empty": torch.zeros(0, 4),
        "list": [torch.arange(4), {"x": torch.ones(2, 2, dtype=torch.bool)}],
        "optim": {
            "state": {"a.weight": {"step": torch.tensor(4.0), "exp_avg": torch.randn(7, 5).t()}},
            "param_groups": [{"lr": 0.25, "betas": (0.9, 0.99), "foreach": None, "params": ["a.weight", "a.bias"]}],
        },
        "step": 12,
        "nothing": [],
        "names": ["a", "b", ("c", 1)],
        "more": {"x": "text", "deep": {"y": 1 << 70, "z": b"bytes", "d": torch.float16}},
    }


def blank(item: Any) -> Any:
    """The same with other values."""
    if isinstance(item, torch.Tensor):
        return torch.zeros(item.shape, dtype=item.dtype)
    if isinstance(item, dict):
        return {key: blank(value) for key, value in item.items()}
    if isinstance(item, list) and any(isinstance(one, (torch.Tensor, dict)) for one in item):
        return [blank(one) for one in item]
    return "other"


@pytest.mark.parametrize("sources", [1, 2])
@pytest.mark.usefixtures("either_route")
def test_values_and_nested_tensors_are_as_from_a_directory(sources: int, tmp_path: pathlib.Path) -> None:
    source, ours, theirs = state(), blank(state()), blank(state())
    weight = ours["model"]["a.weight"]
    with Ranks(sources + 1) as ranks:
        values(Pair(ranks).load(source, ours))
    save(state(), checkpoint_id=tmp_path, no_dist=True)
    load(theirs, checkpoint_id=tmp_path, no_dist=True)
    assert not differences(ours, theirs)
    assert torch.equal(weight, source["model"]["a.weight"])  # In place.
    assert ours["optim"]["param_groups"][0]["betas"] == (0.9, 0.99)
    assert not differences(source, state())


def test_the_metadata_is_as_of_a_directory(tmp_path: pathlib.Path) -> None:
    save(state(), checkpoint_id=tmp_path, no_dist=True)
    from torch.distributed.checkpoint.filesystem import FileSystemReader

    def shown(metadata: Any) -> Any:
        found = {}
        for name, entry in metadata.state_dict_metadata.items():
            tensor = isinstance(entry, TensorStorageMetadata)
            found[name] = (entry.properties.dtype, entry.size, entry.chunks) if tensor else type(entry)
            assert tensor or isinstance(entry, BytesStorageMetadata)
        return found, metadata.planner_data

    def run(rank: int, pg: Any) -> Any:
        if rank == 0:
            transport(pg).send_checkpoint([1], state())
        with PeerReader(transport(pg), 0) as reader:
            return shown(reader.read_metadata())

    with Ranks(2) as ranks:
        mine = ranks.outcomes(run)[1].get()
    assert mine == shown(FileSystemReader(tmp_path).read_metadata())


def test_what_is_not_there_is_missing_by_name_and_the_reader_serves_again() -> None:
    target = {"model": {"a.weight": torch.zeros(7, 5), "other": torch.zeros(3)}}
    with Ranks(2) as ranks:
        pair = Pair(ranks)
        began = time.monotonic()
        sent, loaded = pair.load(state(), target)
        error, text = failure(loaded)
        assert "model.other" in str(error)
        assert "model.other" in text
        assert isinstance(sent.error, transfuse.SendFailed)
        assert "the load has ended before any data was read" in str(sent.error)
        assert time.monotonic() - began < TIMEOUT
        assert not target["model"]["a.weight"].any()

        values(pair.load(state(), target, DefaultLoadPlanner(allow_partial_load=True)))
        assert torch.equal(target["model"]["a.weight"], state()["model"]["a.weight"])
        assert not target["model"]["other"].any()

        values(pair.load({"model": {"a.weight": torch.ones(7, 5), "other": torch.ones(3)}}, target))
        assert all(bool(tensor.all()) for tensor in target["model"].values())
        assert pair.reader.failure is None


@pytest.mark.parametrize(
    ("source", "target", "words"),
    [
        ({"a": {"b": torch.ones(2, 3)}}, {"a": {"b": torch.zeros(3, 2)}}, "Size mismatch .* for a.b"),
        ({"a": {"b": torch.ones(2)}}, {"a": {"b": "text"}}, "metadata for a.b"),
        ({"a": {"b": torch.ones(2)}}, {"a": {"b": torch.zeros(2).int()}}, r"\['a.b'\]: dtype: source torch.float32"),
        ({"a": {"b": np.ones(2), "c": 1}}, {"a": {"b": 0, "c": 0}}, "leaf a.b: of kind 'array'"),
        ({"a": {"b": bytes(1 << 20), "c": 1}}, {"a": {"b": 0, "c": 0}}, "leaf a.b: of kind 'text'"),
        ({"a": {"b": torch.eye(3).to_sparse()}}, {"a": {"b": 0}}, "leaf a.b: of kind 'coo'"),
        ({"a": {"b": (torch.ones(2), 1)}}, {"a": {"b": 0}}, "leaf a.b: a tuple that holds tensors"),
        ({"a": {"b": [np.ones(2)]}}, {"a": {"b": 0}}, "leaf a.b: a list that holds tensors, arrays"),
    ],
    ids=["shape", "kind", "dtype", "array", "bytes", "sparse", "tuple", "list"],
)
def test_what_does_not_fit_is_refused_by_name_at_both_ends(source: Any, target: Any, words: str) -> None:
    source["fine"], target["fine"] = torch.ones(4), torch.zeros(4)
    with Ranks(2) as ranks:
        pair = Pair(ranks)
        sent, loaded = pair.load(source, target)
        error, text = failure(loaded)
        assert re.search(words, str(error))
        assert re.search(words, text)
        assert isinstance(sent.error, transfuse.SendFailed)
        assert not target.pop("fine").any()
        # What nobody asks for is in nobody's way.
        rest = {"fine": torch.zeros(4)}
        values(pair.load(source, rest))
        assert rest["fine"].all()


def test_floats_are_converted_on_request() -> None:
    target = {"w": torch.zeros(6, dtype=torch.bfloat16)}
    source = {"w": torch.randn(6)}
    with Ranks(2) as ranks:
        assert "cast=True converts" in str(failure(Pair(ranks).load(source, target)[1])[0])
        values(Pair(ranks, cast=True).load(source, target))
    assert torch.equal(target["w"], source["w"].bfloat16())


@pytest.mark.parametrize("source", [{"w": torch.ones(3), "n": 1}, {"w": torch.tensor(2.0), "n": 1}, {"n": 1}])
@pytest.mark.parametrize("target", [{}, {"n": 0}])
def test_a_rank_that_needs_no_tensor(source: Any, target: Any) -> None:
    target = dict(target)
    with Ranks(2) as ranks:
        values(Pair(ranks).load(source, target))
    assert target in ({}, {"n": 1})


class Aside(DefaultLoadPlanner):
    """Loads into memory of its own, and commits to the state; of each tensor only the first rows."""

    def __init__(self) -> None:
        super().__init__()
        self.aside: dict[str, torch.Tensor] = {}

    def create_local_plan(self) -> LoadPlan:
        plan = super().create_local_plan()
        for item in plan.items:
            object.__setattr__(item, "lengths", torch.Size([2, *item.lengths[1:]]))
            object.__setattr__(item, "storage_offsets", torch.Size([1, *item.storage_offsets[1:]]))
        return plan

    def resolve_tensor(self, read_item: ReadItem) -> torch.Tensor:
        made = self.aside[read_item.dest_index.fqn] = torch.zeros(read_item.lengths)
        return made

    def commit_tensor(self, read_item: ReadItem, tensor: torch.Tensor) -> None:
        assert torch.equal(tensor, self.aside[read_item.dest_index.fqn])
        self.state_dict[read_item.dest_index.fqn].copy_(tensor.sum(0))


def test_a_planner_of_ones_own() -> None:
    source = {"w": torch.arange(12.0).view(4, 3)}
    target = {"w": torch.zeros(4, 3)}
    with Ranks(2) as ranks:
        values(Pair(ranks).load(source, target, Aside()))
    assert target["w"].tolist() == [[9.0, 11.0, 13.0]] * 4


class Wrong(DefaultLoadPlanner):
    def resolve_tensor(self, read_item: ReadItem) -> torch.Tensor:
        return torch.zeros(1, 1)


def test_a_planner_that_gives_the_wrong_memory_is_told_and_so_is_the_source() -> None:
    with Ranks(2) as ranks:
        sent, loaded = Pair(ranks).load({"w": torch.ones(4)}, {"w": torch.zeros(4)}, Wrong())
    assert "leaf w: the planner wants a block of shape (4,)" in str(failure(loaded)[0])
    assert "leaf w: the planner wants" in str(sent.error)


def test_a_state_is_made_from_nothing_but_the_metadata() -> None:
    source = {"a": {"b": torch.ones(2, 3), "d": 3}, "c": torch.arange(3)}

    def run(rank: int, pg: Any) -> Any:
        if rank == 0:
            return transport(pg).send_checkpoint([1], source)
        return _load_state_dict_from_keys({"a", "c"}, storage_reader=PeerReader(transport(pg), 0))

    with Ranks(2) as ranks:
        assert not differences(ranks.run(run)[1], source)


def test_stages_of_a_pipeline_complete_each_other() -> None:
    stages = [{"a": {"w": torch.ones(3)}, "n": 1}, {"b": {"w": torch.ones(2, 2), "m": 2}, "n": 1}]
    target = {"a": {"w": torch.zeros(3)}, "b": {"w": torch.zeros(2, 2), "m": 0}, "n": 0}
    with Ranks(3) as ranks:
        values(Pair(ranks).load(stages, target))
    assert not differences(target, {"a": stages[0]["a"], "b": stages[1]["b"], "n": 1})


def test_tied_weights_stay_tied() -> None:
    weight, mine = torch.randn(5, 2), torch.zeros(5, 2)
    with Ranks(2) as ranks:
        values(Pair(ranks).load({"in": weight, "out": weight}, {"in": mine, "out": mine}))
    assert torch.equal(mine, weight)


def test_another_step_is_refused() -> None:
    with Ranks(2) as ranks:
        pair = Pair(ranks, reader={"step": 3})
        _, text = failure(pair.load({"w": torch.ones(2)}, {"w": torch.zeros(2)}, step=2)[1])
        assert "step 2" in text
        assert isinstance(pair.reader.failure, transfuse.StepMismatch)
        values(pair.load({"w": torch.ones(2)}, {"w": torch.zeros(2)}, step=3))


def test_a_state_that_dcp_has_no_names_for() -> None:
    with Ranks(2) as ranks:
        for state, words in (
            ((torch.ones(2),), "the sources send a tuple"),
            ({"a.b": torch.ones(2), "a": {"b": 1}}, "a.b"),
        ):
            sent, loaded = Pair(ranks).load(state, {"w": torch.zeros(2)})
            assert words in failure(loaded)[1]
            assert words in str(sent.error)


def test_a_reader_takes_names_from_the_planner_only() -> None:
    with Ranks(1) as ranks:
        renaming = transport(ranks.pgs[0], state_dict=dict, map_path={"a": "b"})
        with pytest.raises(ValueError, match="without map_path"):
            PeerReader(renaming, 0)
        reader = PeerReader(transport(ranks.pgs[0]), 0)
        with pytest.raises(RuntimeError, match="without read_metadata"):
            reader.read_data(LoadPlan([]), DefaultLoadPlanner())
    assert not PeerReader.validate_checkpoint_id("/checkpoints/1")


# --------------------------------------------------------------------------------------------------------- what fails


def test_sources_that_never_come() -> None:
    target = {"w": torch.zeros(4)}
    with Ranks(3) as ranks:
        reader = PeerReader(transport(ranks.pgs[2], SHORT), [0, 1])
        began = time.monotonic()
        with pytest.raises(CheckpointException) as caught:
            load(target, storage_reader=reader, no_dist=True)
        assert time.monotonic() - began < 4 * SHORT
        assert "rank 0: PeerTimeout" in str(caught.value)
        assert "rank 1: PeerTimeout" in str(caught.value)
        assert isinstance(reader.failure, transfuse.ReceiveFailed)
        assert reader.failure.causes.keys() == {0, 1}


def fall_silent(reader: PeerReader) -> None:
    time.sleep(2 * SHORT)
    reader.close()


def drop(reader: PeerReader) -> None:
    del reader
    gc.collect()


@pytest.mark.parametrize(
    ("end", "timeout", "words"),
    [
        (fall_silent, SHORT, "no data was read within"),
        (drop, TIMEOUT, "ended before any"),
        (PeerReader.close, TIMEOUT, "ended before any"),
    ],
    ids=["silent", "dropped", "closed"],
)
def test_a_load_that_ends_between_metadata_and_data(
    end: Callable[[PeerReader], None], timeout: float, words: str
) -> None:
    def run(rank: int, pg: Any) -> float:
        began = time.monotonic()
        if rank == 0:
            with pytest.raises(transfuse.SendFailed, match=words):
                transport(pg, timeout).send_checkpoint([1], {"w": torch.ones(4)})
        else:
            readers = [PeerReader(transport(pg, timeout), 0)]
            readers[0].read_metadata()
            end(readers.pop())
        return time.monotonic() - began

    with Ranks(2) as ranks:
        seconds, _ = ranks.run(run)
    assert seconds < (5 * SHORT if end is fall_silent else TIMEOUT)


class Held(DefaultLoadPlanner):
    """Plans, and goes on when a file is there."""

    def __init__(self, path: pathlib.Path) -> None:
        super().__init__()
        self.path = path

    def create_local_plan(self) -> LoadPlan:
        plan = super().create_local_plan()
        announce("planned")
        while not self.path.exists():
            time.sleep(0.01)
        return plan


def from_a_dying_source(rank: int, path: pathlib.Path) -> Any:
    if rank < 2:
        transport(dist.group.WORLD, 10).send_checkpoint([2], {"w": torch.ones(1 << 16), "n": 1})
        return None
    target: dict[str, Any] = {"w": torch.zeros(1 << 16), "n": 0}
    reader = PeerReader(transport(dist.group.WORLD, 10), [0, 1])
    try:
        load(target, storage_reader=reader, planner=Held(path), no_dist=True)
    except CheckpointException as error:
        return str(error), str(reader.failure)
    return bool(target["w"].all()), target["n"]


@pytest.mark.parametrize("killed", [[1], [0, 1]], ids=["one", "both"])
def test_sources_that_are_killed(killed: list[int], tmp_path: pathlib.Path) -> None:
    with Fleet(3) as fleet:
        fleet.start(from_a_dying_source, tmp_path / "go")
        fleet.wait_for(2, "planned", 60)
        for rank in killed:
            fleet.kill(rank)
        # Until it is really dead its memory can be read.
        fleet.outcomes(60, ranks=killed)
        (tmp_path / "go").touch()
        found = fleet.outcomes(60)[2].get()
    if killed == [1]:
        assert found == (True, 1)
    else:
        text, why = found
        assert re.search("rank [01]: PeerLost: rank [01]: connection lost", text)
        assert "PeerLost" in why


# ------------------------------------------------------------------------------------------------- FSDP, in processes


def module() -> nn.Module:
    return nn.Sequential(nn.Linear(12, 30), nn.LayerNorm(30), nn.Linear(30, 5, bias=False), nn.Linear(5, 1))


def across(parameter: nn.Parameter) -> Shard:
    """By columns, where that leaves shards of one size, as FSDP wants it."""
    return Shard(1) if parameter.ndim > 1 and parameter.shape[1] % 2 == 0 else Shard(0)


def train(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for _ in range(2):
        model(torch.randn(4, 12)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def of(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> dict[str, Any]:
    weights, moments = get_state_dict(model, optimizer)
    return {"model": weights, "optimizer": moments, "step": step}


def local(item: Any) -> Any:
    """Tensors of this rank only, which can be compared."""
    if isinstance(item, DTensor):
        return item.to_local()
    if isinstance(item, dict):
        return {key: local(value) for key, value in item.items()}
    return item


def fsdp(rank: int, sources: int, same_host: bool, directory: str) -> Any:
    """The first ranks give, all others take: twice with one reader, and once through a directory."""
    groups = [dist.new_group(list(range(sources))), dist.new_group(list(range(sources, 4)))]
    group = groups[rank >= sources]
    assert group is not None
    mesh = dist.device_mesh.DeviceMesh.from_group(group, "cpu")
    torch.manual_seed(rank)
    model, mover = module(), transport(dist.group.WORLD, same_host=same_host)
    receivers = list(range(sources, 4))
    if rank < sources:
        fully_shard(model, mesh=mesh)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
        for step in range(2):
            train(model, optimizer)
            source = of(model, optimizer, step)
            mover.send_checkpoint(receivers, source)
        save(source, checkpoint_id=directory, process_group=group)
        dist.barrier()
        return None
    if len(receivers) > 1:
        fully_shard(model, mesh=mesh, shard_placement_fn=across)
    reader = PeerReader(mover, list(range(sources)))
    optimizer = torch.optim.AdamW(model.parameters())
    for step in range(2):
        target = of(model, optimizer, -1)
        load(target, storage_reader=reader, process_group=group)
        set_state_dict(model, optimizer, model_state_dict=target["model"], optim_state_dict=target["optimizer"])
        assert target["step"] == step
    ours = local(of(model, optimizer, 1))
    dist.barrier()
    assert mover.report is not None
    other = module()
    if len(receivers) > 1:
        fully_shard(other, mesh=mesh, shard_placement_fn=across)
    optimizer = torch.optim.AdamW(other.parameters())
    theirs = of(other, optimizer, -1)
    load(theirs, checkpoint_id=directory, process_group=group)
    return mover.report.route, differences(ours, local(theirs)), threads()


def threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name == "transfuse-dcp"]


@pytest.fixture
def directory() -> Iterator[str]:
    path = tempfile.mkdtemp(dir="/dev/shm")
    yield path
    shutil.rmtree(path)


@pytest.mark.parametrize(("sources", "same_host"), [(2, True), (2, False), (3, False), (1, True)])
def test_fsdp_model_and_optimizer_are_as_from_a_directory(
    pool4: ProcessPool, sources: int, same_host: bool, directory: str
) -> None:
    for found in values(pool4.run(fsdp, sources, same_host, directory, deadline=110))[sources:]:
        route, differing, left = found
        assert differing == []
        assert route == ("memory" if same_host else "group")
        assert left == []


def one_fails(rank: int) -> Any:
    """Ranks 0 and 1 give to ranks 2 and 3, of which the last wants what there is not. Then both want the right."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("role", "shard"))["shard"]
    full = torch.arange(35.0).view(7, 5)
    mover, outcomes = transport(dist.group.WORLD), []
    reader = PeerReader(mover, [0, 1])
    for attempt in range(2):
        mine = distribute_tensor(full if rank < 2 else torch.zeros(7, 5), mesh, [Shard(rank // 2)])
        name = "other" if rank == 3 and not attempt else "w"
        try:
            if rank < 2:
                mover.send_checkpoint([2, 3], {"w": mine})
            else:
                with reader:
                    load({name: mine}, storage_reader=reader, process_group=mesh.get_group())
            outcomes.append("")
        except (CheckpointException, transfuse.SendFailed) as error:
            outcomes.append(f"{type(error).__name__}: {error}")
    return outcomes, torch.equal(mine.full_tensor(), full)


def test_a_failure_of_one_receiver_is_known_everywhere(pool4: ProcessPool) -> None:
    found = values(pool4.run(one_fails, deadline=110))
    for (first, second), right in found:
        assert second == ""
        assert right
        assert first
    for (first, _), _ in found[:2]:
        assert "SendFailed" in first
        assert "rank 2: PeerRefused" in first
        assert "rank 3: PeerRefused" in first
    for (first, _), _ in found[2:]:
        assert "Missing key in checkpoint state_dict: other" in first
        assert "(RANK 1)" in first  # Of the group that loads.


def comes_late(rank: int) -> Any:
    """Ranks 0 and 1 hold a half each, of which the second is not there when it is decided what to load."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("role", "shard"))["shard"]
    full, seconds = torch.arange(35.0).view(7, 5), 16.0
    mine = distribute_tensor(full if rank < 2 else torch.zeros(7, 5), mesh, [Shard(rank // 2)])
    dist.barrier()
    if rank == 1:
        time.sleep(seconds / 4 + 1)
    if rank < 2:
        transport(dist.group.WORLD, seconds).send_checkpoint([2, 3], {"w": mine})
    else:
        reader = PeerReader(transport(dist.group.WORLD, seconds), [0, 1])
        load({"w": mine}, storage_reader=reader, process_group=mesh.get_group())
    return torch.equal(mine.full_tensor(), full)


def test_a_source_that_comes_after_the_load_was_planned(pool4: ProcessPool) -> None:
    assert values(pool4.run(comes_late, deadline=110)) == [True] * 4


def guide(rank: int) -> Any:
    found = re.search(r"^```python\n(.*?)^```", GUIDE.read_text(), re.S | re.M)
    assert found is not None
    names: dict[str, Any] = {}
    exec(compile(found[1], str(GUIDE), "exec"), names)

    def whole(item: Any) -> Any:
        if isinstance(item, DTensor):
            return item.full_tensor()
        return {key: whole(value) for key, value in item.items()} if isinstance(item, dict) else item

    return cast(Any, whole(names["main"](rank)))


def test_the_guide(pool4: ProcessPool) -> None:
    first, *others = values(pool4.run(guide, deadline=110))
    assert first["step"] == 2
    for other in others:
        assert differences(first, other) == []
