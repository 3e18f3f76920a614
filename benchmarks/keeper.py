"""The keeper: commits and restores beside a bare copy of the same bytes, and beside checkpoints in /dev/shm.

python -m benchmarks.keeper [--mib N] [--ranks N] [--runs N] [--json FILE]

All ranks are on this host. A bare copy moves the same bytes between the same kinds of memory, with as many threads as
the machine has cores, by memmove, and checks nothing. All contenders take turns; medians; every restore is compared bit
for bit.
"""

from __future__ import annotations

import argparse
import ctypes
import itertools
import json
import mmap
import os
import shutil
import signal
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict_saver import async_save

import transfuse
from benchmarks.compare import machine
from benchmarks.hosts import Hosts, Unavailable, traffic
from transfuse._keeper import frames
from transfuse.testing.ranks import listening, say

MIB = 1 << 20
#: The state is tensors of this size.
TENSOR_BYTES = 16 * MIB
#: A bare copy moves this much at a time.
BLOCK_BYTES = 4 * MIB
#: What a step of training keeps busy, while the keeper's copy overlaps it; and about how long it takes.
IDLE = "a step that leaves the cores free, as on an accelerator"
ONE = "a step that computes on one core"
ALL = "a step that computes on all cores"
BUSY = (IDLE, ONE, ALL)
STEP_SECONDS = 1.0
MATRIX = 1500


def bare(pairs: Sequence[tuple[int, int, int]]) -> None:
    """Copy (to, from, bytes), in as many threads as there are cores."""
    tasks = [
        (to + low, source + low, min(BLOCK_BYTES, nbytes - low))
        for to, source, nbytes in pairs
        for low in range(0, nbytes, BLOCK_BYTES)
    ]
    supply = iter(tasks)
    lock = threading.Lock()

    def work() -> None:
        while True:
            with lock:
                task = next(supply, None)
            if task is None:
                return
            ctypes.memmove(*task)

    threads = [threading.Thread(target=work) for _ in range(len(os.sched_getaffinity(0)) - 1)]
    for thread in threads:
        thread.start()
    work()
    for thread in threads:
        thread.join()


def measure(rank: int, ranks: int, mib: int, runs: int, directory: str) -> None:
    os.environ["TRANSFUSE_KEEPER_DIR"] = directory
    count = mib * MIB // TENSOR_BYTES
    state = {f"tensor{i}": torch.randint(0, 255, (TENSOR_BYTES,), dtype=torch.uint8) for i in range(count)}
    dist.barrier()
    makes: dict[str, Callable[[], transfuse.Keep]] = {
        "commit, declared shared": lambda: transfuse.keep(lambda: state, run="shared", shared=True, verify=False),
        "commit, with digests": lambda: transfuse.keep(lambda: state, run="digests", verify=True),
    }
    keeps = {name: make() for name, make in makes.items()}
    memory = mmap.mmap(-1, mib * MIB, mmap.MAP_SHARED | mmap.MAP_POPULATE)
    base = int(np.frombuffer(memory, dtype=np.uint8).ctypes.data)
    out = [(base + i * TENSOR_BYTES, t.data_ptr(), TENSOR_BYTES) for i, t in enumerate(state.values())]
    back = [(to, source, nbytes) for source, to, nbytes in out]
    step = [0]
    files = Path("/dev/shm") / f"transfuse-benchmark-{os.getpid()}"
    files.mkdir()

    def commit(name: str) -> Callable[[], None]:
        def run() -> None:
            step[0] += 1
            report = keeps[name].commit(step[0])
            assert report is not None
            assert report.outcome == "committed", report.line()

        return run

    def restore(name: str) -> Callable[[], None]:
        def run() -> None:
            assert keeps[name].restore() is not None

        return run

    def save_async() -> None:
        # The time for which training stands still, and the rest of the save.
        future = async_save(state, checkpoint_id=str(files / "dcp"))
        stalled.append(time.perf_counter())
        future.result()  # type: ignore[union-attr]

    stalled: list[float] = []
    contenders: dict[str, Callable[[], None]] = {
        "bare copy out": lambda: bare(out),
        **{name: commit(name) for name in keeps},
        "torch.save to /dev/shm": lambda: torch.save(state, files / "state.pt"),
        "DCP async_save to /dev/shm": save_async,
        "bare copy back": lambda: bare(back),
        "restore": restore("commit, declared shared"),
        "restore, verified": restore("commit, with digests"),
        "torch.load from /dev/shm": lambda: _load(state, files / "state.pt"),
    }

    def prepare(name: str) -> None:
        """Before the clock runs: a first commit lays out the slots; a restore is made by a worker that begins anew."""
        if name in keeps:
            commit(name)()
        restores = {"restore": "commit, declared shared", "restore, verified": "commit, with digests"}
        if name in restores:
            keeps[restores[name]].detach()
            keeps[restores[name]] = makes[restores[name]]()

    before = {name: tensor.clone() for name, tensor in state.items()}
    try:
        for turn in range(runs + 1):
            for name, run in contenders.items():
                prepare(name)
                if name.startswith(("restore", "torch.load")):
                    for tensor in state.values():
                        tensor.zero_()
                dist.barrier()
                started = time.perf_counter()
                run()
                seconds = time.perf_counter() - started
                dist.barrier()
                if name.startswith(("restore", "torch.load")):
                    wrong = [key for key in state if not torch.equal(state[key], before[key])]
                    assert not wrong, f"{name}: {wrong}"
                if turn and rank == 0:
                    say({"name": name, "seconds": seconds})
                    if stalled:
                        say({"name": "DCP async_save: training stands still", "seconds": stalled[-1] - started})
                stalled.clear()
        if rank == 0:
            for busy in BUSY:
                without, overlapped = _train(keeps["commit, declared shared"], state, runs, busy)
                say({"name": busy, "loop": {"without": without, "with": overlapped}})
        dist.barrier()
    finally:
        shutil.rmtree(files)
    for keep in keeps.values():
        keep.close()


