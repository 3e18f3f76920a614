"""What a save in the background costs training.

python -m benchmarks.saving [--mib N] [--runs N] [--free N] [--directory DIR] [--json FILE]

A job of one rank computes on all cores but ``--free`` of them, and commits a state of ``--mib`` in every tenth step.
Stretches of steps during which a step is being saved take turns with stretches during which none is: both commit as
often. The cost is how much longer a step takes while one is being saved; medians over stretches.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

import transfuse
from benchmarks.compare import machine
from transfuse._keeper import frames, runs
from transfuse._keeper.attach import SOCKET_NAME
from transfuse._keeper.frames import KeeperLink

MIB = 1 << 20
TENSOR_BYTES = 16 * MIB
RUN = "benchmarks.saving"
#: Every tenth step is committed; the step that is to be saved is the first of a stretch.
COMMIT_EVERY, STRETCH = 10, 1000
MATRIX = 700
SECONDS = 120.0


def compute(a: torch.Tensor, b: torch.Tensor) -> None:
    torch.mm(a, b)


def status() -> dict[str, Any]:
    link = KeeperLink.to(str(runs.find_run(RUN).directory / SOCKET_NAME), SECONDS)
    try:
        told: dict[str, Any] = json.loads(link.ask(frames.Status(), frames.StatusReply, SECONDS).text)
        return told
    finally:
        link.close()


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


def measure(arguments: argparse.Namespace, folder: str) -> dict[str, Any]:
    torch.set_num_threads(max(1, (os.cpu_count() or 1) - arguments.free))
    state = {f"{n}": torch.rand(TENSOR_BYTES // 4) for n in range(max(1, arguments.mib * MIB // TENSOR_BYTES))}
    a, b = torch.rand(MATRIX, MATRIX), torch.rand(MATRIX, MATRIX)
    with transfuse.keep(state, directory=folder, save_every=STRETCH, run=RUN, timeout=SECONDS) as keep:
        stretch(keep, 1, 3 * COMMIT_EVERY, a, b)
        idle, saving, saves = [], [], []
        for number in range(1, arguments.runs + 1):
            quiet, seconds = stretch(keep, number * STRETCH - 200, 100, a, b), list[float]()
            keep.commit(number * STRETCH)
            # A little at a time, until it is saved.
            step = number * STRETCH + 1
            while (told := status()["storage"])["last"].get("step") != number * STRETCH:
                if told["trouble"]:
                    raise SystemExit(told["trouble"])
                seconds += stretch(keep, step, COMMIT_EVERY, a, b)
                step += COMMIT_EVERY
            idle.append(statistics.mean(quiet))
            saving.append(statistics.mean(seconds) if seconds else statistics.mean(quiet))
            saves.append(told["last"])
    rate = statistics.median(one["bytes"] / one["seconds"] for one in saves) / 1e9
    calm, busy = statistics.median(idle), statistics.median(saving)
    return {
        "step": calm,
        "step_while_saving": busy,
        "cost": busy / calm - 1,
        "save_seconds": statistics.median(one["seconds"] for one in saves),
        "save_gb_per_second": rate,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mib", type=int, default=512)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--free", type=int, default=1, help="cores that training leaves free")
    parser.add_argument("--directory", type=Path, default=None, help="where to save; else a fresh one beside this one")
    parser.add_argument("--json", type=Path, default=None)
    arguments = parser.parse_args()
    folder = tempfile.mkdtemp(prefix="saving", dir=arguments.directory)
    keepers = tempfile.mkdtemp(prefix="keep", dir="/tmp")
    os.environ["TRANSFUSE_KEEPER_DIR"] = keepers
    try:
        found = measure(arguments, folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    print(
        f"{arguments.mib} MiB, {arguments.free} of {os.cpu_count()} cores free: a step takes "
        f"{1e3 * found['step']:.2f} ms, and {1e3 * found['step_while_saving']:.2f} ms while one is saved: "
        f"{100 * found['cost']:+.1f} %. A save takes {found['save_seconds']:.2f} s, "
        f"{found['save_gb_per_second']:.2f} GB/s"
    )
    if arguments.json is not None:
        about = machine.about("benchmarks.saving", sys.argv[1:])
        arguments.json.write_text(json.dumps({"about": about, "saving": found}, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
