"""A small state on loopback: milliseconds for one receiver and for several, and what they cost in CPU.

python -m benchmarks.small [--receivers N] [--runs N] [--json FILE]

Ten tensors of 1,000 floats. PyTorch's own transport beside transfuse by the memory route, over streams, and over the
group alone. All take turns, and later transfers go over what the first one has made. Medians of the runs after a
warm-up, from a barrier until the last rank has returned; CPU is user and system time of all processes.
"""

from __future__ import annotations

import argparse
import datetime
import json
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from torch.distributed.checkpoint._pg_transport import PGTransport

import transfuse
from benchmarks.compare import machine
from transfuse.testing.ranks import listening, say

TENSORS, ITEMS, WARM_UP = 10, 1000, 10


def work(rank: int, receivers: int, runs: int) -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    world, device, timeout = cast(Any, dist.group.WORLD), torch.device("cpu"), datetime.timedelta(seconds=60)
    state = {str(number): torch.zeros(ITEMS) for number in range(TENSORS)}
    everybody = list(range(1, receivers + 1))

    def mover(transport: Any) -> Callable[[], object]:
        if rank == 0:
            return lambda: transport.send_checkpoint(everybody, state)
        return lambda: transport.recv_checkpoint(0)

    def ours(**options: Any) -> Callable[[], object]:
        return mover(transfuse.PGTransport(world, timeout, device, lambda: state, **options))

    ways = {
        "PyTorch": mover(PGTransport(world, timeout, device, lambda: state)),
        "transfuse, memory": ours(),
        "transfuse, streams": ours(same_host=False),
        "transfuse, group": ours(same_host=False, streams=False),
    }
    for turn in range(runs + WARM_UP):
        for name, move in ways.items():
            for tensor in state.values():
                tensor.fill_(turn if rank == 0 else -1)
            dist.barrier()
            started, before = time.perf_counter(), time.process_time()
            move()
            say((name, turn, time.perf_counter() - started, time.process_time() - before))
            if not all(bool((tensor == turn).all()) for tensor in state.values()):
                raise AssertionError(f"{name}: wrong bytes")


def main(argv: Sequence[str] | None = None) -> int:
    argv = sys.argv[1:] if argv is None else argv
    parser = argparse.ArgumentParser(prog="benchmarks.small", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--receivers", type=int, action="append", help="how many (default 1, then 4)")
    parser.add_argument("--runs", type=int, default=200, help="moves of each kind that count (default 200)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write everything to this file")
    given = parser.parse_args(argv)
    found: list[dict[str, Any]] = []
    for receivers in given.receivers or (1, 4):
        took: dict[str, dict[int, tuple[float, float]]] = {}
        with listening(receivers + 1, work, receivers, given.runs) as said:
            for _, (name, turn, seconds, cpu) in said:
                if turn >= WARM_UP:
                    longest, used = took.setdefault(name, {}).get(turn, (0.0, 0.0))
                    took[name][turn] = max(longest, seconds), used + cpu
        for name, turns in took.items():
            medians = [statistics.median(column) for column in zip(*turns.values(), strict=True)]
            found.append({"receivers": receivers, "way": name, "seconds": medians[0], "cpu_seconds": medians[1]})
            print(f"{receivers} to receive: {name:20} {1000 * medians[0]:5.2f} ms  {1000 * medians[1]:5.2f} ms of CPU")
    if given.json is not None:
        written = {
            **machine.about("benchmarks.small", argv),
            "runs": given.runs,
            "medians": found,
        }
        given.json.write_text(json.dumps(written, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
