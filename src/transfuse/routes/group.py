"""The group route: messages and parcels over ``send`` and ``recv`` of a process group.

Facts about backends that this module is built around:

- gloo: a work handle completes only in ``wait()`` and cannot be cancelled, and a wait that expires closes *all* of
  this rank's connections in the group: hence waits do not expire by themselves, and :class:`_Watch` ends them only
  when no conversation of the group has any hope left.
- gloo: when a connection breaks, operations that have begun to move bytes are forgotten and their waits never end;
  only those that have not begun learn of it: hence nothing bulky is ever waited for. A short *mark* follows it, and
  receiving the mark proves that it is there; a peer's answer proves that what was sent before it has arrived.
- gloo: a message longer than the receive posted for it ends the process, a shorter one completes silently: hence
  lengths are always derived or announced first, never guessed.
- NCCL: tags are ignored and operations between two ranks run in the order in which they were posted, on both
  sides: hence conversations take strict turns, and without tags only one runs between two ranks at a time.
"""

from __future__ import annotations

import itertools
import re
import secrets
import struct
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any, ClassVar, Protocol, TypeVar

import torch

from transfuse import messages
from transfuse.errors import PeerError, PeerLost, PeerRefused, PeerTimeout, ProtocolError, StepMismatch, TransfuseError
from transfuse.limits import Limits
from transfuse.messages import HEADER_BYTES, Header, Intent, Message

__all__ = ["Group", "Line", "Posted", "ProcessGroupLike", "WorkLike", "new_link_tag", "valid_link_tag"]

#: All offers travel on this tag, matched in call order; everything after on a tag of the transfer's own.
OFFER_TAG = 0x5446_0000
FIRST_TAG = 0x5500_0000
TAGS = 1 << 22
#: Links between two receivers of a chain have tags that the source draws by lot from this range.
FIRST_LINK_TAG = 0x6000_0000
LINK_TAGS = 1 << 28

#: As long as a wait may be: more milliseconds do not fit into an int32, which some groups want.
FOREVER = timedelta(days=20)

#: What follows a chunk of a message.
MARK = b"\x01"

# Random, so that two ranks that do not know theirs hardly ever give out the same tags at the same time.
_transfers = itertools.count(secrets.randbelow(TAGS))

Body = TypeVar("Body", messages.Offer, messages.Want, messages.Refusal, messages.Verdict, messages.Agreed)

#: What a peer that fell silent still holds of ours: its memory must stay until the connection is closed.
_left_behind: list[Posted] = []


class WorkLike(Protocol):
    def wait(self, timeout: timedelta) -> Any: ...


class ProcessGroupLike(Protocol):
    """What is asked of a process group. Ranks are ranks within the group."""

    def send(self, tensors: list[torch.Tensor], rank: int, tag: int) -> WorkLike: ...

    def recv(self, tensors: list[torch.Tensor], rank: int, tag: int) -> WorkLike: ...


class Group:
    """A process group, and what is known about it."""

    def __init__(self, pg: ProcessGroupLike, device: torch.device) -> None:
        self.pg = pg
        self.device = device
        backend = _backend_name(pg, device)
        self.tagged = "gloo" in backend or "mpi" in backend
        #: torchft's groups in a child process: one pipe, one operation at a time, whichever the peer.
        self.serial = "baby" in backend
        #: Whether a wait that expires breaks the connections to all ranks, not only to one.
        self.shares_fate = "gloo" in backend and not self.serial

    def rank(self) -> int | None:
        """This process's rank, if the group knows it."""
        group = self.pg
        while (inner := getattr(group, "parent", None)) is not None:
            group = inner
        # torchft's groups answer 0 on every rank; where they wrap one of torch's, that one knows.
        return None if type(group).__module__.startswith("torchft") else _call(group, "rank")

    def size(self) -> int | None:
        return _call(self.pg, "size")

    @contextmanager
    def turn(self, peer: int, source: int) -> Iterator[None]:
        """Hold the way to ``peer``. With tags transfers do not disturb each other and nobody waits."""
        if self.tagged and not self.serial:
            yield
        else:
            with _lanes.hold((id(self.pg), -1 if self.serial else peer), source):
                yield

    @property
    def relays(self) -> bool:
        """Whether receivers may pass parcels on: without tags their links would get mixed up with other transfers."""
        return self.tagged and not self.serial and self.size() is not None

    def has(self, rank: int) -> bool:
        """Whether there is another such rank. gloo ends the process over one that does not exist."""
        size = self.size()
        return rank >= 0 and (size is None or rank < size) and rank != self.rank()

    def new_tag(self, peer: int) -> int:
        """A tag for a transfer to ``peer``: unique in this process, and apart from those that ``peer`` gives out."""
        upward = (self.rank() or 0) < peer
        return FIRST_TAG + 2 * (next(_transfers) % TAGS) + upward


