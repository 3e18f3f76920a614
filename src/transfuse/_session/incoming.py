"""Incoming parcels: where they arrive, how they land, and whether they are right. Subclasses take them from a wire."""

from __future__ import annotations

import ctypes
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from transfuse._errors import PeerLost, ProtocolError, TransfuseError
from transfuse._memory import packing, streams
from transfuse._memory.digest import Run, digest_of
from transfuse._memory.packing import Land, Staging
from transfuse._plan.parcels import Parcels
from transfuse._progress import Progress
from transfuse._session.shape import Shape, ToHash, start_of
from transfuse._session.threads import Caller
from transfuse._wire.channel import Channel


def nothing_more() -> tuple[int, Sequence[int]]:
    return 0, ()


class Arriving(NamedTuple):
    """A parcel's number, the memory in which it arrives, and that memory again if it is a staging buffer."""

    number: int
    data: torch.Tensor | Run
    buffer: torch.Tensor | None
    #: Of bytes that have arrived in their place, if they have been hashed already.
    digest: int = 0


class Incoming(ABC):
    """Receives parcels and writes them to the landing. One subclass for each kind of wire."""

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
        self._to_hash = ToHash(shape)
        self._caller = caller
        self._progress = progress
        #: Called with parcels that have landed together, the source's digests, and the parcels that are wrong.
        self._landed = landed
        self._always_staged = always_staged
        self._failure: BaseException | None = None
        #: Parcels of the last ``take`` that arrived with a wrong digest.
        self.wrong: list[int] = []
        #: Whether the source has said, after its last parcel, that its tensors are unchanged.
        self.confirmed = False
        self._left = False
        self._landing_lock = threading.Lock()

    def leave(self) -> None:
        """Abandon a silent peer, from another thread. After this call, nothing of it lands; others bring the rest."""
        with self._landing_lock:
            self._left = True
        self._channel.abandon()

    @abstractmethod
    def take(self, numbers: Sequence[int], more: Callable[[], tuple[int, Sequence[int]]] = nothing_more) -> list[int]:
        """Receive these parcels. Return the numbers of the parcels that arrived with a wrong digest.

        When most are here, ``more`` says which further parcels to ask for. It returns the source's number of the first
        one, and our numbers of all of them. At the source their numbers are consecutive.
        """

    def _place(self, number: int) -> Arriving:
        """Where a parcel arrives: in its target if it can, otherwise in staging."""
        if not self._always_staged:
            self._touch(number)
            direct = self._direct(number)
            if direct is not None:
                return Arriving(number, direct, None)
        size = int(self._cut.nbytes[number])
        try:
            buffer = self._staging.take(size)
        except TransfuseError as error:
            # The source sends it all the same. Nothing lands any more.
            self._failure = self._failure or error
            buffer = self._staging.stopgap(size)
        return Arriving(number, start_of(buffer, size), buffer)

    def has_room(self, numbers: Sequence[int]) -> bool:
        """Whether these parcels can be staged where the wire is."""
        sizes = (int(self._cut.nbytes[n]) for n in numbers if self._always_staged or self._direct(n) is None)
        return self._staging.reserve(sizes, self._shape.most.nbytes * self._shape.ahead)

    def _direct(self, number: int) -> torch.Tensor | Run | None:
        """Where a parcel lands, if the wire can receive it there."""
        return packing.as_bytes(self._landing, self._cut, number, self._channel.device)

    def _settle(self, arrived: Sequence[Arriving], digests: Sequence[int] | None, *, keep: bool) -> None:
        """Land parcels that have arrived with one record, compare their digests, and say which have landed.

        ``digests``: None if they arrived damaged themselves. Then every parcel counts as wrong. ``keep``: otherwise the
        transfer has been cancelled, and nothing lands.
        """
        with self._landing_lock:
            if self._left and self._failure is None:
                # Other peers bring the rest. Cancel here, as for any other cause.
                peer = self._channel.peer
                self._failure = PeerLost(peer, f"rank {peer} was silent for too long and was abandoned")
            computed = self._land_all(arrived, digests or [None] * len(arrived), keep=keep)
        if not keep:
            return
        brought = [one.number for one in arrived]
        bad: Sequence[int] = ()
        if self._shape.digests:
            sent = digests or [~digest for digest in computed]
            bad = [n for n, mine, theirs in zip(brought, computed, sent, strict=True) if mine != theirs]
            self.wrong += bad
        if self._cause is None:
            self._landed(brought, digests or (), bad)

    @property
    def _cause(self) -> BaseException | None:
        """Why this end stops, if it does."""
        return self._caller.cause or self._failure

    def _touch(self, number: int) -> None:
        first = int(self._cut.first[number])
        self._landing.touch(range(first, first + int(self._cut.count[number])))

    def _land_all(self, arrived: Sequence[Arriving], expected: Sequence[int | None], *, keep: bool) -> list[int]:
        """Write parcels to their places. Return the digests of the bytes that lie there afterwards."""
        landed = [self._land(one, digest, keep=keep) for one, digest in zip(arrived, expected, strict=True)]
        copies: list[torch.Tensor | None] = [None] * len(landed)
        if streams.are_involved():
            # All of them are complete before others hear of it, or use their buffers again.
            try:
                copies = [self._to_hash.copy(data) if isinstance(data, torch.Tensor) else None for data in landed]
                streams.complete(self._channel.timeout)
            except Exception as error:
                self._failure = self._failure or error
        digests: list[int] = []
        for result, copy in zip(landed, copies, strict=True):
            if not isinstance(result, torch.Tensor):
                digests.append(result)
            else:
                digests.append(0 if copy is None else digest_of(copy[: result.numel()]))
                self._to_hash.give_back(copy)
        for one, digest, right in zip(arrived, digests, expected, strict=True):
            if one.buffer is None or (keep and digest == (right or 0) and self._is_kept(one.number, one.buffer)):
                continue
            self._staging.give_back(one.buffer)
        return digests

    def _is_kept(self, number: int, buffer: torch.Tensor) -> bool:
        """Whether somebody keeps the buffer in which this parcel has arrived, to send the parcel out of it."""
        return self._kept is not None and self._failure is None and self._kept(number, buffer)

    def _land(self, one: Arriving, expected: int | None, *, keep: bool) -> int | torch.Tensor:
        """Write one parcel that has arrived to its places, and return its digest.

        A parcel that has arrived in its place is hashed there. Any other is hashed as it arrived, and is written only
        if its digest is right. If it lies on an accelerator, return its bytes: they are hashed together with others.
        """
        number, data, buffer = one.number, one.data, one.buffer
        try:
            if not keep or self._failure is not None:
                return 0
            self._progress.advance(int(self._cut.payload[number]))
            if isinstance(data, tuple):
                return one.digest
            digest = self._digest(data)
            if buffer is None or (isinstance(digest, int) and expected is not None and digest != expected):
                return digest
            self._touch(number)
            address = packing.address_of(self._landing, self._cut, number) if data.is_cpu else 0
            if address:
                ctypes.memmove(address, data.data_ptr(), data.numel())
            else:
                packing.unpack(self._landing, self._cut, number, data)
            return digest
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
