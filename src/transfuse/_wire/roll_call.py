"""How all ranks of a group agree: they tell each other a few bytes, and all who live know who is lost.

Every rank tells every other one, by ``send`` and ``recv`` of the group. So a dead rank is noticed at once and by all,
and a frozen one is known by name. (A collective that loses a member hangs or fails on others than its neighbours too,
and says nothing about who it was.) :class:`RollCall` is that, for one call that all ranks make:

    open(data)       one round: a few bytes of each rank
    agree(data)      two rounds: first everybody's bytes; then everybody's list of who is lost, and the words of those
                     who may be. One rank may die at any moment of it: all others return the same.
    gather(data)     the same, for as many bytes as one likes. If a rank is lost, all others raise one error.

:class:`Agreement` gathers for calls that also work where there is nothing but an accelerator's backend. There it is a
collective, which may hang until the timeout: such backends have no tags, and cannot listen to all ranks at once.

A wait of gloo that expires closes all connections of its rank. So none expires here: each peer has a thread that
listens, and a thread whose peer is silent is left behind. For the same reason the group's watch asks this roll call
before it breaks off a transfer (:meth:`RollCall.before_break_off`): the last words go out first.
"""

from __future__ import annotations

import queue
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from datetime import timedelta
from functools import partial
from typing import Any, NamedTuple, TypeVar
from weakref import WeakKeyDictionary, WeakSet

import msgspec
import torch
import torch.distributed as dist

from transfuse._errors import PeerError, PeerLost, PeerTimeout, ProtocolError, TransfuseError, as_utf8, let_go
from transfuse._limits import Limits
from transfuse._timeouts import Patience
from transfuse._tuning import ROLL_CALL_MAX_BYTES, ROLL_CALL_TOGETHER_SECONDS
from transfuse._wire import messages
from transfuse._wire.group import CPU, Group
from transfuse._wire.messages import BLOCK_BYTES, HEADER_BYTES, Header, Message
from transfuse._wire.operations import Operations, Posted
from transfuse._wire.switchboard import Switchboard, Watched

#: The first round has a tag of its own: each roll call has exactly one such word from each rank to each other.
FIRST_TAG, TAG = 0x5447_0002, 0x5447_0003
#: How much of an error's text a rank that leaves tells the others.
MOST_CHARACTERS = 4000

#: Stages of words. Each agreement has two: the words themselves, and what everybody has heard. So stages are even.
OPEN, FIRST_STAGE, LAST_STAGE = 0, 2, 0xFFFE
#: Beside the stage: this rank was interrupted before it took part in what the others do after the first round.
LEFT = 1 << 16

T = TypeVar("T")


class RoundResult(NamedTuple):
    """What all ranks who live have heard."""

    #: By rank: what it said. Empty words are left out.
    words: dict[int, bytes]
    #: By rank: why it is taken for lost.
    lost: dict[int, str]


class Failure(msgspec.Struct, array_like=True, frozen=True, forbid_unknown_fields=True):
    """Why a rank cannot go on, as it tells the others. They decide by the kind, and quote the text."""

    #: The class of its error; empty: it has none.
    kind: str = ""
    text: str = ""

    @classmethod
    def of(cls, error: BaseException, text: str | None = None) -> Failure:
        """By default the text begins with the kind."""
        kind = type(error).__name__
        return Failure(kind, as_utf8(f"{kind}: {error}" if text is None else text))


class _RankView(msgspec.Struct, array_like=True, frozen=True, forbid_unknown_fields=True):
    words: dict[int, bytes]
    lost: dict[int, str]


class _First(msgspec.Struct, array_like=True, frozen=True, forbid_unknown_fields=True):
    #: What the rank is doing: that must be the same everywhere.
    phase: str
    data: bytes


_decode_first = msgspec.msgpack.Decoder(_First).decode
_decode_view = msgspec.msgpack.Decoder(_RankView).decode

#: By switchboard: threads that were left behind in a wait for a silent rank. They would take a later roll call's words.
_left_behind: WeakKeyDictionary[Switchboard, list[tuple[int, threading.Thread]]] = WeakKeyDictionary()
#: Groups on which words of a roll call may be under way that nobody has listened to, because it was interrupted.
_cut_off: WeakSet[Switchboard] = WeakSet()


