"""Two ends meet over the group, and one of them lies about the connection: its number, its place, or that it is there.

Expected: what no honest end says is a ProtocolError that names the rank. If no connection can be made, everything comes
over the group. A peer that says that it has connected and has not is lost, within the timeout.
"""

from __future__ import annotations

import contextlib
import os
import socket
import sys
from collections.abc import Callable
from typing import Any

import transfuse
from attacks.peer import (
    CHECK,
    DESCRIBE,
    GO,
    MEET,
    MET,
    OFFER,
    OFFER_TAG,
    PARCEL,
    REFUSAL,
    VERDICT,
    WANT,
    Heard,
    Peer,
    Silence,
    offer,
    pattern,
    want,
)
from attacks.places import BAD_PLACES, PLACES, place_of
from attacks.stage import ATTACKER, Attack, Expected, Got, main, receive, send, transport
from attacks.stream_peer import Door, StreamPeer, dial, frame, give, knock, new_number, take

N = 8 * PARCEL
STREAM = ("stream",)

WELL_AS_SOURCE = Expected("source", None)
WELL_AS_RECEIVER = Expected("receiver", None, route="group")


def broken(at: str, words: str) -> Expected:
    return Expected(at, "ProtocolError", f"rank 1.*{words}")


def on_streams(honest: Any, hostile: Any, expected: Expected) -> Attack:
    return Attack(honest, hostile, expected, wires=STREAM)


LOST = "its connection is not here|connection lost"
LOST_AS_RECEIVER = Expected("receiver", "PeerLost", LOST)
LOST_AS_SOURCE = Expected("source", "PeerLost", LOST)


# -- as a source


def says_meet(plain: Any) -> Any:
    """The receiver tells it that this is no proposal."""

    def hostile(peer: StreamPeer) -> None:
        group = peer.words()
        group.say(MEET, plain, tag=OFFER_TAG, note=peer.tag)
        assert group.hear_end() is not None, "the source was not told"

    return hostile


MEETS: dict[str, Any] = {
    "nonsense": b"\xc1" * 30,
    "nothing": b"",
    "two fields": [[], 5],
    "four fields": [[], 5, None, 0],
    "17 old streams": [list(range(1, 18)), 0, None],
    "old stream 0": [[0], 0, None],
    "old stream -1": [[-1], 0, None],
    "old stream 2**62": [[1 << 62], 0, None],
    "an old stream that is a name": [["first"], 0, None],
    "new stream -1": [[], -1, None],
    "new stream 2**62": [[], 1 << 62, None],
    "new stream 1.5": [[], 1.5, None],
    **{name: [[], 5, place] for name, place in BAD_PLACES.items()},
}


def proposes(how: str, then: Callable[[StreamPeer, Peer, Heard], None]) -> Any:
    """A place that leads nowhere. The receiver names its own, and ``then`` goes on."""

    def hostile(peer: StreamPeer) -> None:
        group = peer.words()
        group.say(MEET, [[], new_number(), place_of(how)], tag=OFFER_TAG, note=peer.tag)
        met = group.hear()
        assert met.kind == MET, met
        assert met.plain[0] > 0
        assert len(met.plain[1][1]) == 32
        then(peer, group, met)

    return hostile


def go_on_over_the_group(peer: StreamPeer, group: Peer, met: Heard) -> None:
    group.say(GO, note=0)
    group.say(OFFER, offer(nbytes=N), note=group.tag)
    group.serve(pattern(N))


def connect_then(peer: StreamPeer, group: Peer, met: Heard) -> None:
    """An honest source behind a wall."""
    peer.move_to(dial(met.plain[1], met.plain[0]))
    group.say(GO, note=1)
    peer.say(OFFER, offer(nbytes=N), note=peer.tag)
    peer.serve(pattern(N))


def lie_that_it_has(peer: StreamPeer, group: Peer, met: Heard) -> None:
    group.say(GO, note=1)


def connect_as_another(peer: StreamPeer, group: Peer, met: Heard) -> None:
    for number in (met.plain[0] + 1, 0, met.plain[0] ^ 1 << 61):
        peer.move_to(dial(met.plain[1], number))
    group.say(GO, note=1)


def connect_with_a_broken_number(peer: StreamPeer, group: Peer, met: Heard) -> None:
    sock, key, said = knock(met.plain[1])
    give(sock, frame(key, said, b"to server", {"type": "join", "number": met.plain[0]}, seal=1))
    peer.move_to(sock)
    group.say(GO, note=1)


def connect_and_say_no(peer: StreamPeer, group: Peer, met: Heard) -> None:
    """The connection is there, and it says that there is none."""
    peer.move_to(dial(met.plain[1], met.plain[0]))
    go_on_over_the_group(peer, group, met)


