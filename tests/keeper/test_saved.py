"""What lies in a directory of steps is read without a keeper, like a state that somebody serves."""

from __future__ import annotations

import logging
import pathlib
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

import transfuse
from keeping import Home, Job, exact, home, same, threaded, until  # noqa: F401
from saving import LABEL, Committed, flip, places
from transfuse._errors import SourcesDiffer, StateError, TargetMismatch, TransfuseError
from transfuse._keeper.slot_file import Label
from transfuse._keeper.storage import Record, Storage
from transfuse.dcp import DirectoryReader, KeeperWriter

pytestmark = pytest.mark.usefixtures("threaded")


def state(fill: float = 1.0) -> dict[str, Any]:
    torch.manual_seed(3)
    return {
        "model": {"w": torch.randn(300, 1000) * fill, "b": torch.randn(7)},
        "optimizer": {"m": torch.randn(5)},
        "n": 4,
    }


def blank(tree: Any) -> Any:
    if isinstance(tree, dict):
        return {key: blank(value) for key, value in tree.items()}
    return torch.zeros_like(tree) if isinstance(tree, torch.Tensor) else 0


@pytest.fixture
def one(home: Home, tmp_path: pathlib.Path) -> dict[str, Any]:  # noqa: F811
    """Steps 6 and 7 of one rank in ``tmp_path``."""
    committed = Committed(home, [state()])
    for step in (6, 7):
        committed.write(Storage.at(tmp_path), label=Label(1, step))
    return state()


def mesh_of(rank: int, ranks: int = 2) -> DeviceMesh:
    return DeviceMesh("cpu", torch.arange(ranks), _init_backend=False, _rank=rank)


def shards(whole: torch.Tensor, ranks: int = 2) -> list[DTensor]:
    return [
        DTensor.from_local(
            part, mesh_of(rank, ranks), [Shard(0)], run_check=False, shape=whole.shape, stride=whole.stride()
        )
        for rank, part in enumerate(whole.chunk(ranks))
    ]


# ------------------------------------------------------------------------------------------------------- whole states


@pytest.mark.parametrize("place", [1, 2, 3])
def test_the_newest_step_is_fetched(home: Home, tmp_path: pathlib.Path, place: int) -> None:  # noqa: F811
    url = list(places(tmp_path))[place]
    committed = Committed(home, [state()])
    for step in (6, 7):
        committed.write(Storage.at(url), label=Label(1, step))
    fetched = transfuse.fetch(url)
    assert fetched.step == 7
    assert exact(fetched.state, state())
    target = blank(state())
    pointer = target["model"]["w"].data_ptr()
    assert transfuse.fetch(url, target, delta=True).step == 7
    assert exact(target, state())
    assert target["model"]["w"].data_ptr() == pointer
    assert transfuse.peek(url).step == 7
    assert list(transfuse.peek(url).manifest.paths) == [
        "['model']['w']",
        "['model']['b']",
        "['optimizer']['m']",
        "['n']",
    ]


@pytest.mark.usefixtures("one")
def test_it_is_fetched_ahead(tmp_path: pathlib.Path) -> None:
    target = blank(state())
    with transfuse.fetch(f"file://{tmp_path}", target, step=6, wait=False) as pending:
        until(pending.done)
        assert not target["model"]["w"].any()
        assert pending.install().step == 6
    assert exact(target, state())


def test_a_step_is_chosen_by_the_address_or_by_the_call(one: Any, tmp_path: pathlib.Path) -> None:
    url = f"file://{tmp_path}"
    assert transfuse.fetch(f"{url}?step=6").step == 6
    assert transfuse.fetch(url, step=6).step == 6
    assert transfuse.peek(f"{url}?step=6").step == 6
    with pytest.raises(StateError, match="has no step 5 that is whole; steps there: 7, 6"):
        transfuse.fetch(url, step=5)
    with pytest.raises(ValueError, match="step=7, and the address says step 6: give one of the two"):
        transfuse.fetch(f"{url}?step=6", step=7)


def test_an_entry_alone_and_names_and_types_on_the_way(one: Any, tmp_path: pathlib.Path) -> None:
    url = f"file://{tmp_path}"
    assert exact(transfuse.fetch(url, entry="model").state, one["model"])
    assert transfuse.fetch(url, entry="n").state == 4
    half = {"w": torch.zeros(300, 1000, dtype=torch.bfloat16)}
    transfuse.fetch(url, half, entry="model", cast=True)
    assert exact(half["w"], one["model"]["w"].bfloat16())
    other = {"net": {"weight": torch.zeros(300, 1000)}}
    transfuse.fetch(url, other, map_path=lambda path: {"model.w": "net.weight"}.get(path))
    assert exact(other["net"]["weight"], one["model"]["w"])
    with pytest.raises(StateError, match="the state has no entry 'modle'"):
        transfuse.fetch(url, entry="modle")
    with pytest.raises(TargetMismatch):
        transfuse.fetch(url, {"w": torch.zeros(299, 1000), "b": torch.zeros(7)}, entry="model")


