"""Steps on storage: written beside dd, and read from the page cache beside torch.load and DCP.

python -m benchmarks.storage [--mib N] [--runs N] [--directory DIR] [--json FILE]

All ways take turns, in one directory. Each writes the same bytes out of main memory and flushes them to the disk: dd
with blocks of 8 MiB and conv=fsync, this process as a keeper does it, and a keeper, which also writes the record and
removes the step before. Each reads into tensors that are there: torch.load with mmap=True and a copy_ for each tensor,
keep.restore() of a run whose keeper is new and holds nothing. What is read has just been read, so it is in the page
cache. Medians. A keeper's CPU is not in the column.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from itertools import count
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

import transfuse
from benchmarks.compare import machine
from transfuse._keeper import frames
from transfuse._keeper.attach import SOCKET_NAME
from transfuse._keeper.bundles import bundle
from transfuse._keeper.commits import Snapshot
from transfuse._keeper.frames import KeeperLink
from transfuse._keeper.runs import find_run
from transfuse._keeper.save_once import save_once
from transfuse._keeper.slot_file import Brief, Label, SlotFile
from transfuse._keeper.slot_policy import place, slot_bytes
from transfuse._keeper.storage import Storage
from transfuse._limits import Limits
from transfuse._memory.blocks import digests_at
from transfuse._state.manifest import describe
from transfuse.dcp import DirectoryReader

MIB = 1 << 20
#: A part of the state is in tensors of this size, the rest in a few large ones.
SMALL_BYTES, SMALL_COUNT, LARGE_COUNT = 16 << 10, 512, 8
BLOCK = "8M"
SECONDS, POLL_SECONDS = 120.0, 0.01
RUN = "benchmarks.storage"

#: A way may return its own seconds, if not all that it does counts.
Work = Callable[[], object]


def state_of(nbytes: int) -> dict[str, Any]:
    large = (nbytes - SMALL_COUNT * SMALL_BYTES) // LARGE_COUNT // 4
    sizes = [large] * LARGE_COUNT + [SMALL_BYTES // 4] * SMALL_COUNT
    return {f"{number}": torch.rand(size) for number, size in enumerate(sizes)}


def committed(state: Mapping[str, Any], label: Label) -> tuple[SlotFile, Brief]:
    """A slot that holds the state, as a worker leaves it."""
    taken = Snapshot(describe(state, Limits()), None)
    bundles, storages = bundle(taken.described.manifest, None, lambda path: False)
    text = taken.text(storages)
    layout = place(0, bundles, len(text), np.zeros(len(bundles), dtype=np.int64))
    slot = SlotFile(slot_bytes(layout, len(text)))
    slot.bytes[:] = 7
    brief = Brief(0, 1, layout.hashed(digests_at(slot.address + layout.places, layout.nbytes)))
    slot.commit(label, msgspec.msgpack.encode(brief), text)
    return slot, brief


def turns(ways: Mapping[str, Work], runs: int, after: Work = lambda: None) -> dict[str, dict[str, float]]:
    """Seconds, and those of CPU, of each way; the first turn does not count."""
    took: dict[str, list[tuple[float, float]]] = {name: [] for name in ways}
    for _ in range(runs + 1):
        for name, work in ways.items():
            started, before = time.perf_counter(), os.times()
            told = work()
            seconds, now = time.perf_counter() - started, os.times()
            seconds = told if isinstance(told, float) else seconds
            took[name].append((seconds, sum(now[:4]) - sum(before[:4])))
            after()
    medians = {
        name: [statistics.median(column) for column in zip(*rows[1:], strict=True)] for name, rows in took.items()
    }
    return {name: {"seconds": seconds, "cpu_seconds": cpu} for name, (seconds, cpu) in medians.items()}


def writing(directory: Path, nbytes: int, runs: int) -> tuple[int, dict[str, dict[str, float]]]:
    storage, label = Storage.at(directory), Label(1, 1)
    slot, brief = committed(state_of(nbytes), label)
    bare = Brief(0, 1, brief.bundles.hashed([]))
    owners = brief.bundles.owners
    source, target = f"/proc/{os.getpid()}/fd/{slot.fd}", directory / "dd"

    def copy() -> None:
        command = ["dd", f"if={source}", f"of={target}", f"bs={BLOCK}", "conv=fsync", "status=none"]
        subprocess.run(command, check=True)

    def clean() -> None:
        target.unlink(missing_ok=True)
        storage.remove(label)

    (saved := directory / "saved").mkdir()
    steps = count(1)
    state = state_of(nbytes)
    with transfuse.keep(state, directory=saved, save_every=1, keep_saved=1, run=RUN) as keep:

        def save() -> float:
            step = next(steps)
            keep.commit(step)
            while (told := status(RUN)["storage"])["last"].get("step") != step:
                if told["trouble"]:
                    raise SystemExit(told["trouble"])
                time.sleep(POLL_SECONDS)
            return float(told["last"]["seconds"])

        save()  # The first one of a directory waits a moment, whether somebody else writes there.
        ways: dict[str, Work] = {
            "transfuse": lambda: storage.write_rank(label, slot, brief, owners, lambda nbytes: None),
            "transfuse, hashed": lambda: storage.write_rank(label, slot, bare, owners, lambda nbytes: None),
            "a keeper's save": save,
            "dd": copy,
        }
        try:
            return slot.nbytes, turns(ways, runs, clean)
        finally:
            slot.close()


def status(run: str) -> dict[str, Any]:
    """What a run's keeper on this host says of itself."""
    link = KeeperLink.to(str(find_run(run).directory / SOCKET_NAME), SECONDS)
    try:
        told: dict[str, Any] = json.loads(link.ask(frames.Status(), frames.StatusReply, SECONDS).text)
        return told
    finally:
        link.close()


