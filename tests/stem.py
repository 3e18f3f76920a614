"""Programs as `torchrun` would run them, forked from one process that has imported torch.

The stem is the fork server of multiprocessing, the same that :class:`ranks.Fleet` forks from: started once for each run
of pytest, single-threaded, and past its imports. A rank of a program costs a fork instead of seconds of importing.

What is different from `torchrun`: the agent's part (a store, the environment, ending all ranks when one fails) is
played by this module, and a rank leaves without tearing its interpreter down.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import multiprocessing
import multiprocessing.connection
import multiprocessing.forkserver
import os
import pathlib
import runpy
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch
from torch._C._distributed_c10d import TCPStore

from foreground import come_to_foreground
from ranks import PRELOAD

__all__ = ["Ended", "run", "threads"]

_HOST = "127.0.0.1"


@dataclasses.dataclass(frozen=True)
class Ended:
    """One rank's end: its exit code (negative: the signal), and what it wrote."""

    rank: int
    code: int | None
    out: str
    err: str

    def __str__(self) -> str:
        return f"rank {self.rank} ended with {self.code}\n{self.out}{self.err}"


def run(
    path: pathlib.Path,
    ranks: int | None = None,
    *,
    arguments: Sequence[str] = (),
    environment: Mapping[str, str] | None = None,
    timeout: float = 100.0,
) -> list[Ended]:
    """Run a program on so many ranks; without `ranks` as one process that is nobody's rank.

    When a rank fails, or the time is over, all are ended, with whatever they have started.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOAD)
    variables = dict(os.environ) | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"} | dict(environment or {})
    with tempfile.TemporaryDirectory(prefix="stem") as folder, _agent(ranks) as agent:
        processes = []
        outputs = [pathlib.Path(folder, f"rank{rank}") for rank in range(ranks or 1)]
        try:
            for rank, output in enumerate(outputs):
                mine = variables | agent | ({} if ranks is None else {name: str(rank) for name in _RANKS})
                process = context.Process(target=_be, args=(str(path), list(arguments), mine, str(output)))
                process.start()
                processes.append(process)
            _wait(processes, timeout)
        finally:
            for process in processes:
                _end(process)
        return [
            Ended(rank, process.exitcode, _read(output, "out"), _read(output, "err"))
            for rank, (process, output) in enumerate(zip(processes, outputs, strict=True))
        ]


def threads() -> int:
    """How many threads the stem has. With more than one, what is forked from it may hang."""
    multiprocessing.get_context("forkserver").set_forkserver_preload(PRELOAD)
    multiprocessing.forkserver.ensure_running()
    pid = getattr(multiprocessing.forkserver, "_forkserver")._forkserver_pid  # noqa: B009 - hidden from mypy
    return len(os.listdir(f"/proc/{pid}/task"))


#: What torchrun sets to a rank's number when there is one node.
_RANKS = ("RANK", "LOCAL_RANK", "ROLE_RANK")


@contextlib.contextmanager
def _agent(ranks: int | None) -> Iterator[dict[str, str]]:
    """What torchrun's agent provides: a store, and where it is."""
    if ranks is None:
        yield {}
        return
    store = TCPStore(_HOST, 0, None, True, timedelta(seconds=60), wait_for_workers=False)
    count = str(ranks)
    yield {
        "MASTER_ADDR": _HOST,
        "MASTER_PORT": str(store.port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RUN_ID": "stem",
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_MAX_RESTARTS": "0",
        "GROUP_RANK": "0",
        "GROUP_WORLD_SIZE": "1",
        "WORLD_SIZE": count,
        "LOCAL_WORLD_SIZE": count,
        "ROLE_WORLD_SIZE": count,
        "ROLE_NAME": "default",
    }


def _wait(processes: Sequence[Any], timeout: float) -> None:
    """Until all have ended well, one has failed, or the time is over."""
    until = time.monotonic() + timeout
    running = {process.sentinel: process for process in processes}
    while running:
        ended = multiprocessing.connection.wait(list(running), max(0.0, until - time.monotonic()))
        if not ended or any(running.pop(sentinel).exitcode for sentinel in ended):
            return


def _end(process: Any) -> None:
    # Its group, that is also what it has started, whether it has ended or not.
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    # Before it had a group of its own.
    process.kill()
    process.join()


def _read(output: pathlib.Path, which: str) -> str:
    file = output.with_suffix(f".{which}")
    return file.read_text(errors="replace") if file.exists() else ""


def _be(path: str, arguments: list[str], environment: dict[str, str], output: str) -> None:
    """In the fork: become that program."""
    os.setsid()
    come_to_foreground()
    # Ends with the stem, which ends with pytest once no fork keeps it (PR_SET_PDEATHSIG).
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)
    server = getattr(multiprocessing.forkserver, "_forkserver")  # noqa: B009 - hidden from mypy
    os.close(server._forkserver_alive_fd)
    server._forkserver_alive_fd = None
    for descriptor, which in ((1, "out"), (2, "err")):
        file = os.open(f"{output}.{which}", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        os.dup2(file, descriptor)
        os.close(file)
    os.environ.clear()
    os.environ.update(environment)
    # OMP_NUM_THREADS is read when torch is loaded, which was before.
    torch.set_num_threads(int(environment["OMP_NUM_THREADS"]))
    sys.argv = [path, *arguments]
    sys.path[0:0] = [str(pathlib.Path(path).parent)]
    runpy.run_path(path, run_name="__main__")
