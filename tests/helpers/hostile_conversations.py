"""Peers that lie in the middle of a conversation: what each lie is, and what the honest end says to it."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import datetime
import itertools
import re
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec
import pytest
import torch
import xxhash

import hostile
from hostile import CPU
from transfuse._errors import (
    CorruptData,
    PeerError,
    PeerRefused,
    PeerTimeout,
    ProtocolError,
    SourceMutated,
    TransfuseError,
)
from transfuse._limits import Limits
from transfuse._memory import mutation
from transfuse._options import Options
from transfuse._transport import PGTransport
from transfuse._wire import messages
from transfuse._wire.channel import Channel
from transfuse._wire.group import Group
from transfuse._wire.messages import Intent, Message
from transfuse._wire.operations import Posted
from transfuse._wire.route_table import Leases
from transfuse._wire.stream import Part
from transfuse._wire.switchboard import Waits
from transfuse.testing.ranks import Ranks

# ---------------------------------------------------------------------------------------------- whole conversations

HONEST_SECONDS, HOSTILE_SECONDS = 3.0, 30.0

Bytes = Callable[[bytes], bytes]


#: Words by which two ends agree on a wire. Here nobody lies about that: attacks/false_meetings.py does.
MEETING = (Message.MEET, Message.MET, Message.GO)
#: Over what two ends talk.
WIRES = ("group", "stream")


class Liar(Channel):
    """A line that says something else than its owner thinks: in messages, in headers, in records.

    It stays until the honest end has ``ended``: if it left by itself, an honest end that a busy machine holds up would
    notice that first, and not the lie.
    """

    def __init__(
        self,
        pg: Any,
        peer: int,
        *,
        message: Callable[[Message, bytes], tuple[Message, bytes]] = lambda kind, body: (kind, body),
        head: Bytes = bytes,
        record: Bytes = bytes,
        heard: Callable[[int], int] = lambda digest: digest,
        said: Callable[[int], int] = lambda digest: digest,
        honest: int = 0,
        before: tuple[Message, Message, bytes] | None = None,
        last: Message | None = None,
        deaf: Message | None = None,
        ended: threading.Event | None = None,
        timeout: float = HOSTILE_SECONDS,
    ) -> None:
        limits = dataclasses.replace(Limits(), max_repairs=10)
        super().__init__(Group(pg, CPU), peer, timeout, limits)
        self._message, self._head, self._record = copy.copy(message), head, record
        self._heard, self._said = heard, said
        #: How many messages are as they should be first, and what is said in addition before one of a kind.
        self._honest, self._before = honest, before
        self._last = last
        self._deaf = deaf
        self._ended = ended

    def overdue(self) -> bool:
        alone = self._ended is not None and self._ended.is_set() and self.waiting_since is not None
        return alone or super().overdue()

    def send(self, kind: Message, body: bytes | torch.Tensor = b"", *, note: int = 0, tag: int | None = None) -> None:
        plain = body if isinstance(body, bytes) else body.numpy().tobytes()
        if kind in MEETING:
            super().send(kind, plain, note=note, tag=tag)
            return
        if self._before is not None and kind is self._before[0]:
            super().send(*self._before[1:])
        if kind is not Message.WORKING:
            self._honest -= 1
        if self._honest < 0:
            kind_said, plain = self._message(kind, plain)
        else:
            kind_said = kind
        super().send(kind_said, plain, note=note, tag=tag)
        if kind is self._last:
            self.expect()  # Whatever the answer is, it ends this end's part.

    def expect(
        self, *kinds: Message, tag: int | None = None, early: Posted | None = None
    ) -> tuple[messages.Header, bytearray]:
        header, body = super().expect(*kinds, tag=tag, early=early)
        if header.kind is self._deaf:
            assert self._ended is not None
            self._ended.wait()
        return header, body

    def post_send(self, tensor: torch.Tensor, tag: int | None = None) -> Posted:
        size = tensor.numel()
        data = tensor.numpy().tobytes() if size < 1000 or size == messages.BLOCK_BYTES else b""
        if data[:4] == messages.MAGIC:
            # A message is a header and some of its body, a record is changed as a whole.
            at = messages.HEADER_BYTES if size == messages.BLOCK_BYTES else size
            tensor = torch.frombuffer(bytearray(self._changed(data[:at]) + data[at:]), dtype=torch.uint8)
        return super().post_send(tensor, tag)

    def write(self, *parts: Part) -> None:
        super().write(*(self._written(part) for part in parts))

    def _written(self, part: Part) -> Part:
        if not isinstance(part, bytes) or part[:4] != messages.MAGIC:
            return part
        if part[6] == Message.SENT and len(part) > messages.HEADER_BYTES:
            head, digests = messages.open_header(part[: messages.HEADER_BYTES]), messages.digests_in(part) or ()
            part = messages.seal_record(head.transfer, Intent(head.note), [self._said(digest) for digest in digests])
        return self._changed(part)

    def _changed(self, data: bytes) -> bytes:
        """A header, or a record."""
        if data[6] in MEETING:
            return data
        return self._record(data) if data[6] == Message.SENT else self._head(data)

    def post_sent(self, intent: Intent, digests: list[int]) -> Waits:
        return super().post_sent(intent, [self._said(digest) for digest in digests])

    def read_sent(self, data: bytes) -> tuple[Intent, Sequence[int] | None]:
        intent, digests = super().read_sent(data)
        return intent, None if digests is None else [self._heard(digest) for digest in digests]


def instead(of: Message, body: Any, kind: Message | None = None) -> Callable[[Message, bytes], tuple[Message, bytes]]:
    """Another body, or another kind of message, where one of this kind is due."""
    data = body if isinstance(body, bytes) else msgspec.msgpack.encode(body)
    return lambda k, b: (kind or k, data) if k is of else (k, b)


def altered(kind: Message, cls: Any, **changes: Any) -> Callable[[Message, bytes], tuple[Message, bytes]]:
    """The same body with other fields."""

    def change(k: Message, body: bytes) -> tuple[Message, bytes]:
        if k is kind:
            plain = msgspec.structs.asdict(messages.decode(body, cls)) | changes
            body = msgspec.msgpack.encode([plain[name] for name in cls.__struct_fields__])
        return k, body

    return change


class InTurn:
    """Changes messages. A copy begins anew."""

    def __init__(self, changes: Sequence[Any]) -> None:
        self._changes, self._numbers = changes, itertools.count()

    def __call__(self, kind: Message, body: bytes) -> tuple[Message, bytes]:
        changed: tuple[Message, bytes] = self._changes[min(next(self._numbers), len(self._changes) - 1)](kind, body)
        return changed

    def __copy__(self) -> InTurn:
        return InTurn(self._changes)


def in_turn(*changes: Any) -> Callable[[Message, bytes], tuple[Message, bytes]]:
    """One change for the first message, another for the second, and so on; the last for all others."""
    return InTurn(changes)


def other_state(kind: Message, body: bytes) -> tuple[Message, bytes]:
    """The same digests, and another state."""
    if kind is not Message.OFFER:
        return kind, body
    offer, other = messages.decode(body, messages.Offer), hostile.load({"v": torch.zeros(1000), "step": 5}).offer
    return kind, messages.encode(msgspec.structs.replace(offer, manifest=other.manifest))


def resealed(**changes: Any) -> Bytes:
    """A header with other fields and the right digest for them, if there is no more to the message but a record's."""

    def change(data: bytes) -> bytes:
        names = ("magic", "version", "kind", "transfer", "note", "length", "digest")
        fields = dict(zip(names, messages._HEADER.unpack(data[: messages.HEADER_BYTES]), strict=False)) | changes
        bare, digests = messages._HEADER.pack(*fields.values(), 0)[:-8], data[messages.HEADER_BYTES : -8]
        head = bare + xxhash.xxh3_64_intdigest(bare).to_bytes(8, "little")
        return head if not digests else head + digests + messages._digest(head, digests).to_bytes(8, "little")

    return change


