"""Bursts: parcels under way on one line, several bursts at a time, each followed by a record and answered by one.

Both ends post in one order, for backends that know no other. With ``ahead`` bursts under way: burst 0, sent 0, …
burst ahead - 1, sent ahead - 1, got 0, burst ahead, sent ahead, got 1, … So whoever cancels still completes what the
other end may have posted already.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch

from transfuse.errors import PeerError, PeerLost, ProtocolError, TransfuseError
from transfuse.memory import packing
from transfuse.memory.digest import digest_of
from transfuse.memory.packing import Land, Places, Staging
from transfuse.plan import parcels
from transfuse.plan.parcels import Most, Parcels
from transfuse.progress import Progress
from transfuse.session.threads import Caller
from transfuse.sizes import Sizes
from transfuse.wire.channel import Channel, Posted
from transfuse.wire.messages import Agreed, Answer, Intent, Message, Offer, Want
from transfuse.wire.rate_limit import RateLimit

__all__ = ["Incoming", "Outgoing", "Shape", "Supply"]


class Shape(NamedTuple):
    """How parcels are grouped and checked on a line. Both ends have the same."""

    most: Most
    ahead: int
    digests: bool

    @classmethod
    def of(cls, offer: Offer, want: Want, agreed: Agreed) -> Shape:
        if agreed.upstream is None and agreed.downstream is None:
            most = Most(want.burst_bytes, min(offer.staged_bytes, want.burst_bytes))
            return cls(most, offer.bursts_ahead, want.digests)
        # In a chain whatever has arrived goes on at once: a parcel at a time, and more of them under way.
        parcel = want.parcel_bytes
        return cls(Most(parcel, parcel), Sizes.chain_ahead(parcel), want.digests)


@dataclass(frozen=True)
class Supply:
    """Where outgoing parcels come from, and what their owner says about them."""

    memory: Places
    digest: Callable[[int, torch.Tensor], int]
    #: Waits until these parcels can be sent, or says why they never will.
    ready: Callable[[Sequence[int]], BaseException | None] = lambda _: None
    #: Told what the receiver asks for while parcels are under way.
    count_more: Callable[[range], object] = lambda more: None
    rate_limit: RateLimit = field(default_factory=lambda: RateLimit(None))


class _Sending(NamedTuple):
    """A burst under way: its sends and its record's, the staging buffers they use, and how many bytes it carries."""

    posted: list[Posted]
    buffers: list[torch.Tensor]
    nbytes: int


