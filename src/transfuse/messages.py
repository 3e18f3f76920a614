"""Control messages: a fixed header, then a body of exactly the announced length.

The header's digest covers header and body. Bodies are typed msgpack; what does not fit its type is refused.
"""

from __future__ import annotations

import enum
import struct
from typing import NamedTuple, TypeVar

import msgspec
import xxhash

from transfuse import manifest

__all__ = [
    "HEADER_BYTES",
    "MAGIC",
    "WIRE_VERSION",
    "Header",
    "Intent",
    "Message",
    "Offer",
    "Refusal",
    "Verdict",
    "Want",
    "decode",
    "encode",
    "open_header",
    "seal",
    "timeout_in",
    "verify",
]

MAGIC = b"TFUS"
WIRE_VERSION = 1

# magic, version, kind, transfer, note, body length, digest
_HEADER = struct.Struct("<4sHHQQQQ")
HEADER_BYTES = _HEADER.size
_DIGEST_BYTES = 8


class Message(enum.IntEnum):
    """Kinds of message. ``note`` in the header is the transfer's tag (offer, refusal of an offer) or an Intent."""

    OFFER = 1
    WANT = 2
    REFUSAL = 3
    SENT = 4
    GOT = 5
    VERDICT = 6
    WORKING = 7
    AGREED = 8


class Intent(enum.IntEnum):
    """What a record after a burst says: more bursts than those already under way will come, or will not."""

    GO_ON = 0
    CANCEL = 1


class Header(NamedTuple):
    kind: Message
    transfer: int
    note: int
    length: int
    digest: int


class Offer(msgspec.Struct, array_like=True, frozen=True, forbid_unknown_fields=True):
    """Source to receiver: what there is."""

    step: int | None
    parcel_bytes: int
    burst_bytes: int
    bursts_ahead: int
    timeout: float
    digests: bool
    manifest: manifest.Wire


class Want(msgspec.Struct, array_like=True, frozen=True, forbid_unknown_fields=True):
    """Receiver to source: everything, except that of the storages ``apart`` only the boxes of ``parts`` are wanted."""

    fingerprint: int
    digests: bool
    apart: list[int]
    parts: list[int]


class Refusal(msgspec.Struct, array_like=True, frozen=True, forbid_unknown_fields=True):
    """Either way, instead of any other message: this transfer ends, for this cause."""

    kind: str
    cause: str


class Verdict(msgspec.Struct, array_like=True, frozen=True, forbid_unknown_fields=True):
    """Receiver to source: the parcels to send again. None: all is here and verified."""

    missing: list[int]


class _Preface(msgspec.Struct, array_like=True, frozen=True):
    """The first fields of an offer: what can be known before its manifest is read."""

    step: int | None
    parcel_bytes: int
    burst_bytes: int
    bursts_ahead: int
    timeout: float


Body = TypeVar("Body", Offer, Want, Refusal, Verdict)


def encode(body: Offer | Want | Refusal | Verdict) -> bytes:
    return msgspec.msgpack.encode(body)


def decode(data: bytes | bytearray, cls: type[Body]) -> Body:
    """Typed decoding; ``ValueError`` for anything else."""
    try:
        return msgspec.msgpack.decode(data, type=cls)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
        raise ValueError(f"malformed {cls.__name__.lower()}: {error}") from error


def timeout_in(offer: bytes | bytearray) -> float | None:
    """How long the source of an offer waits for a sign of life, if the offer says so in a sound way."""
    try:
        timeout = msgspec.msgpack.decode(offer, type=_Preface).timeout
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError):
        return None
    return timeout if 0 < timeout < float("inf") else None


def seal(kind: Message, transfer: int, note: int, body: bytes | bytearray | memoryview) -> bytes:
    """The header for a body."""
    head = _HEADER.pack(MAGIC, WIRE_VERSION, kind, transfer, note, len(body), 0)[:-_DIGEST_BYTES]
    return head + struct.pack("<Q", _digest(head, body))


def open_header(data: bytes) -> Header:
    """Read a header. ``ValueError`` says what is foreign about it."""
    magic, version, kind, transfer, note, length, digest = _HEADER.unpack(data)
    if magic != MAGIC:
        raise ValueError(f"not a transfuse message (starts with {magic!r})")
    if version != WIRE_VERSION:
        raise ValueError(
            f"wire version {version}, this end speaks {WIRE_VERSION}; install the same transfuse on both ends"
        )
    if kind not in Message.__members__.values():
        raise ValueError(f"unknown kind of message {kind}")
    return Header(Message(kind), transfer, note, length, digest)


def verify(header: bytes, body: bytes | bytearray | memoryview) -> None:
    """Check the digest of a message that has arrived whole."""
    (digest,) = struct.unpack("<Q", header[-_DIGEST_BYTES:])
    if _digest(header[:-_DIGEST_BYTES], body) != digest:
        raise ValueError("a control message arrived damaged (its digest does not match)")


def _digest(head: bytes, body: bytes | bytearray | memoryview) -> int:
    state = xxhash.xxh3_64(head)
    state.update(body)
    return state.intdigest()
