"""Scenarios, drawn from a number."""

from __future__ import annotations

import dataclasses
import math
import random
import struct
from collections.abc import Sequence
from typing import Literal

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


#: When a fault strikes: before the call; when the victim has posted this number of operations; when this part of the
#: payload has gone through its wire; this number of milliseconds after its first operation; when the first receiver's
#: progress shows this part; when the call has returned.
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