def damaged(data: bytes) -> bytes:
    """Wrong in the digest of its header."""
    at = messages.HEADER_BYTES - 1
    return data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]


def damaged_digests(data: bytes) -> bytes:
    """A record that is sound but for the digests in it."""
    at = messages.HEADER_BYTES
    return data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]


def only(kind: Message, change: Bytes) -> Bytes:
    return lambda data: change(data) if data[6] == kind else data


STATE = {"w": torch.arange(1000.0), "step": 5}


SPITE = ["Spite", "why not"]


class Lie:
    """What a liar does, on which wires, and the error that the honest end raises about it."""

    def __init__(
        self, text: str, error: type[PeerError] = ProtocolError, *, wires: Sequence[str] = WIRES, **how: Any
    ) -> None:
        self.text, self.error, self.wires, self.how = text, error, wires, how

    def check(self, error: BaseException | None, rank: int) -> None:
        assert isinstance(error, self.error), repr(error)
        assert error.rank == rank
        assert re.search(f"rank {rank}.*{self.text}", str(error)), str(error)


def refusing(kind: str) -> Callable[[Message, bytes], tuple[Message, bytes]]:
    """A refusal of this kind instead of what the receiver is waiting for."""
    return instead(Message.AGREED, [kind, "why not"], Message.REFUSAL)


