"""A peer cancels between bursts and never says why.

Expected: the honest end waits for the cause as long as its timeout allows, and no longer; another message than a
refusal is not what is due. On a stream nothing is owed after a cancel, and the cause is the cancel.
"""

from __future__ import annotations

import sys

from attacks.peer import CANCEL, CHECK, GOT, PARCEL, REFUSAL, WANT, Peer, note, offer, pattern, record, want
from attacks.stage import Attack, Expected, main, receive, send

N = 4 * PARCEL


def source_cancels(peer: Peer) -> None:
    """With the first record. The burst that is under way as well is completed, as is due."""
    peer.say_offer(offer(nbytes=N))
    peer.hear()
    peer.agree()
    for number in range(peer.ahead):
        peer.send(pattern(N)[number * PARCEL : (number + 1) * PARCEL])
        peer.send(record(peer.transfer, [0], CANCEL))


def source_closes(peer: Peer) -> None:
    source_cancels(peer)
    peer.flush()
    peer.close()


def source_goes_on(peer: Peer) -> None:
    """It says something else than a refusal."""
    source_cancels(peer)
    peer.say(CHECK)
    peer.hear_end()


def source_says_why(peer: Peer) -> None:
    source_cancels(peer)
    peer.say(REFUSAL, ["Spite", "why not"])
    peer.flush()


def receiver_cancels(peer: Peer) -> None:
    peer.hear_offer()
    peer.say(WANT, want(N))
    peer.hear()
    peer.take_burst(answer=CANCEL)
    peer.take_burst(answer=None)


def receiver_closes(peer: Peer) -> None:
    receiver_cancels(peer)
    peer.flush()
    peer.close()


def receiver_goes_on(peer: Peer) -> None:
    receiver_cancels(peer)
    peer.say(GOT)


def receiver_says_why(peer: Peer) -> None:
    receiver_cancels(peer)
    peer.say(REFUSAL, ["Spite", "why not"])
    peer.flush()


def receiver_cancels_with_a_wish(peer: Peer) -> None:
    """It cancels and asks for more in one word."""
    peer.hear_offer()
    peer.say(WANT, want(N))
    peer.hear()
    peer.take_burst(answer=note(CANCEL, 0, 4))
    peer.take_burst(answer=None)
    peer.say(REFUSAL, ["Spite", "why not"])
    peer.flush()


def receiver_refuses(peer: Peer) -> None:
    """In the place of an answer, after a part of what it has asked for."""
    peer.hear_offer()
    peer.say(WANT, want(N))
    peer.hear()
    for _ in range(peer.ahead):
        peer.take_burst(answer=None)
    peer.say(REFUSAL, ["Spite", "why not"])
    peer.flush()


def source_intends_nonsense(peer: Peer) -> None:
    peer.say_offer(offer(nbytes=N))
    peer.hear()
    peer.agree()
    for number in range(peer.ahead):
        peer.send(pattern(N)[number * PARCEL : (number + 1) * PARCEL])
        peer.send(record(peer.transfer, [0], 77))
    peer.hear_end()


#: On a stream a refusal is all that an honest receiver says.
NO_WORD = Expected("source", "ProtocolError", "cancelled without saying why")

ATTACKS = {
    "a source, and nothing more": Attack(
        receive(nbytes=N, timeout=0.4), source_cancels, Expected("receiver", "PeerTimeout")
    ),
    "a source that closes": Attack(
        receive(nbytes=N), source_closes, Expected("receiver", "PeerLost", "connection lost")
    ),
    "a source that goes on": Attack(
        receive(nbytes=N, in_place=True),
        source_goes_on,
        Expected("receiver", "ProtocolError", "sent CHECK where REFUSAL was due"),
    ),
    "a source that says why": Attack(
        receive(nbytes=N), source_says_why, Expected("receiver", "PeerRefused", "Spite: why not")
    ),
    "a source of neither intent": Attack(
        receive(nbytes=N), source_intends_nonsense, Expected("receiver", "ProtocolError", "where a record was due")
    ),
    "a receiver, and nothing more": Attack(
        send(nbytes=N, timeout=0.4), receiver_cancels, Expected("source", "PeerTimeout"), on_stream=NO_WORD
    ),
    "a receiver that closes": Attack(
        send(nbytes=N), receiver_closes, Expected("source", "PeerLost", "connection lost"), on_stream=NO_WORD
    ),
    "a receiver that goes on": Attack(
        send(nbytes=N),
        receiver_goes_on,
        Expected("source", "ProtocolError", "sent GOT where REFUSAL was due"),
        on_stream=NO_WORD,
    ),
    "a receiver that says why": Attack(
        send(nbytes=N), receiver_says_why, Expected("source", "PeerRefused", "Spite: why not"), on_stream=NO_WORD
    ),
    "a receiver that cancels and asks for more": Attack(
        send(nbytes=N),
        receiver_cancels_with_a_wish,
        Expected("source", "PeerRefused", "Spite: why not"),
        on_stream=NO_WORD,
    ),
    "a receiver that refuses in the middle": Attack(
        send(nbytes=N),
        receiver_refuses,
        Expected("source", "PeerRefused", "Spite: why not"),
    ),
}

EXPECTED = {name: attack.expected for name, attack in ATTACKS.items()}

if __name__ == "__main__":
    sys.exit(main("attacks.cancel", sys.argv[1:]))
