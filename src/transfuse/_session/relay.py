"""Relays: receivers that want the same parcels pass them on in a chain, so that the source sends each byte once.

The source orders the receivers in a chain (:class:`Chains`), those on one host next to each other. It sends to the
first, and each receiver sends to the next (:class:`Relay`). In a receiver's ledger the neighbour before it is one more
source, which brings parcels on behalf of the source: parcels that the neighbour does not bring are wanted from the
source again. Over a process group, all that is in flight between two receivers lies in staging, never in their tensors,
so that a silent neighbour can be abandoned. A parcel is passed on out of its target, or out of the staging buffer in
which it arrived (:class:`_Arrived`).
"""

from __future__ import annotations

import logging
import os
import pathlib
import secrets
import socket
import threading
import time
from collections.abc import Callable, Hashable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from typing import Generic, TypeVar

import torch
import xxhash

from transfuse._errors import PeerError, PeerLost
from transfuse._phases import RELAYING
from transfuse._progress import Progress
from transfuse._session.conversation import Conversation
from transfuse._session.incoming import Incoming
from transfuse._session.movers import incoming_on, outgoing_on
from transfuse._session.outgoing import Outgoing, ParcelSupply
from transfuse._session.shape import Shape
from transfuse._session.threads import Caller, SideConversation
from transfuse._timeouts import Patience
from transfuse._wire.channel import Channel
from transfuse._wire.group import new_link_tag
from transfuse._wire.introduction import answer, introduce
from transfuse._wire.messages import Agreed, Link, Message
from transfuse._wire.rate_limit import RateLimit

logger = logging.getLogger("transfuse")


# ------------------------------------------------------------------------------------ at the source: forming the chains


@cache
def this_host() -> int:
    """A number that is the same for all ranks on one host and network namespace. Used to order a chain."""
    names = [socket.gethostname()]
    with suppress(OSError):
        names.append(pathlib.Path("/proc/sys/kernel/random/boot_id").read_text())
        names.append(str(os.stat("/proc/self/ns/net").st_ino))
    return xxhash.xxh3_64_intdigest("\n".join(names).encode())


@dataclass
class _ChainMember:
    rank: int
    key: Hashable
    host: int
    agreed: Agreed | None = None
    rate_limit: RateLimit = field(default_factory=lambda: RateLimit(None))


class Chains:
    """Forms the chains of one send. All conversations of the send share one."""

    def __init__(self, ranks: Sequence[int], nbytes: int, timeout: float, share: float | None = None) -> None:
        self._changed = threading.Condition()
        #: Receivers that have neither joined nor left. When the wait is over, chains are formed without them.
        self._expected = set(ranks)
        self._waiting: list[_ChainMember] = []
        self._patience = Patience(timeout)
        self._wait = self._patience.chain_members(nbytes)
        self._until = float("inf")
        #: The rate limit of one receiver in bytes per second, if any. A chain has the sum of its members' limits.
        self._share = share

    def leave(self, rank: int) -> None:
        """Record that this receiver joins no chain, so that nobody waits for it."""
        with self._changed:
            self._expected.discard(rank)
            self._changed.notify_all()

    def join(self, rank: int, key: Hashable, host: int) -> tuple[Agreed, RateLimit]:
        """Join the receivers that want the same. Return the answer to this receiver, and its chain's rate limit."""
        me = _ChainMember(rank, key, host)
        with self._changed:
            self._expected.discard(rank)
            if not self._waiting:
                self._until = time.monotonic() + self._wait
            self._waiting.append(me)
            self._changed.notify_all()
            while me.agreed is None:
                left = self._until - time.monotonic()
                if not self._expected or left <= 0:
                    self._line_up()
                    self._changed.notify_all()
                else:
                    self._changed.wait(left)
            return me.agreed, me.rate_limit

    def _line_up(self) -> None:
        by_key: dict[Hashable, list[_ChainMember]] = {}
        for member in sorted(self._waiting, key=lambda member: (member.host, member.rank)):
            by_key.setdefault(member.key, []).append(member)
        self._waiting.clear()
        for members in by_key.values():
            rate_limit = RateLimit(None if self._share is None else self._share * len(members))
            tags = [new_link_tag() for _ in members]
            ids = [secrets.randbits(63) for _ in members]
            for i, member in enumerate(members):
                before = Link(members[i - 1].rank, tags[i], ids[i]) if i > 0 else None
                after = Link(members[i + 1].rank, tags[i + 1], ids[i + 1]) if i + 1 < len(members) else None
                member.agreed, member.rate_limit = (
                    Agreed(before, after, self._patience.neighbour(i, len(members))),
                    rate_limit,
                )


# ------------------------------------------------------------------------------------------------- between receivers