def connect_and_close(peer: StreamPeer, group: Peer, met: Heard) -> None:
    sock = dial(met.plain[1], met.plain[0])
    group.say(GO, note=1)
    sock.close()


def connect_and_talk_over_the_group(peer: StreamPeer, group: Peer, met: Heard) -> None:
    peer.move_to(dial(met.plain[1], met.plain[0]))
    group.say(GO, note=1)
    group.say(OFFER, offer(nbytes=N), note=group.tag)


def offer_at_once(peer: StreamPeer, group: Peer, met: Heard) -> None:
    group.say(OFFER, offer(nbytes=N), note=group.tag)
    group.hear_end()


def fall_silent(peer: StreamPeer, group: Peer, met: Heard) -> None:
    """It never says whether it has connected."""


def old_streams_that_never_were(peer: StreamPeer) -> None:
    group = peer.words()
    group.say(MEET, [[1, 2, 3], 0, None], tag=OFFER_TAG, note=peer.tag)
    assert group.hear().plain[0] == 0
    group.say(OFFER, offer(nbytes=N), note=group.tag)
    group.serve(pattern(N))


def meet_twice(peer: StreamPeer) -> None:
    group = peer.words()
    for _ in range(2):
        group.say(MEET, [[], 0, None], tag=OFFER_TAG if _ == 0 else None, note=peer.tag)
        group.hear()


def met_and_closed(peer: StreamPeer) -> None:
    peer.meet_as_source()
    peer.close()


def deaf(door: Door, sock: socket.socket) -> None:
    """It proves itself, hears the number, and closes."""
    door.let_in(sock)
    sock.close()


def met_and_deaf(peer: StreamPeer) -> None:
    """It lets the receiver in, and closes before it is told so."""
    group, door = peer.words(), Door(deaf)
    peer.keep(door)
    group.say(MEET, [[], new_number(), door.place], tag=OFFER_TAG, note=peer.tag)
    group.hear()


def met_and_noise(peer: StreamPeer) -> None:
    peer.meet_as_source()
    peer.send(os.urandom(4096))
    with contextlib.suppress(Silence):
        peer.recv(1)


def receivers_own_port(peer: StreamPeer) -> None:
    """The first time it learns where the receiver listens. The second time it sends the receiver there."""
    group = peer.words()
    group.say(MEET, [[], new_number(), None], tag=OFFER_TAG, note=peer.tag)
    number, place = group.hear().plain
    group.say(GO, note=0)
    group.say(REFUSAL, ["Spite", "not now"])
    group.flush()
    group.say(MEET, [[], number, place], tag=OFFER_TAG, note=peer.tag)
    group.hear()


def receive_after_a_refusal(pg: Any) -> Got:
    # Another transport: the first one does not try to connect again for a while.
    for _ in range(2):
        try:
            state = transport(pg, timeout=2).recv_checkpoint(ATTACKER)
        except transfuse.PeerRefused:
            continue
        else:
            return Got(bytes(state["w"].numpy()) == pattern(N), "")
    raise AssertionError("refused twice")


MEETING_AS_SOURCE = {
    **{
        f"a source proposes {name}": on_streams(receive(), says_meet(plain), broken("receiver", "malformed meet"))
        for name, plain in MEETS.items()
    },
    **{
        f"a source that is to be found at {how}": on_streams(
            receive(nbytes=N, in_place=True), proposes(how, go_on_over_the_group), WELL_AS_RECEIVER
        )
        for how in PLACES
    },
    "a source that connects itself": on_streams(
        receive(nbytes=N, in_place=True), proposes("nobody", connect_then), WELL_AS_RECEIVER
    ),
    "a source says that it has connected": on_streams(
        receive(nbytes=N, timeout=0.8), proposes("nobody", lie_that_it_has), LOST_AS_RECEIVER
    ),
    "a source connects as another": on_streams(
        receive(nbytes=N, timeout=0.8), proposes("nobody", connect_as_another), LOST_AS_RECEIVER
    ),
    "a source connects, and its number is damaged": on_streams(
        receive(nbytes=N, timeout=0.8), proposes("nobody", connect_with_a_broken_number), LOST_AS_RECEIVER
    ),
    "a source connects, and says that it has not": on_streams(
        receive(nbytes=N, in_place=True), proposes("nobody", connect_and_say_no), WELL_AS_RECEIVER
    ),
    "a source connects, and closes": on_streams(
        receive(nbytes=N), proposes("nobody", connect_and_close), LOST_AS_RECEIVER
    ),
    "a source connects, and talks over the group": on_streams(
        receive(nbytes=N, timeout=0.8),
        proposes("nobody", connect_and_talk_over_the_group),
        Expected("receiver", "PeerTimeout"),
    ),
    "a source offers before it has said whether it has connected": on_streams(
        receive(nbytes=N), proposes("nobody", offer_at_once), broken("receiver", "sent OFFER where GO was due")
    ),
    "a source never says whether it has connected": on_streams(
        receive(nbytes=N, timeout=0.8), proposes("nobody", fall_silent), Expected("receiver", "PeerTimeout")
    ),
    "a source names old streams that never were": on_streams(
        receive(nbytes=N, in_place=True), old_streams_that_never_were, WELL_AS_RECEIVER
    ),
    "a source meets twice": on_streams(receive(), meet_twice, broken("receiver", "sent MEET where OFFER was due")),
    "a source meets, and closes": on_streams(receive(), met_and_closed, LOST_AS_RECEIVER),
    "a source meets, and has closed before": on_streams(receive(), met_and_deaf, LOST_AS_RECEIVER),
    "a source meets, and makes noise": on_streams(
        receive(), met_and_noise, broken("receiver", "not a transfuse message")
    ),
    "a source names the receiver's own port": on_streams(receive_after_a_refusal, receivers_own_port, LOST_AS_RECEIVER),
}


