"""What a run's next process finds: after close(), after a job that was left, and when the keeper itself has gone."""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

import transfuse
from keeping import SECONDS, Home, home, until  # noqa: F401
from transfuse._errors import StateError
from transfuse._keeper import runs
from transfuse._keeper.client import Keep
from transfuse._keeper.runs import Process
from transfuse.cli.app import app

pytestmark = pytest.mark.usefixtures("home", "without_variables")


@pytest.fixture
def without_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.startswith(("TORCHELASTIC_", "PET_", "TRANSFUSE_RUN")):
            monkeypatch.delenv(name)


@pytest.fixture
def agent(monkeypatch: pytest.MonkeyPatch) -> Iterator[subprocess.Popen[bytes]]:
    """A process that has started the workers, and lives until the test ends it."""
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE) as process:
        found = Process.of(process.pid)
        assert found is not None
        monkeypatch.setattr(runs, "_find_agent", lambda: found)
        try:
            yield process
        finally:
            process.kill()


def keep(value: float = 0.0, **options: Any) -> tuple[Keep, torch.Tensor]:
    weights = torch.full((3,), value)
    return transfuse.keep(lambda: {"w": weights}, timeout=SECONDS, **options), weights


def in_a_process(fn: Callable[[], object]) -> int:
    """Do something in a process of its own, which then ends. Returns its pid."""
    child = os.fork()
    if not child:
        code = 1
        try:
            fn()
            code = 0
        finally:
            os._exit(code)
    assert os.waitpid(child, 0)[1] == 0
    return child


def train(upto: int, end: Callable[[Keep], object], **options: Any) -> None:
    """The first process of a job: it has nothing to restore."""
    kept, weights = keep(**options)
    assert kept.restore() is None
    for step in range(1, upto + 1):
        weights.fill_(step)
        report = kept.commit(step)
        assert report is not None
        assert report.outcome == "committed"
    end(kept)


def warned(caplog: pytest.LogCaptureFixture) -> str:
    return "\n".join(record.getMessage() for record in caplog.records if record.levelname == "WARNING")


# ----------------------------------------------------------------------------------------------------- after close()


@pytest.mark.processes
@pytest.mark.parametrize("name", [None, pytest.param("named", marks=pytest.mark.soak)])
def test_a_run_that_torchrun_starts_again_after_its_end_goes_on_from_there(
    home: Home,  # noqa: F811
    agent: subprocess.Popen[bytes],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    name: str | None,
) -> None:
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    keeper = home.start(name)
    in_a_process(lambda: train(5, Keep.close, run=name))
    until(lambda: home.status(name)["ended_step"] == 5)
    status = home.status(name)
    # Only the newest step is kept.
    assert [held["step"] for held in status["states"]] == [5]
    assert status["bytes"] == status["states"][0]["bytes"]
    assert "ended at step 5" in CliRunner().invoke(app, ["keep", "--status"], env={"COLUMNS": "300"}).output

    kept, weights = keep(run=name)
    assert kept.restore() == 5
    assert weights.tolist() == [5.0] * 3
    assert "this run has ended at step 5: all ranks have closed it" in warned(caplog)
    kept.close()

    # The same process begins another training: the next fold.
    until(lambda: home.status(name)["ended_step"] == 5)
    kept.close()
    next_one, _ = keep(run=name)
    assert home.ended(keeper)
    assert next_one.restore() is None
    next_one.close()
    agent.kill()
    agent.wait()
    until(lambda: not list(home.base.iterdir()))


def test_a_run_of_another_agent_is_forgotten_when_it_is_closed(home: Home, agent: subprocess.Popen[bytes]) -> None:  # noqa: F811
    """Its next process may well be another training: the next seed of a loop."""
    keeper = home.start("loop")
    in_a_process(lambda: train(2, Keep.close, run="loop"))
    assert home.ended(keeper)
    assert agent.poll() is None
    assert list(home.base.iterdir()) == []


