"""Control messages: a fixed header, then a body of exactly the announced length.

The header carries a digest of itself, because a receiver relies on its length, and a digest of the body. Bodies are
typed msgpack. A body that does not fit its type is refused.
"""

from __future__ import annotations

import enum
import struct
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Annotated, Any, NamedTuple, TypeVar

import msgspec
import xxhash

from transfuse._plan.wanted_blocks import WantedBlocks
from transfuse._state.manifest import Wire

MAGIC = b"TFUS"
WIRE_VERSION = 12
#: The most routes that an offer or a verdict may name.
MOST_ROUTES = 16
#: The most lanes between two ends.
MOST_LANES = 15
#: The most streams from earlier transfers that a source names.
MOST_KNOWN = MOST_LANES + 1
#: The most bytes of an offer that travels with a meeting.
MOST_WITH_MEET = 1 << 15
#: The length of the token that a process asks for at its port.
TOKEN_BYTES = 32
#: A random number by which both ends know a lane.
LaneNumber = Annotated[int, msgspec.Meta(ge=1, lt=1 << 62)]
RouteName = Annotated[str, msgspec.Meta(max_length=64)]

# magic, version, kind, transfer, note, body length, digest of the body, digest of the fields before
_HEADER = struct.Struct("<4sHHQQQQQ")
HEADER_BYTES = _HEADER.size
#: Over a process group a message begins with a block of this length: its header, and as much of its body as fits.
BLOCK_BYTES = 4096
#: How many bytes of a body fit into that block. The rest follows in chunks, and after each of them this byte.
ROOM = BLOCK_BYTES - HEADER_BYTES
MARK = b"\x01"
_DIGEST_BYTES = 8


class Message(enum.IntEnum):
    """Kinds of message.

    ``note`` in the header is the transfer's tag (first offer, or a refusal in its place), an Intent (sent), an Answer
    (got), how many bytes have arrived so far (working), which wire it is (go), a set of transfers (turn), or a stage
    (word).
    """

    OFFER = 1
    WANT = 2
    REFUSAL = 3
    SENT = 4
    GOT = 5
    VERDICT = 6
    WORKING = 7
    AGREED = 8
    MORE = 9
    CHECK = 10
    COMPARE = 11
    DIGESTS = 12
    DESCRIBE = 13
    GO = 14
    TURN = 15
    MEET = 16
    MET = 17
    WORD = 18


_KINDS = {message.value: message for message in Message}


class Intent(enum.IntEnum):
    """Whether more bursts will follow those that are already under way."""

    GO_ON = 0
    CANCEL = 1
    #: As GO_ON. And the source's tensors are unchanged since it described them: nobody has to ask (check).
    CONFIRM = 2


class Answer(NamedTuple):
    """A receiver's answer to a burst (got), packed into the note: 1 bit, 32 bits and 31 bits."""

    intent: Intent
    #: Parcels that the receiver wants in addition: ``number`` of them, from ``first`` on.
    first: int = 0
    number: int = 0

    @property
    def note(self) -> int:
        return self.intent | self.first << 1 | self.number << 33

    @classmethod
    def of(cls, note: int) -> Answer:
        return cls(Intent(note & 1), note >> 1 & 0xFFFF_FFFF, note >> 33)


class Header(NamedTuple):
    kind: Message
    transfer: int
    note: int
    length: int
    digest: int


class Offer(msgspec.Struct, array_like=True, frozen=True, forbid_unknown_fields=True):
    """Source to receiver: the state that the source has.

    A long offer is first sent brief: without the manifest, and with only the names of the routes. The receiver asks for
    the rest (describe) only if it needs the rest: of many sources it needs few manifests.
    """

    step: int | None
    parcel_bytes: int
    burst_bytes: int
    staged_bytes: int
    bursts_ahead: int
    timeout: float
    digests: bool
    #: Routes by which receivers may pull, each with an entry that only the route itself can read.
    routes: Annotated[dict[RouteName, bytes], msgspec.Meta(max_length=MOST_ROUTES)]
    #: The rate that the source allows this receiver; None: no limit.
    max_bytes_per_second: float | None
    manifest: Wire | None
    #: A digest of the manifest, and a digest of what the manifests of all ranks that shard this state have in common.
    digest: bytes
    likeness: bytes
    #: The source's coordinate in each mesh of the manifest; None if the source is not in the mesh.
    coordinates: list[tuple[int, ...] | None]
    #: How many connections at most the source uses with this receiver, and a number for its host.
    connections: int = 1
    host: int = 0
    #: A digest of the manifest without its values. If the source has sent this structure before, its brief offer has
    #: the values and the entries of its routes: a receiver that remembers the structure needs nothing more.
    structure: bytes = b""
    values: list[Any] | None = None

    @property
    def described(self) -> Wire:
        """The manifest of an offer that is not brief."""
        assert self.manifest is not None
        return self.manifest


class Place(msgspec.Struct, array_like=True, frozen=True, forbid_unknown_fields=True):
    """Where an end listens for streams: its address (host:port), and the token that the other end has to prove."""

    address: Annotated[str, msgspec.Meta(max_length=128)]
    token: Annotated[bytes, msgspec.Meta(min_length=TOKEN_BYTES, max_length=TOKEN_BYTES)]


