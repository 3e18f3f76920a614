"""A channel: one conversation with one peer over a process group.

Messages and parcels go by ``send`` and ``recv`` of the group. What backends do and do not do, and how a conversation
has to be built because of it, is at the head of :mod:`.group`.
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

#: As long as a wait may be: more milliseconds do not fit into an int32, which some groups want.
FOREVER = timedelta(days=20)

#: What follows a chunk of a message.
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
    """A send or receive under way. The tensor's memory belongs to the backend until :meth:`wait` has returned."""

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
    """One conversation with one peer: posts sends and receives, waits for them, and knows what failed when.

    Used by one thread at a time, within ``with line:``. ``phase`` says what the conversation is doing, for messages.
    """

    def __init__(self, group: Group, peer: int, timeout: float, limits: Limits, *, is_source: bool = False) -> None:
        self.group = group
        self.peer = peer
        #: Which end this is, for a rank that talks to itself.
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
        """Leave only when no memory is in the backend's hands any more, whatever becomes of it."""
        try:
            # Once the connection is closed nobody writes, and not every wait on it would end.
            while self.outstanding and not self.broken:
                with suppress(TransfuseError):
                    self.outstanding[0].wait()
        finally:
            # These refer to this line, or to who refers to it: gone at once, not when garbage is collected.
            hub = self.group.hub
            if self.closed or not hub.is_left_behind(self):
                self.outstanding.clear()
                self._unanswered.clear()
            if not self.outstanding:
                hub.forget(self)
            self.on_working = None
            hub.watch.remove(self)

    def abandon(self) -> None:
        """From another thread: leave a silent peer. Only for lines of which all memory in flight is staging.

        The thread in the wait stays there until the peer goes on or is gone.
        """
        self.park()
        self.broken = True
        self.group.hub.leave_behind(self)
        self.group.hub.watch.remove(self)

    def park(self) -> None:
        """From another thread: the caller goes on, and the thread that waits here stays behind.

        If it waits for the peer's first word, whoever comes next gets that.
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
        hub = self.group.hub
        word = hub.adopt(self.peer, self)
        if word is None:
            word = self._first_word = FirstWord(self.post_recv(self._empty(HEADER_BYTES), tag), self.peer, self)
            word.wait()
            self._first_word = None
        else:
            self._take_over(word)
        if not hub.release(word, self):
            self.broken = self._refused = True  # There is nobody here to talk to.
            raise PeerLost(self.peer, f"rank {self.peer} was left before its first word")
        if word.error is not None:
            self.broken = True
            raise word.error
        return word.data

    def _take_over(self, word: FirstWord) -> None:
        """Wait for a receive that another conversation has posted."""
        posted = word.posted
        assert isinstance(posted, Posted)
        self._first_word = word
        self.outstanding.append(posted)  # For the watch: it ends this wait as any other.
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
