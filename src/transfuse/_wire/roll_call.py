"""A roll call: the ranks of a group tell each other a few bytes, and all who live know who is lost.

Every rank tells every other one, by ``send`` and ``recv`` of the group. So a dead rank is noticed at once and by all,
and a frozen one is known by name. (A collective that loses a member hangs or fails on others than its neighbours too,
and says nothing about who it was.)

    open(value)      one round: a number of each rank
    agree(data)      two rounds: first everybody's bytes; then everybody's list of who is lost, and the words of those
                     who may be. One rank may die at any moment of it: all others return the same.

A wait of gloo that expires closes all connections of its rank. So none expires here: each peer has a thread that
listens, and a thread whose peer is silent is left behind. For the same reason the group's watch asks this roll call
before it breaks off a transfer (:meth:`RollCall.before_break_off`): the last words go out first.
"""

from __future__ import annotations

import queue
import secrets
import struct
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import NamedTuple
from weakref import WeakKeyDictionary, WeakSet

import msgspec
import torch
import torch.distributed as dist
import xxhash

from transfuse._errors import PeerError, PeerTimeout, ProtocolError, TransfuseError, as_utf8, let_go
from transfuse._timeouts import Patience
from transfuse._wire.group import Group
from transfuse._wire.messages import WIRE_VERSION
from transfuse._wire.operations import Operations, Posted
from transfuse._wire.switchboard import Switchboard, Watched

MAGIC = b"TFRC"
#: The first round has a tag of its own: each heal has exactly one such word from each rank to each other.
FIRST_TAG, TAG = 0x5447_0000, 0x5447_0001
#: The most bytes of one word.
MAX_BYTES = 16 << 20
#: One thread waits for the first words of all ranks. After so long, each rank that is late gets a thread of its own.
TOGETHER_SECONDS = 0.05

#: Magic, version, kind, note, the sender's number of this roll call, a value, bytes of the body, digest of the body;
#: and a digest of all this.
_HEAD = struct.Struct("<4sHHHQqQQ")
_SEAL = struct.Struct("<Q")
HEAD_BYTES = _HEAD.size + _SEAL.size
MARK = b"\x01"

#: Kinds of words. Each stage has two: the words themselves, and what everybody has heard. So stages are even.
OPEN, WORKING, FIRST_STAGE, LAST_STAGE = 0, 1, 2, 0xFFFE
#: The note of a rank that was interrupted before it took part in what the others do after the first round.
LEFT = 0xFFFF


class Agreed(NamedTuple):
    """What all ranks who live have heard."""

    #: By rank: what it said. Empty words are left out.
    words: dict[int, bytes]
    #: By rank: why it is taken for lost.
    lost: dict[int, str]


class _View(msgspec.Struct, array_like=True, frozen=True, forbid_unknown_fields=True):
    words: dict[int, bytes]
    lost: dict[int, str]


class _Word(NamedTuple):
    note: int
    value: int
    body: bytes


class _Head(NamedTuple):
    kind: int
    note: int
    nonce: int
    value: int
    length: int
    digest: int


_decode_view = msgspec.msgpack.Decoder(_View).decode

#: By switchboard: threads that were left behind in a wait for a silent rank. They would take a later roll call's words.
_left_behind: WeakKeyDictionary[Switchboard, list[tuple[int, threading.Thread]]] = WeakKeyDictionary()
#: Groups on which words of a roll call may be under way that nobody has listened to, because it was interrupted.
_cut_off: WeakSet[Switchboard] = WeakSet()


