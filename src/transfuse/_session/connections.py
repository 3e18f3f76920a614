"""The connections of one transfer: how many, and those beside the first, each with a thread at both ends: its lanes.

A lane is a small conversation of its own: the receiver asks for parcels (more), the source sends them in bursts, and at
the end the receiver says that it is done (verdict). In the receiver's ledger every lane is a holder of parcels, on
behalf of its source. A lane that breaks or falls silent gives its parcels back, and the others bring them.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import torch

from transfuse import _workers
from transfuse._errors import PeerLost, ProtocolError, TransfuseError
from transfuse._memory import streams
from transfuse._session.conversation import Conversation
from transfuse._session.incoming import Incoming
from transfuse._session.outgoing import Outgoing
from transfuse._session.threads import Caller
from transfuse._sizes import Sizes
from transfuse._timeouts import Patience
from transfuse._wire import messages
from transfuse._wire.channel import Channel
from transfuse._wire.group import CPU, Group
from transfuse._wire.lanes import Entrance, NotWanted
from transfuse._wire.messages import Message, Place
from transfuse._wire.pool import Pool
from transfuse._wire.stream import Stream

logger = logging.getLogger("transfuse")


def how_many(conversation: Conversation, nbytes: int, *, same_host: bool) -> int:
    """How many connections bring these bytes: as both callers ask, or as many as pay."""
    asked = conversation.roster.request.options.lanes
    if asked is None:
        sizes = Sizes(conversation.channel.limits, conversation.channel.timeout)
        if nbytes < (sizes.LANES_BYTES if same_host else sizes.FAR_LANES_BYTES):
            return 1
        useful = min(3, os.cpu_count() or 1) if same_host else 4
        asked = int(max(1, min(useful, sizes.before_silence() // conversation.accepted.parcel_bytes)))
    return min(asked, conversation.offer.connections, messages.MOST_LANES + 1)


class LaneWorkers:
    """The lanes of one end of a conversation, each with a thread. One subclass for each end."""

    def __init__(self, pool: Pool, main: Channel, entrances: Sequence[Entrance]) -> None:
        self._pool = pool
        #: Where the other end listens, if this end has to be told.
        self._place: Place | None = None
        self._main = main
        self._entrances = list(entrances)
        #: The streams of the conversation, if it involves an accelerator.
        self._streams = streams.inherit()
        self._patience = Patience(main.timeout).lane
        self._changed = threading.Condition()
        #: Lanes that use the caller's tensors now, with their channels; and whether they must not begin to any more.
        self._busy: dict[Stream, Channel] = {}
        self._over = False
        #: Lanes whose conversation has begun and has not ended.
        self._talking: set[int] = set()

    def start(self) -> None:
        for entrance in self._entrances:
            name = f"transfuse-lane-{self._main.peer}"
            _workers.run(partial(self._work, entrance), name)

    @property
    @abstractmethod
    def used(self) -> int:
        """How many lanes have moved parcels."""

    def end(self, *, well: bool) -> None:
        """Wait until no lane uses the caller's tensors any more. If not ``well``, break off those that do."""
        with self._changed:
            self._over = True
            self._changed.notify_all()
            until = time.monotonic() + 2 * self._patience
            while self._busy and time.monotonic() < until:
                if not well:
                    for lane in self._busy:
                        lane.cut()
                self._changed.wait(Patience.SLICE_SECONDS)
            if well:
                # Both ends say goodbye at about the same time. Then the next transfer finds these lanes.
                self._changed.wait_for(lambda: not self._talking, Patience.SLICE_SECONDS)
        for entrance in self._entrances:
            entrance.give_up()

    @contextmanager
    def _using(self, lane: Stream, channel: Channel) -> Iterator[None]:
        """Use the caller's tensors in this block. Raises if the transfer is over."""
        with self._changed:
            if self._over:
                raise PeerLost(channel.peer, "the transfer is over")
            self._busy[lane] = channel
        try:
            yield
        except BaseException:
            lane.cut()
            raise
        finally:
            with self._changed:
                del self._busy[lane]
                self._changed.notify_all()

    def _work(self, entrance: Entrance, _: _workers.Job) -> None:
        """Run one lane, in its thread."""
        peer, main = self._main.peer, self._main
        started = time.monotonic()
        try:
            lane = entrance.form(self._place)
        except NotWanted:
            return
        except TransfuseError as error:
            self._not_formed(error, time.monotonic() - started)
            return
        channel = Channel(Group(lane, CPU), peer, self._patience, main.limits, is_source=main.is_source)
        channel.transfer, channel.tag, channel.most_bytes = main.transfer, main.tag, main.most_bytes
        with self._changed:
            self._talking.add(lane.number)
        well = False
        try:
            with self._streams(), torch.inference_mode(False), torch.no_grad(), channel:
                self._talk(lane, channel)
            well = not channel.broken
        except BaseException as error:
            logger.info("rank %d: a further connection was given up: %s", peer, error)
        finally:
            if not well:
                lane.cut()
            self._ended(lane)
            if well:
                self._pool.keep(peer, lane, is_source=main.is_source)
            else:
                lane.close()
            with self._changed:
                self._talking.discard(lane.number)
                self._changed.notify_all()

    def _not_formed(self, error: TransfuseError, seconds: float) -> None:
        """Say that there are no lanes, once for each peer of the transport."""
        first = self._pool.give_up(self._main.peer)
        # If the transfer was over before the lane was formed, the other end may just have left.
        left = self._over and seconds < Patience(self._main.timeout).connection()
        level = logging.WARNING if first and not left else logging.INFO
        text = "further connections to rank %d could not be made, going on without them: %s"
        logger.log(level, text, self._main.peer, error)

    @abstractmethod
    def _talk(self, lane: Stream, channel: Channel) -> None:
        """Run the conversation of one lane until its verdict."""

    def _ended(self, lane: Stream) -> None:
        """Called when a lane has ended, well or not."""


