"""A peer says again what was said in an earlier transfer.

Expected: a message of another transfer is an error and never data. An offer that is said again is an offer: a receiver
that names the step it expects refuses an old one.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
import xxhash

from attacks.peer import (
    CHECK,
    HEADER,
    PARCEL,
    REFUSAL,
    SENT,
    VERDICT,
    WANT,
    Heard,
    Peer,
    header,
    offer,
    pack,
    pattern,
    record,
    want,
)
from attacks.stage import ATTACKER, Attack, Expected, Got, main, transport

N = 2 * PARCEL


def receive_twice(*, step: int | None = None) -> Any:
    """The first receive goes well. What counts is the second."""

    def run(pg: Any) -> Got:
        end = transport(pg)
        first = end.recv_checkpoint(ATTACKER)
        assert bytes(first["w"].numpy()) == pattern(N)
        second = end.recv_checkpoint(ATTACKER, step=step)
        return Got(bytes(second["w"].numpy()) == pattern(N), "")

    return run


def send_twice(second: int = N) -> Any:
    """Two sends of different states. The first goes well."""

    def run(pg: Any) -> Got:
        end = transport(pg)
        for seed, nbytes in ((0, N), (1, second)):
            w = torch.frombuffer(bytearray(pattern(nbytes, seed)), dtype=torch.uint8)
            end.send_checkpoint([ATTACKER], {"w": w})
        return Got(True, "")

    return run


# -- as the source


def first_transfer(peer: Peer) -> list[Heard]:
    peer.say_offer(offer(step=3))
    return peer.serve(pattern(N))


def same_offer(peer: Peer) -> None:
    """The very same bytes on the very same tags, and then the same parcels."""
    peer.say_offer(offer(step=3))
    said = list(peer.said)
    peer.serve(pattern(N))
    for data, tag in said:
        peer.send(data, tag)
    peer.serve(pattern(N))


def same_everything(peer: Peer) -> None:
    """Everything that was said, without a look at what the receiver says."""
    first_transfer(peer)
    for data, tag in list(peer.said):
        peer.send(data, tag)
    while peer.hear().kind not in (REFUSAL, VERDICT):
        pass


def old_answers(peer: Peer) -> None:
    """A new offer, and then what was said of the old transfer."""
    first_transfer(peer)
    old = peer.transfer
    peer.transfer += 1
    peer.say_offer(offer(step=4))
    peer.hear()
    peer.say(8, [None, None, 0.0], transfer=old)
    peer.hear_end()


def old_records(peer: Peer) -> None:
    """A new transfer, with the records of the old one after each burst."""
    first_transfer(peer)
    sealed = [data for data, _ in peer.said if data[:4] == b"TFUS" and data[6] == SENT]
    peer.transfer += 1
    peer.tag += 2
    peer.say_offer(offer(step=4))
    peer.hear()
    peer.agree()
    for number in range(2):
        peer.send(pattern(N)[number * PARCEL : (number + 1) * PARCEL])
        peer.send(sealed[number])
    peer.hear_end()


def old_header(peer: Peer) -> None:
    """The header of the old offer before the body of another."""
    first_transfer(peer)
    head, tag = peer.said[0]
    plain = pack(offer(step=3, nbytes=N + 16))
    length = len(pack(offer(step=3)))
    peer.begin(head[: HEADER.size], tag, plain[:length].ljust(length, b"\0"))
    peer.hear_end()


def swapped_records(peer: Peer) -> None:
    """The records of one transfer's bursts, one for the other: each parcel arrives with the other's digest."""
    peer.say_offer(offer())
    peer.hear()
    peer.agree()
    data = pattern(N)
    sums = [xxhash.xxh3_64_intdigest(data[:PARCEL]), xxhash.xxh3_64_intdigest(data[PARCEL:])]
    for number in range(2):
        peer.send(data[number * PARCEL : (number + 1) * PARCEL])
        peer.send(record(peer.transfer, [sums[1 - number]]))
    peer.hear_answers(2)
    peer.serve(data)


# -- as the receiver


def take_all(peer: Peer) -> None:
    peer.hear_offer()
    peer.say(WANT, want())
    peer.hear()
    for _ in range(2):
        peer.take_burst()
    peer.say(CHECK)
    peer.hear()
    peer.say(VERDICT, [{}])


def old_want(peer: Peer) -> None:
    take_all(peer)
    old = peer.transfer
    peer.hear_offer()
    peer.say(WANT, want(), transfer=old)
    peer.hear_end()


def old_plan(peer: Peer) -> None:
    """The same want under the new transfer's name, but the state is another by now."""
    take_all(peer)
    peer.hear_offer()
    peer.say(WANT, want())
    peer.hear_end()


