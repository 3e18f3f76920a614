"""Bursts: parcels under way on one channel. A record follows each burst, and the receiver answers it with a record.

Several bursts are under way at a time. Both ends post in the same order, since some backends match messages by order
alone. With ``ahead`` bursts under way: burst 0, sent 0, … burst ahead - 1, sent ahead - 1, got 0, burst ahead, sent
ahead, got 1, … So an end that cancels still completes the operations that the other end may have posted already.

In a chain one answer is for several bursts: each burst is one parcel, so that it can be passed on as soon as its record
is here, and an answer to each would cost more than the parcel.
"""

from __future__ import annotations

import ctypes
import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch

from transfuse.errors import PeerError, PeerLost, ProtocolError, TransfuseError
from transfuse.memory import packing, streams
from transfuse.memory.digest import digest_at, digest_of
from transfuse.memory.packing import Land, Places, Staging
from transfuse.plan import parcels
from transfuse.plan.parcels import Most, Parcels
from transfuse.progress import Progress
from transfuse.session.threads import Caller
from transfuse.sizes import Sizes
from transfuse.wire.channel import Channel
from transfuse.wire.group import CPU
from transfuse.wire.messages import Agreed, Answer, Intent, Message, Offer, Want
from transfuse.wire.operations import Posted
from transfuse.wire.rate_limit import RateLimit

__all__ = ["Incoming", "Outgoing", "ParcelSupply", "Shape"]


class Shape(NamedTuple):
    """How parcels are grouped and checked on a channel. Both ends derive the same shape."""

    most: Most
    ahead: int
    digests: bool
    #: For how many bursts one answer is. The last answer is for those that are left.
    answered: int = 1
    #: How many bursts' staging an end keeps for the next bursts.
    kept: int = 1

    @classmethod
    def of(cls, offer: Offer, want: Want, agreed: Agreed) -> Shape:
        if agreed.upstream is None and agreed.downstream is None:
            most = Most(want.burst_bytes, min(offer.staged_bytes, want.burst_bytes))
            return cls(most, offer.bursts_ahead, want.digests)
        # In a chain each parcel is passed on as soon as it has arrived: bursts of one parcel, more of them under way.
        parcel = want.parcel_bytes
        ahead = Sizes.chain_ahead(parcel)
        return cls(Most(parcel, parcel), ahead, want.digests, Sizes.chain_answered(ahead), kept=ahead)

    def staging(self, device: torch.device) -> Staging:
        """Staging for one conversation, or for both neighbours of a receiver in a chain."""
        return Staging(self.most.staged_bytes * self.kept, device)


@dataclass(frozen=True)
class ParcelSupply:
    """Where outgoing parcels come from, with their digests and rate limit."""

    memory: Places
    digest: Callable[[int, torch.Tensor], int]
    #: Waits until these parcels can be sent, or returns why they never can.
    ready: Callable[[Sequence[int]], BaseException | None] = lambda _: None
    #: Called with the parcels that the receiver asks for while others are under way.
    count_more: Callable[[range], object] = lambda more: None
    rate_limit: RateLimit = field(default_factory=lambda: RateLimit(None))
    #: The staging buffer in which a parcel has arrived, if it can be sent out of that. From then on the buffer belongs
    #: to whoever sends it.
    arrived: Callable[[int], torch.Tensor | None] = lambda _: None


