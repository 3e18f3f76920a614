"""A peer wants or agrees to further connections (lanes) that cannot be, or connects to them and does not prove itself.

Expected: numbers that no honest end says are a ProtocolError that names the rank. A lane that is not formed or not
proved, or whose other end lies or falls silent, costs only itself: everything arrives over the group's own connection,
and who has not proved itself gets no byte.
"""

from __future__ import annotations

import hmac
import os
import socket
import struct
import sys
import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
from torch._C._distributed_c10d import ProcessGroupGloo, Store

from attacks.peer import (
    AGREED,
    CHECK,
    FIRST_LINK_TAG,
    MORE,
    PARCEL,
    VERDICT,
    WANT,
    WANT_FIELDS,
    Peer,
    Silence,
    expand,
    header,
    offer,
    pack,
    pattern,
    want,
)
from attacks.stage import Attack, Expected, main, receive, send

N = 8 * PARCEL
PROOF_TAG = 0x5446_0003
SECRET = bytes(range(32))
SOURCE, RECEIVER = 0, 1


# ----------------------------------------------------------------------------------------------------------- a pair


class Swap(Store):
    """This end's address goes out, the other's comes in."""

    def __init__(self) -> None:
        super().__init__()
        self.values: dict[str, bytes] = {}
        self.said, self.came = threading.Event(), threading.Event()

    def set(self, key: str, value: Any) -> None:
        self.values[key] = bytes(value)
        self.said.set()

    def get(self, key: str) -> bytes:
        self.wait([key])
        return self.values[key]

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        if not set(keys) <= self.values.keys() and not self.came.wait(10):
            raise RuntimeError("no address")


class Pair:
    """The attacker's end of a lane."""

    def __init__(self, rank: int, number: int) -> None:
        self.number, self._other = number, 1 - rank
        #: Those of the transfer.
        self.tag = self.transfer = 0
        self._store = Swap()
        self._pg: Any = None
        self._thread = threading.Thread(target=self._form, args=(rank,), daemon=True)
        self._thread.start()
        assert self._store.said.wait(10)
        ((self._key, self._value),) = self._store.values.items()

    def _form(self, rank: int) -> None:
        options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._timeout = timedelta(seconds=2)
        options._devices = [ProcessGroupGloo.create_device(hostname="127.0.0.1", lazy_init=False)]
        try:
            self._pg = ProcessGroupGloo(self._store, rank, 2, options)
        except RuntimeError:
            self._pg = None

    @property
    def address(self) -> list[Any]:
        return [self.number, self._key, self._value]

    def connect(self, addresses: Sequence[Any]) -> Pair:
        for number, key, value in addresses:
            if number == self.number:
                self._store.values[key] = value
        self._store.came.set()
        self._thread.join(10)
        return self

    def send(self, data: bytes, tag: int = PROOF_TAG) -> None:
        if self._pg is None:
            raise Silence("not connected")
        tensor = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        self._pg.send([tensor], self._other, tag).wait(timedelta(seconds=3))

    def recv(self, count: int, tag: int = PROOF_TAG, seconds: float = 3.0) -> bytes:
        if self._pg is None:
            raise Silence("not connected")
        tensor = torch.zeros(count, dtype=torch.uint8)
        try:
            self._pg.recv([tensor], self._other, tag).wait(timedelta(seconds=seconds))
        except RuntimeError as error:
            raise Silence(str(error)) from error
        return tensor.numpy().tobytes()

    def gets_nothing(self) -> None:
        try:
            self.recv(32, seconds=1.0)
        except Silence:
            return
        raise AssertionError("who has not proved itself has got something")


def proof(key: bytes, number: int, end: str) -> bytes:
    return hmac.digest(key, f"transfuse lane {number} {end}".encode(), "sha256")


def lanes(known: Any = (), new: Any = (), secret: Any = SECRET, first: Any = 1) -> list[Any]:
    return [list(known), list(new), secret, first]


def address(port: int = 9, *, name: bytes = b"vm", length: int | None = None, family: int = socket.AF_INET) -> bytes:
    """An address on this host, as gloo writes it."""
    host = struct.pack("<H", family) + struct.pack(">H", port) + socket.inet_aton("127.0.0.1")
    said = struct.pack("<Q", len(name) if length is None else length) + name
    return said + struct.pack("<Q", 136) + host.ljust(128, b"\0") + struct.pack("<q", 7)


GARBAGE = {
    "no bytes": b"",
    "seven bytes": b"\xff" * 7,
    "a name without end": address(length=1 << 62),
    "a name that is longer than the rest": address(length=250),
    "another family": address(family=socket.AF_UNIX),
    "a family that does not exist": address(family=0xFFFF),
    "a byte too many": address() + b"\0",
    "nobody listens there": address(port=9),
    "port 0": address(port=0),
    "noise": os.urandom(154),
}