def reading(directory: Path, nbytes: int, runs: int) -> tuple[int, dict[str, dict[str, float]]]:
    state, target = state_of(nbytes), state_of(nbytes)
    file, checkpoint = directory / "state.pt", directory / "dcp"
    save_once(state, Storage.at(directory), Label(1, 1))
    torch.save(state, file)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp_save(state, storage_writer=FileSystemWriter(checkpoint), no_dist=True)

    def by_torch() -> None:
        found = torch.load(file, mmap=True, weights_only=True)
        for name, tensor in target.items():
            tensor.copy_(found[name])

    def by_dcp(**how: Any) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            dcp_load(target, no_dist=True, **how)

    numbers = count()

    def restore() -> float:
        with transfuse.keep(target, directory=directory, run=f"{RUN}-{next(numbers)}") as keep:
            began = time.perf_counter()
            step = keep.restore()
            seconds = time.perf_counter() - began
        if step != 1:
            raise AssertionError(f"step {step} was restored")
        return seconds

    ways: dict[str, Work] = {
        "keep.restore()": restore,
        "transfuse.fetch": lambda: transfuse.fetch(f"file://{directory}", target),
        "torch.load(mmap=True)": by_torch,
        "dcp.load": lambda: by_dcp(checkpoint_id=checkpoint),
        "dcp.load, DirectoryReader": lambda: by_dcp(storage_reader=DirectoryReader(directory)),
    }
    for name, work in ways.items():
        for tensor in target.values():
            tensor.zero_()
        work()
        if not all(torch.equal(state[key], target[key]) for key in state):
            raise AssertionError(f"{name}: wrong bytes")
    return sum(tensor.nbytes for tensor in state.values()), turns(ways, runs)


def main(argv: Sequence[str] | None = None) -> int:
    argv = sys.argv[1:] if argv is None else argv
    parser = argparse.ArgumentParser(prog="benchmarks.storage", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--mib", type=int, default=1024, help="the size of the state (default 1024)")
    parser.add_argument("--runs", type=int, default=7, help="turns that count (default 7)")
    parser.add_argument("--directory", type=Path, metavar="DIR", help="on the disk to measure (default: build/)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write everything to this file")
    given = parser.parse_args(argv)
    base = given.directory or Path("build")
    base.mkdir(exist_ok=True)
    found: list[dict[str, Any]] = []
    keepers = tempfile.mkdtemp(prefix="keep", dir="/tmp")  # A socket's path is short.
    os.environ["TRANSFUSE_KEEPER_DIR"] = keepers
    for what, measure, beside in (("write", writing, "dd"), ("read", reading, "torch.load(mmap=True)")):
        directory = Path(tempfile.mkdtemp(prefix="storage-", dir=base))
        try:
            nbytes, medians = measure(directory.absolute(), given.mib * MIB, given.runs)
        finally:
            shutil.rmtree(directory)
        for name, took in medians.items():
            rate, ratio = nbytes / took["seconds"], medians[beside]["seconds"] / took["seconds"]
            found.append({"what": what, "way": name, "bytes_per_second": rate, f"of {beside}": ratio, **took})
            print(
                f"{what:5}  {name:25}  {took['seconds']:6.3f} s  {took['cpu_seconds']:6.3f} s of CPU  "
                f"{rate / 1e9:5.2f} GB/s  {ratio:5.2f} of {beside}"
            )
    shutil.rmtree(keepers, ignore_errors=True)
    if given.json is not None:
        about = machine.about("benchmarks.storage", argv)
        written = {**about, "mib": given.mib, "runs": given.runs, "medians": found}
        given.json.write_text(json.dumps(written, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    logging.getLogger("transfuse").setLevel(logging.ERROR)  # Each restore says from where it came.
    sys.exit(main())
