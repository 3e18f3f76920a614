"""A peer announces more than there is: lengths of messages, leaves, storages, parcels, bursts.

Expected: a number alone costs nothing. What exceeds a limit is refused by name, and what stays below it takes memory
only as bytes arrive.
"""

from __future__ import annotations

import sys
from typing import Any

import numpy as np

from attacks.peer import (
    OFFER,
    OFFER_TAG,
    PARCEL,
    WANT,
    Peer,
    header,
    ints,
    manifest,
    offer,
    pack,
    want,
)
from attacks.stage import MIB, Attack, Expected, main, receive, send


def announce_offer(length: int) -> Any:
    """Only the header of an offer, and nothing after it."""

    def hostile(peer: Peer) -> None:
        peer.begin(header(OFFER, peer.transfer, note=peer.tag, length=length), OFFER_TAG)
        peer.hear_end()

    return hostile


def announce_want(length: int) -> Any:
    def hostile(peer: Peer) -> None:
        peer.hear_offer()
        peer.begin(header(WANT, peer.transfer, length=length))
        peer.hear_end()

    return hostile


def offered(plain: Any) -> Any:
    def hostile(peer: Peer) -> None:
        peer.say_offer(plain() if callable(plain) else plain)
        peer.hear_end()

    return hostile


def wanted(plain: Any) -> Any:
    def hostile(peer: Peer) -> None:
        peer.hear_offer()
        peer.say(WANT, plain() if callable(plain) else plain)
        peer.hear_end()

    return hostile


def one(nbytes: int) -> list[Any]:
    return manifest({"w": nbytes})


