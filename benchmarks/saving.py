"""What a save in the background costs training.

python -m benchmarks.saving [--mib N] [--runs N] [--free N] [--directory DIR] [--json FILE]

A job of one rank computes on all cores but ``--free`` of them, and commits a state of ``--mib`` in every tenth step.
Stretches of steps during which a step is being saved take turns with stretches during which none is, and with stretches
during which dd writes as many bytes of zeros, with the same priority: all commit as often. The cost is how much longer
a step takes; medians over stretches.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

import transfuse
from benchmarks.compare import machine
from benchmarks.storage import POLL_SECONDS, SECONDS, status
from transfuse._keeper.saving import NICE

MIB = 1 << 20
TENSOR_BYTES = 16 * MIB
RUN = "benchmarks.saving"
#: Every tenth step is committed; the step that is to be saved is the first of a stretch.
COMMIT_EVERY, STRETCH = 10, 1000
MATRIX = 700


def compute(a: torch.Tensor, b: torch.Tensor) -> None:
    torch.mm(a, b)


def stretch(keep: Any, first: int, steps: int, a: torch.Tensor, b: torch.Tensor) -> list[float]:
    """The seconds of single steps, from a commit to the next."""
    took = []
    for step in range(first, first + steps):
        began = time.perf_counter()
        compute(a, b)
        with keep.mutating():
            pass
        if step % COMMIT_EVERY == 0:
            keep.commit(step, wait=False)
        took.append(time.perf_counter() - began)
    return took


def has_ended(process: subprocess.Popen[bytes]) -> bool:
    return process.poll() is not None


def until(fact: Callable[[], bool], keep: Any, step: int, a: torch.Tensor, b: torch.Tensor) -> float:
    """The mean of steps, a few at a time, until something is so."""
    took = list[float]()
    while not took or not fact():
        took += stretch(keep, step + len(took), COMMIT_EVERY, a, b)
        if sum(took) > SECONDS:
            raise SystemExit(f"it has not ended within {SECONDS:g} s; the keeper says: {status(RUN)['storage']}")
    return statistics.mean(took)


def measure(arguments: argparse.Namespace, folder: str) -> dict[str, Any]:
    torch.set_num_threads(max(1, (os.cpu_count() or 1) - arguments.free))
    state = {f"{n}": torch.rand(TENSOR_BYTES // 4) for n in range(max(1, arguments.mib * MIB // TENSOR_BYTES))}
    a, b = torch.rand(MATRIX, MATRIX), torch.rand(MATRIX, MATRIX)
    with transfuse.keep(state, directory=folder, save_every=STRETCH, run=RUN, timeout=SECONDS) as keep:
        stretch(keep, 1, 3 * COMMIT_EVERY, a, b)
        idle, saving, copying, saves = [], [], [], []
        for number in range(1, arguments.runs + 1):
            first = number * STRETCH
            idle.append(statistics.mean(stretch(keep, first - 300, 100, a, b)))
            with subprocess.Popen(
                ["nice", "-n", str(NICE), "dd", "if=/dev/zero", f"of={folder}/dd", "bs=8M", "conv=fsync",
                 f"count={max(1, arguments.mib // 8)}", "status=none"]
            ) as dd:  # fmt: skip
                copying.append(until(partial(has_ended, dd), keep, first - 200, a, b))
            Path(folder, "dd").unlink()
            keep.commit(first)
            # To look at a file costs nothing beside a step, and a question to the keeper would.
            record = Path(folder, f"step-{first}-gen-1", "step.json")
            saving.append(until(record.exists, keep, first + 1, a, b))
            while (told := status(RUN)["storage"])["last"].get("step") != first:
                if told["trouble"]:
                    raise SystemExit(told["trouble"])
                time.sleep(POLL_SECONDS)
            saves.append(told["last"])
    rate = statistics.median(one["bytes"] / one["seconds"] for one in saves) / 1e9
    calm, busy, beside = map(statistics.median, (idle, saving, copying))
    return {
        "step": calm,
        "step_while_saving": busy,
        "cost": busy / calm - 1,
        "cost_of_dd": beside / calm - 1,
        "save_seconds": statistics.median(one["seconds"] for one in saves),
        "save_gb_per_second": rate,
    }


def main(argv: Sequence[str] | None = None) -> int:
    argv = sys.argv[1:] if argv is None else argv
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mib", type=int, default=512)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--free", type=int, default=1, help="cores that training leaves free")
    parser.add_argument("--directory", type=Path, default=None, help="where to save; else a fresh one beside this one")
    parser.add_argument("--json", type=Path, default=None)
    arguments = parser.parse_args(argv)
    folder = tempfile.mkdtemp(prefix="saving", dir=arguments.directory)
    keepers = tempfile.mkdtemp(prefix="keep", dir="/tmp")
    os.environ["TRANSFUSE_KEEPER_DIR"] = keepers
    try:
        found = measure(arguments, folder)
    finally:
        for made in (folder, keepers):
            shutil.rmtree(made, ignore_errors=True)
    print(
        f"{arguments.mib} MiB, {arguments.free} of {os.cpu_count()} cores free: a step takes "
        f"{1e3 * found['step']:.2f} ms, and {1e3 * found['step_while_saving']:.2f} ms while one is saved: "
        f"{100 * found['cost']:+.1f} %, where dd costs {100 * found['cost_of_dd']:+.1f} %. "
        f"A save takes {found['save_seconds']:.2f} s, "
        f"{found['save_gb_per_second']:.2f} GB/s"
    )
    if arguments.json is not None:
        about = machine.about("benchmarks.saving", argv)
        arguments.json.write_text(json.dumps({**about, "saving": found}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
