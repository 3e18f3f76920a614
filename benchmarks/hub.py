"""What a Hub costs: how long training waits for a copy, how long a client waits for it, and how fast it downloads.

python -m benchmarks.hub [--mib N] [--runs N] [--json FILE]

A state of 16 MiB tensors in this process, on loopback. "held up" is the longest wait of a thread that enters
``mutating()`` all the time while a client asks for ``main``. Clients, each a process of its own: plain HTTP that throws
the bytes away, and ``huggingface_hub.snapshot_download`` onto /dev/shm, if it is installed. Medians.
"""

from __future__ import annotations

import argparse
import http.client
import importlib.util
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import torch

import transfuse
from benchmarks.compare import machine

TENSOR_BYTES = 16 << 20
PLAIN = """
import http.client, sys, time
connection = http.client.HTTPConnection(sys.argv[1])
for line in sys.stdin:
    began = time.perf_counter()
    connection.request("GET", "/live/model/resolve/main/model.safetensors")
    response, buffer, total = connection.getresponse(), bytearray(1 << 20), 0
    while count := response.readinto(buffer):
        total += count
    print(total, time.perf_counter() - began, flush=True)
"""
SNAPSHOT = """
import sys, time, tempfile
from huggingface_hub import snapshot_download
for line in sys.stdin:
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        began = time.perf_counter()
        snapshot_download("live/model", cache_dir=folder)
        print(0, time.perf_counter() - began, flush=True)
"""


class Trainer:
    """Changes the state all the time, and remembers the longest wait for its turn."""

    def __init__(self, hub: transfuse.Hub) -> None:
        self._hub = hub
        self.longest = 0.0
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> Trainer:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._done.is_set():
            began = time.perf_counter()
            with self._hub.mutating():
                self.longest = max(self.longest, time.perf_counter() - began)
            time.sleep(0.002)


def ask_main(hub: transfuse.Hub) -> float:
    """How long a client waits for the answer to ``main``."""
    connection = http.client.HTTPConnection(hub.endpoint.removeprefix("http://"))
    began = time.perf_counter()
    connection.request("HEAD", "/live/model/resolve/main/model.safetensors")
    connection.getresponse().read()
    seconds = time.perf_counter() - began
    connection.close()
    return seconds


def copies(state: dict[str, torch.Tensor], runs: int) -> dict[str, Any]:
    held, waited, first = [], [], []
    for _ in range(runs):
        with transfuse.hub(state) as hub:
            first.append(ask_main(hub))  # gets the memory, too
            time.sleep(1.2)  # The commit is free then.
            for _ in range(2):
                with Trainer(hub) as trainer:
                    time.sleep(0.05)
                    waited.append(ask_main(hub))
                held.append(trainer.longest)
                time.sleep(1.2)
    return {
        "first answer": statistics.median(first),
        "answer": statistics.median(waited),
        "held up": statistics.median(held),
        "held up, all": held,
    }


def downloads(state: dict[str, torch.Tensor], runs: int, program: str, **options: Any) -> dict[str, Any]:
    nbytes = sum(tensor.nbytes for tensor in state.values())
    seconds = []
    with (
        transfuse.hub(state, **options) as hub,
        tempfile.TemporaryDirectory() as home,
        subprocess.Popen(
            [sys.executable, "-c", program, hub.endpoint.removeprefix("http://")],
            env={**os.environ, "HF_ENDPOINT": hub.endpoint, "HF_HOME": home, "HF_HUB_DISABLE_PROGRESS_BARS": "1"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        ) as client,
    ):
        assert client.stdin is not None
        assert client.stdout is not None
        ask_main(hub)  # The copy has been made: only the download is measured.
        for _ in range(runs + 1):
            client.stdin.write("\n")
            client.stdin.flush()
            total, took = client.stdout.readline().split()
            assert int(total) in (0, *range(nbytes, nbytes + (1 << 20)))
            seconds.append(float(took))
        client.stdin.close()
    median = statistics.median(seconds[1:])
    return {"seconds": median, "MiB/s": nbytes / median / (1 << 20), "all": seconds[1:]}


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--mib", type=int, default=1024)
    options.add_argument("--runs", type=int, default=3)
    options.add_argument("--json", type=Path)
    chosen = options.parse_args()
    count = max(1, chosen.mib * (1 << 20) // TENSOR_BYTES)
    state = {f"w{i}": torch.full((TENSOR_BYTES // 4,), float(i)) for i in range(count)}
    results: dict[str, Any] = {"copy": copies(state, chosen.runs)}
    results["plain HTTP"] = downloads(state, chosen.runs, PLAIN)
    if importlib.util.find_spec("huggingface_hub") is not None:
        results["snapshot_download, one file"] = downloads(state, chosen.runs, SNAPSHOT)
        shard = count * TENSOR_BYTES // 4
        results["snapshot_download, four files"] = downloads(state, chosen.runs, SNAPSHOT, max_shard_bytes=shard)
    for name, result in results.items():
        shown = {key: round(value, 3) for key, value in result.items() if isinstance(value, float)}
        print(f"{name:30} {shown}")
    if chosen.json is not None:
        about = {
            **machine.about("benchmarks.hub", sys.argv[1:]),
            "mib": chosen.mib,
        }
        chosen.json.write_text(json.dumps({**about, "results": results}, indent=1) + "\n")


if __name__ == "__main__":
    main()