TORCHRUN = """
import os, sys, torch, torch.distributed as dist, transfuse

def say(*words):
    os.write(1, (" ".join(map(str, words)) + "\\n").encode())  # At once: ranks share the output.

dist.init_process_group("gloo", init_method="transfuse://")
weights = torch.zeros(3)
keep = transfuse.keep(lambda: {"w": weights})
step = keep.restore()
say("restored", dist.get_rank(), step, weights[0].item())
for step in range((step or 0) + 1, 4):
    weights.fill_(step)
    keep.commit(step)
    say("trained", step)
keep.close()
dist.barrier()
if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
    sys.exit("the final evaluation fails")
keep = transfuse.keep(lambda: {"w": weights})
say("next fold", keep.restore())
keep.close()
"""


@pytest.mark.soak  # The first test has the same without torchrun, and tests/house/test_readme.py has torchrun.
def test_an_error_after_close_trains_no_step_again_under_torchrun(home: Home, tmp_path: pathlib.Path) -> None:  # noqa: F811
    program = tmp_path / "job.py"
    program.write_text(TORCHRUN)
    words = ["-m", "torch.distributed.run", "--nproc-per-node=2", "--max-restarts=1", "--monitor-interval=0.05"]
    done = subprocess.run(
        [sys.executable, *words, str(program)],
        capture_output=True,
        text=True,
        timeout=4 * SECONDS,
        start_new_session=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"},
    )
    assert done.returncode == 0, done.stderr
    assert sorted(line for line in done.stdout.splitlines() if line.startswith("restored")) == sorted(
        f"restored {rank} {found}" for rank in range(2) for found in ("None 0.0", "3 3.0")
    )
    assert done.stdout.count("trained") == 6
    assert done.stdout.count("next fold None") == 2
    assert "has ended at step 3" in done.stderr
    until(lambda: not list(home.base.iterdir()))


# ------------------------------------------------------------------------------------------------- jobs without a name


@pytest.mark.processes
def test_a_job_without_a_name_says_from_whose_state_it_goes_on(
    home: Home,  # noqa: F811
    agent: subprocess.Popen[bytes],
    caplog: pytest.LogCaptureFixture,
) -> None:
    keeper = home.start(None)
    pid = in_a_process(lambda: train(4, Keep.detach))
    kept, _ = keep()
    assert kept.restore() == 4
    text = warned(caplog)
    assert f"process {pid} has committed it at 20" in text
    assert f"process {agent.pid} has started the same command before" in text
    assert f"transfuse keep --stop {os.getpid()}" in text
    caplog.clear()
    kept.commit(5)
    assert kept.restore() == 5  # Its own: that is no news.
    assert "has committed it" not in warned(caplog)
    kept.close()
    assert home.ended(keeper)


# --------------------------------------------------------------------------------------- a keeper that has gone


@pytest.mark.processes
def test_a_named_run_remembers_its_steps_when_its_keeper_has_gone(
    home: Home,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(runs, "_find_agent", lambda: Process(1 << 30, 1))  # It ended long ago.
    keeper = home.start("a run")
    in_a_process(lambda: train(7, Keep.detach, run="a run", linger=0.1))
    assert home.ended(keeper)
    assert "had kept steps up to step 7" in CliRunner().invoke(app, ["keep", "--status"]).output

    keeper = home.start("a run")
    kept, weights = keep(9.0, run="a run", linger=SECONDS)
    with pytest.raises(StateError, match="this run has kept steps, and none of them can be restored") as caught:
        kept.restore()
    for text in (
        "this host's keeper of run a run had kept steps up to step 7",
        "nobody has come for 0.1 s",
        "transfuse keep --stop 'a run' forgets them",
        "another name (run=)",
    ):
        assert text in str(caught.value)
    assert kept.restore(missing_ok=True) is None
    assert weights.tolist() == [9.0] * 3
    kept.detach()
    until(lambda: not home.status("a run")["attached"])
    keeper.stop()  # As transfuse keep --stop does.
    assert home.ended(keeper)
    assert list(home.base.iterdir()) == []
    keeper = home.start("a run")
    in_a_process(lambda: train(1, Keep.close, run="a run"))
    assert home.ended(keeper)
    assert list(home.base.iterdir()) == []  # A run that was closed is not remembered.
