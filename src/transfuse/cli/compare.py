"""The same state moved by transfuse and by PyTorch's own transport: timed, and checked bit for bit every time."""

from __future__ import annotations

import re
import statistics
import time
import warnings
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint import _pg_transport
from torch.utils._pytree import tree_leaves

import transfuse
from transfuse.cli.workers import TIMEOUT
from transfuse.progress import Show
from transfuse.testing.exact import differences

__all__ = ["NAMES", "Move", "Result", "race", "summarize"]

OURS, OVER_THE_GROUP, TORCH = NAMES = ("transfuse", "transfuse, same_host=False", "torch PGTransport")

SOURCE, RECEIVER = 0, 1


@dataclass(frozen=True)
class Move:
    """One move, as the receiver saw it."""

    name: str
    #: The first move of each kind does not count: it meets cold memory and connections.
    warm_up: bool
    #: From a barrier until both ends have returned.
    seconds: float
    #: All that the receiver asked the group for, descriptions and records included, and what it read from memory.
    #: Counted in the warm-up only.
    wire_bytes: int
    #: What was not as it should be, one line each.
    wrong: list[str]
    report: transfuse.Report | None


@dataclass
class Result:
    """All moves of one kind."""

    name: str
    wire_bytes: int = 0
    #: Of the moves that count.
    seconds: list[float] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)

    @property
    def verified(self) -> bool:
        return not self.wrong

    def to_dict(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "wire_bytes": self.wire_bytes,
            "median_seconds": self.median,
            "seconds": self.seconds,
            "verified": self.verified,
        }


def summarize(moves: Iterable[Move]) -> dict[str, Result]:
    """The moves by name."""
    results: dict[str, Result] = {}
    for move in moves:
        result = results.setdefault(move.name, Result(move.name))
        result.wrong += move.wrong
        if move.warm_up:
            result.wire_bytes = move.wire_bytes
        else:
            result.seconds.append(move.seconds)
    return results


def race(state: object, target: object, runs: int, show: Show | None = None) -> Iterator[Move]:
    """One warm-up and ``runs`` moves of each kind, in turns. Both ranks of the default group call and exhaust it.

    At the source, ``state`` is what is sent and ``target`` is not used. At the receiver, ``target`` is zeroed before
    every move, and ``state``, a copy of its own, is what must be there afterwards. ``show`` sees the first move.
    """
    for turn in range(runs + 1):
        for name in NAMES:
            yield _move(name, state, target, turn == 0, show if turn == 0 and name == OURS else None)


def _move(name: str, state: object, target: object, warm_up: bool, show: Show | None) -> Move:
    group = dist.group.WORLD
    assert group is not None
    counted = _Counted(group)
    receiving = dist.get_rank() == RECEIVER
    transport = _transport(name, counted if warm_up else group, target, show)
    if receiving:
        for leaf in tree_leaves(target):
            if isinstance(leaf, torch.Tensor):
                leaf.zero_()
    got: object = None
    with warnings.catch_warnings():
        # PyTorch's transport warns of its own ways.
        warnings.filterwarnings("ignore", module=re.escape(_pg_transport.__name__))
        dist.barrier()
        started = time.perf_counter()
        if receiving:
            got = transport.recv_checkpoint(SOURCE)
        else:
            transport.send_checkpoint([RECEIVER], state)
    seconds = torch.tensor(time.perf_counter() - started, dtype=torch.float64)
    dist.all_reduce(seconds, dist.ReduceOp.MAX)
    wrong = [f"{name}: {line}" for line in _wrong(state, got, target)] if receiving else []
    report = getattr(transport, "report", None)
    read = report.bytes if receiving and report is not None and report.route == "memory" else 0
    return Move(name, warm_up, seconds.item(), counted.bytes + read, wrong, report)


def _transport(name: str, group: Any, target: object, show: Show | None) -> Any:
    device = torch.device("cpu")
    if name == TORCH:
        return _pg_transport.PGTransport(group, TIMEOUT, device, lambda: target)
    return transfuse.PGTransport(
        group, TIMEOUT, device, lambda: target, same_host=name != OVER_THE_GROUP, progress=show or False
    )


def _wrong(expected: object, got: object, target: object) -> list[str]:
    """Every way in which ``got`` is not ``expected``, bit for bit, or does not lie in ``target``'s own memory."""
    lines = differences(expected, got, in_place=True)
    owned = {(t.data_ptr(), t.nbytes) for t in tree_leaves(target) if isinstance(t, torch.Tensor)}
    arrived = {(t.data_ptr(), t.nbytes) for t in tree_leaves(got) if isinstance(t, torch.Tensor)}
    if owned != arrived:
        lines.append(f"{len(owned ^ arrived)} tensors did not land in the target's own memory")
    return lines


class _Counted:
    """A process group that counts what is received through it."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self.bytes = 0

    def recv(self, tensors: list[torch.Tensor], rank: int, tag: int) -> Any:
        self.bytes += sum(tensor.nbytes for tensor in tensors)
        return self._group.recv(tensors, rank, tag)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._group, name)
