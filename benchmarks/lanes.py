"""One source and one receiver on two hosts: what several connections bring, and what they cost.

python -m benchmarks.lanes [--mib N] [--flow-mbit N] [--link-mbit N] [--runs N] [--json FILE]

First every connection has a rate of its own, as clouds limit them; then both hosts share one link. PyTorch's own
transport beside. Times are medians; all moves are in place and compared bit for bit. Network namespaces, so the memory
route is off. Needs Linux, root and iproute2.
"""

from __future__ import annotations

import argparse
import datetime
import json
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from torch.distributed.checkpoint._pg_transport import PGTransport

import transfuse
from benchmarks.compare import machine
from benchmarks.hosts import Hosts, Unavailable
from transfuse._limits import MIB
from transfuse.testing.exact import differences
from transfuse.testing.ranks import RanksFailed, say

SOURCE, RECEIVER = 0, 1
PARTS = 8
WAYS = ("lanes", "one connection", "PyTorch")


def work(rank: int, size: int, runs: int) -> None:
    """The main function of one rank. The receiver reports each move's way, seconds, connections and differences."""
    world, device = cast(Any, dist.group.WORLD), torch.device("cpu")
    generator = torch.Generator().manual_seed(1)
    state = {f"tensor{i}": torch.randn(size // 4 // PARTS, generator=generator) for i in range(PARTS)}
    target = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
    timeout = datetime.timedelta(seconds=120)

    def callback() -> dict[str, torch.Tensor]:
        return target

    ways: dict[str, Any] = {
        "lanes": transfuse.PGTransport(world, timeout, device, callback, same_host=False),
        "one connection": transfuse.PGTransport(world, timeout, device, callback, same_host=False, lanes=1),
        "PyTorch": PGTransport(world, timeout, device, callback),
    }
    for turn in range(runs + 1):
        for name, transport in ways.items():
            for tensor in target.values():
                tensor.fill_(-1)
            dist.barrier()
            started = time.perf_counter()
            if rank == SOURCE:
                transport.send_checkpoint([RECEIVER], state)
                continue
            transport.recv_checkpoint(SOURCE)
            seconds = time.perf_counter() - started
            used = transport.report.connections if name != "PyTorch" else 1
            if turn > 0:
                say((name, seconds, used, differences(state, target)))


def measure(hosts: Hosts, size: int, runs: int) -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = {name: {"seconds": [], "connections": 0} for name in WAYS}
    with hosts, hosts.workers([SOURCE, RECEIVER], work, size, runs) as workers:
        for _, (name, seconds, used, wrong) in workers:
            if wrong:
                raise SystemExit(f"{name}: other bytes arrived: {wrong[:3]}")
            found[name]["seconds"].append(seconds)
            found[name]["connections"] = max(found[name]["connections"], used)
    for one in found.values():
        one["median"] = statistics.median(one["seconds"])
    return found


def main(argv: Sequence[str] | None = None) -> int:
    argv = sys.argv[1:] if argv is None else argv
    parser = argparse.ArgumentParser(prog="benchmarks.lanes", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--mib", type=float, default=32, help="size of the state (default 32)")
    parser.add_argument("--flow-mbit", type=float, default=100, help="rate of each connection (default 100)")
    parser.add_argument("--link-mbit", type=float, default=400, help="rate of the one link (default 400)")
    parser.add_argument("--runs", type=int, default=5, help="moves of each kind that count (default 5)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write everything to this file")
    given = parser.parse_args(argv)
    size = int(given.mib * MIB)
    cases = {
        f"{given.flow_mbit:g} Mbit/s for each connection": Hosts(2, 10_000, flow_mbit=given.flow_mbit),
        f"{given.link_mbit:g} Mbit/s for all": Hosts(2, given.link_mbit),
    }
    written: dict[str, Any] = {
        **machine.about("benchmarks.lanes", argv),
        "mib": given.mib,
        "cases": {},
    }
    for title, hosts in cases.items():
        try:
            found = measure(hosts, size, given.runs)
        except (Unavailable, RanksFailed) as error:
            print(f"cannot measure: {error}", file=sys.stderr)
            return 1
        written["cases"][title] = found
        print(f"{given.mib:g} MiB, {title}:")
        base = found["one connection"]["median"]
        for name, one in found.items():
            speed = base / one["median"]
            print(
                f"  {name:15} {one['median'] * 1000:7.0f} ms  {one['connections']} connections  {speed:.2f} x the speed"
            )
    if given.json is not None:
        given.json.write_text(json.dumps(written, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
