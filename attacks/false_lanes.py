"""A peer wants or agrees to further connections (lanes) that cannot be, or lies on them.

Expected: numbers and places that no honest end says are a ProtocolError that names the rank. A lane that is not formed,
or whose other end lies, falls silent or is cut, costs only itself: everything arrives over the conversation's own
stream.
"""

from __future__ import annotations

import contextlib
import os
import socket
import sys
from collections.abc import Callable
from typing import Any

from attacks.peer import (
    AGREED,
    CANCEL,
    CHECK,
    FIRST_LINK_TAG,
    GOT,
    MORE,
    OFFER,
    PARCEL,
    REFUSAL,
    VERDICT,
    WANT,
    WANT_FIELDS,
    Peer,
    Silence,
    expand,
    header,
    note,
    offer,
    pattern,
    record,
    want,
)
from attacks.places import BAD_PLACES, PLACES, place_of
from attacks.stage import Attack, Expected, main, receive, send
from attacks.stream_peer import Door, StreamPeer, dial, new_number, take

N = 8 * PARCEL
STREAM = ("stream",)

WELL_AS_SOURCE = Expected("source", None)
WELL_AS_RECEIVER = Expected("receiver", None, route="group")


def broken(at: str, words: str) -> Expected:
    return Expected(at, "ProtocolError", f"rank 1.*{words}")


def on_streams(honest: Any, hostile: Any, expected: Expected) -> Attack:
    return Attack(honest, hostile, expected, wires=STREAM)


# -- as a receiver


def lanes(known: Any = (), new: Any = (), first: Any = 1, place: Any = None) -> list[Any]:
    return [list(known), list(new), first, place]


LANE_FIELDS: dict[str, tuple[list[Any], str]] = {
    "16 new lanes": (lanes(new=range(1, 17)), "malformed want"),
    "10,000 old lanes": (lanes(known=[1] * 10_000), "malformed want"),
    "more lanes than were offered": (lanes(new=range(1, 5)), "wants 4 lanes, and 3 were offered"),
    "more old lanes than were offered": (lanes(known=[1, 2, 3, 4]), "wants 4 lanes, and 3 were offered"),
    "lane 0": (lanes(new=[0]), "malformed want"),
    "lane -1, which would be rank 1": (lanes(new=[-1]), "malformed want"),
    "old lane -1": (lanes(known=[-1]), "malformed want"),
    "lane 2**62": (lanes(new=[1 << 62]), "malformed want"),
    "lane 2**64 - 1": (lanes(known=[(1 << 64) - 1]), "malformed want"),
    "a lane that is a name": (lanes(known=["first"]), "malformed want"),
    "a lane twice": (lanes(new=[7, 7]), "wants the same lane twice"),
    "an old lane twice": (lanes(known=[7, 7]), "wants the same lane twice"),
    "an old lane that is new": (lanes(known=[7], new=[7]), "wants the same lane twice"),
    "less than no parcels at first": (lanes(first=-1), "malformed want"),
    "one field": ([[]], "malformed want"),
    "five fields": ([*lanes(), 0], "malformed want"),
    **{f"lanes at {name}": (lanes(new=[7], place=place), "malformed want") for name, place in BAD_PLACES.items()},
}


def wanted(plain: Any) -> Any:
    def hostile(peer: StreamPeer) -> None:
        peer.hear_offer()
        peer.say(WANT, want(N, lanes=plain))
        assert peer.hear_end() is not None, "the receiver was not told"

    return hostile


def take_all(peer: StreamPeer, agreed: list[Any]) -> None:
    """The rest of an honest receiver, over the conversation's own stream."""
    count = N // PARCEL
    first = count if len(agreed) < 5 or agreed[4] is None else 1
    data = b"".join(peer.take_burst() for _ in range(first))
    if first < count:
        peer.say(MORE, [[first, count]])
        assert peer.hear().kind == AGREED
        data += b"".join(peer.take_burst() for _ in range(count - first))
    assert data == pattern(N)
    peer.say(CHECK)
    peer.hear()
    peer.say(VERDICT, [{}])


