"""Rounds: parcels over a stream. A round is a few parcels and their record, written and read by a few calls.

Nobody answers a round: TCP is the window, and bytes go straight between the kernel and the tensors. A request ends with
one answer (got), which says what the receiver asks for next. The receiver sends it before the last parcels are here, so
that the source never waits for it:

    source                                        receiver
      | -- round, record, round, record, … ----------> |
      | <- got: further parcels, or nothing more ----- |
      | -- round, record, … -------------------------> |

An end that stops says so at once. The source writes a record that says cancel, then a refusal. The receiver sends a
refusal, which the source finds between two rounds, and reads on until the source has closed the stream.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from functools import cached_property

import numpy as np
import torch

from transfuse._errors import PeerError, ProtocolError
from transfuse._memory import packing
from transfuse._memory.digest import Run, digest_of
from transfuse._plan import parcels
from transfuse._session.incoming import Arriving, Incoming, nothing_more
from transfuse._session.outgoing import Outgoing
from transfuse._sizes import Sizes
from transfuse._state.region import Ints
from transfuse._wire.messages import Answer, Intent, Message, record_bytes, seal_record
from transfuse._wire.stream import Part


class RoundsOut(Outgoing):
    """Sends parcels in rounds, one after another, and looks for the receiver's words between them."""

    @cached_property
    def _addresses(self) -> Ints:
        return packing.addresses_of(self._supply.memory, self._cut)

    def _direct(self, number: int) -> Run | None:
        address = int(self._addresses[number])
        return (address, int(self._cut.nbytes[number])) if address else None

    def send(self, numbers: Sequence[int]) -> None:
        channel, self._next = self._channel, None
        rounds = deque(parcels.bursts(self._cut, numbers, self._shape.round))
        asks = True  # Whether the receiver has still to say what it asks for next.
        try:
            while rounds or asks:
                if not rounds or channel.has_news():
                    further = self._hear(asks=asks)
                    rounds += parcels.bursts(self._cut, further, self._shape.round)
                    asks = bool(further)
                else:
                    self._write(rounds.popleft(), rounds[0] if rounds else ())
        except BaseException as error:
            if not channel.broken:
                channel.refuse(error)
            raise

    def _hear(self, *, asks: bool) -> Sequence[int]:
        """Read the receiver's answer: the further parcels that it asks for."""
        header, _ = self._channel.expect(*((Message.GOT,) if asks else ()))
        answer = Answer.of(header.note)
        if answer.intent is Intent.CANCEL:
            raise ProtocolError(self._channel.peer, f"rank {self._channel.peer} cancelled without saying why")
        more = range(answer.first, answer.first + answer.number)
        self._supply.count_more(more)
        return more

    def _write(self, numbers: Sequence[int], following: Sequence[int]) -> None:
        """Write one round. Raises if this end stops; by then the record has said so."""
        channel, calls = self._channel, _Calls(self._channel.write)
        digests: list[int] = []
        buffers: list[torch.Tensor] = []
        for one in self._fetched(numbers):
            if self._shape.digests:
                digests.append(self._digest(one))  # Before writing, so that the kernel finds the bytes in the cache.
            if one.buffer is not None:
                buffers.append(one.buffer)
            calls.add(one.data, int(self._cut.nbytes[one.number]))
        if following:
            self._pack_ahead(following)
        cause = self._caller.cause or self.failure
        going_on = Intent.CONFIRM if not following and self._supply.confirms() else Intent.GO_ON
        calls.end(seal_record(channel.transfer, Intent.CANCEL if cause else going_on, digests))
        for buffer in buffers:
            self._staging.give_back(buffer)
        nbytes = self._payload(numbers)
        self.nbytes += nbytes
        self.parcels += len(numbers)
        self._progress.advance(nbytes)
        self._caller.tick()
        if cause is not None:
            raise cause


class RoundsIn(Incoming):
    """Receives parcels in rounds, and asks for more in time."""

    @cached_property
    def _addresses(self) -> Ints:
        return packing.addresses_of(self._landing, self._cut)

    def _direct(self, number: int) -> Run | None:
        address = int(self._addresses[number])
        return (address, int(self._cut.nbytes[number])) if address else None

    def take(self, numbers: Sequence[int], more: Callable[[], tuple[int, Sequence[int]]] = nothing_more) -> list[int]:
        channel, self.wrong = self._channel, []
        rounds = deque(parcels.bursts(self._cut, numbers, self._shape.round))
        left = self._bytes_of(numbers)
        low = left if more is nothing_more else left // 2  # With as many bytes as this under way, ask for more.
        asks = True
        while rounds or asks:
            if asks and left <= low:
                first, further = more()
                asks = bool(further)
                try:
                    channel.send(Message.GOT, note=Answer(Intent.GO_ON, first, len(further)).note)
                except PeerError:
                    # If everything is here, it does not matter that the source is gone.
                    if rounds or further:
                        raise
                rounds += parcels.bursts(self._cut, further, self._shape.round)
                left += (asked := self._bytes_of(further))
                low = asked // 2
                continue
            due = rounds.popleft()
            left -= self._bytes_of(due)
            self._read(due)
            if (cause := self._cause) is not None:
                channel.refuse(cause)
                raise cause
            self._caller.tick()
        return self.wrong

    def _read(self, numbers: Sequence[int]) -> None:
        """Read one round, and land its parcels."""
        channel, calls = self._channel, _Calls(self._channel.read)
        due, hashed = [], 0
        for number in numbers:
            one = self._place(number)
            due.append(one)
            if calls.add(one.data, int(self._cut.nbytes[number])):
                hashed = self._hash(due, hashed)
        record = bytearray(record_bytes(len(numbers) if self._shape.digests else 0))
        calls.end(record)
        self._hash(due, hashed)
        intent, digests = channel.read_sent(bytes(record))
        self.confirmed = intent is Intent.CONFIRM
        self._settle(due, digests, keep=intent is not Intent.CANCEL)
        if intent is Intent.CANCEL:
            channel.expect()
            raise ProtocolError(channel.peer, f"rank {channel.peer} cancelled without saying why")

    def _hash(self, due: list[Arriving], first: int) -> int:
        """Hash what has arrived in its place, from the parcel ``first`` on, while it is in the cache."""
        if self._shape.digests:
            for at in range(first, len(due)):
                if isinstance(due[at].data, tuple):
                    due[at] = due[at]._replace(digest=digest_of(due[at].data))
        return len(due)

    def _bytes_of(self, numbers: Sequence[int]) -> int:
        if len(numbers) == 1:
            return int(self._cut.nbytes[numbers[0]])
        return int(self._cut.nbytes[np.asarray(numbers, dtype=np.int64)].sum())


class _Calls:
    """Moves parts of a round together, up to :attr:`Sizes.CALL_BYTES` in one call."""

    def __init__(self, move: Callable[..., object]) -> None:
        self._move = move
        self._parts: list[Part] = []
        self._nbytes = 0

    def add(self, part: Part, nbytes: int) -> bool:
        """Add a part. Whether this and all before have been moved."""
        self._parts.append(part)
        self._nbytes += nbytes
        if self._nbytes < Sizes.CALL_BYTES:
            return False
        self._move(*self._parts)
        self._parts.clear()
        self._nbytes = 0
        return True

    def end(self, record: bytes | bytearray) -> None:
        """Move what is left, and the record."""
        self._move(*self._parts, record)