class Outgoing:
    """Sends parcels from a supply, and hears the answers."""

    def __init__(
        self,
        channel: Channel,
        cut: Parcels,
        supply: Supply,
        shape: Shape,
        caller: Caller,
        progress: Progress,
        *,
        always_staged: bool = False,
    ) -> None:
        self._channel = channel
        self._cut = cut
        self._supply = supply
        self._shape = shape
        self._staging = Staging(shape.most.staged_bytes, channel.group.device)
        self._caller = caller
        self._progress = progress
        #: Whether the parcels' own memory stays out of the backend's hands, so that a silent peer can be left.
        self._always_staged = always_staged
        self._flying: deque[_Sending] = deque()
        self._left = False
        self._memory_lock = threading.Lock()
        #: What has been sent.
        self.nbytes = self.parcels = 0
        #: What went wrong here and the receiver has not been told yet.
        self.failure: BaseException | None = None

    def leave(self) -> None:
        """From another thread: the peer is silent. The memory is not looked at from here any more."""
        with self._memory_lock:
            self._left = True
        self._channel.abandon()

    def send(self, numbers: Sequence[int]) -> None:
        rounds = parcels.bursts(self._cut, numbers, self._shape.most)
        cause: BaseException | None = None
        sent, end = 0, float("inf")
        while True:
            if sent < min(end, len(rounds)) and len(self._flying) < self._shape.ahead:
                stopping = self._post(rounds[sent])
                if cause is None and stopping is not None:
                    # The receiver may have posted so many, those that it has just asked for included.
                    cause, end = stopping, sent + self._shape.ahead
                sent += 1
            elif not self._flying or (cause is not None and sent - len(self._flying) + self._shape.ahead >= end):
                break  # What is still under way says that it is cancelled, and is not answered.
            else:
                rounds += parcels.bursts(self._cut, self._hear_answer(), self._shape.most)
        if cause is not None:
            self._channel.refuse(cause)
            raise cause

    def _hear_answer(self) -> Sequence[int]:
        """The receiver's record about the oldest burst; the parcels that it asks for in addition."""
        answer = Answer(Intent.GO_ON)
        try:
            header, _ = self._channel.expect(Message.GOT)
            answer = Answer.of(header.note)
        except ProtocolError as error:
            # The receiver has receives for parcels posted: no refusal may meet these. Cancel with the next record; if
            # there is none, after its verdict.
            self.failure = self.failure or error
        burst = self._flying.popleft()
        for posted in burst.posted:
            posted.wait()
        for buffer in burst.buffers:
            self._staging.give_back(buffer)
        self._progress.bytes += burst.nbytes
        self._caller.tick()
        if answer.intent is Intent.CANCEL:
            self._channel.expect()
            raise ProtocolError(self._channel.peer, f"rank {self._channel.peer} cancelled without saying why")
        more = range(answer.first, answer.first + answer.number)
        try:
            self._supply.count_more(more)
        except ProtocolError as error:
            self.failure = self.failure or error
            return ()
        return more

    def _post(self, numbers: Sequence[int]) -> BaseException | None:
        """Post a burst and the record after it; why this end stops with it, if it does."""
        burst = _Sending([], [], int(self._cut.payload[np.asarray(numbers, dtype=np.int64)].sum()))
        self.failure = self.failure or self._supply.ready(numbers)
        if self.failure is None:
            self._supply.rate_limit.take(burst.nbytes, lambda: self._caller.cause is not None)
        digests: list[int] = []
        for number in numbers:
            data, buffer = self._fetch(number)
            if buffer is not None:
                burst.buffers.append(buffer)
            if self._shape.digests:
                # First, so that the backend finds the bytes in the cache.
                digests.append(self._supply.digest(number, data) if self.failure is None else 0)
            burst.posted.append(self._channel.post_send(data))
        # Decided now, not before: a parcel that could not be packed must not pass for one that could.
        cause = self._caller.cause or self.failure
        burst.posted.append(self._channel.post_sent(Intent.CANCEL if cause else Intent.GO_ON, digests))
        self._flying.append(burst)
        self.nbytes += burst.nbytes
        self.parcels += len(numbers)
        return cause

    def _fetch(self, number: int) -> tuple[torch.Tensor, torch.Tensor | None]:
        """A parcel's bytes on the wire's device, and the staging buffer that holds them, if any."""
        size, buffer = int(self._cut.nbytes[number]), None
        try:
            with self._memory_lock:
                if self._left:
                    raise PeerLost(
                        self._channel.peer, f"rank {self._channel.peer} was silent for too long and was left"
                    )
                if self.failure is None:
                    direct = packing.as_bytes(self._supply.memory, self._cut, number, self._channel.group.device)
                    if direct is not None and not self._always_staged:
                        return direct, None
                    buffer = self._staging.take(size)
                    if direct is not None:
                        return buffer[:size].copy_(direct), buffer
                    return packing.pack(self._supply.memory, self._cut, number, buffer), buffer
        except Exception as error:
            self.failure = error
        # The burst has been promised: complete it, and cancel with its record.
        buffer = self._staging.take(size) if buffer is None else buffer
        return buffer[:size], buffer


def nothing_more() -> tuple[int, Sequence[int]]:
    return 0, ()


class _Receiving(NamedTuple):
    """A burst under way: for each parcel its number, its receive, and the staging buffer if it has one."""

    parcels: list[tuple[int, Posted, torch.Tensor | None]]
    record: Posted


