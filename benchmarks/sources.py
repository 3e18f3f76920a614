"""One receiver with one, two and four sources, each on a host with a slow link: how much replicas help.

python -m benchmarks.sources [--mib N] [--mbit N] [--runs N] [--json FILE]

The receiver's link is as fast as all the sources' links together. Times are fractions of the time with one source, in
the same run; all moves are in place and compared bit for bit. Network namespaces, so the memory route is off. Needs
Linux, root and iproute2.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist

import transfuse
from benchmarks.compare import machine
from benchmarks.hosts import Hosts, Unavailable
from transfuse._limits import MIB
from transfuse.testing.exact import differences
from transfuse.testing.ranks import RanksFailed, say

RECEIVER = 0
COUNTS = (1, 2, 4)
PARTS = 16


def tensors(size: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return {f"tensor{i}": torch.randn(size // 4, generator=generator) for i in range(PARTS)}


def work(rank: int, size: int, runs: int, limit: float) -> None:
    """The main function of one rank. The receiver reports each move's time, each source's bytes, and differences."""
    world = cast(Any, dist.group.WORLD)
    state = tensors(size)
    target = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
    timeout, device = datetime.timedelta(seconds=limit), torch.device("cpu")

    def move(sources: Sequence[int]) -> tuple[float, dict[int, int], list[str]]:
        transport = transfuse.PGTransport(world, timeout, device, lambda: target, same_host=False)
        for tensor in target.values():
            tensor.fill_(-1)
        dist.barrier()
        started = time.perf_counter()
        if rank == RECEIVER:
            got = transport.recv_checkpoint(list(sources))
            seconds = time.perf_counter() - started
            assert transport.report is not None
            return seconds, transport.report.by_source, differences(state, got, in_place=True)
        if rank in sources:
            transport.send_checkpoint([RECEIVER], state)
        return 0.0, {}, []

    for turn in range(runs + 1):
        for count in COUNTS:
            seconds, by_source, wrong = move(range(1, 1 + count))
            if rank == RECEIVER and turn > 0:
                say((f"{count} source{'s' * (count > 1)}", seconds, by_source, wrong))


def main(argv: Sequence[str] | None = None) -> int:
    argv = sys.argv[1:] if argv is None else argv
    parser = argparse.ArgumentParser(prog="benchmarks.sources", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--mib", type=float, default=64, help="size of the state (default 64)")
    parser.add_argument("--mbit", type=float, default=200, help="rate of every source's link (default 200)")
    parser.add_argument("--runs", type=int, default=3, help="moves of each kind that count (default 3)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write everything to this file")
    options = parser.parse_args(argv)
    if options.runs < 1 or options.mib <= 0 or options.mbit <= 0:
        parser.error("--runs, --mib and --mbit must be positive")
    load = os.getloadavg()[0]
    size = max(4, round(options.mib * MIB / PARTS) // 4 * 4)
    nominal = size * PARTS * 8 / (options.mbit * 1e6)
    said: dict[str, list[tuple[float, dict[int, int], list[str]]]] = {}
    hosts = max(COUNTS) + 1
    try:
        with (
            Hosts(hosts, options.mbit, {RECEIVER: options.mbit * max(COUNTS)}) as network,
            network.workers(range(hosts), work, size, options.runs, 20 + 4 * nominal) as workers,
        ):
            for rank, one in workers:
                if rank == RECEIVER:
                    said.setdefault(one[0], []).append(one[1:])
    except Unavailable as error:
        print(f"cannot make hosts on this machine: {error}", file=sys.stderr)
        return 2
    except RanksFailed as error:
        print(error, *getattr(error, "__notes__", ()), sep="\n", file=sys.stderr)
        return 1
    medians = {name: statistics.median(seconds for seconds, _, _ in moves) for name, moves in said.items()}
    alone = medians["1 source"]
    wrong = [line for moves in said.values() for _, _, lines in moves for line in lines]
    for name, median in medians.items():
        shares = ", ".join(f"{nbytes / (size * PARTS):.0%}" for _, nbytes in sorted(said[name][-1][1].items()))
        print(f"{name:<24}{median:.3f} s  {median / alone:.2f} of one source's time; shares {shares}")
    print(f"{options.mib:g} MiB, links of {options.mbit:g} Mbit/s; medians of {options.runs} runs after a warm-up")
    if options.json is not None:
        record = {
            **machine.about("benchmarks.sources", argv, load),
            "mbit": options.mbit,
            "state_bytes": size * PARTS,
            "nominal_seconds": nominal,
            "moves": {
                name: {
                    "seconds": [seconds for seconds, _, _ in moves],
                    "median_seconds": medians[name],
                    "of_one_source": medians[name] / alone,
                    "by_source": [by_source for _, by_source, _ in moves],
                }
                for name, moves in said.items()
            },
            "verified": not wrong,
        }
        options.json.write_text(json.dumps(record, indent=2) + "\n")
    for line in wrong[:10]:
        print(line, file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
