"""Introductions: two ends that meet over a process group move their conversation to a stream, or agree not to.

    source                                                    receiver
      | -- meet: streams that are there, a number, a place, -->  |
      |    and the offer if it is short                          |
      |                                                          |  takes one of them, or connects to the place
      | <- met: the stream's number; or a new one, and a place - |
      |  only if the receiver could not connect:                 |
      |  the source connects to the receiver's place             |
      | -- go: whether that succeeded -------------------------> |

All of this travels over the group. Everything that follows travels over the stream, or over the group if there is none.
So both ends always know which: neither decides by a timeout of its own. If the two could not connect, the transport
does not try again for a while.

With ``tls=`` there is no going on over the group, where nothing is encrypted: if the two cannot connect, or do not
accept each other's certificates, the conversation ends. And the offer follows over the stream, however short it is.
"""

from __future__ import annotations

import logging

from transfuse._errors import PeerLost, PeerNotTrusted, ProtocolError, TransfuseError
from transfuse._timeouts import Patience
from transfuse._wire import messages
from transfuse._wire.channel import Channel
from transfuse._wire.framed import AnySocket
from transfuse._wire.meeting import Meeting, new_number
from transfuse._wire.messages import MOST_KNOWN, Meet, Message, Met, Place
from transfuse._wire.pool import Pool
from transfuse._wire.stream import Stream

logger = logging.getLogger("transfuse")


def introduce(
    channel: Channel, pool: Pool | None, tag: int | None, offer: bytes = b"", *, always: bool = False
) -> bool:
    """At the source: propose a stream. Whether the receiver has been told anything; ``always``: it expects that.

    ``tag``: on which the receiver hears the first word of this conversation. ``offer``: what it hears with that.
    """
    peer = channel.peer
    meeting = pool.meeting(peer) if pool is not None and pool.can_move(peer) else None
    if pool is None or meeting is None:
        check_plain(channel, pool)
        return always and _propose_nothing(channel, tag)
    known, new = pool.take(peer, is_source=True), new_number() if pool.may_meet(peer) else 0
    stream: Stream | None = None
    try:
        if not known and not new:
            return always and _propose_nothing(channel, tag)
        if new:
            meeting.expected.add(new)
        meet = Meet(sorted(known)[:MOST_KNOWN], new, meeting.place() if new else None, offer)
        channel.send(Message.MEET, messages.encode(meet), note=channel.tag, tag=tag)
        met = channel.decode(channel.expect(Message.MET)[1], Met)
        if met.place is not None:
            if not new:
                raise ProtocolError(peer, f"rank {peer} wants a connection that was not proposed")
            stream = _dialled(meeting, met.place, channel, met.number, encrypted=pool.tls is not None, by_source=True)
            if stream is None:
                check_plain(channel, pool)  # The receiver hears why, instead of whether.
                _say(pool, peer)
            channel.send(Message.GO, note=stream is not None)
        elif met.number in known:
            stream = known.pop(met.number)
        elif new and met.number == new:
            stream = _there(_made_of(meeting.expected.wait(new, channel.timeout), channel, new), peer)
        elif met.number:
            raise ProtocolError(peer, f"rank {peer} chose a stream that was not proposed")
        elif new:
            pool.give_up(peer, failed=False)
            check_plain(channel, pool, "the receiver has not connected")
            logger.info("rank %d: it makes no connection now; its bytes go over the group", peer)
    except BaseException:
        if stream is not None:
            stream.close()
        raise
    finally:
        if new:
            meeting.expected.forget(new)
        for one in known.values():
            pool.keep(peer, one, is_source=True)
    if stream is not None:
        channel.move_to(stream)
    return True


def check_plain(channel: Channel, pool: Pool | None, why: str = "no connection could be made") -> None:
    """Raise if this conversation must not go on over the group."""
    if pool is not None and pool.must_move(channel.peer):
        raise PeerLost(
            channel.peer,
            f"rank {channel.peer}: {why}, and with tls= nothing goes over the process group, which does not encrypt: "
            "give both ranks the same tls=, see that one can connect to the other, or pass tls=False",
        )


