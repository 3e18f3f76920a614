"""A source whose digests never fit what it sends, or sometimes.

Expected: parcels that arrived wrong are asked for again, three times, and then named. What is torn is told.
"""

from __future__ import annotations

import sys
from typing import Any

from attacks.peer import HEADER, PARCEL, REFUSAL, Peer, Silence, offer, pattern, record
from attacks.stage import Attack, Expected, main, receive

N = 2 * PARCEL


def always_wrong(peer: Peer) -> None:
    peer.say_offer(offer())
    peer.serve(pattern(N), digest=lambda number, digest: digest ^ 1)


def always_other_bytes(peer: Peer) -> None:
    """The digests are right, the bytes are not."""
    peer.say_offer(offer())
    peer.serve(pattern(N), damage=lambda number, parcel: parcel[:-1] + bytes([parcel[-1] ^ 1]))


def short_parcels(peer: Peer) -> None:
    """Shorter than the plan says: gloo does not mind, the digest does."""
    peer.say_offer(offer())
    peer.serve(pattern(N), damage=lambda number, parcel: parcel[:100])


def twice_wrong(peer: Peer) -> None:
    """Then right: a repair."""
    told: dict[int, int] = {}

    def digest(number: int, digest: int) -> int:
        told[number] = told.get(number, 0) + 1
        return digest ^ (told[number] < 3)

    peer.say_offer(offer())
    peer.serve(pattern(N), digest=digest)


def broken_records(change: Any) -> Any:
    """Records that are damaged themselves."""

    def hostile(peer: Peer) -> None:
        peer.say_offer(offer())
        try:
            peer.hear()
            while True:
                peer.agree()
                for number in range(2):
                    peer.send(pattern(N)[number * PARCEL : (number + 1) * PARCEL])
                    peer.send(change(record(peer.transfer, [1])))
                if any(heard.kind == REFUSAL for heard in peer.hear_answers(2)):
                    return
                if peer.hear().kind == REFUSAL:  # Or another request.
                    return
        except Silence:
            return

    return hostile


CORRUPT = Expected("receiver", "CorruptData", r"still wrong after 3 repairs; leaves: \['w'\]")

ATTACKS = {
    "wrong for ever": Attack(receive(), always_wrong, CORRUPT),
    "wrong for ever, in place": Attack(
        receive(in_place=True), always_wrong, Expected("receiver", "CorruptData", "torn: 1 target")
    ),
    "wrong for ever, atomically": Attack(receive(in_place=True, atomic=True), always_wrong, CORRUPT),
    "other bytes": Attack(receive(), always_other_bytes, CORRUPT),
    "short parcels": Attack(receive(), short_parcels, CORRUPT, wires=("group",)),
    "wrong twice": Attack(receive(), twice_wrong, Expected("receiver", None)),
    "digests that are damaged": Attack(
        receive(), broken_records(lambda data: data[:-1] + bytes([data[-1] ^ 1])), CORRUPT
    ),
    "no digests where some are due": Attack(
        receive(), broken_records(lambda data: data[: HEADER.size]), CORRUPT, wires=("group",)
    ),
    "a record whose header is damaged": Attack(
        receive(),
        broken_records(lambda data: data[:39] + bytes([data[39] ^ 1]) + data[40:]),
        Expected("receiver", "ProtocolError", "arrived damaged"),
    ),
    "a record of nothing": Attack(
        receive(), broken_records(lambda data: b"\0" * len(data)), Expected("receiver", "ProtocolError", "not a transf")
    ),
}

EXPECTED = {name: attack.expected for name, attack in ATTACKS.items()}

if __name__ == "__main__":
    sys.exit(main("attacks.wrong_digests", sys.argv[1:]))