# ------------------------------------------------------------------------------------- a receiver and an honest source

LANE_FIELDS: dict[str, tuple[list[Any], str]] = {
    "16 new lanes": (lanes(new=[[n + 1, "0/1", b""] for n in range(16)]), "malformed want"),
    "2**31 known lanes": (lanes(known=[1] * 10_000), "malformed want"),
    "more lanes than were offered": (
        lanes(new=[[n + 1, "0/1", b""] for n in range(4)]),
        "wants 4 lanes, and 3 were offered",
    ),
    "more old lanes than were offered": (lanes(known=[1, 2, 3, 4]), "wants 4 lanes, and 3 were offered"),
    "lane 0": (lanes(new=[[0, "0/1", b""]]), "malformed want"),
    "lane -1, which would be rank 1": (lanes(new=[[-1, "0/1", b""]]), "malformed want"),
    "old lane -1": (lanes(known=[-1]), "malformed want"),
    "lane 2**62": (lanes(new=[[1 << 62, "0/1", b""]]), "malformed want"),
    "lane 2**64 - 1": (lanes(known=[(1 << 64) - 1]), "malformed want"),
    "a lane that is a name": (lanes(known=["first"]), "malformed want"),
    "a lane twice": (lanes(new=[[7, "0/1", b""], [7, "0/1", b""]]), "wants the same lane twice"),
    "an old lane twice": (lanes(known=[7, 7]), "wants the same lane twice"),
    "an old lane that is new": (lanes(known=[7], new=[[7, "0/1", b""]]), "wants the same lane twice"),
    "no secret": (lanes(secret=b""), "malformed want"),
    "a short secret": (lanes(secret=bytes(31)), "malformed want"),
    "a long secret": (lanes(secret=bytes(33)), "malformed want"),
    "a secret that is text": (lanes(secret="x" * 32), "malformed want"),
    "less than no parcels at first": (lanes(first=-1), "malformed want"),
    "a key of 65 letters": (lanes(new=[[7, "k" * 65, b""]]), "malformed want"),
    "an address of 1025 bytes": (lanes(new=[[7, "0/1", bytes(1025)]]), "malformed want"),
    "two fields": ([[], []], "malformed want"),
}


def wanted(plain: Any) -> Any:
    def hostile(peer: Peer) -> None:
        peer.hear_offer()
        peer.say(WANT, want(N, lanes=plain))
        assert peer.hear_end() is not None, "the receiver was not told"

    return hostile


def take_all(peer: Peer, agreed: list[Any]) -> None:
    """The rest of an honest receiver, over the group's own connection."""
    count = N // PARCEL
    first = count if len(agreed) < 5 or agreed[4] is None else 1
    data = b"".join(peer.take_burst() for _ in range(first))
    if first < count:
        peer.say(MORE, [[first, count]])
        assert peer.hear().kind == AGREED
        data += b"".join(peer.take_burst() for _ in range(count - first))
    assert data == pattern(N)
    peer.say(CHECK)
    peer.hear()
    peer.say(VERDICT, [{}])
    peer.flush()


def wants(new: Any = (), known: Any = (), *, agrees: bool | None = None) -> Any:
    """These lanes, and then an honest receive."""

    def hostile(peer: Peer) -> None:
        peer.hear_offer()
        peer.say(WANT, want(N, lanes=lanes(known, new)))
        agreed = peer.hear().plain
        assert agrees is None or (agreed[4] is not None) == agrees
        take_all(peer, agreed)

    return hostile


def connects(talk: Callable[[list[Pair], bytes], None]) -> Any:
    """Two lanes that are formed as they should be. ``talk`` gets them and the key."""

    def hostile(peer: Peer) -> None:
        peer.hear_offer()
        pairs = [Pair(RECEIVER, number) for number in (71, 72)]
        peer.say(WANT, want(N, lanes=lanes(new=[pair.address for pair in pairs])))
        agreed = peer.hear().plain
        for pair in pairs:
            pair.connect(agreed[4][1])
            pair.tag, pair.transfer = peer.tag, peer.transfer
        talk(pairs, SECRET + agreed[4][2])
        take_all(peer, agreed)

    return hostile


def prove_wrongly(pairs: list[Pair], key: bytes) -> None:
    for pair in pairs:
        pair.send(proof(SECRET, pair.number, "receiver"))
        pair.gets_nothing()


def prove_never(pairs: list[Pair], key: bytes) -> None:
    pairs[0].gets_nothing()