class RollCall:
    """One roll call over a group, from :meth:`begin` to :meth:`end`. All ranks make it together."""

    def __init__(self, group: Group, seconds: float, phase: str) -> None:
        rank, size = group.rank(), group.size()
        if not can_call(group) or rank is None or size is None:
            accelerator = torch.accelerator.current_accelerator()
            kind = "cuda" if accelerator is None else accelerator.type
            both = f"cpu:gloo,{kind}:{dist.Backend.default_device_backend_map.get(kind, '…')}"
            raise ValueError(
                "heal() needs a group that knows its rank and has a backend with tags for main memory (gloo), beside "
                f"the accelerator's if there is one: make it with init_process_group('{both}'), or pass "
                "dist.new_group(backend='gloo') with device='cpu'; the state's tensors may be on any device"
            )
        self.rank, self.size = rank, size
        self._group, self._seconds, self._phase = group, seconds, phase
        self._chunk_bytes = Limits.from_environment().chunk_bytes
        self._changed = threading.RLock()
        #: Wakes waiting threads. Not a condition: an interrupt in its Python code can leave its lock released twice.
        self._news: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._sending = threading.Lock()
        #: By rank: what is sent to it. The backend owns the memory of sends under way.
        self._speaking = {peer: self._operations(peer) for peer in self.peers}
        self._nonce = secrets.randbits(63)
        self._stage = FIRST_STAGE
        #: By rank: its number of this roll call; its words by stage; when it was last heard; why it cannot be heard.
        self._nonces: dict[int, int] = {}
        self._words: dict[int, dict[int, bytes]] = {peer: {} for peer in self.peers}
        self._heard_at: dict[int, float] = {}
        self._gone: dict[int, PeerError] = {}
        self._listening: dict[int, threading.Thread] = {}
        #: First words that are awaited. The backend owns their memory.
        self._posted: dict[int, Posted] = {}
        #: Ranks that have got this rank's first word. Ranks that were interrupted before they took part.
        self._told: set[int] = set()
        self.left: set[int] = set()
        #: Whether an interrupt now would leave words that nobody listens to.
        self._halfway = False
        self._listens = False
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
                f"an earlier call on this group (heal(), keep(), …) has lost ranks {stale}: make a new group, or "
                "reconfigure it"
            )
        if switchboard in _cut_off:
            raise TransfuseError(
                "an earlier call on this group (heal(), keep(), …) was interrupted: make a new group, or reconfigure it"
            )
        _left_behind.pop(switchboard, None)

    def end(self) -> None:
        """Leave the group to others."""
        self._group.switchboard.watch.before_break_off = None
        now, last = time.monotonic(), LAST_STAGE + 1 if self._listens else OPEN
        left = []
        for peer, thread in list(self._listening.items()):
            # A thread that has heard the last word is about to end.
            patience = Patience.GOODBYE_SECONDS if last in self._words[peer] else Patience.SLICE_SECONDS
            if not _ends(thread, now + (0.0 if peer in self._gone else patience)):
                left.append((peer, thread))
        if left:
            self._group.switchboard.pin()
            _left_behind[self._group.switchboard] = left
        if self._halfway or self.left:
            self._cut_off()
        # gloo needs the memory of what it has not sent yet.
        posted = [(one.work, one.tensor) for speaking in self._speaking.values() for one in speaking.outstanding]
        self._group.switchboard.keep_last(posted)
        for speaking in self._speaking.values():
            speaking.outstanding.clear()  # They refer to each other.

    def _cut_off(self) -> None:
        self._group.switchboard.pin()
        self._group.switchboard.leave_behind(self)
        _cut_off.add(self._group.switchboard)

    # -------------------------------------------------------------------------------------------------- one round

    def open(self, data: bytes) -> dict[int, bytes]:
        """Tell all ranks a few bytes; return what each has told. Ranks that are absent from the result are lost."""
        posted, self._halfway = self._posted, True
        started = time.monotonic()
        for peer in self.peers:
            # First all receives, then all sends: a rank that hears another knows that the other can hear, too.
            with self._noting(peer):
                operations = self._operations(peer)
                posted[peer] = operations.post_recv(operations.empty(BLOCK_BYTES), FIRST_TAG)
        first = msgspec.msgpack.encode(_First(self._phase, data))
        for peer in self.peers:
            self._tell([peer], OPEN, first)
            self._told.add(peer)
        self._hear_all(posted)
        self._wait(self.peers, OPEN, started)
        told = {self.rank: data} | {peer: words[OPEN] for peer, words in self._words.items() if OPEN in words}
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
                        block = posted[peer].wait()
                        self._take(peer, *self._read(self._operations(peer), block))

        def start() -> threading.Thread:
            thread = threading.Thread(target=hear, name="transfuse-roll-call", daemon=True)
            thread.start()
            return thread

        start().join(ROLL_CALL_TOGETHER_SECONDS)
        for _ in range(len(pending)):
            start()

    # -------------------------------------------------------------------------------------------------- agreement

    def listen(self) -> None:
        """Begin to listen for all words after the first."""
        self._halfway = self._listens = True
        for peer in self.peers:
            if peer not in self._gone:
                thread = threading.Thread(
                    target=self._hear, args=(peer,), name=f"transfuse-roll-call-{peer}", daemon=True
                )
                self._listening[peer] = thread
                thread.start()
        self._halfway = False

    def agree(self, data: bytes, ranks: Iterable[int], *, last: bool = False, pass_on: bool = True) -> RoundResult:
        """Tell these ranks some bytes; return what all have said, the same on all who live.

        All of them call this as often as the others, in the same order. ``last``: nothing follows. Without ``pass_on``
        the words of ranks that may be lost are not told again, and a rank that has left counts as lost.
        """
        peers = [rank for rank in ranks if rank != self.rank]
        stage, self._stage = (LAST_STAGE if last else self._stage), self._stage + 2
        started = time.monotonic()
        self._tell(peers, stage, data)
        self._wait(peers, stage, started)
        with self._changed:
            said = {peer: at for peer in peers if (at := self._said(peer, stage)) is not None}
            words = {peer: self._words[peer][at] for peer, at in said.items()}
            lost = {peer: as_utf8(str(self._gone[peer])) for peer in peers if peer not in words}
        if not pass_on:
            early = [peer for peer, at in said.items() if at != stage]
            lost |= {peer: words[peer].decode(errors="replace") or "it has ended this call" for peer in early}
        words[self.rank] = data
        view = _RankView({rank: word for rank, word in words.items() if word and pass_on}, lost)
        # Also those that this rank takes for lost: they may be only slow, and must hear of it.
        self._tell(peers, stage + 1, msgspec.msgpack.encode(view))
        self._wait([peer for peer in peers if peer in words], stage + 1, time.monotonic())
        views = {self.rank: view}
        with self._changed:
            for peer in peers:
                told = self._words[peer].get(stage + 1)
                if told is not None:
                    with suppress(msgspec.MsgspecError):
                        views[peer] = _decode_view(told)
        merged = RoundResult({} if pass_on else words, {})
        for _, one in sorted(views.items()):
            for rank, word in one.words.items():
                merged.words.setdefault(rank, word)
            for rank, why in one.lost.items():
                merged.lost.setdefault(rank, why)
        return merged

    def gather(self, data: bytes, what: str) -> list[bytes]:
        """What every rank tells, in the order of ranks. If one is lost or has left, all others raise the same error."""
        agreed = self.agree(data, range(self.size), pass_on=False)
        if agreed.lost:
            raise lost_error(what, agreed.lost)
        return [agreed.words[rank] for rank in range(self.size)]

    def say_last(self, data: bytes, *, leaves: bool = False) -> None:
        """Tell all ranks some bytes as in the last stage, and wait for nobody.

        ``leaves``: the others shall not wait for this rank in what they do meanwhile.
        """
        view = msgspec.msgpack.encode(_RankView({self.rank: data}, {}))
        untold = [peer for peer in self.peers if peer not in self._told]
        self._tell(untold, OPEN | LEFT, msgspec.msgpack.encode(_First(self._phase, b"")))
        self._tell(self.peers, LAST_STAGE | (LEFT if leaves else 0), data)
        self._tell(self.peers, LAST_STAGE + 1, view)
        self._halfway = self._halfway or leaves

    def close(self, error: BaseException | None) -> None:
        """The call is over on this rank: tell the others, and wait until it is over on them, too, unless interrupted.

        A rank that still waits for a word of this rank gets the error's text, and takes this rank for lost.
        """
        text = "" if error is None else as_utf8(f"{type(error).__name__}: {error}"[:MOST_CHARACTERS])
        self.say_last(text.encode())
        if error is None or isinstance(error, Exception):
            self._wait(self.peers, LAST_STAGE + 1, time.monotonic())

    def _said(self, peer: int, stage: int) -> int | None:
        """In which stage a rank has said its word of this one: in a later one, if it has left this one out."""
        return min((at for at in self._words[peer] if at >= stage and at % 2 == 0), default=None)

    # -------------------------------------------------------------------------------------------- signs of life

    @contextmanager
    def pulsing(self) -> Iterator[None]:
        """While this rank is busy: tell the others from time to time that it lives."""
        stopped = threading.Event()

        def pulse() -> None:
            while not stopped.wait(Patience(self._seconds).pulse(self._seconds)):
                if not self._quiet:
                    self._tell(self.peers)

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
        operations.phase, operations.tag = self._phase, TAG
        return operations

    def _tell(self, peers: Sequence[int], stage: int | None = None, body: bytes = b"") -> None:
        """Send a word, and do not wait for it: the thread that listens notices ranks that are gone.

        Without a stage: a sign of life.
        """
        if not peers:
            return
        kind = Message.WORKING if stage is None else Message.WORD
        tag = FIRST_TAG if stage in (OPEN, OPEN | LEFT) else TAG
        speaking = self._speaking[peers[0]]
        pieces = list(speaking.pieces(kind, self._nonce, stage or 0, body, self._chunk_bytes))
        with self._sending:
            for peer in peers:
                with suppress(Exception):
                    for piece in pieces:
                        self._speaking[peer].post_send(piece, tag)

    def _hear(self, peer: int) -> None:
        """Listen to a rank until its last word."""
        operations = self._operations(peer)
        with self._noting(peer):
            while True:
                header, body = self._read(operations, operations.post_recv(operations.empty(BLOCK_BYTES)).wait())
                if header.transfer == self._nonces.get(peer):  # Otherwise it is left from an earlier roll call.
                    self._take(peer, header, body)
                    if header.note == LAST_STAGE + 1:
                        return

    def _read(self, operations: Operations, block: torch.Tensor) -> tuple[Header, bytes]:
        data = block.cpu().numpy().tobytes()
        try:
            header = messages.open_header(data[:HEADER_BYTES])
            if header.kind not in (Message.WORD, Message.WORKING) or header.length > ROLL_CALL_MAX_BYTES:
                raise ValueError(f"{header.kind.name} of {header.length} bytes where a word was due")
            body = bytearray(data[HEADER_BYTES:][: header.length])
            while len(body) < header.length:
                body += operations.recv_chunk(min(self._chunk_bytes, header.length - len(body)))
            messages.verify(header, body)
        except ValueError as error:
            peer = operations.peer
            raise ProtocolError(peer, f"rank {peer}, while {self._phase}: {error}") from error
        return header, bytes(body)

    def _take(self, peer: int, header: Header, body: bytes) -> None:
        stage = header.note & ~LEFT
        if stage == OPEN and header.kind is Message.WORD:
            first = _decode_first(body)
            if first.phase != self._phase:
                raise ProtocolError(peer, f"rank {peer} is {first.phase}, and rank {self.rank} is {self._phase}")
            body = first.data
        with self._changed:
            self._heard_at[peer] = time.monotonic()
            if header.note & LEFT:
                self.left.add(peer)
            if header.kind is Message.WORD:
                self._nonces.setdefault(peer, header.transfer)
                self._words[peer].setdefault(stage, body)
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

    def _wait(self, peers: Sequence[int], stage: int, started: float) -> None:
        """Wait until these ranks have said this word, are gone, or have been silent for the timeout."""
        while True:
            now, soonest = time.monotonic(), float("inf")
            with self._changed:
                for peer in peers:
                    if peer in self._gone or self._has_said(peer, stage):
                        continue
                    until = max(started, self._heard_at.get(peer, 0.0)) + self._seconds
                    if until <= now:
                        self._gone[peer] = PeerTimeout(peer, self._phase, self._seconds)
                    else:
                        soonest = min(soonest, until)
            if soonest == float("inf"):
                return
            with suppress(queue.Empty):
                self._news.get(timeout=min(soonest - now, Patience.SLICE_SECONDS))

    def _has_said(self, peer: int, stage: int) -> bool:
        return stage in self._words[peer] or (stage != OPEN and any(at > stage for at in self._words[peer]))