def _propose_nothing(channel: Channel, tag: int | None) -> bool:
    channel.send(Message.MEET, messages.encode(Meet([], 0, None)), note=channel.tag, tag=tag)
    channel.expect(Message.MET)
    return True


def answer(channel: Channel, pool: Pool | None, body: bytearray) -> bytes:
    """At the receiver: answer a source that proposes a stream. Return the offer that came with that, if any."""
    meet, peer = channel.decode(body, Meet), channel.peer
    meeting = pool.meeting(peer) if pool is not None and pool.can_move(peer) else None
    stream: Stream | None = None
    if meeting is None or not (meet.known or meet.new):
        check_plain(channel, pool, "it proposes no connection, or this transport is closed")
    if pool is not None and meeting is not None:
        stream = _known(pool, peer, meet)
        if stream is None and meet.new and pool.may_meet(peer):
            stream = _dialled(meeting, meet.place, channel, meet.new, encrypted=pool.tls is not None)
            if stream is None:
                stream = _let_source_dial(channel, pool, meeting)
                if stream is not None:
                    channel.move_to(stream)
                return meet.offer
    if stream is None:
        check_plain(channel, pool)
    try:
        channel.send(Message.MET, messages.encode(Met(0 if stream is None else stream.number)))
    except BaseException:
        if stream is not None:
            stream.close()
        raise
    if stream is not None:
        channel.move_to(stream)
    return meet.offer


def _known(pool: Pool, peer: int, meet: Meet) -> Stream | None:
    """A stream that both ends have from an earlier transfer."""
    there = pool.take(peer, is_source=False)
    both = there.keys() & set(meet.known)
    stream = there.pop(min(both)) if both else None
    for one in there.values():
        pool.keep(peer, one, is_source=False)
    return stream


def _let_source_dial(channel: Channel, pool: Pool, meeting: Meeting) -> Stream | None:
    """This receiver could not connect. Tell the source where it can."""
    peer, place, number = channel.peer, meeting.place(), new_number()
    if place is None:
        check_plain(channel, pool)
        channel.send(Message.MET, messages.encode(Met(0)))
        _say(pool, peer)
        return None
    meeting.expected.add(number)
    try:
        channel.send(Message.MET, messages.encode(Met(number, place)))
        if not channel.expect(Message.GO)[0].note:
            _say(pool, peer)
            check_plain(channel, pool)
            return None
        sock = meeting.expected.wait(number, channel.timeout)
        return _there(_made_of(sock, channel, number, dialled_by_source=True), peer)
    finally:
        meeting.expected.forget(number)


def _dialled(
    meeting: Meeting, place: Place | None, channel: Channel, number: int, *, encrypted: bool, by_source: bool = False
) -> Stream | None:
    """A stream to a place that the peer has named; None if no connection can be made.

    An end that is reached and not trusted, or does not trust this one, is no case for the other direction.
    """
    seconds = Patience(channel.timeout).connection(encrypted=encrypted)
    try:
        sock = meeting.dial(place, number, seconds)
        return _made_of(sock, channel, number, dialled_by_source=by_source)
    except PeerNotTrusted as error:
        raise PeerNotTrusted(channel.peer, f"rank {channel.peer}, at {error}") from error
    except (TransfuseError, OSError) as error:
        logger.debug("rank %d: no connection: %s", channel.peer, error)
    return None


def _there(stream: Stream | None, peer: int) -> Stream:
    if stream is None:
        raise PeerLost(peer, f"rank {peer} says that it has connected, but its connection is not here")
    return stream


def _made_of(
    sock: AnySocket | None, channel: Channel, number: int, *, dialled_by_source: bool = False
) -> Stream | None:
    if sock is None:
        return None
    group = channel.group
    stream = Stream(sock, seconds=channel.timeout, rank=group.rank(), size=group.size())
    stream.number, stream.source_dials = number, dialled_by_source
    return stream


def _say(pool: Pool, peer: int) -> None:
    level = logging.WARNING if pool.give_up(peer) else logging.INFO
    logger.log(level, "rank %d: no connection could be made in either direction; its bytes go over the group", peer)