def prove_for_another_lane(pairs: list[Pair], key: bytes) -> None:
    one, other = pairs
    one.send(proof(key, other.number, "receiver"))
    one.gets_nothing()


def prove_as_the_source(pairs: list[Pair], key: bytes) -> None:
    pairs[0].send(proof(key, pairs[0].number, "source"))
    pairs[0].gets_nothing()


def proved(say: Callable[[Pair], None]) -> Any:
    """Prove oneself on one lane, and then say something that no honest end says."""

    def talk(pairs: list[Pair], key: bytes) -> None:
        pair = pairs[0]
        pair.send(proof(key, pair.number, "receiver"))
        assert pair.recv(32) == proof(key, pair.number, "source")
        say(pair)

    return talk


def ask_for_what_is_not_there(pair: Pair) -> None:
    body = pack([[0, 1 << 40]])
    for data in (header(MORE, pair.transfer, body=body), body, b"\x01"):
        pair.send(data, pair.tag)


# ------------------------------------------------------------------------------------- a source and an honest receiver


def offers(answer: Callable[[list[Any]], Any], *, then: Callable[[list[Any], bytes], None] | None = None) -> Any:
    """An honest source but for its answer about lanes. ``then`` gets the lanes that were wanted, and its own pairs."""

    def hostile(peer: Peer) -> None:
        peer.say_offer(offer(nbytes=N, connections=4))
        plain = dict(zip(WANT_FIELDS, peer.hear().plain, strict=True))
        known, new, secret, first = plain["lanes"]
        assert not known
        assert len(new) == 3
        peer.say(AGREED, [None, None, 0.0, False, answer(new)])
        if then is not None:
            then(new, secret)
        peer.feed(pattern(N), expand(plain["parcels"])[:first], plain["parcel_bytes"])
        peer.serve(pattern(N))

    return hostile


def refused_lanes(answer: Callable[[list[Any]], Any]) -> Any:
    def hostile(peer: Peer) -> None:
        peer.say_offer(offer(nbytes=N, connections=4))
        plain = dict(zip(WANT_FIELDS, peer.hear().plain, strict=True))
        wanted_lanes = plain["lanes"]
        peer.say(AGREED, [None, None, 0.0, False, answer([] if wanted_lanes is None else wanted_lanes[1])])
        peer.hear_end()

    return hostile


def agreed_to_more(extra: list[Any]) -> Any:
    """An honest source that answers a further request with a chain or with lanes."""

    def hostile(peer: Peer) -> None:
        peer.say_offer(offer(nbytes=N, connections=1))
        plain = dict(zip(WANT_FIELDS, peer.hear().plain, strict=True))
        peer.agree()
        wrong = [0]
        peer.feed(pattern(N), expand(plain["parcels"]), plain["parcel_bytes"], digest=lambda n, d: d ^ (n in wrong))
        assert peer.hear().kind == MORE
        peer.say(AGREED, extra)
        peer.hear_end()

    return hostile


NOT_WANTED = "agreed to lanes that were not wanted"

ANSWERS: dict[str, tuple[Callable[[list[Any]], Any], str]] = {
    "agrees to a lane that was not wanted": (lambda new: lanes(new=[[7, "0/0", address()]]), NOT_WANTED),
    "agrees to an old lane that was never there": (lambda new: lanes(known=[7]), NOT_WANTED),
    "agrees to new lanes as old ones": (lambda new: lanes(known=[one[0] for one in new]), NOT_WANTED),
    "agrees to a lane twice": (lambda new: lanes(new=[[new[0][0], "0/0", address()]] * 2), NOT_WANTED),
    "agrees to lane -1": (lambda new: lanes(known=[-1]), "malformed agreed"),
    "agrees to 16 lanes": (lambda new: lanes(new=[[n + 1, "", b""] for n in range(16)]), "malformed agreed"),
    "agrees with a secret of 31 bytes": (lambda new: lanes(secret=bytes(31)), "malformed agreed"),
    "agrees with no secret": (lambda new: lanes(secret=b""), "malformed agreed"),
}


def own_pairs(talk: Callable[[Pair, bytes], None]) -> Any:
    """A source whose lanes are formed as they should be."""
    made: list[Pair] = []

    def answer(new: list[Any]) -> Any:
        made[:] = [Pair(SOURCE, one[0]) for one in new]
        return lanes(new=[pair.address for pair in made])

    def then(new: list[Any], secret: bytes) -> None:
        for pair in made:
            pair.connect(new)
        talk(made[0], secret + SECRET)

    return offers(answer, then=then)


def reflect(pair: Pair, key: bytes) -> None:
    said = pair.recv(32)
    assert said == proof(key, pair.number, "receiver")
    pair.send(said)
    pair.gets_nothing()


