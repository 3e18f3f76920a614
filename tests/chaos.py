"""Chaos: transfers between real processes, each disturbed in one way, all of it derived from one number.

``Scenario.draw(seed)`` draws a state, sources and receivers, options, and a fault with the point at which it strikes.
:class:`Yard` runs scenarios in processes of its own and says in complaints whatever is not as it must be:

- a receiver that returns holds exactly the source's state; one that raises tells the truth about what it touched, what
  it has and what it lacks; what was not to be touched was not;
- a source says of each receiver what became of it, and calls complete only those that are;
- with another healthy source left, or with a fault that costs nobody anything, nothing fails;
- everything ends in time; no process, thread or file is left behind; nothing lands after a call has returned.

``python -m chaos --seed N`` in this folder replays one, ``--count K`` goes on with the next ones.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import dataclasses
import faulthandler
import math
import os
import pathlib
import random
import signal
import struct
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import Any, Literal, Self

import numpy as np
import torch
import torch.distributed as dist

import transfuse
from transfuse.session import receiver as receiver_module
from transfuse.session.relay import this_host
from transfuse.testing.exact import differences
from transfuse.testing.ranks import Died, Fleet, Outcome, announce
from transfuse.wire import hub
from transfuse.wire.messages import MAGIC

__all__ = ["Fault", "Make", "Receiving", "Result", "Scenario", "Wire", "Yard", "build"]

KIB, MIB = 1 << 10, 1 << 20
HEADER = struct.Struct("<4sHHQQQQQ")

#: What a call may take longer than its timeout, on a machine with other work to do.
SLACK = 4.0

#: The kinds of thing that are sent, as a wire sees them.
Kind = Literal["parcel", "digests", "header", "length", "body", "mark"]
FaultKind = Literal["none", "kill", "freeze", "corrupt", "delay", "mutate", "raise"]
#: Faults by how often they are drawn.
ANY_FAULT: Sequence[FaultKind] = (
    *("none", "kill", "kill", "kill", "freeze", "freeze", "corrupt", "corrupt", "delay", "mutate", "raise"),
)
#: When a fault strikes: before the call; when the victim has posted so many operations; when this part of the payload
#: has gone through its wire; so many milliseconds after its first operation; when the first receiver's progress shows
#: this part; when the call has returned.
When = Literal["start", "ops", "bytes", "ms", "progress", "end"]
Mode = Literal["fresh", "same", "apart"]
Thaw = Literal["soon", "late", "never"]
Plant = Literal["", "byte", "stray", "late", "thread", "file", "torn", "received", "missing", "completed", "slow"]


# ------------------------------------------------------------------------------------------------------- scenarios


@dataclasses.dataclass(frozen=True)
class Make:
    """What a state is made from."""

    seed: int
    nbytes: int
    leaves: int


@dataclasses.dataclass(frozen=True)
class Fault:
    kind: FaultKind = "none"
    victim: int = 0
    when: When = "ops"
    at: float = 0.0
    #: Of a freeze: soon after, once all others have ended, or never; and how soon.
    thaw: Thaw = "never"
    thaw_seconds: float = 0.0
    #: Of a corruption: which kind of send, how many of them, and how many bits in each.
    what: Kind = "parcel"
    count: int = 1
    bits: int = 1
    seed: int = 0


@dataclasses.dataclass(frozen=True)
class Receiving:
    """How one receiver receives: fresh, into tensors that lie as the source's do, or into tensors that lie apart."""

    mode: Mode = "fresh"
    atomic: bool = False