class Meet(msgspec.Struct, array_like=True, frozen=True, forbid_unknown_fields=True):
    """Source to receiver, over the group, before the offer: let us talk over a stream."""

    #: Numbers of streams that both ends may have from an earlier transfer.
    known: Annotated[list[LaneNumber], msgspec.Meta(max_length=MOST_KNOWN)]
    #: The number for a new one, or 0; and where the receiver connects for it.
    new: Annotated[int, msgspec.Meta(ge=0, lt=1 << 62)]
    place: Place | None
    #: The offer itself, if it is short. Otherwise it follows over the stream.
    offer: Annotated[bytes, msgspec.Meta(max_length=MOST_WITH_MEET)] = b""


class Met(msgspec.Struct, array_like=True, frozen=True, forbid_unknown_fields=True):
    """Receiver to source, over the group: the stream over which the conversation goes on."""

    #: 0: there is none.
    number: Annotated[int, msgspec.Meta(ge=0, lt=1 << 62)]
    #: If the receiver could not connect: where the source may try to, with a new number.
    place: Place | None = None


class Lanes(msgspec.Struct, array_like=True, frozen=True, forbid_unknown_fields=True):
    """The lanes that a receiver wants to use, or that its source agrees to."""

    #: Numbers of lanes that both ends may have from an earlier transfer.
    known: Annotated[list[LaneNumber], msgspec.Meta(max_length=MOST_LANES)]
    new: Annotated[list[LaneNumber], msgspec.Meta(max_length=MOST_LANES)]
    #: Receiver: if lanes are agreed to, the conversation's own stream brings this many parcels of the first request.
    first: Annotated[int, msgspec.Meta(ge=0)] = 0
    #: From the end that does not dial: where the other one connects for the new ones, if it has to be told.
    place: Place | None = None

    @property
    def numbers(self) -> list[int]:
        return [*self.known, *self.new]


class Want(msgspec.Struct, array_like=True, frozen=True, forbid_unknown_fields=True):
    """Receiver to source: which parcels to send.

    Parcels are cut from all regions of the state. Of the storages in ``apart``, only the regions of ``tensors`` count.
    """

    fingerprint: int
    #: At most the offered sizes. With several sources, all parcels are cut with the same size.
    parcel_bytes: int
    burst_bytes: int
    digests: bool
    apart: list[int]
    tensors: list[int]
    #: Numbers of parcels as pairs: from, to, from, to, …
    parcels: list[int]
    #: Whether the receiver may be in a chain, and a number for its host: neighbours in a chain should share a host.
    relay: bool
    host: int
    #: If given, parcels are cut from these blocks instead.
    wanted_blocks: WantedBlocks | None = None
    lanes: Lanes | None = None


class Link(msgspec.Struct, array_like=True, frozen=True, forbid_unknown_fields=True):
    """One hop of a chain of receivers: the neighbour's rank, and the tag and transfer id that the two use."""

    rank: int
    tag: int
    transfer: int


class Agreed(msgspec.Struct, array_like=True, frozen=True, forbid_unknown_fields=True):
    """Source to receiver: the parcels come now, from ``upstream`` or else from the source; pass them ``downstream``."""

    upstream: Link | None = None
    downstream: Link | None = None
    #: How many seconds to wait for a silent upstream before asking the source for the rest.
    patience: float = 0.0
    #: Whether the parcels have to travel through main memory, since an operation of the source's backend for the
    #: accelerator is stuck.
    through_host: bool = False
    lanes: Lanes | None = None


class Refusal(msgspec.Struct, array_like=True, frozen=True, forbid_unknown_fields=True):
    """Either direction, instead of any other message: this transfer ends, with this cause."""

    kind: str
    cause: str


class More(msgspec.Struct, array_like=True, frozen=True, forbid_unknown_fields=True):
    """Receiver to source: parcels, as in a want. MORE: send them too, or again. COMPARE: send their digests."""

    parcels: list[int]


class Digests(msgspec.Struct, array_like=True, frozen=True, forbid_unknown_fields=True):
    """Source to receiver: digests of the parcels to compare, 16 bytes each."""

    digests: bytes


class Verdict(msgspec.Struct, array_like=True, frozen=True, forbid_unknown_fields=True):
    """Receiver to source: everything has arrived and is verified."""

    #: How many bytes the receiver has pulled, by route.
    pulled: Annotated[dict[RouteName, int], msgspec.Meta(max_length=MOST_ROUTES)] = msgspec.field(default_factory=dict)


class _Preface(msgspec.Struct, array_like=True, frozen=True):
    """The first fields of an offer, which can be read without its manifest."""

    step: int | None
    parcel_bytes: int
    burst_bytes: int
    staged_bytes: int
    bursts_ahead: int
    timeout: float


Body = TypeVar("Body", Offer, Want, Refusal, Verdict, Agreed, More, Digests, Meet, Met)

