"""Tensors from one Ray actor to another: over transfuse, over Ray's own gloo transport, through Ray's object store.

    python -m benchmarks.ray_direct [--runs 9] [--json FILE]

One actor returns tensors that it holds, the other takes them as an argument; the time is that of both calls, seen by
the driver. All ways take turns in every run. What arrives is compared before anything is measured. It needs ``ray``.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from typing import Any

os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")

import ray
import torch
from ray.experimental.collective import create_collective_group

from benchmarks.compare import machine
from transfuse.integrations import ray as over_transfuse

over_transfuse.register(host="127.0.0.1")
over_transfuse.register("NETWORK", host="127.0.0.1", same_host=False)

#: By name: how many tensors, and of how many float32 each.
CASES = {
    "one of 4 KiB": (1, 1 << 10),
    "one of 1 MiB": (1, 1 << 18),
    "one of 64 MiB": (1, 1 << 24),
    "one of 256 MiB": (1, 1 << 26),
    "1,000 of 4 KiB": (1000, 1 << 10),
}
#: By name: the sender's method.
WAYS = {
    "transfuse": "over_transfuse",
    "transfuse, network": "over_network",
    "Ray GLOO": "over_gloo",
    "object store": "through_store",
}


@ray.remote(num_cpus=0, max_concurrency=2)
class Worker:
    def __init__(self) -> None:
        torch.set_num_threads(1)
        self.made: dict[str, list[torch.Tensor]] = {}

    def make(self, case: str) -> None:
        count, numel = CASES[case]
        self.made = {case: [torch.full((numel,), float(i)) for i in range(count)]}

    @ray.method(tensor_transport="TRANSFUSE")
    def over_transfuse(self, case: str) -> list[torch.Tensor]:
        return self.made[case]

    @ray.method(tensor_transport="NETWORK")
    def over_network(self, case: str) -> list[torch.Tensor]:
        return self.made[case]

    @ray.method(tensor_transport="GLOO")
    def over_gloo(self, case: str) -> list[torch.Tensor]:
        return self.made[case]

    def through_store(self, case: str) -> list[torch.Tensor]:
        return self.made[case]

    def take(self, received: list[torch.Tensor]) -> int:
        return len(received)

    def check(self, received: list[torch.Tensor], case: str) -> bool:
        count, numel = CASES[case]
        return len(received) == count and all(
            torch.equal(tensor, torch.full((numel,), float(i))) for i, tensor in enumerate(received)
        )


def measure(runs: int) -> dict[str, dict[str, list[float]]]:
    """Milliseconds of every run, by case and way."""
    sender, receiver = Worker.remote(), Worker.remote()  # type: ignore[attr-defined]
    create_collective_group([sender, receiver], backend="gloo")
    found: dict[str, dict[str, list[float]]] = {}
    for case in CASES:
        ray.get([sender.make.remote(case), receiver.make.remote(case)])
        for way in WAYS.values():
            assert ray.get(receiver.check.remote(getattr(sender, way).remote(case), case)), (case, way)
        found[case] = {way: [] for way in WAYS}
        for _ in range(runs):
            for name, way in WAYS.items():
                started = time.perf_counter()
                ray.get(receiver.take.remote(getattr(sender, way).remote(case)))
                found[case][name].append(1000 * (time.perf_counter() - started))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=9)
    parser.add_argument("--json", help="write every run to this file")
    asked = parser.parse_args()
    options: dict[str, Any] = {"include_dashboard": False, "log_to_driver": False, "logging_level": "error"}
    ray.init("local", num_cpus=2, num_gpus=0, object_store_memory=1 << 30, **options)
    try:
        found = measure(asked.runs)
    finally:
        ray.shutdown()
    print(f"milliseconds, medians of {asked.runs} runs; ray {ray.__version__}, torch {torch.__version__}")
    print("".join([f"{'':<16}", *(f"{way:>20}" for way in WAYS)]))
    for case, ways in found.items():
        print("".join([f"{case:<16}", *(f"{statistics.median(ways[way]):>20.1f}" for way in WAYS)]))
    if asked.json:
        with open(asked.json, "w") as file:
            written = {
                **machine.about("benchmarks.ray_direct", sys.argv[1:]),
                "ray": ray.__version__,
                "milliseconds": found,
            }
            json.dump(written, file, indent=1)


if __name__ == "__main__":
    main()