class _Arrived:
    """Staging buffers with parcels that have arrived and landed, and have not been passed on yet.

    With those under way to the next neighbour there are at most ``most``. Parcels that arrive beyond that, because the
    neighbour is slow, are passed on out of the landing, and no further buffer is kept before these have gone.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._buffers: dict[int, torch.Tensor] = {}
        #: Parcels that were not kept, and that have not been passed on yet.
        self._not_kept: set[int] = set()
        #: How many parcels are under way to the next neighbour; None if there is none, or it takes no more.
        self.under_way: Callable[[], int] | None = None

    def keep(self, number: int, buffer: torch.Tensor) -> bool:
        """Keep the buffer in which this parcel has arrived, if there is room. The caller wakes who passes it on."""
        under_way = self.under_way
        if under_way is None:
            return False
        if self._not_kept or len(self._buffers) + under_way() >= self._most:
            self._not_kept.add(number)
            return False
        self._buffers[number] = buffer
        return True

    def take(self, number: int) -> torch.Tensor | None:
        """The buffer in which this parcel has arrived, if it was kept."""
        self._not_kept.discard(number)
        return self._buffers.pop(number, None)

    def close(self) -> None:
        """Keep nothing more: nobody passes anything on."""
        self.under_way = None
        self._buffers.clear()


Mover = TypeVar("Mover", Outgoing, Incoming)


class _RelayEnd(Generic[Mover]):
    """One end of the conversation of two neighbours: how it moves parcels is known when they have met."""

    def __init__(self, channel: Channel, make: Callable[[], Mover]) -> None:
        self._channel = channel
        self._make: Callable[[], Mover] = make
        self._lock = threading.Lock()
        self._left = False
        self.mover: Mover | None = None

    def begin(self) -> Mover:
        with self._lock:
            if self._left:
                raise PeerLost(self._channel.peer, f"rank {self._channel.peer} was silent for too long")
            self.mover = self._make()
            return self.mover

    def leave(self) -> None:
        """Abandon the neighbour, from another thread. After this call, nothing is read or written on its behalf."""
        with self._lock:
            self._left = True
        if self.mover is None:
            self._channel.abandon()
        else:
            self.mover.leave()


class Relay:
    """Receives parcels from the neighbour before this receiver, and passes them on to the neighbour after it."""

    def __init__(self, conversation: Conversation, shape: Shape) -> None:
        self._source = source = conversation.channel
        self._landing = conversation.landing
        self._ledger = conversation.ledger
        self._shape = shape
        self._caller = conversation.roster.caller
        self._pool = conversation.roster.context.lanes
        #: The conversation that passes parcels on, and the rank of the neighbour that gets them.
        self._passing: SideConversation | None = None
        self._after = -1
        self._passed_on = Progress()
        #: For both neighbours.
        self._staging = shape.staging(source.device)
        self._arrived = _Arrived(shape.ahead)

    def _channel_to(self, link: Link, phase: str, *, is_source: bool) -> Channel:
        limits, timeout = self._source.limits, self._source.timeout
        channel = Channel(self._source.home, link.rank, timeout, limits, is_source=is_source)
        channel.tag, channel.transfer, channel.phase = link.tag, link.transfer, phase
        return channel

    def pass_on(self, downstream: Link, numbers: Sequence[int]) -> None:
        """Begin to pass these parcels on, each as soon as it has arrived."""
        ledger, channel = self._ledger, self._channel_to(downstream, "passing parcels on", is_source=True)
        ledger.keep_digests()

        def ready(some: Sequence[int]) -> BaseException | None:
            if ledger.has_arrived(some):
                return None
            # This channel only waits for parcels from another channel. It must not keep that channel's wait, which may
            # be overdue, from being ended.
            with channel.resting():
                return ledger.wait_for(some)

        def outgoing() -> Outgoing:
            supply = ParcelSupply(
                self._landing, lambda number, _: ledger.digest(number), ready, arrived=self._arrived.take
            )
            caller = Caller(watching=False)
            mover = outgoing_on(channel)(
                channel,
                self._landing.cut,
                supply,
                self._shape,
                caller,
                self._passed_on,
                always_staged=channel.stream is None,
                staging=self._staging,
            )
            self._arrived.under_way = lambda: mover.under_way
            return mover

        link = _RelayEnd(channel, outgoing)

        def send() -> None:
            try:
                introduce(channel, self._pool, None, always=True)
                link.begin().send(numbers)
            finally:
                self._arrived.close()

        def leave() -> None:
            link.leave()
            self._arrived.close()

        self._after = downstream.rank
        self._passing = SideConversation(channel, send, leave, self._pool)

    def take(
        self,
        upstream: Link,
        numbers: Sequence[int],
        progress: Progress,
        landed: Callable[[Sequence[int], Sequence[int], Sequence[int]], object],
        patience: float,
    ) -> list[int]:
        """Receive these parcels from the neighbour instead of the source. Return those that had a wrong digest.

        Ends when the neighbour is done, has failed, or has been silent for ``patience`` seconds. Parcels that it has
        not brought by then are wanted from the source again.
        """
        channel = self._channel_to(upstream, RELAYING, is_source=False)
        link = _RelayEnd(
            channel,
            lambda: incoming_on(channel)(
                channel,
                self._landing.cut,
                self._landing,
                self._shape,
                self._caller,
                progress,
                landed=landed,
                always_staged=channel.stream is None,
                staging=self._staging,
                kept=self._arrived.keep,
            ),
        )
        self._ledger.hand_over(self._source.peer, upstream.rank, numbers)

        def receive() -> None:
            answer(channel, self._pool, channel.expect(Message.MEET)[1])
            link.begin().take(numbers)

        try:
            error = SideConversation(channel, receive, link.leave, self._pool).wait(progress, patience)
        finally:
            # Release the parcels only now: the neighbour's thread has ended, or will not write to the landing any more.
            self._ledger.give_back(upstream.rank)
        if isinstance(error, PeerError) and error is not self._caller.cause:
            logger.info("rank %d no longer passes parcels on (%s); the source sends the rest", upstream.rank, error)
        elif error is not None:
            raise error
        return [] if link.mover is None else link.mover.wrong

    def finish(self, cause: BaseException | None = None) -> None:
        """Wait until the next neighbour has everything or is gone; with a cause, until it has been told the cause."""
        if cause is not None:
            self._ledger.close(cause)
        if self._passing is None:
            return
        error = self._passing.wait(self._passed_on, self._source.timeout)
        if error is not None and error is not cause:
            # The neighbour gets the rest from the source. This receive does not fail.
            logger.info("rank %d did not take what was passed on: %s", self._after, error)
