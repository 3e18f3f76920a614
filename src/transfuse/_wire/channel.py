"""A channel: one conversation with one peer, over a stream or over a process group.

Over a group, messages and parcels travel by its ``send`` and ``recv``. The head of :mod:`.group` lists what backends do
and do not do, and how a conversation is built because of that. If the conversation has a stream, all messages travel
there, and so do parcels in main memory; parcels on an accelerator travel over the group.
"""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from typing import TypeVar

import torch

from transfuse._errors import (
    PeerLost,
    PeerRefused,
    ProtocolError,
    SourceMutated,
    StepMismatch,
    TransfuseError,
    as_utf8,
)
from transfuse._limits import Limits
from transfuse._memory import streams
from transfuse._timeouts import Patience
from transfuse._wire import messages
from transfuse._wire.group import CPU, OFFER_TAG, Group, valid_tag
from transfuse._wire.messages import BLOCK_BYTES, HEADER_BYTES, Header, Intent, Message
from transfuse._wire.operations import Operations, Posted
from transfuse._wire.pool import Pool
from transfuse._wire.stream import Part, Stream
from transfuse._wire.switchboard import PendingOffer, Waits, Watch, stream_watch


def bytes_in(tensor: torch.Tensor) -> bytes:
    """The bytes of a message."""
    host = tensor.cpu()
    return ctypes.string_at(host.data_ptr(), host.numel())


Body = TypeVar(
    "Body",
    messages.Offer,
    messages.Want,
    messages.Refusal,
    messages.Verdict,
    messages.Agreed,
    messages.More,
    messages.HeldParcels,
    messages.Digests,
    messages.Meet,
    messages.Met,
)


class _Due:
    """``count`` bytes of a record that are still to be read from the stream."""

    def __init__(self, channel: Channel, count: int) -> None:
        self._channel, self._count = channel, count

    def wait(self) -> torch.Tensor:
        data = torch.empty(self._count, dtype=torch.uint8)
        if self._count:
            self._channel.read(data)
        return data


