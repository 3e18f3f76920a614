"""Outgoing parcels: where they come from, and how they get ready to be sent. Subclasses send them over a wire."""

from __future__ import annotations

import ctypes
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch

from transfuse._errors import PeerLost
from transfuse._memory import packing, streams
from transfuse._memory.digest import Run
from transfuse._memory.packing import Places, Staging
from transfuse._plan.parcels import Parcels
from transfuse._progress import Progress
from transfuse._session.shape import Shape, ToHash, start_of
from transfuse._session.threads import Caller
from transfuse._wire.channel import Channel
from transfuse._wire.rate_limit import RateLimit


@dataclass(frozen=True)
class ParcelSupply:
    """Where outgoing parcels come from, with their digests and rate limit."""

    memory: Places
    digest: Callable[[int, torch.Tensor | Run], int]
    #: Waits until these parcels can be sent, or returns why they never can.
    ready: Callable[[Sequence[int]], BaseException | None] = lambda _: None
    #: Called with the parcels that the receiver asks for while others are under way.
    count_more: Callable[[range], object] = lambda more: None
    #: Whether the parcels' tensors are known to be unchanged since they were described.
    confirms: Callable[[], bool] = lambda: False
    rate_limit: RateLimit = field(default_factory=lambda: RateLimit(None))
    #: The staging buffer in which a parcel has arrived, if it can be sent out of that. From then on the buffer belongs
    #: to the thread that sends it.
    arrived: Callable[[int], torch.Tensor | None] = lambda _: None


class ReadyParcel(NamedTuple):
    """A parcel that is ready to be sent: its bytes on the wire's device, the staging buffer that holds them, or None.

    ``host`` is the same bytes in main memory, to be hashed, and ``host_buffer`` the buffer that was taken for them.
    """

    number: int
    data: torch.Tensor | Run
    buffer: torch.Tensor | None
    host: torch.Tensor | Run
    host_buffer: torch.Tensor | None = None


class Outgoing(ABC):
    """Sends parcels from a supply, and hears what else the receiver asks for. One subclass for each kind of wire."""

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
        self._to_hash = ToHash(shape)
        self._caller = caller
        self._progress = progress
        #: Of an accelerator's parcels: the next ones, which are packed while the wire is busy.
        self._next: list[ReadyParcel] | None = None
        #: Whether parcels are always copied to staging, so that the backend never holds their own memory and a silent
        #: peer can be abandoned.
        self._always_staged = always_staged
        self._left = False
        self._memory_lock = threading.Lock()
        #: How many bytes and parcels have been sent.
        self.nbytes = self.parcels = 0
        #: How many bursts are under way. Other threads may ask.
        self.under_way = 0
        #: An error of this end that the receiver has not been told yet.
        self.failure: BaseException | None = None

    def leave(self) -> None:
        """Abandon a silent peer, from another thread. After this call, ``send`` does not read the parcels' memory."""
        with self._memory_lock:
            self._left = True
        self._channel.abandon()

    @abstractmethod
    def send(self, numbers: Sequence[int]) -> None:
        """Send these parcels, and those that the receiver asks for meanwhile. Raises if either end stops."""

    def has_room(self, numbers: Sequence[int]) -> bool:
        """Whether these parcels can be staged where the wire is. One more burst than are under way is packed ahead."""
        sizes = (int(self._cut.nbytes[n]) for n in numbers if self._always_staged or self._direct(n) is None)
        return self._staging.reserve(sizes, self._shape.most.staged_bytes * (self._shape.ahead + 1))

    def _direct(self, number: int) -> torch.Tensor | Run | None:
        """A parcel's bytes where they lie, if the wire can send them from there."""
        return packing.as_bytes(self._supply.memory, self._cut, number, self._channel.device)

    def _payload(self, numbers: Sequence[int]) -> int:
        if len(numbers) == 1:
            return int(self._cut.payload[numbers[0]])
        return int(self._cut.payload[np.asarray(numbers, dtype=np.int64)].sum())

    def _digest(self, one: ReadyParcel) -> int:
        digest = self._supply.digest(one.number, one.host) if self.failure is None else 0
        self._to_hash.give_back(one.host_buffer)
        return digest

    def _fetched(self, numbers: Sequence[int]) -> Iterable[ReadyParcel]:
        """These parcels, ready to be hashed and sent."""
        if not streams.are_involved():
            self._await_turn(numbers)
            return map(self._fetch, numbers)  # One at a time: each is hashed and posted while it is in the cache.
        fetched, self._next = self._next or self._pack(numbers), None
        try:
            if self._shape.digests:
                fetched = [self._bring(one) for one in fetched]
            if any(_is_here(one.host) for one in fetched):
                streams.complete(self._channel.timeout)
        except Exception as error:
            self.failure = self.failure or error
        return fetched

    def _bring(self, one: ReadyParcel) -> ReadyParcel:
        """Queue a copy of a parcel to main memory, if it is not there."""
        if isinstance(one.data, tuple) or one.data.is_cpu:
            return one
        buffer = self._to_hash.copy(one.data)
        return one._replace(host=buffer[: one.data.numel()], host_buffer=buffer)

    def _pack_ahead(self, numbers: Sequence[int]) -> None:
        """Pack the parcels that are sent next, if that only queues copies, which are made while the wire is busy."""
        if self._next is None and streams.are_involved() and not self._always_staged:
            self._next = self._pack(numbers)

    def _pack(self, numbers: Sequence[int]) -> list[ReadyParcel]:
        self._await_turn(numbers)
        return [self._fetch(number) for number in numbers]

    def _await_turn(self, numbers: Sequence[int]) -> None:
        """Wait until these parcels can be sent, and the rate limit allows it."""
        self.failure = self.failure or self._supply.ready(numbers)
        if self.failure is None:
            self._supply.rate_limit.take(self._payload(numbers), lambda: self._caller.cause is not None)

    def _fetch(self, number: int) -> ReadyParcel:
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
                        data = start_of(buffer, size)
                        return ReadyParcel(number, data, buffer, data)
                    if not self._always_staged and (direct := self._direct(number)) is not None:
                        return ReadyParcel(number, direct, None, direct)
                    buffer = self._staging.take(size)
                    data = start_of(buffer, size)
                    if data.is_cpu and (address := packing.address_of(self._supply.memory, self._cut, number)):
                        ctypes.memmove(data.data_ptr(), address, size)
                    else:
                        packing.pack(self._supply.memory, self._cut, number, buffer)
                    return ReadyParcel(number, data, buffer, data)
        except Exception as error:
            self.failure = error
        # The receiver expects these parcels: send them with any bytes, and cancel with the record.
        buffer = self._staging.stopgap(size) if buffer is None else buffer
        return ReadyParcel(number, buffer[:size], buffer, buffer[:size])


def _is_here(data: torch.Tensor | Run) -> bool:
    return isinstance(data, tuple) or data.is_cpu
