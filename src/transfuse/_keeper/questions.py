"""What the keepers of a job's hosts ask each other, and answer. Each question has one answer, or ``No``."""

from __future__ import annotations

import msgspec

from transfuse._keeper.bundle_table import Bundles
from transfuse._keeper.slot_file import Label
from transfuse._keeper.storage import Record, SavedFile
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


class SaveRound(_KeeperMessage):
    """Leader: candidates up to ``concluded`` are done with; it goes back when the job has ended. ``SaveState``."""

    generation: int
    concluded: Label | None
    #: The newest step that is saved, and what is wrong; for this host's status.
    saved: Label | None
    trouble: str


class SaveState(_KeeperMessage):
    generation: int
    #: The host's oldest candidate, and whether all its ranks have committed it and nothing is missing.
    candidate: Label | None
    is_whole: bool
    #: The newest step that a rank of this host has come to.
    reached: Label | None
    #: Whether all ranks of this host have closed: it commits no more.
    is_over: bool = False


class SaveBegin(_KeeperMessage):
    """Leader: hold this step until this connection ends, and tell me what is in its slots. ``SaveProgress``.

    ``writer``: what the leader has written into the directory, to find out whether this host sees the same one.
    """

    generation: int
    step: int
    writer: str


class SaveWrite(_KeeperMessage):
    """Leader: write the files of your ranks. ``SaveProgress``."""

    #: By rank of the host: who writes each of its bundles (int32).
    owners: dict[int, bytes]


class SaveRecord(_KeeperMessage):
    """Leader: all files are there. Write the record, if it is not there already. ``SaveProgress``."""

    record: Record
    #: Whether all hosts see one directory.
    together: bool


class SavePrune(_KeeperMessage):
    """Leader: the step counts on all hosts. Remove older ones, unless the leader sees to that. ``SaveProgress``."""

    keep: int
    together: bool


class SaveLook(_KeeperMessage):
    """Leader: how is it going? Answered by ``SaveProgress``."""


class RankTable(msgspec.Struct, array_like=True, frozen=True, forbid_unknown_fields=True):
    rank: int
    bundles: Bundles


class SaveProgress(_KeeperMessage):
    """How the last order is going. The leader asks again until it is done."""

    is_done: bool
    #: Seconds since the storage has last taken or given something.
    silent: float
    #: Why it has failed; empty: it has not.
    failure: str = ""
    nbytes: int = 0
    #: After ``SaveBegin``: what is in the slots, and whether this host sees the leader's directory.
    tables: list[RankTable] = []
    sees: bool = False
    #: After ``SaveWrite``.
    files: list[SavedFile] = []


class Look(_KeeperMessage):
    """Any keeper, for somebody who looks at all hosts: how are you? Answered by ``Looked``."""


class Looked(_KeeperMessage):
    #: JSON, as of ``transfuse keep --status``.
    text: bytes


class No(_KeeperMessage):
    why: str


SaveQuestion = SaveRound | SaveBegin | SaveWrite | SaveRecord | SavePrune | SaveLook
Question = Round | Lend | Look | SaveQuestion
Answer = HostState | Lent | Looked | SaveState | SaveProgress
#: A frame lists the slots of all ranks of a host in less than 100 bytes each, or their bundles.
VOCABULARY = Vocabulary(msgspec.msgpack.Decoder(Question | Answer | No), 64 << 20)
