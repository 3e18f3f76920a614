"""Directories of steps on the command line: looked at, fetched from, written, and served as a hub."""

from __future__ import annotations

import json
import pathlib
import urllib.request
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch.distributed.tensor import Shard
from typer.testing import CliRunner

import transfuse
from commands import Running
from keeping import Home, Job, exact, home, same, threaded  # noqa: F401
from saving import Committed, flip
from shards import shard
from transfuse import Block
from transfuse._keeper.slot_file import Label
from transfuse._keeper.storage import Storage
from transfuse.cli.app import app

pytestmark = pytest.mark.usefixtures("threaded")


def run(*arguments: object, code: int = 0) -> str:
    done = CliRunner().invoke(app, [*map(str, arguments)])
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    assert done.exit_code == code, done.output
    return done.stderr if code else done.stdout


def state() -> dict[str, Any]:
    return {"model": {"w": torch.arange(3000.0), "b": torch.ones(3)}, "optimizer": {"m": torch.full((5,), 2.0)}}


@pytest.fixture
def steps(home: Home, tmp_path: pathlib.Path) -> pathlib.Path:  # noqa: F811
    """A directory with steps 6 and 7 of two ranks, and the beginning of step 8."""
    (directory := tmp_path / "steps").mkdir()
    committed = Committed(home, [state(), state()])
    for step in (6, 7, 8):
        committed.write(Storage.at(directory), label=Label(1, step))
    (directory / "step-8-gen-1" / "step.json").unlink()
    return directory


def test_inspect_lists_steps_and_shows_the_newest(steps: pathlib.Path) -> None:
    lines = run("inspect", steps).splitlines()
    assert lines[0] == f"{steps} (directory)"
    assert lines[2].split() == ["step", "generation", "ranks", "size", "written", "version", "state"]
    assert [(line.split()[0], line.split()[-1]) for line in lines[3:6]] == [
        ("7", "complete"),
        ("6", "complete"),
        ("8", "unfinished"),
    ]
    assert lines[3].split()[1:3] == ["1", "2"]
    assert "step 7, rank 0:" in lines
    assert any(line.startswith("model.w") for line in lines)
    assert "step 6, rank 0:" in run("inspect", steps, "--step", 6).splitlines()
    assert "step 6, rank 1:" in run("inspect", f"{steps}?step=6&rank=1").splitlines()
    assert "whole" in run("inspect", steps, "--verify").splitlines()[3]
    told = json.loads(run("inspect", f"file://{steps}", "--json"))
    assert [(one["step"], one["state"], one["ranks"]) for one in told["steps"]] == [
        (7, "complete", 2),
        (6, "complete", 2),
        (8, "unfinished", None),
    ]
    assert [leaf["name"] for leaf in told["leaves"]] == ["model.w", "model.b", "optimizer.m"]


def test_inspect_says_what_is_damaged(steps: pathlib.Path) -> None:
    file = steps / "step-7-gen-1" / "rank-0.slot"
    flip(file, file.read_bytes().index(torch.arange(3000.0).numpy().tobytes()))
    assert "complete" in run("inspect", steps).splitlines()[3]
    assert "rank-0.slot is damaged: " in run("inspect", steps, "--verify")
    flip(steps / "step-7-gen-1" / "step.json", 60)
    lines = run("inspect", steps).splitlines()
    assert f"{steps}/step-7-gen-1/step.json is damaged" in lines[3]
    assert "step 6, rank 0:" in lines
    (steps / "step-6-gen-1" / "rank-1.slot").unlink()
    lines = run("inspect", steps).splitlines()
    assert "the files of ranks [1] are missing" in lines[4]
    assert len(lines) == 6


def test_fetch_writes_a_file(steps: pathlib.Path, tmp_path: pathlib.Path) -> None:
    out = tmp_path / "model.safetensors"
    said = run("fetch", steps, "--output", out)
    assert "fetched 3 leaves" in said
    assert exact(load_file(out)["model.w"], torch.arange(3000.0))
    run("fetch", steps, "--out", out, "--overwrite", "--step", 6)
    assert "no step 5 that is whole; steps there: 7, 6" in run(
        "fetch", steps, "-o", tmp_path / "no.pt", "--step", 5, code=1
    )


