"""The attacker's streams: meeting, handshake and talk over a TCP connection, written out by hand as in ``peer.py``.

Nothing of the library is used here. A :class:`StreamPeer` says and hears the same as a :class:`Peer`. Before the first
word of each transfer it meets the honest end, so that all else travels over a stream.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import os
import socket
import struct
import threading
from collections.abc import Callable, Sequence
from typing import Any

import xxhash

from attacks.peer import (
    GO,
    GO_ON,
    GOT,
    HEADER,
    MEET,
    MET,
    MORE,
    OFFER_TAG,
    PARCEL,
    REFUSAL,
    VERDICT,
    WANT,
    Heard,
    Peer,
    Silence,
    answer,
    pack,
    record,
    unpack,
)

HERE = "127.0.0.1"
DOOR = b"TFUSDOOR\x02"
NONCE = PROOF = 32
SECONDS = 5.0


# --------------------------------------------------------------------------------------------------------- handshake


def key_of(token: bytes) -> bytes:
    return hashlib.sha256(b"token " + token).digest()


def proof(key: bytes, who: bytes, said: bytes) -> bytes:
    return hmac.digest(key, b"transfuse " + who + b" " + said, "sha256")


def frame(key: bytes, said: bytes, way: bytes, plain: Any, *, count: int = 0, seal: int = 0) -> bytes:
    """A frame under the key of one connection; ``seal`` damages its mark."""
    session = hmac.digest(key, b"session " + said, "sha256")
    body = plain if isinstance(plain, bytes) else pack(plain)
    head = struct.pack("<I", len(body))
    mark = hmac.digest(hmac.digest(session, way, "sha256"), struct.pack("<Q", count) + head + body, "sha256")
    return head + body + bytes([mark[0] ^ seal]) + mark[1:]


def take(sock: socket.socket, count: int) -> bytes:
    """This number of bytes, or :class:`Silence`."""
    data = bytearray()
    try:
        while len(data) < count:
            chunk = sock.recv(min(count - len(data), 1 << 20))
            if not chunk:
                raise Silence("the connection was closed")
            data += chunk
    except OSError as error:
        raise Silence(str(error)) from error
    return bytes(data)


def give(sock: socket.socket, data: bytes) -> None:
    try:
        sock.sendall(data)
    except OSError as error:
        raise Silence(str(error)) from error


def split(address: str) -> tuple[str, int]:
    host, _, port = address.rpartition(":")
    return host, int(port)


def knock(place: Sequence[Any]) -> tuple[socket.socket, bytes, bytes]:
    """Connect to a place, and prove its token. Returns the key, and what both ends have said, too."""
    address, token = place
    try:
        sock = socket.create_connection(split(address), timeout=SECONDS)
    except OSError as error:
        raise Silence(str(error)) from error
    key, mine = key_of(token), DOOR + os.urandom(NONCE)
    give(sock, mine)
    said = mine + take(sock, len(mine))
    give(sock, proof(key, b"reader", said))
    assert take(sock, PROOF) == proof(key, b"server", said), "the honest end has not proved itself"
    return sock, key, said


def dial(place: Sequence[Any], number: Any) -> socket.socket:
    """As an honest end does."""
    sock, key, said = knock(place)
    give(sock, frame(key, said, b"to server", {"type": "join", "number": number}))
    return sock


class Door:
    """Where the attacker listens. Each connection is let in as an honest end would."""

    def __init__(self, greet: Callable[[Door, socket.socket], None] | None = None) -> None:
        """``greet``: what becomes of each connection instead."""
        self.token = os.urandom(32)
        self._greet = greet or Door.let_in
        self._listener = socket.create_server((HERE, 0))
        self.address = f"{HERE}:{self._listener.getsockname()[1]}"
        self._changed = threading.Condition()
        self._came: dict[int, socket.socket] = {}
        #: Kept open: a connection that is closed tells the other end something.
        self.kept: list[socket.socket] = []
        threading.Thread(target=self._listen, daemon=True).start()

    @property
    def place(self) -> list[Any]:
        return [self.address, self.token]

    def _listen(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                sock, _ = self._listener.accept()
                sock.settimeout(SECONDS)
                self.kept.append(sock)
                threading.Thread(target=self._answer, args=(sock,), daemon=True).start()

    def _answer(self, sock: socket.socket) -> None:
        with contextlib.suppress(Silence, OSError):
            self._greet(self, sock)

    def let_in(self, sock: socket.socket) -> None:
        key, mine = key_of(self.token), DOOR + os.urandom(NONCE)
        theirs = take(sock, len(mine))
        give(sock, mine)
        said = theirs + mine
        assert take(sock, PROOF) == proof(key, b"reader", said), "the honest end has not proved itself"
        give(sock, proof(key, b"server", said))
        (length,) = struct.unpack("<I", take(sock, 4))
        body = take(sock, length)
        assert struct.pack("<I", length) + body + take(sock, PROOF) == frame(key, said, b"to server", body)
        with self._changed:
            self._came[unpack(body)["number"]] = sock
            self._changed.notify_all()

    def wait(self, number: int, seconds: float = SECONDS) -> socket.socket:
        with self._changed:
            if not self._changed.wait_for(lambda: number in self._came, seconds):
                raise Silence(f"connection {number} has not come")
            return self._came.pop(number)

    def close(self) -> None:
        self._listener.close()


def new_number() -> int:
    return 1 + int.from_bytes(os.urandom(7), "little")


# ----------------------------------------------------------------------------------------------------------- the peer


class StreamPeer(Peer):
    """One hostile end whose words travel over a stream, except those for links of a chain."""

    #: On a stream nobody posts ahead: after a record that says cancel, nothing is owed.
    ahead = 1

    def __init__(self, pg: Any, rank: int, other: int = 0) -> None:
        super().__init__(pg, rank, other)
        self.sock: socket.socket | None = None
        self._old: list[Any] = []
        #: Whether the last word of a transfer was said.
        self._is_over = False
        #: Whether the honest source waits for an answer to what was asked for.
        self._owes = False

    # -- meeting

    def words(self) -> Peer:
        """This transfer's words over the group."""
        group = Peer(self.pg, self.rank, self.other)
        group.transfer, group.tag = self.transfer, self.tag
        self._old.append(group)
        return group

    def keep(self, *things: Any) -> None:
        """Until the attack is over: a connection that is closed tells the other end something."""
        self._old.extend(things)

    def dial_instead(self) -> None:
        """As a source that cannot be reached: name no place, and connect to the receiver's."""
        group = self.words()
        group.say(MEET, [[], new_number(), None], tag=OFFER_TAG, note=self.tag)
        met = group.hear().plain
        self.move_to(dial(met[1], met[0]))
        group.say(GO, note=1)

    def move_to(self, sock: socket.socket) -> None:
        sock.settimeout(SECONDS)
        self._old.append(self.sock)
        self.sock, self._is_over = sock, False

    def meet_as_source(self, tag: int | None = OFFER_TAG) -> None:
        group, door, number = self.words(), Door(), new_number()
        self._old.append(door)
        group.say(MEET, [[], number, door.place], tag=tag, note=self.tag)
        heard = group.hear()
        if heard.kind != MET:
            raise Silence(f"the honest end says {heard}")
        met = heard.plain
        if len(met) > 1 and met[1] is not None:  # It could not connect in time.
            self.move_to(dial(met[1], met[0]))
            group.say(GO, note=1)
        elif met[0] == number:
            self.move_to(door.wait(number))
        else:
            raise Silence("the honest end wants no stream")

    def meet_as_receiver(self, tag: int | None = OFFER_TAG) -> None:
        group = self.words()
        heard = group.hear(tag)
        self.transfer, self.tag = group.transfer, group.tag
        assert heard.kind == MEET, heard
        _, number, place, self.early = heard.plain
        self.move_to(dial(place, number))
        group.say(MET, [number])

    @property
    def _begins(self) -> bool:
        return self.sock is None or self._is_over

    def _stream(self) -> socket.socket:
        if self.sock is None:
            raise Silence("there is no stream")
        return self.sock

    # -- bytes

    def _on_group(self, tag: int | None) -> bool:
        return tag not in (None, OFFER_TAG, self.tag)

    def send(self, data: bytes, tag: int | None = None) -> None:
        if self._on_group(tag):
            super().send(data, tag)
            return
        if tag == OFFER_TAG and self._begins:
            self.meet_as_source()
        self.said.append((data, self.tag if tag is None else tag))
        give(self._stream(), data)

    def recv(self, count: int, tag: int | None = None, seconds: float = 5.0) -> bytes:
        if self._on_group(tag):
            return super().recv(count, tag, seconds)
        sock = self._stream()
        sock.settimeout(seconds)
        return take(sock, count)

    def flush(self, seconds: float = 5.0) -> None:
        """The kernel has everything."""

    def close(self) -> None:
        if self.sock is None:
            super().close()
            return
        with contextlib.suppress(OSError):
            self.sock.shutdown(socket.SHUT_RDWR)
        self.sock.close()

    # -- messages

    def conclude(self) -> None:
        """On a stream nobody answers a verdict."""

    def begin(self, head: bytes, tag: int | None = None, body: bytes = b"") -> None:
        if self._on_group(tag):
            super().begin(head, tag, body)
            return
        self.send(head, tag)
        self.body(body)

    def _hear_start(self, tag: int | None, seconds: float) -> tuple[bytes, bytes]:
        if tag == OFFER_TAG and self._begins:
            self.meet_as_receiver()
        return super()._hear_start(tag, seconds)

    def _recv_start(self, tag: int | None, seconds: float) -> tuple[bytes, bytes]:
        if self._on_group(tag):
            return super()._recv_start(tag, seconds)
        return self.recv(HEADER.size, None, seconds), b""

    def body(self, data: bytes) -> None:
        if data:
            self.send(data)
            self.said.append((b"", self.tag))  # In the place of the mark.

    def _recv_body(self, length: int, seconds: float) -> bytes:
        return self.recv(length, None, seconds)

    def say(self, kind: int, body: Any = b"", *, tag: int | None = None, **fields: Any) -> None:
        super().say(kind, body, tag=tag, **fields)
        self._owes = self._owes or kind in (WANT, MORE)
        self._is_over = self._is_over or kind in (REFUSAL, VERDICT)
        if kind == REFUSAL:
            with contextlib.suppress(OSError):
                self._stream().shutdown(socket.SHUT_WR)  # Its last word. The honest end waits for that, for a second.

    def hear(self, tag: int | None = None, seconds: float = 5.0, *, alive: bool = False) -> Heard:
        heard = super().hear(tag, seconds, alive=alive)
        self._is_over = self._is_over or heard.kind in (REFUSAL, VERDICT)
        if heard.kind == REFUSAL:
            self.close()  # As an honest end does. An end that refuses waits for that, for a second.
        return heard

    def hear_answers(self, bursts: int) -> list[Heard]:
        return [self.hear()]

    def feed(
        self,
        data: bytes,
        numbers: Sequence[int],
        parcel_bytes: int = PARCEL,
        digests: bool = True,
        damage: Callable[[int, bytes], bytes] = lambda number, parcel: parcel,
        digest: Callable[[int, int], int] = lambda number, digest: digest,
        answered: int = 1,
    ) -> list[Heard]:
        """Send parcels, one a round, and hear what is asked for next, once for each request."""
        heard: list[Heard] = []
        waiting = list(numbers)
        while waiting:
            for number in waiting:
                parcel = data[number * parcel_bytes : (number + 1) * parcel_bytes]
                sums = [digest(number, xxhash.xxh3_64_intdigest(parcel))] if digests else []
                self.send(damage(number, parcel))
                self.send(record(self.transfer, sums))
            heard.append(self.hear())
            if heard[-1].kind != GOT:
                break
            _, first, count = answer(heard[-1].note)
            waiting = list(range(first, first + count))
        return heard

    def take_burst(self, nbytes: int = PARCEL, digests: int = 1, *, answer: int | None = GO_ON) -> bytes:
        """Take a round of one parcel and its record. One answer is for all of a request."""
        data = self.recv(nbytes)
        self.recv(HEADER.size + (8 * digests + 8 if digests else 0))
        if answer is not None and (self._owes or answer != GO_ON):
            self.say(GOT, note=answer)
            self._owes = answer >> 33 > 0
        return data
