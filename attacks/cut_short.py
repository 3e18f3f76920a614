"""A peer closes its connections, or falls silent, in the middle of a message or between two.

Expected: the honest end says which peer was lost and what it was doing, at once where the connection is closed, within
its timeout where it is only silent. Headers that no peer of this version sends are refused.
"""

from __future__ import annotations

import sys
from typing import Any

from attacks.peer import (
    BLOCK,
    CHUNK,
    GOT,
    OFFER,
    OFFER_TAG,
    PARCEL,
    ROOM,
    VERDICT,
    WANT,
    Peer,
    header,
    offer,
    pack,
    pattern,
    record,
    want,
)
from attacks.stage import Attack, Expected, main, receive, send

N = 4 * PARCEL


def close(peer: Peer) -> None:
    peer.flush()
    peer.close()


# -- as the source


def before_a_word(peer: Peer) -> None:
    peer.close()


def after_the_header(peer: Peer) -> None:
    peer.begin(header(OFFER, peer.transfer, note=peer.tag, length=BLOCK), OFFER_TAG)
    close(peer)


def before_the_mark(peer: Peer) -> None:
    peer.begin(header(OFFER, peer.transfer, note=peer.tag, length=ROOM + 10), OFFER_TAG)
    peer.send(bytes(10))
    close(peer)


def in_the_middle_of_chunks(peer: Peer) -> None:
    """The first of three."""
    peer.begin(header(OFFER, peer.transfer, note=peer.tag, length=2 * CHUNK + 1), OFFER_TAG)
    peer.body(bytes(CHUNK))
    close(peer)


def a_short_chunk(peer: Peer) -> None:
    """Shorter than announced: gloo completes the receive all the same."""
    peer.begin(header(OFFER, peer.transfer, note=peer.tag, length=ROOM + 100), OFFER_TAG)
    peer.send(bytes(10))
    peer.send(b"\x01")
    peer.hear_end()


def a_short_header(peer: Peer) -> None:
    peer.send(b"TFUS", OFFER_TAG)


def after_the_offer(peer: Peer) -> None:
    peer.say_offer(offer(nbytes=N))
    close(peer)


def instead_of_parcels(peer: Peer) -> None:
    peer.say_offer(offer(nbytes=N))
    peer.hear()
    peer.agree()
    close(peer)


def after_a_parcel(peer: Peer) -> None:
    """Its record never comes."""
    peer.say_offer(offer(nbytes=N))
    peer.hear()
    peer.agree()
    peer.send(pattern(N)[:PARCEL])
    close(peer)


def after_a_burst(peer: Peer) -> None:
    peer.say_offer(offer(nbytes=N))
    peer.hear()
    peer.agree()
    peer.send(pattern(N)[:PARCEL])
    peer.send(record(peer.transfer, [0]))
    close(peer)


def after_the_last_parcel(peer: Peer) -> None:
    """The receiver has everything, and all of it is right."""
    peer.say_offer(offer(nbytes=N))
    peer.hear()
    peer.agree()
    peer.feed(pattern(N), range(4))
    close(peer)


def silent_after(attack: Any) -> Any:
    """The same, without closing."""

    def hostile(peer: Peer) -> None:
        peer.close = lambda: None  # type: ignore[method-assign]
        attack(peer)

    return hostile


# -- as the receiver


def instead_of_a_want(peer: Peer) -> None:
    peer.hear_offer()
    close(peer)


def in_the_middle_of_a_want(peer: Peer) -> None:
    peer.hear_offer()
    peer.begin(header(WANT, peer.transfer, length=BLOCK))
    close(peer)


def instead_of_taking(peer: Peer) -> None:
    peer.hear_offer()
    peer.say(WANT, want(N))
    peer.hear()
    close(peer)


def instead_of_an_answer(peer: Peer) -> None:
    peer.hear_offer()
    peer.say(WANT, want(N))
    peer.hear()
    peer.take_burst(answer=None)
    close(peer)


def instead_of_a_verdict(peer: Peer) -> None:
    peer.hear_offer()
    peer.say(WANT, want(N))
    peer.hear()
    for _ in range(4):
        peer.take_burst()
    close(peer)


# -- headers


def first_word(kind: int = OFFER, *, answered: bool = False, **fields: Any) -> Any:
    """Only where the header says which transfer it is of, it is answered."""

    def hostile(peer: Peer) -> None:
        peer.say(kind, pack(offer(nbytes=N)), tag=OFFER_TAG, **{"note": peer.tag} | fields)
        if answered:
            peer.hear_end()

    return hostile


