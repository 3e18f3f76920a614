"""A receiver asks for what was not offered, or for what makes no sense.

Expected: the source refuses by name, sends nothing, and its tensors are as they were.
"""

from __future__ import annotations

import sys
from typing import Any

from attacks.peer import CHECK, COMPARE, GOT, MORE, PARCEL, VERDICT, WANT, Peer, fingerprint, pack, want
from attacks.stage import Attack, Expected, main, send

N = 2 * PARCEL
ABSENT = "wants parcels that do not exist"
PARTS = "wants tensors that were not offered"
SIZE = "wants parcels of an impossible size"
BURST = "wants bursts of an impossible size"

#: Changed fields of an honest want, and what the source says about them.
WANTS: dict[str, tuple[dict[str, Any], str]] = {
    "parcels of size 0": ({"parcel_bytes": 0}, SIZE),
    "parcels of size -16": ({"parcel_bytes": -16}, SIZE),
    "parcels of one item": ({"parcel_bytes": 16}, SIZE),
    "parcels larger than offered": ({"parcel_bytes": 2 * PARCEL}, SIZE),
    "parcels that end within an item": ({"parcel_bytes": PARCEL - 8}, SIZE),
    "parcels of 2**64 - 16 bytes": ({"parcel_bytes": (1 << 64) - 16}, SIZE),
    "bursts of nothing": ({"burst_bytes": 0}, BURST),
    "negative bursts": ({"burst_bytes": -1}, BURST),
    "bursts larger than offered": ({"burst_bytes": 1 << 40}, BURST),
    "another plan": ({"fingerprint": 1}, "derived other parcels"),
    "the plan of other sizes": ({"fingerprint": fingerprint(N, 16384)}, "derived other parcels"),
    "parcels beyond the last": ({"parcels": [0, 3]}, ABSENT),
    "parcels before the first": ({"parcels": [-1, 1]}, ABSENT),
    "parcels backwards": ({"parcels": [2, 0]}, ABSENT),
    "half a range": ({"parcels": [0]}, ABSENT),
    "an empty range": ({"parcels": [1, 1]}, ABSENT),
    "a range twice": ({"parcels": [0, 1, 0, 1]}, ABSENT),
    "a storage that is not there": ({"apart": [1]}, PARTS),
    "storage -1": ({"apart": [-1]}, PARTS),
    "a storage twice": ({"apart": [0, 0]}, PARTS),
    "a tensor that is not there": ({"apart": [0], "parts": [7]}, PARTS),
    "a tensor of all bits": ({"apart": [0], "parts": [(1 << 64) - 1]}, PARTS),
    "a field of another type": ({"parcels": "all"}, "malformed want"),
    "a number that is none": ({"host": 1.5}, "malformed want"),
}  # fmt: skip


def wanted(changes: dict[str, Any]) -> Any:
    def hostile(peer: Peer) -> None:
        peer.hear_offer()
        peer.say(WANT, want(N, **changes))
        assert peer.hear_end() is not None, "the receiver was not told"

    return hostile


def first(kind: int, body: Any = b"") -> Any:
    """Instead of a want."""

    def hostile(peer: Peer) -> None:
        peer.hear_offer()
        peer.say(kind, body)
        peer.hear_end()

    return hostile


def then(kind: int, body: Any = b"", **changes: Any) -> Any:
    """After a want of no parcels."""

    def hostile(peer: Peer) -> None:
        peer.hear_offer()
        peer.say(WANT, want(N, parcels=[], **changes))
        peer.hear()
        peer.say(kind, body)
        peer.hear_end()

    return hostile


def needless_check(peer: Peer) -> None:
    peer.hear_offer()
    peer.say(CHECK)
    peer.hear()
    peer.say(VERDICT, [0])
    peer.flush()


def source_says(words: str) -> Expected:
    return Expected("source", "ProtocolError", words)


ATTACKS = {
    **{name: Attack(send(), wanted(how), source_says(words)) for name, (how, words) in WANTS.items()},
    "digests that were not offered": Attack(
        send(verify=False), wanted({}), source_says("wants digests that were not offered")
    ),
    "a body that is no message": Attack(send(), first(WANT, b"\xc1" * 50), source_says("malformed want")),
    "a want without a body": Attack(send(), first(WANT), source_says("malformed want")),
    "a want one field too long": Attack(send(), first(WANT, pack([*want(N), 0])), source_says("malformed want")),
    "more before anything": Attack(send(), first(MORE, [[0, 1]]), source_says("sent MORE where WANT")),
    "a comparison before anything": Attack(
        send(), first(COMPARE, [[0, 1], bytes(8)]), source_says("sent COMPARE where WANT")
    ),
    "an answer before anything": Attack(send(), first(GOT), source_says("sent GOT where WANT")),
    "more of nothing": Attack(send(), then(MORE, [[]]), source_says("asks for nothing")),
    "more than there is": Attack(send(), then(MORE, [[1, 99]]), source_says("asks for parcels that do not exist")),
    "a comparison of what is not there": Attack(
        send(), then(COMPARE, [[0, 9], bytes(72)]), source_says("compares parcels that do not exist")
    ),
    "a comparison with too few digests": Attack(
        send(), then(COMPARE, [[0, 2], bytes(8)]), source_says("digests that do not belong")
    ),
    "a comparison with half a digest": Attack(
        send(), then(COMPARE, [[0, 1], bytes(7)]), source_says("digests that do not belong")
    ),
    "a comparison with a source without digests": Attack(
        send(verify=False),
        then(COMPARE, [[0, 1], bytes(8)], digests=False),
        source_says("digests that do not belong"),
    ),
    "a want twice in a row": Attack(send(), then(WANT, want(N)), source_says("sent WANT where MORE")),
    "a check that nobody needs": Attack(
        send(),
        needless_check,
        Expected("source", None),
    ),
}

EXPECTED = {name: attack.expected for name, attack in ATTACKS.items()}

if __name__ == "__main__":
    sys.exit(main("attacks.odd_wants", sys.argv[1:]))