def _load(state: dict[str, torch.Tensor], path: Path) -> None:
    loaded = torch.load(path, mmap=True)
    for name, tensor in state.items():
        tensor.copy_(loaded[name])


def _train(keep: transfuse.Keep, state: dict[str, torch.Tensor], steps: int, busy: str) -> tuple[float, float]:
    """Seconds for a step of about a second, without the keeper and with a commit that overlaps the next step."""
    one, other = torch.randn(MATRIX, MATRIX), torch.randn(MATRIX, MATRIX)
    first = next(iter(state.values()))
    numbers = itertools.count(10_000 * (1 + BUSY.index(busy)))

    def compute(rounds: int) -> None:
        for _ in range(rounds):
            torch.mm(one, other)

    def step(rounds: int, keeps: bool) -> None:
        if busy == IDLE:
            time.sleep(STEP_SECONDS)
        else:
            compute(rounds)
        with keep.mutating():
            first[:16] += 1
        if keeps:
            keep.commit(next(numbers), wait=False)

    threads = torch.get_num_threads()
    torch.set_num_threads(1 if busy == ONE else len(os.sched_getaffinity(0)))
    try:
        compute(3)
        started = time.perf_counter()
        compute(3)
        rounds = max(1, round(3 * STEP_SECONDS / (time.perf_counter() - started)))
        found: dict[bool, list[float]] = {False: [], True: []}
        # In turns, so that a noisy minute meets both. The first step after a change of turns does not count.
        for _ in range(steps):
            for keeps in found:
                step(rounds, keeps)
                started = time.perf_counter()
                step(rounds, keeps)
                step(rounds, keeps)
                found[keeps].append((time.perf_counter() - started) / 2)
        return statistics.median(found[False]), statistics.median(found[True])
    finally:
        torch.set_num_threads(threads)


