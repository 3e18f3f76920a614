"""Bursts: parcels under way on one channel. A record follows each burst, and the receiver answers it with a record.

Several bursts are under way at a time. Both ends post in the same order, since some backends match messages by order
alone. With ``ahead`` bursts under way: burst 0, sent 0, … burst ahead - 1, sent ahead - 1, got 0, burst ahead, sent
ahead, got 1, … So an end that cancels still completes the operations that the other end may have posted already.
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
    """How parcels are grouped and checked on a channel. Both ends derive the same shape."""

    most: Most
    ahead: int
    digests: bool

    @classmethod
    def of(cls, offer: Offer, want: Want, agreed: Agreed) -> Shape:
        if agreed.upstream is None and agreed.downstream is None:
            most = Most(want.burst_bytes, min(offer.staged_bytes, want.burst_bytes))
            return cls(most, offer.bursts_ahead, want.digests)
        # In a chain each parcel is passed on as soon as it has arrived: bursts of one parcel, more of them under way.
        parcel = want.parcel_bytes
        return cls(Most(parcel, parcel), Sizes.chain_ahead(parcel), want.digests)


@dataclass(frozen=True)
class Supply:
    """Where outgoing parcels come from, with their digests and rate limit."""

    memory: Places
    digest: Callable[[int, torch.Tensor], int]
    #: Waits until these parcels can be sent, or returns why they never can.
    ready: Callable[[Sequence[int]], BaseException | None] = lambda _: None
    #: Called with the parcels that the receiver asks for while others are under way.
    count_more: Callable[[range], object] = lambda more: None
    rate_limit: RateLimit = field(default_factory=lambda: RateLimit(None))


class _Sending(NamedTuple):
    """A burst under way: the sends of its parcels and record, the staging buffers in use, and its payload in bytes."""

    posted: list[Posted]
    buffers: list[torch.Tensor]
    nbytes: int


class Outgoing:
    """Sends parcels from a supply, and reads the receiver's answers."""

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
        #: Whether parcels are always copied to staging, so that the backend never holds their own memory and a silent
        #: peer can be abandoned.
        self._always_staged = always_staged
        self._flying: deque[_Sending] = deque()
        self._left = False
        self._memory_lock = threading.Lock()
        #: How many bytes and parcels have been sent.
        self.nbytes = self.parcels = 0
        #: An error of this end that the receiver has not been told yet.
        self.failure: BaseException | None = None

    def leave(self) -> None:
        """Abandon a silent peer, from another thread. After this call, ``send`` does not read the parcels' memory."""
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
                    # The receiver may have posted receives for this many bursts: complete them, then stop.
                    cause, end = stopping, sent + self._shape.ahead
                sent += 1
            elif not self._flying or (cause is not None and sent - len(self._flying) + self._shape.ahead >= end):
                break  # The records of the bursts still under way say cancel: the receiver does not answer them.
            else:
                rounds += parcels.bursts(self._cut, self._hear_answer(), self._shape.most)
        if cause is not None:
            self._channel.refuse(cause)
            raise cause

    def _hear_answer(self) -> Sequence[int]:
        """Read the receiver's answer to the oldest burst; return the further parcels that it asks for."""
        answer = Answer(Intent.GO_ON)
        try:
            header, _ = self._channel.expect(Message.GOT)
            answer = Answer.of(header.note)
        except ProtocolError as error:
            # The receiver may have posted receives for parcels, and a refusal must not arrive in them. So cancel with
            # the next record or, if there is none, after the receiver's verdict.
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
        """Post a burst and the record after it. Return why this end stops with this burst, or None."""
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
                # Hash before posting, so that the backend finds the bytes in the cache.
                digests.append(self._supply.digest(number, data) if self.failure is None else 0)
            burst.posted.append(self._channel.post_send(data))
        # Decide only now: if a parcel could not be packed, the record must say cancel.
        cause = self._caller.cause or self.failure
        burst.posted.append(self._channel.post_sent(Intent.CANCEL if cause else Intent.GO_ON, digests))
        self._flying.append(burst)
        self.nbytes += burst.nbytes
        self.parcels += len(numbers)
        return cause

    def _fetch(self, number: int) -> tuple[torch.Tensor, torch.Tensor | None]:
        """A parcel's bytes on the wire's device, and the staging buffer that holds them, or None."""
        size, buffer = int(self._cut.nbytes[number]), None
        try:
            with self._memory_lock:
                if self._left:
                    raise PeerLost(
                        self._channel.peer, f"rank {self._channel.peer} was silent for too long and was abandoned"
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
        # The receiver expects this burst: send it with any bytes, and cancel with its record.
        buffer = self._staging.take(size) if buffer is None else buffer
        return buffer[:size], buffer


def nothing_more() -> tuple[int, Sequence[int]]:
    return 0, ()


class _Receiving(NamedTuple):
    """A burst under way: for each parcel its number, its receive and its staging buffer, if any; and the record."""

    parcels: list[tuple[int, Posted, torch.Tensor | None]]
    record: Posted


class Incoming:
    """Receives parcels, writes them to the landing, and answers each burst."""

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
        #: Called for each burst that has landed: its parcels, the source's digests, and the parcels that are wrong.
        self._landed = landed
        self._always_staged = always_staged
        self._failure: BaseException | None = None
        #: Parcels of the last ``take`` that arrived with a wrong digest.
        self.wrong: list[int] = []
        self._left = False
        self._landing_lock = threading.Lock()

    def leave(self) -> None:
        """Abandon a silent peer, from another thread. After this call, nothing of it lands; others bring the rest."""
        with self._landing_lock:
            self._left = True
        self._channel.abandon()

    def take(self, numbers: Sequence[int], more: Callable[[], tuple[int, Sequence[int]]] = nothing_more) -> list[int]:
        """Receive these parcels in bursts. Return the numbers of the parcels that arrived with a wrong digest.

        When all are under way, ``more`` says which further parcels to ask for. It returns the source's number of the
        first one, and our numbers of all of them. At the source their numbers are consecutive.
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
                    # Other peers bring the rest. Cancel here, as for any other cause.
                    self._failure = PeerLost(
                        channel.peer, f"rank {channel.peer} was silent for too long and was abandoned"
                    )
                expected: Sequence[int | None] = digests or [None] * len(burst.parcels)
                computed = [
                    self._land(*parcel, digest, keep=not stopped)
                    for parcel, digest in zip(burst.parcels, expected, strict=True)
                ]
            if stopped:
                # Complete the bursts that were posted ahead, without answering them.
                source_stops = source_stops or cause is None
                continue
            brought = [number for number, _, _ in burst.parcels]
            bad: Sequence[int] = ()
            if self._shape.digests:
                # If the digests themselves arrived damaged, every parcel of the burst counts as wrong.
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
                # If this was the last burst, it does not matter that the source is gone.
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
        """Write one parcel that has arrived to its places. Return the digest of the bytes that lie there afterwards.

        A parcel whose items are converted is hashed before it is converted, and is written only if its digest is right.
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
                data = landed  # Hash the bytes where they landed, not the staging copy.
            return digest_of(data) if self._shape.digests else 0
        except Exception as error:
            if not isinstance(error, TransfuseError):
                peer = self._channel.peer
                error = ProtocolError(peer, f"rank {peer} sent data that cannot be written to its targets: {error}")
            self._failure = self._failure or error
            return 0
        finally:
            if buffer is not None:
                self._staging.give_back(buffer)