def test_fetch_goes_to_an_older_step_and_says_so(steps: pathlib.Path, tmp_path: pathlib.Path) -> None:
    file = steps / "step-7-gen-1" / "rank-0.slot"
    flip(file, file.read_bytes().index(torch.arange(3000.0).numpy().tobytes()))
    done = CliRunner().invoke(app, ["fetch", str(steps), "-o", str(tmp_path / "a.pt")])
    assert done.exit_code == 0
    assert "step-7-gen-1/rank-0.slot is damaged" in done.stderr
    assert "Step 6 is used instead" in done.stderr


def test_a_directory_without_steps_is_none(tmp_path: pathlib.Path) -> None:
    assert "is a directory; no step is saved in it: name a file in it, or look again when one is" in run(
        "inspect", tmp_path, code=1
    )
    assert "--step and --verify belong to one" in run("inspect", tmp_path, "--verify", code=2)
    run("fetch", tmp_path, "-o", tmp_path / "x.pt", code=2)


@pytest.mark.parametrize("kind", ["whole", "DTensor", "Block"])
def test_save_writes_a_running_jobs_step(tmp_path: pathlib.Path, kind: str) -> None:
    whole = torch.arange(48.0).reshape(8, 6)
    (directory := tmp_path / "steps").mkdir()
    shards = [shard(whole, range(2), rank, Shard(0)) for rank in range(2)]
    leaves: dict[str, list[Any]] = {"whole": [whole], "DTensor": shards, "Block": [Block.of(one)[0] for one in shards]}
    states = [{"w": leaf} for leaf in leaves[kind]]
    servers = [transfuse.serve(one, step=12) for one in states]
    addresses = [server.address for server in servers]
    said = run("save", *addresses, directory)
    assert f"wrote {directory}/step-12-gen-0" in said
    fetched = transfuse.fetch(f"file://{directory}")
    assert fetched.step == 12
    assert exact(fetched.state, {"w": whole})
    assert "step 12 is in" in run("save", *addresses, directory, code=1)
    for server in servers:
        server.close()
    assert "Look whether it is mounted" in run("save", addresses[0], tmp_path / "missing", code=1)


def test_save_wants_to_know_the_step(tmp_path: pathlib.Path) -> None:
    with transfuse.serve({"w": torch.ones(3)}) as server:
        assert "does not say at which step it is: name it with --step" in run("save", server.address, tmp_path, code=1)
        told = json.loads(run("save", server.address, f"file://{tmp_path}", "--step", 4, "--json"))
    assert (told["step"], told["generation"]) == (4, 0)
    assert transfuse.fetch(f"file://{tmp_path}").step == 4


def test_what_was_saved_once_is_the_newest(steps: pathlib.Path) -> None:
    with transfuse.serve({"w": torch.ones(3)}, step=5) as server:
        run("save", server.address, steps)
    assert transfuse.fetch(f"file://{steps}").step == 7
    with transfuse.serve({"w": torch.ones(3)}, step=9) as server:
        run("save", server.address, steps)
    assert exact(transfuse.fetch(f"file://{steps}").state, {"w": torch.ones(3)})


def test_save_from_a_keeper(home: Home, tmp_path: pathlib.Path) -> None:  # noqa: F811
    home.start("named")
    with Job(2, run="named") as job:
        job.start(same(state(), state()))
        job.commit(3)
        run("save", "keeper:named", tmp_path)
    assert exact(transfuse.fetch(f"file://{tmp_path}", step=3).state, state())


def test_a_directory_is_a_hub(steps: pathlib.Path) -> None:
    with Running("hub", str(steps), "--prefix", "model.", "--json") as command:
        endpoint = json.loads(command.line())["endpoint"]
        with urllib.request.urlopen(f"{endpoint}/api/models/live/model/revision/main") as answer:
            names = [one["rfilename"] for one in json.loads(answer.read())["siblings"]]
        assert names == ["model.safetensors"]
