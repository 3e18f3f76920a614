"""Bursts: parcels over a process group. A record follows each burst, and the receiver answers it with a record.

Several bursts are under way at a time. Both ends post in the same order, since some backends match messages by order
alone. With ``ahead`` bursts under way: burst 0, sent 0, … burst ahead - 1, sent ahead - 1, got 0, burst ahead, sent
ahead, got 1, … So an end that cancels still completes the operations that the other end may have posted already.

In a chain one answer is for several bursts: each burst is one parcel, so that it can be passed on as soon as its record
is here, and an answer to each would cost more than the parcel.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from transfuse._errors import PeerError, ProtocolError
from transfuse._memory.digest import Run
from transfuse._plan import parcels
from transfuse._session.incoming import Arriving, Incoming, nothing_more
from transfuse._session.outgoing import Outgoing
from transfuse._wire.channel import bytes_in
from transfuse._wire.messages import Answer, Intent, Message
from transfuse._wire.operations import Posted
from transfuse._wire.switchboard import Waits


class _Sending(NamedTuple):
    """A burst under way: the sends of its parcels and record, the staging buffers in use, and its payload in bytes."""

    posted: list[Waits]
    buffers: list[torch.Tensor]
    nbytes: int


class BurstsOut(Outgoing):
    """Sends parcels in bursts, and reads the receiver's answers."""

    _flying: deque[_Sending]

    def send(self, numbers: Sequence[int]) -> None:
        self._next = None
        self._flying = deque()
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
                if sent < min(end, len(rounds)):
                    self._pack_ahead(rounds[sent])
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
            self.under_way -= 1
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
        for one in self._fetched(numbers):
            if one.buffer is not None:
                burst.buffers.append(one.buffer)
            if self._shape.digests:
                digests.append(self._digest(one))  # Before posting, so that the backend finds the bytes in the cache.
            burst.posted.append(self._channel.post_send(_tensor(one.data)))
        # Decide only now: if a parcel could not be packed, the record must say cancel.
        cause = self._caller.cause or self.failure
        burst.posted.append(self._channel.post_sent(Intent.CANCEL if cause else Intent.GO_ON, digests))
        self._flying.append(burst)
        self.under_way += 1
        self.nbytes += burst.nbytes
        self.parcels += len(numbers)
        return cause


class _Receiving(NamedTuple):
    """A burst under way: its parcels with their receives, and the receive of the record."""

    parcels: list[tuple[Arriving, Posted]]
    record: Waits


def _tensor(data: torch.Tensor | Run) -> torch.Tensor:
    assert isinstance(data, torch.Tensor)  # Only streams read and write by address.
    return data


class BurstsIn(Incoming):
    """Receives parcels in bursts, and answers each of them."""

    def take(self, numbers: Sequence[int], more: Callable[[], tuple[int, Sequence[int]]] = nothing_more) -> list[int]:
        channel = self._channel
        rounds = deque(parcels.bursts(self._cut, numbers, self._shape.most))
        self.wrong = []
        flying: deque[_Receiving] = deque()
        while rounds and len(flying) < self._shape.ahead:
            flying.append(self._post(rounds.popleft()))
        cause: BaseException | None = None
        told = source_stops = False
        arrived = 0
        while flying:
            burst = flying.popleft()
            intent, digests = channel.read_sent(bytes_in(burst.record.wait()))
            stopped = told or source_stops or intent is Intent.CANCEL
            for _, posted in burst.parcels:
                posted.wait()
            self._settle([one for one, _ in burst.parcels], digests, keep=not stopped)
            if stopped:
                # Complete the bursts that were posted ahead, without answering them.
                source_stops = source_stops or not told
                continue
            cause = self._cause
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
        return self.wrong

    def _post(self, numbers: Sequence[int]) -> _Receiving:
        """Post the receives of a burst and of the record that follows it."""
        posted: list[tuple[Arriving, Posted]] = []
        for number in numbers:
            one = self._place(number)
            lent = one.buffer is None and self._landing.writes_targets
            posted.append((one, self._channel.post_recv(_tensor(one.data), lent=lent)))
        return _Receiving(posted, self._channel.post_recv_sent(len(numbers) if self._shape.digests else 0))
