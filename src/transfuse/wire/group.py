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

import ctypes
import itertools
import re
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from functools import partial
from typing import Any, ClassVar, Protocol, TypeVar

import torch

from transfuse.errors import (
    PeerError,
    PeerLost,
    PeerRefused,
    PeerTimeout,
    ProtocolError,
    SourceMutated,
    StepMismatch,
    TransfuseError,
    as_utf8,
)
from transfuse.limits import Limits, Patience
from transfuse.wire import messages
from transfuse.wire.loopback import Loop
from transfuse.wire.messages import HEADER_BYTES, Header, Intent, Message

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

Body = TypeVar(
    "Body",
    messages.Offer,
    messages.Want,
    messages.Refusal,
    messages.Verdict,
    messages.Agreed,
    messages.More,
    messages.Digests,
)

#: Lines to peers that fell silent, and so the memory that is still under way on them: it must stay until it has come.
_left_behind: set[Line] = set()


class _Pinned:
    """Groups that a thread may be left in. They are never destroyed: under a waiting thread that ends the process.

    But for those that see to it themselves that they outlive every wait, and say so by ``outlives_waits``.
    """

    def __init__(self) -> None:
        self._ids: set[int] = set()

    def add(self, pg: object) -> None:
        if id(pg) not in self._ids and not getattr(pg, "outlives_waits", False):
            self._ids.add(id(pg))
            # Not even when the interpreter ends, and with it everything that a module holds.
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(pg))


_pinned = _Pinned()


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
        #: These also move the memory of what they are given to where the child can see it: that must not be the
        #: caller's, of which addresses are known, and which others may be reading.
        self.moves_tensors = self.serial
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
        if (self.tagged and not self.serial) or peer == self.rank():
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
        self.work = work
        self.tensor = tensor

    def wait(self) -> torch.Tensor:
        line = self._line
        started = line.waiting_since = time.monotonic()
        try:
            done = self.work.wait(FOREVER if line.group.shares_fate else timedelta(seconds=line.timeout))
        except Exception as error:
            line.broken = line.closed = True
            raise line.translate(error, time.monotonic() - started) from error
        finally:
            line.waiting_since = None
            with suppress(ValueError):
                line.outstanding.remove(self)
        if done is False:
            line.broken = True
            raise PeerLost(line.peer, f"rank {line.peer}: the backend reported failure while {line.phase}")
        return self.tensor


class _FirstWord:
    """A receive for the header of a peer's next offer. It cannot be taken back: a caller that leaves hands it on."""

    #: Those that nobody waits for, in the order in which they were posted: what comes, comes in that order.
    _parked: ClassVar[list[_FirstWord]] = []
    _serial: ClassVar[Iterator[int]] = itertools.count()
    _lock = threading.Lock()

    def __init__(self, line: Line, posted: Posted) -> None:
        self.posted = posted
        self.done = threading.Event()
        self._key = (id(line.group.pg), line.peer)
        self._group = line.group  # As long as this is here, the id is not another group's.
        self._number = next(self._serial)
        self._data = b""
        self._error: Exception | None = None
        #: The line whose caller waits for it; None while nobody does.
        self._owner: Line | None = line

    def wait(self) -> None:
        """In the thread that has posted it, whoever gets what comes."""
        try:
            self._data = bytes(self.posted.wait().cpu().numpy())
        except Exception as error:
            self._error = error
        self.done.set()

    def take(self, line: Line) -> bytes:
        """What has come, for the line that it belongs to now."""
        with self._lock:
            if self._owner is not line:
                line.broken = line._refused = True  # There is nobody here to talk to.
                raise PeerLost(line.peer, f"rank {line.peer} was left before its first word")
            self._owner = None
        if self._error is not None:
            line.broken = True
            raise self._error
        return self._data

    @classmethod
    def park(cls, word: _FirstWord) -> None:
        with cls._lock:
            if word._owner is not None:
                word._owner = None
                cls._parked.append(word)
                cls._parked.sort(key=lambda word: word._number)

    @classmethod
    def adopt(cls, line: Line) -> _FirstWord | None:
        """A receive that an earlier call has left behind, if there is one that can still bring something."""
        key = (id(line.group.pg), line.peer)
        with cls._lock:
            cls._parked[:] = [word for word in cls._parked if word._error is None]
            for word in cls._parked:
                if word._key == key:
                    cls._parked.remove(word)
                    word._owner = line
                    return word
            return None

    def wait_for(self, line: Line) -> None:
        """In the thread of a line that has taken it over: until it is there, or the line has been left."""
        while self._owner is line and not self.done.wait(0.1):
            pass


