"""A receiver asks for what was not offered, or for what makes no sense.

Expected: the source refuses by name, sends nothing, and its tensors are as they were.
"""

from __future__ import annotations

import sys
from typing import Any

import xxhash

from attacks.peer import (
    AGREED,
    CHECK,
    COMPARE,
    DESCRIBE,
    DIGESTS,
    GOT,
    HEADER,
    MORE,
    OFFER,
    PARCEL,
    VERDICT,
    WANT,
    Peer,
    blocks_fingerprint,
    fingerprint,
    ints,
    pack,
    pattern,
    want,
    wanted_blocks,
)
from attacks.stage import Attack, Expected, main, send

N = 2 * PARCEL
ABSENT = "wants parcels that do not exist"
TENSORS = "wants tensors that were not offered"
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
    "a storage that is not there": ({"apart": [1]}, TENSORS),
    "storage -1": ({"apart": [-1]}, TENSORS),
    "a storage twice": ({"apart": [0, 0]}, TENSORS),
    "a tensor that is not there": ({"apart": [0], "tensors": [7]}, TENSORS),
    "a tensor of all bits": ({"apart": [0], "tensors": [(1 << 64) - 1]}, TENSORS),
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
    peer.say(VERDICT, [{}])
    peer.flush()


def needless_description(peer: Peer) -> None:
    before = peer.hear_offer()
    peer.say(DESCRIBE)
    heard = peer.hear()
    assert heard.kind == OFFER
    assert heard.plain == before, "described otherwise than offered"
    peer.say(VERDICT, [{}])
    peer.flush()


def compare_all(**changes: Any) -> Any:
    def hostile(peer: Peer) -> None:
        peer.hear_offer()
        peer.say(WANT, want(N, parcels=[], **changes))
        peer.hear()
        peer.say(COMPARE, [[0, 2]])
        heard = peer.hear()
        assert heard.kind == DIGESTS
        data = pattern(N)
        parts = [data[:PARCEL], data[PARCEL:]]
        assert heard.plain == [b"".join(map(xxhash.xxh3_128_digest, parts)), []]
        peer.say(VERDICT, [{}])
        peer.flush()

    return hostile


# -- blocks

NOT_HELD = "wants blocks that were not offered: this rank does not hold block"
COLUMNS = "wants blocks that were not offered: .* have different lengths"
DIMENSIONS = "wants blocks that were not offered: [0-9]+ starts and [0-9]+ sizes for blocks"
IMPOSSIBLE = "wants blocks that were not offered: a wanted block has a size below 1 or a start below 0"

#: Blocks of a leaf of N bytes, and what the source says about them.
BLOCKS: dict[str, tuple[list[Any], str]] = {
    "leaf 1 of 1": (wanted_blocks((0, N), leaf=ints("i", 1)), "leaf 1 does not exist"),
    "leaf -1": (wanted_blocks((0, N), leaf=ints("i", -1)), "leaf -1 does not exist"),
    "the last of all leaves": (wanted_blocks((0, N), leaf=ints("i", (1 << 31) - 1)), "leaf 2147483647 does not exist"),
    "tensor 1 of 1": (wanted_blocks((0, N), tensor=ints("i", 1)), "tensor 1 of leaf 0 does not exist"),
    "tensor -1": (wanted_blocks((0, N), tensor=ints("i", -1)), "tensor -1 of leaf 0 does not exist"),
    "no dimensions": (
        wanted_blocks((0, N), ndim=b"\0", starts=b"", sizes=b""),
        "a block of 0 dimensions of a tensor of 1",
    ),
    "two dimensions": (
        wanted_blocks((0, N), ndim=b"\x02", starts=ints("q", 0, 0), sizes=ints("q", 1, 1)),
        "a block of 2 dimensions of a tensor of 1",
    ),
    "one byte too far": (wanted_blocks((1, N)), NOT_HELD),
    "beyond the end": (wanted_blocks((N, 1)), NOT_HELD),
    "all addresses": (wanted_blocks(((1 << 63) - 1, (1 << 63) - 1)), NOT_HELD),
    "before the beginning": (wanted_blocks((-1, 2)), IMPOSSIBLE),
    "nothing": (wanted_blocks((0, 0)), IMPOSSIBLE),
    "less than nothing": (wanted_blocks((0, -(1 << 63))), IMPOSSIBLE),
    "everything, over and over": (wanted_blocks(*[(0, N)] * 65), "more than 64 times the whole state"),
    "a byte thousands of times, and then everything": (
        wanted_blocks(*[(0, 1)] * 5000, *[(0, N)] * 64),
        "more than 64 times the whole state",
    ),
    "a leaf too few": (wanted_blocks((0, 1), (1, 1), leaf=ints("i", 0)), COLUMNS),
    "a tensor too many": (wanted_blocks((0, 1), tensor=ints("i", 0, 0)), COLUMNS),
    "a type too many": (wanted_blocks((0, 1), dtype=b"\0\0"), COLUMNS),
    "no beginnings": (wanted_blocks((0, 1), begins=b""), COLUMNS),
    "a start too few": (wanted_blocks((0, 1), starts=b""), DIMENSIONS),
    "a size too many": (wanted_blocks((0, 1), sizes=ints("q", 1, 1)), DIMENSIONS),
    "more dimensions than there are columns": (wanted_blocks((0, 1), ndim=b"\xff"), DIMENSIONS),
    "half a number": (wanted_blocks((0, 1), starts=bytes(7)), "wants blocks that were not offered"),
    "a type that was not named": (wanted_blocks((0, N), dtype=b"\x01"), "a dtype that is not listed"),
    "a type that does not exist": (wanted_blocks((0, N), dtype=b"\x01", dtypes=["float99"]), "float99"),
    "a type that is none": (wanted_blocks((0, N), dtype=b"\x01", dtypes=["nn"]), "blocks that were not offered"),
    "bytes as numbers": (
        wanted_blocks((0, N), dtype=b"\x01", dtypes=["float32"]),
        "uint8 cannot be sent as torch.float32",
    ),
    "no blocks at all": ([b"", b"", b"", b"", b"", b"", [], b""], "parcels that do not exist"),
    "columns of text": (wanted_blocks((0, N), leaf="0"), "malformed want"),
    "a column too many": ([*wanted_blocks((0, N)), b""], "malformed want"),
}


