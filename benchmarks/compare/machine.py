"""The machine: what it is, and how fast it moves bytes by itself, measured in the same run as the peers."""

from __future__ import annotations

import ctypes
import datetime
import mmap
import os
import platform
import shlex
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

import transfuse
from benchmarks.compare.readv import Reader, cpus, permit
from benchmarks.compare.results import Limit
from transfuse.testing.ranks import listening, say

__all__ = ["about", "cpu_seconds", "cpu_seconds_of", "describe", "limits"]

RUNS = 5
CHUNK = 4 << 20


def describe() -> dict[str, Any]:
    return {
        "cpus": cpus(),
        "processor": _line("/proc/cpuinfo", "model name") or platform.processor() or "unknown",
        "kernel": platform.release(),
        "platform": platform.platform(),
        "memory_bytes": os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"),
        "huge_pages": _read("/sys/kernel/mm/transparent_hugepage/enabled").strip(),
    }


def about(module: str, argv: Sequence[str], load: float | None = None) -> dict[str, Any]:
    """What every file of results begins with. ``load``: of the machine before the benchmark; else as it is now."""
    return {
        "date": datetime.date.today().isoformat(),
        "command": shlex.join(["python", "-m", module, *argv]),
        "machine": describe(),
        # It shows other work on the machine.
        "load_average": os.getloadavg()[0] if load is None else load,
        "versions": {
            "transfuse": transfuse.__version__,
            "torch": torch.__version__,
            "python": platform.python_version(),
        },
    }


def cpu_seconds() -> float:
    """The CPU time of this process, and of those that it has started and that live: Ray moves bytes in some of them."""
    return time.process_time() + sum(map(cpu_seconds_of, _started_by(os.getpid())))


def cpu_seconds_of(pid: int) -> float:
    # The name, in brackets, may have spaces in it. The two numbers are the 14th and the 15th of all.
    fields = _read(f"/proc/{pid}/stat").rpartition(")")[2].split()
    return sum(map(int, fields[11:13])) / os.sysconf("SC_CLK_TCK")


def _started_by(pid: int) -> Iterator[int]:
    for children in Path(f"/proc/{pid}/task").glob("*/children"):
        for child in map(int, _read(str(children)).split()):
            yield child
            yield from _started_by(child)


def limits(size: int) -> dict[str, Limit]:
    """Medians of a few runs with this number of bytes, each in a process that does nothing else."""
    found = {}
    with listening(2, _measure, size) as words:
        for _, limit in words:
            found[limit.key] = limit
    return found


# ------------------------------------------------------------------------------------------------------- in the workers


def _measure(rank: int, size: int) -> None:
    """Rank 1 measures, and rank 0 is the other end."""
    if rank == 0:
        _other_end(size)
        return
    for key, name, seconds in _all(size):
        say(Limit(key, name, size, seconds))


def _all(size: int) -> Iterator[tuple[str, str, list[float]]]:
    threads = cpus()
    source, target = _memory(size), _memory(size)

    def copy(at: int, length: int) -> None:
        ctypes.memmove(target.ctypes.data + at, source.ctypes.data + at, length)

    for key, name, count in (("one", "one thread", 1), ("all", f"{threads} threads", threads)):
        yield f"memcpy_{key}", f"memcpy, {name}", _timed(partial(_split, copy, size, count))
    remote: list[Any] = [None]
    dist.broadcast_object_list(remote, src=0)
    pid, address, port = remote[0]
    reader = Reader(pid, [(address, size)], [(target.ctypes.data, size)])
    for key, name, count in (("one", "one thread", 1), ("all", f"{threads} threads", threads)):
        yield f"readv_{key}", f"process_vm_readv, {name}", _timed(partial(reader.read, count))
    yield "tcp", "one TCP stream on loopback", _stream(port, target)
    for key, name, count in (("one", "one thread", 1), ("all", f"{threads} threads", threads)):
        yield f"touch_{key}", f"first touch of fresh memory, {name}", _touch(size, count, huge=False)
    yield "touch_huge", f"the same in huge pages, {threads} threads", _touch(size, threads, huge=True)


def _other_end(size: int) -> None:
    memory = _memory(size)
    permit(True)
    with socket.create_server(("127.0.0.1", 0)) as server:
        dist.broadcast_object_list([(os.getpid(), memory.ctypes.data, server.getsockname()[1])], src=0)
        connection, _ = server.accept()
    with connection:
        # One byte asks for all of them.
        while connection.recv(1):
            connection.sendall(memory.data)
    permit(False)


def _memory(size: int) -> np.ndarray:
    """Touched memory from torch, whose tensors lie in other pages than numpy's arrays."""
    return torch.ones(size, dtype=torch.uint8).numpy()


def _stream(port: int, target: np.ndarray) -> list[float]:
    into = target.data
    with socket.create_connection(("127.0.0.1", port)) as connection:

        def fetch() -> None:
            connection.sendall(b"!")
            at = 0
            while at < len(into):
                at += connection.recv_into(into[at : at + CHUNK])

        return _timed(fetch)


def _touch(size: int, threads: int, huge: bool) -> list[float]:
    seconds = []
    for _ in range(RUNS):
        with mmap.mmap(-1, size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as fresh:
            fresh.madvise(mmap.MADV_HUGEPAGE if huge else mmap.MADV_NOHUGEPAGE)
            array = np.frombuffer(fresh, np.uint8)
            start = array.ctypes.data
            # The mapping cannot be closed while an array uses it.
            del array
            started = time.perf_counter()
            _split(partial(_write, start), size, threads)
            seconds.append(time.perf_counter() - started)
    return seconds


def _write(start: int, at: int, length: int) -> None:
    ctypes.memset(start + at, 1, length)


def _split(work: Callable[[int, int], object], size: int, threads: int) -> None:
    """Give all threads equal shares. ctypes releases the interpreter lock meanwhile."""
    share = -(-size // threads)
    with ThreadPoolExecutor(threads) as pool:
        for done in [pool.submit(work, at, min(share, size - at)) for at in range(0, size, share)]:
            done.result()


def _timed(work: Callable[[], object]) -> list[float]:
    seconds = []
    for _ in range(RUNS + 1):
        started = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - started)
    # Leave out the first run: its caches were cold.
    return seconds[1:]


def _read(path: str) -> str:
    try:
        return Path(path).read_text()
    except OSError:
        return ""


def _line(path: str, name: str) -> str | None:
    """The text after the colon in one of the kernel's files."""
    lines = (line.partition(":") for line in _read(path).splitlines())
    return next((value.strip() for key, _, value in lines if key.strip() == name), None)
