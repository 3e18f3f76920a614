"""What the keepers of a job's hosts ask each other, and answer. Each question has one answer, or ``No``."""

from __future__ import annotations

import msgspec

from transfuse._keeper.slots import Label
from transfuse._wire.framed import Vocabulary


class _KeeperMessage(msgspec.Struct, array_like=True, forbid_unknown_fields=True, tag=True):
    pass


class Refill(msgspec.Struct, array_like=True, frozen=True, forbid_unknown_fields=True):
    """A host that lacks these ranks' slots, and one that has them."""

    host: int
    source: int
    ranks: list[int]


class Round(_KeeperMessage):
    """Leader: this is decided. Answered by ``HostState``."""

    generation: int
    confirmed: Label | None
    #: Whether all keepers of the generation have been heard. Before that, the rest is not to be used.
    settled: bool
    agreed: Label | None
    floor: Label | None
    over: bool
    has_held: bool
    #: The hosts that have no room for replicas, and those that the leader cannot reach.
    bare: list[int]
    lost: list[int]
    #: The hosts that do not have the oldest step that another host waits with.
    behind: list[int] = []
    #: The step that was restored, and who pulls which ranks' slots of it from whom, so that there are replicas again.
    restored: Label | None = None
    refill: list[Refill] = []


class HostState(_KeeperMessage):
    generation: int
    confirmed: Label | None
    #: Steps that are complete here, and those that are or may become so.
    complete: list[Label]
    hopeful: list[Label]
    #: The newest step that a rank of this host has come to, and whether one found no free slot.
    reached: Label | None
    starved: bool
    #: The agreed step whose replicas are here, or that cannot be replicated here for want of memory (``bare``).
    replicated: Label | None
    bare: bool
    #: Whether all ranks of this host have closed.
    closed: bool
    has_held: bool
    #: The step that was restored, and the ranks whose slots of it are here.
    restored: Label | None = None
    held: list[int] = []


class Lend(_KeeperMessage):
    """Puller: serve me your slots of this step, as long as this connection lasts. Answered by ``Lent``."""

    generation: int
    step: int
    #: The ranks whose slots are wanted; empty: those of the host.
    ranks: list[int] = []


class LentSlot(msgspec.Struct, array_like=True, frozen=True, forbid_unknown_fields=True):
    rank: int
    nbytes: int
    head: bytes


class Lent(_KeeperMessage):
    address: str
    token: str
    slots: list[LentSlot]


class No(_KeeperMessage):
    why: str


Question = Round | Lend
Answer = HostState | Lent
#: A frame lists the slots of all ranks of a host, in less than 100 bytes each.
VOCABULARY = Vocabulary(msgspec.msgpack.Decoder(Question | Answer | No), 4 << 20)