@dataclasses.dataclass(frozen=True)
class Scenario:
    """Ranks 0 … sources - 1 send, the others receive."""

    seed: int
    make: Make
    sources: int
    receivers: tuple[Receiving, ...]
    verify: bool | None
    memory: bool
    #: Each receiver says that it is on a host of its own, so that they may pass parcels on.
    hosts: bool
    parcel_bytes: int
    burst_bytes: int
    #: Seconds that the payload is to take, or None for as fast as it goes.
    paced: float | None
    timeout: float
    fault: Fault
    #: Whether receivers that fail try again, and go on from where they were.
    resume: bool = False
    #: A wrong thing for the judge to find, so that it is known to look.
    plant: Plant = ""

    @property
    def size(self) -> int:
        return self.sources + len(self.receivers)

    @property
    def patience(self) -> float:
        """What it may take at most when nothing happens, on a machine with little time for it."""
        parcels = 0 if self.memory else self.make.nbytes // self.parcel_bytes * len(self.receivers)
        return (self.paced or 0.0) * self.sources + self.fault.thaw_seconds + 0.003 * parcels

    @property
    def victim_is_source(self) -> bool:
        return self.fault.victim < self.sources

    def lines(self) -> str:
        """Everything about it, for somebody who reads."""
        shown = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return "\n".join(f"  {name}: {value}" for name, value in shown.items())

    @classmethod
    def draw(cls, seed: int, kinds: Sequence[FaultKind] | None = None) -> Scenario:
        rng = random.Random(f"chaos {seed}")
        sources = rng.choice([1, 1, 2, 2, 3])
        nbytes = int(math.exp(rng.uniform(math.log(64), math.log(32 * MIB))))
        if rng.random() < 0.4:
            nbytes = rng.randrange(1 * MIB, 16 * MIB)
        receivers = tuple(
            Receiving(rng.choice(["fresh", "same", "apart"]), rng.random() < 0.3)
            for _ in range(rng.choice([1, 1, 2, 3, 4]))
        )
        memory = rng.random() < 0.4
        parcel = rng.choice([16, 32, 64, 256]) * KIB
        least = max(nbytes // 64, parcel)
        kind = rng.choice(kinds or ANY_FAULT)
        verify = rng.choice([None, None, True, False])
        fault = cls._draw_fault(rng, kind, sources, len(receivers), memory)
        if kind == "corrupt" and fault.what in ("parcel", "digests"):
            # Over the group, and watched: what nobody checks, nobody finds.
            verify, memory = verify or None, False
        return cls(
            seed,
            Make(rng.randrange(1 << 30), nbytes, rng.randrange(1, 41)),
            sources,
            receivers,
            verify,
            memory,
            rng.random() < 0.4,
            parcel,
            least * rng.choice([1, 2, 4]),
            rng.choice([None, None, 0.2, 0.5]),
            rng.choice([2.0, 3.0]),
            fault,
            rng.random() < 0.5,
        )

    @staticmethod
    def _draw_fault(rng: random.Random, kind: FaultKind, sources: int, receivers: int, memory: bool) -> Fault:
        victim = rng.randrange(sources) if rng.random() < 0.6 else sources + rng.randrange(receivers)
        if kind == "mutate":
            victim = rng.randrange(sources)
        points: list[When] = ["ops", "ops", "bytes", "bytes", "ms", "progress", "start", "end"]
        if kind in ("mutate", "corrupt", "delay", "raise"):
            points = ["ops", "bytes"] if not memory else ["ops"]
        when = rng.choice(points)
        at = {
            "ops": float(rng.randrange(1, rng.choice([4, 8, 20, 60]))),
            "bytes": rng.random(),
            "ms": math.exp(rng.uniform(math.log(0.3), math.log(300))),
            "progress": rng.random() * 0.95,
        }.get(when, 0.0)
        thaw: Thaw = rng.choice(["soon", "late", "never"])
        what: Kind = rng.choice(["parcel", "parcel", "digests", "header", "length", "body", "mark"])
        if what in ("parcel", "digests") and kind == "corrupt" and victim >= sources and rng.random() < 0.7:
            what = rng.choice(["header", "length", "body"])
        return Fault(
            kind,
            victim,
            when,
            at,
            thaw,
            rng.uniform(0.05, 0.5),
            what,
            rng.choice([1, 1, 1, 2, 1000]),
            rng.choice([1, 1, 2, 5]),
            rng.randrange(1 << 30),
        )


def undisturbed(plan: Scenario) -> Scenario:
    return dataclasses.replace(plan, fault=Fault())


def kill_a_source(seed: int) -> Scenario:
    """One of two sources is killed at any point: even seeds over the group, odd ones on the memory route."""
    rng = random.Random(f"kill a source {seed}")
    memory = bool(seed % 2)
    return _of_two(rng, seed, memory, Fault("kill", rng.randrange(2), *_any_point(rng, memory)))


def freeze_a_source(seed: int) -> Scenario:
    """One of two sources is frozen at any point, and wakes when it is too late."""
    rng = random.Random(f"freeze a source {seed}")
    memory = bool(seed % 2)
    fault = Fault("freeze", rng.randrange(2), *_any_point(rng, memory), thaw="late")
    return _of_two(rng, seed, memory, fault)


def _of_two(rng: random.Random, seed: int, memory: bool, fault: Fault) -> Scenario:
    how = Receiving(rng.choice(["fresh", "same", "apart"]), rng.random() < 0.3)
    make = Make(rng.randrange(1 << 30), 16 * MIB, 30)
    paced = 0.3 if memory and seed % 4 == 3 else None
    return Scenario(
        seed, make, 2, (how,), rng.choice([None, True, False]), memory, False, 64 * KIB, 256 * KIB, paced, 3.0, fault
    )


def _any_point(rng: random.Random, memory: bool) -> tuple[When, float]:
    """A point at which a transfer that is begun is not yet over, nearly always."""
    match rng.choice(["ops", "progress", "ms"] if memory else ["ops", "ops", "bytes", "bytes", "progress"]):
        case "ops":
            return "ops", float(rng.randrange(1, 5 if memory else 40))
        case "bytes":
            return "bytes", rng.uniform(0, 0.7)
        case "progress":
            return "progress", rng.uniform(0, 0.9)
        case _:
            return "ms", rng.uniform(0.1, 30)


def kill_a_receiver(seed: int) -> Scenario:
    """One of four receivers is killed at any point."""
    rng = random.Random(f"kill a receiver {seed}")
    memory, sources = bool(seed % 2), rng.choice([1, 1, 2])
    when: When = rng.choice(["ops", "ops", "ms"] if memory else ["ops", "ops", "bytes", "bytes", "ms"])
    at = {"ops": float(rng.randrange(1, 6 if memory else 40)), "bytes": rng.random(), "ms": rng.uniform(0.1, 100)}[when]
    receivers = tuple(Receiving(rng.choice(["fresh", "same", "apart"]), rng.random() < 0.3) for _ in range(4))
    return Scenario(
        seed,
        Make(rng.randrange(1 << 30), 4 * MIB, 20),
        sources,
        receivers,
        rng.choice([None, True, False]),
        memory,
        rng.random() < 0.5,
        64 * KIB,
        256 * KIB,
        None,
        3.0,
        Fault("kill", sources + rng.randrange(4), when, at),
    )


def corrupt(seed: int) -> Scenario:
    """Bits are flipped in one thing that is sent, by one of one or two sources or by the receiver."""
    rng = random.Random(f"corrupt {seed}")
    sources = rng.choice([1, 2])
    victim = sources if rng.random() < 0.1 else rng.randrange(sources)
    theirs: list[Kind] = ["header", "length", "body"]
    ours: list[Kind] = ["parcel", "parcel", "parcel", "parcel", "parcel", "digests", "header", "length", "body"]
    what = rng.choice(theirs if victim == sources else ours)
    nbytes = rng.randrange(100 * KIB, 2 * MIB)
    parcels = nbytes // (16 * KIB) // sources
    first = rng.randrange(1, 6) if what in ("header", "length", "body") else rng.randrange(1, max(parcels // 2, 2))
    how = Receiving(rng.choice(["fresh", "same", "apart"]), rng.random() < 0.3)
    bits, lot = rng.choice([1, 1, 2, 8]), rng.randrange(1 << 30)
    fault = Fault("corrupt", victim, "ops", first, what=what, bits=bits, seed=lot)
    return Scenario(
        seed,
        Make(rng.randrange(1 << 30), nbytes, 12),
        sources,
        (how,),
        rng.choice([None, True]),
        False,
        False,
        16 * KIB,
        64 * KIB,
        None,
        1.5,
        fault,
        resume=True,
    )


# ---------------------------------------------------------------------------------------------------------- states

_DTYPES = (
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.float64,
    torch.int64,
    torch.int32,
    torch.uint8,
    torch.int8,
    torch.bool,
    torch.complex64,
    torch.float8_e4m3fn,
)


def build(make: Make) -> dict[str, Any]:
    """The state, the same wherever it is built. Whatever bits there are: NaNs with payloads, negative zeros."""
    rng = np.random.default_rng(make.seed)
    weights = np.exp(rng.normal(0, 1.5, make.leaves))
    sizes = (weights / weights.sum() * make.nbytes).astype(int).tolist()
    leaves: list[Any] = []
    tensors: list[torch.Tensor] = []
    for size in sizes:
        dtype = _DTYPES[rng.integers(len(_DTYPES))]
        tensors.append(_tensor(rng, dtype, size // dtype.itemsize))
        leaves.append(tensors[-1])
    for _ in range(int(rng.integers(0, 4))):
        tied = tensors[rng.integers(len(tensors))]
        if rng.random() < 0.5 or tied.dim() != 1 or tied.requires_grad:
            leaves.append(tied)
        else:
            low, high = sorted(rng.integers(0, tied.numel() + 1, 2).tolist())
            leaves.append(tied[low:high])
    leaves.append(torch.Generator().manual_seed(make.seed).get_state())
    leaves += [int(rng.integers(1 << 40)), float(rng.normal()), None, True, "text ü", rng.bytes(9000), rng.bytes(5)]
    leaves.append(rng.integers(0, 9, (3, 4)))
    order = rng.permutation(len(leaves)).tolist()
    return _arrange(rng, [leaves[i] for i in order])


def _tensor(rng: np.random.Generator, dtype: torch.dtype, count: int) -> torch.Tensor:
    kind = rng.choice(["plain", "plain", "plain", "matrix", "strided", "transposed", "narrow", "parameter", "scalar"])
    if kind == "scalar":
        return _filled(rng, dtype, 1).reshape(())
    if kind == "strided":
        return _filled(rng, dtype, max(2 * count - 1, 0))[::2]
    if kind == "narrow":
        return _filled(rng, dtype, count + 11)[5 : count + 5]
    if kind in ("matrix", "transposed"):
        matrix = _filled(rng, dtype, count // 4 * 4).view(4, count // 4)
        return matrix if kind == "matrix" else matrix.t()
    tensor = _filled(rng, dtype, count)
    if kind == "parameter" and dtype.is_floating_point and dtype.itemsize > 1:
        return torch.nn.Parameter(tensor)
    return tensor


def _filled(rng: np.random.Generator, dtype: torch.dtype, count: int) -> torch.Tensor:
    if not count:
        return torch.empty(0, dtype=dtype)
    data = torch.frombuffer(bytearray(rng.bytes(count * dtype.itemsize)), dtype=torch.uint8)
    if dtype == torch.bool:
        data &= 1
    return data.clone().view(dtype)


def _arrange(rng: np.random.Generator, leaves: list[Any]) -> dict[str, Any]:
    """Put leaves into containers in containers."""
    tree: dict[str, Any] = {}
    at = 0
    while at < len(leaves):
        some = leaves[at : at + int(rng.integers(1, 6))]
        at += len(some)
        name = f"n{at}"
        match int(rng.integers(5)):
            case 0:
                tree[name] = some
            case 1:
                tree[name] = tuple(some)
            case 2:
                tree[name] = collections.OrderedDict((f"k{i}", leaf) for i, leaf in enumerate(some))
            case 3:
                tree[name] = {"inner": [{i: leaf} for i, leaf in enumerate(some)], "empty": {}}
            case _:
                tree.update({f"{name}.{i}": leaf for i, leaf in enumerate(some)})
    return tree


def walk(tree: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Leaves with their paths."""
    if isinstance(tree, dict):
        for key, value in tree.items():
            yield from walk(value, f"{path}[{key!r}]")
    elif isinstance(tree, (list, tuple)):
        for i, value in enumerate(tree):
            yield from walk(value, f"{path}[{i}]")
    else:
        yield path, tree


def tensors_of(tree: Any) -> dict[str, torch.Tensor]:
    return {path: leaf for path, leaf in walk(tree) if isinstance(leaf, torch.Tensor)}


def raw(tensor: torch.Tensor) -> bytes:
    """The bytes of its elements, in their order."""
    return memory_of(tensor.detach().clone(memory_format=torch.contiguous_format)).numpy().tobytes()


def memory_of(tensor: torch.Tensor) -> torch.Tensor:
    """All of the memory that it is in, as bytes."""
    return torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())


def invert(tree: Any) -> None:
    """Change every byte of every tensor, also of those that the memory of a view has besides."""
    done: set[int] = set()
    for tensor in tensors_of(tree).values():
        memory = memory_of(tensor.detach())
        if memory.numel() and memory.data_ptr() not in done:
            done.add(memory.data_ptr())
            memory ^= 1 if tensor.dtype == torch.bool else 0xFF


def apart(tree: Any) -> Any:
    """The same tree with tensors that share no memory and lie in it one after another."""
    if isinstance(tree, dict):
        return type(tree)((key, apart(value)) for key, value in tree.items())
    if isinstance(tree, (list, tuple)):
        return type(tree)(apart(value) for value in tree)
    if isinstance(tree, torch.nn.Parameter):
        return torch.nn.Parameter(tree.detach().clone(memory_format=torch.contiguous_format))
    if isinstance(tree, torch.Tensor):
        return tree.clone(memory_format=torch.contiguous_format)
    return tree


def target_for(make: Make, mode: Mode) -> Any:
    """A target of which every byte differs from the source's."""
    tree = build(make)
    if mode == "apart":
        tree = apart(tree)
    invert(tree)
    return tree


# ------------------------------------------------------------------------------------------------------------ wires


class Boom(Exception):
    """What a progress callback raises."""


class Wire:
    """A process group through which a fault strikes: it sees, delays and damages what goes through."""

    def __init__(self, pg: Any, plan: Scenario, rank: int, strike: Callable[[], None], payload: int) -> None:
        self._pg, self._plan, self._rank, self._strike = pg, plan, rank, strike
        self._payload = max(payload, 1)
        self._lock = threading.Lock()
        self._rng = random.Random(plan.fault.seed)
        self._bodies: collections.Counter[int] = collections.Counter()
        self._slept = 0.0
        self.ops = self.nbytes = self.damaged = 0
        self.struck = False
        self.timer: threading.Timer | None = None
        self.mine = plan.fault.victim == rank

    def name(self) -> str:
        return "gloo"

    def rank(self) -> int:
        return int(self._pg.rank())

    def size(self) -> int:
        return int(self._pg.size())

    def send(self, tensors: list[torch.Tensor], rank: int, tag: int) -> Any:
        (tensor,) = tensors
        fault = self._plan.fault
        if self.mine:
            kind = self._kind(tensor, rank)
            self._see(tensor.numel() if kind == "parcel" and self._plan.victim_is_source else 0)
            if fault.kind == "corrupt" and self.struck and self.damaged < fault.count:
                tensor = self._damage(tensor, kind)
        return self._pg.send([tensor], rank, tag)

    def recv(self, tensors: list[torch.Tensor], rank: int, tag: int) -> Any:
        if self.mine:
            self._see(tensors[0].numel() if not self._plan.victim_is_source and tensors[0].numel() > 4096 else 0)
        return self._pg.recv(tensors, rank, tag)

    def _see(self, nbytes: int) -> None:
        fault = self._plan.fault
        with self._lock:
            self.ops += 1
            self.nbytes += nbytes
            due = (fault.when == "ops" and self.ops >= fault.at) or (
                fault.when == "bytes" and self.nbytes >= fault.at * self._payload and self.nbytes > 0
            )
            starts = self.ops == 1 and fault.when == "ms"
            strikes = due and not self.struck
            self.struck |= due
            pause = 0.0
            if fault.kind == "delay" and due and self._slept < 0.5 and self._rng.random() < 0.2:
                pause = self._rng.uniform(0.001, 0.05)
                self._slept += pause
        if starts:
            self.timer = threading.Timer(fault.at / 1000, self._strike)
            self.timer.daemon = True
            self.timer.start()
        if strikes:
            self._strike()
        if pause:
            time.sleep(pause)

    def _kind(self, tensor: torch.Tensor, rank: int) -> Kind:
        head = bytes(tensor[: HEADER.size].numpy()) if tensor.numel() >= HEADER.size else b""
        with self._lock:
            if head.startswith(MAGIC) and tensor.numel() > HEADER.size:
                return "digests"
            if head.startswith(MAGIC):
                self._bodies[rank] += HEADER.unpack(head)[5]
                return "header"
            if tensor.numel() == 1:
                return "mark"
            if self._bodies[rank] > 0:
                self._bodies[rank] -= tensor.numel()
                return "body"
            return "parcel"

    def _damage(self, tensor: torch.Tensor, kind: Kind) -> torch.Tensor:
        """Flip bits, if this is what is to be damaged: anywhere in a header, or in the length that it announces."""
        what = self._plan.fault.what
        low, high = 0, tensor.numel()
        if what == "length" and kind == "header":
            low, high = 24, 32
        elif what == "digests" and kind == "digests":
            low = HEADER.size
        elif what != kind:
            return tensor
        with self._lock:
            if self.damaged >= self._plan.fault.count or high <= low:
                return tensor
            self.damaged += 1
            tensor = tensor.clone()
            places = self._rng.sample(range(8 * low, 8 * high), min(self._plan.fault.bits, 8 * (high - low)))
        for place in places:
            tensor[place // 8] ^= 1 << place % 8
        return tensor


# --------------------------------------------------------------------------------------------- what a worker does


class _Held:
    """What a worker keeps between its tasks."""

    def __init__(self) -> None:
        self.files = 0
        self.state: Any = None
        self.target: Any = None
        self.result: Any = None
        self.partial: Any = None
        self.kept: dict[str, bytes] = {}
        self.planted: Any = None


_held = _Held()


def _files() -> int:
    return len(os.listdir("/proc/self/fd"))


def _threads() -> list[str]:
    return sorted(thread.name for thread in threading.enumerate() if thread.name.startswith("transfuse"))


def prepare(rank: int, plan: Scenario) -> int:
    """Build what this rank has; how many bytes its tensors have."""
    global _held
    faulthandler.enable()
    _held = _Held()
    _held.state = build(plan.make)
    if rank >= plan.sources:
        mode = plan.receivers[rank - plan.sources].mode
        _held.target = None if mode == "fresh" else target_for(plan.make, mode)
    os.environ.update(
        TRANSFUSE_SAME_HOST="1" if plan.memory else "0",
        TRANSFUSE_PARCEL_BYTES=str(plan.parcel_bytes),
        TRANSFUSE_BURST_BYTES=str(plan.burst_bytes),
        TRANSFUSE_MIN_RELAY_BYTES=str(64 * KIB),
    )
    setattr(receiver_module, "this_host", (lambda: 1000 + rank) if plan.hosts else _this_host)  # noqa: B010
    _held.files = _files()
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors_of(_held.state).values())


_this_host = this_host


@dataclasses.dataclass
class Evidence:
    """What a worker says of its own call."""

    seconds: float = 0.0
    error: BaseException | None = None
    struck: bool = False
    damaged: int = 0
    report: dict[str, Any] = dataclasses.field(default_factory=dict)
    #: A receiver that returned: what differs.
    differences: list[str] = dataclasses.field(default_factory=list)
    #: A receiver that raised: target leaves that are not what they were, and those that are what the source has.
    changed: list[str] = dataclasses.field(default_factory=list)
    whole: list[str] = dataclasses.field(default_factory=list)
    leaves: list[str] = dataclasses.field(default_factory=list)
    targets: list[str] = dataclasses.field(default_factory=list)
    #: Bytes that belong to no leaf and changed all the same.
    strays: int = 0


def act(rank: int, plan: Scenario, pids: list[int], payload: int) -> Evidence:
    """Send or receive, with whatever happens to it."""
    fault, evidence = plan.fault, Evidence()
    sends = rank < plan.sources
    share = payload * (len(plan.receivers) / plan.sources if fault.victim < plan.sources else 1)
    calls = 0

    def strike() -> None:
        evidence.struck = True
        if fault.kind == "kill":
            os.kill(pids[fault.victim], signal.SIGKILL)
        elif fault.kind == "freeze":
            announce("struck")
            os.kill(pids[fault.victim], signal.SIGSTOP)
        elif fault.kind == "mutate":
            _mutate(fault)

    def show(progress: dict[int, transfuse.Progress]) -> None:
        nonlocal calls
        calls += 1
        if fault.kind == "raise" and fault.victim == rank and calls >= fault.at * (10 if fault.when == "bytes" else 1):
            evidence.struck = True
            raise Boom
        if fault.when == "progress" and rank == plan.sources and not evidence.struck:
            done = sum(one.bytes for one in progress.values())
            if done >= fault.at * payload:
                strike()

    watches = (fault.kind == "raise" and fault.victim == rank) or (fault.when == "progress" and rank == plan.sources)
    options: dict[str, Any] = {"verify": plan.verify, "progress": show if watches else False}
    wire = Wire(dist.group.WORLD, plan, rank, strike, int(share))
    if sends:
        if plan.paced is not None:
            options["max_bytes_per_second"] = max(payload / plan.paced, 1.0) * len(plan.receivers) + 1 * MIB
    else:
        options["atomic"] = plan.receivers[rank - plan.sources].atomic
        if _held.target is not None:
            options["state_dict"] = lambda: _held.target
    transport = transfuse.PGTransport(wire, timedelta(seconds=plan.timeout), torch.device("cpu"), **options)
    if fault.when == "start" and wire.mine:
        strike()
    resume, _held.partial = _held.partial, None
    started = time.monotonic()
    try:
        if sends:
            transport.send_checkpoint(list(range(plan.sources, plan.size)), _held.state, step=7)
        else:
            ranks = list(range(plan.sources))
            _held.result = transport.recv_checkpoint(ranks[0] if len(ranks) == 1 else ranks, step=7, resume=resume)
    except Exception as error:
        evidence.error = error
        _held.partial = getattr(error, "partial", None)
    evidence.seconds = time.monotonic() - started
    if wire.timer is not None:
        wire.timer.cancel()
        wire.timer.join()
    if fault.when == "end" and wire.mine:
        strike()
    evidence.struck |= wire.struck
    evidence.damaged = wire.damaged
    evidence.report = transport.report.to_dict() if transport.report is not None else {}
    _plant(plan, evidence, ("byte", "stray", "thread", "file", "torn", "received", "missing", "completed", "slow"))
    if not sends:
        _look(plan, rank, evidence)
    _plant(plan, evidence, ("late",))
    if evidence.error is not None:
        evidence.error.__traceback__ = evidence.error.__context__ = evidence.error.__cause__ = None
    return evidence


def _plant(plan: Scenario, evidence: Evidence, now: Sequence[Plant]) -> None:
    """Make something wrong, if that is what the scenario is for and this is the time for it."""
    mine = tensors_of(_held.result) or tensors_of(_held.target)
    error = evidence.error
    if plan.plant not in now:
        return
    if plan.plant in ("byte", "late") and mine:
        tensor = max(mine.values(), key=lambda tensor: tensor.numel()).detach()
        memory_of(tensor)[tensor.storage_offset() * tensor.element_size()] ^= 1
    elif plan.plant == "stray" and mine:
        tensor = next(tensor for tensor in mine.values() if tensor.storage_offset() == 5)
        memory_of(tensor.detach())[0] ^= 1
    elif plan.plant == "thread":
        threading.Thread(target=time.sleep, args=(1.5,), name="transfuse-planted", daemon=True).start()
    elif plan.plant == "file":
        _held.planted = open("/dev/null")  # noqa: SIM115
    elif plan.plant == "slow":
        evidence.seconds += 100
    elif plan.plant == "completed" and isinstance(error, transfuse.SendFailed):
        error.completed, error.causes = (*error.completed, *error.causes), {}
    elif plan.plant == "torn" and isinstance(error, transfuse.TransfuseError):
        error.torn = ()
    elif plan.plant == "received" and isinstance(error, transfuse.TransfuseError):
        error.received, error.missing = [*error.received, *error.missing], []
    elif plan.plant == "missing" and isinstance(error, transfuse.TransfuseError):
        error.missing = list(error.missing)[1:]


def _mutate(fault: Fault) -> None:
    """Write to the source's tensors, as an optimizer would, or as somebody does of whom torch knows nothing."""
    with torch.no_grad():
        for tensor in tensors_of(_held.state).values():
            memory = memory_of(tensor.detach())
            if not memory.numel():
                continue
            if fault.seed % 2 and tensor.dtype != torch.bool:
                np.frombuffer(memory.numpy(), dtype=np.uint8)[:] ^= 0x55
            else:
                tensor.copy_(tensor.clone().fill_(1))


def _look(plan: Scenario, rank: int, evidence: Evidence) -> None:
    """Compare what this receiver has with what it should have."""
    mode, source = plan.receivers[rank - plan.sources].mode, build(plan.make)
    mine = tensors_of(_held.target) if _held.target is not None else {}
    theirs = tensors_of(source)
    evidence.targets = list(mine)
    evidence.leaves = [path for path, _ in walk(source)]
    if evidence.error is None:
        evidence.differences = differences(source, _held.result, in_place=mode != "fresh")
        got = tensors_of(_held.result)
        for path, tensor in mine.items():
            if got[path].data_ptr() != tensor.data_ptr():
                evidence.differences.append(f"{path}: is not the receiver's own tensor")
    if mine:
        old = target_for(plan.make, mode)
        before = tensors_of(old)
        for path, tensor in mine.items():
            now = raw(tensor)
            if now != raw(before[path]):
                evidence.changed.append(path)
            if now == raw(theirs[path]):
                evidence.whole.append(path)
            elif evidence.error is None:
                evidence.differences.append(f"{path}: raw bytes differ")
        evidence.strays = _strays(mine, before, theirs)
    _held.kept = {path: raw(tensor) for path, tensor in tensors_of(_held.result).items()} or {
        path: raw(tensor) for path, tensor in mine.items()
    }


def _strays(mine: dict[str, torch.Tensor], before: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> int:
    """How many bytes have changed that belong to no leaf."""
    olds = {path: memory_of(tensor.detach()).clone() for path, tensor in before.items()}
    with torch.no_grad():
        for path, tensor in before.items():
            tensor.detach().copy_(theirs[path])
    count = 0
    for path, tensor in mine.items():
        old, new, now = olds[path], memory_of(before[path].detach()), memory_of(tensor.detach())
        count += int(((now != old) & (new == old)).sum())
    return count


@dataclasses.dataclass
class Leftovers:
    """What a worker has after all has ended."""

    threads: list[str]
    files: int
    #: Tensors that have changed since the call returned.
    late: list[str]
    watches: int
    left_behind: int
    children: list[str]


def inspect(rank: int, plan: Scenario, allowed: int, patience: float) -> Leftovers:
    """Look for leftovers; those that go away within the patience are none."""
    until = time.monotonic() + patience
    while True:
        left = Leftovers(_threads(), _files() - _held.files, [], *hub.leftovers(), _children())
        clean = len(left.threads) <= allowed and left.files <= 0 and left.left_behind <= allowed
        if clean or time.monotonic() > until:
            break
        time.sleep(0.02)
    now = tensors_of(_held.result) or tensors_of(_held.target)
    left.late = [path for path, data in _held.kept.items() if raw(now[path]) != data]
    return left


def _children() -> list[str]:
    found = []
    for task in pathlib.Path("/proc/self/task").iterdir():
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # A thread that has just ended.
            found.append((task / "children").read_text().strip())
    return [text for text in found if text]


# ----------------------------------------------------------------------------------------------- the parent's part


@dataclasses.dataclass
class Result:
    """What came of a scenario."""

    plan: Scenario
    complaints: list[str]
    evidence: dict[int, Evidence]
    #: Ranks whose process ended.
    died: list[int]
    struck: bool
    payload: int = 0

    @property
    def receive_seconds(self) -> float:
        return max((e.seconds for rank, e in self.evidence.items() if rank >= self.plan.sources), default=0.0)

    def receiver(self, rank: int) -> Evidence | None:
        return self.evidence.get(rank)

    def describe(self) -> str:
        lines = [f"seed {self.plan.seed}", self.plan.lines(), f"  struck: {self.struck}, died: {self.died}"]
        for rank, e in sorted(self.evidence.items()):
            what = "ok" if e.error is None else f"{type(e.error).__name__}: {e.error}"
            role = "source" if rank < self.plan.sources else "receiver"
            lines.append(f"  {role} {rank}: {e.seconds:.3f} s, {what}")
        return "\n".join(lines + [f"  COMPLAINT: {line}" for line in self.complaints])


class Yard:
    """Processes in which scenarios run, kept as long as nothing has happened to them."""

    def __init__(self) -> None:
        self._fleets: dict[int, Fleet] = {}
        self.launched = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for size in list(self._fleets):
            self._end(size)

    def _end(self, size: int) -> None:
        fleet = self._fleets.pop(size)
        pids = fleet.pids
        fleet.close()
        for pid in pids:
            assert not pathlib.Path(f"/proc/{pid}").exists(), f"process {pid} is still there"
        left = [name for name in os.listdir("/dev/shm") if any(str(pid) in name for pid in pids)]
        assert not left, f"left in /dev/shm: {left}"

    def _fleet(self, size: int) -> Fleet:
        if size not in self._fleets:
            fleet = Fleet(size)
            fleet.launch()
            self.launched += 1
            self._fleets[size] = fleet
        return self._fleets[size]

    def _renew(self, size: int) -> None:
        """A new group among the same processes: after an error connections may be closed for good."""
        if not self._fleets[size].renew(30):
            self._end(size)

    def run(self, plan: Scenario) -> Result:
        """Run one scenario and judge it. Whatever goes wrong with the run itself is a complaint too."""
        complaints: list[str] = []
        try:
            result = self._run(plan, complaints)
        except AssertionError as error:
            if plan.size in self._fleets:
                self._end(plan.size)
            return Result(plan, [*complaints, f"{error}"], {}, [], True)
        except BaseException:
            if plan.size in self._fleets:
                self._end(plan.size)
            raise
        fleet = self._fleets.get(plan.size)
        if fleet is not None:
            if result.complaints or any(worker.dead or worker.busy for worker in fleet.workers):
                self._end(plan.size)
            elif any(e.error is not None for e in result.evidence.values()) or plan.fault.kind == "freeze":
                self._renew(plan.size)
        if plan.resume and not result.complaints and plan.size in self._fleets:
            self._resume(plan, result)
        return result

    def _run(self, plan: Scenario, complaints: list[str]) -> Result:
        fleet, fault = self._fleet(plan.size), plan.fault
        payload = _values(self._all(fleet, prepare, plan))[0]
        fleet.start(act, plan, fleet.pids, payload)
        bound = plan.timeout + SLACK + plan.patience
        struck = fault.kind in ("none", "delay")
        frozen = False
        if fault.kind == "freeze":
            frozen = self._wait_for_freeze(fleet, plan, bound)
            if frozen and fault.thaw == "soon":
                time.sleep(fault.thaw_seconds)
                fleet.thaw(fault.victim)
                frozen = False
        others = [rank for rank in range(plan.size) if not (frozen and rank == fault.victim)]
        ended = dict(zip(others, fleet.outcomes(bound + 10, others), strict=True))
        if frozen:
            # One that never comes back is left with a thread; its own death ends that.
            complaints += self._inspect(fleet, plan, [rank for rank in others if not _died(ended[rank])], 1)
            if fault.thaw == "late":
                fleet.thaw(fault.victim)
            else:
                fleet.kill(fault.victim)
            ended[fault.victim] = fleet.outcomes(bound + 10, [fault.victim])[0]
        alive = [rank for rank, outcome in ended.items() if not _died(outcome)]
        complaints += self._inspect(fleet, plan, alive, 0)
        evidence: dict[int, Evidence] = {}
        died = []
        for rank, outcome in sorted(ended.items()):
            if _died(outcome):
                died.append(rank)
                if fault.kind not in ("kill", "freeze") or rank != fault.victim:
                    complaints.append(f"rank {rank} died: {outcome.error}")
            elif outcome.error is not None:
                complaints.append(f"rank {rank}: the harness itself failed: {outcome.error!r}\n{_notes(outcome.error)}")
            else:
                evidence[rank] = outcome.get()
        struck = struck or bool(died) or frozen or any(e.struck for e in evidence.values())
        complaints += _Judge(plan, evidence, died, bound).complaints()
        return Result(plan, complaints, evidence, died, struck, payload)

    def _wait_for_freeze(self, fleet: Fleet, plan: Scenario, bound: float) -> bool:
        announcer = plan.sources if plan.fault.when == "progress" else plan.fault.victim
        try:
            fleet.wait_for(announcer, "struck", bound + 10)
        except AssertionError:
            return False
        # The signal follows its announcement.
        until = time.monotonic() + 2
        stat = pathlib.Path(f"/proc/{fleet.pids[plan.fault.victim]}/stat")
        while time.monotonic() < until:
            if stat.read_text().rsplit(")", 1)[1].split()[0] in "tT":
                return True
            time.sleep(0.001)
        return False

    @staticmethod
    def _all(fleet: Fleet, fn: Callable[..., Any], *args: Any) -> list[Outcome[Any]]:
        fleet.start(fn, *args)
        return fleet.outcomes(30)

    @staticmethod
    def _inspect(fleet: Fleet, plan: Scenario, ranks: list[int], allowed: int) -> list[str]:
        if not ranks:
            return []
        fleet.start(inspect, plan, allowed, 0.5 if plan.plant else 3.0, ranks=ranks)
        complaints = []
        for rank, outcome in zip(ranks, fleet.outcomes(30, ranks), strict=True):
            left: Leftovers = outcome.get()
            if len(left.threads) > allowed:
                complaints.append(f"rank {rank} has threads left: {left.threads}")
            if left.files > 0:
                complaints.append(f"rank {rank} has {left.files} more files open than before")
            if left.late:
                complaints.append(f"rank {rank}: changed after the call had returned: {left.late[:5]}")
            if left.watches:
                complaints.append(f"rank {rank} still watches {left.watches} groups")
            if left.left_behind > allowed:
                complaints.append(f"rank {rank} has left {left.left_behind} lines behind")
            if left.children:
                complaints.append(f"rank {rank} has children: {left.children}")
        return complaints

    def _resume(self, plan: Scenario, result: Result) -> None:
        """Those that failed receive once more, and go on from where they were: now nothing disturbs them."""
        failed = [rank for rank, e in result.evidence.items() if rank >= plan.sources and e.error is not None]
        if not failed or plan.fault.kind == "mutate":
            return
        again = undisturbed(plan)
        fleet = self._fleets[plan.size]
        fleet.start(act, again, fleet.pids, result.payload)
        try:
            outcomes = fleet.outcomes(plan.timeout + SLACK + plan.patience + 10)
        except AssertionError as error:
            result.complaints.append(f"resuming: {error}")
            self._end(plan.size)
            return
        for rank, outcome in enumerate(outcomes):
            if outcome.error is not None:
                result.complaints.append(f"resuming, rank {rank}: {outcome.error!r}\n{_notes(outcome.error)}")
                continue
            e: Evidence = outcome.get()
            if e.error is not None:
                result.complaints.append(f"resuming, rank {rank}: {e.error!r}")
            result.complaints += [f"resuming, rank {rank}: {line}" for line in e.differences[:5]]
            if e.strays:
                result.complaints.append(f"resuming, rank {rank}: {e.strays} stray bytes changed")
        if result.complaints:
            self._end(plan.size)


def _values(outcomes: list[Outcome[Any]]) -> list[Any]:
    return [outcome.get() for outcome in outcomes]


def _died(outcome: Outcome[Any]) -> bool:
    return isinstance(outcome.error, Died)


def _notes(error: BaseException) -> str:
    return "\n".join(getattr(error, "__notes__", []))


class _Judge:
    """Says what is not as it must be."""

    def __init__(self, plan: Scenario, evidence: dict[int, Evidence], died: list[int], bound: float) -> None:
        self.plan, self.evidence, self.died, self.bound = plan, evidence, died, bound
        self.lines: list[str] = []

    def complaints(self) -> list[str]:
        for rank, e in sorted(self.evidence.items()):
            if e.seconds > self.bound and not (rank == self.plan.fault.victim and self.plan.fault.kind == "freeze"):
                self.lines.append(f"rank {rank} took {e.seconds:.2f} s, more than {self.bound:.2f}")
            if rank < self.plan.sources:
                self._judge_source(rank, e)
            else:
                self._judge_receiver(rank, e)
        return self.lines

    def _say(self, rank: int, what: str) -> None:
        self.lines.append(f"{'source' if rank < self.plan.sources else 'receiver'} {rank}: {what}")

    def _harmless(self) -> bool:
        """Faults that nobody should notice, the victim least of all."""
        fault = self.plan.fault
        return fault.kind in ("none", "delay") or (
            fault.kind == "freeze" and fault.thaw == "soon" and fault.thaw_seconds < self.plan.timeout / 3
        )

    def _must_be_exact(self, rank: int) -> bool:
        plan, fault = self.plan, self.plan.fault
        if self._harmless():
            return True
        if fault.victim >= plan.sources:
            return rank != fault.victim
        if plan.sources > 1:
            return True
        # Of a single source only damage that can be repaired is survived.
        return fault.kind == "corrupt" and fault.what in ("parcel", "digests", "mark") and fault.count == 1

    def _judge_receiver(self, rank: int, e: Evidence) -> None:
        how, fault = self.plan.receivers[rank - self.plan.sources], self.plan.fault
        if e.strays:
            self._say(rank, f"{e.strays} bytes changed that belong to no leaf")
        if e.error is None:
            for line in e.differences[:5]:
                self._say(rank, f"returned something else than was sent: {line}")
            return
        if self._must_be_exact(rank):
            self._say(rank, f"failed, and had no reason to: {type(e.error).__name__}: {e.error}")
        if isinstance(e.error, Boom) and fault.kind == "raise" and fault.victim == rank:
            torn = list(e.report.get("torn", ()))
        elif isinstance(e.error, transfuse.TransfuseError):
            torn = list(e.error.torn)
            self._judge_account(rank, e, e.error)
        else:
            self._say(rank, f"raised {e.error!r}")
            return
        if how.atomic and (torn or e.changed):
            self._say(rank, f"atomic, and torn={torn[:5]}, changed={e.changed[:5]}")
        if unsaid := set(e.changed) - set(torn):
            self._say(rank, f"changed, but not in torn: {sorted(unsaid)[:5]}")
        if invented := set(torn) - set(e.targets):
            self._say(rank, f"in torn, but no leaf of the target: {sorted(invented)[:5]}")

    def _judge_account(self, rank: int, e: Evidence, error: transfuse.TransfuseError) -> None:
        received, missing = list(error.received), list(error.missing)
        if not received and not missing:
            if e.changed or error.torn:
                self._say(rank, f"no account, though leaves changed: {e.changed[:5]}")
            return
        if set(received) & set(missing):
            self._say(rank, "a leaf is both received and missing")
        if set(received) | set(missing) != set(e.leaves) or len(received) + len(missing) != len(e.leaves):
            odd = (set(received) | set(missing)) ^ set(e.leaves)
            self._say(rank, f"received and missing are not all leaves: {sorted(odd)[:5]}")
        how = self.plan.receivers[rank - self.plan.sources]
        if how.mode != "fresh" and not how.atomic and (lies := set(received) & set(e.targets) - set(e.whole)):
            self._say(rank, f"said to be received, but not what the source has: {sorted(lies)[:5]}")

    def _judge_source(self, rank: int, e: Evidence) -> None:
        plan, fault = self.plan, self.plan.fault
        receivers = set(range(plan.sources, plan.size))
        victim = fault.victim == rank and not self._harmless()
        if e.error is None:
            completed, causes = receivers, {}
        elif isinstance(e.error, transfuse.SendFailed):
            completed, causes = set(e.error.completed), e.error.causes
        else:
            if not (isinstance(e.error, Boom) and fault.kind == "raise" and victim):
                self._say(rank, f"raised {e.error!r}")
            return
        if completed | set(causes) != receivers or completed & set(causes):
            self._say(rank, f"completed {sorted(completed)} and failed {sorted(causes)} are not all receivers")
        for peer, cause in causes.items():
            if not isinstance(cause, transfuse.TransfuseError):
                self._say(rank, f"receiver {peer} failed with {cause!r}")
            if not victim and (peer != fault.victim or self._harmless()):
                mine = self.evidence.get(peer)
                if mine is None or mine.error is None:
                    self._say(rank, f"says that receiver {peer} failed, which did not: {cause!r}")
        for peer in completed:
            theirs = self.evidence.get(peer)
            if theirs is not None and theirs.error is not None and not isinstance(theirs.error, Boom):
                self._say(rank, f"says that receiver {peer} is complete, which raised {theirs.error!r}")
            early = fault.when == "bytes" and fault.at < 0.9 and not plan.memory
            if peer in self.died and fault.kind == "kill" and (fault.when == "start" or early):
                self._say(rank, f"says that receiver {peer} is complete, which died half-way")


# ------------------------------------------------------------------------------------------------------------- replay


#: How a scenario is drawn from a seed, by name.
CAMPAIGNS: dict[str, Callable[[int], Scenario]] = {
    "anything": Scenario.draw,
    "kill-a-source": kill_a_source,
    "freeze-a-source": freeze_a_source,
    "kill-a-receiver": kill_a_receiver,
    "corrupt": corrupt,
}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m chaos", description="Replay scenarios of chaos.")
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--count", type=int, default=1, help="so many seeds, from this one on")
    parser.add_argument("--seconds", type=float, default=math.inf, help="begin none after so long")
    parser.add_argument("--campaign", choices=list(CAMPAIGNS), default="anything", help="how scenarios are drawn")
    parser.add_argument("--fault", help="only scenarios with this fault")
    parser.add_argument("--quiet", action="store_true", help="show only those with complaints")
    options = parser.parse_args(arguments)
    failed: list[int] = []
    counts: collections.Counter[str] = collections.Counter()
    until = time.monotonic() + options.seconds
    with Yard() as yard:
        for seed in range(options.seed, options.seed + options.count):
            plan = CAMPAIGNS[options.campaign](seed)
            if options.fault is not None and plan.fault.kind != options.fault:
                continue
            if time.monotonic() > until:
                break
            result = yard.run(plan)
            counts[plan.fault.kind] += 1
            counts["struck"] += result.struck
            if result.complaints:
                failed.append(seed)
            if result.complaints or not options.quiet:
                print(result.describe(), flush=True)
    print(f"{dict(counts)}; processes started {yard.launched} times; failed: {failed}")
    return 1 if failed else 0


if __name__ == "__main__":
    import chaos  # So that workers find what is sent to them under this name.

    with contextlib.suppress(KeyboardInterrupt):
        sys.exit(chaos.main())