# -- as a receiver


def says_met(answer: Callable[[int], Any], *, told: bool = True) -> Any:
    def hostile(peer: StreamPeer) -> None:
        group = peer.words()
        _, number, _, _ = group.hear(OFFER_TAG).plain
        group.say(MET, answer(number))
        assert group.hear_end() is not None or not told, "the receiver was not told"

    return hostile


METS: dict[str, tuple[Callable[[int], Any], str]] = {
    "nonsense": (lambda number: b"\xc1" * 30, "malformed met"),
    "nothing": (lambda number: b"", "malformed met"),
    "no number": (lambda number: [], "malformed met"),
    "number -1": (lambda number: [-1], "malformed met"),
    "number 2**62": (lambda number: [1 << 62], "malformed met"),
    "a number that is a name": (lambda number: ["first"], "malformed met"),
    "another number": (lambda number: [number ^ 1], "chose a stream that was not proposed"),
    **{
        name: (lambda number, place=place: [number, place], "malformed met")  # type: ignore[misc]
        for name, place in BAD_PLACES.items()
    },
}


def answers(what: Callable[[StreamPeer, Peer, int, Any], None]) -> Any:
    def hostile(peer: StreamPeer) -> None:
        group = peer.words()
        heard = group.hear(OFFER_TAG)
        peer.transfer, peer.tag = group.transfer, group.tag
        _, number, place, peer.early = heard.plain
        group.early = peer.early
        what(peer, group, number, place)

    return hostile