class Line:
    """One conversation with one peer: posts sends and receives, waits for them, and knows what failed when.

    Used by one thread at a time, within ``with line:``. ``phase`` says what the conversation is doing, for messages.
    """

    def __init__(self, group: Group, peer: int, timeout: float, limits: Limits, *, is_source: bool = False) -> None:
        self.group = group
        self.peer = peer
        #: Which end this is, for a rank that talks to itself.
        self.is_source = is_source
        self._loop = Loop.of(group.pg) if peer == group.rank() else None
        self.timeout = timeout
        self.limits = limits
        self.phase = "starting"
        self.transfer = 0
        self.tag = OFFER_TAG
        self.outstanding: deque[Posted] = deque()
        self.waiting_since: float | None = None
        self.given_up = False
        self.broken = False
        #: Whether the backend has said that the connection is gone: then nobody writes any more, on whatever was left.
        self.closed = False
        #: How long the peer waits for a sign of life, if it has said so.
        self.peer_timeout = timeout
        #: How many bytes a working peer can have at most.
        self.most_bytes = 0
        #: Called with what a working peer says it has so far.
        self.on_working: Callable[[int], object] | None = None
        #: When the peer last said anything.
        self.heard_at = time.monotonic()
        self._refused = False
        self._first_word: _FirstWord | None = None
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
            # These refer to this line, or to who refers to it: gone at once, not when garbage is collected.
            if self not in _left_behind or self.closed:
                self.outstanding.clear()
                self._unanswered.clear()
            if not self.outstanding:
                _left_behind.discard(self)
            self.on_working = None
            self._unwatch()

    def abandon(self) -> None:
        """From another thread: leave a silent peer. Only for lines of which all memory in flight is staging.

        The thread in the wait stays there until the peer goes on or is gone.
        """
        self.park()
        self.broken = True
        _left_behind.add(self)
        self._unwatch()

    def park(self) -> None:
        """From another thread: the caller goes on, and the thread that waits here stays behind.

        If it waits for the peer's first word, whoever comes next gets that.
        """
        _pinned.add(self.group.pg)
        if self._first_word is not None:
            _FirstWord.park(self._first_word)

    def _unwatch(self) -> None:
        with _Watch._lock:
            watched, self._watched = self._watched, False
        if watched:
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
        """Close the connection under waits that would not end. Called by the watch.

        By a receive of its own, for what nobody sends: a second wait for the same receive would take the news from the
        first if it came just now, and that one would never end.
        """
        if self.outstanding:
            with suppress(Exception):
                nothing = self.post_recv(self._empty(1), new_link_tag())
                self.outstanding.remove(nothing)
                nothing.work.wait(timedelta(milliseconds=2))  # Below 1 ms gloo takes its own default.

    # ------------------------------------------------------------------------------------------------- raw tensors

    def post_send(self, tensor: torch.Tensor, tag: int | None = None) -> Posted:
        if self._loop is not None:
            return self._post(partial(self._loop.send, by_source=self.is_source), tensor, tag)
        return self._post(lambda tensor, tag: self.group.pg.send([tensor], self.peer, tag), tensor, tag)

    def post_recv(self, tensor: torch.Tensor, tag: int | None = None) -> Posted:
        if self._loop is not None:
            return self._post(partial(self._loop.recv, by_source=self.is_source), tensor, tag)
        return self._post(lambda tensor, tag: self.group.pg.recv([tensor], self.peer, tag), tensor, tag)

    def _post(self, operation: Any, tensor: torch.Tensor, tag: int | None) -> Posted:
        try:
            work = operation(tensor, self.tag if tag is None else tag)
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
            late = PeerTimeout(self.peer, self.phase, elapsed)
            if self.peer == self.group.rank():
                late.add_note("That is this rank itself: it sends in one thread and receives in another, on one group.")
            return late
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
            data = self._recv_bytes(HEADER_BYTES) if tag is None else self._hear_first_word(tag)
            header = self._open(data)
            if header.kind is not Message.WORKING:
                break
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
            wanted = " or ".join(kind.name for kind in kinds or (Message.REFUSAL,))
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
        self._verify(header, body)
        if header.kind is Message.REFUSAL:
            self._refused = True  # Nobody is there any more to be told.
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
        if self._refused:
            return
        self._refused = True
        kind, cause = type(error).__name__, str(error)[:4000]
        if isinstance(error, PeerRefused):
            kind, cause = error.kind, f"(from rank {error.rank}) {error.cause}"
        cause = as_utf8(cause)
        with suppress(TransfuseError):
            self.send(Message.REFUSAL, messages.encode(messages.Refusal(kind, cause)), note=self.tag, tag=tag)
            self.settle()

    def refused(self, refusal: messages.Refusal) -> TransfuseError:
        if refusal.kind == StepMismatch.__name__:
            return StepMismatch(f"rank {self.peer} refused: {refusal.cause[:1000]}")
        if refusal.kind == SourceMutated.__name__:
            return SourceMutated(self.peer, (), f"rank {self.peer} refused: {refusal.cause[:10_000]}")
        return PeerRefused(self.peer, refusal.kind[:200], refusal.cause[:10_000])

    # ----------------------------------------------------------------------------------------------------- records

    def post_sent(self, intent: Intent, digests: list[int]) -> Posted:
        """Post the source's record after a burst: its length follows from the plan, so the peer can post ahead."""
        return self.post_send(self.wire(messages.seal_record(self.transfer, intent, digests)))

    def post_recv_sent(self, digests: int) -> Posted:
        return self.post_recv(self._empty(messages.record_bytes(digests)))

    def read_sent(self, tensor: torch.Tensor) -> tuple[Intent, Sequence[int] | None]:
        """What the record says comes next, and its digests, unless these have arrived damaged."""
        data = bytes(tensor.cpu().numpy())
        header = self._open(data[:HEADER_BYTES])
        if header.kind is not Message.SENT or header.length or header.note not in (0, 1):
            raise ProtocolError(self.peer, f"rank {self.peer} sent {header.kind.name} where a record was due")
        return Intent(header.note), messages.digests_in(data)

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
        return Patience(self.timeout).pulse(self.peer_timeout)

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

    def _recv_bytes(self, count: int) -> bytes:
        return bytes(self.post_recv(self._empty(count)).wait().cpu().numpy())

    def _hear_first_word(self, tag: int) -> bytes:
        """The header of the next offer. If an earlier call has left its receive behind, what arrives there."""
        word = _FirstWord.adopt(self)
        if word is None:
            word = self._first_word = _FirstWord(self, self.post_recv(self._empty(HEADER_BYTES), tag))
            word.wait()
            self._first_word = None
            return word.take(self)
        self._first_word = word
        self.outstanding.append(word.posted)  # For the watch: it ends this wait as any other.
        self.waiting_since = time.monotonic()
        try:
            word.wait_for(self)
        finally:
            self.waiting_since = None
            self._first_word = None
            with suppress(ValueError):
                self.outstanding.remove(word.posted)
        return word.take(self)

    def _open(self, data: bytes) -> Header:
        try:
            header = messages.open_header(data)
        except ValueError as error:
            raise ProtocolError(self.peer, f"rank {self.peer}, while {self.phase}: {error}") from error
        self.heard_at = time.monotonic()
        if self.tag != OFFER_TAG and header.transfer != self.transfer:
            raise ProtocolError(
                self.peer, f"rank {self.peer} sent a message of transfer {header.transfer:x}, this is {self.transfer:x}"
            )
        return header

    def _verify(self, header: Header, body: bytes | bytearray) -> None:
        try:
            messages.verify(header, body)
        except ValueError as error:
            raise ProtocolError(self.peer, f"rank {self.peer}, while {self.phase}: {error}") from error