def damaged_header(peer: Peer) -> None:
    """In its length, which a peer that believed it would wait for."""
    head = bytearray(header(OFFER, peer.transfer, note=peer.tag, body=pack(offer(nbytes=N))))
    head[26] ^= 1
    peer.begin(bytes(head), OFFER_TAG)


def answer(kind: int = GOT, **fields: Any) -> Any:
    def hostile(peer: Peer) -> None:
        peer.hear_offer()
        peer.begin(header(kind, peer.transfer, **fields))
        peer.hear_end()

    return hostile


LOST = Expected("receiver", "PeerLost", "rank 1: connection lost while")
SOURCE_LOST = Expected("source", "PeerLost", "rank 1: connection lost while")
SOURCE_ACTS = [
    before_a_word, after_the_header, before_the_mark, in_the_middle_of_chunks, after_the_offer, instead_of_parcels,
    after_a_parcel, after_a_burst,
]  # fmt: skip
RECEIVER_ACTS = [
    instead_of_a_want, in_the_middle_of_a_want, instead_of_taking, instead_of_an_answer, instead_of_a_verdict,
]  # fmt: skip


def words(act: Any) -> str:
    return str(act.__name__).replace("_", " ")


def broken(text: str) -> Expected:
    return Expected("receiver", "ProtocolError", text)


ATTACKS = {
    **{f"a source closes {words(act)}": Attack(receive(nbytes=N), act, LOST) for act in SOURCE_ACTS},
    **{f"a receiver closes {words(act)}": Attack(send(nbytes=N), act, SOURCE_LOST) for act in RECEIVER_ACTS},
    "a source closes after the last parcel": Attack(
        receive(nbytes=N, in_place=True), after_the_last_parcel, Expected("receiver", None)
    ),
    **{
        f"a source falls silent {words(act)}": Attack(
            receive(nbytes=N, timeout=0.4), silent_after(act), Expected("receiver", "PeerTimeout")
        )
        for act in (before_a_word, before_the_mark, after_a_parcel)
    },
    **{
        f"a receiver falls silent {words(act)}": Attack(
            send(nbytes=N, timeout=0.4), silent_after(act), Expected("source", "PeerTimeout")
        )
        for act in (instead_of_a_want, instead_of_taking, instead_of_a_verdict)
    },
    "a chunk shorter than announced": Attack(
        receive(nbytes=N), a_short_chunk, broken("arrived damaged"), wires=("group",)
    ),
    "a header of four bytes": Attack(
        receive(nbytes=N),
        a_short_header,
        broken("wire version|unknown kind|not a transfuse message|damaged|impossible"),
        wires=("group",),
    ),
    "a header of another protocol": Attack(
        receive(nbytes=N), first_word(magic=b"HTTP"), broken("not a transfuse message")
    ),
    "a header of another version": Attack(receive(nbytes=N), first_word(version=2), broken("wire version 2")),
    "a header of no kind": Attack(receive(nbytes=N), first_word(99), broken("unknown kind of message 99")),
    "a damaged header": Attack(
        receive(nbytes=N), damaged_header, broken("header of a control message arrived damaged")
    ),
    "a header of another body": Attack(
        receive(nbytes=N), first_word(damage=1, answered=True), broken("arrived damaged")
    ),
    "an offer on no tag": Attack(receive(nbytes=N), first_word(note=5), broken("impossible tag 5"), wires=("group",)),
    "an offer on a tag of 64 bits": Attack(
        receive(nbytes=N), first_word(note=(1 << 64) - 1), broken("impossible tag"), wires=("group",)
    ),
    "a verdict instead of an offer": Attack(
        receive(nbytes=N), first_word(VERDICT, answered=True), broken("sent VERDICT where OFFER")
    ),
    "an answer of another protocol": Attack(
        send(nbytes=N),
        answer(magic=b"HTTP"),
        Expected("source", "ProtocolError", "not a transfuse message"),
    ),
    "an answer of another version": Attack(
        send(nbytes=N), answer(version=99), Expected("source", "ProtocolError", "wire version 99")
    ),
    "an answer that is damaged": Attack(
        send(nbytes=N), answer(WANT, damage=3), Expected("source", "ProtocolError", "damaged")
    ),
}

EXPECTED = {name: attack.expected for name, attack in ATTACKS.items()}

if __name__ == "__main__":
    sys.exit(main("attacks.cut_short", sys.argv[1:]))