def can_call(group: Group) -> bool:
    """Whether the ranks of a group can make a roll call."""
    return group.rank() is not None and group.size() is not None and group.tagged and not group.serial


def lost_error(what: str, lost: Mapping[int, str], *more: str) -> PeerLost:
    """The error of all who live, made of nothing but what all of them have heard."""
    lines = [f"rank {rank} is lost: {why}" for rank, why in sorted(lost.items())]
    return PeerLost(min(lost), "\n  ".join([f"{what} failed, on all ranks:", *lines, *more]))


def _ends(thread: threading.Thread, until: float) -> bool:
    """Whether a thread has ended, or does so by then: its peer's last word has just arrived."""
    with suppress(RuntimeError):  # An interrupt came before its start.
        thread.join(max(0.0, until - time.monotonic()))
    return not thread.is_alive()


class Agreement:
    """What all ranks of a group agree on, in calls that every rank makes in the same order.

    Without a group it is that of a job of one process.
    """

    def __init__(self, group: Any, seconds: float) -> None:
        self._group, self.seconds = group, seconds
        self.rank, self.size = self._ranks() if self._has_group() else (0, 1)
        self._roll: RollCall | None = None

    def check_same_ranks(self) -> None:
        """Refuse to go on in a group that torch has reconfigured in place, with another rank or size."""
        if not self._has_group():
            return
        try:
            rank, size = self._ranks()
        except (RuntimeError, ValueError):
            return  # The group is gone. The next call that needs it will say so.
        if (rank, size) != (self.rank, self.size):
            raise TransfuseError(
                f"the group was reconfigured: this was rank {self.rank} of {self.size}, and is rank {rank} of {size}; "
                "detach() from the keeper, and call keep() again on all ranks"
            )

    def together(self, phase: str, work: Callable[[], T]) -> T:
        """Do something in which ranks gather. A rank that raises is lost to the others, who are told why.

        Not a context manager: a handler that raises where Python begins its exit would leave the call under way.
        """
        self.check_same_ranks()
        group = None if self.size == 1 or self._roll is not None else _tagged(self._pg)
        if group is None:
            return work()
        roll = RollCall(group, self.seconds, phase)
        roll.begin()
        try:
            roll.open(b"")
            roll.listen()
            self._roll = roll
            with roll.pulsing():
                result = work()
                roll.close(None)
            return result
        except BaseException as error:
            roll.close(error)
            raise
        finally:
            self._roll = None
            roll.end()

    def quiet(self) -> AbstractContextManager[None]:
        """While the caller's own code runs, which may never end: the others do not wait without end."""
        return nullcontext() if self._roll is None else self._roll.quiet()

    def gather(self, data: bytes, what: str) -> list[bytes]:
        """What every rank has given, in the order of ranks; or the same error on all ranks that live."""
        self.check_same_ranks()
        if self.size == 1:
            return [data]
        if self._roll is not None:
            return self._roll.gather(data, what)
        if _tagged(self._pg) is not None:
            return self.together(what, lambda: self.gather(data, what))
        return self._gather_collectively(data, what)

    def _has_group(self) -> bool:
        return self._group is not None or dist.is_initialized()

    @property
    def _pg(self) -> Any:
        return dist.group.WORLD if self._group is None else self._group

    def _ranks(self) -> tuple[int, int]:
        """This rank, and how many there are."""
        group = _tagged(self._pg)
        if group is None:
            return dist.get_rank(self._group), dist.get_world_size(self._group)
        return group.rank() or 0, group.size() or 1

    # ------------------------------------------------------------------------------- with an accelerator's backend only

    def _gather_collectively(self, data: bytes, what: str) -> list[bytes]:
        lengths = self._all_gather(torch.tensor([len(data)], dtype=torch.int64), what)
        sizes = [int(one) for one in lengths]
        longest = max(sizes)
        if min(sizes) < 0 or longest > ROLL_CALL_MAX_BYTES:
            raise TransfuseError(f"{what}: a rank announced {longest} bytes, at most {ROLL_CALL_MAX_BYTES} are due")
        mine = torch.zeros(max(longest, 1), dtype=torch.uint8)
        if data:
            mine[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        rows = self._all_gather(mine, what)
        return [row[:size].numpy().tobytes() for row, size in zip(rows, sizes, strict=True)]

    def _all_gather(self, mine: torch.Tensor, what: str) -> list[torch.Tensor]:
        kinds = [torch.device(kind) for kind in getattr(self._pg, "_device_types", ())]
        mine = mine.to(CPU if not kinds or CPU in kinds else kinds[0])
        rows = [torch.empty_like(mine) for _ in range(self.size)]
        try:
            work = dist.all_gather(rows, mine, group=self._group, async_op=True)
            assert work is not None
            work.wait(timedelta(seconds=self.seconds))
        except RuntimeError as error:
            text = str(error).split("\n")[0]
            others = f"does rank {1 - self.rank}" if self.size == 2 else "do all other ranks"
            raise TransfuseError(
                f"{what}: the ranks could not agree within {self.seconds:g} s, or one was lost: {others} call this "
                f"too? is timeout= long enough? ({text})"
            ) from error
        return [row.cpu() for row in rows]


def _tagged(pg: Any) -> Group | None:
    """The group, if its ranks can make a roll call."""
    with suppress(ValueError):  # It has no backend for main memory.
        group = Group(pg, CPU)
        return group if can_call(group) else None
    return None