def test_a_module_is_loaded(home: Home, tmp_path: pathlib.Path) -> None:  # noqa: F811
    model, other = torch.nn.Linear(30, 4), torch.nn.Linear(30, 4)
    Committed(home, [{"model": model.state_dict()}]).write(Storage.at(tmp_path))
    transfuse.fetch(f"file://{tmp_path}", other, entry="model")
    assert exact(dict(other.state_dict()), dict(model.state_dict()))


# ------------------------------------------------------------------------------------------------------- several ranks


def test_shards_become_other_shards_and_whole_tensors(home: Home, tmp_path: pathlib.Path) -> None:  # noqa: F811
    whole = torch.randn(12, 500)
    Committed(home, [{"w": shard, "b": torch.ones(3)} for shard in shards(whole)]).write(Storage.at(tmp_path))
    url = f"file://{tmp_path}"
    plain = {"w": torch.zeros(12, 500), "b": torch.zeros(3)}
    transfuse.fetch(url, plain)
    assert exact(plain, {"w": whole, "b": torch.ones(3)})
    (target,) = [{"w": shard} for rank, shard in enumerate(shards(torch.zeros(12, 500), 3)) if rank == 1]
    transfuse.fetch(url, target, strict=True, map_path=lambda path: path if path == "w" else None)
    assert exact(target["w"].to_local(), whole[4:8])
    fresh = transfuse.fetch(url, entry="w").state
    assert exact(fresh.to_local(), whole)


def test_of_what_ranks_have_for_themselves_one_is_read(home: Home, tmp_path: pathlib.Path) -> None:  # noqa: F811
    """As with batch normalization: all ranks have all leaves, and some have values of their own."""
    states = [{"w": torch.ones(1000), "mean": torch.full((4,), float(rank))} for rank in range(2)]
    Committed(home, states).write(Storage.at(tmp_path))
    url = f"file://{tmp_path}"
    assert exact(transfuse.fetch(url).state, states[0])
    assert exact(transfuse.fetch(f"{url}?rank=1").state, states[1])
    assert exact(transfuse.fetch(f"{url}?rank=1&step=7").state, states[1])


def test_what_differs_between_ranks_is_never_mixed(home: Home, tmp_path: pathlib.Path) -> None:  # noqa: F811
    whole = torch.randn(12, 5)
    states = [{"w": shard, "mean": torch.full((4,), float(rank))} for rank, shard in enumerate(shards(whole))]
    Committed(home, states).write(Storage.at(tmp_path))
    with pytest.raises(SourcesDiffer, match=r"1 leaves differed between the 2 ranks that committed them: \['mean'\]"):
        transfuse.fetch(f"file://{tmp_path}")
    assert exact(transfuse.fetch(f"file://{tmp_path}", entry="w").state.to_local(), whole)


def test_stages_of_a_pipeline_come_together(home: Home, tmp_path: pathlib.Path) -> None:  # noqa: F811
    Committed(home, [{f"layer{rank}": torch.full((9,), float(rank))} for rank in range(3)]).write(Storage.at(tmp_path))
    layers = {f"layer{rank}": torch.zeros(9) for rank in range(3)}
    transfuse.fetch(f"file://{tmp_path}", layers)
    assert exact(layers, {f"layer{rank}": torch.full((9,), float(rank)) for rank in range(3)})


def test_what_belongs_to_a_rank_alone_stays_there(home: Home, tmp_path: pathlib.Path) -> None:  # noqa: F811
    Committed(home, [{"w": torch.ones(3)}], rank_state=lambda: {"rng": torch.arange(5)}).write(Storage.at(tmp_path))
    assert exact(transfuse.fetch(f"file://{tmp_path}").state, {"w": torch.ones(3)})


# -------------------------------------------------------------------------------------------------------------- damage


def damage(tmp_path: pathlib.Path, step: int, leaf: torch.Tensor) -> None:
    path = tmp_path / f"step-{step}-gen-1" / "rank-0.slot"
    flip(path, path.read_bytes().index(leaf.numpy().tobytes()) + 3)


def test_a_damaged_step_is_named_and_the_next_older_one_is_used(
    one: Any, tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture
) -> None:
    damage(tmp_path, 7, one["model"]["b"])
    url, target = f"file://{tmp_path}", blank(one)
    with caplog.at_level(logging.WARNING, "transfuse"):
        assert transfuse.fetch(url, target).step == 6
    assert exact(target, one)
    (record,) = caplog.records
    text = record.getMessage()
    assert f"{tmp_path}/step-7-gen-1/rank-0.slot is damaged: 2 leaves differ" in text
    assert "['model']['b']" in text
    assert text.endswith("Step 6 is used instead")
    untouched = blank(one)
    with pytest.raises(StateError, match=r"step-7-gen-1/rank-0.slot is damaged"):
        transfuse.fetch(url, untouched, step=7)
    assert exact(untouched, blank(one))


