"""A source lies about where its memory is.

Expected: what cannot be proven by the token, or cannot be read, comes over the group and is exact; what no source would
say is refused. A source that names memory of the receiver itself gets nothing: the receiver copies its own bytes into
its own tensors (a limit that docs/design.md names), and nothing else is written.
"""

from __future__ import annotations

import ctypes
import os
import pathlib
import sys
from typing import Any

import torch

from attacks.peer import PARCEL, Peer, ints, manifest, offer, pack, pattern
from attacks.stage import ATTACKER, Attack, Expected, Got, main, receive, transport

N = 2 * PARCEL
TOKEN = bytes(range(100, 132))


class Memory:
    """The attacker's own memory, as an honest source would describe it."""

    def __init__(self) -> None:
        self.token = ctypes.create_string_buffer(TOKEN, len(TOKEN))
        self.data = ctypes.create_string_buffer(pattern(N), N)

    def described(self, **changes: Any) -> list[Any]:
        plain = {
            "pid": os.getpid(),
            "token_address": ctypes.addressof(self.token),
            "token": TOKEN,
            "storages": ints("Q", ctypes.addressof(self.data)),
        } | changes
        return [plain[name] for name in ("pid", "token_address", "token", "storages")]


def lie(**changes: Any) -> Any:
    """Offer memory that is described wrongly; then serve over the group, honestly."""

    def hostile(peer: Peer) -> None:
        memory = Memory()
        found = {name: change(memory) if callable(change) else change for name, change in changes.items()}
        peer.say_offer(offer(manifest({"w": N}), routes={"memory": pack(memory.described(**found))}))
        peer.serve(pattern(N))

    return hostile


def absent_pid() -> int:
    return int(pathlib.Path("/proc/sys/kernel/pid_max").read_text()) - 1


def wiped(memory: Memory) -> bytes:
    ctypes.memset(memory.token, 0, len(TOKEN))
    return TOKEN


def unreadable(memory: Memory) -> int:
    """An address after which nothing is mapped."""
    maps = [line.split()[0].split("-") for line in pathlib.Path("/proc/self/maps").read_text().splitlines()]
    starts = {int(start, 16) for start, _ in maps}
    return next(int(end, 16) for _, end in maps if int(end, 16) not in starts)


# -- the receiver's own memory: the attacker may run as the same user, and look for it


def offer_receivers_own(peer: Peer) -> None:
    pid = int(peer.recv(8, 1).rstrip(b"\0"))
    # The first page of the interpreter: it never changes.
    with open(f"/proc/{pid}/maps") as maps:
        start = int(maps.readline().split("-")[0], 16)
    with open(f"/proc/{pid}/mem", "rb", buffering=0) as theirs:
        theirs.seek(start)
        proof = theirs.read(32)
    memory = [pid, start, proof, ints("Q", start)]
    peer.say_offer(offer(manifest({"w": 4096}), routes={"memory": pack(memory)}))
    peer.serve(pattern(4096))


def receive_own(pg: Any) -> Got:
    own = torch.frombuffer(bytearray(str(os.getpid()).encode().ljust(8, b"\0")), dtype=torch.uint8)
    pg.send([own], ATTACKER, 1).wait()
    memory = torch.full((3 * 4096,), 9, dtype=torch.uint8)
    end = transport(pg, {"w": memory[4096:8192]}, same_host=True)
    end.recv_checkpoint(ATTACKER)
    beside = torch.cat([memory[:4096], memory[8192:]])
    assert end.report is not None
    return Got(bool((beside == 9).all()), end.report.route)


BY_GROUP = Expected("receiver", None, route="group")
MALFORMED = Expected("receiver", "ProtocolError", "malformed description of memory|impossible address|malformed offer")

LIES: dict[str, tuple[dict[str, Any], Expected]] = {
    "no lie at all": ({}, Expected("receiver", None, route="memory")),
    "another token": ({"token": b"x" * 32}, BY_GROUP),
    "a token that is wiped": ({"token": wiped}, BY_GROUP),
    "a token at 0": ({"token_address": 0}, BY_GROUP),
    "a token that may not be read": ({"token_address": unreadable}, BY_GROUP),
    "a token that ends where nothing is": ({"token_address": lambda memory: unreadable(memory) - 8}, BY_GROUP),
    "a process that does not exist": ({"pid": lambda memory: absent_pid()}, BY_GROUP),
    "another process": ({"pid": lambda memory: os.getppid()}, BY_GROUP),
    "the first process of all": ({"pid": 1}, BY_GROUP),
    "a storage that may not be read": ({"storages": lambda memory: ints("Q", unreadable(memory))}, BY_GROUP),
    "a storage of which half may be read": (
        {"storages": lambda memory: ints("Q", unreadable(memory) - PARCEL // 2)}, BY_GROUP),
    "a storage at 1": ({"storages": ints("Q", 1)}, BY_GROUP),
    "a storage at 0": ({"storages": ints("Q", 0)}, BY_GROUP),
    "a storage beyond all addresses": ({"storages": ints("Q", (1 << 64) - 1)}, MALFORMED),
    "a storage too many": ({"storages": ints("Q", 4096, 4096)}, MALFORMED),
    "half a storage": ({"storages": b"\0" * 4}, MALFORMED),
    "process 0": ({"pid": 0}, MALFORMED),
    "process -1": ({"pid": -1}, MALFORMED),
    "process 2**40": ({"pid": 1 << 40}, MALFORMED),
    "a short token": ({"token": b"x"}, MALFORMED),
    "an empty token": ({"token": b""}, MALFORMED),
    "a negative address": ({"token_address": -4096}, MALFORMED),
    "an address beyond all": ({"token_address": 1 << 63}, MALFORMED),
}  # fmt: skip


def offer_routes(said: Any) -> Any:
    """Offer routes that are described like this; then serve over the group, honestly."""

    def hostile(peer: Peer) -> None:
        peer.say_offer(offer(manifest({"w": N}), routes=said))
        peer.serve(pattern(N))

    return hostile


ATTACKS = {
    **{
        name: Attack(receive(same_host=True, in_place=True), lie(**how), expected)
        for name, (how, expected) in LIES.items()
    },
    "a route that nobody knows": Attack(receive(same_host=True), offer_routes({"air": b"x", "": b""}), BY_GROUP),
    "an entry that is no description": Attack(receive(same_host=True), offer_routes({"memory": b"\xc1"}), MALFORMED),
    "an empty entry of an offer that is not brief": Attack(
        receive(same_host=True), offer_routes({"memory": b""}), MALFORMED
    ),
    "an entry of another shape": Attack(receive(same_host=True), offer_routes({"memory": pack([[]] * 4)}), MALFORMED),
    "more routes than there can be": Attack(
        receive(same_host=True), offer_routes({str(n): b"" for n in range(17)}), MALFORMED
    ),
    "a route whose name is endless": Attack(receive(same_host=True), offer_routes({"x" * 65: b""}), MALFORMED),
    "routes that are a list": Attack(receive(same_host=True), offer_routes(["memory"]), MALFORMED),
    "memory of the receiver itself": Attack(
        receive_own, offer_receivers_own, Expected("receiver", None, route="memory")
    ),
    "a wrong token, to a receiver that reads twice": Attack(
        receive(same_host=True, verify=True), lie(token=b"x" * 32), BY_GROUP
    ),
}

EXPECTED = {name: attack.expected for name, attack in ATTACKS.items()}

if __name__ == "__main__":
    sys.exit(main("attacks.wrong_tokens", sys.argv[1:]))