class RollCall:
    """One roll call over a group, from :meth:`begin` to :meth:`end`. All ranks make it together."""

    def __init__(self, group: Group, seconds: float) -> None:
        rank, size = group.rank(), group.size()
        if rank is None or size is None or not group.tagged or group.serial:
            accelerator = torch.accelerator.current_accelerator()
            kind = "cuda" if accelerator is None else accelerator.type
            both = f"cpu:gloo,{kind}:{dist.Backend.default_device_backend_map.get(kind, '…')}"
            raise ValueError(
                "heal() needs a group that knows its rank and has a backend with tags for main memory (gloo), beside "
                f"the accelerator's if there is one: make it with init_process_group('{both}'), or pass "
                "dist.new_group(backend='gloo') with device='cpu'; the state's tensors may be on any device"
            )
        self.rank, self.size = rank, size
        self._group, self._seconds = group, seconds
        self._changed = threading.RLock()
        #: Wakes whoever waits. Not a condition: an interrupt in its Python code can leave its lock released twice.
        self._news: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._sending = threading.Lock()
        self._nonce = secrets.randbits(63)
        self._stage = FIRST_STAGE
        #: By rank: its number of this roll call; its words by kind; when it was last heard; why it cannot be heard.
        self._nonces: dict[int, int] = {}
        self._words: dict[int, dict[int, _Word]] = {peer: {} for peer in self.peers}
        self._heard_at: dict[int, float] = {}
        self._gone: dict[int, PeerError] = {}
        self._listening: dict[int, threading.Thread] = {}
        #: First words that are awaited, and sends under way. The backend owns their memory.
        self._posted: dict[int, Posted] = {}
        self._sent: list[object] = []
        #: Ranks that have got this rank's first word. Ranks that were interrupted before they took part.
        self._told: set[int] = set()
        self.left: set[int] = set()
        #: Whether an interrupt now would leave words that nobody listens to.
        self._halfway = False
        self._quiet = 0
        self._speaks = False
        self._has_spoken = False

    @property
    def peers(self) -> list[int]:
        return [rank for rank in range(self.size) if rank != self.rank]

    def begin(self) -> None:
        """Raise if an earlier roll call has left something on the group that this one would hear."""
        switchboard = self._group.switchboard
        until = time.monotonic() + Patience.GOODBYE_SECONDS  # Last words may still be on their way.
        stale = [peer for peer, thread in _left_behind.get(switchboard, ()) if not _ends(thread, until)]
        if stale:
            raise TransfuseError(
                f"an earlier call of heal() on this group has lost ranks {stale}: make a new group, or reconfigure it"
            )
        if switchboard in _cut_off:
            raise TransfuseError(
                "an earlier call of heal() on this group was interrupted: make a new group, or reconfigure it"
            )
        _left_behind.pop(switchboard, None)

    def end(self) -> None:
        """Leave the group to others."""
        self._group.switchboard.watch.before_break_off = None
        until = time.monotonic() + (0.0 if self._gone else Patience.SLICE_SECONDS)
        left = [(peer, thread) for peer, thread in list(self._listening.items()) if not _ends(thread, until)]
        if left:
            self._group.switchboard.pin()
            _left_behind[self._group.switchboard] = left
        if self._halfway or self.left:
            self._cut_off()
        if self._sent:
            # gloo needs the memory of what it has not sent yet.
            self._group.switchboard.keep_last(self._sent)

    def _cut_off(self) -> None:
        self._group.switchboard.pin()
        self._group.switchboard.leave_behind(self)
        _cut_off.add(self._group.switchboard)

    # -------------------------------------------------------------------------------------------------- one round

    def open(self, note: int, value: int) -> dict[int, tuple[int, int]]:
        """Tell all ranks two numbers; return what each has told. Whoever is missing in it is lost."""
        posted, self._halfway = self._posted, True
        started = time.monotonic()
        for peer in self.peers:
            # First all receives, then all sends: whoever hears a rank knows that this rank can hear, too.
            with self._noting(peer):
                posted[peer] = self._operations(peer).post_recv(_empty(HEAD_BYTES), FIRST_TAG)
        for peer in self.peers:
            self._tell(peer, OPEN, note=note, value=value, tag=FIRST_TAG)
            self._told.add(peer)
        self._hear_all(posted)
        self._wait(self.peers, OPEN, started)
        told = {self.rank: (note, value)}
        for peer in self.peers:
            word = self._words[peer].get(OPEN)
            if word is not None:
                told[peer] = word.note, word.value
        self._halfway = False
        return told

    def _hear_all(self, posted: dict[int, Posted]) -> None:
        """Wait for the first words: in one thread, and in one for each rank if some are late."""
        pending = deque(posted)

        def hear() -> None:
            while pending:
                with suppress(IndexError):
                    peer = pending.popleft()
                    self._listening[peer] = threading.current_thread()
                    with self._noting(peer):
                        self._take(peer, self._head(peer, posted[peer].wait()), b"")

        def start() -> threading.Thread:
            thread = threading.Thread(target=hear, name="transfuse-roll-call", daemon=True)
            thread.start()
            return thread

        start().join(TOGETHER_SECONDS)
        for _ in range(len(pending)):
            start()

    # -------------------------------------------------------------------------------------------------- agreement

    def listen(self) -> None:
        """Begin to listen for all words after the first."""
        self._halfway = True
        for peer in self.peers:
            if peer not in self._gone:
                thread = threading.Thread(
                    target=self._hear, args=(peer,), name=f"transfuse-roll-call-{peer}", daemon=True
                )
                self._listening[peer] = thread
                thread.start()
        self._halfway = False

    def agree(self, data: bytes, ranks: Sequence[int], *, last: bool = False) -> Agreed:
        """Tell these ranks some bytes; return what all have said, the same on all who live.

        All of them call this as often as the others, in the same order. ``last``: nothing follows.
        """
        peers = [rank for rank in ranks if rank != self.rank]
        stage, self._stage = (LAST_STAGE if last else self._stage), self._stage + 2
        started = time.monotonic()
        for peer in peers:
            self._tell(peer, stage, data)
        self._wait(peers, stage, started)
        with self._changed:
            words = {peer: word.body for peer in peers if (word := self._word(peer, stage)) is not None}
            lost = {peer: as_utf8(str(self._gone[peer])) for peer in peers if peer not in words}
        words[self.rank] = data
        view = _View({rank: word for rank, word in words.items() if word}, lost)
        told = msgspec.msgpack.encode(view)
        for peer in peers:
            # Also those that this rank takes for lost: they may be only slow, and must hear of it.
            self._tell(peer, stage + 1, told)
        self._wait([peer for peer in peers if peer in words], stage + 1, time.monotonic())
        views = {self.rank: view}
        with self._changed:
            for peer in peers:
                word = self._words[peer].get(stage + 1)
                if word is not None:
                    with suppress(msgspec.MsgspecError):
                        views[peer] = _decode_view(word.body)
        merged = _View({}, {})
        for _, one in sorted(views.items()):
            for rank, said in one.words.items():
                merged.words.setdefault(rank, said)
            for rank, why in one.lost.items():
                merged.lost.setdefault(rank, why)
        return Agreed(merged.words, merged.lost)

    def say_last(self, data: bytes, *, leaves: bool) -> None:
        """Tell all ranks some bytes as in the last stage, and wait for nobody.

        ``leaves``: the others shall not wait for this rank in what they do meanwhile.
        """
        view = msgspec.msgpack.encode(_View({self.rank: data}, {}))
        for peer in self.peers:
            if peer not in self._told:
                self._tell(peer, OPEN, note=LEFT, tag=FIRST_TAG)
            self._tell(peer, LAST_STAGE, data, note=LEFT if leaves else 0)
            self._tell(peer, LAST_STAGE + 1, view)
        self._halfway = self._halfway or leaves

    def _word(self, peer: int, stage: int) -> _Word | None:
        """What a rank has said in this stage, or in a later one: then it has left this one out."""
        later = [kind for kind in self._words[peer] if kind >= stage and kind % 2 == 0]
        return self._words[peer][min(later)] if later else None

    # -------------------------------------------------------------------------------------------- signs of life

    @contextmanager
    def pulsing(self) -> Iterator[None]:
        """While this rank is busy: tell the others from time to time that it lives."""
        stopped = threading.Event()

        def pulse() -> None:
            while not stopped.wait(Patience(self._seconds).pulse(self._seconds)):
                if not self._quiet:
                    for peer in self.peers:
                        self._tell(peer, WORKING)

        thread = threading.Thread(target=pulse, name="transfuse-roll-call-pulse", daemon=True)
        try:
            thread.start()
            yield
        finally:
            stopped.set()
            with suppress(RuntimeError):  # An interrupt came before its start.
                thread.join()

    @contextmanager
    def quiet(self) -> Iterator[None]:
        """While the caller's own code runs, which may never end: no signs of life."""
        self._quiet += 1
        try:
            yield
        finally:
            self._quiet -= 1

    # ----------------------------------------------------------------------------------------------- last words

    def before_break_off(self, last_words: Callable[[str], object]) -> None:
        """Have ``last_words`` called, in a thread, before the watch closes this rank's connections. It gets the reason.

        The watch does that when all conversations of a transfer are overdue. Afterwards nobody can be told anything.
        """
        self._group.switchboard.watch.before_break_off = partial(self._may_break_off, last_words)

    def _may_break_off(self, last_words: Callable[[str], object], overdue: Sequence[Watched]) -> bool:
        if not self._speaks:
            self._speaks = True
            silent = sorted({peer for one in overdue if (peer := getattr(one, "peer", None)) is not None})
            why = f"no progress for {self._seconds:g} s with {'rank' if len(silent) == 1 else 'ranks'} "
            why += ", ".join(map(str, silent))
            speak = partial(self._speak, last_words, why)
            threading.Thread(target=speak, name="transfuse-last-words", daemon=True).start()
        return self._has_spoken

    def _speak(self, last_words: Callable[[str], object], why: str) -> None:
        try:
            last_words(why)
        finally:
            self._has_spoken = True

    # ---------------------------------------------------------------------------------------------------- helpers

    def _operations(self, peer: int) -> Operations:
        operations = Operations(self._group, peer, self._seconds, is_source=False)
        operations.phase = "healing"
        return operations

    def _tell(self, peer: int, kind: int, body: bytes = b"", *, note: int = 0, value: int = 0, tag: int = TAG) -> None:
        """Send a word, and do not wait for it: whoever is gone is noticed by the thread that listens."""
        digest = xxhash.xxh3_64_intdigest(body)
        head = _HEAD.pack(MAGIC, WIRE_VERSION, kind, note, self._nonce, value, len(body), digest)
        head += _SEAL.pack(xxhash.xxh3_64_intdigest(head))
        with self._sending, suppress(Exception):
            for data in (head, body, MARK) if body else (head,):
                tensor = torch.frombuffer(bytearray(data), dtype=torch.uint8)
                self._sent.append((self._group.pg.send([tensor], peer, tag), tensor))

    def _hear(self, peer: int) -> None:
        """Listen to a rank until its last word."""
        operations = self._operations(peer)
        with self._noting(peer):
            while True:
                head = self._head(peer, operations.post_recv(_empty(HEAD_BYTES), TAG).wait())
                body = b""
                if head.length:
                    chunk = operations.post_recv(_empty(head.length), TAG)
                    # The mark proves that the body has arrived; a wait for the body itself might never end.
                    operations.post_recv(_empty(len(MARK)), TAG).wait()
                    body = chunk.wait().numpy().tobytes()
                    if xxhash.xxh3_64_intdigest(body) != head.digest:
                        raise ProtocolError(peer, f"rank {peer} sent a damaged word while healing")
                if head.nonce == self._nonces.get(peer):  # Otherwise it is left from an earlier roll call.
                    self._take(peer, head, body)
                    if head.kind == LAST_STAGE + 1:
                        return

    def _head(self, peer: int, tensor: torch.Tensor) -> _Head:
        data = tensor.numpy().tobytes()
        (seal,) = _SEAL.unpack_from(data, _HEAD.size)
        magic, version, *rest = _HEAD.unpack_from(data)
        head = _Head(*rest)
        if magic != MAGIC or seal != xxhash.xxh3_64_intdigest(data[: _HEAD.size]) or head.length > MAX_BYTES:
            raise ProtocolError(peer, f"rank {peer} sent something else than a word of heal()")
        if version != WIRE_VERSION:
            raise ProtocolError(
                peer, f"rank {peer} speaks version {version} of the wire, this rank {WIRE_VERSION}: all ranks need one"
            )
        return head

    def _take(self, peer: int, head: _Head, body: bytes) -> None:
        with self._changed:
            self._heard_at[peer] = time.monotonic()
            if head.kind == OPEN:
                self._nonces[peer] = head.nonce
            if head.note == LEFT:
                self.left.add(peer)
            if head.kind != WORKING:
                self._words[peer].setdefault(head.kind, _Word(head.note, head.value, body))
            self._news.put(None)

    @contextmanager
    def _noting(self, peer: int) -> Iterator[None]:
        """Note that a rank cannot be heard any more."""
        try:
            with torch.inference_mode(False):
                yield
        except Exception as error:
            let_go(error)
            with self._changed:
                if isinstance(error, PeerError):
                    self._gone.setdefault(peer, error)
                else:
                    self._gone.setdefault(peer, ProtocolError(peer, f"rank {peer}: {error}"))
                self._news.put(None)

    def _wait(self, peers: Sequence[int], kind: int, started: float) -> None:
        """Wait until these ranks have said this word, are gone, or have been silent for the timeout."""
        while True:
            now, soonest = time.monotonic(), float("inf")
            with self._changed:
                for peer in peers:
                    if peer in self._gone or self._has_said(peer, kind):
                        continue
                    until = max(started, self._heard_at.get(peer, 0.0)) + self._seconds
                    if until <= now:
                        self._gone[peer] = PeerTimeout(peer, "healing", self._seconds)
                    else:
                        soonest = min(soonest, until)
            if soonest == float("inf"):
                return
            with suppress(queue.Empty):
                self._news.get(timeout=min(soonest - now, Patience.SLICE_SECONDS))

    def _has_said(self, peer: int, kind: int) -> bool:
        if kind == OPEN:
            return OPEN in self._words[peer]
        return any(word >= kind for word in self._words[peer])


def _empty(count: int) -> torch.Tensor:
    return torch.empty(count, dtype=torch.uint8)


def _ends(thread: threading.Thread, until: float) -> bool:
    """Whether a thread has ended, or does so by then: its peer's last word has just arrived."""
    with suppress(RuntimeError):  # An interrupt came before its start.
        thread.join(max(0.0, until - time.monotonic()))
    return not thread.is_alive()
