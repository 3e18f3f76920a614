"""What a worker and the keeper of its host say to each other, over a unix socket. msgpack, and descriptors beside it.

A worker asks, and the keeper answers each question with the frame named beside it, or with ``Refused``. ``Numbers`` is
no question, and has no answer.
"""

from __future__ import annotations

import os
import socket
import struct
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import TypeVar

import msgspec

from transfuse._errors import TransfuseError
from transfuse._keeper.bundle_table import Bundles
from transfuse._wire.framed import Closed, Framed, Malformed, Vocabulary

#: The version of what they say.
VERSION = 6


class KeeperLost(TransfuseError):
    """The keeper does not answer: it was killed, or hangs."""


class KeeperEnds(KeeperLost):
    """The keeper was told to end, and takes nothing new."""


class _Frame(msgspec.Struct, array_like=True, forbid_unknown_fields=True, tag=True):
    pass


class Address(msgspec.Struct, array_like=True, frozen=True, forbid_unknown_fields=True):
    """Where a rank's state is served."""

    rank: int
    address: str
    #: Where what belongs to the rank alone is served; empty if there is nothing.
    own: str = ""


class Held(msgspec.Struct, array_like=True, frozen=True, forbid_unknown_fields=True):
    """One committed state that a keeper holds."""

    generation: int
    step: int
    rank: int
    world_size: int
    nbytes: int
    #: Whether all that it refers to is here, too.
    whole: bool
    #: Whether it is a copy of what another host's keeper holds.
    replica: bool = False
    #: Whether it lies on storage; and the digest of its record, by which hosts with disks of their own tell whether
    #: they have files of one save.
    saved: bool = False
    record: str = ""


class Saves(msgspec.Struct, array_like=True, frozen=True, forbid_unknown_fields=True):
    """Where a job's steps are on storage, and which are written there."""

    directory: str
    #: None: it is only read.
    every: int | None
    keep: int
    #: How long a question to the storage may take.
    patience: float


class CommitNumbers(msgspec.Struct, array_like=True, frozen=True, forbid_unknown_fields=True):
    """What a commit has done, for the keeper's metrics."""

    outcome: str
    #: Why it does not count; empty: it does.
    cause: str
    #: Seconds for which training stood still, by cause; and seconds for which the copy went on beside training.
    stalled: dict[str, float]
    background: float
    copied_bytes: int
    shared_bytes: int


class RestoreNumbers(msgspec.Struct, array_like=True, frozen=True, forbid_unknown_fields=True):
    """How a call of ``restore()`` has ended, for the keeper's metrics."""

    outcome: str
    source: str
    step: int | None
    seconds: float


class Hello(_Frame):
    """Worker: I am this rank. Answered by ``Welcome``."""

    version: int
    rank: int
    world_size: int
    pid: int
    started: int
    agent_pid: int
    agent_started: int
    is_named: bool
    linger: float
    max_bytes: int | None
    #: 0: as many as the keeper thinks right.
    slots: int
    #: The generation that it belongs to; 0: it is new.
    generation: int = 0
    #: How many seconds the newest step stays when all ranks have closed, as long as the agent lives: a new worker is a
    #: restart then, and not another training.
    stays: float = 0.0


class Welcome(_Frame):
    """The run's token, the highest generation so far, and the address of this keeper for other hosts' keepers."""

    token: str
    generation: int
    keeper: str
    pid: int
    #: Whether it encrypts what it says to other hosts.
    encrypts: bool = False


class FindStorage(_Frame):
    """Worker: can this storage be used? Answered by ``FoundStorage``."""

    saves: Saves


class FoundStorage(_Frame):
    """The highest generation of a step there; 0: there is none."""

    generation: int


class Expose(_Frame):
    """Worker: listen for the keepers of other hosts, on this address. Answered by ``Exposed``."""

    host: str
    token: str


class Exposed(_Frame):
    address: str