def from_a_neighbour(rank: int, mib: int, runs: int, directory: str) -> None:
    """Two hosts with one rank each. The second one loses its keeper, and restores from the first one's.

    ``same_host=False``, since these hosts could read each other's memory.
    """
    os.environ["TRANSFUSE_KEEPER_DIR"] = f"{directory}/host{rank}"
    os.mkdir(os.environ["TRANSFUSE_KEEPER_DIR"], 0o700)
    torch.manual_seed(rank)
    state = {f"tensor{i}": torch.randint(0, 255, (MIB,), dtype=torch.uint8) for i in range(mib)}
    before = {name: tensor.clone() for name, tensor in state.items()}
    for turn in range(runs):
        keep = transfuse.keep(lambda: state, run=f"turn{turn}", same_host=False)
        keep.commit(1)
        status: dict[str, Any] = {}
        while status.get("confirmed_step") != 1:
            time.sleep(0.05)
            status = json.loads(keep._ask(frames.Status(), frames.StatusReply).text)
        dist.barrier()
        keep.detach()
        if rank == 1:
            os.kill(status["pid"], signal.SIGKILL)
            for tensor in state.values():
                tensor.zero_()
        dist.barrier()
        keep = transfuse.keep(lambda: state, run=f"turn{turn}", same_host=False)
        dist.barrier()
        sent = traffic().received
        started = time.perf_counter()
        assert keep.restore() == 1
        seconds = time.perf_counter() - started
        assert all(torch.equal(state[name], before[name]) for name in state), "wrong bytes"
        if rank == 1:
            say({"seconds": seconds, "received": traffic().received - sent})
        dist.barrier()
        keep.close()


def measure_neighbour(mib: int, runs: int, mbit: float) -> dict[str, Any]:
    with (
        tempfile.TemporaryDirectory(prefix="tfk") as directory,
        Hosts(2, mbit=mbit) as hosts,
        hosts.workers([0, 1], from_a_neighbour, mib, runs, directory) as said,
    ):
        found = [one for _, one in said]
    seconds = statistics.median(one["seconds"] for one in found)
    wire = mib * MIB * 8 / (mbit * 1e6)
    return {"mib": mib, "mbit": mbit, "runs": found, "median": seconds, "multiple_of_the_wire_time": seconds / wire}


def main(argv: Sequence[str] | None = None) -> int:
    argv = sys.argv[1:] if argv is None else argv
    parser = argparse.ArgumentParser(prog="benchmarks.keeper", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--mib", type=int, default=1024, help="size of the state of each rank (default 1,024)")
    parser.add_argument("--ranks", type=int, default=1, help="ranks on this host (default 1)")
    parser.add_argument("--runs", type=int, default=5, help="turns that count (default 5)")
    parser.add_argument("--neighbour", type=int, default=64, help="MiB to restore from another host (default 64)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write everything to this file")
    given = parser.parse_args(argv)
    found: dict[str, list[float]] = {}
    loops: dict[str, dict[str, float]] = {}
    load = os.getloadavg()[0]
    with (
        tempfile.TemporaryDirectory(prefix="tfk") as directory,
        listening(given.ranks, measure, given.ranks, given.mib, given.runs, directory) as said,
    ):
        for _, one in said:
            if "loop" in one:
                loops[one["name"]] = one["loop"]
            else:
                found.setdefault(one["name"], []).append(one["seconds"])
    medians = {name: statistics.median(seconds) for name, seconds in found.items()}
    for name, seconds in medians.items():
        base = "bare copy back" if name.startswith(("restore", "torch.load", "bare copy back")) else "bare copy out"
        print(f"{name:40} {1000 * seconds:8.0f} ms   {medians[base] / seconds:.2f} of the {base}", flush=True)
    for busy, loop in loops.items():
        lost = loop["with"] / loop["without"] - 1
        print(f"{busy}: {1000 * loop['without']:.0f} ms; with commit(wait=False) {100 * lost:+.1f} %", flush=True)
    neighbour: dict[str, Any] = {}
    if given.neighbour:
        try:
            neighbour = measure_neighbour(given.neighbour, 3, 400.0)
            print(
                f"restore of {given.neighbour} MiB from a neighbour over 400 Mbit/s: {neighbour['median']:.2f} s, "
                f"{neighbour['multiple_of_the_wire_time']:.2f} of the wire time"
            )
        except Unavailable as error:
            print(f"no several hosts here: {error}")
    if given.json is not None:
        written = {
            **machine.about("benchmarks.keeper", argv, load),
            "medians": medians,
            "seconds": found,
            "steps": loops,
            "neighbour": neighbour,
        }
        given.json.write_text(json.dumps(written, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
