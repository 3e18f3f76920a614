"""Programs as ``torchrun`` would run them, forked from one process that has imported torch.

That process is the fork server, the same that a :class:`~transfuse.testing.ranks.Fleet` forks from: started once for
each process that uses it, single-threaded, and done with its imports. A rank of a program costs a fork instead of
seconds of importing.

Differences from ``torchrun``: this module does the agent's work (a store, the environment, ending all ranks when one
fails), and a rank exits without tearing down its interpreter.
"""

from __future__ import annotations

import contextlib
import os
import pathlib
import runpy
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from typing import Any

from transfuse.testing.ranks.worker import HOST, Worker, loopback_environment, loopback_store

__all__ = ["Ended", "run_program"]


@dataclass(frozen=True)
class Ended:
    """How one rank ended: its exit code (negative: the signal), and what it wrote."""

    rank: int
    code: int | None
    out: str
    err: str

    def __str__(self) -> str:
        return f"rank {self.rank} ended with {self.code}\n{self.out}{self.err}"


def run_program(
    path: pathlib.Path,
    ranks: int | None = None,
    *,
    arguments: Sequence[str] = (),
    environment: Mapping[str, str] | None = None,
    timeout: float = 250.0,
) -> list[Ended]:
    """Run a program on ``ranks`` ranks; without ``ranks`` as one process that has no rank.

    When a rank fails or the time is up, all ranks are ended, with every process that they have started.
    """
    variables = dict(os.environ) | {"OMP_NUM_THREADS": "1"} | loopback_environment() | dict(environment or {})
    with tempfile.TemporaryDirectory(prefix="program") as folder, _agent(ranks) as agent:
        workers: list[Worker] = []
        outputs = [pathlib.Path(folder, f"rank{rank}") for rank in range(ranks or 1)]
        try:
            for rank, output in enumerate(outputs):
                mine = variables | agent | ({} if ranks is None else {name: str(rank) for name in _RANKS})
                worker = Worker(
                    _become,
                    str(path),
                    list(arguments),
                    str(output),
                    name=f"rank{rank}",
                    method="forkserver",
                    environ=mine,
                    threads=int(mine["OMP_NUM_THREADS"]),
                    # The program may start processes of its own.
                    daemon=False,
                )
                workers.append(worker)
            _wait(workers, timeout)
        finally:
            for worker in workers:
                _end(worker)
        return [
            Ended(rank, worker.wait(), _read(output, "out"), _read(output, "err"))
            for rank, (worker, output) in enumerate(zip(workers, outputs, strict=True))
        ]


#: Variables that torchrun sets to a rank's number when there is one node.
_RANKS = ("RANK", "LOCAL_RANK", "ROLE_RANK")


@contextlib.contextmanager
def _agent(ranks: int | None) -> Iterator[dict[str, str]]:
    """What torchrun's agent provides: a store, and the variables that say where it is."""
    if ranks is None:
        yield {}
        return
    store = loopback_store(timedelta(seconds=60))
    count = str(ranks)
    yield {
        "MASTER_ADDR": HOST,
        "MASTER_PORT": str(store.port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RUN_ID": "program",
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_MAX_RESTARTS": "0",
        "GROUP_RANK": "0",
        "GROUP_WORLD_SIZE": "1",
        "WORLD_SIZE": count,
        "LOCAL_WORLD_SIZE": count,
        "ROLE_WORLD_SIZE": count,
        "ROLE_NAME": "default",
    }


def _wait(workers: Sequence[Worker], timeout: float) -> None:
    """Wait until all have ended well, one has failed, or the time is up."""
    until = time.monotonic() + timeout
    running: dict[Any, Worker] = {worker.sentinel: worker for worker in workers}
    while running:
        ended = wait(list(running), max(0.0, until - time.monotonic()))
        codes = [running.pop(sentinel).wait() for sentinel in ended]
        if not codes or any(codes):
            return


def _end(worker: Worker) -> None:
    # Kill its process group, which includes everything it has started, whether the rank itself has ended or not.
    with contextlib.suppress(ProcessLookupError):
        os.killpg(worker.pid, signal.SIGKILL)
    # In case it was killed before it had a process group of its own.
    worker.end()


def _read(output: pathlib.Path, which: str) -> str:
    file = output.with_suffix(f".{which}")
    return file.read_text(errors="replace") if file.exists() else ""


def _become(_: Connection[Any, Any], path: str, arguments: list[str], output: str) -> None:
    """In the fork: become that program."""
    os.setsid()
    for descriptor, which in ((1, "out"), (2, "err")):
        file = os.open(f"{output}.{which}", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        os.dup2(file, descriptor)
        os.close(file)
    sys.argv = [path, *arguments]
    sys.path[0:0] = [str(pathlib.Path(path).parent)]
    runpy.run_path(path, run_name="__main__")
