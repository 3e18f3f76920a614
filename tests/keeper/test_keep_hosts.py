"""Hosts are lost, keeper and all: network namespaces, a real torchrun on each, c10d rendezvous."""

from __future__ import annotations

import contextlib
import os
import pathlib
import signal
import time
from collections.abc import Iterator

import pytest

from host_jobs import HostJob, host_job

pytestmark = [pytest.mark.soak, pytest.mark.timeout(900)]

STEPS = 40
JOB = """
import json, os, pathlib, sys, time, zlib
import torch
import torch.distributed as dist
import transfuse

out, pause = pathlib.Path(sys.argv[1]), float(sys.argv[2])
dist.init_process_group("gloo", init_method="transfuse://")
rank, size = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.ReLU(), torch.nn.Linear(64, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
keep = transfuse.keep(
    lambda: {"model": model.state_dict(), "optimizer": optimizer.state_dict()},
    load=lambda state: optimizer.load_state_dict(state["optimizer"]),
)
restored = keep.restore()
step = restored or 0
with open(out / "starts", "a") as file:
    file.write(json.dumps({"rank": rank, "size": size, "restored": restored, "host": os.environ["HOST"]}) + "\\n")
while step < STEPS:
    # All ranks see the same batch, so that the end does not depend on how many there are.
    torch.manual_seed(step)
    batch = torch.randn(8, 16)
    loss = (model(batch) - batch.sum(1, keepdim=True)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    dist.barrier()
    optimizer.step()
    step += 1
    keep.commit(step)
    (out / f"step {rank}").write_text(str(step))
    time.sleep(pause)
digest = [zlib.crc32(tensor.numpy()) for tensor in model.state_dict().values()]
(out / f"end {rank}").write_text(json.dumps(digest))
keep.close()
dist.destroy_process_group()
"""


@contextlib.contextmanager
def _job(hosts: int, steps: int = STEPS) -> Iterator[HostJob]:
    def command(out: pathlib.Path) -> list[str]:
        program = out.parent / "job.py"
        program.write_text(JOB.replace("STEPS", str(steps)))
        return [str(program), str(out), "0.15"]

    with host_job(hosts, command) as job:
        yield job


def _undisturbed() -> str:
    with _job(1) as job:
        job.start(0, "1")
        job.wait()
        (end,) = set(job.ends())
        return end


def _check_end(job: HostJob) -> None:
    job.wait()
    assert set(job.ends()) == {_undisturbed()}
    until = time.monotonic() + 60
    while job.keepers() and time.monotonic() < until:
        time.sleep(0.1)
    assert not job.keepers()


def test_a_lost_host_is_restored_from_its_neighbour() -> None:
    with _job(2) as job:
        job.start(0, "2")
        job.start(1, "2")
        job.wait_for_step(15)
        job.lose(1)
        lost_at = int((job.out / "step 0").read_text())
        job.start(2, "2", namespace=1)
        _check_end(job)
        again = [start for start in job.starts if start["restored"] is not None]
        assert len(again) == 4, job.starts
        (restored,) = {start["restored"] for start in again}
        assert lost_at - 6 <= restored <= lost_at + 1, (restored, lost_at)
        assert {start["host"] for start in again} == {"0", "2"}


@pytest.mark.parametrize("victim", [0, 1])
def test_a_keeper_is_killed_and_comes_back_and_then_a_host_is_lost(victim: int) -> None:
    """The keeper of the first host leads. Steps are confirmed again once it is back, without a restart of the job."""
    with _job(2, steps=150) as job:
        for host in range(2):
            job.start(host, "2")
        job.wait_for_step(5)
        killed = job.keeper_status(victim)
        os.kill(killed["pid"], signal.SIGKILL)
        for host in range(2):
            job.wait_for_confirmed(host, int((job.out / "step 0").read_text()))
        assert job.keeper_status(victim)["pid"] != killed["pid"]
        assert len(job.starts) == 4
        job.lose(1)
        lost_at = int((job.out / "step 0").read_text())
        job.start(2, "2", namespace=1)
        job.wait()
        (restored,) = {start["restored"] for start in job.starts[4:]}
        assert lost_at - 6 <= restored <= lost_at + 1, (restored, lost_at)
        assert len(set(job.ends())) == 1


def test_a_job_goes_on_with_fewer_hosts() -> None:
    with _job(3) as job:
        for host in range(3):
            job.start(host, "2:3")
        job.wait_for_step(15)
        job.lose(2)
        _check_end(job)
        again = [start for start in job.starts if start["size"] == 4]
        assert again, job.starts
        assert all(start["restored"] is not None for start in again), job.starts