def wanting(blocks: list[Any], words: str = "", **changes: Any) -> Any:
    sound = not words.startswith("wants blocks") and all(isinstance(blocks[at], bytes) for at in (0, 4))
    made = blocks_fingerprint(blocks) if sound else 0
    return wanted({"wanted_blocks": blocks, "fingerprint": made} | changes)


def honest_blocks(peer: Peer) -> None:
    """The middle of the tensor, in two blocks the wrong way round."""
    blocks = wanted_blocks((PARCEL, PARCEL // 2), (PARCEL // 2, PARCEL // 2))
    peer.hear_offer()
    peer.say(WANT, want(N, wanted_blocks=blocks, fingerprint=blocks_fingerprint(blocks), parcels=[0, 2]))
    assert peer.hear().kind == AGREED
    data = peer.recv(PARCEL // 2) + peer.recv(PARCEL // 2)
    peer.recv(HEADER.size + 24)
    peer.say(GOT, note=0)
    half = PARCEL // 2
    assert data == pattern(N)[PARCEL : PARCEL + half] + pattern(N)[half:PARCEL]
    peer.say(VERDICT, [{}])
    peer.flush()


def the_same_blocks(peer: Peer) -> None:
    blocks = wanted_blocks(*[(0, N)] * 4)
    peer.hear_offer()
    peer.say(WANT, want(N, wanted_blocks=blocks, fingerprint=blocks_fingerprint(blocks), parcels=[0, 8]))
    assert peer.hear().kind == AGREED
    data = b"".join(peer.take_burst() for _ in range(8))
    assert data == pattern(N) * 4
    peer.say(VERDICT, [{}])
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
    "a comparison before anything": Attack(send(), first(COMPARE, [[0, 1]]), source_says("sent COMPARE where WANT")),
    "an answer before anything": Attack(send(), first(GOT), source_says("sent GOT where WANT")),
    "more of nothing": Attack(send(), then(MORE, [[]]), source_says("asks for nothing")),
    "more than there is": Attack(send(), then(MORE, [[1, 99]]), source_says("asks for parcels that do not exist")),
    "a comparison of what is not there": Attack(
        send(), then(COMPARE, [[0, 9]]), source_says("compares parcels that do not exist")
    ),
    "a comparison of the version before": Attack(
        send(), then(COMPARE, [[0, 2], bytes(16)]), source_says("compares parcels by digests of a wrong length")
    ),
    "digests for a source": Attack(send(), then(DIGESTS, [bytes(32)]), source_says("sent DIGESTS where MORE")),
    "a description after the want": Attack(send(), then(DESCRIBE), source_says("sent DESCRIBE where MORE")),
    "a description of what was described": Attack(send(), needless_description, Expected("source", None)),
    "a comparison with a source without digests": Attack(
        send(verify=False), compare_all(digests=False), Expected("source", None)
    ),
    "blocks that it has": Attack(send(), honest_blocks, Expected("source", None)),
    "the same blocks several times": Attack(send(), the_same_blocks, Expected("source", None)),
    **{
        f"blocks: {name}": Attack(send(), wanting(blocks, words), source_says(words))
        for name, (blocks, words) in BLOCKS.items()
    },
    "blocks of another plan": Attack(
        send(), wanting(wanted_blocks((0, N)), fingerprint=fingerprint(N)), source_says("derived other parcels")
    ),
    "a plan of blocks without them": Attack(
        send(), wanted({"fingerprint": blocks_fingerprint(wanted_blocks((0, N)))}), source_says("derived other parcels")
    ),
    "a mebibyte of blocks": Attack(
        send(), wanting(wanted_blocks(*[(0, 1)] * 40_000), fingerprint=1), source_says("derived other parcels")
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
