"""How long it takes until something is there: an import, a command, a keeper; and what a keeper takes beside its slots.

python -m benchmarks.startup [--runs N] [--json FILE]

Imports and commands each run in a new process, taking turns. A keeper is started as a worker starts one, and is there
when it answers. Medians; CPU is user and system time. A keeper's memory is what its process has in memory after a
commit of 64 MiB, without shared memory, which the slots are.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore

import transfuse
from benchmarks.compare import machine
from transfuse._keeper import runs
from transfuse._keeper.attach import attach
from transfuse._keeper.frames import KeeperLink

COMMAND = "from transfuse.cli import main; main()"
PROGRAMS = {
    "python": ["pass"],
    "import torch": ["import torch"],
    "import transfuse": ["import transfuse"],
    "import torch, transfuse": ["import torch, transfuse"],
    "… and transfuse.heal": ["import torch, transfuse; transfuse.heal"],
    "transfuse --help": [COMMAND, "--help"],
    "transfuse keep --status": [COMMAND, "keep", "--status"],
}
KEPT_BYTES = 64 << 20


def timed(work: Callable[[], object]) -> tuple[float, float]:
    """Seconds, and those of CPU in processes that have ended meanwhile."""
    started, before = time.perf_counter(), os.times()
    work()
    seconds, after = time.perf_counter() - started, os.times()
    used = after.children_user + after.children_system - before.children_user - before.children_system
    return seconds, used


def run(words: Sequence[str]) -> Callable[[], object]:
    return lambda: subprocess.run([sys.executable, "-c", *words], check=True, stdout=subprocess.DEVNULL)


def start_keeper(number: int) -> tuple[float, float]:
    """Seconds until a keeper answers, and those of CPU that it has used by then."""
    started = time.perf_counter()
    link = attach(runs.find_run(f"startup {number}"), 60)
    seconds, pid = time.perf_counter() - started, link.peer_pid()
    used = machine.cpu_seconds_of(pid)
    end(link, pid)
    return seconds, used


def end(link: KeeperLink, pid: int) -> None:
    os.kill(pid, signal.SIGTERM)
    while not link.gone():
        time.sleep(0.01)
    link.close()


def keeper_bytes() -> int:
    """What a keeper takes beside its slots after a commit."""
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    state = {"w": torch.ones(KEPT_BYTES // 4)}
    run_of = runs.find_run("startup")
    with transfuse.keep(lambda: state, run=run_of.name) as keep:
        keep.commit(1)
        link = attach(run_of, 60)
        pid = link.peer_pid()
        link.close()
        status = Path(f"/proc/{pid}/status").read_text()
    dist.destroy_process_group()
    return sum(int(kib) << 10 for kib in re.findall(r"^Rss(?:Anon|File):\s+(\d+) kB", status, re.M))


def main(argv: Sequence[str] | None = None) -> int:
    argv = sys.argv[1:] if argv is None else argv
    parser = argparse.ArgumentParser(prog="benchmarks.startup", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--runs", type=int, default=7, help="of each (default 7, after one that does not count)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write everything to this file")
    given = parser.parse_args(argv)
    about = machine.about("benchmarks.startup", argv)
    took: dict[str, list[tuple[float, float]]] = {}
    with tempfile.TemporaryDirectory(prefix="keep", dir="/tmp") as directory:
        os.environ["TRANSFUSE_KEEPER_DIR"] = directory
        for number in range(given.runs + 1):
            measured = {name: timed(run(words)) for name, words in PROGRAMS.items()}
            measured["a keeper"] = start_keeper(number)
            if number:
                for name, one in measured.items():
                    took.setdefault(name, []).append(one)
        nbytes = keeper_bytes()
    medians: list[dict[str, Any]] = []
    for name, pairs in took.items():
        seconds, cpu = (statistics.median(column) for column in zip(*pairs, strict=True))
        medians.append({"what": name, "seconds": seconds, "cpu_seconds": cpu})
        print(f"{name:25} {seconds:6.3f} s  {cpu:6.3f} s of CPU")
    print(f"a keeper, beside its slots: {nbytes / (1 << 20):.0f} MiB")
    if given.json is not None:
        written = {**about, "runs": given.runs, "medians": medians, "keeper_bytes": nbytes}
        given.json.write_text(json.dumps(written, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
