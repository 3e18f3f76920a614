"""What ``commit(wait=False)`` adds to a step that takes longer than its copies, with copies slowed to a known rate.

python -m benchmarks.slow_copies [--rate MIB] [--step SECONDS] [--steps N] [--turns N]

It runs on the imitation of an accelerator (tests/device), whose copies take no time of the host's. The loop waits for
its device in each step, as one that reads its loss does, so all that a commit does on the host before it returns
counts. Bare steps and steps with a commit take turns; medians. Run it on an idle machine.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

import transfuse
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
            run=f"slow-{os.getpid()}-{count}",
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


def main() -> None:
    parser = argparse.ArgumentParser("python -m benchmarks.slow_copies", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--rate", type=float, default=16, help="MiB that each copy moves in a second (default 16)")
    parser.add_argument("--step", type=float, default=1.5, help="seconds of a step (default 1.5)")
    parser.add_argument("--steps", type=int, default=3, help="steps of a turn (default 3)")
    parser.add_argument("--turns", type=int, default=3, help="turns of each kind (default 3)")
    given = parser.parse_args()
    torch.set_num_threads(1)
    phantom.load()
    phantom.set_available(True)
    for count, nbytes in SHAPES:
        training = Training(count, nbytes, given.step)
        phantom.set_copy_rate(given.rate * MIB)
        times: dict[bool, list[float]] = {False: [], True: []}
        for _ in range(given.turns):
            for commits in (False, True):
                training.step(commits=commits)
                times[commits] += [training.step(commits=commits) for _ in range(given.steps)]
        took, computed = (1000 * statistics.median(column) for column in zip(*training.hosts, strict=True))
        bare, beside = statistics.median(times[False]), statistics.median(times[True])
        print(
            f"{count:,} tensors of {nbytes >> 10:,} KiB, copies of {count * nbytes / 2 / given.rate / MIB:.2f} s: "
            f"a step takes {bare:.4f} s, and {100 * (beside / bare - 1):+.2f} % with a commit, which returns after "
            f"{took:.1f} ms, {computed:.1f} ms of them CPU time; {training.outcomes.count('committed')} of "
            f"{len(training.outcomes)} committed",
            flush=True,
        )
        training.close()
        phantom.reset_settings()


if __name__ == "__main__":
    main()
