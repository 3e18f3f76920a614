"""Places that lead nowhere, for attacks on meetings and on lanes."""

from __future__ import annotations

import os
import socket
from typing import Any

from attacks.stream_peer import HERE, Door, give, take

__all__ = ["BAD_PLACES", "PLACES", "place_of"]


def nobody() -> str:
    """An address where nobody listens."""
    with socket.create_server((HERE, 0)) as listener:
        return f"{HERE}:{listener.getsockname()[1]}"


def silent(door: Door, sock: socket.socket) -> None:
    """It takes connections, and says nothing."""


def closing(door: Door, sock: socket.socket) -> None:
    sock.close()


def another_service(door: Door, sock: socket.socket) -> None:
    give(sock, b"220 mail ESMTP\r\n" + bytes(200))


def reflecting(door: Door, sock: socket.socket) -> None:
    while True:
        give(sock, take(sock, 1))


def flooding(door: Door, sock: socket.socket) -> None:
    while True:
        give(sock, os.urandom(1 << 16))


#: Addresses that are none.
NUMBERS = {
    "a name": "localhost:80",
    "a name that takes long": "nobody.invalid:80",
    "port 0": f"{HERE}:0",
    "no port": HERE,
    "noise": "\0\x7f]:[:" * 9,
}


#: Doors stay open until the process ends.
_kept: list[Door] = []


def place_of(how: str) -> list[Any] | None:
    """A place that leads nowhere. Made when it is needed: doors listen."""
    doors = {
        "silence": silent,
        "a closed door": closing,
        "another service": another_service,
        "its own words": reflecting,
        "noise without end": flooding,
    }
    if how in doors:
        door = Door(doors[how])
        _kept.append(door)
        return door.place
    if how == "another token":
        door = Door()
        _kept.append(door)
        return [door.address, bytes(32)]
    address = NUMBERS.get(how, "") or nobody()
    return None if how == "no place" else [address, bytes(32)]


PLACES = [
    "nobody", "silence", "a closed door", "another service", "its own words", "noise without end", "another token",
    "a name", "a name that takes long", "port 0", "no port", "noise", "no place",
]  # fmt: skip
BAD_PLACES: dict[str, Any] = {
    "a short token": [f"{HERE}:80", bytes(31)],
    "a long token": [f"{HERE}:80", bytes(33)],
    "a token that is text": [f"{HERE}:80", "x" * 32],
    "an address of 129 letters": ["1" * 129, bytes(32)],
    "an address that is a number": [80, bytes(32)],
    "an address alone": [f"{HERE}:80"],
    "a place that is text": f"{HERE}:80",
}