def wants(new: Any = (), known: Any = (), *, agrees: bool | None = None, place: str = "no place") -> Any:
    """These lanes, and then an honest receive."""

    def hostile(peer: StreamPeer) -> None:
        peer.hear_offer()
        peer.say(WANT, want(N, lanes=lanes(known, new, place=place_of(place))))
        agreed = peer.hear().plain
        assert agrees is None or (agreed[4] is not None) == agrees
        take_all(peer, agreed)

    return hostile


def joins(talk: Callable[[StreamPeer, list[int], Any], None]) -> Any:
    """Two lanes are agreed to. ``talk`` gets their numbers and the source's place."""

    def hostile(peer: StreamPeer) -> None:
        peer.hear_offer()
        numbers = [new_number(), new_number()]
        peer.say(WANT, want(N, lanes=lanes(new=numbers)))
        agreed = peer.hear().plain
        known, new, _, place = agreed[4]
        assert (known, new) == ([], numbers)
        talk(peer, numbers, place)
        take_all(peer, agreed)

    return hostile


def lane_of(peer: StreamPeer, sock: socket.socket) -> StreamPeer:
    lane = peer.link(peer.tag, peer.transfer)
    assert isinstance(lane, StreamPeer)
    lane.move_to(sock)
    return lane


def never(peer: StreamPeer, numbers: list[int], place: Any) -> None:
    """It never connects."""


def as_another(peer: StreamPeer, numbers: list[int], place: Any) -> None:
    with dial(place, numbers[0] ^ 1) as sock, contextlib.suppress(Silence):
        take(sock, 1)
        raise AssertionError("who has another number got something")


def with_a_wrong_token(peer: StreamPeer, numbers: list[int], place: Any) -> None:
    with contextlib.suppress(Silence):
        dial([place[0], bytes(32)], numbers[0])
        raise AssertionError("it was let in")


def on_lane(say: Callable[[StreamPeer], object]) -> Any:
    """A lane that is formed as it should be, and then something that no honest end says."""

    def talk(peer: StreamPeer, numbers: list[int], place: Any) -> None:
        say(lane_of(peer, dial(place, numbers[0])))

    return talk


def leave_both(peer: StreamPeer, numbers: list[int], place: Any) -> None:
    for number in numbers:
        dial(place, number).close()


def same_lane_twice(peer: StreamPeer, numbers: list[int], place: Any) -> None:
    lane = lane_of(peer, dial(place, numbers[0]))
    lane.say(MORE, [[1, 2]])
    assert lane.hear().kind == AGREED
    with dial(place, numbers[0]) as sock, contextlib.suppress(Silence):
        take(sock, 1)
        raise AssertionError("somebody talks on the second connection")
    lane.take_burst()


def ask_without_end(lane: StreamPeer) -> None:
    with contextlib.suppress(Silence):
        for _ in range(300):
            lane.say(MORE, [[0, 1]])
            if lane.hear().kind != AGREED:
                return
            lane.take_burst()
        raise AssertionError("it got the same parcel 300 times")


