"""Which class moves parcels on a channel: rounds over a stream, bursts over a process group."""

from __future__ import annotations

from transfuse._session.bursts import BurstsIn, BurstsOut
from transfuse._session.rounds import RoundsIn, RoundsOut
from transfuse._wire.channel import Channel


def outgoing_on(channel: Channel) -> type[BurstsOut | RoundsOut]:
    """The class that sends parcels on this channel."""
    return RoundsOut if channel.streams_parcels else BurstsOut


def incoming_on(channel: Channel) -> type[BurstsIn | RoundsIn]:
    """The class that receives parcels on this channel."""
    return RoundsIn if channel.streams_parcels else BurstsIn