def old_verdict(peer: Peer) -> None:
    take_all(peer)
    old = peer.transfer
    peer.hear_offer()
    peer.say(VERDICT, [{}], transfer=old)
    peer.hear_end()


def own_offer_back(peer: Peer) -> None:
    """The source's own offer, sent back to it."""
    heard = peer.hear(0x5446_0000)
    peer.begin(heard.head, None, heard.body)
    peer.hear_end()


def want_twice(peer: Peer) -> None:
    """In the place of an answer to the first burst."""
    peer.hear_offer()
    peer.say(WANT, want())
    peer.hear()
    peer.take_burst(answer=None)
    peer.begin(header(WANT, peer.transfer))
    peer.take_burst()
    peer.say(VERDICT, [{}])
    peer.hear_end()


def receive_once(pg: Any) -> Got:
    state = transport(pg).recv_checkpoint(ATTACKER)
    return Got(bytes(state["w"].numpy()) == pattern(N), "")


def send_once(pg: Any) -> Got:
    w = torch.frombuffer(bytearray(pattern(N)), dtype=torch.uint8)
    transport(pg, timeout=1.5).send_checkpoint([ATTACKER], {"w": w})
    return Got(True, "")


OTHER = "sent a message of transfer"

ATTACKS = {
    "an offer of an old step again": Attack(
        receive_twice(step=4), same_offer, Expected("receiver", "StepMismatch", "step 3, the receiver expects step 4")
    ),
    "an offer again, to a receiver that takes any step": Attack(
        receive_twice(), same_offer, Expected("receiver", None)
    ),
    "everything again": Attack(receive_twice(), same_everything, Expected("receiver", None)),
    "everything again, to a receiver that knows the step": Attack(
        receive_twice(step=4), same_everything, Expected("receiver", "StepMismatch", "step 3", seconds=8)
    ),
    "answers of an old transfer": Attack(receive_twice(), old_answers, Expected("receiver", "ProtocolError", OTHER)),
    "records of an old transfer": Attack(receive_twice(), old_records, Expected("receiver", "ProtocolError", OTHER)),
    "the header of an old offer": Attack(
        receive_twice(), old_header, Expected("receiver", "ProtocolError", "arrived damaged")
    ),
    "records in another order": Attack(receive_once, swapped_records, Expected("receiver", None)),
    "a want of an old transfer": Attack(send_twice(), old_want, Expected("source", "ProtocolError", OTHER)),
    "an old want of a new state": Attack(
        send_twice(N + 16), old_plan, Expected("source", "ProtocolError", "derived other parcels")
    ),
    "a verdict of an old transfer": Attack(send_twice(), old_verdict, Expected("source", "ProtocolError", OTHER)),
    "its own offer": Attack(
        send_once,
        own_offer_back,
        Expected("source", "ProtocolError", "sent OFFER where WANT or DESCRIBE or VERSION or CHECK or VERDICT"),
    ),
    "a want twice": Attack(send_once, want_twice, Expected("source", "ProtocolError", "sent WANT where GOT was due")),
}

EXPECTED = {name: attack.expected for name, attack in ATTACKS.items()}

if __name__ == "__main__":
    sys.exit(main("attacks.replays", sys.argv[1:]))
