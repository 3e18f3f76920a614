"""The receiver's conversation with one source: what it asks for, and what has arrived, over all its connections.

The group's own connection and every lane have a *holder* each: the number by which the ledger knows them. For the
group's own connection it is the source's rank. Each connection has a thread, and all of them use one
:class:`Conversation`.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from functools import partial

from transfuse._errors import CorruptData, some_of
from transfuse._session.incoming import Incoming
from transfuse._session.movers import incoming_on
from transfuse._session.receive_from_all import Receive
from transfuse._session.shape import Shape
from transfuse._sizes import Sizes
from transfuse._wire import messages
from transfuse._wire.channel import Channel
from transfuse._wire.messages import Offer


class Conversation:
    """What the connections to one source share, once it is decided that the source is used."""

    def __init__(self, channel: Channel, receive: Receive, offer: Offer) -> None:
        self.channel = channel
        self.receive = receive
        self.offer = offer
        self.roster = roster = receive.roster
        self.accepted = roster.accepted
        self.landing = self.accepted.landing
        self.cut = self.landing.cut
        self.ledger = self.accepted.ledger
        self.report = roster.report
        self.progress = roster.progress[channel.peer]
        #: What this source can send.
        self.share = receive.share(channel.peer)
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
        sizes = Sizes(self.channel.limits, self.channel.timeout)
        total, parcel, ahead = self.cut.total_bytes, self.accepted.parcel_bytes, self.offer.bursts_ahead
        sources = len(self.roster.ranks)
        burst = sizes.burst(self.offer.burst_bytes, total, parcel, sources=sources, ahead=ahead)
        # On a stream no further burst is under way: TCP is the window.
        ahead = 1 if self.channel.streams_parcels else ahead
        return sizes.shared_burst(burst, total, parcel, connections=self.connections, ahead=ahead)

    @property
    def compares_digests(self) -> bool:
        """Whether the receiver compares digests on the group route."""
        verify, device = self.roster.request.options.verify, self.channel.group.device
        # On an accelerator, hashing first copies every byte to the host, so it is done only with verify=True.
        return self.offer.digests and (device.type == "cpu" if verify is None else verify)

    def request_bytes(self, left: int | None = None) -> float:
        """How many bytes to ask for at a time: everything, if there is only one source and one connection.

        ``left``: how many bytes nobody has been asked for.
        """
        if not self.roster.several and self.connections == 1:
            return float("inf")
        if not self.channel.streams_parcels:
            return self.burst_bytes * self.offer.bursts_ahead
        takers = len(self.roster.ranks) * self.connections
        return Sizes.request(self.ledger.unasked_bytes if left is None else left, self.burst_bytes, takers)

    @property
    def compared_bytes(self) -> int:
        """How many bytes to compare at a time."""
        return Sizes.PATCHED_BYTES if self.offer.history else Sizes.COMPARE_BYTES

    def pairs(self, numbers: Sequence[int]) -> list[int]:
        """These parcels as ranges of the source's numbers."""
        return messages.pairs_of(self.share.theirs(numbers))

    def more(self, holder: int) -> tuple[int, Sequence[int]]:
        """Further parcels to ask for. See :meth:`transfuse._session.incoming.Incoming.take`."""
        nbytes = self.request_bytes() if self.channel.streams_parcels else self.burst_bytes
        run = self.receive.more(self.channel.peer, holder, nbytes)
        return run.start, self.share.ours(run)

    # -- arriving

    def incoming(self, channel: Channel, holder: int) -> Incoming:
        """What receives parcels on this channel."""
        assert self.shape is not None
        # If a silent peer is abandoned, a backend still writes to the memory that it was given. A stream does not.
        return incoming_on(channel)(
            channel,
            self.cut,
            self.landing,
            self.shape,
            self.roster.caller,
            self.progress,
            landed=partial(self.landed, holder),
            always_staged=not channel.streams_parcels and (self.roster.several or channel.group.moves_tensors),
        )

    def landed(self, holder: int, numbers: Sequence[int], digests: Sequence[int], wrong: Sequence[int]) -> None:
        """Record a burst that a connection to the source, or a neighbour, has brought; ``wrong`` parcels included."""
        self.ledger.land(holder, numbers, wrong, digests)
        self.brought_by.add(holder)
        nbytes = self.ledger.bytes_of(numbers)
        self.report.count(self.channel.peer, nbytes, len(numbers), "group")
        if holder >= 0 and holder != self.channel.peer:
            self.report.relayed_bytes += nbytes

    def sort_out(self, holder: int, wrong: Sequence[int]) -> None:
        """Release parcels that arrived wrong, so that any source may be asked again; give up after ``max_repairs``."""
        channel = self.channel
        with self._lock:
            self.report.repaired += len(wrong)
            for number in wrong:
                self._wrong[number] = self._wrong.get(number, 0) + 1
            lasting = [number for number in wrong if self._wrong[number] > channel.limits.max_repairs]
            self.report.repaired -= len(lasting)
        if lasting:
            leaves = self.accepted.leaves_of(lasting)
            raise CorruptData(
                channel.peer,
                leaves,
                f"rank {channel.peer}: {len(lasting)} parcels were still wrong after "
                f"{channel.limits.max_repairs} repairs; leaves: {some_of(leaves)}. The bytes are damaged on the way",
            )
        self.ledger.give_back(holder)
        if wrong:
            self.progress.bytes = self.ledger.bytes_from(channel.peer)
