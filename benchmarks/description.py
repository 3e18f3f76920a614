"""How long it takes to describe a state and to plan its move: everything before the first byte of data.

python -m benchmarks.description [--leaves N] [--runs N] [--json FILE]

Measures both ends' work, stage by stage, in one process and without a wire: the source describes its state and encodes
the offer; the receiver decodes and checks it, matches it with a target of the same shape, and plans.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from time import perf_counter
from typing import Any, TypeVar

import msgspec
import torch

from benchmarks.compare import machine
from transfuse._limits import Limits
from transfuse._plan import parcels
from transfuse._plan.match import match, prepare
from transfuse._plan.regions import lay_out
from transfuse._state.leaves.codec import BuildContext
from transfuse._state.leaves.registry import Registry
from transfuse._state.manifest import Manifest, Wire, describe

T = TypeVar("T")

STAGES = ("describe", "encode", "decode", "prepare", "match", "lay out", "cut", "fingerprint")


def flat(leaves: int, items: int) -> dict[str, Any]:
    return {f"tensor{i}": torch.zeros(items) for i in range(leaves)}


def nested(leaves: int, items: int) -> dict[str, Any]:
    """A dict of a hundred dicts."""
    width = max(1, leaves // 100)
    return {f"layer{i}": flat(min(width, leaves - i), items) for i in range(0, leaves, width)}


CASES: dict[str, Callable[[int, int], dict[str, Any]]] = {"flat": flat, "nested": nested}


class Clock:
    """Seconds by stage."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    def time(self, stage: str, work: Callable[[], T]) -> T:
        start = perf_counter()
        result = work()
        self.seconds[stage] = perf_counter() - start
        return result


def once(state: object, target: object) -> dict[str, float]:
    """Everything that both ends do before the first parcel."""
    limits, clock = Limits(), Clock()
    registry = Registry(limits)
    described = clock.time("describe", lambda: describe(state, limits))
    body = clock.time("encode", lambda: msgspec.msgpack.encode(described.manifest.encode()))
    manifest = clock.time("decode", lambda: Manifest.decode(msgspec.msgpack.decode(body, type=Wire), limits))
    ready = clock.time("prepare", lambda: prepare(target, limits))
    build_context = BuildContext(manifest.shared)
    found = clock.time(
        "match",
        lambda: match(manifest, ready, build_context=build_context, registry=registry, strict=False, limits=limits),
    )
    regions = clock.time("lay out", lambda: lay_out(manifest, found.apart, found.wanted))
    cut = clock.time("cut", lambda: parcels.cut(regions, limits.parcel_bytes))
    mine = clock.time("fingerprint", lambda: parcels.fingerprint(cut))
    theirs = parcels.fingerprint(parcels.cut(lay_out(described.manifest), limits.parcel_bytes))
    if mine != theirs or len(found.destinations) != len(manifest.tensors) or None in set(map(type, found.destinations)):
        raise AssertionError("the two ends do not agree")
    return clock.seconds


def measure(leaves: int, items: int, runs: int) -> dict[str, dict[str, float]]:
    """The median of every stage, by case."""
    results = {}
    for name, make in CASES.items():
        state, target = make(leaves, items), make(leaves, items)
        once(state, target)
        found = []
        for _ in range(runs):
            gc.collect()
            found.append(once(state, target))
        results[name] = {stage: statistics.median(run[stage] for run in found) for stage in STAGES}
        results[name]["total"] = statistics.median(sum(run.values()) for run in found)
    return results


def table(measured: dict[str, dict[str, float]], leaves: int) -> str:
    lines = [("stage", *(cell for name in measured for cell in (name, "a leaf")))]
    for stage in (*STAGES, "total"):
        cells = []
        for seconds in measured.values():
            cells += [f"{seconds[stage] * 1e3:.1f} ms", f"{seconds[stage] / leaves * 1e6:.2f} us"]
        lines.append((stage, *cells))
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join("  ".join(c.rjust(w) for c, w in zip(line, widths, strict=True)) for line in lines)


def record(measured: dict[str, dict[str, float]], options: argparse.Namespace, argv: Sequence[str]) -> dict[str, Any]:
    """Everything that is needed to judge the numbers later."""
    return {
        **machine.about("benchmarks.description", argv),
        "leaves": options.leaves,
        "runs": options.runs,
        "seconds": "medians of the runs after one warm-up, each stage by itself",
        "cases": measured,
    }


def main(argv: Sequence[str] | None = None) -> int:
    argv = sys.argv[1:] if argv is None else argv
    parser = argparse.ArgumentParser(prog="benchmarks.description", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--leaves", type=int, default=100_000, help="tensors in the state (default 100,000)")
    parser.add_argument("--items", type=int, default=4, help="float32 items of each tensor (default 4)")
    parser.add_argument("--runs", type=int, default=5, help="runs that count (default 5)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write everything to this file")
    options = parser.parse_args(argv)
    if options.leaves < 1 or options.runs < 1 or options.items < 0:
        parser.error("--leaves and --runs must be positive, --items must not be negative")
    measured = measure(options.leaves, options.items, options.runs)
    print(table(measured, options.leaves))
    print(f"{options.leaves:,} tensors; medians of {options.runs} runs after a warm-up")
    if options.json is not None:
        options.json.write_text(json.dumps(record(measured, options, argv), indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