def many_leaves(count: int) -> list[Any]:
    """A tree that refers to a flat container of many leaves again and again."""
    leaves = 1 << 16
    return manifest({"w": 64}, tree=[4, None, [], [[4, None, [], bytes(leaves)], *[1] * (count // leaves)]])


def many_tensors(count: int) -> list[Any]:
    """Of one byte each."""
    ones = np.ones(count, dtype="<i8").tobytes()
    return manifest(
        {},
        tree=[4, None, [], bytes(count)],
        kinds=b"\x01" * count,
        storage_nbytes=ones,
        storage_device=bytes(count),
        tensor_storage=np.arange(count, dtype="<i4").tobytes(),
        tensor_dtype=bytes(count),
        tensor_flags=bytes(count),
        tensor_ndim=bytes(count),
        tensor_offset=bytes(8 * count),
        tensor_sizes=b"",
        tensor_strides=b"",
    )


def empty_lists(count: int) -> bytes:
    """An offer with ``count`` lists in its details: one byte each on the wire, 64 in Python."""
    lists = b"\xdd" + count.to_bytes(4, "big") + b"\x90" * count
    return pack(offer(manifest({"w": 64}, details="here"))).replace(pack("here"), lists)


ATTACKS = {
    # -- lengths of messages
    "an offer of 2**64 - 1 bytes": Attack(
        receive(), announce_offer((1 << 64) - 1), Expected("receiver", "ProtocolError", "MAX_MESSAGE_BYTES")
    ),
    "an offer one byte beyond the limit": Attack(
        receive(), announce_offer(256 * MIB + 1), Expected("receiver", "ProtocolError", "MAX_MESSAGE_BYTES")
    ),
    "an offer of which nothing comes": Attack(
        receive(timeout=0.4), announce_offer(256 * MIB), Expected("receiver", "PeerTimeout", cap=16 * MIB)
    ),
    "a want of 2**63 bytes": Attack(
        send(), announce_want(1 << 63), Expected("source", "ProtocolError", "MAX_MESSAGE_BYTES")
    ),
    "a want of which nothing comes": Attack(
        send(timeout=0.4), announce_want(256 * MIB), Expected("source", "PeerTimeout", cap=16 * MIB)
    ),
    # -- what is offered
    "a storage of 2**63 - 1 bytes": Attack(
        receive(), offered(offer(one((1 << 63) - 1))), Expected("receiver", "ProtocolError", "out of range|too large")
    ),
    "a storage of 2**50 bytes in small parcels": Attack(
        receive(),
        offered(offer(one(1 << 50), parcel_bytes=16384, burst_bytes=16384, staged_bytes=16384)),
        Expected("receiver", "LimitExceeded", "max_receive_bytes"),
    ),
    "a storage just beyond what the receiver allows": Attack(
        receive(max_receive_bytes=MIB),
        offered(offer(one(MIB + 1))),
        Expected("receiver", "LimitExceeded", "max_receive_bytes=1048576"),
    ),
    "100 storages that are too much together": Attack(
        receive(),
        offered(lambda: offer(manifest({f"w{i}": 1 << 40 for i in range(100)}))),
        Expected("receiver", "LimitExceeded", "max_receive_bytes"),
    ),
    "100 storages that together wrap around": Attack(
        receive(),
        offered(lambda: offer(manifest({f"w{i}": 1 << 52 for i in range(8192)}))),
        Expected("receiver", "LimitExceeded", "max_receive_bytes"),
    ),
    "leaves that there are not": Attack(
        receive(),
        offered(lambda: offer(many_leaves(1 << 30))),
        Expected("receiver", "ProtocolError", "leaves, but 1 are described"),
    ),
    "200,000 tensors of one byte, and then nothing": Attack(
        receive(timeout=0.4),
        offered(lambda: offer(many_tensors(200_000))),
        Expected("receiver", "PeerTimeout", "sending the want", seconds=8),
    ),
    "an element that repeats 2**50 times, and then nothing": Attack(
        receive(timeout=0.4),
        offered(lambda: offer(manifest({"w": 64}, tensor_sizes=ints("q", 1 << 50), tensor_strides=ints("q", 0)))),
        Expected("receiver", "PeerTimeout", "sending the want"),
    ),
    # -- parcels and bursts
    "parcels of no bytes": Attack(
        receive(), offered(offer(parcel_bytes=0)), Expected("receiver", "ProtocolError", "impossible sizes")
    ),
    "parcels of one item": Attack(
        receive(), offered(offer(parcel_bytes=16)), Expected("receiver", "ProtocolError", "impossible sizes")
    ),
    "parcels of a negative size": Attack(
        receive(), offered(offer(parcel_bytes=-PARCEL)), Expected("receiver", "ProtocolError", "impossible sizes")
    ),
    "parcels larger than all staging": Attack(
        receive(),
        offered(offer(parcel_bytes=1 << 40, burst_bytes=1 << 40)),
        Expected("receiver", "ProtocolError", "STAGING_BYTES"),
    ),
    "more bursts under way than staging allows": Attack(
        receive(), offered(offer(bursts_ahead=1 << 40)), Expected("receiver", "ProtocolError", "STAGING_BYTES")
    ),
    "no bursts under way": Attack(
        receive(), offered(offer(bursts_ahead=0)), Expected("receiver", "ProtocolError", "impossible sizes")
    ),
    "a timeout of all time": Attack(
        receive(), offered(offer(timeout=float("inf"))), Expected("receiver", "ProtocolError", "impossible timeout")
    ),
    "a rate that is no number": Attack(
        receive(),
        offered(offer(max_bytes_per_second=float("nan"))),
        Expected("receiver", "ProtocolError", "impossible rate"),
    ),
    # -- what is wanted
    "a want of 2**40 parcels": Attack(
        send(),
        wanted(want(parcels=[0, 1 << 40])),
        Expected("source", "ProtocolError", "wants parcels that do not exist"),
    ),
    "a want of a million ranges": Attack(
        send(),
        wanted(lambda: want(parcels=list(range(2_000_000)))),
        Expected("source", "ProtocolError", "wants parcels that do not exist"),
    ),
    "a want of a million tensors": Attack(
        send(),
        wanted(lambda: want(apart=[0], tensors=list(range(1_000_000)))),
        Expected("source", "ProtocolError", "wants tensors that were not offered"),
    ),
    # -- small messages, large demands
    "a mebibyte of empty lists": Attack(
        receive(),
        offered(lambda: empty_lists(MIB)),
        Expected("receiver", "ProtocolError", "details for [0-9]+ leaves that need one"),
    ),
}

EXPECTED = {name: attack.expected for name, attack in ATTACKS.items()}

if __name__ == "__main__":
    sys.exit(main("attacks.huge_counts", sys.argv[1:]))
