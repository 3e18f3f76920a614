"""A job that has forgotten ``load=``: it hears so at its first commit, and a corrected program goes on."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
import torch

from keeping import SECONDS, Home, Job, home, keepers_in, same, threaded, until  # noqa: F401
from transfuse._keeper import runs


class Training:
    """A model, AdamW and an epoch, made anew as a new process makes them."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = torch.nn.Sequential(*[torch.nn.Linear(8, 8) for _ in range(12)])
        self.optimizer = torch.optim.AdamW(self.model.parameters())
        self.epoch = 0

    def state(self) -> dict[str, Any]:
        return {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict(), "epoch": self.epoch}

    def load(self, state: dict[str, Any]) -> None:
        self.optimizer.load_state_dict(state["optimizer"])
        self.epoch = state["epoch"]

    def train(self) -> None:
        self.model(torch.ones(1, 8)).sum().backward()
        self.optimizer.step()
        self.epoch += 1


@pytest.mark.usefixtures("threaded")
def test_a_forgotten_load_is_told_at_the_first_commit_and_the_error_is_short_and_right(
    home: Home,  # noqa: F811
    caplog: pytest.LogCaptureFixture,
) -> None:
    home.start()
    trainings = [Training() for _ in range(2)]

    def told() -> list[str]:
        return [one.getMessage() for one in caplog.records if "without load=" in one.getMessage()]

    with Job(2) as job:
        job.start([one.state for one in trainings])
        assert job.restore() is None
        for step in (1, 2, 3):
            for one in trainings:
                one.train()
            job.commit(step)
            # The moments at the first commit, the epoch when it has changed; then no more.
            assert len(told()) == (1 if step == 1 else 2)
    assert "72 of 133 leaves could not be restored" in told()[0]
    assert "1 of 133 leaves" in told()[1]
    assert "['epoch']" in told()[1]
    forgetful = [Training() for _ in range(2)]
    with Job(2) as job:
        job.start([one.state for one in forgetful])
        errors = [str(error) for error in job.errors(lambda keep: keep.restore())]
        assert len(set(errors)) == 1
        assert len(errors[0]) < 1500
        assert errors[0].count("there is no load=") == 1
        assert "steps 3, 2, 1: ranks 0, 1: 73 leaves" in errors[0]
        assert "begin anew" not in errors[0]
        last = errors[0].splitlines()[-1]
        assert "correct the program as said above, and start it again: the kept steps are whole" in last
        assert "stay for 600 s" in last
    corrected = [Training() for _ in range(2)]
    with Job(2) as job:
        job.start([one.state for one in corrected], [{"load": one.load} for one in corrected])
        assert job.restore() == 3
        for one in corrected:
            one.train()
        caplog.clear()
        job.commit(4)
    assert told() == []
    assert [one.epoch for one in corrected] == [4, 4]


@pytest.mark.usefixtures("threaded")
def test_what_can_be_restored_is_not_complained_of(home: Home, caplog: pytest.LogCaptureFixture) -> None:  # noqa: F811
    home.start()
    state: dict[str, Any] = {"w": torch.zeros(3), "state": [torch.zeros(2)], "name": "x", "array": np.zeros(3)}
    with Job(1) as job:
        job.start(same(state))
        for step in (1, 2):
            job.commit(step)
    (told,) = [one.getMessage() for one in caplog.records if "without load=" in one.getMessage()]
    assert "1 of 4 leaves" in told
    assert "['array']" in told


JOB = """
import os, sys, torch, torch.distributed as dist, transfuse
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
state = {"w": torch.zeros(3)}
keep = transfuse.keep(lambda: state, linger=600)
print(keep.restore(), flush=True)
state["w"].fill_(7)
if len(sys.argv) > 1:
    keep.commit(int(sys.argv[1]))
os._exit(1)
"""


def run_job(*arguments: str, **environment: str) -> str:
    """A job under an agent of its own, which fails."""
    agent = "import subprocess, sys; subprocess.run([sys.executable, *sys.argv[1:]])"
    command = [sys.executable, "-c", agent, "-c", JOB, *arguments]
    ran = subprocess.run(
        command, stdout=subprocess.PIPE, env=os.environ | environment, start_new_session=True, timeout=2 * SECONDS
    )
    return ran.stdout.decode().strip()


@pytest.mark.soak
@pytest.mark.processes
def test_a_run_without_a_name_stays_when_its_job_has_failed_and_another_agent_goes_on(home: Home) -> None:  # noqa: F811
    assert run_job("5") == "None"
    (pid,) = keepers_in(home.base)
    (run,) = runs.list_runs()
    assert not run.is_named
    assert run.agent is not None
    until(lambda: not run.agent.alive())  # type: ignore[union-attr]
    assert run_job("6", TRANSFUSE_RUN=run.directory.name) == "5"
    assert run_job(TRANSFUSE_RUN=run.directory.name) == "6"
    until(lambda: keepers_in(home.base) == [pid])
