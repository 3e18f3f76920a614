"""The core against PyTorch's own PGTransport: two processes of this machine, gloo, in place.

python -m benchmarks.core [--runs N] [--scale X] [--json FILE]

Both move the same tensors over the same group, in turns, and every move is compared bit for bit.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import shlex
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import transfuse
from transfuse.cli import compare
from transfuse.cli.workers import Workers
from transfuse.report import human_bytes

KIB, MIB = 1 << 10, 1 << 20

#: Name, number of tensors, bytes of each. The scale applies to the bytes of the first two, and the number of the last.
CASES = {"one 256 MiB tensor": (1, 256 * MIB), "64 of 4 MiB": (64, 4 * MIB), "5,000 of 4 KiB": (5000, 4 * KIB)}


def tensors(count: int, size: int, seed: int | None) -> dict[str, torch.Tensor]:
    """Random numbers, or zeros where ``seed`` is None."""
    generator = torch.Generator().manual_seed(seed or 0)
    made = {f"tensor{i}": torch.zeros(size // 4) for i in range(count)}
    for tensor in made.values() if seed is not None else ():
        tensor.normal_(generator=generator)
    return made


def scaled(scale: float) -> dict[str, tuple[int, int]]:
    """The cases with about this part of their bytes. Small tensors stay as they are and become fewer."""
    return {
        name if scale == 1 else f"{name}, times {scale:g}": (max(1, round(count * scale)), size)
        if size <= 4 * KIB
        else (count, max(4, round(size * scale) // 4 * 4))
        for name, (count, size) in CASES.items()
    }


def work(say: Callable[[object], None], cases: dict[str, tuple[int, int]], runs: int) -> None:
    """One end. The receiver tells what it saw."""
    receiving = dist.get_rank() == compare.RECEIVER
    for name, (count, size) in cases.items():
        state, target = tensors(count, size, seed=1), tensors(count, size, seed=None) if receiving else None
        for move in compare.race(state, target, runs):
            if receiving:
                say((name, move))


def measure(scale: float, runs: int) -> dict[str, dict[str, compare.Result]]:
    """Results by case and kind of move."""
    cases = scaled(scale)
    moves: dict[str, list[compare.Move]] = {name: [] for name in cases}
    with Workers(2, work, cases, runs) as workers:
        for _, (name, move) in workers:
            moves[name].append(move)
    return {name: compare.summarize(some) for name, some in moves.items()}


def table(measured: dict[str, dict[str, compare.Result]]) -> str:
    lines = [("case", "", "received", "median", "range", "speed", "checked")]
    for name, results in measured.items():
        torchs = results[compare.TORCH].median
        for i, r in enumerate(results.values()):
            spread = f"{min(r.seconds) * 1e3:.1f}-{max(r.seconds) * 1e3:.1f} ms"
            checked = "bit for bit" if r.verified else "DIFFERS"
            median, speed = f"{r.median * 1e3:.1f} ms", f"{torchs / r.median:.2f}x"
            lines.append((name if i == 0 else "", r.name, human_bytes(r.wire_bytes), median, spread, speed, checked))
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join("  ".join(c.ljust(w) for c, w in zip(line, widths, strict=True)).rstrip() for line in lines)


def record(
    measured: dict[str, dict[str, compare.Result]], runs: int, argv: Sequence[str], load: float
) -> dict[str, Any]:
    """Everything one needs to judge the numbers later."""
    return {
        "date": datetime.date.today().isoformat(),
        "command": shlex.join(["python", "-m", "benchmarks.core", *argv]),
        "machine": {"cpus": os.cpu_count(), "platform": platform.platform(), "processor": processor()},
        # Other work on the machine shows here.
        "load_average_before": load,
        "versions": {
            "transfuse": transfuse.__version__,
            "torch": torch.__version__,
            "python": platform.python_version(),
        },
        "group": "gloo over loopback, two processes",
        "runs": runs,
        "seconds": "from a barrier until both ends have returned; medians of the runs after one warm-up, in turns",
        "cases": {name: [result.to_dict() for result in results.values()] for name, results in measured.items()},
    }


def processor() -> str:
    """The CPU's name where Linux tells it."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), "unknown")


def main(argv: Sequence[str] | None = None) -> int:
    argv = sys.argv[1:] if argv is None else argv
    parser = argparse.ArgumentParser(prog="benchmarks.core", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--runs", type=int, default=7, help="moves of each kind that count (default 7)")
    parser.add_argument("--scale", type=float, default=1.0, help="part of the bytes to move (default 1)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write everything to this file")
    options = parser.parse_args(argv)
    if options.runs < 1 or options.scale <= 0:
        parser.error("--runs and --scale must be positive")
    load = os.getloadavg()[0]
    measured = measure(options.scale, options.runs)
    print(table(measured))
    print(f"medians of {options.runs} runs after a warm-up, in turns; speed is relative to {compare.TORCH}")
    if options.json is not None:
        options.json.write_text(json.dumps(record(measured, options.runs, argv, load), indent=2) + "\n")
    wrong = [line for results in measured.values() for result in results.values() for line in result.wrong]
    for line in wrong[:10]:
        print(line, file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