class Peers(_Frame):
    """Worker: all keepers of the job, in the order of their hosts, and which of them this one is. ``Ack``."""

    generation: int
    world_size: int
    keepers: list[str]
    ranks: list[list[int]]
    index: int
    token: str
    replicas: int
    rate: float | None
    saves: Saves | None = None


class Reserve(_Frame):
    """Worker: allocate slots for a state of ``nbytes`` now. ``Ack``."""

    nbytes: int


class Lay(_Frame):
    """Worker: I want to commit bundles like these. Answered by ``Laid``, with descriptors of the slots.

    Or by ``Slot`` without a number, if other ranks of the host cannot commit this step.
    """

    generation: int
    step: int
    bundles: Bundles
    #: How many bytes the rest of a slot takes: its brief and its description.
    text_bytes: int
    #: How many seconds to wait for the other ranks of this host.
    patience: float


class Laid(_Frame):
    """The bundles, with who holds each and where in this rank's own slots it lies."""

    bundles: Bundles
    #: The number of the first of these slots.
    first: int
    #: The ranks of this host that others have waited for, and that have not committed anything yet.
    absent: list[int]


class Begin(_Frame):
    """Worker: I want to commit this step. Answered by ``Slot``."""

    generation: int
    step: int


class Slot(_Frame):
    """The slot to write to; None: none is free, and this commit is left out. ``renew``: ``Lay`` again first."""

    number: int | None
    renew: bool = False
    #: Why none is free; else what the rank's oldest step that is not complete waits for.
    why: str = ""
    #: What the user should know about replicas.
    notes: str = ""
    #: The newest step, with its generation, that all ranks of the job have committed.
    complete: tuple[int, int] | None = None
    #: As in ``Laid``.
    absent: list[int] = []
    #: Why no step is saved on storage, as long as that lasts.
    unsaved: str = ""


class Committed(_Frame):
    """Worker: this slot holds this step now. ``Ack``."""

    number: int
    generation: int
    step: int


class Drop(_Frame):
    """Worker: what I have begun in this slot is not to count. ``Ack``."""

    number: int


class LeaveOut(_Frame):
    """Worker: I have left out this step and those before, since I could not reach you. ``Ack``."""

    generation: int
    step: int


class Inventory(_Frame):
    """Worker: what do you hold? Answered by ``HeldStates``."""


class HeldStates(_Frame):
    states: list[Held]
    #: Whether this run has ever held a complete step.
    has_held: bool
    #: What became of steps that were held; empty if some are here.
    past: str = ""
    #: What somebody should know who goes on from what is here.
    notes: str = ""
    #: Where the states are that lie on storage, and why it cannot be read; empty if all is well.
    storage: str = ""
    trouble: str = ""
    #: The newest step that a keeper of this run on this host is known to have held; -1: none.
    newest: int = -1


class Open(_Frame):
    """Worker: let me map these ranks' states of a step. Answered by ``Mapped``, with descriptors. Until ``Ack``.

    Or by ``Opening``, as long as files on storage are being opened.
    """

    generation: int
    step: int
    ranks: list[int]


class Mapped(_Frame):
    """The ranks in the order of the descriptors: of slots, then of files on storage."""

    ranks: list[int]
    saved: list[int] = []
    #: Those of the ranks asked for that are to be read from the files.
    from_files: list[int] = []
    #: The folder of the files.
    folder: str = ""


class Opening(_Frame):
    """The storage has not given all files yet: ask again."""

    #: How many it has given so far.
    done: int


class Serve(_Frame):
    """Worker: serve all that you hold of a step, for other hosts. Answered by ``Serving``."""

    generation: int
    step: int
    host: str
    token: str
    #: The ranks whose states are to be served from storage, too.
    saved: list[int] = []


class Serving(_Frame):
    addresses: list[Address]


class Restored(_Frame):
    """Worker: all ranks have restored this step. ``Ack``."""

    generation: int
    step: int


class Numbers(_Frame):
    """Worker: this is what I have done. Without an answer: training does not wait for one."""

    commits: list[CommitNumbers] = []
    restores: list[RestoreNumbers] = []