#: A source offers, agrees to the want, and agrees that nothing has changed: these messages are honest first.
OFFERED, AGREED_TO = 1, 2

SOURCE_LIES = {
    "magic": Lie("while waiting for the offer: not a transfuse message", head=lambda d: b"HTTP" + d[4:]),
    "version": Lie("wire version 99", head=resealed(version=99)),
    "the version before": Lie(
        f"wire version {messages.WIRE_VERSION - 1}", head=resealed(version=messages.WIRE_VERSION - 1)
    ),
    "kind": Lie("unknown kind of message 99", head=resealed(kind=99)),
    "length": Lie("announced a message of 1099511627776 bytes", head=resealed(length=1 << 40)),
    "tag": Lie("sent an offer with an impossible tag 5", head=resealed(note=5), wires=["group"]),
    "digest": Lie("while waiting for the offer: .*damaged", head=damaged),
    **{
        f"{kind.name} for an offer": Lie(
            f"sent {kind.name} where OFFER (or MEET )?was due", message=instead(Message.OFFER, [[]], kind)
        )
        for kind in Message
        if kind not in (Message.OFFER, Message.REFUSAL, Message.WORKING, Message.MEET)
    },
    "another MEET for an offer": Lie(
        "sent MEET where OFFER was due", message=instead(Message.OFFER, [[]], Message.MEET), wires=["stream"]
    ),
    "a garbled MEET": Lie("malformed meet", message=instead(Message.OFFER, [[]], Message.MEET), wires=["group"]),
    "garbage": Lie("sent a malformed offer", message=instead(Message.OFFER, b"\xc1" * 99)),
    "a garbled refusal": Lie("malformed refusal", message=instead(Message.OFFER, b"\xc1", Message.REFUSAL)),
    "a refusal": Lie("Spite: why not", PeerRefused, message=instead(Message.OFFER, SPITE, Message.REFUSAL)),
    "garbage for an agreement": Lie("malformed agreed", message=instead(Message.AGREED, b"\xc1" * 9)),
    **{
        f"{kind.name} for an agreement": Lie(
            f"sent {kind.name} where AGREED was due", message=instead(Message.AGREED, [[]], kind)
        )
        for kind in (
            Message.OFFER,
            Message.WANT,
            Message.MORE,
            Message.CHECK,
            Message.COMPARE,
            Message.DIGESTS,
            Message.DESCRIBE,
        )
    },
    "another digest": Lie(
        "malformed offer: its digests", message=altered(Message.OFFER, messages.Offer, digest=bytes(16))
    ),
    "another likeness": Lie(
        "malformed offer: its digests", message=altered(Message.OFFER, messages.Offer, likeness=bytes(16))
    ),
    **{
        f"{size} bytes of digest": Lie(
            "digests of an impossible length", message=altered(Message.OFFER, messages.Offer, **{name: bytes(size)})
        )
        for name, size in (("digest", 0), ("digest", 17), ("likeness", 8), ("likeness", 1 << 16))
    },
    "a coordinate in no mesh": Lie(
        "1 coordinates for 0 described meshes", message=altered(Message.OFFER, messages.Offer, coordinates=[[0]])
    ),
    "coordinates that are no numbers": Lie(
        "sent a malformed offer", message=altered(Message.OFFER, messages.Offer, coordinates=[["x"]])
    ),
    "a brief offer, and then silence": Lie(
        "timed out", PeerTimeout, message=altered(Message.OFFER, messages.Offer, manifest=None), deaf=Message.DESCRIBE
    ),
    "a brief offer for a description": Lie(
        "describes another state than it has offered", message=altered(Message.OFFER, messages.Offer, manifest=None)
    ),
    "another description than the offer": Lie(
        "describes another state than it has offered",
        message=in_turn(
            altered(Message.OFFER, messages.Offer, manifest=None),
            altered(Message.OFFER, messages.Offer, likeness=bytes(16)),
        ),
    ),
    "a description of another digest": Lie(
        "describes another state than it has offered",
        message=in_turn(
            altered(Message.OFFER, messages.Offer, manifest=None),
            altered(Message.OFFER, messages.Offer, digest=bytes(16)),
        ),
    ),
    "another state in the description": Lie(
        "malformed offer: its digests",
        message=in_turn(altered(Message.OFFER, messages.Offer, manifest=None), other_state),
    ),
    **{
        f"{kind.name} for a description": Lie(
            f"sent {kind.name} where OFFER was due",
            message=in_turn(altered(Message.OFFER, messages.Offer, manifest=None), instead(Message.OFFER, [[]], kind)),
        )
        for kind in (Message.AGREED, Message.DESCRIBE, Message.DIGESTS, Message.WANT)
    },
    "a refusal for a description": Lie(
        "Spite: why not",
        PeerRefused,
        message=in_turn(
            altered(Message.OFFER, messages.Offer, manifest=None), instead(Message.OFFER, SPITE, Message.REFUSAL)
        ),
    ),
    "refuses the want": Lie("Spite: why not", PeerRefused, message=refusing("Spite")),
    "refuses the want and names itself": Lie("refused: why not", SourceMutated, message=refusing("SourceMutated")),
    "has changed after all": Lie(
        "refused: why not", SourceMutated, message=refusing("SourceMutated"), honest=AGREED_TO
    ),
    "a record of another transfer": Lie("sent a message of transfer 7", record=resealed(transfer=7)),
    "a damaged record": Lie("while receiving parcels: .*damaged", record=damaged),
    "another message for a record": Lie("sent GOT where a record was due", record=resealed(kind=Message.GOT)),
    "a question for a record": Lie("sent CHECK where a record was due", record=resealed(kind=Message.CHECK)),
    "a record of no intent": Lie("where a record was due", record=resealed(note=3)),
    "a record with a body": Lie("where a record was due", record=resealed(length=8)),
    "cancelled for no reason": Lie("", PeerError, record=resealed(note=Intent.CANCEL)),
    "wrong digests for ever": Lie(
        r"1 parcels .* 3 repairs; leaves: \['w'\]", CorruptData, said=lambda digest: digest ^ 1
    ),
    "damaged digests for ever": Lie(r"1 parcels .* 3 repairs; leaves: \['w'\]", CorruptData, record=damaged_digests),
}