def ask_and_take_nothing(lane: StreamPeer) -> None:
    lane.say(MORE, [[0, N // PARCEL]])
    lane.hear()


def ask_and_leave(lane: StreamPeer) -> None:
    lane.say(MORE, [[1, N // PARCEL]])
    lane.hear()
    lane.recv(100)
    lane.close()


def answer_for_more_than_there_is(lane: StreamPeer) -> None:
    lane.say(MORE, [[0, 1]])
    lane.hear()
    lane.take_burst(answer=note(0, (1 << 32) - 1, (1 << 31) - 1))
    lane.hear_end(1.0)


def send_parcels(lane: StreamPeer) -> None:
    """To a source, which never asked for any."""
    with contextlib.suppress(Silence):
        for _ in range(100):
            lane.send(bytes(PARCEL) + record(lane.transfer, [0]))


SAID_ON_A_LANE: dict[str, Callable[[StreamPeer], object]] = {
    "nothing": lambda lane: None,
    "noise": lambda lane: lane.send(os.urandom(4096)),
    "half a header": lambda lane: lane.send(header(MORE, lane.transfer)[:20]),
    "a message of another transfer": lambda lane: lane.say(MORE, [[0, 1]], transfer=99),
    "another want": lambda lane: lane.say(WANT, want(N)),
    "a refusal": lambda lane: lane.say(REFUSAL, ["Spite", "why not"]),
    "a refusal without end": lambda lane: lane.send(header(REFUSAL, lane.transfer, length=1 << 63)),
    "a verdict of nonsense": lambda lane: lane.say(VERDICT, b"\xc1"),
    "that it wants nothing": lambda lane: lane.say(MORE, [[]]),
    "that it wants what is not there": lambda lane: lane.say(MORE, [[0, 1 << 40]]),
    "the same request without end": ask_without_end,
    "that it wants all, and takes nothing": ask_and_take_nothing,
    "that it wants all, and leaves in the middle of a parcel": ask_and_leave,
    "that it wants two thousand million more": answer_for_more_than_there_is,
    "parcels that nobody asked for": send_parcels,
}


LANES_FOR_A_SOURCE = {
    **{
        name: on_streams(send(nbytes=N, lanes=4), wanted(plain), broken("source", words))
        for name, (plain, words) in LANE_FIELDS.items()
    },
    "old lanes that were never there": on_streams(
        send(nbytes=N, lanes=4), wants(known=[5, 6, 7], agrees=False), WELL_AS_SOURCE
    ),
    "lanes for a source that has none": on_streams(
        send(nbytes=N, lanes=1), wanted(lanes(new=[7])), broken("source", "0 were offered")
    ),
    "lanes at a place that the source does not need": on_streams(
        send(nbytes=N, lanes=4), wants(new=[7], place="nobody"), WELL_AS_SOURCE
    ),
    **{
        f"a lane: {name}": on_streams(send(nbytes=N, lanes=4, timeout=3), joins(talk), WELL_AS_SOURCE)
        for name, talk in {
            "that never comes": never,
            "under another number": as_another,
            "with a wrong token": with_a_wrong_token,
            "that closes": leave_both,
            "that comes twice": same_lane_twice,
        }.items()
    },
    **{
        f"on a lane: {name}": on_streams(send(nbytes=N, lanes=4, timeout=3), joins(on_lane(say)), WELL_AS_SOURCE)
        for name, say in SAID_ON_A_LANE.items()
    },
}


# -- as a source


def offers(answer: Callable[[list[int]], Any], then: Callable[[StreamPeer, list[int]], None] | None = None) -> Any:
    """An honest source but for its answer about lanes, and for what it does ``then``."""

    def hostile(peer: StreamPeer) -> None:
        peer.say_offer(offer(nbytes=N, connections=4))
        plain = dict(zip(WANT_FIELDS, peer.hear().plain, strict=True))
        known, new, first, place = plain["lanes"]
        assert (known, len(new), place) == ([], 3, None)
        peer.say(AGREED, [None, None, 0.0, False, answer(new)])
        if then is not None:
            then(peer, new)
        peer.feed(pattern(N), expand(plain["parcels"])[:first], plain["parcel_bytes"])
        peer.serve(pattern(N))

    return hostile


def refused_lanes(answer: Callable[[list[int]], Any]) -> Any:
    def hostile(peer: StreamPeer) -> None:
        peer.say_offer(offer(nbytes=N, connections=4))
        plain = dict(zip(WANT_FIELDS, peer.hear().plain, strict=True))
        wanted_lanes = plain["lanes"]
        peer.say(AGREED, [None, None, 0.0, False, answer([] if wanted_lanes is None else wanted_lanes[1])])
        assert peer.hear_end() is not None, "the source was not told"

    return hostile


def agreed_to_more(extra: list[Any]) -> Any:
    """An honest source that answers a further request with a chain or with lanes."""

    def hostile(peer: Peer) -> None:
        peer.say_offer(offer(nbytes=N, connections=1))
        plain = dict(zip(WANT_FIELDS, peer.hear().plain, strict=True))
        peer.agree()
        wrong = [0]
        peer.feed(pattern(N), expand(plain["parcels"]), plain["parcel_bytes"], digest=lambda n, d: d ^ (n in wrong))
        assert peer.hear().kind == MORE
        peer.say(AGREED, extra)
        peer.hear_end()

    return hostile


NOT_WANTED = "agreed to lanes that were not wanted"

ANSWERS: dict[str, tuple[Callable[[list[int]], Any], str]] = {
    "agrees to a lane that was not wanted": (lambda new: lanes(new=[7]), NOT_WANTED),
    "agrees to an old lane that was never there": (lambda new: lanes(known=[7]), NOT_WANTED),
    "agrees to new lanes as old ones": (lambda new: lanes(known=new), NOT_WANTED),
    "agrees to a lane twice": (lambda new: lanes(new=new[:1] * 2), NOT_WANTED),
    "agrees to lane -1": (lambda new: lanes(known=[-1]), "malformed agreed"),
    "agrees to 16 lanes": (lambda new: lanes(new=range(1, 17)), "malformed agreed"),
    **{
        f"agrees to lanes at {name}": (lambda new, place=place: lanes(new=new, place=place), "malformed agreed")  # type: ignore[misc]
        for name, place in BAD_PLACES.items()
    },
}


def lets_in(say: Callable[[StreamPeer], object]) -> Any:
    """Lanes that are formed as they should be. On each of them the source does this."""
    door: list[Door] = []

    def answer(new: list[int]) -> Any:
        door[:] = [Door()]
        return lanes(new=new, place=door[0].place)

    def then(peer: StreamPeer, new: list[int]) -> None:
        for number in new:
            with contextlib.suppress(Silence):
                say(lane_of(peer, door[0].wait(number)))

    return offers(answer, then)


def agree_and(say: Callable[[StreamPeer], object]) -> Callable[[StreamPeer], object]:
    """Hear the first request on a lane, agree to it, and then this."""

    def act(lane: StreamPeer) -> None:
        assert lane.hear(seconds=2.0).kind == MORE
        lane.agree()
        say(lane)

    return act


def wrong_parcels(lane: StreamPeer) -> None:
    """Right digests, wrong bytes, for everything that is asked for."""
    lane._is_over = False
    while not lane._is_over:
        numbers = expand(lane.hear(seconds=2.0).plain[0])
        lane.agree()
        lane.feed(pattern(N), numbers, damage=lambda number, parcel: bytes(len(parcel)))


def leave_in_the_middle(lane: StreamPeer) -> None:
    lane.send(bytes(1000))
    lane.close()


def answer_with_a_chain(lane: StreamPeer) -> None:
    lane.hear(seconds=2.0)
    lane.say(AGREED, [[1, FIRST_LINK_TAG, 7], None, 1.0])


DONE_ON_A_LANE: dict[str, Callable[[StreamPeer], object]] = {
    "closes": lambda lane: lane.close(),
    "says nothing": lambda lane: None,
    "makes noise": lambda lane: lane.send(os.urandom(4096)),
    "sends parcels that nobody asked for": lambda lane: lane.send((bytes(PARCEL) + record(lane.transfer, [0])) * 20),
    "sends an agreement that nobody asked for": lambda lane: lane.agree(),
    "refuses": lambda lane: lane.say(REFUSAL, ["Spite", "why not"]),
    "answers with a chain": answer_with_a_chain,
    "agrees, and closes": agree_and(lambda lane: lane.close()),
    "agrees, and says nothing": agree_and(lambda lane: None),
    "agrees, and closes in the middle of a parcel": agree_and(leave_in_the_middle),
    "agrees, and falls silent in the middle of a parcel": agree_and(lambda lane: lane.send(bytes(1000))),
    "agrees, and sends wrong parcels": agree_and(
        lambda lane: lane.send((bytes(PARCEL) + record(lane.transfer, [0])) * 8)
    ),
    "agrees, and sends records of another transfer": agree_and(
        lambda lane: lane.send((bytes(PARCEL) + record(99, [0])) * 8)
    ),
    "agrees, and cancels": agree_and(lambda lane: lane.send(bytes(PARCEL) + record(lane.transfer, [0], CANCEL))),
    "sends wrong parcels for ever": wrong_parcels,
    "answers for the receiver": agree_and(lambda lane: lane.say(GOT)),
}


def dials_lanes(what: Callable[[StreamPeer, int, Any], None]) -> Any:
    """A source behind a wall: it has connected, so it connects for the lanes, too. ``what``: for the first of them."""

    def hostile(peer: StreamPeer) -> None:
        peer.dial_instead()
        peer.say(OFFER, offer(nbytes=N, connections=4), note=peer.tag)
        plain = dict(zip(WANT_FIELDS, peer.hear().plain, strict=True))
        _, new, first, place = plain["lanes"]
        assert place is not None
        peer.say(AGREED, [None, None, 0.0, False, lanes(new=new)])
        what(peer, new[0], place)
        peer.feed(pattern(N), expand(plain["parcels"])[:first], plain["parcel_bytes"])
        peer.serve(pattern(N))

    return hostile


def dial_and_serve(peer: StreamPeer, number: int, place: Any) -> None:
    """Honestly."""
    lane = lane_of(peer, dial(place, number))
    asked = lane.hear()
    lane.agree()
    lane.feed(pattern(N), expand(asked.plain[0]))


def dial_twice(peer: StreamPeer, number: int, place: Any) -> None:
    first = dial(place, number)
    lane_of(peer, first).hear()
    with dial(place, number) as sock, contextlib.suppress(Silence):
        take(sock, 1)
        raise AssertionError("somebody talks on the second connection")
    first.close()


def agree_over_the_group(peer: Peer) -> None:
    peer.say_offer(offer(nbytes=N, connections=4))
    peer.hear()
    peer.say(AGREED, [None, None, 0.0, False, lanes(new=[7])])
    peer.hear_end()


LANES_FOR_A_RECEIVER = {
    **{
        name: on_streams(receive(nbytes=N, lanes=4), refused_lanes(answer), broken("receiver", words))
        for name, (answer, words) in ANSWERS.items()
    },
    "agrees to lanes, and none were wanted": on_streams(
        receive(nbytes=N, lanes=1), refused_lanes(lambda new: lanes()), broken("receiver", NOT_WANTED)
    ),
    "agrees to no lane of those": on_streams(
        receive(nbytes=N, lanes=4, in_place=True), offers(lambda new: lanes()), WELL_AS_RECEIVER
    ),
    **{
        f"lanes are to be found at {how}": on_streams(
            receive(nbytes=N, lanes=4, in_place=True),
            offers(lambda new, how=how: lanes(new=new, place=place_of(how))),  # type: ignore[misc]
            WELL_AS_RECEIVER,
        )
        for how in PLACES
    },
    **{
        f"on its lanes a source {name}": on_streams(
            receive(nbytes=N, lanes=4, in_place=True, timeout=3), lets_in(say), WELL_AS_RECEIVER
        )
        for name, say in DONE_ON_A_LANE.items()
    },
    **{
        f"a source that connects for lanes {name}": on_streams(
            receive(nbytes=N, lanes=4, in_place=True, timeout=3), dials_lanes(what), WELL_AS_RECEIVER
        )
        for name, what in {
            "honestly": dial_and_serve,
            "never": lambda peer, number, place: None,
            "twice": dial_twice,
            "under another number": lambda peer, number, place: dial(place, number ^ 1).close(),
            "and closes": lambda peer, number, place: dial(place, number).close(),
        }.items()
    },
}

ATTACKS = {
    **LANES_FOR_A_SOURCE,
    **LANES_FOR_A_RECEIVER,
    # Also on the group, where there are no lanes.
    "agrees to a chain later": Attack(
        receive(nbytes=N, lanes=1),
        agreed_to_more([None, [99, FIRST_LINK_TAG, 7], 1.0]),
        broken("receiver", "agreed to more than it was asked for"),
    ),
    "agrees to lanes later": Attack(
        receive(nbytes=N, lanes=1),
        agreed_to_more([None, None, 0.0, False, lanes()]),
        broken("receiver", "agreed to more than it was asked for"),
    ),
    "lanes over the group": Attack(
        receive(nbytes=N, lanes=4),
        agree_over_the_group,
        broken("receiver", NOT_WANTED),
        wires=("group",),
    ),
}

EXPECTED = {name: attack.expected for name, attack in ATTACKS.items()}

if __name__ == "__main__":
    sys.exit(main("attacks.false_lanes", sys.argv[1:]))
