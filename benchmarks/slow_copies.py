"""What ``commit(wait=False)`` adds to a step that takes longer than its copies, with copies slowed to a known rate.

python -m benchmarks.slow_copies [--ranks N] [--rate MIB] [--step SECONDS] [--steps N] [--turns N] [--json FILE]

With ``--ranks`` as many equal ranks of one host commit, as DDP has them: each keeps a part, and hashes the rest.

It runs on the imitation of an accelerator (tests/device), whose copies take no time of the host's. The loop waits for
its device in each step, as one that reads its loss does, so all that a commit does on the host before it returns
counts. Bare steps and steps with a commit take turns; medians. Run it on an idle machine.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

import transfuse
from benchmarks.compare import machine
from device import phantom

MIB = 1 << 20
#: Numbers of tensors, and the bytes of each: as many bytes in all.
SHAPES = ((16, 2 * MIB), (512, 64 << 10), (8192, 4 << 10))


class Training:
    def __init__(self, count: int, nbytes: int, seconds: float) -> None:
        self._state = {f"w{i}": torch.zeros(nbytes, dtype=torch.uint8, device=f"phantom:{i % 2}") for i in range(count)}
        # A kernel of the imitation takes the host's time: only some tensors change.
        self._changed = list(self._state.values())[:: max(1, count // 16)]
        self._seconds, self._step = seconds, 0
        self.outcomes: list[str] = []
        self._keep = transfuse.keep(
            transfuse.State(self._state),
            run=f"slow-{os.environ.get('MASTER_PORT', os.getpid())}-{count}",
            timeout=60,
            on_report=lambda report: self.outcomes.append(report.outcome),
        )
        self._keep.commit(0)
        #: For each commit: seconds until it returned, and of these the CPU time.
        self.hosts: list[tuple[float, float]] = []

    def step(self, *, commits: bool) -> float:
        """Seconds of a step. A commit before it goes on meanwhile."""
        began = time.perf_counter()
        if commits:
            self._step += 1
            computed = time.thread_time()
            self._keep.commit(self._step, wait=False)
            self.hosts.append((time.perf_counter() - began, time.thread_time() - computed))
        for device in (0, 1):
            with torch.accelerator.device_index(device):
                phantom.sleep(self._seconds)
        for device in (0, 1):
            torch.accelerator.current_stream(device).synchronize()
        with self._keep.mutating():
            torch._foreach_add_(self._changed, 1)
        return time.perf_counter() - began

    def close(self) -> None:
        self._keep.close()


def _measure(given: argparse.Namespace, count: int, nbytes: int) -> dict[str, Any]:
    training = Training(count, nbytes, given.step)
    phantom.set_copy_rate(given.rate * MIB)
    times: dict[bool, list[float]] = {False: [], True: []}
    for _ in range(given.turns):
        for commits in (False, True):
            training.step(commits=commits)
            times[commits] += [training.step(commits=commits) for _ in range(given.steps)]
    took, computed = (1000 * statistics.median(column) for column in zip(*training.hosts, strict=True))
    bare, beside = statistics.median(times[False]), statistics.median(times[True])
    training.close()
    phantom.reset_settings()
    return {
        "ranks": given.ranks,
        "tensors": count,
        "bytes_of_each": nbytes,
        "copy_seconds": count * nbytes / 2 / given.rate / MIB,
        "step_seconds": bare,
        "spread_of_bare_steps": [min(times[False]), max(times[False])],
        "added_percent": 100 * (beside / bare - 1),
        "returns_after_ms": took,
        "cpu_ms_of_these": computed,
        "committed": training.outcomes.count("committed"),
        "commits": len(training.outcomes),
    }


def _line(found: dict[str, Any]) -> str:
    return (
        f"{found['ranks']} rank(s), {found['tensors']:,} tensors of {found['bytes_of_each'] >> 10:,} KiB, copies of "
        f"{found['copy_seconds']:.2f} s: a step takes {found['step_seconds']:.4f} s, and "
        f"{found['added_percent']:+.2f} % with a commit, which returns after {found['returns_after_ms']:.1f} ms, "
        f"{found['cpu_ms_of_these']:.1f} ms of them CPU time; {found['committed']} of {found['commits']} committed"
    )


def _all_ranks(ranks: int) -> int:
    """Run this program again as each of the ranks. The first one prints."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    places = [
        os.environ | {"RANK": str(rank), "WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        for rank in range(ranks)
    ]
    command = [sys.executable, "-m", "benchmarks.slow_copies", *sys.argv[1:]]
    return max([one.wait() for one in [subprocess.Popen(command, env=place) for place in places]])


def main() -> None:
    parser = argparse.ArgumentParser("python -m benchmarks.slow_copies", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--ranks", type=int, default=1, help="equal ranks of this host (default 1)")
    parser.add_argument("--rate", type=float, default=16, help="MiB that each copy moves in a second (default 16)")
    parser.add_argument("--step", type=float, default=1.5, help="seconds of a step (default 1.5)")
    parser.add_argument("--steps", type=int, default=3, help="steps of a turn (default 3)")
    parser.add_argument("--turns", type=int, default=3, help="turns of each kind (default 3)")
    parser.add_argument("--json", type=Path, help="add what was found to this file")
    given = parser.parse_args()
    rank, load = os.environ.get("RANK"), os.getloadavg()[0]
    if given.ranks > 1 and rank is None:
        sys.exit(_all_ranks(given.ranks))
    torch.set_num_threads(1)
    phantom.load()
    phantom.set_available(True)
    if rank is not None:
        dist.init_process_group("gloo")
    found = []
    for count, nbytes in SHAPES:
        found.append(_measure(given, count, nbytes))
        if rank in (None, "0"):
            print(_line(found[-1]), flush=True)
    if given.json is not None and rank in (None, "0"):
        about = machine.about("benchmarks.slow_copies", sys.argv[1:], load)
        before = json.loads(given.json.read_text())["found"] if given.json.exists() else []
        about["found"] = [*before, *({"rate_mib": given.rate, "load": load} | one for one in found)]
        given.json.write_text(json.dumps(about, indent=1) + "\n")
    if rank is not None:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