@pytest.mark.parametrize("how", ["cut", "gone", "head", "record"])
def test_every_kind_of_damage_is_passed_over(
    one: Any, tmp_path: pathlib.Path, how: str, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "step-7-gen-1"
    file = folder / "rank-0.slot"
    if how == "cut":
        file.write_bytes(file.read_bytes()[:-1])
    elif how == "gone":
        file.unlink()
    else:
        flip(folder / "step.json" if how == "record" else file, 70 if how == "record" else 4200)
    assert transfuse.fetch(f"file://{tmp_path}").step == 6
    assert "Step 6 is used instead" in caplog.text
    for path in (tmp_path / "step-6-gen-1").iterdir():
        path.write_bytes(b"")
    with pytest.raises(StateError, match=r"no step in .* can be used:\n.*step-7-gen-1.*\n.*step-6-gen-1"):
        transfuse.fetch(f"file://{tmp_path}")


def test_an_unfinished_step_is_not_looked_at(one: Any, tmp_path: pathlib.Path) -> None:
    (tmp_path / "step-7-gen-1" / "step.json").unlink()
    assert transfuse.fetch(f"file://{tmp_path}").step == 6


@pytest.mark.parametrize(
    ("address", "why"),
    [
        ("file:///nowhere/at/all", "/nowhere/at/all: cannot be used: .*No such file"),
        ("memory://nothing/here", "has no step that is whole; steps there: none"),
        ("nosuch://x", "Protocol not known"),
    ],
)
def test_an_address_that_leads_nowhere(address: str, why: str) -> None:
    with pytest.raises(TransfuseError, match=why):
        transfuse.fetch(address)


def test_a_directory_is_given_alone() -> None:
    with pytest.raises(ValueError, match="the directory file:///a holds all ranks' states: give it alone"):
        transfuse.fetch(["file:///a", "localhost:1234"])


# ----------------------------------------------------------------------------------------- torch.distributed.checkpoint


@pytest.mark.filterwarnings("ignore:torch.distributed is (disabled, )?unavailable or uninitialized")
def test_dcp_loads_what_a_job_has_kept(home: Home, tmp_path: pathlib.Path) -> None:  # noqa: F811
    whole = torch.randn(12, 500)
    committed = Committed(home, [{"model": {"w": one, "b": torch.ones(3)}, "step": 3} for one in shards(whole)])
    for step in (6, 7):
        committed.write(Storage.at(tmp_path), label=Label(1, step))
    for where, wanted, found in ((tmp_path, None, 7), (f"file://{tmp_path}", "step-6", 6)):
        state: dict[str, Any] = {"model": {"w": torch.zeros(12, 500), "b": torch.zeros(3)}, "step": 0}
        reader = DirectoryReader(where, wanted)
        load(state, storage_reader=reader, no_dist=True)
        assert exact(state, {"model": {"w": whole, "b": torch.ones(3)}, "step": 3})
        assert reader.step == found
    load(state, storage_reader=reader, checkpoint_id="step-7", no_dist=True)
    assert reader.step == 7
    with pytest.raises(CheckpointException, match="has no step 5 that is whole"):
        load(state, storage_reader=reader, checkpoint_id=5, no_dist=True)
    assert isinstance(reader.failure, StateError)


@pytest.mark.filterwarnings("ignore:torch.distributed is (disabled, )?unavailable or uninitialized")
def test_dcp_loads_what_dcp_has_saved_to_keepers(home: Home, tmp_path: pathlib.Path) -> None:  # noqa: F811
    keeper, storage = home.start(), Storage.at(tmp_path)
    state = {"model": {"w": torch.randn(30, 4), "b": torch.randn(9)}, "lr": 0.5}
    with Job(1) as job:
        job.start(same({}))
        job.all(lambda keep: save(state, storage_writer=KeeperWriter(keep, 7), no_dist=True))
        kept = keeper.books.find(0, LABEL)
        assert kept is not None
        assert kept.brief is not None
        file = storage.write_rank(LABEL, kept.file, kept.brief, kept.brief.bundles.owners, lambda nbytes: None)
        storage.write_record(LABEL, Record.of(LABEL, 1, [file]))
    got = blank(state)
    reader = DirectoryReader(tmp_path)
    load(got, storage_reader=reader, no_dist=True)
    assert exact(got, state)
    assert reader.step == 7


# ------------------------------------------------------------------------------------------------------------- the hub


def test_a_directory_as_a_hub(home: Home, tmp_path: pathlib.Path) -> None:  # noqa: F811
    import json
    import urllib.request

    committed, storage = Committed(home, [{"model": {"w": torch.arange(6.0)}, "n": 3}]), Storage.at(tmp_path)
    committed.write(storage)
    with transfuse.hub(f"file://{tmp_path}", prefix="model.") as hub:

        def get(path: str) -> bytes:
            with urllib.request.urlopen(f"{hub.endpoint}{path}") as answer:
                return bytes(answer.read())

        about = json.loads(get(f"/api/models/{hub.name}/revision/main"))
        assert [one["rfilename"] for one in about["siblings"]] == ["model.safetensors"]
        data = get(f"/{hub.name}/resolve/{about['sha']}/model.safetensors")
        assert data.endswith(torch.arange(6.0).numpy().tobytes())
        committed.write(storage, label=Label(1, 8))
        until(lambda: json.loads(get(f"/api/models/{hub.name}/revision/main"))["sha"] != about["sha"])