class _Fetched(NamedTuple):
    """A parcel that is ready to be sent: its bytes on the wire's device, the staging buffer that holds them, or None.

    ``host`` is the same bytes in main memory, to be hashed, and ``host_buffer`` the buffer that was taken for them.
    """

    number: int
    data: torch.Tensor
    buffer: torch.Tensor | None
    host: torch.Tensor
    host_buffer: torch.Tensor | None = None


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
        supply: ParcelSupply,
        shape: Shape,
        caller: Caller,
        progress: Progress,
        *,
        always_staged: bool = False,
        staging: Staging | None = None,
    ) -> None:
        self._channel = channel
        self._cut = cut
        self._supply = supply
        self._shape = shape
        #: ``staging``: a receiver that passes parcels on has one for both directions.
        self._staging = staging or shape.staging(channel.device)
        self._to_hash = _ToHash(shape)
        self._caller = caller
        self._progress = progress
        #: Of an accelerator's parcels: the next burst, which is packed while the wire is busy.
        self._next: list[_Fetched] | None = None
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
        if self._staging.device != self._channel.device:
            self._staging = self._shape.staging(self._channel.device)
        self._next = None
        rounds = parcels.bursts(self._cut, numbers, self._shape.most)
        cause: BaseException | None = None
        sent, end = 0, float("inf")
        while True:
            if sent < min(end, len(rounds)) and len(self._flying) < self._shape.ahead:
                stopping = self._post(rounds[sent])
                if cause is None and stopping is not None:
                    # The receiver has posted receives for this many bursts: complete them, then stop. It does not
                    # answer the record that says cancel, nor those before it that its next answer would be for.
                    answers = sent // self._shape.answered * self._shape.answered
                    cause, end = stopping, answers + self._shape.ahead
                sent += 1
            elif not self._flying or (cause is not None and sent - len(self._flying) + self._shape.ahead >= end):
                break  # The records of the bursts still under way say cancel: the receiver does not answer them.
            else:
                if sent < min(end, len(rounds)) and self._next is None and self._packs_ahead:
                    self._next = self._pack(rounds[sent])
                if more := self._hear_answer():
                    rounds += parcels.bursts(self._cut, more, self._shape.most)
        if cause is not None:
            self._channel.refuse(cause)
            raise cause

    def _hear_answer(self) -> Sequence[int]:
        """Read the receiver's answer to the oldest bursts; return the further parcels that it asks for."""
        answer = Answer(Intent.GO_ON)
        try:
            header, _ = self._channel.expect(Message.GOT)
            answer = Answer.of(header.note)
        except ProtocolError as error:
            # The receiver may have posted receives for parcels, and a refusal must not arrive in them. So cancel with
            # the next record or, if there is none, after the receiver's verdict.
            self.failure = self.failure or error
        for _ in range(min(self._shape.answered, len(self._flying))):
            burst = self._flying.popleft()
            for posted in burst.posted:
                posted.wait()
            for buffer in burst.buffers:
                self._staging.give_back(buffer)
            self._progress.advance(burst.nbytes)
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
        burst = _Sending([], [], self._payload(numbers))
        digests: list[int] = []
        for number, data, buffer, host, host_buffer in self._fetched(numbers):
            if buffer is not None:
                burst.buffers.append(buffer)
            if self._shape.digests:
                # Hash before posting, so that the backend finds the bytes in the cache.
                digests.append(self._supply.digest(number, host) if self.failure is None else 0)
                self._to_hash.give_back(host_buffer)
            burst.posted.append(self._channel.post_send(data))
        # Decide only now: if a parcel could not be packed, the record must say cancel.
        cause = self._caller.cause or self.failure
        burst.posted.append(self._channel.post_sent(Intent.CANCEL if cause else Intent.GO_ON, digests))
        self._flying.append(burst)
        self.nbytes += burst.nbytes
        self.parcels += len(numbers)
        return cause

    def _payload(self, numbers: Sequence[int]) -> int:
        if len(numbers) == 1:
            return int(self._cut.payload[numbers[0]])
        return int(self._cut.payload[np.asarray(numbers, dtype=np.int64)].sum())

    @property
    def under_way(self) -> int:
        """How many bursts are under way. Other threads may ask."""
        return len(self._flying)

    def _fetched(self, numbers: Sequence[int]) -> Iterable[_Fetched]:
        """The parcels of a burst, ready to be hashed and posted."""
        if not streams.are_involved():
            self._await_turn(numbers)
            return map(self._fetch, numbers)  # One at a time: each is hashed and posted while it is in the cache.
        fetched, self._next = self._next or self._pack(numbers), None
        try:
            if self._shape.digests:
                fetched = [self._to_hash.bring(one) for one in fetched]
            if any(one.host.device.type == "cpu" for one in fetched):
                streams.complete(self._channel.timeout)
        except Exception as error:
            self.failure = self.failure or error
        return fetched

    @property
    def _packs_ahead(self) -> bool:
        """Whether packing only queues copies, so that the next burst can be packed while the wire is busy."""
        return streams.are_involved() and not self._always_staged

    def _pack(self, numbers: Sequence[int]) -> list[_Fetched]:
        self._await_turn(numbers)
        return [self._fetch(number) for number in numbers]

    def _await_turn(self, numbers: Sequence[int]) -> None:
        """Wait until these parcels can be sent, and the rate limit allows it."""
        self.failure = self.failure or self._supply.ready(numbers)
        if self.failure is None:
            self._supply.rate_limit.take(self._payload(numbers), lambda: self._caller.cause is not None)

    def _fetch(self, number: int) -> _Fetched:
        """A parcel's bytes on the wire's device. On an accelerator they are only queued to be there."""
        size, buffer = int(self._cut.nbytes[number]), None
        try:
            with self._memory_lock:
                if self._left:
                    raise PeerLost(
                        self._channel.peer, f"rank {self._channel.peer} was silent for too long and was abandoned"
                    )
                if self.failure is None:
                    buffer = self._supply.arrived(number)
                    if buffer is not None:
                        data = _start_of(buffer, size)
                        return _Fetched(number, data, buffer, data)
                    if not self._always_staged:
                        direct = packing.as_bytes(self._supply.memory, self._cut, number, self._channel.device)
                        if direct is not None:
                            return _Fetched(number, direct, None, direct)
                    buffer = self._staging.take(size)
                    data = _start_of(buffer, size)
                    if data.is_cpu and (address := packing.address_of(self._supply.memory, self._cut, number)):
                        ctypes.memmove(data.data_ptr(), address, size)
                    else:
                        packing.pack(self._supply.memory, self._cut, number, buffer)
                    return _Fetched(number, data, buffer, data)
        except Exception as error:
            self.failure = error
        # The receiver expects this burst: send it with any bytes, and cancel with its record.
        buffer = self._staging.take(size) if buffer is None else buffer
        return _Fetched(number, buffer[:size], buffer, buffer[:size])


