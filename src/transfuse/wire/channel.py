"""A channel: one conversation with one peer over a process group.

Messages and parcels travel by ``send`` and ``recv`` of the group. The head of :mod:`.group` lists what backends do and
do not do, and how a conversation is built because of that.
"""

from __future__ import annotations

import re
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from functools import partial
from typing import Any, TypeVar

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
from transfuse.limits import Limits
from transfuse.timeouts import Patience
from transfuse.wire import messages
from transfuse.wire.group import OFFER_TAG, Group, WorkLike, new_link_tag, valid_tag
from transfuse.wire.hub import FirstWord
from transfuse.wire.messages import HEADER_BYTES, Header, Intent, Message

__all__ = ["Channel", "Posted"]

#: The longest wait. Some groups take milliseconds as an int32, and more would not fit.
FOREVER = timedelta(days=20)

#: The byte that follows each chunk of a message.
MARK = b"\x01"

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


class Posted:
    """A send or receive under way. The backend owns the tensor's memory until :meth:`wait` has returned."""

    def __init__(self, channel: Channel, work: WorkLike, tensor: torch.Tensor) -> None:
        self._channel = channel
        self.work = work
        self.tensor = tensor

    def wait(self) -> torch.Tensor:
        channel = self._channel
        started = channel.waiting_since = time.monotonic()
        try:
            done = self.work.wait(FOREVER if channel.group.shares_fate else timedelta(seconds=channel.timeout))
        except Exception as error:
            channel.broken = channel.closed = True
            raise channel.translate(error, time.monotonic() - started) from error
        finally:
            channel.waiting_since = None
            with suppress(ValueError):
                channel.outstanding.remove(self)
        if done is False:
            channel.broken = True
            raise PeerLost(channel.peer, f"rank {channel.peer}: the backend reported failure while {channel.phase}")
        return self.tensor