class Status(_Frame):
    """Anybody of this user: how are you? Answered by ``StatusReply``."""


class Hosts(_Frame):
    """Anybody of this user: how are the keepers of the other hosts? Answered by ``StatusReply``."""


class StatusReply(_Frame, tag="Told"):
    text: bytes


class Close(_Frame):
    """Worker: this rank has done its work. ``Ack``."""


class Ack(_Frame, tag="Done"):
    """Both: that is done. From a worker: the states that I have opened, or that you serve, are no longer needed."""


class Refused(_Frame):
    why: str


class Ends(_Frame):
    """Keeper, in place of any answer: I was told to end, and close this connection."""

    why: str


Attaching = Hello | FindStorage | Expose | Peers | Status | Hosts | Close | Ack
Committing = Reserve | Lay | Begin | Committed | Drop | LeaveOut
Reading = Inventory | Open | Serve | Restored
Answers = Welcome | FoundStorage | Exposed | Laid | Slot | StatusReply | Refused | Ends
States = HeldStates | Opening | Mapped | Serving
Frame = Attaching | Committing | Reading | Numbers | Answers | States
VOCABULARY = Vocabulary(msgspec.msgpack.Decoder(Frame), 256 << 20)
_F = TypeVar("_F")


class KeeperLink(Framed):
    """One connection between a worker and the keeper."""

    def __init__(self, sock: socket.socket) -> None:
        super().__init__(sock, VOCABULARY, passes_files=True)

    @classmethod
    def to(cls, path: str, seconds: float) -> KeeperLink:
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
        try:
            sock.settimeout(seconds)
            sock.connect(path)
        except OSError as error:
            sock.close()
            raise KeeperLost(f"no keeper answers at {path}: {error}") from error
        return cls(sock)

    def peer_pid(self) -> int:
        """The process at the other end; 0 if it is not of our namespace of pids."""
        size = struct.calcsize("3i")
        return int(struct.unpack("3i", self._unix_socket.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size))[0])

    def ask(self, question: Frame, expected: type[_F], seconds: float) -> _F:
        answer, descriptors = self.ask_for_files(question, expected, seconds)
        for fd in descriptors:
            os.close(fd)
        return answer

    def ask_for_files(
        self, question: Frame, expected: type[_F], seconds: float, files: Sequence[int] = ()
    ) -> tuple[_F, list[int]]:
        """Ask, with these descriptors, and return the answer with its own. Raises what the keeper refused with."""
        try:
            self.send(question, seconds, files)
            answer, descriptors = self.hear(seconds)
        except BaseException:
            # The answer may still come, and would be taken for the answer to the next question.
            self.close()
            raise
        if isinstance(answer, expected):
            return answer, descriptors
        for fd in descriptors:
            os.close(fd)
        if isinstance(answer, Refused):
            raise TransfuseError(f"the keeper of this host refused: {answer.why}")
        if isinstance(answer, Ends):
            raise KeeperEnds(f"the keeper of this host {answer.why}")
        raise KeeperLost(f"the keeper answered {type(question).__name__} with {type(answer).__name__}")

    def hear(self, seconds: float | None) -> tuple[Frame, list[int]]:
        return self.receive(None if seconds is None else time.monotonic() + seconds, "waiting for a frame")

    def _explain(self, error: Exception, phase: str, seconds: float) -> KeeperLost:
        why = str(error) or type(error).__name__
        if isinstance(error, Closed):
            return KeeperLost("the other end closed the connection")
        if isinstance(error, Malformed):
            return KeeperLost(f"the other end {why}")
        if isinstance(error, TimeoutError):
            pid = 0
            with suppress(OSError):
                pid = self.peer_pid()
            who, cure = (f"process {pid}", f" (kill -CONT {pid} lets it go on)") if pid else ("the other end", "")
            took = f"{round(seconds, 1):g} s"
            why = f"{who} has not answered within {took}: it was stopped{cure}, or the machine is too busy"
        return KeeperLost(f"the connection to the keeper broke: {why}")
