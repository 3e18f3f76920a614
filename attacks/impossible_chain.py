"""A source agrees to a chain that cannot be, or that was not wanted.

Expected: impossible links are refused before anything is posted (gloo ends a process that talks to a rank that does not
exist). A neighbour that is there but says nothing, or nonsense, is left, and the source brings the rest.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import xxhash

from attacks.peer import FIRST_LINK_TAG, FIRST_TAG, MEET, OFFER_TAG, PARCEL, Peer, header, offer, pattern, record
from attacks.stage import ATTACKER, VICTIM, Attack, Expected, main, receive

N = 4 * PARCEL
#: Of parcels this small twelve are under way in a chain, and one answer is for six.
ANSWERED = 6
LINK = [ATTACKER, FIRST_LINK_TAG, 7]

LINKS: dict[str, tuple[Any, Any, Any]] = {
    "rank -1": ([-1, FIRST_LINK_TAG, 7], None, 1.0),
    "rank 2 of 2": ([2, FIRST_LINK_TAG, 7], None, 1.0),
    "rank 2**31": ([1 << 31, FIRST_LINK_TAG, 7], None, 1.0),
    "the receiver itself": ([VICTIM, FIRST_LINK_TAG, 7], None, 1.0),
    "the receiver itself, after it": (None, [VICTIM, FIRST_LINK_TAG, 7], 1.0),
    "a rank after it that does not exist": (LINK, [99, FIRST_LINK_TAG, 7], 1.0),
    "the tag of offers": ([ATTACKER, OFFER_TAG, 7], None, 1.0),
    "the tag of a transfer": ([ATTACKER, FIRST_TAG, 7], None, 1.0),
    "a tag below all": ([ATTACKER, -1, 7], None, 1.0),
    "a tag beyond all": ([ATTACKER, FIRST_LINK_TAG + (1 << 28), 7], None, 1.0),
    "patience below nothing": (LINK, None, -1.0),
    "patience that is no number": (LINK, None, float("nan")),
    "patience without end": (LINK, None, float("inf")),
}
MALFORMED: dict[str, Any] = {
    "a link of two numbers": [[1, 2], None, 1.0],
    "a link that is a name": ["rank 1", None, 1.0],
    "no list": {"upstream": None},
}


def agreed(*plain: Any) -> Any:
    def hostile(peer: Peer) -> None:
        peer.say_offer(offer(nbytes=N))
        peer.hear()
        peer.say(8, plain[0] if len(plain) == 1 else list(plain))
        peer.hear_end()

    return hostile


def silent_neighbour(peer: Peer) -> None:
    """It is the neighbour itself, and never says a word. Then it serves as the source."""
    peer.say_offer(offer(nbytes=N))
    peer.hear()
    peer.say(8, [LINK, None, 0.3])
    peer.serve(pattern(N), answered=ANSWERED)


def lying_neighbour(peer: Peer) -> None:
    """Parcels with wrong digests, and then a record of another transfer."""
    peer.say_offer(offer(nbytes=N))
    peer.hear()
    peer.say(8, [LINK, None, 0.3])
    link = peer.link(*LINK[1:])
    link.meet_as_source(None)
    for number in range(2):
        link.send(bytes(PARCEL))
        link.send(record(7 + number, [number]))
    peer.serve(pattern(N), answered=ANSWERED)


def neighbour_that_says(first: Callable[[Peer], None]) -> Any:
    """It is the neighbour itself. After these words it serves as the source."""

    def hostile(peer: Peer) -> None:
        peer.say_offer(offer(nbytes=N))
        peer.hear()
        peer.say(8, [LINK, None, 0.3])
        link = Peer(peer.pg, peer.rank, peer.other)
        link.tag, link.transfer = LINK[1:]
        first(link)
        peer.serve(pattern(N), answered=ANSWERED)

    return hostile


def greedy_neighbour(peer: Peer) -> None:
    """It is to be passed on to, takes nothing, and cancels, before it has said on which wire."""
    peer.say_offer(offer(nbytes=N))
    peer.hear()
    peer.say(8, [None, LINK, 1.0])
    peer.begin(header(5, 7, note=1), FIRST_LINK_TAG)
    pass_all(peer)


def met_and_greedy(peer: Peer) -> None:
    """It takes nothing and cancels on the wire that was agreed on."""
    peer.say_offer(offer(nbytes=N))
    peer.hear()
    peer.say(8, [None, LINK, 1.0])
    link = peer.link(*LINK[1:])
    link.meet_as_receiver(None)
    link.begin(header(5, 7, note=1))
    pass_all(peer)


def pass_all(peer: Peer) -> None:
    """All parcels, as a source in a chain sends them."""
    # In a chain every parcel is a burst, and twelve of them are under way.
    for number in range(4):
        parcel = pattern(N)[number * PARCEL : (number + 1) * PARCEL]
        peer.send(parcel)
        peer.send(record(peer.transfer, [xxhash.xxh3_64_intdigest(parcel)]))
    peer.serve(pattern(N), answered=ANSWERED)


ATTACKS = {
    **{
        name: Attack(
            receive(nbytes=N),
            agreed(*links),
            Expected("receiver", "ProtocolError", "agreed to a chain with (impossible links|an impossible patience)"),
        )
        for name, links in LINKS.items()
    },
    **{
        name: Attack(receive(nbytes=N), agreed(body), Expected("receiver", "ProtocolError", "malformed agreed"))
        for name, body in MALFORMED.items()
    },
    "a chain that was not wanted": Attack(
        receive(nbytes=N, relay=False),
        agreed(LINK, None, 1.0),
        Expected("receiver", "ProtocolError", "agreed to a chain that was not wanted"),
    ),
    "a neighbour that is silent": Attack(
        receive(nbytes=N, in_place=True), silent_neighbour, Expected("receiver", None, route="group")
    ),
    "a neighbour that lies": Attack(receive(nbytes=N, in_place=True), lying_neighbour, Expected("receiver", None)),
    "a neighbour that takes nothing": Attack(
        receive(nbytes=N, timeout=1), greedy_neighbour, Expected("receiver", None)
    ),
    "a neighbour that cancels": Attack(receive(nbytes=N, timeout=1), met_and_greedy, Expected("receiver", None)),
    **{
        f"a neighbour that {name}": Attack(
            receive(nbytes=N, in_place=True), neighbour_that_says(first), Expected("receiver", None)
        )
        for name, first in {
            "begins with a parcel's record": lambda link: link.send(record(7, [])),
            "proposes nonsense": lambda link: link.say(MEET, b"\xc1" * 20),
            "proposes a place that is none": lambda link: link.say(MEET, [[], 5, ["nowhere", bytes(32)]]),
            "proposes streams that never were": lambda link: link.say(MEET, [[1, 2, 3], 0, None]),
        }.items()
    },
}

EXPECTED = {name: attack.expected for name, attack in ATTACKS.items()}

if __name__ == "__main__":
    sys.exit(main("attacks.impossible_chain", sys.argv[1:]))
