"""Whole conversations with peers that lie."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import random
import threading
import time
from typing import Any
from unittest import mock

import pytest
import torch

import hostile
from hostile import CPU, LIMITS, Member, Wire
from hostile_cases import compare, disagree, want
from hostile_conversations import (
    COMPARING_LIES,
    HONEST_SECONDS,
    RECEIVER_LIES,
    SOURCE_LIES,
    STATE,
    WIRES,
    Liar,
    Lie,
    altered,
    converse,
    damaged,
    instead,
    lies_on_wires,
    new_transport,
    only,
    resealed,
    serve_by,
    use_wire,
)
from transfuse._errors import PeerError, PeerRefused, PeerTimeout, ProtocolError, SendFailed
from transfuse._limits import Limits
from transfuse._options import Options
from transfuse._session import receive_from_one, relay
from transfuse._session.context import ReceiveRequest
from transfuse._wire import messages
from transfuse._wire.channel import Channel
from transfuse._wire.group import FIRST_LINK_TAG, Group
from transfuse._wire.messages import Agreed, Intent, Link, Message
from transfuse._wire.pool import Pool
from transfuse._wire.route_table import Leases
from transfuse.testing.ranks import Fleet, Ranks

pytestmark = [
    pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental:UserWarning"),
    pytest.mark.filterwarnings("ignore:Sparse .* tensor support is in beta state:UserWarning"),
    pytest.mark.filterwarnings("ignore:Sparse invariant checks are implicitly disabled:UserWarning"),
    pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype stage:UserWarning"),
]


@pytest.mark.parametrize(("told", "wire"), lies_on_wires(SOURCE_LIES))
def test_hostile_source(told: Lie, wire: str, monkeypatch: pytest.MonkeyPatch) -> None:
    use_wire(monkeypatch, wire)
    w = torch.zeros(1000)

    def lie(pg: Any, ended: threading.Event) -> None:
        with (liar := Liar(pg, 1, ended=ended, **told.how)):
            serve_by(liar, new_transport(pg, seconds=1), STATE)

    error = converse(lambda pg: new_transport(pg, {"w": w, "step": 0}).recv_checkpoint(0), lie, 1)
    told.check(error, 0)
    # What is torn is told; what is not torn is as it was.
    assert isinstance(error, PeerError)
    assert error.torn == ("['w']",) or not w.any()


@pytest.mark.parametrize(("told", "wire"), lies_on_wires(COMPARING_LIES))
def test_hostile_comparison(told: Lie, wire: str, monkeypatch: pytest.MonkeyPatch) -> None:
    use_wire(monkeypatch, wire)
    error, _ = compare(**told.how)
    told.check(error, 0)
    assert isinstance(error, PeerError)
    assert error.torn == ("['w']",)
    assert not error.received
    assert error.partial.landed.tolist() == [True, False, False, False]


@pytest.mark.parametrize("digest", [None, bytes(16), b"\xff" * 16])
def test_a_comparison_is_believed(digest: bytes | None) -> None:
    """What does not have the source's digest is fetched again."""
    error, report = compare(**({} if digest is None else {"message": instead(Message.DIGESTS, [digest])}))
    assert error is None
    assert report.kept_bytes == (0 if digest else 1 << 16)
    assert report.bytes == (4 << 16) - report.kept_bytes


@pytest.mark.parametrize("kind", [Message.CHECK, Message.COMPARE, Message.DESCRIBE, Message.VERSION])
def test_questions_without_end_are_not_answered(kind: Message, large: Member) -> None:
    body, cut = want(large)
    question = {
        Message.CHECK: b"",
        Message.COMPARE: messages.encode(messages.HeldParcels([0, len(cut)])),
        Message.DESCRIBE: b"",
        Message.VERSION: b"",
    }[kind]
    told: collections.Counter[Message] = collections.Counter()

    class Told(Wire):
        def send(self, kind: Message, body: Any = b"", *, note: int = 0, tag: int | None = None) -> None:
            told[kind] += 1
            super(Wire, self).send(kind, body, note=note, tag=tag)

    wanted = [body] if kind is not Message.DESCRIBE else []
    wire = Told(random.Random(0), large, [*wanted, *[(kind, question)] * 1000])
    compares = kind is Message.COMPARE
    with pytest.raises(ProtocolError, match="same parcels more than" if compares else "without a verdict"):
        hostile.serve(wire, large.offered)
    assert told[Message.REFUSAL] == 1
    answers = told[Message.AGREED] + told[Message.DIGESTS] + told[Message.OFFER] - 1  # The offer itself.
    # A want is agreed to as well.
    assert answers == (LIMITS.max_repairs + 1 if compares else LIMITS.max_working_records)