class ReceiverLanes(LaneWorkers):
    """The receiver's lanes: each asks the source for parcels that nobody else has been asked for."""

    def __init__(self, pool: Pool, entrances: Sequence[Entrance], conversation: Conversation) -> None:
        super().__init__(pool, conversation.channel, entrances)
        self._conversation = conversation
        self._holders = {entrance.number: _holder_of(self._main.peer, at) for at, entrance in enumerate(entrances)}
        for holder in self._holders.values():
            conversation.ledger.add_lane(holder, self._main.peer)
        self._incoming: dict[int, Incoming] = {}

    def connect(self, theirs: messages.Lanes) -> None:
        """Use the lanes that the source agrees to. Raises if it names lanes that it was not asked for."""
        wanted = {entrance.number: entrance.is_new for entrance in self._entrances}
        named = dict([*((number, False) for number in theirs.known), *((number, True) for number in theirs.new)])
        if len(named) < len(theirs.numbers) or not named.items() <= wanted.items():
            raise ProtocolError(self._main.peer, f"rank {self._main.peer} agreed to lanes that were not wanted")
        for entrance in self._entrances:
            if entrance.number not in named:
                entrance.close()
        self._entrances = [entrance for entrance in self._entrances if entrance.number in named]
        self._place = theirs.place
        self.start()

    @property
    def used(self) -> int:
        return len(self._conversation.brought_by & set(self._holders.values()))

    def leave(self) -> None:
        """Abandon a silent source, from another thread. After this call, nothing lands that its lanes bring.

        Only allowed if all that is in flight is staging, as with several sources.
        """
        with self._changed:
            self._over = True
            left = dict(self._incoming)
            self._changed.notify_all()
        for holder, incoming in left.items():
            incoming.leave()
            self._conversation.ledger.give_back(holder)

    def _talk(self, lane: Stream, channel: Channel) -> None:
        holder, conversation = self._holders[lane.number], self._conversation
        receive = conversation.receive
        with self._changed:
            incoming = self._incoming[holder] = conversation.incoming(channel, holder)
        while True:
            with channel.holding_turn():
                numbers = receive.lane_task(channel.peer, holder, conversation.request_bytes(), lambda: self._over)
            if not len(numbers):
                break
            with self._using(lane, channel):
                channel.send(Message.MORE, messages.encode(messages.More(conversation.pairs(numbers))))
                channel.expect(Message.AGREED)
                incoming.take(numbers, partial(conversation.more, holder))
            conversation.sort_out(holder, incoming.wrong)
        channel.send(Message.VERDICT, messages.encode(messages.Verdict()))
        channel.settle()

    def _ended(self, lane: Stream) -> None:
        self._conversation.ledger.give_back(self._holders[lane.number])


def _holder_of(peer: int, at: int) -> int:
    """The number of a lane in the ledger. It is no rank, and no other lane's."""
    return -(1000 + peer * (messages.MOST_LANES + 1) + at)


def check_wanted(peer: int, wanted: messages.Lanes, most: int) -> None:
    """Raise if an honest receiver, to which ``most`` lanes were offered, would not want these."""
    numbers = wanted.numbers
    if len(numbers) > most:
        raise ProtocolError(peer, f"rank {peer} wants {len(numbers)} lanes, and {most} were offered")
    if len(set(numbers)) < len(numbers):
        raise ProtocolError(peer, f"rank {peer} wants the same lane twice")


class SourceLanes(LaneWorkers):
    """The source's lanes: each sends the parcels that the receiver asks for on it.

    ``outgoing`` makes what sends on a channel. ``read`` reads a request: which parcels to send. ``count`` counts what
    was sent.
    """

    def __init__(
        self,
        pool: Pool,
        main: Channel,
        entrances: Sequence[Entrance],
        caller: Caller,
        *,
        place: messages.Place | None,
        outgoing: Callable[[Channel], Outgoing],
        read: Callable[[Channel, bytearray], Sequence[int]],
        count: Callable[[Outgoing], object],
    ) -> None:
        super().__init__(pool, main, entrances)
        self._place = place
        self._caller = caller
        self._outgoing = outgoing
        self._read = read
        self._count = count
        self._used: set[int] = set()

    @property
    def used(self) -> int:
        return len(self._used)

    def _talk(self, lane: Stream, channel: Channel) -> None:
        outgoing: Outgoing | None = None
        borrower = -lane.number
        try:
            while True:
                header, body = channel.expect(Message.MORE, Message.VERDICT)
                if header.kind is Message.VERDICT:
                    return
                with self._using(lane, channel):
                    self._caller.lend(borrower)
                    channel.phase = self._main.phase
                    outgoing = outgoing or self._outgoing(channel)
                    numbers = self._read(channel, body)
                    channel.send(Message.AGREED, messages.encode(messages.Agreed()))
                    try:
                        outgoing.send(numbers)
                    finally:
                        if outgoing.parcels:
                            self._used.add(lane.number)
                        self._count(outgoing)
                self._caller.returned(borrower)
        except BaseException as error:
            if not channel.broken:
                channel.refuse(error)
            raise
        finally:
            self._caller.returned(borrower)
