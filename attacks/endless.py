"""A peer that always has one more thing to say, and never comes to an end.

Expected: signs of life, requests and repairs are counted; beyond a limit the honest end gives up and says so. None of
it depends on the timeout, because the peer is never silent.
"""

from __future__ import annotations

import sys
from typing import Any

from attacks.peer import (
    AGREED,
    CHECK,
    COMPARE,
    DESCRIBE,
    DIGESTS,
    GO_ON,
    MORE,
    OFFER,
    OFFER_TAG,
    PARCEL,
    REFUSAL,
    VERDICT,
    WANT,
    WORKING,
    Peer,
    header,
    note,
    offer,
    pattern,
    want,
)
from attacks.stage import ATTACKER, Attack, Expected, Got, main, receive, send, transport

N = 2 * PARCEL
#: Hundreds of messages, on a busy machine.
LONG = 20.0
#: More than any honest end hears out.
MANY = 300


def many_times(peer: Peer, one: Any) -> None:
    """Until the honest end is tired of it."""
    for number in range(MANY):
        one(number)
    peer.hear_end()


# -- signs of life


def working_before_the_offer(peer: Peer) -> None:
    # A transfer that has no name yet cannot be refused: there is nothing to hear.
    for number in range(MANY):
        peer.say(WORKING, tag=OFFER_TAG, note=number)


def working_after_the_offer(peer: Peer) -> None:
    peer.say_offer(offer())
    peer.hear()
    many_times(peer, lambda n: peer.say(WORKING, note=(1 << 64) - 1 - n))


def working_instead_of_a_want(peer: Peer) -> None:
    peer.hear_offer()
    many_times(peer, lambda n: peer.say(WORKING, note=0))


def working_with_all_bytes(peer: Peer) -> None:
    """It claims more bytes than there are."""
    peer.hear_offer()
    many_times(peer, lambda n: peer.say(WORKING, note=(1 << 64) - 1))


def working_instead_of_an_answer(peer: Peer) -> None:
    peer.hear_offer()
    peer.say(WANT, want())
    peer.hear()
    peer.take_burst(answer=None)
    peer.take_burst(answer=None)
    for _ in range(MANY):
        peer.say(WORKING, note=1)
    peer.say(VERDICT, [{}])
    peer.hear_end()


def working_instead_of_a_confirmation(peer: Peer) -> None:
    """All parcels are there; the source is to say that they still hold."""
    peer.say_offer(offer())
    peer.hear()
    peer.agree()
    peer.feed(pattern(N), [0, 1])
    peer.hear()
    many_times(peer, lambda n: peer.say(WORKING, note=n))


# -- requests


def checks(peer: Peer) -> None:
    peer.hear_offer()
    for _ in range(MANY):
        peer.say(CHECK)
        if peer.hear().kind != AGREED:
            return


def comparisons(peer: Peer) -> None:
    peer.hear_offer()
    peer.say(WANT, want(parcels=[]))
    peer.hear()
    for _ in range(MANY):
        peer.say(COMPARE, [[0, 2]])
        if peer.hear().kind != DIGESTS:
            return


def descriptions(peer: Peer) -> None:
    peer.hear_offer()
    for _ in range(MANY):
        peer.say(DESCRIBE)
        if peer.hear().kind != OFFER:
            return


def checks_and_comparisons(peer: Peer) -> None:
    """In turns, with signs of life in between."""
    peer.hear_offer()
    peer.say(WANT, want(parcels=[]))
    peer.hear()
    for number in range(MANY):
        peer.say(WORKING)
        peer.say(CHECK) if number % 2 else peer.say(COMPARE, [[0, 1]])
        if peer.hear().kind == REFUSAL:
            return


def the_same_parcel(peer: Peer) -> None:
    peer.hear_offer()
    peer.say(WANT, want(parcels=[0, 1]))
    while peer.hear().kind == AGREED:
        peer.take_burst()
        peer.say(MORE, [[0, 1]])


def the_same_parcel_while_it_comes(peer: Peer) -> None:
    """Asked for again in the answer to it, as a receiver with several sources asks for more."""
    peer.hear_offer()
    peer.say(WANT, want(parcels=[0, 1]))
    peer.hear()
    for _ in range(4):
        peer.take_burst(answer=note(GO_ON, 0, 1))
    peer.say(VERDICT, [{}])
    peer.hear_end()


def requests_instead_of_answers(peer: Peer) -> None:
    """Two bursts are under way and never answered: only requests come, without end."""
    peer.hear_offer()
    peer.say(WANT, want())
    peer.hear()
    peer.take_burst(answer=None)
    peer.take_burst(answer=None)
    for _ in range(MANY):
        peer.begin(header(MORE, peer.transfer))


