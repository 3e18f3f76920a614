"""The same structure again and again: the first transfer beside those that reuse its description, plan and parcels.

python -m benchmarks.repeat [--tensors N] [--sharded N] [--runs N] [--json FILE]

Many small tensors in place on one host, and resharding from rows to columns between two sources and two receivers. Each
first transfer is made by new transports, so that they remember nothing; both kinds of transfer take turns. Medians;
every result is compared with what was sent.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

import transfuse
from benchmarks.compare import machine
from transfuse.testing.ranks import listening, say

ROWS, COLUMNS = 16, 64


def small(rank: int, count: int, runs: int, same_host: bool) -> None:
    """Rank 0 sends ``count`` tensors of 4 KiB to rank 1."""
    world = cast(Any, dist.group.WORLD)
    state: dict[str, Any] = {f"tensor{i}": torch.full((1024,), float(-rank)) for i in range(count)}
    again = transfuse.PGTransport(world, 60.0, "cpu", lambda: state, same_host=same_host)
    for turn in range(2 * runs + 2):
        first = turn % 2 == 1
        mover = transfuse.PGTransport(world, 60.0, "cpu", lambda: state, same_host=same_host) if first else again
        if rank == 0:
            for tensor in state.values():
                tensor.fill_(turn)
        _move(mover, rank < 1, [1], [0], state, turn, first=first, counts=turn > 1)
        if rank == 1 and not all(bool((tensor == turn).all()) for tensor in state.values()):
            raise AssertionError(f"turn {turn}: wrong bytes")


def sharded(rank: int, count: int, runs: int, same_host: bool) -> None:
    """Ranks 0 and 1 hold rows of ``count`` tensors, ranks 2 and 3 get columns."""
    world = cast(Any, dist.group.WORLD)
    meshes = [DeviceMesh("cpu", torch.tensor(ranks), mesh_dim_names=("d",)) for ranks in ([0, 1], [2, 3])]
    sends = rank < 2
    shape, place = ((ROWS // 2, COLUMNS), Shard(0)) if sends else ((ROWS, COLUMNS // 2), Shard(1))
    state: dict[str, Any] = {
        f"w{i}": DTensor.from_local(torch.zeros(shape), meshes[not sends], [place], run_check=False)
        for i in range(count)
    }
    again = transfuse.PGTransport(world, 60.0, "cpu", lambda: state, same_host=same_host)
    for turn in range(2 * runs + 2):
        first = turn % 2 == 1
        mover = transfuse.PGTransport(world, 60.0, "cpu", lambda: state, same_host=same_host) if first else again
        if sends:
            for tensor in state.values():
                tensor.to_local().fill_(turn)
        _move(mover, sends, [2, 3], [0, 1], state, turn, first=first, counts=turn > 1)
        if not sends and not all(bool((tensor.to_local() == turn).all()) for tensor in state.values()):
            raise AssertionError(f"turn {turn}: wrong bytes")


def _move(
    mover: Any,
    sends: bool,
    receivers: list[int],
    sources: list[int],
    state: Any,
    step: int,
    *,
    first: bool,
    counts: bool,
) -> None:
    dist.barrier()
    started = time.perf_counter()
    if sends:
        mover.send_checkpoint(receivers, state, step=step)
    else:
        mover.recv_checkpoint(sources, step=step)
    dist.barrier()
    seconds = time.perf_counter() - started
    if counts and dist.get_rank() == receivers[0]:
        say({"first": first, "seconds": seconds, "reused": mover.report.reused})


def measure(ranks: int, work: Any, count: int, runs: int, same_host: bool) -> dict[str, Any]:
    found: dict[bool, list[dict[str, Any]]] = {True: [], False: []}
    with listening(ranks, work, count, runs, same_host) as said:
        for _, one in said:
            found[one["first"]].append(one)
    return {
        ("first" if first else "later"): {
            "median": statistics.median(one["seconds"] for one in ones),
            "seconds": [one["seconds"] for one in ones],
            "reused": list(ones[-1]["reused"]),
        }
        for first, ones in found.items()
    }


def main(argv: Sequence[str] | None = None) -> int:
    argv = sys.argv[1:] if argv is None else argv
    parser = argparse.ArgumentParser(prog="benchmarks.repeat", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--tensors", type=int, default=20_000, help="how many small tensors (default 20,000)")
    parser.add_argument("--sharded", type=int, default=2_000, help="how many sharded tensors (default 2,000)")
    parser.add_argument("--runs", type=int, default=5, help="transfers of each kind that count (default 5)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write everything to this file")
    given = parser.parse_args(argv)
    written: dict[str, Any] = {
        **machine.about("benchmarks.repeat", argv),
        "cases": {},
    }
    for route, same_host in (("memory route", True), ("group route", False)):
        for title, ranks, work, count in (
            (f"{given.tensors:,} tensors of 4 KiB", 2, small, given.tensors),
            (f"{given.sharded:,} tensors from rows to columns", 4, sharded, given.sharded),
        ):
            found = measure(ranks, work, count, given.runs, same_host)
            written["cases"][f"{title}, {route}"] = found
            first, later = found["first"]["median"], found["later"]["median"]
            print(
                f"{title}, {route}: first {first * 1000:.0f} ms, later {later * 1000:.0f} ms ({later / first:.2f}), "
                f"reused: {', '.join(found['later']['reused']) or 'nothing'}",
                flush=True,
            )
    if given.json is not None:
        given.json.write_text(json.dumps(written, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
