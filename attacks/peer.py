"""The attacker's wire: version 9 of docs/wire.md written out by hand, so that it can say what no honest end says.

Nothing of the library is used here. Every state is flat: uint8 tensors, each in a storage of its own.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, NamedTuple

import msgspec
import numpy as np
import torch
import xxhash

OFFER_TAG = 0x5446_0000
FIRST_TAG = 0x5500_0000
FIRST_LINK_TAG = 0x6000_0000

OFFER, WANT, REFUSAL, SENT, GOT, VERDICT, WORKING, AGREED, MORE, CHECK, COMPARE, DIGESTS, DESCRIBE = range(1, 14)
GO, MEET, MET = 14, 16, 17
GO_ON, CANCEL = 0, 1

HEADER = struct.Struct("<4sHHQQQQQ")
#: Over the group a message begins with a block: its header, and as much of its body as fits.
BLOCK = 4096
ROOM = BLOCK - HEADER.size
CHUNK = 1 << 20
MARK = b"\x01"

#: Parcels and bursts of all states here: a burst is one parcel, except that small last ones go together.
PARCEL = 1 << 16


def pattern(count: int, seed: int = 0) -> bytes:
    """Bytes that a receiver can be checked for."""
    return ((np.arange(count, dtype=np.int64) * 7 + seed) % 251).astype(np.uint8).tobytes()


def pack(value: Any) -> bytes:
    return msgspec.msgpack.encode(value)


def unpack(data: bytes) -> Any:
    return msgspec.msgpack.decode(data)


def ints(code: str, *numbers: int) -> bytes:
    """A column of the manifest."""
    return struct.pack(f"<{len(numbers)}{code}", *numbers)


def header(
    kind: int,
    transfer: int,
    *,
    note: int = 0,
    body: bytes = b"",
    length: int | None = None,
    magic: bytes = b"TFUS",
    version: int = 12,
    damage: int = 0,
) -> bytes:
    digest = xxhash.xxh3_64_intdigest(body) ^ damage
    head = HEADER.pack(magic, version, kind, transfer, note, len(body) if length is None else length, digest, 0)[:-8]
    return head + struct.pack("<Q", xxhash.xxh3_64_intdigest(head))


def record(transfer: int, digests: Sequence[int], intent: int = GO_ON, kind: int = SENT) -> bytes:
    """What follows a burst: a header, and digests that are sealed by themselves."""
    head = header(kind, transfer, note=intent)
    if not digests:
        return head
    body = struct.pack(f"<{len(digests)}Q", *digests)
    return head + body + struct.pack("<Q", xxhash.xxh3_64_intdigest(head + body))


# -------------------------------------------------------------------------------------------------- what is offered

MANIFEST_FIELDS = (
    "tree", "kinds", "details", "shared", "dtypes", "devices", "storage_nbytes", "storage_device", "tensor_storage",
    "tensor_dtype", "tensor_flags", "tensor_ndim", "tensor_offset", "tensor_sizes", "tensor_strides",
)  # fmt: skip

OFFER_FIELDS = (
    "step", "parcel_bytes", "burst_bytes", "staged_bytes", "bursts_ahead", "timeout", "digests", "routes",
    "max_bytes_per_second", "manifest", "digest", "likeness", "coordinates",
    "connections", "host", "structure", "values", "history", "content",
)  # fmt: skip

WANT_FIELDS = (
    "fingerprint", "parcel_bytes", "burst_bytes", "digests", "apart", "tensors", "parcels", "relay", "host",
    "wanted_blocks", "lanes",
)  # fmt: skip


def manifest(sizes: dict[str, int], **changes: Any) -> list[Any]:
    """Of a dict of uint8 tensors, given how many bytes each has; with fields changed."""
    n, counts = len(sizes), list(sizes.values())
    plain = {
        # As an honest source writes it: children that are all leaves are as many zeros.
        "tree": [1, None, list(sizes), bytes(n)],
        "kinds": b"\x01" * n,
        "details": [],
        "shared": [],
        "dtypes": ["uint8"],
        "devices": ["cpu"],
        "storage_nbytes": ints("q", *counts),
        "storage_device": bytes(n),
        "tensor_storage": ints("i", *range(n)),
        "tensor_dtype": bytes(n),
        "tensor_flags": bytes(n),
        "tensor_ndim": b"\x01" * n,
        "tensor_offset": ints("q", *[0] * n),
        "tensor_sizes": ints("q", *counts),
        "tensor_strides": ints("q", *[1] * n),
    } | changes
    return [plain[name] for name in MANIFEST_FIELDS]


def offer(described: list[Any] | None = None, *, nbytes: int = 2 * PARCEL, **changes: Any) -> list[Any]:
    """An offer of ``{"w": nbytes}``, or of another manifest; with fields changed."""
    described = manifest({"w": nbytes}) if described is None else described
    plain = {
        "step": None,
        "parcel_bytes": PARCEL,
        "burst_bytes": PARCEL,
        "staged_bytes": PARCEL,
        "bursts_ahead": 2,
        "timeout": 5.0,
        "digests": True,
        "routes": {},
        "max_bytes_per_second": None,
        "manifest": described,
        "digest": xxhash.xxh3_128_digest(pack(described)),
        "likeness": likeness(described),
        "coordinates": [],
        "connections": 1,
        "host": 0,
        "structure": structure(described),
        "values": None,
        "history": False,
        "content": b"",
    } | changes
    return [plain[name] for name in OFFER_FIELDS]


def structure(described: list[Any]) -> bytes:
    """A digest of a manifest without its values."""
    plain = dict(zip(MANIFEST_FIELDS, described, strict=False))
    kinds, details = plain.get("kinds"), plain.get("details")
    if isinstance(kinds, bytes) and isinstance(details, list):
        codes = kinds.replace(b"\x01", b"")
        plain["details"] = [detail for code, detail in zip(codes, details, strict=False) if code]
    return hashlib.sha256(pack(list(plain.values()))).digest()


#: Flags of a conjugate and of a negative view.
SIGNS = 16 | 32


def likeness(described: list[Any]) -> bytes:
    """Of a manifest without DTensors, as far as its columns are bytes."""
    plain = dict(zip(MANIFEST_FIELDS, described, strict=False))
    digest = xxhash.xxh3_128(pack([plain.get(name) for name in ("tree", "details", "shared", "dtypes")]))
    for name in ("kinds", "tensor_storage", "tensor_dtype", "tensor_flags", "tensor_ndim"):
        column = plain.get(name)
        if isinstance(column, bytes):
            digest.update(bytes(flags & SIGNS for flags in column) if name == "tensor_flags" else column)
            digest.update(ints("q", len(column)))
    for name in ("tensor_offset", "tensor_sizes", "tensor_strides"):
        column = plain.get(name)
        digest.update(column if isinstance(column, bytes) else b"")
    return digest.digest()


def fingerprint(nbytes: int, parcel_bytes: int = PARCEL) -> int:
    """Of the parcels of one flat tensor."""
    lows = list(range(0, nbytes, parcel_bytes))
    columns = [[nbytes], [1], [0] * len(lows), [1] * len(lows), lows, [0], [0]]
    return xxhash.xxh3_64_intdigest(b"".join(ints("q", *column) for column in columns))


BLOCKS_FIELDS = ("leaf", "tensor", "ndim", "starts", "sizes", "dtype", "dtypes", "begins")


def wanted_blocks(*blocks: tuple[int, int], **changes: Any) -> list[Any]:
    """Blocks of the first leaf, which has one dimension, each by its start and size; with columns changed."""
    n = len(blocks)
    plain = {
        "leaf": ints("i", *[0] * n),
        "tensor": ints("i", *[0] * n),
        "ndim": b"\x01" * n,
        "starts": ints("q", *(start for start, _ in blocks)),
        "sizes": ints("q", *(size for _, size in blocks)),
        "dtype": bytes(n),
        "dtypes": [],
        "begins": b"\x01" * n,
    } | changes
    return [plain[name] for name in BLOCKS_FIELDS]


def blocks_fingerprint(blocks: list[Any], parcel_bytes: int = PARCEL) -> int:
    """Of the parcels of blocks of bytes, none of which is small, each of which begins a parcel."""
    columns: list[list[int]] = [[] for _ in range(5)]
    sizes = [n for (n,) in struct.iter_unpack("<q", blocks[4])]
    for number, size in enumerate(sizes):
        for low in range(0, size, parcel_bytes):
            for column, value in zip(columns[2:], (number, 1, low), strict=True):
                column.append(value)
    columns[0], columns[1] = sizes, [1] * len(sizes)
    inner = xxhash.xxh3_64(repr(blocks[6]).encode())
    for at in (0, 1, 2, 3, 4, 5, 7):
        inner.update(blocks[at])
    data = b"".join(ints("q", *column) for column in columns) + ints("Q", inner.intdigest())
    return xxhash.xxh3_64_intdigest(data)


def want(nbytes: int = 2 * PARCEL, **changes: Any) -> list[Any]:
    """All of one flat tensor, with fields changed."""
    parcel_bytes = changes.get("parcel_bytes", PARCEL)
    honest = parcel_bytes if 0 < parcel_bytes <= PARCEL else PARCEL
    plain = {
        "fingerprint": fingerprint(nbytes, honest),
        "parcel_bytes": PARCEL,
        "burst_bytes": PARCEL,
        "digests": True,
        "apart": [],
        "tensors": [],
        "parcels": [0, -(-nbytes // honest)],
        "relay": False,
        "host": 0,
        "wanted_blocks": None,
        "lanes": None,
    } | changes
    return [plain[name] for name in WANT_FIELDS]


# ------------------------------------------------------------------------------------------------------- the talking


class Silence(Exception):
    """The honest end said nothing more, or is gone."""


class Heard(NamedTuple):
    kind: int
    transfer: int
    note: int
    body: bytes
    #: As it came.
    head: bytes

    @property
    def plain(self) -> Any:
        return unpack(self.body)


class Peer:
    """One hostile end. What it says is posted and not waited for; nobody may ever take it."""

    #: Bursts that an honest receiver has posted: also after a cancel it is owed this number.
    ahead = 2

    def __init__(self, pg: Any, rank: int, other: int = 0) -> None:
        self.pg, self.rank, self.other = pg, rank, other
        self.transfer = 0x1234_5678_9ABC
        self.tag = FIRST_TAG + 2 * 77
        #: Everything that was said, as (bytes, tag): for saying it again.
        self.said: list[tuple[bytes, int]] = []
        #: The offer that came with the meeting.
        self.early = b""
        #: Sends that nobody has waited for, and receives: gloo needs their memory.
        self._posted: list[Any] = []
        self._kept: list[Any] = []

    # -- bytes

    def send(self, data: bytes, tag: int | None = None) -> None:
        tag = self.tag if tag is None else tag
        tensor = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        self.said.append((data, tag))
        try:
            self._posted.append((self.pg.send([tensor], self.other, tag), tensor))
        except RuntimeError as error:
            raise Silence(str(error)) from error

    def recv(self, count: int, tag: int | None = None, seconds: float = 5.0) -> bytes:
        tensor = torch.empty(count, dtype=torch.uint8)
        try:
            work = self.pg.recv([tensor], self.other, self.tag if tag is None else tag)
            self._kept.append((work, tensor))
            work.wait(timedelta(seconds=seconds))
        except RuntimeError as error:
            raise Silence(str(error)) from error
        return tensor.numpy().tobytes()

    def flush(self, seconds: float = 5.0) -> None:
        """Wait until the honest end has taken everything."""
        for work, _ in self._posted:
            try:
                work.wait(timedelta(seconds=seconds))
            except RuntimeError as error:
                raise Silence(str(error)) from error
        self._kept += self._posted
        self._posted = []

    def close(self) -> None:
        """Close all connections: that is what an expired wait does to gloo."""
        try:
            self.recv(1, FIRST_TAG - 1, seconds=0.005)
        except Silence:
            return

    # -- messages

    def begin(self, head: bytes, tag: int | None = None, body: bytes = b"") -> None:
        """A header, and the body if there is one. ``tag`` is the header's own."""
        self.send((head + body[:ROOM]).ljust(BLOCK, b"\0"), tag)
        self.body(body[ROOM:])

    def body(self, data: bytes) -> None:
        """What does not fit into the first block."""
        for at in range(0, len(data), CHUNK):
            self.send(data[at : at + CHUNK])
            self.send(MARK)

    def say(self, kind: int, body: Any = b"", *, tag: int | None = None, **fields: Any) -> None:
        """A message. ``fields`` are those of :func:`header`; ``tag`` is the header's own."""
        data = body if isinstance(body, bytes) else pack(body)
        transfer = fields.pop("transfer", self.transfer)
        self.begin(header(kind, transfer, body=data, **fields), tag, data)

    def say_offer(self, plain: Any, **fields: Any) -> None:
        self.say(OFFER, plain, tag=OFFER_TAG, **{"note": self.tag} | fields)

    def hear(self, tag: int | None = None, seconds: float = 5.0, *, alive: bool = False) -> Heard:
        """The next message; signs of life are passed over unless ``alive``."""
        while True:
            head, begun = self._hear_start(tag, seconds)
            _, _, kind, transfer, note, length, _, _ = HEADER.unpack(head)
            if tag is not None:  # A first message: everything else of the transfer comes on its own tag.
                self.transfer, self.tag = transfer, note
            body = begun[:length]
            body += self._recv_body(length - len(body), seconds)
            if kind != WORKING or alive:
                return Heard(kind, transfer, note, body, head)

    def _hear_start(self, tag: int | None, seconds: float) -> tuple[bytes, bytes]:
        """The next header, and what has come of the body."""
        if tag is not None and self.early:
            early, self.early = self.early, b""
            return header(OFFER, self.transfer, note=self.tag, body=early), early
        return self._recv_start(tag, seconds)

    def _recv_start(self, tag: int | None, seconds: float) -> tuple[bytes, bytes]:
        block = self.recv(BLOCK, tag, seconds)
        return block[: HEADER.size], block[HEADER.size :]

    def _recv_body(self, length: int, seconds: float) -> bytes:
        body = b""
        while len(body) < length:
            body += self.recv(min(CHUNK, length - len(body)), None, seconds)
            self.recv(1, None, seconds)
        return body

    def hear_answers(self, bursts: int) -> list[Heard]:
        """The answers to this number of bursts of one request."""
        return [self.hear() for _ in range(bursts)]

    def hear_offer(self) -> list[Any]:
        heard = self.hear(OFFER_TAG)
        assert heard.kind == OFFER, heard
        plain: list[Any] = heard.plain
        return plain

    def hear_end(self, seconds: float = 5.0) -> Heard | None:
        """Pass over everything until a refusal; None if there is none."""
        try:
            while True:
                heard = self.hear(seconds=seconds)
                if heard.kind == REFUSAL:
                    return heard
        except Silence:
            return None

    # -- the first words of a link between two receivers of a chain

    def link(self, tag: int, transfer: int) -> Peer:
        """Another end of this kind, for a link."""
        other = type(self)(self.pg, self.rank, self.other)
        other.tag, other.transfer = tag, transfer
        self._kept.append(other)
        return other

    def meet_as_source(self, tag: int | None = None) -> None:
        """Propose no stream, and hear that there is none."""
        self.say(MEET, [[], 0, None], tag=tag, note=self.tag)
        assert self.hear().kind == MET

    def meet_as_receiver(self, tag: int | None = None) -> None:
        assert self.hear(tag).kind == MEET
        self.say(MET, [0])

    # -- the source's part, honest but for what is changed

    def conclude(self) -> None:
        """Answer a verdict."""
        self.say(AGREED)

    def agree(self, *links: Any, patience: float = 0.0) -> None:
        upstream, downstream = links or (None, None)
        self.say(AGREED, [upstream, downstream, patience])

    def serve(
        self,
        data: bytes,
        *,
        damage: Callable[[int, bytes], bytes] = lambda number, parcel: parcel,
        digest: Callable[[int, int], int] = lambda number, digest: digest,
        rounds: int = 100,
        answered: int = 1,
    ) -> list[Heard]:
        """Answer as the source of one flat tensor, until a verdict or a refusal; all that was heard.

        ``answered``: for how many parcels one answer is, which is more than one in a chain.
        """
        heard: list[Heard] = []
        parcel_bytes, digests = PARCEL, True
        for _ in range(rounds):
            try:
                said = self.hear()
            except Silence:
                break
            heard.append(said)
            if said.kind == VERDICT:
                self.conclude()
            if said.kind in (VERDICT, REFUSAL):
                break
            numbers: list[int] = []
            if said.kind == WANT:
                plain = dict(zip(WANT_FIELDS, said.plain, strict=True))
                parcel_bytes, digests = plain["parcel_bytes"], plain["digests"]
                numbers = expand(plain["parcels"])
            elif said.kind == MORE:
                numbers = expand(said.plain[0])
            if said.kind in (WANT, MORE, CHECK):
                self.agree()
            try:
                heard += self.feed(data, numbers, parcel_bytes, digests, damage, digest, answered)
            except Silence:
                break
        return heard

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
        """Send parcels, one a burst, twice as many bursts under way as one answer is for, and hear the answers."""
        heard: list[Heard] = []
        waiting, flying = list(numbers), 0
        while waiting or flying:
            while waiting and flying < 2 * answered:
                number = waiting.pop(0)
                parcel = data[number * parcel_bytes : (number + 1) * parcel_bytes]
                self.send(damage(number, parcel))
                sums = [digest(number, xxhash.xxh3_64_intdigest(parcel))] if digests else []
                self.send(record(self.transfer, sums))
                flying += 1
            said = self.hear()
            heard.append(said)
            if said.kind != GOT:
                break
            flying -= min(answered, flying)
            _, first, number = answer(said.note)
            waiting += range(first, first + number)
        return heard

    # -- the receiver's part

    def take_burst(self, nbytes: int = PARCEL, digests: int = 1, *, answer: int | None = GO_ON) -> bytes:
        """Take a burst of one parcel and its record; answer it."""
        data = self.recv(nbytes)
        self.recv(HEADER.size + (8 * digests + 8 if digests else 0))
        if answer is not None:
            self.say(GOT, note=answer)
        return data


def note(intent: int, first: int = 0, number: int = 0) -> int:
    """Of an answer to a burst: whether to go on, and which parcels are wanted in addition."""
    return intent | first << 1 | number << 33


def answer(note: int) -> tuple[int, int, int]:
    return note & 1, note >> 1 & 0xFFFF_FFFF, note >> 33


def expand(pairs: Sequence[int]) -> list[int]:
    return [n for low, high in zip(pairs[::2], pairs[1::2], strict=True) for n in range(low, high)]