class Channel(Operations):
    """One conversation with one peer: its messages, its records, its signs of life, and its queue.

    One thread at a time uses a channel, inside ``with channel:``.
    """

    def __init__(self, group: Group, peer: int, timeout: float, limits: Limits, *, is_source: bool = False) -> None:
        super().__init__(group, peer, timeout, is_source=is_source)
        self.limits = limits
        self.transfer = 0
        #: The most bytes of progress that a working peer can have.
        self.most_bytes = 0
        #: Called with the bytes that a working peer says it has so far.
        self.on_working: Callable[[int], object] | None = None
        #: When the last message from the peer arrived.
        self.heard_at = time.monotonic()
        self._refused = False
        #: Why the peer has closed the stream, if it has said so and this end noticed when it wrote.
        self._last_words: messages.Refusal | None = None
        self._pending_offer: PendingOffer | None = None
        self._unanswered: list[Posted] = []
        self._turn = threading.Lock()
        self._so_far: Callable[[], int] | None = None
        self._pulse_at = 0.0
        self._streams = streams.inherit()
        self._queue: ExitStack | None = None
        #: The group over which the two ends met.
        self.home = group
        find: Callable[[int], Stream | None] = getattr(group.pg, "stream_to", lambda _: None)
        #: The stream over which this conversation is held; None if it is held over a process group.
        self.stream = find(peer)
        self._has_moved = False

    def silent_seconds(self) -> float:
        """How long this end has been waiting, and nothing has come from the peer; 0 if it does not wait."""
        since = self.waiting_since
        if since is None:
            return 0.0
        return time.monotonic() - max(since, self.heard_at, 0.0 if self.stream is None else self.stream.heard_at)

    @property
    def streams_parcels(self) -> bool:
        """Whether parcels, too, travel over the stream."""
        return self.stream is not None and self.device == CPU

    def move_to(self, stream: Stream) -> None:
        """Go on over this stream. It belongs to this conversation from now on."""
        try:
            self._let_go()  # The last word over the group. If the stream breaks at once, it must still arrive.
        except BaseException:
            stream.close()
            raise
        self._watch.remove(self)
        stream.set_patience(self.timeout)
        self.group, self.stream, self._has_moved = self.home.beside(stream), stream, True
        self._watch.add(self)
        if self.streams_parcels:
            self.turn.close()

    def leave_stream(self, pool: Pool | None) -> None:
        """Keep the stream to which this conversation has moved for the next one; without a pool, close it."""
        moved, self._has_moved = self._has_moved, False
        if self.stream is None or not moved:
            return
        if pool is not None and not self.broken:
            pool.keep(self.peer, self.stream, is_source=self.is_source)
            return
        if not self.broken:
            self.stream.say_goodbye(Patience.GOODBYE_SECONDS)
        self.stream.close()

    @property
    def _watch(self) -> Watch:
        return self.group.switchboard.watch if self.stream is None else stream_watch()

    @contextmanager
    def queue(self) -> Iterator[None]:
        """Reserve this rank's order of operations on the accelerator, while the peer hears signs of life.

        The watch takes the queue away from a conversation whose peer falls silent, so that others can go on.
        """
        held = ExitStack()
        with self.holding_turn(), self.resting():
            held.enter_context(self.group.queue(self.peer))
        self.heard_at = time.monotonic()
        with self._turn:
            if not self.broken:
                self._queue = held
        if self._queue is None:
            held.close()
            raise PeerLost(self.peer, f"rank {self.peer} was abandoned while this rank was busy with others")
        try:
            yield
        finally:
            self._release_queue()

    def _release_queue(self) -> None:
        """Release the queue. Operations that the peer has not answered block it from then on."""
        with self._turn:
            held, self._queue = self._queue, None
        if held is not None:
            # First, so that the next one on this queue finds them.
            self.group.leave_stuck(self.peer, self.unanswered())
            held.close()

    def _give_up_queue(self) -> None:
        """Release the queue if this end waits for a message, and the peer has been silent for too long.

        From then on this conversation posts nothing on the accelerator: others do, and parcels would be swapped.
        """
        if self._queue is not None and self.silent_seconds() > Patience(self.timeout).silent_source(needed=False):
            self._release_queue()

    def may_post(self) -> bool:
        return self._queue is not None or not self.agrees

    def __enter__(self) -> Channel:
        self._streams = streams.inherit()
        self._watch.add(self)
        return self

    def __exit__(self, *_: object) -> None:
        """Leave only when the backend no longer owns any memory, whether or not the operations succeed."""
        try:
            # On a closed connection nobody writes any more, and some waits would never end.
            while self.outstanding and not self.broken:
                with suppress(TransfuseError):
                    self.outstanding[0].wait()
        finally:
            self.leave_stuck()
            if self.agrees:
                self.group.is_stuck(self.peer)  # Forgets operations that have completed since.
            # Break the reference cycles through this channel now, so that its memory does not wait for the garbage
            # collector.
            switchboard = self.group.switchboard
            if self.closed or not switchboard.is_left_behind(self):
                self.outstanding.clear()
                self._unanswered.clear()
            if not self.outstanding:
                switchboard.forget(self)
            self.on_working = None
            self._watch.remove(self)

    def abandon(self) -> None:
        """Abandon a silent peer, from another thread. On a stream, nothing is read or written any more after this call.

        On a process group the thread that waits for the peer stays in its wait until the peer goes on or is gone. So
        all memory in flight must be staging.
        """
        self.broken = True  # First: the waiting thread must not go on with an offer that arrives just now.
        self.park()
        if self.stream is None:
            self.group.switchboard.leave_behind(self)
        else:
            self.stream.stop()
        self._watch.remove(self)
        self._release_queue()

    def park(self, cause: BaseException | None = None) -> None:
        """Leave the waiting thread behind, from another thread, so that the caller can go on.

        If that thread waits for the peer's next offer, the next conversation with the peer gets the offer. If there is
        none by then, the thread goes on, to tell the peer why the caller has left. On a stream, this call tells the
        peer ``cause``, and the thread returns at once.
        """
        switchboard = self.group.switchboard
        end: Callable[[int], object] | None = getattr(self.stream or self.group.pg, "cut", None)
        if end is not None:
            if cause is not None:
                self.say_why(cause)
            end(self.peer)
            return
        switchboard.pin()
        if self._pending_offer is not None:
            switchboard.park(self._pending_offer)

    def say_why(self, cause: BaseException) -> None:
        """Tell the peer why this end leaves, from another thread: on a stream, if that takes no time."""
        if self.stream is not None and self.stream.can_write():
            self.refuse(cause)

    def probe(self) -> None:
        """While a receiver waits for parcels on the accelerator: a sign of life, which fails if the peer is gone."""
        if not self.is_source and self.agrees:
            with self._turn:
                self.send(Message.WORKING, note=0 if self._so_far is None else self._so_far())

    # --------------------------------------------------------------------------------------------------- messages

    def send(self, kind: Message, body: bytes | torch.Tensor = b"", *, note: int = 0, tag: int | None = None) -> None:
        """Send a message. The peer's answer will prove that it has arrived. ``tag`` is for the header of an offer."""
        if self.stream is not None:
            plain = body if isinstance(body, bytes) else bytes_in(body)
            self.write(messages.seal(kind, self.transfer, note, plain), plain)
            return
        for piece in self.pieces(kind, self.transfer, note, body, self.limits.chunk_bytes):
            self._unanswered.append(self.post_send(piece, tag))
            tag = None

    def settle(self) -> None:
        """Wait until all messages have been sent: at once after an answer, otherwise when the peer receives them."""
        for posted in self._unanswered:
            posted.wait()
        self._unanswered.clear()

    def send_last(self, kind: Message) -> None:
        """Send a message without a body that nobody answers, and do not wait until it has been sent. Not on streams.

        If the peer dies just now, gloo forgets the send, and a wait for it would never end. The peer waits for this
        message already (:meth:`ask_last`), so gloo sends it at once, or after what it sends for other conversations on
        this group. Its memory is kept for that long.
        """
        if self.stream is not None:
            return
        self.send(kind)
        self._let_go()

    def _let_go(self) -> None:
        """End with messages that the peer waits for. On gloo, do not wait for them, as in :meth:`send_last`."""
        if not self.group.shares_fate:
            self.settle()
        for posted in self._unanswered:
            self.outstanding.remove(posted)
            self.group.switchboard.keep_last((posted.work, posted.tensor))
        self._unanswered.clear()

    def ask_last(self, kind: Message, body: bytes, answer: Message) -> None:
        """Send the last message, and wait for the answer, which the peer sends by :meth:`send_last`.

        On a stream nobody answers: what the kernel has arrives if the peer lives.
        """
        if self.stream is not None:
            self.send(kind, body)
            return
        early = self.post_recv(self.empty(BLOCK_BYTES)) if self.group.shares_fate else None
        self.send(kind, body)
        self.expect(answer, early=early)

    def expect(self, *kinds: Message, tag: int | None = None, early: Posted | None = None) -> tuple[Header, bytearray]:
        """Receive the next message, which must be one of ``kinds``. Raise if the peer refuses.

        ``early``: a receive for its first block that has been posted already.
        """
        signs = 0
        while True:
            if early is not None:
                data, early = bytes(early.wait().cpu().numpy()), None
            else:
                moved = tag is None or self.stream is not None
                data = self._recv_start() if moved else self._hear_offer(tag or OFFER_TAG)
            header = self._open(data[:HEADER_BYTES])
            if header.kind is not Message.WORKING:
                break
            # Signs of life are counted, and only bytes earn more of them, so no peer is waited for without end.
            signs += 1
            arrived = min(header.note, self.most_bytes)
            if signs >= self.limits.max_working_records + arrived // self.limits.min_parcel_bytes:
                raise ProtocolError(
                    self.peer,
                    f"rank {self.peer} sent {signs} signs of life without a message while {self.phase}, with only "
                    f"{arrived} bytes of progress",
                )
            if self.on_working is not None:
                self.on_working(header.note)
        if tag is not None:
            # The first message of a transfer brings the transfer's id and tag.
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
        body = bytearray(data[HEADER_BYTES:][: header.length])
        while len(body) < header.length:
            # Receive chunk by chunk: an announced length alone must not allocate memory.
            count = min(self.limits.chunk_bytes, header.length - len(body))
            body += self.recv_chunk(count) if self.stream is None else self._recv_bytes(count)
        self._verify(header, body)
        if header.kind is Message.REFUSAL:
            self._refused = True  # The peer has left, so there is nobody to refuse to.
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
            self._settle_or_leave()

    def _settle_or_leave(self) -> None:
        """Wait until all messages have been sent, but not without end: if the peer dies just now, gloo forgets them.

        Then the thread that waits is left behind, and the channel is abandoned.
        """
        if not self.group.shares_fate:
            self.settle()
            return

        def wait() -> None:
            with suppress(TransfuseError):
                self.settle()

        thread = threading.Thread(target=wait, name=f"transfuse-refusal-{self.peer}", daemon=True)
        thread.start()
        # By then the watch has ended all waits that can be ended.
        thread.join(self.timeout + Patience.GOODBYE_SECONDS)
        if thread.is_alive():
            self.abandon()

    def refused(self, refusal: messages.Refusal) -> TransfuseError:
        if refusal.kind == StepMismatch.__name__:
            return StepMismatch(f"rank {self.peer} refused: {refusal.cause[:1000]}")
        if refusal.kind == SourceMutated.__name__:
            return SourceMutated(self.peer, (), f"rank {self.peer} refused: {refusal.cause[:10_000]}")
        return PeerRefused(self.peer, refusal.kind[:200], refusal.cause[:10_000])

    # ----------------------------------------------------------------------------------------------------- records

    def post_sent(self, intent: Intent, digests: list[int]) -> Waits:
        """Post the source's record of a burst. Its length follows from the plan, so the receiver can post ahead."""
        record = messages.seal_record(self.transfer, intent, digests)
        if self.stream is None:
            return self.post_send(self.wire(record))
        self.write(record)
        return _Due(self, 0)

    def post_recv_sent(self, digests: int) -> Waits:
        count = messages.record_bytes(digests)
        return self.post_recv(self.empty(count)) if self.stream is None else _Due(self, count)

    def read_sent(self, data: bytes) -> tuple[Intent, Sequence[int] | None]:
        """The record's intent and digests. None instead of the digests if they have arrived damaged."""
        header = self._open(data[:HEADER_BYTES])
        if header.kind is not Message.SENT or header.length or header.note > max(Intent):
            raise ProtocolError(self.peer, f"rank {self.peer} sent {header.kind.name} where a record was due")
        return Intent(header.note), messages.digests_in(data)

    # ----------------------------------------------------------------------------------------------- signs of life

    @contextmanager
    def holding_turn(self, so_far: Callable[[], int] = lambda: 0) -> Iterator[None]:
        """While this end works and the peer waits: send signs of life, each with the bytes that this end has so far."""
        with self._turn:
            self._so_far, self._pulse_at = so_far, time.monotonic() + self.pulse_seconds
        try:
            yield
        finally:
            with self._turn:
                self._so_far = None

    def pulse(self) -> None:
        """Send a sign of life if one is due, and release a queue that a silent peer blocks. The watch calls this."""
        self._give_up_queue()
        with self._streams(), self._turn:
            if self._so_far is not None and time.monotonic() >= self._pulse_at:
                self._pulse_at = time.monotonic() + self.pulse_seconds
                with suppress(TransfuseError):
                    self.send(Message.WORKING, note=self._so_far())

    # --------------------------------------------------------------------------------------------------- the stream

    def write(self, *parts: Part) -> None:
        """Write to the stream. When this returns, the kernel has everything."""
        try:
            self._move(lambda stream: stream.write(parts))
        except PeerLost as lost:
            # Only once: signs of life are written by another thread, and nobody hears what they fail with.
            self._last_words = self._last_words or self._last_refusal()
            if self._last_words is not None:
                raise self.refused(self._last_words) from lost
            raise

    def read(self, *parts: Part) -> None:
        """Fill these from the stream."""
        self.waiting_since = time.monotonic()
        try:
            self._move(lambda stream: stream.read(parts, self.timeout))
        finally:
            self.waiting_since = None

    def has_news(self) -> bool:
        """Whether the peer has sent something over the stream that nobody has read yet."""
        assert self.stream is not None
        return self.stream.has_news()

    def _last_refusal(self) -> messages.Refusal | None:
        """Why the peer has closed the stream, if it has said so and nobody has read it yet."""
        assert self.stream is not None
        data, at = self.stream.last_words(), 0
        with suppress(ValueError, ProtocolError):
            while len(data) >= at + HEADER_BYTES:
                header = messages.open_header(data[at : at + HEADER_BYTES])
                at += HEADER_BYTES + header.length
                if header.kind is Message.REFUSAL and header.transfer == self.transfer:
                    body = data[at - header.length : at]
                    messages.verify(header, body)
                    self._refused = True
                    return self.decode(body, messages.Refusal)
        return None

    def _move(self, operation: Callable[[Stream], object]) -> None:
        assert self.stream is not None
        started = time.monotonic()
        try:
            operation(self.stream)
        except OSError as error:
            self.broken = self.closed = True
            raise self.translate(error, time.monotonic() - started) from error

    # ----------------------------------------------------------------------------------------------------- helpers

    def _recv_start(self) -> bytes:
        """The beginning of the next message: its header, and over a group some of its body."""
        return self._recv_bytes(HEADER_BYTES if self.stream is not None else BLOCK_BYTES)

    def _recv_bytes(self, count: int) -> bytes:
        if self.stream is None:
            return bytes_in(self.post_recv(self.empty(count)).wait())
        data = bytearray(count)
        self.read(data)
        return bytes(data)

    def _hear_offer(self, tag: int) -> bytes:
        """The block of the next offer. If an earlier call has left a receive behind, the block arrives there."""
        switchboard = self.group.switchboard
        pending = switchboard.adopt(self.peer, self)
        if pending is None:
            pending = self._pending_offer = PendingOffer(self.post_recv(self.empty(BLOCK_BYTES), tag), self.peer, self)
            pending.wait()
            self._pending_offer = None
        else:
            self._take_over(pending)
        if not switchboard.release(pending, self) and (self.broken or not switchboard.take_back(pending)):
            self.broken = self._refused = True  # This conversation was abandoned: it must not send anything.
            raise PeerLost(self.peer, f"rank {self.peer} was abandoned before its offer arrived")
        if pending.error is not None:
            self.broken = True
            raise pending.error
        return pending.data

    def _take_over(self, pending: PendingOffer) -> None:
        """Wait for a receive that another conversation has posted and left behind."""
        posted = pending.posted
        assert isinstance(posted, Posted)
        self._pending_offer = pending
        self.outstanding.append(posted)  # So that the watch can end this wait too.
        self.waiting_since = time.monotonic()
        try:
            pending.wait_for(self)
        finally:
            self.waiting_since = None
            self._pending_offer = None
            with suppress(ValueError):
                self.outstanding.remove(posted)

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
