"""A source describes tensors that run backwards through their storage.

torch has no such tensors. Expected: the receiver refuses them, also where every element would lie within the storage.
"""

from __future__ import annotations

import sys
from typing import Any

from attacks.peer import PARCEL, Peer, ints, manifest, offer
from attacks.stage import Attack, Expected, main, receive

N = 2 * PARCEL

#: Dimensions, sizes, strides and offset.
VIEWS: dict[str, tuple[list[int], list[int], int]] = {
    "backwards within the storage": ([N], [-1], N - 1),
    "backwards out of the storage": ([N], [-1], 0),
    "one dimension of two backwards": ([2, PARCEL], [-PARCEL, 1], PARCEL),
    "an empty tensor backwards": ([0], [-1], 0),
    "one element backwards": ([1], [-(1 << 40)], 0),
    "the lowest stride of all": ([2], [-(1 << 63)], 0),
}


def backwards(sizes: list[int], strides: list[int], offset: int) -> Any:
    def hostile(peer: Peer) -> None:
        geometry = {
            "tensor_ndim": bytes([len(sizes)]),
            "tensor_sizes": ints("q", *sizes),
            "tensor_strides": ints("q", *strides),
            "tensor_offset": ints("q", offset),
        }
        peer.say_offer(offer(manifest({"w": N}, **geometry)))
        peer.hear_end()

    return hostile


EXPECTED = Expected("receiver", "ProtocolError", "malformed offer: a size or stride of a tensor is out of range")

ATTACKS = {name: Attack(receive(in_place=True), backwards(*view), EXPECTED) for name, view in VIEWS.items()}

if __name__ == "__main__":
    sys.exit(main("attacks.negative_strides", sys.argv[1:]))