class Channel:
    """One conversation with one peer: posts sends and receives, waits for them, and turns failures into our errors.

    One thread at a time uses a channel, inside ``with channel:``. ``phase`` says what the conversation is doing; errors
    quote it.
    """

    def __init__(self, group: Group, peer: int, timeout: float, limits: Limits, *, is_source: bool = False) -> None:
        self.group = group
        self.peer = peer
        #: Whether this end is the source. Needed when a rank talks to itself.
        self.is_source = is_source
        self._loopback = group.hub.loop() if peer == group.rank() else None
        self.timeout = timeout
        self.limits = limits
        self.phase = "starting"
        self.transfer = 0
        self.tag = OFFER_TAG
        self.outstanding: deque[Posted] = deque()
        self.waiting_since: float | None = None
        self.given_up = False
        self.broken = False
        #: Whether the backend has reported the connection as gone. Then it writes no more to tensors that were posted.
        self.closed = False
        #: How long the peer waits for a sign of life: this end's own timeout until the peer has said.
        self.peer_timeout = timeout
        #: The most bytes of progress that a working peer can have.
        self.most_bytes = 0
        #: Called with the bytes that a working peer says it has so far.
        self.on_working: Callable[[int], object] | None = None
        #: When the last message from the peer arrived.
        self.heard_at = time.monotonic()
        self._refused = False
        self._first_word: FirstWord | None = None
        self._unanswered: list[Posted] = []
        self._rests = False
        self._turn = threading.Lock()
        self._so_far: Callable[[], int] | None = None
        self._pulse_at = 0.0

    def __enter__(self) -> Channel:
        self.group.hub.watch.add(self)
        return self

    def __exit__(self, *_: object) -> None:
        """Leave only when the backend no longer owns any memory, whether or not the operations succeed."""
        try:
            # On a closed connection nobody writes any more, and some waits would never end.
            while self.outstanding and not self.broken:
                with suppress(TransfuseError):
                    self.outstanding[0].wait()
        finally:
            # Break the reference cycles through this channel now, so that its memory does not wait for the garbage
            # collector.
            hub = self.group.hub
            if self.closed or not hub.is_left_behind(self):
                self.outstanding.clear()
                self._unanswered.clear()
            if not self.outstanding:
                hub.forget(self)
            self.on_working = None
            hub.watch.remove(self)

    def abandon(self) -> None:
        """Abandon a silent peer, from another thread. Only allowed if all memory in flight on this channel is staging.

        The thread that waits for the peer stays in its wait until the peer goes on or is gone.
        """
        self.park()
        self.broken = True
        self.group.hub.leave_behind(self)
        self.group.hub.watch.remove(self)

    def park(self) -> None:
        """Leave the waiting thread behind, from another thread, so that the caller can go on.

        If that thread waits for the peer's next offer, the next conversation with the peer gets the offer.
        """
        hub = self.group.hub
        hub.pin()
        if self._first_word is not None:
            hub.park(self._first_word)

    @property
    def shares_fate(self) -> bool:
        return self.group.shares_fate

    @contextmanager
    def resting(self) -> Iterator[None]:
        """Mark this channel as waiting for another one. Then the watch may end the other one's wait all the same."""
        self._rests = True
        try:
            yield
        finally:
            self._rests = False

    def overdue(self) -> bool:
        """Whether this conversation has waited longer than its timeout, or only waits for another one (resting)."""
        since = self.waiting_since
        return self._rests or (since is not None and time.monotonic() - since > self.timeout)

    def break_off(self) -> None:
        """Close the connection, to end waits that would not end by themselves. The watch calls this.

        The wait that expires is for a receive of its own, on a tag that nobody sends to. A second wait for a receive
        that is already awaited might see it complete just now, and then the first wait would never end.
        """
        if self.outstanding:
            with suppress(Exception):
                nothing = self.post_recv(self._empty(1), new_link_tag())
                self.outstanding.remove(nothing)
                nothing.work.wait(timedelta(milliseconds=2))  # For less than 1 ms gloo uses its own default.

    # ------------------------------------------------------------------------------------------------- raw tensors

    def post_send(self, tensor: torch.Tensor, tag: int | None = None) -> Posted:
        if self._loopback is not None:
            return self._post(partial(self._loopback.send, by_source=self.is_source), tensor, tag)
        return self._post(lambda tensor, tag: self.group.pg.send([tensor], self.peer, tag), tensor, tag)

    def post_recv(self, tensor: torch.Tensor, tag: int | None = None) -> Posted:
        if self._loopback is not None:
            return self._post(partial(self._loopback.recv, by_source=self.is_source), tensor, tag)
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
        """Turn a backend's exception into one of ours."""
        # gloo's messages begin with a source path of its build machine and end with advice.
        text = re.sub(r"^\[\S+\] ", "", str(error).split("\n")[0]).split(". This is typically")[0]
        if self.given_up or elapsed >= 0.9 * self.timeout or "timed out" in text.lower():
            late = PeerTimeout(self.peer, self.phase, elapsed)
            if self.peer == self.group.rank():
                late.add_note("This rank is its own peer: send in one thread, receive in another, on the same group.")
            return late
        return PeerLost(self.peer, f"rank {self.peer}: connection lost while {self.phase}: {text}")

    # --------------------------------------------------------------------------------------------------- messages

    def send(self, kind: Message, body: bytes | torch.Tensor = b"", *, note: int = 0, tag: int | None = None) -> None:
        """Send a message. The peer's answer will prove that it has arrived. ``tag`` is for the header of an offer."""
        data = self.wire(body) if isinstance(body, bytes) else body
        head = messages.seal(kind, self.transfer, note, data.cpu().numpy().data)
        self._unanswered.append(self.post_send(self.wire(head), tag))
        for at in range(0, data.numel(), self.limits.chunk_bytes):
            self._unanswered.append(self.post_send(data[at : at + self.limits.chunk_bytes]))
            self._unanswered.append(self.post_send(self.wire(MARK)))

    def settle(self) -> None:
        """Wait until all messages have been sent: at once after an answer, otherwise when the peer receives them."""
        for posted in self._unanswered:
            posted.wait()
        self._unanswered.clear()

    def expect(self, *kinds: Message, tag: int | None = None) -> tuple[Header, bytearray]:
        """Receive the next message, which must be one of ``kinds``. Raise if the peer refuses."""
        signs = 0
        while True:
            data = self._recv_bytes(HEADER_BYTES) if tag is None else self._hear_first_word(tag)
            header = self._open(data)
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
        body = bytearray()
        while len(body) < header.length:
            # Receive chunk by chunk: an announced length alone must not allocate memory.
            chunk = self.post_recv(self._empty(min(self.limits.chunk_bytes, header.length - len(body))))
            self._recv_bytes(len(MARK))
            body += chunk.wait().cpu().numpy().data
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
            self.settle()

    def refused(self, refusal: messages.Refusal) -> TransfuseError:
        if refusal.kind == StepMismatch.__name__:
            return StepMismatch(f"rank {self.peer} refused: {refusal.cause[:1000]}")
        if refusal.kind == SourceMutated.__name__:
            return SourceMutated(self.peer, (), f"rank {self.peer} refused: {refusal.cause[:10_000]}")
        return PeerRefused(self.peer, refusal.kind[:200], refusal.cause[:10_000])

    # ----------------------------------------------------------------------------------------------------- records

    def post_sent(self, intent: Intent, digests: list[int]) -> Posted:
        """Post the source's record of a burst. Its length follows from the plan, so the receiver can post ahead."""
        return self.post_send(self.wire(messages.seal_record(self.transfer, intent, digests)))

    def post_recv_sent(self, digests: int) -> Posted:
        return self.post_recv(self._empty(messages.record_bytes(digests)))

    def read_sent(self, tensor: torch.Tensor) -> tuple[Intent, Sequence[int] | None]:
        """The record's intent and digests. None instead of the digests if they have arrived damaged."""
        data = bytes(tensor.cpu().numpy())
        header = self._open(data[:HEADER_BYTES])
        if header.kind is not Message.SENT or header.length or header.note not in (0, 1):
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

    @property
    def pulse_seconds(self) -> float:
        """Seconds between two signs of life. The peer's timeout can shorten them only within limits."""
        return Patience(self.timeout).pulse(self.peer_timeout)

    def pulse(self) -> None:
        """Send a sign of life if one is due. The watch calls this."""
        with self._turn:
            if self._so_far is not None and time.monotonic() >= self._pulse_at:
                self._pulse_at = time.monotonic() + self.pulse_seconds
                with suppress(TransfuseError):
                    self.send(Message.WORKING, note=self._so_far())

    # ----------------------------------------------------------------------------------------------------- helpers

    def wire(self, data: bytes) -> torch.Tensor:
        """Bytes as a tensor that the backend can send: writable memory on its device."""
        return torch.frombuffer(bytearray(data), dtype=torch.uint8).to(self.group.device) if data else self._empty(0)

    def _empty(self, count: int) -> torch.Tensor:
        return torch.empty(count, dtype=torch.uint8, device=self.group.device)

    def _recv_bytes(self, count: int) -> bytes:
        return bytes(self.post_recv(self._empty(count)).wait().cpu().numpy())

    def _hear_first_word(self, tag: int) -> bytes:
        """The header of the next offer. If an earlier call has left a receive behind, the header arrives there."""
        hub = self.group.hub
        word = hub.adopt(self.peer, self)
        if word is None:
            word = self._first_word = FirstWord(self.post_recv(self._empty(HEADER_BYTES), tag), self.peer, self)
            word.wait()
            self._first_word = None
        else:
            self._take_over(word)
        if not hub.release(word, self):
            self.broken = self._refused = True  # This conversation was abandoned: it must not send anything.
            raise PeerLost(self.peer, f"rank {self.peer} was abandoned before its offer arrived")
        if word.error is not None:
            self.broken = True
            raise word.error
        return word.data

    def _take_over(self, word: FirstWord) -> None:
        """Wait for a receive that another conversation has posted and left behind."""
        posted = word.posted
        assert isinstance(posted, Posted)
        self._first_word = word
        self.outstanding.append(posted)  # So that the watch can end this wait too.
        self.waiting_since = time.monotonic()
        try:
            word.wait_for(self)
        finally:
            self.waiting_since = None
            self._first_word = None
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
