"""Jobs on several hosts, which are network namespaces: a torchrun on each, c10d rendezvous, hosts that are lost."""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from typing import Any

from benchmarks.hosts import LINK, Hosts

import several_hosts
from transfuse._keeper import frames
from transfuse._keeper.frames import KeeperLink, KeeperLost

__all__ = ["PORT", "HostJob", "host_job"]

PORT = 29431


class HostJob:
    """One job on several hosts, under a torchrun on each, and a directory for what it says."""

    def __init__(self, hosts: Hosts, directory: pathlib.Path, command: Callable[[pathlib.Path], list[str]]) -> None:
        """``command``: what each rank runs, given the directory for what it says."""
        self._hosts, self._directory = hosts, directory
        self._agents: dict[int, subprocess.Popen[bytes]] = {}
        self.out = directory / "out"
        self.out.mkdir()
        self._command = command(self.out)

    def start(self, host: int, nodes: str, namespace: int | None = None, port: int = PORT, ranks: int = 2) -> None:
        where = host if namespace is None else namespace
        keepers = self._directory / f"k{host}"
        shutil.rmtree(keepers, ignore_errors=True)  # What a keeper that was lost with its host had noted.
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
            *("--nnodes", nodes, "--nproc-per-node", str(ranks), "--max-restarts", "5", "--rdzv-backend", "c10d"),
            *("--rdzv-endpoint", f"{self._hosts.address(0)}:{port}", "--rdzv-id", "kept"),
            *("--rdzv-conf", f"is_host={int(host == 0)}", "--local-addr", self._hosts.address(where)),
            *self._command,
        ]
        with open(self._directory / f"log{host}", "wb") as log:
            self._agents[host] = subprocess.Popen(
                command, env=environment, stdout=log, stderr=log, start_new_session=True, cwd=self._directory
            )

    def lose(self, *hosts: int) -> None:
        """Kill everything of these hosts at once: agents, workers, keepers."""
        mine = [f"TRANSFUSE_KEEPER_DIR={self._directory / f'k{host}'}\0".encode() for host in hosts]
        found = []
        for path in pathlib.Path("/proc").glob("[0-9]*/environ"):
            with contextlib.suppress(OSError):
                environment = path.read_bytes()
                if any(one in environment for one in mine):
                    found.append(int(path.parent.name))
        for pid in found:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for host in hosts:
            self._agents.pop(host).wait()

    def keeper_status(self, host: int) -> dict[str, Any]:
        (path,) = (self._directory / f"k{host}").glob("*/socket")
        link = KeeperLink.to(str(path), 60.0)
        try:
            status: dict[str, Any] = json.loads(link.ask(frames.Status(), frames.StatusReply, 60.0).text)
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
        self.lose(*self._agents)

    def wait(self) -> None:
        for host, agent in self._agents.items():
            assert agent.wait(timeout=300) == 0, (self._directory / f"log{host}").read_text()[-4000:]

    def step(self) -> int:
        """The step that rank 0 has done."""
        with contextlib.suppress(OSError, ValueError):
            return int((self.out / "step 0").read_text())
        return 0

    def wait_for_step(self, step: int) -> None:
        self.wait_for(lambda: self.step() >= step)

    def wait_for(self, fact: Callable[[], bool], pause: float = 0.05) -> None:
        until = time.monotonic() + 200
        while not fact():
            if time.monotonic() > until:
                raise AssertionError("\n".join(path.read_text()[-3000:] for path in self._directory.glob("log*")))
            time.sleep(pause)

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
def host_job(hosts: int, command: Callable[[pathlib.Path], list[str]]) -> Iterator[HostJob]:
    with several_hosts.make(hosts) as made, tempfile.TemporaryDirectory(prefix="tf") as directory:
        job = HostJob(made, pathlib.Path(directory), command)
        try:
            yield job
        finally:
            job.close()
