"""A source describes tensors that share memory in ways that a target does not.

Expected: an element of a target that would get two different elements of the source is refused by name, before a byte
is written; where every element has one source only, what arrives is exact.
"""

from __future__ import annotations

import sys
from typing import Any

import torch

from attacks.peer import PARCEL, Peer, ints, manifest, offer, pattern
from attacks.stage import ATTACKER, Attack, Expected, Got, main, receive, transport

N = 2 * PARCEL


def offered(described: list[Any], data: bytes | None = None) -> Any:
    def hostile(peer: Peer) -> None:
        peer.say_offer(offer(described))
        if data is None:
            peer.hear_end()
        else:
            peer.serve(data)

    return hostile


def into(make: Any) -> Any:
    """A receive into a target of its own kind; whatever comes, the memory beside it stays as it is."""

    def run(pg: Any) -> Got:
        memory = torch.full((4 * N,), 9, dtype=torch.uint8)
        target = make(memory)
        before = memory.clone()
        try:
            transport(pg, target).recv_checkpoint(ATTACKER)
        except Exception:
            assert torch.equal(memory, before), "a target was written"
            raise
        return Got(True, "")

    return run


def view(sizes: list[int], strides: list[int], offset: int = 0) -> dict[str, Any]:
    return {
        "tensor_ndim": bytes([len(sizes)]),
        "tensor_sizes": ints("q", *sizes),
        "tensor_strides": ints("q", *strides),
        "tensor_offset": ints("q", offset),
    }


def windows(state: Any) -> bool:
    """Of overlapping rows, each one byte further than the one before."""
    line = torch.frombuffer(bytearray(pattern(N)), dtype=torch.uint8)
    return torch.equal(state["w"], line.as_strided((N // 2, 100), (1, 1)))


#: Two tensors of one storage: the second begins in the middle of the first.
HALVES = manifest(
    {"a": N, "b": N},
    storage_nbytes=ints("q", N + N // 2),
    storage_device=b"\0",
    tensor_storage=ints("i", 0, 0),
    tensor_offset=ints("q", 0, N // 2),
)


def halves(state: Any) -> bool:
    data = pattern(N + N // 2)
    return bytes(state["a"].numpy()) == data[:N] and bytes(state["b"].numpy()) == data[N // 2 :]


ATTACKS = {
    "two tensors for one memory": Attack(
        into(lambda memory: {"a": memory[:N], "b": memory[:N]}),
        offered(manifest({"a": N, "b": N})),
        Expected("receiver", "TargetMismatch", "'b'"),
    ),
    "two tensors for memory that overlaps by a byte": Attack(
        into(lambda memory: {"a": memory[:N], "b": memory[N - 1 : 2 * N - 1]}),
        offered(manifest({"a": N, "b": N})),
        Expected("receiver", "TargetMismatch", "'b'"),
    ),
    "one memory in another order for two tensors": Attack(
        into(lambda memory: {"a": memory[:N], "b": memory[:N]}),
        offered(
            manifest(
                {"a": N, "b": N},
                storage_nbytes=ints("q", N + 1),
                storage_device=b"\0",
                tensor_storage=ints("i", 0, 0),
                tensor_offset=ints("q", 0, 1),
            )
        ),
        Expected("receiver", "TargetMismatch", "'b'"),
    ),
    "many elements for one of a target that overlaps itself": Attack(
        into(lambda memory: {"w": memory.as_strided((4, N // 4), (1, 1))}),
        offered(manifest({"w": N}, **view([4, N // 4], [N // 4, 1]))),
        Expected("receiver", "TargetMismatch", "'w'"),
    ),
    "many elements for one of an expanded target": Attack(
        into(lambda memory: {"w": memory[:1].expand(N)}),
        offered(manifest({"w": N})),
        Expected("receiver", "TargetMismatch", "'w'"),
    ),
    "rows that overlap": Attack(
        receive(exact=windows),
        offered(
            manifest({"w": N}, storage_nbytes=ints("q", N // 2 + 99), **view([N // 2, 100], [1, 1])),
            pattern(N // 2 + 99),
        ),
        Expected("receiver", None),
    ),
    "tensors that overlap, for fresh ones": Attack(
        receive(exact=halves), offered(HALVES, pattern(N + N // 2)), Expected("receiver", None)
    ),
    "rows that overlap 2**37 times": Attack(
        receive(timeout=0.4),
        offered(manifest({"w": 1 << 20}, **view([1 << 19, 1 << 18], [1, 1]))),
        Expected("receiver", "PeerTimeout", "sending the want"),
    ),
    "runs that are too many to untangle": Attack(
        receive(timeout=0.4),
        offered(manifest({"w": 1 << 22}, **view([1000, 1000], [1009, 3]))),
        Expected("receiver", "PeerTimeout", "sending the want"),
    ),
}

EXPECTED = {name: attack.expected for name, attack in ATTACKS.items()}

if __name__ == "__main__":
    sys.exit(main("attacks.overlapping_boxes", sys.argv[1:]))