def answers_that_ask(first: int, number: int) -> Any:
    """For more than there is, in the answer to each burst."""

    def hostile(peer: Peer) -> None:
        peer.hear_offer()
        peer.say(WANT, want())
        peer.hear()
        peer.take_burst(answer=note(GO_ON, first, number))
        peer.take_burst(answer=note(GO_ON, first, number))
        peer.say(VERDICT, [{}])
        peer.hear_end()

    return hostile


# -- refusals


def refusals(peer: Peer) -> None:
    """One for each call, and at last an offer."""
    for number in range(5):
        peer.say(REFUSAL, ["Spite", f"no {number}"], tag=OFFER_TAG, note=peer.tag)
        peer.flush()
    peer.say_offer(offer())
    peer.serve(pattern(N))


def hear_them_out(pg: Any) -> Got:
    end, refused = transport(pg), 0
    for _ in range(5):
        try:
            end.recv_checkpoint(ATTACKER)
        except Exception as error:
            refused += f"Spite: no {refused}" in str(error)
    state = end.recv_checkpoint(ATTACKER)
    return Got(refused == 5 and bytes(state["w"].numpy()) == pattern(N), "")


def refusals_of_one_transfer(peer: Peer) -> None:
    """The first is heard. The others are never asked for."""
    peer.hear_offer()
    for number in range(MANY):
        peer.say(REFUSAL, ["Spite", f"no {number}"])


def a_refusal_in_a_book(peer: Peer) -> None:
    peer.hear_offer()
    peer.say(REFUSAL, ["K" * (1 << 20), "no " * (1 << 20)])
    peer.flush()


TIRED = "signs of life without a message"
COMPARES = "asked to compare no parcels, or the same parcels more than 3 times"
ASKS = "sent [0-9]+ requests without a verdict"

ATTACKS = {
    "signs of life before an offer": Attack(
        receive(), working_before_the_offer, Expected("receiver", "ProtocolError", TIRED, seconds=LONG)
    ),
    "signs of life instead of an agreement": Attack(
        receive(), working_after_the_offer, Expected("receiver", "ProtocolError", TIRED, seconds=LONG)
    ),
    # It has everything, and all digests are right: how the source ends no longer matters.
    "signs of life instead of a confirmation": Attack(
        receive(), working_instead_of_a_confirmation, Expected("receiver", None, seconds=LONG)
    ),
    "signs of life instead of a want": Attack(
        send(), working_instead_of_a_want, Expected("source", "ProtocolError", TIRED, seconds=LONG)
    ),
    "signs of life with more bytes than there are": Attack(
        send(), working_with_all_bytes, Expected("source", "ProtocolError", TIRED, seconds=LONG)
    ),
    "signs of life instead of an answer": Attack(
        send(timeout=2), working_instead_of_an_answer, Expected("source", "ProtocolError", TIRED, seconds=LONG)
    ),
    "checks": Attack(send(), checks, Expected("source", "ProtocolError", ASKS, seconds=LONG)),
    "comparisons": Attack(send(), comparisons, Expected("source", "ProtocolError", COMPARES, seconds=LONG)),
    "descriptions": Attack(send(), descriptions, Expected("source", "ProtocolError", ASKS, seconds=LONG)),
    "checks and comparisons and signs of life": Attack(
        send(), checks_and_comparisons, Expected("source", "ProtocolError", COMPARES, seconds=LONG)
    ),
    "the same parcel": Attack(
        send(), the_same_parcel, Expected("source", "ProtocolError", "asked again for parcels more than 3 times")
    ),
    "the same parcel while it comes": Attack(
        send(),
        the_same_parcel_while_it_comes,
        Expected("source", "ProtocolError", "asked again for parcels more than 3 times"),
    ),
    "requests instead of answers": Attack(
        send(timeout=1),
        requests_instead_of_answers,
        Expected("source", "ProtocolError", "sent MORE where GOT was due", seconds=LONG),
    ),
    "answers that ask for what does not exist": Attack(
        send(), answers_that_ask(2, 1), Expected("source", "ProtocolError", "asks for parcels that do not exist")
    ),
    "answers that ask for two thousand million parcels": Attack(
        send(),
        answers_that_ask((1 << 32) - 1, (1 << 31) - 1),
        Expected("source", "ProtocolError", "asks for parcels that do not exist"),
    ),
    "a refusal for each call": Attack(hear_them_out, refusals, Expected("receiver", None)),
    "refusals of one transfer": Attack(
        send(), refusals_of_one_transfer, Expected("source", "PeerRefused", "Spite: no 0$")
    ),
    "a refusal in a book": Attack(send(), a_refusal_in_a_book, Expected("source", "PeerRefused", "KKKK: no no")),
}

EXPECTED = {name: attack.expected for name, attack in ATTACKS.items()}

if __name__ == "__main__":
    sys.exit(main("attacks.endless", sys.argv[1:]))
