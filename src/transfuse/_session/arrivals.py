"""Arrivals: the parcels of one source, as a receiver asks for them and as they arrive, over all its connections.

The group's own connection and every lane have a *holder* each: the number by which the ledger knows them. For the
group's own connection it is the source's rank. Each connection has a thread, and all of them use one :class:`Arrivals`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from functools import partial

from transfuse._errors import CorruptData
from transfuse._session.incoming import Incoming
from transfuse._session.movers import incoming_on
from transfuse._session.pulling import leaves_of, some_of
from transfuse._session.receive_from_all import Receive
from transfuse._session.shape import Shape
from transfuse._sizes import Sizes
from transfuse._wire import messages
from transfuse._wire.channel import Channel
from transfuse._wire.messages import Offer


class Arrivals:
    """Asks one source for parcels and takes them in. The threads of all its connections share one."""

    def __init__(self, channel: Channel, shared: Receive, offer: Offer) -> None:
        self._channel = channel
        self._receive = shared
        self._offer = offer
        self._accepted = shared.accepted
        self._ledger = shared.ledger
        self._report = shared.roster.report
        self._progress = shared.roster.progress[channel.peer]
        self._share = shared.share(channel.peer)
        self._lock = threading.Lock()
        #: How often each parcel has arrived from this source with a wrong digest.
        self._wrong: dict[int, int] = {}
        #: How many connections bring parcels from this source.
        self.connections = 1
        #: The holders that have brought parcels.
        self.brought_by: set[int] = set()
        #: How parcels are grouped. Known when the source has agreed to the want.
        self.shape: Shape | None = None

    # -- asking

    @property
    def burst_bytes(self) -> int:
        """The size of a burst. With several sources it is small: all bursts are staged, and should end together."""
        sizes = Sizes(self._channel.limits, self._channel.timeout)
        total, parcel, ahead = self._accepted.cut.total_bytes, self._accepted.parcel_bytes, self._offer.bursts_ahead
        sources = len(self._receive.roster.ranks)
        burst = sizes.burst(self._offer.burst_bytes, total, parcel, sources=sources, ahead=ahead)
        # On a stream no further burst is under way: TCP is the window.
        ahead = 1 if self._channel.streams_parcels else ahead
        return sizes.shared_burst(burst, total, parcel, connections=self.connections, ahead=ahead)

    def request_bytes(self, left: int | None = None) -> float:
        """How many bytes to ask for at a time: everything, if there is only one source and one connection.

        ``left``: how many bytes nobody has been asked for.
        """
        if not self._receive.roster.several and self.connections == 1:
            return float("inf")
        if not self._channel.streams_parcels:
            return self.burst_bytes * self._offer.bursts_ahead
        takers = len(self._receive.roster.ranks) * self.connections
        return Sizes.request(self._ledger.unasked_bytes if left is None else left, self.burst_bytes, takers)

    def pairs(self, numbers: Sequence[int]) -> list[int]:
        """These parcels as ranges of the source's numbers."""
        return messages.pairs_of(self._share.theirs(numbers))

    def next_request(self, lane: int, stopped: Callable[[], bool]) -> Sequence[int]:
        """Wait for parcels that a lane can ask for; empty: there will be none."""
        return self._receive.lane_task(self._channel.peer, lane, self.request_bytes(), stopped)

    def more(self, holder: int) -> tuple[int, Sequence[int]]:
        """Further parcels to ask for. See :meth:`transfuse._session.incoming.Incoming.take`."""
        lane = None if holder == self._channel.peer else holder
        nbytes = self.request_bytes() if self._channel.streams_parcels else self.burst_bytes
        run = self._receive.more(self._channel.peer, nbytes, lane)
        return run.start, self._share.ours(run)

    # -- arriving

    def incoming(self, channel: Channel, holder: int) -> Incoming:
        """What receives parcels on this channel."""
        assert self.shape is not None
        # If a silent peer is abandoned, a backend still writes to the memory that it was given. A stream does not.
        return incoming_on(channel)(
            channel,
            self._accepted.cut,
            self._accepted.landing,
            self.shape,
            self._receive.roster.caller,
            self._progress,
            landed=partial(self.landed, holder),
            always_staged=not channel.streams_parcels and (self._receive.roster.several or channel.group.moves_tensors),
        )

    def landed(self, holder: int, numbers: Sequence[int], digests: Sequence[int], wrong: Sequence[int]) -> None:
        """Record a burst that a connection to the source, or a neighbour, has brought; ``wrong`` parcels included."""
        self._ledger.land(holder, numbers, wrong, digests)
        self.brought_by.add(holder)
        nbytes = self._ledger.bytes_of(numbers)
        self._report.count(self._channel.peer, nbytes, len(numbers), "group")
        if holder >= 0 and holder != self._channel.peer:
            self._report.relayed_bytes += nbytes

    def sort_out(self, holder: int, wrong: Sequence[int]) -> None:
        """Release parcels that arrived wrong, so that any source may be asked again; give up after ``max_repairs``."""
        channel = self._channel
        with self._lock:
            self._report.repaired += len(wrong)
            for number in wrong:
                self._wrong[number] = self._wrong.get(number, 0) + 1
            lasting = [number for number in wrong if self._wrong[number] > channel.limits.max_repairs]
            self._report.repaired -= len(lasting)
        if lasting:
            leaves = leaves_of(self._accepted, lasting)
            raise CorruptData(
                channel.peer,
                leaves,
                f"rank {channel.peer}: {len(lasting)} parcels were still wrong after "
                f"{channel.limits.max_repairs} repairs; leaves: {some_of(leaves)}. The bytes are damaged on the way",
            )
        self.give_back(holder)
        if wrong:
            self._progress.bytes = self._ledger.bytes_from(channel.peer)

    def give_back(self, holder: int) -> None:
        """Release all parcels that the connection has been asked for and has not brought."""
        self._ledger.give_back(holder)
