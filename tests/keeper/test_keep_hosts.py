"""Hosts are lost, keeper and all: network namespaces, a real torchrun on each, c10d rendezvous."""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from typing import Any

import pytest
from benchmarks.hosts import LINK, Hosts

import several_hosts
from transfuse._keeper import frames
from transfuse._keeper.frames import KeeperLink, KeeperLost

pytestmark = [pytest.mark.soak, pytest.mark.timeout(900)]

STEPS = 40
PORT = 29431
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


class _Job:
    """One job on several hosts, and a directory for what it says."""

    def __init__(self, hosts: Hosts, directory: pathlib.Path, steps: int) -> None:
        self._hosts, self._directory = hosts, directory
        self._agents: dict[int, subprocess.Popen[bytes]] = {}
        self.out = directory / "out"
        self.out.mkdir()
        (directory / "job.py").write_text(JOB.replace("STEPS", str(steps)))

    def start(self, host: int, nodes: str, namespace: int | None = None) -> None:
        where = host if namespace is None else namespace
        keepers = self._directory / f"k{host}"
        keepers.mkdir(mode=0o700)
        environment = os.environ | {
            "TRANSFUSE_KEEPER_DIR": str(keepers),
            "GLOO_SOCKET_IFNAME": LINK,
            "OMP_NUM_THREADS": "1",
            "HOST": str(host),
            # These hosts could read each other's memory.
            "TRANSFUSE_SAME_HOST": "0",
            # Otherwise survivors keep the store's address of a rendezvous whose first host may be gone.
            "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
        }
        command = [
            *("ip", "netns", "exec", self._hosts.namespace(where), sys.executable, "-m", "torch.distributed.run"),
            *("--nnodes", nodes, "--nproc-per-node", "2", "--max-restarts", "5", "--rdzv-backend", "c10d"),
            *("--rdzv-endpoint", f"{self._hosts.address(0)}:{PORT}", "--rdzv-id", "kept"),
            *("--rdzv-conf", f"is_host={int(host == 0)}", "--local-addr", self._hosts.address(where)),
            *(str(self._directory / "job.py"), str(self.out), "0.15"),
        ]
        with open(self._directory / f"log{host}", "wb") as log:
            self._agents[host] = subprocess.Popen(
                command, env=environment, stdout=log, stderr=log, start_new_session=True, cwd=self._directory
            )

    def lose(self, host: int) -> None:
        """Kill everything of a host at once: agent, workers, keeper."""
        mine = str(self._directory / f"k{host}")
        for path in pathlib.Path("/proc").glob("[0-9]*/environ"):
            with contextlib.suppress(OSError):
                if f"TRANSFUSE_KEEPER_DIR={mine}\0".encode() in path.read_bytes():
                    os.kill(int(path.parent.name), signal.SIGKILL)
        self._agents.pop(host).wait()

    def keeper_status(self, host: int) -> dict[str, Any]:
        (path,) = (self._directory / f"k{host}").glob("*/socket")
        link = KeeperLink.to(str(path), 60.0)
        try:
            status: dict[str, Any] = json.loads(link.ask(frames.Status(), frames.Told, 60.0).text)
            return status
        finally:
            link.close()

    def wait_for_confirmed(self, host: int, step: int) -> None:
        until = time.monotonic() + 200
        while time.monotonic() < until:
            with contextlib.suppress(ValueError, KeeperLost):
                if (self.keeper_status(host)["confirmed_step"] or 0) > step:
                    return
            time.sleep(0.05)
        raise AssertionError("\n".join(path.read_text()[-3000:] for path in self._directory.glob("log*")))

    def close(self) -> None:
        for host in list(self._agents):
            self.lose(host)

    def wait(self) -> None:
        for host, agent in self._agents.items():
            assert agent.wait(timeout=300) == 0, (self._directory / f"log{host}").read_text()[-4000:]

    def wait_for_step(self, step: int) -> None:
        until = time.monotonic() + 200
        while time.monotonic() < until:
            with contextlib.suppress(OSError, ValueError):
                if int((self.out / "step 0").read_text()) >= step:
                    return
            time.sleep(0.05)
        raise AssertionError("\n".join(path.read_text()[-3000:] for path in self._directory.glob("log*")))

    @property
    def starts(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (self.out / "starts").read_text().splitlines()]

    def ends(self) -> list[str]:
        return [path.read_text() for path in sorted(self.out.glob("end *"))]

    def keepers(self) -> list[str]:
        mine = str(self._directory).encode()
        found = []
        for path in pathlib.Path("/proc").glob("[0-9]*/cmdline"):
            with contextlib.suppress(OSError):
                if b"keeper.process" in path.read_bytes() and mine in path.read_bytes():
                    found.append(path.parent.name)
        return found


@contextlib.contextmanager
def _job(hosts: int, steps: int = STEPS) -> Iterator[_Job]:
    with several_hosts.make(hosts) as made, tempfile.TemporaryDirectory(prefix="tf") as directory:
        job = _Job(made, pathlib.Path(directory), steps)
        try:
            yield job
        finally:
            job.close()


def _undisturbed() -> str:
    with _job(1) as job:
        job.start(0, "1")
        job.wait()
        (end,) = set(job.ends())
        return end


def _check_end(job: _Job) -> None:
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