def prove_then_fall_silent(pair: Pair, key: bytes) -> None:
    pair.recv(32)
    pair.send(proof(key, pair.number, "source"))


WELL_AS_SOURCE = Expected("source", None)
WELL_AS_RECEIVER = Expected("receiver", None, route="group")

ATTACKS = {
    **{
        name: Attack(send(nbytes=N, lanes=4), wanted(plain), Expected("source", "ProtocolError", f"rank 1.*{words}"))
        for name, (plain, words) in LANE_FIELDS.items()
    },
    "old lanes that were never there": Attack(
        send(nbytes=N, lanes=4), wants(known=[5, 6, 7], agrees=False), WELL_AS_SOURCE
    ),
    "lanes for a source that has none": Attack(
        send(nbytes=N, lanes=1),
        wanted(lanes(new=[[7, "0/1", address()]])),
        Expected("source", "ProtocolError", "0 were"),
    ),
    **{
        f"the address: {name}": Attack(send(nbytes=N, lanes=4), wants(new=[[7, "0/1", value]]), WELL_AS_SOURCE)
        for name, value in GARBAGE.items()
    },
    "an address under another key": Attack(send(nbytes=N, lanes=4), wants(new=[[7, "?", address()]]), WELL_AS_SOURCE),
    "an address under the source's key": Attack(
        send(nbytes=N, lanes=4), wants(new=[[7, "0/0", address()]]), WELL_AS_SOURCE
    ),
    "a wrong proof": Attack(send(nbytes=N, lanes=4), connects(prove_wrongly), WELL_AS_SOURCE),
    "no proof": Attack(send(nbytes=N, lanes=4), connects(prove_never), WELL_AS_SOURCE),
    "the proof of another lane": Attack(send(nbytes=N, lanes=4), connects(prove_for_another_lane), WELL_AS_SOURCE),
    "the proof of the other end": Attack(send(nbytes=N, lanes=4), connects(prove_as_the_source), WELL_AS_SOURCE),
    "a proof, and parcels that do not exist": Attack(
        send(nbytes=N, lanes=4), connects(proved(ask_for_what_is_not_there)), WELL_AS_SOURCE
    ),
    **{
        name: Attack(
            receive(nbytes=N, lanes=4), refused_lanes(answer), Expected("receiver", "ProtocolError", f"rank 1.*{words}")
        )
        for name, (answer, words) in ANSWERS.items()
    },
    "agrees to lanes, and none were wanted": Attack(
        receive(nbytes=N, lanes=1),
        refused_lanes(lambda new: lanes()),
        Expected("receiver", "ProtocolError", NOT_WANTED),
    ),
    "agrees to a chain later": Attack(
        receive(nbytes=N, lanes=1),
        agreed_to_more([None, [99, FIRST_LINK_TAG, 7], 1.0]),
        Expected("receiver", "ProtocolError", "agreed to more than it was asked for"),
    ),
    "agrees to lanes later": Attack(
        receive(nbytes=N, lanes=1),
        agreed_to_more([None, None, 0.0, False, lanes()]),
        Expected("receiver", "ProtocolError", "agreed to more than it was asked for"),
    ),
    "agrees to no lane of those": Attack(
        receive(nbytes=N, lanes=4, in_place=True), offers(lambda new: lanes()), WELL_AS_RECEIVER
    ),
    **{
        f"the source's address: {name}": Attack(
            receive(nbytes=N, lanes=4, in_place=True),
            offers(lambda new, value=value: lanes(new=[[one[0], "0/0", value] for one in new])),  # type: ignore[misc]
            WELL_AS_RECEIVER,
        )
        for name, value in GARBAGE.items()
    },
    "the receiver's own address": Attack(
        receive(nbytes=N, lanes=4, in_place=True),
        offers(lambda new: lanes(new=[[number, "0/0", value] for number, _, value in new])),
        WELL_AS_RECEIVER,
    ),
    "the receiver's own proof": Attack(receive(nbytes=N, lanes=4, in_place=True), own_pairs(reflect), WELL_AS_RECEIVER),
    "no proof from the source": Attack(
        receive(nbytes=N, lanes=4, in_place=True), own_pairs(lambda pair, key: None), WELL_AS_RECEIVER
    ),
    "a proof from the source, and silence": Attack(
        receive(nbytes=N, lanes=4, in_place=True), own_pairs(prove_then_fall_silent), WELL_AS_RECEIVER
    ),
}

EXPECTED = {name: attack.expected for name, attack in ATTACKS.items()}

if __name__ == "__main__":
    sys.exit(main("attacks.false_lanes", sys.argv[1:]))