@pytest.mark.parametrize(("told", "wire"), lies_on_wires(RECEIVER_LIES))
def test_hostile_receiver(told: Lie, wire: str, monkeypatch: pytest.MonkeyPatch) -> None:
    use_wire(monkeypatch, wire)

    def lie(pg: Any, ended: threading.Event) -> None:
        with Liar(pg, 0, ended=ended, **told.how) as liar, contextlib.closing(Pool(liar.group)) as pool:
            hostile.gather([liar], ReceiveRequest(), pool=pool)

    error = converse(lambda pg: new_transport(pg).send_checkpoint([1], STATE), lie, 0)
    assert isinstance(error, SendFailed), repr(error)
    told.check(error.causes[1], 1)


@pytest.mark.parametrize("patience", [1e6, 1e300])
def test_patience_ends_with_the_timeout(patience: float) -> None:
    """The source says that a rank passes parcels on which knows nothing of it, and that this takes its time."""
    w, transports = torch.zeros(1000), {}

    def honest(pg: Any) -> None:
        transports[1] = new_transport(pg, {"w": w, "step": 0}, seconds=1.5)
        transports[1].recv_checkpoint(0)

    def lie(pg: Any, ended: threading.Event) -> None:
        transport = new_transport(pg)
        offered = transport._load(STATE, None, (1,), Leases(Options(same_host=False), 60))
        chain = hostile.Lined(Agreed(Link(0, FIRST_LINK_TAG, 7), None, patience))
        with Channel(Group(pg, CPU), 1, 10.0, Limits()) as channel:
            offered = dataclasses.replace(offered, chains=chain)
            hostile.serve(channel, offered, transfer=9, tag=channel.group.new_tag(1))

    error = converse(honest, lie, 1)
    assert error is None, repr(error)
    assert torch.equal(w, STATE["w"])  # type: ignore[arg-type]
    assert transports[1].report is not None
    assert transports[1].report.relayed_bytes == 0


#: What a receiver does to the one after it in a chain, and to the one before.
LINK_LIES: dict[str, tuple[int, dict[str, Any]]] = {
    "a damaged record": (1, {"record": damaged}),
    "cancelled for no reason": (1, {"record": resealed(note=Intent.CANCEL)}),
    "wrong digests": (1, {"said": lambda digest: digest ^ 1}),
    "answers of another transfer": (2, {"head": only(Message.GOT, resealed(transfer=7))}),
    "answers that cancel": (2, {"head": only(Message.GOT, resealed(note=Intent.CANCEL))}),
}


