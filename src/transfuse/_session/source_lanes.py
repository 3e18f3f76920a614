"""The source's lanes: each sends the parcels that the receiver asks for on it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from transfuse._errors import ProtocolError
from transfuse._session.lanes import LaneWorkers
from transfuse._session.outgoing import Outgoing
from transfuse._session.threads import Caller
from transfuse._wire import messages
from transfuse._wire.channel import Channel
from transfuse._wire.lanes import Entrance
from transfuse._wire.messages import Message
from transfuse._wire.pool import Pool
from transfuse._wire.stream import Stream


def check_wanted(peer: int, wanted: messages.Lanes, most: int) -> None:
    """Raise if an honest receiver, to which ``most`` lanes were offered, would not want these."""
    numbers = wanted.numbers
    if len(numbers) > most:
        raise ProtocolError(peer, f"rank {peer} wants {len(numbers)} lanes, and {most} were offered")
    if len(set(numbers)) < len(numbers):
        raise ProtocolError(peer, f"rank {peer} wants the same lane twice")


class SourceLanes(LaneWorkers):
    """See :class:`LaneWorkers`.

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
