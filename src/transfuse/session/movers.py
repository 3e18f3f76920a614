"""Which class moves parcels on a channel: rounds over a stream, bursts over a process group."""

from __future__ import annotations

from transfuse.session.bursts import BurstsIn, BurstsOut
from transfuse.session.rounds import RoundsIn, RoundsOut
from transfuse.wire.channel import Channel

__all__ = ["incoming_on", "outgoing_on"]


def outgoing_on(channel: Channel) -> type[BurstsOut | RoundsOut]:
    """The class that sends parcels on this channel."""
    return RoundsOut if channel.streams_parcels else BurstsOut


def incoming_on(channel: Channel) -> type[BurstsIn | RoundsIn]:
    """The class that receives parcels on this channel."""
    return RoundsIn if channel.streams_parcels else BurstsIn