#: What a source says about a parcel that the receiver has kept: the one of four that is asked about is the first.
COMPARING_LIES = {
    "garbage": Lie("malformed digests", message=instead(Message.DIGESTS, b"\xc1" * 9)),
    "numbers": Lie("malformed digests", message=instead(Message.DIGESTS, [[0, 1]])),
    **{
        f"{size} bytes of digests": Lie(
            "compared parcels that it was not asked", message=instead(Message.DIGESTS, [bytes(size)])
        )
        for size in (0, 8, 15, 17, 32, 64, 1 << 20)
    },
    **{
        f"{kind.name} instead": Lie(
            f"sent {kind.name} where DIGESTS was due", message=instead(Message.DIGESTS, [[]], kind)
        )
        for kind in (Message.AGREED, Message.MORE, Message.COMPARE, Message.VERDICT)
    },
    "a refusal": Lie("Spite: why not", PeerRefused, message=instead(Message.DIGESTS, SPITE, Message.REFUSAL)),
    "has changed": Lie(
        "refused: why not",
        SourceMutated,
        message=instead(Message.DIGESTS, ["SourceMutated", "why not"], Message.REFUSAL),
    ),
}


def wanting(text: str, **changes: Any) -> Lie:
    return Lie(text, message=altered(Message.WANT, messages.Want, **changes), last=Message.WANT)


