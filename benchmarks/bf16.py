"""What delta moves of bf16 weights after a step of the fp32 weights that they are rounded from.

python -m benchmarks.bf16 [--values N] [--step S] [--width W] [--runs N] [--mbit M] [--json FILE]

A trainer serves fp32 weights, drawn from a normal distribution. An engine has three copies of them in bf16. Before each
run every weight moves by up to ``--step``, as Adam moves it with that learning rate, and the engine fetches all three,
in turns: whole, by blocks (``delta=True``), and sparsely (``delta=True`` from a server with ``history=1``). Trainer and
engine are two processes, which talk over loopback, and then over a link of ``--mbit`` between two network namespaces
(needs root and iproute2). All values are compared by a digest of what the trainer would round them to.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

import transfuse
from benchmarks.compare import machine
from benchmarks.hosts import Hosts, Unavailable
from transfuse._limits import Limits
from transfuse._memory.digest import wide_digest_of
from transfuse.testing.ranks import listening, say

WHOLE, BLOCKS, SPARSE = "whole", "by blocks", "sparse"
WAYS = (WHOLE, BLOCKS, SPARSE)
TRAINER, ENGINE = 0, 1


class Fetched(NamedTuple):
    """One fetch: how long it took, of both processes' CPU, what moved, and whether all values are right."""

    way: str
    run: int
    seconds: float
    cpu_seconds: float
    moved_bytes: int
    kept_bytes: int
    history_bytes: int
    is_right: bool
    changed_values: int
    changed_blocks: int


def _told(value: Any, by: int) -> Any:
    """What one of the two ranks says to both."""
    box = [value]
    dist.broadcast_object_list(box, src=by)
    return box[0]


def work(rank: int, address: str, values: int, step: float, width: float, runs: int) -> None:
    (trainer if rank == TRAINER else engine)(address, values, step, width, runs)


