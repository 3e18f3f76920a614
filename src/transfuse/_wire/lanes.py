"""Lanes: further streams between a source and a receiver, beside the one that their conversation has.

One connection uses one core at each end, and clouds limit the rate of each connection. So two ends that move much use
several. The receiver names numbers for them. The end that has dialled for the conversation's own stream dials for these
too: in the other direction there may be a firewall. Nobody waits for a lane that is being formed, and a lane that fails
costs only what was under way on it.
"""

from __future__ import annotations

from transfuse._errors import TransfuseError
from transfuse._timeouts import Patience
from transfuse._wire.meeting import Expected, new_number
from transfuse._wire.messages import Lanes, Place
from transfuse._wire.pool import Pool
from transfuse._wire.stream import Stream


class NotWanted(TransfuseError):
    """The transfer was over before this lane was formed."""


class Entrance:
    """How one end gets one lane: a stream that is there already, or a new one. ``dials``: this end makes new ones."""

    def __init__(
        self,
        pool: Pool,
        peer: int,
        number: int,
        patience: Patience,
        *,
        dials: bool,
        is_source: bool,
        lane: Stream | None = None,
    ) -> None:
        self.number = number
        self._source_dials = dials == is_source
        self._pool, self._peer, self._patience = pool, peer, patience
        self._meeting = pool.meeting(peer)
        self._lane = lane
        self._is_over = False
        self._waits = lane is None and not dials and self._meeting is not None
        if self._waits:
            self._expected.add(number)

    @property
    def _expected(self) -> Expected:
        assert self._meeting is not None
        return self._meeting.expected

    @property
    def is_new(self) -> bool:
        return self._lane is None

    def form(self, place: Place | None) -> Stream:
        """The lane. ``place``: where the other end listens, if this end dials and has to be told."""
        lane = self._lane or self._new(place)
        lane.set_patience(self._patience.lane)
        return lane

    def _new(self, place: Place | None) -> Stream:
        seconds = self._patience.connection(encrypted=self._pool.tls is not None)
        with self._pool.forming(self._peer):
            if self._meeting is None:
                raise TransfuseError("this process cannot listen")
            if self._waits:
                sock = self._expected.wait(self.number, seconds)
            else:
                sock = self._meeting.dial(place, self.number, seconds)
        if sock is None:
            raise (
                NotWanted("the transfer is over") if self._is_over else TransfuseError("the other end did not connect")
            )
        group = self._pool.group
        lane = Stream(sock, seconds=seconds, rank=group.rank(), size=group.size())
        # A later conversation may have it as its own stream, and form lanes in the same direction.
        lane.number, lane.source_dials = self.number, self._source_dials
        return lane

    def close(self) -> None:
        """The other end does not want this lane."""
        self.give_up()
        if self._lane is not None:
            self._lane.close()

    def give_up(self) -> None:
        """The transfer is over: expect no connection any more."""
        self._is_over = True
        if self._waits:
            self._expected.forget(self.number)


def enter(pool: Pool, peer: int, count: int, patience: Patience, *, dials: bool) -> list[Entrance]:
    """At the receiver: the entrances of ``count`` lanes, or fewer if no new ones are formed now."""
    there = pool.take(peer, is_source=False)
    entrances: list[Entrance] = []
    while there and len(entrances) < count:
        number, lane = there.popitem()
        entrances.append(Entrance(pool, peer, number, patience, dials=dials, is_source=False, lane=lane))
    for lane in there.values():
        pool.keep(peer, lane, is_source=False)
    if pool.may_form(peer):
        new = range(count - len(entrances))
        entrances += [Entrance(pool, peer, new_number(), patience, dials=dials, is_source=False) for _ in new]
    return entrances


def accept(pool: Pool, peer: int, wanted: Lanes, patience: Patience, *, dials: bool) -> list[Entrance]:
    """At the source: the entrances of the lanes that the receiver wants."""
    known = pool.take(peer, is_source=True)
    mine = [
        Entrance(pool, peer, number, patience, dials=dials, is_source=True, lane=known.pop(number))
        for number in wanted.known
        if number in known
    ]
    for lane in known.values():
        lane.close()  # The receiver no longer has it.
    new = wanted.new if pool.may_form(peer) else ()
    return mine + [Entrance(pool, peer, number, patience, dials=dials, is_source=True) for number in new]