@pytest.mark.usefixtures("patient_chains")
@pytest.mark.parametrize("wire", WIRES)
@pytest.mark.parametrize("name", LINK_LIES)
def test_hostile_neighbour(name: str, wire: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever one receiver does to its neighbour: the neighbour has everything in the end, from the source."""
    use_wire(monkeypatch, wire)
    monkeypatch.setenv("TRANSFUSE_MIN_RELAY_BYTES", "1")
    monkeypatch.setattr(receive_from_one, "this_host", lambda: 1)  # The receivers are on another host than the source.
    liar, how = LINK_LIES[name]
    state = {"w": torch.arange(100_000.0)}
    lied: list[int] = []

    with Ranks(3) as ranks:
        groups = ranks.pgs

        def new_line(group: Group, peer: int, timeout: float, limits: Limits, *, is_source: bool) -> Channel:
            if group.pg is not groups[liar]:
                return Channel(group, peer, timeout, limits, is_source=is_source)
            lied.append(peer)
            line = Liar(group.pg, peer, timeout=timeout, **how)
            line.is_source = is_source
            return line

        def one(rank: int, pg: Any) -> Any:
            # A chain waits for its members for half the source's timeout at most.
            transport = new_transport(pg, seconds=HONEST_SECONDS * (1 if rank == liar else 2))
            began = time.monotonic()
            try:
                return transport.recv_checkpoint(0) if rank else transport.send_checkpoint([1, 2], state)
            finally:
                assert time.monotonic() - began < 2 * HONEST_SECONDS + 1

        with mock.patch.object(relay, "Channel", new_line):
            sent, *received = ranks.outcomes(one)
    honest = received[(3 - liar) - 1]
    assert lied == [3 - liar]
    assert honest.error is None, repr(honest.error)
    assert torch.equal(honest.get()["w"], state["w"])
    assert sent.error is None or list(sent.error.causes) == [liar], repr(sent.error)  # type: ignore[attr-defined]


@pytest.mark.parametrize("wire", WIRES)
@pytest.mark.parametrize("honest_rank", [0, 1])
def test_silent_peer(honest_rank: int, wire: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It connects, and says nothing."""
    use_wire(monkeypatch, wire)

    def honest(pg: Any) -> None:
        transport = new_transport(pg)
        transport.send_checkpoint([1], STATE) if honest_rank == 0 else transport.recv_checkpoint(0)

    error = converse(honest, lambda pg, ended: ended.wait(), honest_rank)
    cause = error.causes[1] if isinstance(error, SendFailed) else error
    assert isinstance(cause, PeerTimeout), repr(cause)
    assert f"rank {1 - honest_rank} timed out" in str(cause)


def test_disagreement_over_parcels_ends_in_words() -> None:
    """In processes of their own: gloo ends a process that gets a longer message than it has posted a receive for."""
    with Fleet(2) as fleet:
        fleet.start(disagree)
        sent, received = fleet.outcomes()
    assert isinstance(sent.error, SendFailed), sent
    assert "rank 1 derived other parcels" in str(sent.error.causes[1])
    assert isinstance(received.error, PeerRefused), received
    assert "derived other parcels" in str(received.error)


@pytest.mark.parametrize(
    ("message", "why"),
    [
        (instead(Message.DIGESTS, [bytes(15)]), "a digest of its content of 15 bytes"),
        (instead(Message.DIGESTS, [b""]), "a digest of its content of 0 bytes"),
        (instead(Message.DIGESTS, [bytes(1 << 16)]), "a digest of its content of 65536 bytes"),
        (instead(Message.DIGESTS, b"\xc1"), "malformed digests"),
        (instead(Message.DIGESTS, [[]], Message.AGREED), "sent AGREED where DIGESTS was due"),
        (altered(Message.OFFER, messages.Offer, content=b"x"), "a digest of its content of an impossible length"),
    ],
)
@pytest.mark.parametrize("compares", [False, True])
def test_hostile_versions(message: Any, why: str, compares: bool) -> None:
    w = torch.zeros(1000)

    def lie(pg: Any, ended: threading.Event) -> None:
        with (liar := Liar(pg, 1, ended=ended, message=message)):
            serve_by(liar, new_transport(pg), STATE)

    def ask(pg: Any) -> None:
        new_transport(pg, {"w": w, "step": 0}).receive(0, version=True, only_compares=compares)

    error = converse(ask, lie, 1)
    assert isinstance(error, ProtocolError), repr(error)
    assert why in str(error)
    assert not w.any()
    assert not error.torn


@pytest.mark.parametrize(
    ("body", "why"),
    [
        ([bytes(16)], "compared parcels that it was not asked about"),
        ([bytes(48)], "compared parcels that it was not asked about"),
        ([b""], "compared parcels that it was not asked about"),
        (b"\xc1", "malformed digests"),
        ([bytes(32)], None),
    ],
)
def test_hostile_digests_change_nothing_here(body: Any, why: str | None) -> None:
    """What a source claims is believed for what it is: its word on its own state."""
    w, b, found = torch.ones(1000), torch.ones(3), []

    def lie(pg: Any, ended: threading.Event) -> None:
        with (liar := Liar(pg, 1, ended=ended, message=instead(Message.DIGESTS, body))):
            serve_by(liar, new_transport(pg), {"w": w.clone(), "b": b.clone()})

    def compare_with(pg: Any) -> None:
        found.append(new_transport(pg, {"w": w, "b": b}).receive(0, only_compares=True))

    error = converse(compare_with, lie, 1)
    if why is None:
        assert error is None
        assert found[0].differing.keys() == {"['w']", "['b']"}
    else:
        assert isinstance(error, ProtocolError), repr(error)
        assert why in str(error)
    assert w.eq(1).all()