def valid_tag(tag: int) -> bool:
    return FIRST_TAG <= tag < FIRST_TAG + 2 * TAGS


def new_link_tag() -> int:
    return FIRST_LINK_TAG + secrets.randbelow(LINK_TAGS)


def valid_link_tag(tag: int) -> bool:
    return FIRST_LINK_TAG <= tag < FIRST_LINK_TAG + LINK_TAGS


def _call(pg: object, name: str) -> int | None:
    method = getattr(pg, name, None)
    if not callable(method):
        return None
    value = method()
    return value if isinstance(value, int) else None


def _backend_name(pg: Any, device: torch.device) -> str:
    """What the group calls its backend. Every kind of group says it in its own way, and some not at all."""
    with suppress(Exception):
        return str(pg._get_backend(device).name()).lower()
    with suppress(Exception):
        return str(pg.getBackendName()).lower()
    with suppress(Exception):
        return str(pg.name()).lower()
    return "unknown"


class _Lanes:
    """Without tags: one transfer at a time between two ranks, the lower source rank first among those waiting.

    Those before are bounded each by their own timeout: they are waited for as long as it takes.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._busy: set[tuple[int, int]] = set()
        self._waiting: dict[tuple[int, int], list[tuple[int, int]]] = {}
        self._arrivals = itertools.count()

    @contextmanager
    def hold(self, lane: tuple[int, int], source: int) -> Iterator[None]:
        me = (source, next(self._arrivals))
        with self._changed:
            queue = self._waiting.setdefault(lane, [])
            queue.append(me)
            self._changed.wait_for(lambda: lane not in self._busy and min(queue) == me)
            queue.remove(me)
            self._busy.add(lane)
        try:
            yield
        finally:
            with self._changed:
                self._busy.discard(lane)
                if not self._waiting.get(lane):
                    self._waiting.pop(lane, None)
                self._changed.notify_all()


_lanes = _Lanes()


class _Watch:
    """One thread that looks after all conversations of a group while there are any.

    It shows signs of life for those that hold the turn. And where connections share their fate, it ends waits, once
    every conversation is overdue: until then a peer that is late costs the others nothing, and may still catch up.
    """

    _by_group: ClassVar[dict[int, _Watch]] = {}
    _lock = threading.Lock()

    def __init__(self, first: Line) -> None:
        self._lines = {first}
        self._changed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="transfuse-watch", daemon=True)

    @classmethod
    def add(cls, line: Line) -> None:
        key = id(line.group.pg)
        with cls._lock:
            watch = cls._by_group.get(key)
            if watch is None:
                watch = cls._by_group[key] = cls(line)
                watch._thread.start()
            watch._lines.add(line)

    @classmethod
    def remove(cls, line: Line) -> None:
        key = id(line.group.pg)
        with cls._lock:
            watch = cls._by_group[key]
            watch._lines.discard(line)
            last = not watch._lines
            if last:
                del cls._by_group[key]
        watch._changed.set()
        if last:
            # A thread that outlived the call could be the last to hold the group while the interpreter ends.
            watch._thread.join()

    def _run(self) -> None:
        while True:
            with self._lock:
                lines = list(self._lines)
            if not lines:
                return
            for line in lines:
                line.pulse()
            if (
                lines[0].group.shares_fate
                and all(line.overdue() for line in lines)
                and any(line.waiting_since is not None for line in lines)
            ):
                for line in lines:
                    line.given_up = True
                for line in lines:
                    line.break_off()
            pause = min(0.1, min(line.pulse_seconds / 2 for line in lines))
            del lines
            self._changed.wait(pause)
            self._changed.clear()


class Posted:
    """A send or receive under way. The tensor's memory belongs to the backend until :meth:`wait` has returned."""

    def __init__(self, line: Line, work: WorkLike, tensor: torch.Tensor) -> None:
        self._line = line
        self._work = work
        self.tensor = tensor

    def wait(self) -> torch.Tensor:
        line = self._line
        started = line.waiting_since = time.monotonic()
        try:
            done = self._work.wait(FOREVER if line.group.shares_fate else timedelta(seconds=line.timeout))
        except Exception as error:
            line.broken = True
            raise line.translate(error, time.monotonic() - started) from error
        finally:
            line.waiting_since = None
            with suppress(ValueError):
                line.outstanding.remove(self)
        if done is False:
            line.broken = True
            raise PeerLost(line.peer, f"rank {line.peer}: the backend reported failure while {line.phase}")
        return self.tensor

    def expire(self) -> None:
        """End a wait that another thread is in, at the cost of the connection."""
        with suppress(Exception):
            self._work.wait(timedelta(milliseconds=2))  # Below 1 ms gloo takes its own default.