def asking(text: str, kind: Message, body: Any, *, instead_of: Message = Message.CHECK) -> Lie:
    """A question instead of another one."""
    return Lie(text, message=instead(instead_of, body, kind), last=instead_of)


RECEIVER_LIES = {
    "magic": Lie("while waiting for the want: not a transfuse message", head=lambda d: b"HTTP" + d[4:]),
    "transfer": Lie("sent a message of transfer 7", head=resealed(transfer=7)),
    "garbage": Lie("malformed want", message=instead(Message.WANT, b"\xc1" * 9)),
    **{
        f"{kind.name} for a want": Lie(
            f"sent {kind.name} where WANT or DESCRIBE or VERSION or CHECK or VERDICT was",
            message=instead(Message.WANT, b"", kind),
        )
        for kind in (Message.OFFER, Message.GOT, Message.AGREED, Message.MORE, Message.COMPARE, Message.DIGESTS)
    },
    "fingerprint": wanting("derived other parcels", fingerprint=1),
    "absent storages": wanting("wants tensors that were not", apart=[9]),
    "negative tensors": wanting("wants tensors that were not", apart=[0], tensors=[-1]),
    **{
        f"parcels {pairs}": wanting("wants parcels that do not", parcels=pairs)
        for pairs in ([1, 2], [0, 1 << 63], [-1, 1], [1, 0], [0], [0, 0], [0, 1, 0, 1])
    },
    **{
        f"parcels of {size} bytes": wanting("wants parcels of an impossible size", parcel_bytes=size)
        for size in (0, -16, 16, 16 << 10 | 8, 8 << 20, 1 << 62)
    },
    "parcels of another size": wanting("derived other parcels", fingerprint=1, parcel_bytes=16 << 10),
    **{
        f"bursts of {size} bytes": wanting("wants bursts of an impossible size", burst_bytes=size)
        for size in (0, -1, 25 << 20, 1 << 62)
    },
    "a refusal": Lie("Spite: why not", PeerRefused, message=instead(Message.WANT, SPITE, Message.REFUSAL)),
    "answers of another transfer": Lie("sent a message of transfer 7", head=only(Message.GOT, resealed(transfer=7))),
    "cancelled for no reason": Lie("", PeerError, head=only(Message.GOT, resealed(note=Intent.CANCEL))),
    "a garbled verdict": Lie("malformed verdict", message=instead(Message.VERDICT, b"\xc1")),
    "a verdict of the version before": Lie("malformed verdict", message=instead(Message.VERDICT, [[], 0])),
    "another want": Lie(
        "sent WANT where MORE or COMPARE or VERSION or CHECK or VERDICT was",
        message=instead(Message.CHECK, [], Message.WANT),
    ),
    **{
        f"more: {pairs}": asking("asks for parcels that do not exist", Message.MORE, [pairs])
        for pairs in ([1, 2], [0, 1 << 63], [-1, 1], [1, 0], [0], [0, 0], [0, 1, 0, 1])
    },
    "more of nothing": asking("asks for nothing", Message.MORE, [[]]),
    "more garbage": asking("malformed more", Message.MORE, b"\xc1"),
    "parcels for ever": Lie("asked .* more than 3 times", heard=lambda digest: digest ^ 1),
    "more that does not exist, under way": Lie(
        "asks for parcels that do not exist",
        head=only(Message.GOT, resealed(note=messages.Answer(Intent.GO_ON, 1, 1).note)),
    ),
    "more than there is, under way": Lie(
        "asks for parcels that do not exist",
        head=only(Message.GOT, resealed(note=messages.Answer(Intent.GO_ON, 0, (1 << 31) - 1).note)),
    ),
    "a question under way": Lie("sent CHECK where GOT was due", before=(Message.GOT, Message.CHECK, b"")),
    **{
        f"compares {pairs}": asking("compares parcels that do not exist", Message.COMPARE, [pairs])
        for pairs in ([1, 2], [0, 1 << 63], [-1, 1], [1, 0], [0], [0, 0], [0, 1, 0, 1])
    },
    "compares digests of its own": asking(
        "compares parcels by digests of a wrong length", Message.COMPARE, [[0, 1], bytes(16)]
    ),
    "compares garbage": asking("malformed heldparcels", Message.COMPARE, b"\xc1"),
    "a description too late": asking("sent DESCRIBE where MORE or COMPARE or VERSION or CHECK", Message.DESCRIBE, b""),
}