class Incoming:
    """Receives parcels, takes them to their places, and answers."""

    def __init__(
        self,
        channel: Channel,
        cut: Parcels,
        landing: Land,
        shape: Shape,
        caller: Caller,
        progress: Progress,
        *,
        landed: Callable[[Sequence[int], Sequence[int], Sequence[int]], object],
        always_staged: bool = False,
    ) -> None:
        self._channel = channel
        self._cut = cut
        self._landing = landing
        self._shape = shape
        self._staging = Staging(shape.most.staged_bytes, channel.group.device)
        self._caller = caller
        self._progress = progress
        #: Told about each burst that has landed: its parcels, the source's digests of them, and which are wrong.
        self._landed = landed
        self._always_staged = always_staged
        self._failure: BaseException | None = None
        #: Parcels of the last take whose digest is wrong.
        self.wrong: list[int] = []
        self._left = False
        self._landing_lock = threading.Lock()

    def leave(self) -> None:
        """From another thread: the peer is silent, others bring the rest. Nothing lands from here any more."""
        with self._landing_lock:
            self._left = True
        self._channel.abandon()

    def take(self, numbers: Sequence[int], more: Callable[[], tuple[int, Sequence[int]]] = nothing_more) -> list[int]:
        """Receive the bursts of these parcels; the numbers of those with a wrong digest.

        When all are under way, ``more`` says what to ask for in addition: the source's number of the first parcel,
        and the numbers here of all, which follow each other at the source.
        """
        channel = self._channel
        rounds = deque(parcels.bursts(self._cut, numbers, self._shape.most))
        wrong = self.wrong = []
        flying: deque[_Receiving] = deque()
        while rounds and len(flying) < self._shape.ahead:
            flying.append(self._post(rounds.popleft()))
        cause: BaseException | None = None
        source_stops = False
        while flying:
            burst = flying.popleft()
            intent, digests = channel.read_sent(burst.record.wait())
            stopped = cause is not None or source_stops or intent is Intent.CANCEL
            with self._landing_lock:
                if self._left and self._failure is None:
                    # Others bring the rest: cancel here as for any other cause.
                    self._failure = PeerLost(channel.peer, f"rank {channel.peer} was silent for too long and was left")
                expected: Sequence[int | None] = digests or [None] * len(burst.parcels)
                computed = [
                    self._land(*parcel, digest, keep=not stopped)
                    for parcel, digest in zip(burst.parcels, expected, strict=True)
                ]
            if stopped:
                # What was posted ahead is completed, and no longer answered.
                source_stops = source_stops or cause is None
                continue
            brought = [number for number, _, _ in burst.parcels]
            bad: Sequence[int] = ()
            if self._shape.digests:
                # Digests that are damaged themselves fit nothing.
                sent = digests or [~digest for digest in computed]
                bad = [n for n, mine, theirs in zip(brought, computed, sent, strict=True) if mine != theirs]
                wrong += bad
            cause = self._caller.cause or self._failure
            if cause is None:
                self._landed(brought, digests or (), bad)
            first, further = more() if not rounds and cause is None else nothing_more()
            rounds += parcels.bursts(self._cut, further, self._shape.most)
            intent = Intent.CANCEL if cause else Intent.GO_ON
            try:
                channel.send(Message.GOT, note=Answer(intent, first, len(further)).note)
            except PeerError:
                # With nothing more to come, a source that is gone by now no longer matters.
                if rounds or cause is not None:
                    raise
            if rounds and cause is None:
                flying.append(self._post(rounds.popleft()))
            self._caller.tick()
        if source_stops:
            channel.expect()
            raise ProtocolError(channel.peer, f"rank {channel.peer} cancelled without saying why")
        if cause is not None:
            channel.refuse(cause)
            raise cause
        return wrong

    def _post(self, numbers: Sequence[int]) -> _Receiving:
        """Post the receives of a burst and of the record that follows it."""
        posted: list[tuple[int, Posted, torch.Tensor | None]] = []
        for number in numbers:
            data, buffer = None, None
            if not self._always_staged:
                self._touch(number)
                data = packing.as_bytes(self._landing, self._cut, number, self._channel.group.device)
            if data is None:
                size = int(self._cut.nbytes[number])
                buffer = self._staging.take(size)
                data = buffer[:size]
            posted.append((number, self._channel.post_recv(data), buffer))
        return _Receiving(posted, self._channel.post_recv_sent(len(numbers) if self._shape.digests else 0))

    def _converts(self, number: int) -> bool:
        first = int(self._cut.first[number])
        return bool(self._landing.convert[first : first + int(self._cut.count[number])].any())

    def _touch(self, number: int) -> None:
        first = int(self._cut.first[number])
        self._landing.touch(range(first, first + int(self._cut.count[number])))

    def _land(
        self, number: int, posted: Posted, buffer: torch.Tensor | None, expected: int | None, *, keep: bool
    ) -> int:
        """Take one parcel, which is here, to its places; the digest of what lies there then.

        Where items are converted it is the digest of what has arrived, and only what is right is converted.
        """
        data = posted.wait()
        try:
            if not keep or self._failure is not None:
                return 0
            self._progress.bytes += int(self._cut.payload[number])
            if self._converts(number):
                digest = digest_of(data) if self._shape.digests else 0
                if expected is None or digest == expected:
                    self._touch(number)
                    packing.unpack(self._landing, self._cut, number, data)
                return digest
            if buffer is not None:
                self._touch(number)
                landed = packing.as_bytes(self._landing, self._cut, number, data.device)
                if landed is None:
                    packing.unpack(self._landing, self._cut, number, data)
                    landed = packing.pack(self._landing, self._cut, number, buffer) if self._shape.digests else data
                else:
                    landed.copy_(data)
                data = landed  # The digest is of what lies there, not of what was copied from.
            return digest_of(data) if self._shape.digests else 0
        except Exception as error:
            if not isinstance(error, TransfuseError):
                peer = self._channel.peer
                error = ProtocolError(peer, f"rank {peer} sent data that cannot be put in its place: {error}")
            self._failure = self._failure or error
            return 0
        finally:
            if buffer is not None:
                self._staging.give_back(buffer)
