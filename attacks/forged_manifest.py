"""A source describes a state that does not add up, or that reaches where it must not.

Expected of each: the receiver refuses the offer as malformed before a byte is asked for, and tells the source so; its
target is as it was.
"""

from __future__ import annotations

import sys
from typing import Any

from attacks.peer import PARCEL, REFUSAL, Peer, ints, manifest, offer
from attacks.stage import Attack, Expected, main, receive

N = 2 * PARCEL

#: Changed fields of an honest manifest, and what the receiver says about them.
FORGERIES: dict[str, tuple[dict[str, Any], str]] = {
    "columns of different lengths": ({"tensor_dtype": b"\0\0"}, "have different lengths"),
    "half a number in a column": ({"tensor_offset": bytes(5)}, "malformed offer"),
    "more leaves than described": ({"kinds": b""}, "the tree has 1 leaves, but 0 are described"),
    "leaves of unknown kind": ({"kinds": b"\x07"}, "unknown kind"),
    "a leaf without its details": ({"kinds": b"\0"}, "details for [0-9]+ leaves that need one"),
    "more leaves than tensors": (
        {"tree": [1, None, ["w", "v"], b"\0\0"], "kinds": b"\1\1"}, "2 tensors, but 1 are described"),
    "keys that are not as many": ({"tree": [1, None, ["w", "v"], b"\0"]}, "a mapping has 2 keys"),
    "a key twice": ({"tree": [1, None, ["w", "w"], b"\0\0"], "kinds": b"\1\1"}, "1 different"),
    "a container that refers to itself": ({"tree": [4, None, [], [1]]}, "malformed tree"),
    "a container of a class that is no container": ({"tree": [6, "os:system", [], b"\0"]}, "not a class"),
    "a container of no known class": ({"tree": [8, ["antigravity:x", None], ["w"], b"\0"]}, "not imported"),
    "a storage of negative size": ({"storage_nbytes": ints("q", -N)}, "malformed storages"),
    "a storage on no device": ({"devices": []}, "device that was not described"),
    "a storage on a device of another world": ({"devices": ["warp:7"]}, "malformed offer"),
    "a storage without data": ({"devices": ["meta"]}, "has no data"),
    "a tensor in no storage": ({"tensor_storage": ints("i", 1)}, "storage that was not described"),
    "a tensor in storage -1": ({"tensor_storage": ints("i", -1)}, "storage that was not described"),
    "a tensor of no dtype": ({"tensor_dtype": b"\x05"}, "dtype that was not described"),
    "a dtype that is none": ({"dtypes": ["load"]}, "malformed offer"),
    "a negative size": ({"tensor_sizes": ints("q", -1)}, "out of range"),
    "a size one too large": ({"tensor_sizes": ints("q", N + 1)}, "reaches beyond its storage"),
    "a stride out of the storage": ({"tensor_strides": ints("q", 2)}, "reaches beyond its storage"),
    "a stride out of all memory": ({"tensor_strides": ints("q", (1 << 63) - 1)}, "out of range"),
    "sizes whose product wraps around": (
        {"tensor_ndim": b"\2", "tensor_sizes": ints("q", 1 << 33, 1 << 33), "tensor_strides": ints("q", 0, 0)},
        "too large to address"),
    "an offset beyond the storage": ({"tensor_offset": ints("q", 1)}, "reaches beyond its storage"),
    "a negative offset": ({"tensor_offset": ints("q", -8)}, "out of range"),
    "an offset that wraps around": ({"tensor_offset": ints("q", (1 << 63) - 8)}, "out of range|too large"),
    "dimensions that are not there": ({"tensor_ndim": b"\x05"}, "sizes and 1 strides for tensors of 5 dimensions"),
    "65 dimensions": (
        {"tensor_ndim": b"\x41", "tensor_sizes": ints("q", *[1] * 65), "tensor_strides": ints("q", *[1] * 65)},
        "65 dimensions, expected 0 to 64"),
    "flags that nobody knows": ({"tensor_flags": b"\xff"}, "unknown flags"),
    "a composite of no codec": ({"kinds": b"\2", "details": [["evil", 0, None, [0]]]}, "malformed offer"),
    "an array of objects": ({"kinds": b"\2", "details": [["array", 0, ["|O", [8], "C"], [0]]]}, "unknown numpy dtype"),
    "a field of another type": ({"kinds": 5}, "malformed offer"),
}  # fmt: skip


def forge(changes: dict[str, Any]) -> Any:
    def hostile(peer: Peer) -> None:
        peer.say_offer(offer(manifest({"w": N}, **changes)))
        told = peer.hear_end()
        assert told is not None, "the source was not told"
        assert told.kind == REFUSAL

    return hostile


EXPECTED = {name: Expected("receiver", "ProtocolError", words) for name, (_, words) in FORGERIES.items()}

ATTACKS = {
    name: Attack(receive(in_place=number % 2 == 0), forge(changes), EXPECTED[name])
    for number, (name, (changes, _)) in enumerate(FORGERIES.items())
}

if __name__ == "__main__":
    sys.exit(main("attacks.forged_manifest", sys.argv[1:]))
