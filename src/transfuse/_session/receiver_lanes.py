"""The receiver's lanes: each asks the source for parcels that nobody else has been asked for."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from transfuse._errors import ProtocolError
from transfuse._session.arrivals import Arrivals
from transfuse._session.incoming import Incoming
from transfuse._session.lanes import LaneWorkers
from transfuse._wire import messages
from transfuse._wire.channel import Channel
from transfuse._wire.lanes import Entrance
from transfuse._wire.messages import Message
from transfuse._wire.pool import Pool
from transfuse._wire.stream import Stream


class ReceiverLanes(LaneWorkers):
    """See :class:`LaneWorkers`."""

    def __init__(self, pool: Pool, main: Channel, entrances: Sequence[Entrance], arrivals: Arrivals) -> None:
        super().__init__(pool, main, entrances)
        self._arrivals = arrivals
        self.holders = {entrance.number: holder_of(main.peer, at) for at, entrance in enumerate(entrances)}
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
        return len(self._arrivals.brought_by & set(self.holders.values()))

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
            self._arrivals.give_back(holder)

    def _talk(self, lane: Stream, channel: Channel) -> None:
        holder, arrivals = self.holders[lane.number], self._arrivals
        with self._changed:
            incoming = self._incoming[holder] = arrivals.incoming(channel, holder)
        while True:
            with channel.holding_turn():
                numbers = arrivals.next_request(holder, lambda: self._over)
            if not len(numbers):
                break
            with self._using(lane, channel):
                channel.send(Message.MORE, messages.encode(messages.More(arrivals.pairs(numbers))))
                channel.expect(Message.AGREED)
                incoming.take(numbers, partial(arrivals.more, holder))
            arrivals.sort_out(holder, incoming.wrong)
        channel.send(Message.VERDICT, messages.encode(messages.Verdict()))
        channel.settle()

    def _ended(self, lane: Stream) -> None:
        self._arrivals.give_back(self.holders[lane.number])


def holder_of(peer: int, at: int) -> int:
    """The number of a lane in the ledger. It is no rank, and no other lane's."""
    return -(1000 + peer * (messages.MOST_LANES + 1) + at)