class Line:
    """One conversation with one peer: posts sends and receives, waits for them, and knows what failed when.

    Used by one thread at a time, within ``with line:``. ``phase`` says what the conversation is doing, for messages.
    """

    def __init__(self, group: Group, peer: int, timeout: float, limits: Limits) -> None:
        self.group = group
        self.peer = peer
        self.timeout = timeout
        self.limits = limits
        self.phase = "starting"
        self.transfer = 0
        self.tag = OFFER_TAG
        self.outstanding: deque[Posted] = deque()
        self.waiting_since: float | None = None
        self.given_up = False
        self.broken = False
        #: How long the peer waits for a sign of life, if it has said so.
        self.peer_timeout = timeout
        #: How many bytes a working peer can have at most.
        self.most_bytes = 0
        #: Called with what a working peer says it has so far.
        self.on_working: Callable[[int], object] | None = None
        self._unanswered: list[Posted] = []
        self._watched = False
        self._rests = False
        self._turn = threading.Lock()
        self._so_far: Callable[[], int] | None = None
        self._pulse_at = 0.0

    def __enter__(self) -> Line:
        _Watch.add(self)
        self._watched = True
        return self

    def __exit__(self, *_: object) -> None:
        """Leave only when no memory is in the backend's hands any more, whatever becomes of it."""
        try:
            # Once the connection is closed nobody writes, and not every wait on it would end.
            while self.outstanding and not self.broken:
                with suppress(TransfuseError):
                    self.outstanding[0].wait()
        finally:
            self.outstanding.clear()
            self._unwatch()

    def abandon(self) -> None:
        """From another thread: leave a silent peer. Only for lines of which all memory in flight is staging.

        The thread in the wait stays there until the peer goes on or is gone.
        """
        self.broken = True
        _left_behind.extend(self.outstanding)
        self._unwatch()

    def _unwatch(self) -> None:
        if self._watched:
            self._watched = False
            _Watch.remove(self)

    @contextmanager
    def resting(self) -> Iterator[None]:
        """While this line has to wait for another one: then it does not keep that one's wait from being ended."""
        self._rests = True
        try:
            yield
        finally:
            self._rests = False

    def overdue(self) -> bool:
        """Whether the conversation has waited for longer than its timeout, or for another one that may have."""
        since = self.waiting_since
        return self._rests or (since is not None and time.monotonic() - since > self.timeout)

    def break_off(self) -> None:
        """Close the connection under waits that would not end. Called by the watch."""
        for posted in list(self.outstanding):
            posted.expire()

    # ------------------------------------------------------------------------------------------------- raw tensors

    def post_send(self, tensor: torch.Tensor, tag: int | None = None) -> Posted:
        return self._post(self.group.pg.send, tensor, tag)

    def post_recv(self, tensor: torch.Tensor, tag: int | None = None) -> Posted:
        return self._post(self.group.pg.recv, tensor, tag)

    def _post(self, operation: Any, tensor: torch.Tensor, tag: int | None) -> Posted:
        try:
            work = operation([tensor], self.peer, self.tag if tag is None else tag)
        except Exception as error:
            self.broken = True
            raise self.translate(error, 0.0) from error
        posted = Posted(self, work, tensor)
        self.outstanding.append(posted)
        return posted

    def translate(self, error: Exception, elapsed: float) -> PeerError:
        """A backend's exception as one of ours."""
        # gloo's texts begin with a path of its build machine and end with advice.
        text = re.sub(r"^\[\S+\] ", "", str(error).split("\n")[0]).split(". This is typically")[0]
        if self.given_up or elapsed >= 0.9 * self.timeout or "timed out" in text.lower():
            return PeerTimeout(self.peer, self.phase, elapsed)
        return PeerLost(self.peer, f"rank {self.peer}: connection lost while {self.phase}: {text}")

    # --------------------------------------------------------------------------------------------------- messages

    def send(self, kind: Message, body: bytes | torch.Tensor = b"", *, note: int = 0, tag: int | None = None) -> None:
        """Send a message; the peer's answer will prove that it arrived. ``tag`` is the header's, for offers."""
        data = self.wire(body) if isinstance(body, bytes) else body
        head = messages.seal(kind, self.transfer, note, data.cpu().numpy().data)
        self._unanswered.append(self.post_send(self.wire(head), tag))
        for at in range(0, data.numel(), self.limits.chunk_bytes):
            self._unanswered.append(self.post_send(data[at : at + self.limits.chunk_bytes]))
            self._unanswered.append(self.post_send(self.wire(MARK)))

    def settle(self) -> None:
        """Wait until everything that was sent is gone: after an answer at once, otherwise when the peer takes it."""
        for posted in self._unanswered:
            posted.wait()
        self._unanswered.clear()

    def expect(self, *kinds: Message, tag: int | None = None) -> tuple[Header, bytearray]:
        """Receive the next message, which is one of ``kinds``, or raise what the peer's refusal says."""
        signs = 0
        while True:
            data = self._recv_bytes(HEADER_BYTES, tag)
            header = self._open(data)
            if header.kind is not Message.WORKING:
                break
            self._verify(data, b"")
            # Only bytes are progress, and there are only so many: no peer is waited for without end.
            signs += 1
            arrived = min(header.note, self.most_bytes)
            if signs >= self.limits.max_working_records + arrived // self.limits.min_parcel_bytes:
                raise ProtocolError(self.peer, f"rank {self.peer} says that it is working, but never that it is done")
            if self.on_working is not None:
                self.on_working(header.note)
        if tag is not None:
            # The first message of a transfer brings its name and its own tag.
            if not valid_tag(header.note):
                raise ProtocolError(self.peer, f"rank {self.peer} sent an offer with an impossible tag {header.note}")
            self.transfer, self.tag = header.transfer, header.note
        if header.kind not in (*kinds, Message.REFUSAL):
            wanted = " or ".join(kind.name for kind in kinds)
            raise ProtocolError(self.peer, f"rank {self.peer} sent {header.kind.name} where {wanted} was due")
        if header.length > self.limits.max_message_bytes:
            raise ProtocolError(
                self.peer,
                f"rank {self.peer} announced a message of {header.length} bytes, more than "
                f"TRANSFUSE_MAX_MESSAGE_BYTES={self.limits.max_message_bytes}",
            )
        body = bytearray()
        while len(body) < header.length:
            # A chunk at a time: an announced length alone allocates nothing.
            chunk = self.post_recv(self._empty(min(self.limits.chunk_bytes, header.length - len(body))))
            self._recv_bytes(len(MARK))
            body += chunk.wait().cpu().numpy().data
        self._verify(data, body)
        if header.kind is Message.REFUSAL:
            raise self.refused(self.decode(body, messages.Refusal))
        self.settle()
        return header, body

    def decode(self, body: bytes | bytearray, cls: type[Body]) -> Body:
        try:
            return messages.decode(body, cls)
        except ValueError as error:
            raise ProtocolError(self.peer, f"rank {self.peer}: {error}") from error

    def refuse(self, error: BaseException, *, tag: int | None = None) -> None:
        """Tell the peer why this end stops. Best effort: the peer may be gone."""
        kind, cause = type(error).__name__, str(error)[:4000]
        if isinstance(error, PeerRefused):
            kind, cause = error.kind, f"(from rank {error.rank}) {error.cause}"
        # A cause may quote text that is no UTF-8: the name of a file, or what a peer made up.
        cause = cause.encode("utf-8", "backslashreplace").decode()
        with suppress(TransfuseError):
            self.send(Message.REFUSAL, messages.encode(messages.Refusal(kind, cause)), note=self.tag, tag=tag)
            self.settle()

    def refused(self, refusal: messages.Refusal) -> TransfuseError:
        if refusal.kind == StepMismatch.__name__:
            return StepMismatch(f"rank {self.peer} refused: {refusal.cause[:1000]}")
        return PeerRefused(self.peer, refusal.kind[:200], refusal.cause[:10_000])

    # ----------------------------------------------------------------------------------------------------- records

    def post_sent(self, intent: Intent, digests: list[int]) -> Posted:
        """Post the source's record after a burst: its length follows from the plan, so the peer can post ahead."""
        body = struct.pack(f"<{len(digests)}Q", *digests)
        return self.post_send(self.wire(messages.seal(Message.SENT, self.transfer, intent, body) + body))

    def post_recv_sent(self, digests: int) -> Posted:
        return self.post_recv(self._empty(HEADER_BYTES + 8 * digests))

    def read_sent(self, tensor: torch.Tensor) -> tuple[Intent, tuple[int, ...]]:
        data = bytes(tensor.cpu().numpy())
        head, body = data[:HEADER_BYTES], data[HEADER_BYTES:]
        header = self._open(head)
        self._verify(head, body)
        if header.kind is not Message.SENT or header.length != len(body) or header.note not in (0, 1):
            raise ProtocolError(self.peer, f"rank {self.peer} sent {header.kind.name} where a record was due")
        return Intent(header.note), struct.unpack(f"<{len(body) // 8}Q", body)

    # ----------------------------------------------------------------------------------------------- signs of life

    @contextmanager
    def holding_turn(self, so_far: Callable[[], int] = lambda: 0) -> Iterator[None]:
        """While this end works and the peer waits for its next message: show signs of life, and how many bytes."""
        with self._turn:
            self._so_far, self._pulse_at = so_far, time.monotonic() + self.pulse_seconds
        try:
            yield
        finally:
            with self._turn:
                self._so_far = None

    @property
    def pulse_seconds(self) -> float:
        """How often: not more often than this, whatever the peer says that it needs."""
        return max(min(self.timeout, self.peer_timeout) / 4, 0.05)

    def pulse(self) -> None:
        """Show a sign of life if one is due. Called by the watch."""
        with self._turn:
            if self._so_far is not None and time.monotonic() >= self._pulse_at:
                self._pulse_at = time.monotonic() + self.pulse_seconds
                with suppress(TransfuseError):
                    self.send(Message.WORKING, note=self._so_far())

    # ----------------------------------------------------------------------------------------------------- helpers

    def wire(self, data: bytes) -> torch.Tensor:
        """Bytes as the backend takes them: writable memory on its device."""
        return torch.frombuffer(bytearray(data), dtype=torch.uint8).to(self.group.device) if data else self._empty(0)

    def _empty(self, count: int) -> torch.Tensor:
        return torch.empty(count, dtype=torch.uint8, device=self.group.device)

    def _recv_bytes(self, count: int, tag: int | None = None) -> bytes:
        return bytes(self.post_recv(self._empty(count), tag).wait().cpu().numpy())

    def _open(self, data: bytes) -> Header:
        try:
            header = messages.open_header(data)
        except ValueError as error:
            raise ProtocolError(self.peer, f"rank {self.peer}, while {self.phase}: {error}") from error
        if self.tag != OFFER_TAG and header.transfer != self.transfer:
            raise ProtocolError(
                self.peer, f"rank {self.peer} sent a message of transfer {header.transfer:x}, this is {self.transfer:x}"
            )
        return header

    def _verify(self, head: bytes, body: bytes | bytearray) -> None:
        try:
            messages.verify(head, body)
        except ValueError as error:
            raise ProtocolError(self.peer, f"rank {self.peer}, while {self.phase}: {error}") from error
