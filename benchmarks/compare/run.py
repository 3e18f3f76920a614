"""Runs cases in worker processes, with the peers in turns. A peer that fails or hangs is left out; the rest goes on."""

from __future__ import annotations

import faulthandler
import gc
import os
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import NamedTuple, TextIO

import torch
import torch.distributed as dist

from benchmarks.compare.cases import Case
from benchmarks.compare.checks import Digests, differences, digests
from benchmarks.compare.machine import cpu_seconds
from benchmarks.compare.peers import Peer, Scene, tensors_of
from benchmarks.compare.readv import cpus
from benchmarks.compare.results import Move, Outcome, Result
from transfuse.testing.ranks import RanksFailed, listening, say

__all__ = ["measure"]

LOG = "workers.log"
#: How a worker ends that misses its deadline: by the C library's exit, which works even if a call holds Python's lock.
OVERDUE = "died: exit code 1"

#: A case, and how many runs of each peer it still needs.
Todo = tuple[Case, dict[type[Peer], int]]


# -------------------------------------------------------------------------------------------------------- in the parent


@dataclass(frozen=True)
class Begun:
    """Sent before each step, so that the parent knows which peer failed."""

    case: str
    peer: str


def measure(
    chosen: Sequence[tuple[Case, Sequence[type[Peer]]]],
    runs: int,
    timeout: float,
    folder: Path,
    show: Callable[[Begun | Move], None],
) -> list[Outcome]:
    """Run each case with its peers. ``timeout`` limits each step of a peer."""
    results = {(case.key, peer.key): Result(peer) for case, peers in chosen for peer in peers}

    def todo(some: Sequence[tuple[Case, Sequence[type[Peer]]]]) -> list[Todo]:
        left = []
        for case, peers in some:
            of = {peer: results[case.key, peer.key] for peer in peers}
            needed = {peer: runs - len(r.seconds) for peer, r in of.items() if not r.failed and len(r.seconds) < runs}
            left += [(case, needed)] if needed else []
        return left

    for receivers, group in groupby(chosen, lambda pair: pair[0].receivers):
        some = list(group)
        while left := todo(some):
            begun: Begun | None = None
            try:
                with listening(receivers + 1, work, folder, left, timeout) as words:
                    for _, said in words:
                        show(said)
                        if isinstance(said, Begun):
                            begun = said
                        else:
                            results[said.case, said.peer].add(said)
            except RanksFailed as error:
                if begun is None:
                    raise
                blamed = results[begun.case, begun.peer]
                if len(blamed.seconds) < runs:
                    blamed.failed = _reason(error.causes, timeout, folder / LOG)
    return [Outcome(case, *case.size(), [results[case.key, peer.key] for peer in peers]) for case, peers in chosen]


def _reason(causes: dict[int, str], timeout: float, log: Path) -> str:
    """The cause in one line. A rank that only lost its connection to another rank is not the cause."""
    told = [cause for _, cause in sorted(causes.items())]
    first = next((cause for cause in told if "onnection" not in cause), told[0])
    if first == OVERDUE:
        return f"not done within {timeout:g} s"
    if first.startswith("died") and (words := log.read_text(errors="replace").split("\n")):
        first += f" ({next((line.strip() for line in reversed(words) if line.strip()), 'without a word')})"
    return " ".join(first.removeprefix("failed: ").split())[:200]


# ------------------------------------------------------------------------------------------------------- in the workers


def work(rank: int, folder: Path, todo: list[Todo], timeout: float) -> None:
    """The main function of one rank. Rank 0 reports to the parent."""
    torch.set_num_threads(cpus())
    warnings.simplefilter("ignore")
    with (folder / LOG).open("w") as log:
        # Peers print a lot, some of them from C code.
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
        for case, needed in todo:
            for said in contest(case, needed, folder, timeout, log):
                if rank == 0:
                    say(said)


def contest(
    case: Case, needed: dict[type[Peer], int], folder: Path, timeout: float, log: TextIO
) -> Iterator[Begun | Move]:
    """One case: a warm-up and then the runs, in turns; every turn begins with another peer."""
    rank = dist.get_rank()
    state = case.state()
    # A receiver makes the state itself, so that it compares with a state that has not travelled. The memory of that
    # state, touched and warm, is then the target.
    expected, unique = (digests(state), set(tensors_of(state))) if rank else ({}, set())
    kept = state if rank == 0 or case.mode == "in place" else None
    del state
    # Freeze what exists now: collecting garbage before each peer's move would otherwise cost more than the move.
    gc.collect()
    gc.freeze()
    scene = Scene(case.mode, rank, tuple(range(1, case.receivers + 1)), kept, tensors_of(kept), folder)
    peers = [kind(scene) for kind in needed]
    for turn in range(max(needed.values()) + 1):
        for at in range(len(peers)):
            peer = peers[(turn + at) % len(peers)]
            if turn > needed[type(peer)]:
                continue
            yield Begun(case.key, peer.key)
            with bounded(timeout, log):
                if turn == 0:
                    peer.prepare()
                took, got = move(peer)
                yield judged(case, peer, turn == 0, took, got, expected, unique)
                del got
    for peer in peers:
        yield Begun(case.key, peer.key)
        with bounded(timeout, log):
            peer.close()
    gc.unfreeze()


class Took(NamedTuple):
    seconds: float
    cpu_seconds: float


def move(peer: Peer) -> tuple[Took, object]:
    """One move, under the same conditions for every peer: no garbage, and zeros in the target."""
    scene = peer.scene
    if not scene.sending and scene.state is not None:
        torch._foreach_zero_(list(scene.tensors.values()))
    gc.collect()
    peer.ready()
    dist.barrier()
    got, used, started = None, cpu_seconds(), time.perf_counter()
    if scene.sending:
        peer.send()
    else:
        got = peer.receive()
    seconds = torch.tensor(time.perf_counter() - started, dtype=torch.float64)
    used_here = torch.tensor(cpu_seconds() - used, dtype=torch.float64)
    dist.all_reduce(seconds, dist.ReduceOp.MAX)
    dist.all_reduce(used_here, dist.ReduceOp.SUM)
    return Took(seconds.item(), used_here.item()), got


def judged(case: Case, peer: Peer, warm_up: bool, took: Took, got: object, expected: Digests, unique: set[str]) -> Move:
    """Every receiver compares; rank 0 collects what they found."""
    wrong: list[str] = []
    if not peer.scene.sending:
        found = differences(expected, unique, peer.arrived(got), peer.whole, peer.scene.state)
        wrong = [f"rank {peer.scene.rank}: {line}" for line in found]
    all_wrong: list[list[str]] = [[] for _ in range(dist.get_world_size())]
    dist.all_gather_object(all_wrong, wrong)
    peer.tidy()
    return Move(case.key, peer.key, warm_up, *took, [line for some in all_wrong for line in some], peer.route())


@contextmanager
def bounded(seconds: float, log: TextIO) -> Iterator[None]:
    """End this process if the block is not done in time. A call that hangs in C would hold up everything else."""
    faulthandler.dump_traceback_later(seconds, exit=True, file=log)
    try:
        yield
    finally:
        faulthandler.cancel_dump_traceback_later()