def converse(
    honest: Callable[[Any], Any], lie: Callable[[Any, threading.Event], Any], honest_rank: int
) -> BaseException | None:
    """Both ends at once; the honest one's error, which must come within its timeout. The liar is told when it has."""
    ended = threading.Event()

    def one(rank: int, pg: Any) -> float:
        began = time.monotonic()
        try:
            if rank == honest_rank:
                honest(pg)
            else:
                with contextlib.suppress(TransfuseError):
                    lie(pg, ended)
        finally:
            took = time.monotonic() - began
            if rank == honest_rank:
                ended.set()
                assert took < 2 * HONEST_SECONDS + 1, f"{took:.1f} s"
        return took

    with Ranks(2) as ranks:
        return ranks.outcomes(one)[honest_rank].error


def serve_by(liar: Channel, transport: PGTransport, state: Any, step: int | None = None) -> None:
    """Send a state by this line, as a transport does, which decides on the wire."""
    offered = transport._load(state, step, (liar.peer,), Leases(Options(same_host=False), 60))
    vars(offered)["short"] = b""  # The offer is a message of its own, so that its header can lie too.
    hostile.serve(liar, offered, transfer=9, tag=liar.group.new_tag(liar.peer))


def lies_on_wires(lies: Mapping[str, Lie]) -> list[Any]:
    """Parameters for tests: each lie on each of its wires."""
    return [pytest.param(lie, wire, id=f"{name} ({wire})") for name, lie in lies.items() for wire in lie.wires]


def use_wire(monkeypatch: pytest.MonkeyPatch, wire: str) -> None:
    monkeypatch.setenv("TRANSFUSE_STREAMS", str(int(wire == "stream")))
    monkeypatch.setattr(mutation, "QUICK", 0)  # So the receiver asks whether tensors have changed (check).


def new_transport(pg: Any, target: object = None, seconds: float = HONEST_SECONDS) -> PGTransport:
    """Over the group: in these tests all ranks are one process, and could read each other's memory."""
    timeout, state_dict = datetime.timedelta(seconds=seconds), None if target is None else lambda: target
    return PGTransport(pg, timeout, CPU, state_dict, same_host=False)