# msgspec inspects a type when it is first used, and two threads that do so at the same time end the process. So the
# decoders are made once, at import, and not when several conversations receive their first message.
_DECODERS: dict[type, msgspec.msgpack.Decoder[Any]] = {
    cls: msgspec.msgpack.Decoder(cls)
    for cls in (Offer, Want, Refusal, Verdict, Agreed, More, Digests, Meet, Met, _Preface)
}


def encode(body: msgspec.Struct) -> bytes:
    return msgspec.msgpack.encode(body)


def brief(offer: Offer, values: list[Any] | None = None) -> Offer:
    """The same offer without its manifest; and without the entries of its routes, unless it has the ``values``."""
    routes = dict.fromkeys(offer.routes, b"") if values is None else offer.routes
    return msgspec.structs.replace(offer, manifest=None, values=values, routes=routes)


def decode(data: bytes | bytearray, cls: type[Body]) -> Body:
    """Decode a body of this type. ``ValueError`` if the bytes are anything else."""
    try:
        body: Body = _DECODERS[cls].decode(data)
        return body
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
        raise ValueError(f"malformed {cls.__name__.lower()}: {error}") from error


def pairs_of(numbers: Iterable[int]) -> list[int]:
    """Rising numbers as ranges: from, to, from, to, … (``to`` excluded)."""
    result: list[int] = []
    for number in numbers:
        if result and result[-1] == number:
            result[-1] += 1
        else:
            result += (number, number + 1)
    return result


def numbers_in(pairs: list[int], count: int) -> Sequence[int]:
    """The inverse of :func:`pairs_of`. ``ValueError`` unless the numbers rise and are below ``count``."""
    rising = all(low < high for low, high in pairwise(pairs))
    if len(pairs) % 2 or not rising or (pairs and (pairs[0] < 0 or pairs[-1] > count)):
        raise ValueError(f"expected rising ranges of parcel numbers below {count}, got {str(pairs[:8])[:200]}")
    if len(pairs) == 2:
        return range(*pairs)
    return [n for low, high in zip(pairs[::2], pairs[1::2], strict=True) for n in range(low, high)]


def timeout_in(offer: bytes | bytearray) -> float | None:
    """How many seconds the source of an offer waits for a sign of life; None if the offer has no valid number."""
    try:
        timeout: float = _DECODERS[_Preface].decode(offer).timeout
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError):
        return None
    return timeout if 0 < timeout < float("inf") else None


def record_bytes(digests: int) -> int:
    """The length of a record with this many digests."""
    return HEADER_BYTES + (8 * digests + _DIGEST_BYTES if digests else 0)


def seal_record(transfer: int, intent: Intent, digests: Sequence[int]) -> bytes:
    """A record: a header, and digests with a digest of their own. So damage to the digests costs only the parcels."""
    head = seal(Message.SENT, transfer, intent, b"")
    if not digests:
        return head
    body = struct.pack(f"<{len(digests)}Q", *digests)
    return head + body + struct.pack("<Q", _digest(head, body))


def digests_in(record: bytes) -> Sequence[int] | None:
    """The digests of a record; None if they have arrived damaged."""
    if len(record) <= HEADER_BYTES:
        return ()
    head, body, seal = record[:HEADER_BYTES], record[HEADER_BYTES:-_DIGEST_BYTES], record[-_DIGEST_BYTES:]
    if struct.pack("<Q", _digest(head, body)) != seal:
        return None
    return struct.unpack(f"<{len(body) // 8}Q", body)


def seal(kind: Message, transfer: int, note: int, body: bytes | bytearray | memoryview) -> bytes:
    """The header for a body."""
    digest = xxhash.xxh3_64_intdigest(body)
    head = _HEADER.pack(MAGIC, WIRE_VERSION, kind, transfer, note, len(body), digest, 0)[:-_DIGEST_BYTES]
    return head + xxhash.xxh3_64_digest(head)[::-1]


def open_header(data: bytes) -> Header:
    """Read a header. ``ValueError`` says what is wrong with it."""
    magic, version, kind, transfer, note, length, digest, own = _HEADER.unpack(data)
    if magic != MAGIC:
        raise ValueError(f"not a transfuse message (starts with {magic!r})")
    if version != WIRE_VERSION:
        raise ValueError(
            f"wire version {version}, this end speaks {WIRE_VERSION}; install the same transfuse on both ends"
        )
    if xxhash.xxh3_64_intdigest(data[:-_DIGEST_BYTES]) != own:
        raise ValueError("the header of a control message arrived damaged (its digest does not match)")
    if kind not in _KINDS:
        raise ValueError(f"unknown kind of message {kind}")
    return Header(_KINDS[kind], transfer, note, length, digest)


def verify(header: Header, body: bytes | bytearray | memoryview) -> None:
    """Check the digest of a body that has arrived whole."""
    if xxhash.xxh3_64_intdigest(body) != header.digest:
        raise ValueError("a control message arrived damaged (its digest does not match)")


def _digest(head: bytes, body: bytes | bytearray | memoryview) -> int:
    state = xxhash.xxh3_64(head)
    state.update(body)
    return state.intdigest()