def _start_of(buffer: torch.Tensor, nbytes: int) -> torch.Tensor:
    return buffer if buffer.numel() == nbytes else buffer[:nbytes]


class _ToHash:
    """Copies of parcels of an accelerator in main memory, where they are hashed: one copy of each byte."""

    def __init__(self, shape: Shape) -> None:
        self._staging = Staging(shape.most.staged_bytes, CPU)

    def copy(self, data: torch.Tensor) -> torch.Tensor:
        """Queue a copy of these bytes to main memory."""
        buffer = self._staging.take(data.numel())
        buffer[: data.numel()].copy_(data, non_blocking=True)
        return buffer

    def bring(self, one: _Fetched) -> _Fetched:
        if one.data.device.type == "cpu":
            return one
        buffer = self.copy(one.data)
        return one._replace(host=buffer[: one.data.numel()], host_buffer=buffer)

    def give_back(self, buffer: torch.Tensor | None) -> None:
        if buffer is not None:
            self._staging.give_back(buffer)


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
        staging: Staging | None = None,
        kept: Callable[[int, torch.Tensor], bool] | None = None,
    ) -> None:
        self._channel = channel
        self._cut = cut
        self._landing = landing
        self._shape = shape
        self._staging = staging or shape.staging(channel.device)
        #: Called with each parcel that has landed and its staging buffer. Returns whether somebody keeps the buffer, to
        #: send the parcel out of it, and gives it back to the staging afterwards.
        self._kept = kept
        self._to_hash = _ToHash(shape)
        self._caller = caller
        self._progress = progress
        #: Called for each burst that has landed: its parcels, the source's digests, and the parcels that are wrong.
        self._landed = landed
        self._always_staged = always_staged
        self._any_converts = bool(landing.convert.any())
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
        told = source_stops = False
        arrived = 0
        while flying:
            burst = flying.popleft()
            intent, digests = channel.read_sent(burst.record.wait())
            stopped = told or source_stops or intent is Intent.CANCEL
            with self._landing_lock:
                if self._left and self._failure is None:
                    # Other peers bring the rest. Cancel here, as for any other cause.
                    self._failure = PeerLost(
                        channel.peer, f"rank {channel.peer} was silent for too long and was abandoned"
                    )
                computed = self._land_all(burst, digests or [None] * len(burst.parcels), keep=not stopped)
            if stopped:
                # Complete the bursts that were posted ahead, without answering them.
                source_stops = source_stops or not told
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
            arrived += 1
            if (flying or rounds) and arrived % self._shape.answered:
                continue  # The next answer is for this burst too.
            first, further = more() if not rounds and cause is None else nothing_more()
            if further:
                rounds += parcels.bursts(self._cut, further, self._shape.most)
            told = cause is not None
            try:
                channel.send(
                    Message.GOT, note=Answer(Intent.CANCEL if told else Intent.GO_ON, first, len(further)).note
                )
            except PeerError:
                # If this was the last burst, it does not matter that the source is gone.
                if rounds or told:
                    raise
            for _ in range(0 if told else min(self._shape.answered, len(rounds))):
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
                data = packing.as_bytes(self._landing, self._cut, number, self._channel.device)
            if data is None:
                size = int(self._cut.nbytes[number])
                buffer = self._staging.take(size)
                data = _start_of(buffer, size)
            lent = buffer is None and self._landing.writes_targets
            posted.append((number, self._channel.post_recv(data, lent=lent), buffer))
        return _Receiving(posted, self._channel.post_recv_sent(len(numbers) if self._shape.digests else 0))

    def _converts(self, number: int) -> bool:
        if not self._any_converts:
            return False
        first = int(self._cut.first[number])
        return bool(self._landing.convert[first : first + int(self._cut.count[number])].any())

    def _touch(self, number: int) -> None:
        first = int(self._cut.first[number])
        self._landing.touch(range(first, first + int(self._cut.count[number])))

    def _land_all(self, burst: _Receiving, expected: Sequence[int | None], *, keep: bool) -> list[int]:
        """Write a burst that has arrived to its places. Return the digests of the bytes that lie there afterwards."""
        landed = [
            self._land(*parcel, digest, keep=keep) for parcel, digest in zip(burst.parcels, expected, strict=True)
        ]
        copies: list[torch.Tensor | None] = [None] * len(landed)
        if streams.are_involved():
            # All of the burst is complete before others hear of it, or use its buffers again.
            try:
                copies = [self._to_hash.copy(one) if isinstance(one, torch.Tensor) else None for one in landed]
                streams.complete(self._channel.timeout)
            except Exception as error:
                self._failure = self._failure or error
        digests: list[int] = []
        for one, copy in zip(landed, copies, strict=True):
            if not isinstance(one, torch.Tensor):
                digests.append(one)
            else:
                digests.append(0 if copy is None else digest_of(copy[: one.numel()]))
                self._to_hash.give_back(copy)
        for (number, _, buffer), digest, right in zip(burst.parcels, digests, expected, strict=True):
            if buffer is None or (keep and digest == (right or 0) and self._is_kept(number, buffer)):
                continue
            self._staging.give_back(buffer)
        return digests

    def _is_kept(self, number: int, buffer: torch.Tensor) -> bool:
        """Whether somebody keeps the buffer in which this parcel has arrived, to send the parcel out of it."""
        return self._kept is not None and self._failure is None and self._kept(number, buffer)

    def _land(
        self, number: int, posted: Posted, buffer: torch.Tensor | None, expected: int | None, *, keep: bool
    ) -> int | torch.Tensor:
        """Write one parcel that has arrived to its places. Return the digest of the bytes that lie there afterwards.

        If they lie on an accelerator, return the bytes: they are hashed together with those of the whole burst. A
        parcel whose items are converted is hashed before it is converted, and is written only if its digest is right.
        """
        data = posted.wait()
        try:
            if not keep or self._failure is not None:
                return 0
            self._progress.advance(int(self._cut.payload[number]))
            if self._converts(number):
                digest = digest_of(data) if self._shape.digests else 0
                if expected is None or digest == expected:
                    self._touch(number)
                    packing.unpack(self._landing, self._cut, number, data)
                return digest
            if buffer is None:
                return self._digest(data)
            self._touch(number)
            address = packing.address_of(self._landing, self._cut, number) if data.is_cpu else 0
            if address:
                ctypes.memmove(address, data.data_ptr(), data.numel())
                return digest_at(address, data.numel()) if self._shape.digests else 0
            landed = packing.as_bytes(self._landing, self._cut, number, data.device)
            if landed is not None:
                return self._digest(landed.copy_(data))  # Hash the bytes where they landed, not the staging copy.
            elsewhere = data.device.type == "cpu" and streams.are_involved()
            if elsewhere and not packing.in_main_memory(self._landing, self._cut, number):
                # Hash the bytes as they arrived: those that land on an accelerator would have to be copied back.
                arrived = self._digest(data)
                packing.unpack(self._landing, self._cut, number, data)
                return arrived
            packing.unpack(self._landing, self._cut, number, data)
            return self._digest(packing.pack(self._landing, self._cut, number, buffer)) if self._shape.digests else 0
        except Exception as error:
            if not isinstance(error, TransfuseError):
                peer = self._channel.peer
                error = ProtocolError(peer, f"rank {peer} sent data that cannot be written to its targets: {error}")
            self._failure = self._failure or error
            return 0

    def _digest(self, data: torch.Tensor) -> int | torch.Tensor:
        if not self._shape.digests:
            return 0
        return digest_of(data) if data.device.type == "cpu" else data