def receive_over(peer: Peer) -> None:
    """The rest of an honest receiver. The offer came with the meeting."""
    assert peer.early
    peer.say(WANT, want(N))
    peer.hear()
    assert b"".join(peer.take_burst() for _ in range(N // PARCEL)) == pattern(N)
    peer.say(CHECK)
    peer.hear()
    peer.say(VERDICT, [{}])
    peer.flush()


def names_a_place(how: str) -> Any:
    """Where the source cannot connect. It says so, and goes on over the group."""

    def what(peer: StreamPeer, group: Peer, number: int, place: Any) -> None:
        group.say(MET, [new_number(), place_of(how)])
        went = group.hear()
        assert (went.kind, went.note) == (GO, 0), went
        receive_over(group)

    return answers(what)


def names_its_door(peer: StreamPeer, group: Peer, number: int, place: Any) -> None:
    """An honest receiver that cannot connect."""
    door, mine = Door(), new_number()
    peer.keep(door)
    group.say(MET, [mine, door.place])
    went = group.hear()
    assert (went.kind, went.note) == (GO, 1), went
    peer.move_to(door.wait(mine))
    receive_over(peer)


def names_no_place(peer: StreamPeer, group: Peer, number: int, place: Any) -> None:
    group.say(MET, [0])
    receive_over(group)


def names_the_sources_own(peer: StreamPeer, group: Peer, number: int, place: Any) -> None:
    """And the number that the source itself expects there."""
    group.say(MET, [number, place])


def lies_that_it_has(peer: StreamPeer, group: Peer, number: int, place: Any) -> None:
    group.say(MET, [number])


def connects_as_another(peer: StreamPeer, group: Peer, number: int, place: Any) -> None:
    peer.move_to(dial(place, number ^ 1))
    group.say(MET, [number])


def connects_without_a_number(peer: StreamPeer, group: Peer, number: int, place: Any) -> None:
    peer.move_to(knock(place)[0])
    group.say(MET, [number])


def connects_with_a_wrong_token(peer: StreamPeer, group: Peer, number: int, place: Any) -> None:
    with contextlib.suppress(Silence):
        dial([place[0], bytes(32)], number)
        raise AssertionError("it was let in")
    group.say(MET, [0])
    receive_over(group)


def connects_twice(peer: StreamPeer, group: Peer, number: int, place: Any) -> None:
    """The second connection is closed, the first one is used."""
    peer.move_to(dial(place, number))
    group.say(MET, [number])
    peer.say(DESCRIBE)
    assert peer.hear().kind == OFFER, "the first one is not used"
    again = dial(place, number)
    with contextlib.suppress(Silence):
        take(again, 1)
        raise AssertionError("somebody talks on the second connection")
    receive_over(peer)


def connects_and_does_not_say(peer: StreamPeer, group: Peer, number: int, place: Any) -> None:
    """The connection is there, and it says that there is none."""
    peer.move_to(dial(place, number))
    group.say(MET, [0])
    receive_over(group)


def connects_and_talks_over_the_group(peer: StreamPeer, group: Peer, number: int, place: Any) -> None:
    peer.move_to(dial(place, number))
    group.say(MET, [number])
    group.say(WANT, want(N))


def connects_and_makes_noise(peer: StreamPeer, group: Peer, number: int, place: Any) -> None:
    peer.move_to(dial(place, number))
    group.say(MET, [number])
    peer.send(os.urandom(4096))
    peer.hear_end()


def connects_and_closes(peer: StreamPeer, group: Peer, number: int, place: Any) -> None:
    peer.move_to(dial(place, number))
    group.say(MET, [number])
    peer.close()


def says(kind: int, body: Any) -> Any:
    """Something else than met."""

    def what(peer: StreamPeer, group: Peer, number: int, place: Any) -> None:
        group.say(kind, body)
        group.hear_end(1.0)

    return answers(what)


def says_nothing(peer: StreamPeer, group: Peer, number: int, place: Any) -> None:
    """It does not answer."""


MEETING_AS_RECEIVER = {
    **{
        f"a receiver answers {name}": on_streams(send(), says_met(answer), broken("source", words))
        for name, (answer, words) in METS.items()
    },
    **{
        f"a receiver that is to be found at {how}": on_streams(send(nbytes=N), names_a_place(how), WELL_AS_SOURCE)
        for how in PLACES
        if how != "no place"
    },
    "a receiver that cannot connect": on_streams(send(nbytes=N), answers(names_its_door), WELL_AS_SOURCE),
    "a receiver that wants no stream": on_streams(send(nbytes=N), answers(names_no_place), WELL_AS_SOURCE),
    "a receiver names the source's own port": on_streams(
        send(nbytes=N), answers(names_the_sources_own), LOST_AS_SOURCE
    ),
    "a receiver says that it has connected": on_streams(
        send(nbytes=N, timeout=0.8), answers(lies_that_it_has), LOST_AS_SOURCE
    ),
    "a receiver connects as another": on_streams(
        send(nbytes=N, timeout=0.8), answers(connects_as_another), LOST_AS_SOURCE
    ),
    "a receiver connects without a number": on_streams(
        send(nbytes=N, timeout=0.8), answers(connects_without_a_number), LOST_AS_SOURCE
    ),
    "a receiver connects with a wrong token": on_streams(
        send(nbytes=N), answers(connects_with_a_wrong_token), WELL_AS_SOURCE
    ),
    "a receiver connects twice": on_streams(send(nbytes=N), answers(connects_twice), WELL_AS_SOURCE),
    "a receiver connects, and does not say so": on_streams(
        send(nbytes=N), answers(connects_and_does_not_say), WELL_AS_SOURCE
    ),
    "a receiver connects, and talks over the group": on_streams(
        send(nbytes=N, timeout=0.8), answers(connects_and_talks_over_the_group), Expected("source", "PeerTimeout")
    ),
    "a receiver connects, and makes noise": on_streams(
        send(nbytes=N), answers(connects_and_makes_noise), broken("source", "not a transfuse message")
    ),
    "a receiver connects, and closes": on_streams(send(nbytes=N), answers(connects_and_closes), LOST_AS_SOURCE),
    "a receiver wants before it has met": on_streams(
        send(nbytes=N), says(WANT, want(N)), broken("source", "sent WANT where MET was due")
    ),
    "a receiver refuses to meet": on_streams(
        send(nbytes=N), says(REFUSAL, ["Spite", "why not"]), Expected("source", "PeerRefused", "Spite: why not")
    ),
    "a receiver does not answer": on_streams(
        send(nbytes=N, timeout=0.8), answers(says_nothing), Expected("source", "PeerTimeout")
    ),
}

ATTACKS = {**MEETING_AS_SOURCE, **MEETING_AS_RECEIVER}

EXPECTED = {name: attack.expected for name, attack in ATTACKS.items()}

if __name__ == "__main__":
    sys.exit(main("attacks.false_meetings", sys.argv[1:]))