def trainer(address: str, values: int, step: float, width: float, runs: int) -> None:
    generator = torch.Generator().manual_seed(0)
    weights = torch.randn(values, generator=generator) * width
    state = transfuse.State({"weights": weights})
    history: list[int] = []
    with ExitStack() as stack:
        servers = {
            way: stack.enter_context(
                transfuse.serve(
                    state,
                    host=address,
                    token="benchmark",
                    history=int(way == SPARSE),
                    on_report=lambda report: history.append(report.history_bytes),
                )
            )
            for way in WAYS
        }
        _told({way: server.address for way, server in servers.items()}, TRAINER)
        before, count = weights.bfloat16(), 0
        for _ in range(runs):
            with state.mutating():
                weights += step * (2 * torch.rand(values, generator=generator) - 1)
            rounded = weights.bfloat16()
            changed = rounded != before
            blocks = torch.split(changed, Limits.from_environment().block_bytes // rounded.itemsize)
            counted = int(changed.sum()), sum(bool(block.any()) for block in blocks)
            before = rounded
            _told((wide_digest_of(rounded.view(torch.uint8)), counted), TRAINER)
            for _ in WAYS:
                started = time.process_time()
                dist.barrier()
                dist.barrier()
                count += 1
                while len(history) < count:  # A server reports when its reader has gone.
                    time.sleep(0.001)
                _told((time.process_time() - started, history[-1]), TRAINER)


def engine(address: str, values: int, step: float, width: float, runs: int) -> None:
    addresses = _told(None, TRAINER)
    held = {way: {"weights": torch.zeros(values, dtype=torch.bfloat16)} for way in WAYS}
    for run in range(runs):
        due, (changed_values, changed_blocks) = _told(None, TRAINER)
        for way in WAYS:
            target, started = held[way], time.process_time()
            dist.barrier()
            begun = time.perf_counter()
            report = transfuse.fetch(
                addresses[way], target, token="benchmark", cast=True, delta=way != WHOLE, same_host=False
            ).report
            seconds = time.perf_counter() - begun
            dist.barrier()
            mine = time.process_time() - started
            theirs, history_bytes = _told(None, TRAINER)
            is_right = wide_digest_of(target["weights"].view(torch.uint8)) == due
            say(
                Fetched(
                    way,
                    run,
                    seconds,
                    mine + theirs,
                    report.bytes,
                    report.kept_bytes,
                    history_bytes if way == SPARSE else 0,
                    is_right,
                    changed_values,
                    changed_blocks,
                )
            )


@contextmanager
def _pair(mbit: float | None, *args: Any) -> Iterator[Iterator[tuple[int, Any]]]:
    """The two processes, on loopback or at the two ends of a link."""
    with ExitStack() as stack:
        if mbit is None:
            yield stack.enter_context(listening(2, work, "127.0.0.1", *args))
        else:
            hosts = stack.enter_context(Hosts(2, mbit))
            timeout = timedelta(minutes=5)
            yield stack.enter_context(hosts.workers((0, 1), work, hosts.address(0), *args, timeout=timeout))


def measure(mbit: float | None, values: int, step: float, width: float, runs: int) -> dict[str, list[Fetched]]:
    """All runs but the first two, by way: the first fills the history, and the second is the first with patches."""
    found: dict[str, list[Fetched]] = {way: [] for way in WAYS}
    with _pair(mbit, values, step, width, runs + 2) as workers:
        for _, one in workers:
            if not one.is_right:
                raise AssertionError(f"{one.way}: wrong values have arrived")
            if one.run > 1:
                found[one.way].append(one)
    return found


def summary(found: dict[str, list[Fetched]]) -> dict[str, Any]:
    whole = statistics.median(one.seconds for one in found[WHOLE])
    return {
        way: {
            "seconds": [one.seconds for one in runs],
            "median_seconds": statistics.median(one.seconds for one in runs),
            "of_whole": statistics.median(one.seconds for one in runs) / whole,
            "cpu_seconds": statistics.median(one.cpu_seconds for one in runs),
            "moved_bytes": runs[-1].moved_bytes,
            "moved": runs[-1].moved_bytes / found[WHOLE][-1].moved_bytes,
            "history_bytes": runs[-1].history_bytes,
        }
        for way, runs in found.items()
    }


def table(where: str, made: dict[str, Any]) -> str:
    lines = [f"{where:<24}{'median':>9}{'of whole':>10}{'CPU':>9}{'moved':>9}{'history':>12}"]
    lines += [
        f"{way:<24}{one['median_seconds']:>7.3f} s{one['of_whole']:>10.2f}{one['cpu_seconds']:>7.3f} s"
        f"{one['moved']:>9.2%}{one['history_bytes'] / (1 << 20):>8.1f} MiB"
        for way, one in made.items()
    ]
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    argv = sys.argv[1:] if argv is None else argv
    parser = argparse.ArgumentParser(prog="benchmarks.bf16", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--values", type=int, default=1 << 26, help="how many weights (default 64 Mi)")
    parser.add_argument("--step", type=float, default=1e-6, help="how far a weight moves at most (default 1e-6)")
    parser.add_argument("--width", type=float, default=0.02, help="standard deviation of the weights (default 0.02)")
    parser.add_argument("--runs", type=int, default=5, help="measured runs, after two others (default 5)")
    parser.add_argument("--mbit", type=float, default=400, help="the rate of the link in Mbit/s (default 400)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write everything to this file")
    given = parser.parse_args(argv)
    load = os.getloadavg()[0]
    results: dict[str, Any] = {}
    for where, mbit in (("loopback", None), (f"link of {given.mbit:g} Mbit/s", given.mbit)):
        try:
            found = measure(mbit, given.values, given.step, given.width, given.runs)
        except Unavailable as error:
            print(f"no limited link: {error}", file=sys.stderr)
            continue
        last = found[WHOLE][-1]
        if not results:
            nblocks = -(-given.values * 2 // Limits.from_environment().block_bytes)
            share = f"{last.changed_values / given.values:.2%} of {given.values:,} bf16 values changed"
            print(f"{share}, in {last.changed_blocks} of {nblocks} blocks", end="\n\n")
        results[where] = summary(found)
        print(table(where, results[where]), end="\n\n")
    if given.json is not None:
        written = {**machine.about("benchmarks.bf16", argv, load), "found": results}
        given.json.write_text(json.dumps(written, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
