"""One large tensor between two processes on loopback, over gloo and over sockets: seconds, and what they cost in CPU.

python -m benchmarks.loopback [--mib N] [--runs N] [--json FILE]

PyTorch's own transport and a bare ``dist.send`` beside transfuse with one, two and three connections, with digests and
without, and plain sockets without digests: Python writes pieces of 1 MiB straight from the one tensor, and reads them
straight into the other, with a thread for each connection. All take turns. Medians of the runs after a warm-up; CPU is
user and system time of both processes.
"""

from __future__ import annotations

import argparse
import datetime
import json
import resource
import socket
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from torch.distributed.checkpoint._pg_transport import PGTransport

import transfuse
from benchmarks.compare import machine
from transfuse._limits import MIB
from transfuse.testing.ranks import listening, say

CONNECTIONS = (1, 2, 3)
#: How much of a tensor one call writes to a plain socket.
PIECE_BYTES = 1 * MIB
#: How many seconds a plain socket waits for the other end.
LIMIT = 120.0


def work(rank: int, size: int, runs: int) -> None:
    warnings.simplefilter("ignore")
    with ExitStack() as stack:
        sockets = [stack.enter_context(connect(rank)) for _ in CONNECTIONS]
        measure(rank, size, runs, sockets)


def connect(rank: int) -> socket.socket:
    """A connection between the two ranks."""
    port = torch.zeros(1, dtype=torch.int64)
    if rank == 0:
        with socket.create_server(("127.0.0.1", 0)) as server:
            server.settimeout(LIMIT)
            port[0] = server.getsockname()[1]
            dist.broadcast(port, 0)
            made, _ = server.accept()
    else:
        dist.broadcast(port, 0)
        made = socket.create_connection(("127.0.0.1", int(port)), LIMIT)
    made.settimeout(LIMIT)
    made.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return made


def over(sockets: Sequence[socket.socket], rank: int, tensor: torch.Tensor) -> None:
    """Move the tensor, an equal part over each socket."""
    memory = tensor.view(torch.uint8).numpy().data
    part = -(-len(memory) // len(sockets))

    def move(number: int) -> None:
        rest = memory[number * part : (number + 1) * part]
        while rest:
            if rank == 0:
                sockets[number].sendall(rest[:PIECE_BYTES])
                rest = rest[PIECE_BYTES:]
            elif count := sockets[number].recv_into(rest[:PIECE_BYTES]):
                rest = rest[count:]
            else:
                raise ConnectionError("rank 0 has closed the connection")

    with ThreadPoolExecutor(len(sockets)) as threads:
        list(threads.map(move, range(len(sockets))))


def measure(rank: int, size: int, runs: int, sockets: Sequence[socket.socket]) -> None:
    world, device, timeout = cast(Any, dist.group.WORLD), torch.device("cpu"), datetime.timedelta(seconds=120)
    state = {"tensor": torch.zeros(size // 4)}

    def mover(transport: Any) -> Callable[[], object]:
        if rank == 0:
            return lambda: transport.send_checkpoint([1], state)
        return lambda: transport.recv_checkpoint(0)

    def bare() -> None:
        if rank == 0:
            dist.send(state["tensor"], 1)
        else:
            dist.recv(state["tensor"], 0)

    ways: dict[str, Callable[[], object]] = {
        "PyTorch": mover(PGTransport(world, timeout, device, lambda: state)),
        "dist.send": bare,
    }
    for count in CONNECTIONS:
        name = f"plain sockets, {count} connection{'s' * (count > 1)}, no digests"
        ways[name] = partial(over, sockets[:count], rank, state["tensor"])
    for verify in (False, None):
        for lanes in CONNECTIONS:
            name = f"transfuse, {lanes} connection{'s' * (lanes > 1)}, {'no ' if verify is False else ''}digests"
            ways[name] = mover(
                transfuse.PGTransport(
                    world, timeout, device, lambda: state, same_host=False, lanes=lanes, verify=verify
                )
            )
    for turn in range(runs + 1):
        for name, move in ways.items():
            state["tensor"].fill_(turn if rank == 0 else -1)
            dist.barrier()
            started, before = time.perf_counter(), _cpu()
            move()
            say((name, turn, time.perf_counter() - started, _cpu() - before))
            if not bool((state["tensor"] == turn).all()):
                raise AssertionError(f"{name}: wrong bytes")


def _cpu() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def main(argv: Sequence[str] | None = None) -> int:
    argv = sys.argv[1:] if argv is None else argv
    parser = argparse.ArgumentParser(prog="benchmarks.loopback", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--mib", type=float, default=1024, help="size of the tensor (default 1024)")
    parser.add_argument("--runs", type=int, default=7, help="moves of each kind that count (default 7)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write everything to this file")
    given = parser.parse_args(argv)
    seconds: dict[str, list[float]] = {}
    cpu: dict[str, dict[int, float]] = {}
    with listening(2, work, int(given.mib * MIB), given.runs) as said:
        for rank, (name, turn, took, used) in said:
            if turn:
                cpu.setdefault(name, {}).setdefault(turn, 0.0)
                cpu[name][turn] += used
                if rank == 1:
                    seconds.setdefault(name, []).append(took)
    found: dict[str, dict[str, Any]] = {
        name: {"seconds": statistics.median(ones), "cpu_seconds": statistics.median(cpu[name].values()), "all": ones}
        for name, ones in seconds.items()
    }
    for name, one in found.items():
        print(f"{name:40} {one['seconds'] * 1000:6.0f} ms  {one['cpu_seconds']:5.2f} s of CPU")
    if given.json is not None:
        written = {
            **machine.about("benchmarks.loopback", argv),
            "mib": given.mib,
            "ways": found,
        }
        given.json.write_text(json.dumps(written, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
