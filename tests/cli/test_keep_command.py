"""``transfuse keep``: a keeper in the foreground, the list of keepers, ending one, and keepers as addresses."""

from __future__ import annotations

import json
import os
import pathlib
import signal
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from typer.testing import CliRunner, Result

import transfuse
from commands import Running
from keeping import SECONDS, Home, Job, home, threaded, until  # noqa: F401
from transfuse.cli import keeper_table
from transfuse.cli.app import app
from transfuse.testing.ranks import Fleet, freeze

pytestmark = pytest.mark.usefixtures("home", "without_variables")


@pytest.fixture
def without_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("TRANSFUSE_RUN", "TRANSFUSE_TOKEN"):
        monkeypatch.delenv(name, raising=False)


def run(*arguments: str) -> Result:
    return CliRunner().invoke(app, [*arguments, "--timeout", str(SECONDS)])


def said(*arguments: str) -> Any:
    done = run(*arguments, "--json")
    assert done.exit_code == 0, done.output
    return json.loads(done.stdout)


# ------------------------------------------------------------------------------------------------- in the foreground


def commit_shards(rank: int, run: str) -> None:
    """A job that ends without ``close()``: what it has committed stays."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    whole = torch.arange(24.0).reshape(6, 4)
    state = {"sharded": distribute_tensor(whole, mesh, [Shard(0)]), "plain": torch.ones(3), "step": 7}
    keep = transfuse.keep(lambda: state, run=run, timeout=SECONDS)
    assert keep.restore() is None
    report = keep.commit(7)
    assert report is not None
    assert report.outcome == "committed"
    keep.detach()


def test_a_keeper_in_the_foreground_from_its_start_to_its_end(home: Home, tmp_path: pathlib.Path) -> None:  # noqa: F811
    assert run("keep", "--status").output == f"no keeper in {home.base}\n"
    with Running("keep", "--run", "side car") as keeper:
        address = keeper.line()
        with Fleet(2, timeout=SECONDS) as fleet:
            fleet.start(commit_shards, "side car")
            for outcome in fleet.outcomes(SECONDS):
                outcome.get()

        # What it says about itself.
        (status,) = said("keep", "--status")
        assert (status["run"], status["is_named"], status["keeper"]) == ("side car", True, "alive")
        assert (status["address"], status["confirmed_step"]) == (address, 7)
        assert until(lambda: said("keep", "--status")[0]["attached"] == [])
        assert [(held["rank"], held["step"], held["whole"]) for held in status["states"]] == [
            (0, 7, True),
            (1, 7, True),
        ]
        # If memory runs out, the kernel ends the keeper before training.
        assert pathlib.Path(f"/proc/{status['pid']}/oom_score_adj").read_text() == "500\n"
        token = pathlib.Path(status["token_file"])
        table = run("keep", "--status").output
        assert all(word in table for word in ("side car", "alive", str(status["pid"]), address, str(token)))
        assert f"side car: {address}, token in {token}, holds step 7 (ranks 0-1)" in table
        assert token.read_text() not in table + json.dumps(status)

        # Its address, and its name, are those of a server.
        assert run("inspect", address).exit_code == 1
        for where in ([address, "--token-file", str(token)], ["keeper:side car"]):
            seen = said("inspect", *where)
            assert seen["step"] == 7
            assert [leaf["name"] for leaf in seen["leaves"]] == ["sharded", "plain", "step"]
        out = tmp_path / "state.pt"
        done = run("fetch", "keeper:side car", "--out", str(out))
        assert done.exit_code == 0, done.output
        got = torch.load(out)
        assert torch.equal(got["sharded"], torch.arange(24.0).reshape(6, 4))  # From both ranks.
        assert torch.equal(got["plain"], torch.ones(3))
        assert got["step"] == 7

        # There is only one for a run.
        again = run("keep", "--run", "side car")
        assert again.exit_code == 1
        assert f"process {status['pid']}" in again.output

        freeze(status["pid"])
        try:
            frozen = CliRunner().invoke(app, ["keep", "--status", "--json", "--timeout", "0.5"])
        finally:
            os.kill(status["pid"], signal.SIGCONT)
        assert [(one["keeper"], one["pid"]) for one in json.loads(frozen.stdout)] == [("silent", status["pid"])]

        done = run("keep", "--stop", str(status["pid"]))
        # The workers are gone. What has started them is there, and might start others.
        assert done.exit_code == 0
        assert done.output.startswith(f"keeper {status['pid']} of side car has ended. Its job has kept steps")
        _, err, code = keeper.end()
    assert code == 0, err
    assert f"run side car, in {status['directory']}" in err
    again = run("keep", "--stop", "side car")
    assert (again.exit_code, again.output) == (0, "the keeper of side car was dead; its directory is removed\n")
    assert list(home.base.iterdir()) == []


@pytest.mark.usefixtures("threaded")
def test_a_keeper_in_the_foreground_ends_with_its_job(home: Home) -> None:  # noqa: F811
    """And the token of the environment is not used for a keeper."""
    with Running("keep", environ={"TRANSFUSE_RUN": "job", "TRANSFUSE_TOKEN": "other"}) as keeper:
        keeper.line()
        states = [{"w": torch.full((4,), float(rank))} for rank in range(2)]
        with Job(2) as job:
            job.start([lambda state=state: state for state in states])  # type: ignore[misc]
            assert job.commit(1) == ["committed"] * 2
            # Each rank has all leaves: one rank's values, not a mixture.
            out = home.base / "state.pt"
            assert run("fetch", "keeper:job", "--out", str(out)).exit_code == 0
            assert torch.equal(torch.load(out)["w"], states[0]["w"])
            out.unlink()
            job.all(lambda keep: keep.close())
        _, err, code = keeper.end()
    assert code == 0, err
    assert "all ranks have closed" in err
    assert list(home.base.iterdir()) == []


# ---------------------------------------------------------------------------------------------------------- to end it


@pytest.mark.usefixtures("threaded")
def test_a_dead_keeper_is_listed_until_stop_removes_its_directory(home: Home) -> None:  # noqa: F811
    with Job(1, "lost") as job:
        job.start([lambda: {"w": torch.ones(2)}])
        assert job.commit(3) == ["committed"]
        pid = said("keep", "--status")[0]["pid"]
        assert pid != os.getpid()
        os.kill(pid, signal.SIGKILL)
        until(lambda: said("keep", "--status")[0]["keeper"] == "dead")
        (dead,) = said("keep", "--status")
        assert dead["run"] == "lost"
        assert "token_file" not in dead
        table = run("keep", "--status").output
        assert "dead" in table
        assert dead["directory"] in table
        assert run("fetch", "keeper:lost", "--out", str(home.base / "x.pt")).exit_code == 1
        done = run("keep", "--stop", "lost")
        assert done.exit_code == 0, done.output
    assert list(home.base.iterdir()) == []


@pytest.mark.usefixtures("threaded")
def test_a_job_whose_keeper_is_stopped_does_not_begin_at_0(home: Home) -> None:  # noqa: F811
    with Job(1) as job:
        job.start([lambda: {"w": torch.ones(2)}])
        assert job.commit(3) == ["committed"]
        done = run("keep", "--stop", "job")
        assert done.exit_code == 0, done.output
        assert "Its job has kept steps and runs on" in done.output
    with Job(1) as job:
        job.start([lambda: {"w": torch.ones(2)}])
        (error,) = job.errors(lambda keep: keep.restore())
        assert "this run has kept steps, and none of them can be restored now" in str(error)
        assert job.restore(missing_ok=True) is None
        assert job.commit(1) == ["committed"]
        job.all(lambda keep: keep.close())
    until(lambda: list(home.base.iterdir()) == [])


@pytest.mark.parametrize(
    ("arguments", "code", "text"),
    [
        (["keep"], 2, "which run?"),
        (["keep", "--run", " "], 2, "empty"),
        (["keep", "--status", "--stop", "x"], 2, "commands of their own"),
        (["keep", "--status", "--check"], 2, "commands of their own"),
        (["keep", "--stop", "nobody"], 1, "no keeper of a run nobody"),
        (["inspect", "keeper:nobody"], 1, "no keeper of a run nobody"),
        (["fetch", "keeper:nobody", "--out", "x.pt"], 1, "no keeper of a run nobody"),
    ],
)
def test_what_is_refused(arguments: list[str], code: int, text: str) -> None:
    done = run(*arguments)
    assert done.exit_code == code, done.output
    assert text in " ".join(done.output.split())


def test_what_a_keeper_holds_in_a_line() -> None:
    def held(rank: int, step: int, **more: Any) -> dict[str, Any]:
        return {"rank": rank, "generation": 1, "step": step, "whole": True, "replica": False, "host": 0, **more}

    states = [
        held(0, 3),
        held(0, 4),
        held(1, 3),
        held(1, 4, whole=False),
        held(2, 3, replica=True, host=1),
        held(3, 3, replica=True, host=1),
        held(9, 3, replica=True, host=None),
    ]
    assert keeper_table.holdings(states) == (
        "step 4 (rank 0), step 4 (rank 1, not whole), step 3 (ranks 0-1), step 3 of a host that is gone (rank 9), "
        "step 3 of host 1 (ranks 2-3)"
    )
