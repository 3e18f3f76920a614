"""Hostile bytes: whatever a peer says, an honest end raises an error of the library, or carries on in bounds.

The bulk is a seeded loop, not hypothesis: 20,000 cases in the ordinary run. A failure names its seed and case;
``TRANSFUSE_HOSTILE_SEED=<seed> TRANSFUSE_HOSTILE_CASE=<case>`` runs that case alone.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import datetime
import gc
import itertools
import os
import pathlib
import random
import re
import resource
import subprocess
import sys
import threading
import time
import tracemalloc
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest import mock

import msgspec
import numpy as np
import pytest
import torch
import torch.distributed as dist
import xxhash
from torch._C._distributed_c10d import HashStore

import hostile
from hostile import CAP, CPU, LIMITS, PEER, Audit, Ground, Member, Wire
from transfuse.errors import (
    CorruptData,
    PeerError,
    PeerRefused,
    PeerTimeout,
    ProtocolError,
    ReceiveFailed,
    SendFailed,
    SourceMutated,
    TransfuseError,
)
from transfuse.limits import MIB, Limits
from transfuse.options import Options
from transfuse.plan import parcels, regions
from transfuse.progress import Progress
from transfuse.report import Report
from transfuse.session import accepting, agreement, receiver, relay, source
from transfuse.session.context import Request
from transfuse.session.relay import Chains
from transfuse.session.threads import Caller
from transfuse.state.leaves import values
from transfuse.state.leaves.blobs import ArrayCodec
from transfuse.state.leaves.codec import CannotCarry, MeshDescription, Room
from transfuse.state.leaves.sparse import JaggedCodec
from transfuse.state.leaves.subclass import WrapperCodec
from transfuse.state.manifest import Leaf
from transfuse.testing.ranks import Fleet, Ranks
from transfuse.transport import PGTransport
from transfuse.wire import messages
from transfuse.wire.channel import Line, Posted
from transfuse.wire.group import FIRST_LINK_TAG, FIRST_TAG, LINK_TAGS, OFFER_TAG, Group
from transfuse.wire.memory import Entry, MemoryLease, Reader
from transfuse.wire.messages import Agreed, Intent, Link, Message
from transfuse.wire.route import Unreadable
from transfuse.wire.routes import Leases

pytestmark = [
    pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental:UserWarning"),
    pytest.mark.filterwarnings("ignore:Sparse .* tensor support is in beta state:UserWarning"),
    pytest.mark.filterwarnings("ignore:Sparse invariant checks are implicitly disabled:UserWarning"),
    pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype stage:UserWarning"),
]

SEED = int(os.environ.get("TRANSFUSE_HOSTILE_SEED", "20260801"))
ONLY = os.environ.get("TRANSFUSE_HOSTILE_CASE")
#: A file that holds the number of the case under way, for cases that end the process.
TRACE = os.environ.get("TRANSFUSE_HOSTILE_TRACE")
#: Memory beyond what the process has that a case may ask for: what a hostile number asks for is refused beyond doubt.
HEADROOM = 512 * MIB

OFFERS, WANTS, REQUESTS, REFUSALS, STREAMS, RECORDS, AGREEMENTS = 17_000, 1500, 1500, 300, 1000, 500, 300
COMPARISONS, PAIRS = 600, 400


@pytest.fixture(scope="module")
def corpus() -> Iterator[list[Member]]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # The tensors are tiny.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # sparse and nested tensors say that they are young
        members = hostile.corpus()
    yield members
    torch.set_num_threads(threads)


# --------------------------------------------------------------------------------------------------------- one case


def accept_offer(rng: random.Random, corpus: list[Member]) -> str:
    """One forged offer, through the whole of a receive."""
    member = rng.choice(corpus)
    same_host = rng.random() < 0.4
    if same_host and rng.random() < 0.1:  # honest but for where its memory is
        member = max(corpus, key=lambda m: m.cargo.total_bytes)
        memory = hostile.forge_memory(rng, member, len(member.manifest.storages))
        body = msgspec.msgpack.encode(hostile.put(member.plain, (hostile.ROUTES,), hostile.routed(memory)))
    else:
        body = hostile.mutate_offer(rng, member, corpus)
    mode = rng.choice(["fresh", "fresh", "in place", "in place", "atomic", "strict"])
    target = None
    if mode != "fresh":
        target = member.target if rng.random() < 0.9 else rng.choice(corpus).target
    request = Request(
        step=rng.choice([None, None, None, 4]),
        target=None if target is None else target.state,
        options=Options(
            verify=rng.choice([None, None, False, True]),
            strict=mode == "strict",
            atomic=mode == "atomic",
            weights_only_objects=rng.random() < 0.3,
            same_host=same_host,
        ),
    )
    wire = Wire(rng, member, [body])
    result: list[Any] = []
    report = Report("receive", (PEER,))
    try:
        with hostile.patched_accept(wire), torch.no_grad():
            result = hostile.gather([wire], request, report=report)
        outcome = f"state, {report.route or 'nothing'}"
    except TransfuseError as error:
        str(error)
        refuse_out_of_memory(error)
        outcome = "too much" if isinstance(error, hostile.TooMuch) else type(error).__name__
    assert Ground.get().intact(), "memory was written that nobody gave"
    if target is not None:
        assert target.intact(), "memory outside the target's elements was written"
        if not outcome.startswith("state") and (wire.accepted is None or mode == "atomic"):
            assert target.unchanged(), f"{outcome}, but the target was written"
    hostile.touch(result)
    if target is not None:
        target.restore()
    return f"{mode}: {outcome}"


def refuse_out_of_memory(error: BaseException | None) -> None:
    """An allocation that failed was one that the message did not justify."""
    while error is not None:
        text = str(error).lower()
        assert not isinstance(error, MemoryError), f"out of memory: {error!r}"
        assert "allocate" not in text, f"out of memory: {error!r}"
        error = error.__cause__ or error.__context__


def serve_want(rng: random.Random, corpus: list[Member]) -> str:
    """One forged want, or an honest one of some of the parcels, through the whole of a send."""
    member = rng.choice(corpus)
    m, offer = member.manifest, member.cargo.offer
    apart = sorted(rng.sample(range(len(m.storages)), rng.randrange(min(len(m.storages), 3) + 1)))
    parts = [p for p in range(len(m.parts)) if int(m.parts.storage[p]) in apart and rng.random() < 0.8]
    size = rng.choice([offer.parcel_bytes, offer.parcel_bytes, LIMITS.min_parcel_bytes, LIMITS.min_parcel_bytes + 16])
    cut = parcels.cut(regions.lay_out(m, apart, parts), size)
    burst = rng.choice([offer.burst_bytes, offer.burst_bytes, 1, rng.randrange(1, offer.burst_bytes)])
    honest = [
        parcels.fingerprint(cut),
        size,
        burst,
        True,
        apart,
        parts,
        messages.pairs_of(range(len(cut))),
        False,
        0,
        None,
    ]
    if rng.random() < 0.5:
        honest[6:9] = [hostile.forge_pairs(rng, len(cut)), rng.random() < 0.8, rng.choice(hostile.INTS)]
    if rng.random() < 0.1:
        honest[rng.choice([1, 2])] = rng.choice([*hostile.INTS, size + 16, offer.burst_bytes + 1])
    body = _lie(rng, honest) if rng.random() < 0.6 else msgspec.msgpack.encode(honest)
    return _serve(rng, member, cut, [body, (Message.VERDICT, msgspec.msgpack.encode([{}]))])


def serve_requests(rng: random.Random, corpus: list[Member]) -> str:
    """An honest want, and then questions of all kinds, while parcels are under way and afterwards."""
    member = rng.choice(corpus)
    body, cut = want(member, digests=rng.random() < 0.5, relay=rng.random() < 0.3)

    def request() -> tuple[Message, bytes]:
        kind, honest = hostile.forge_request(rng, len(cut))
        if isinstance(honest, bytes):
            return kind, honest
        return kind, _lie(rng, honest) if rng.random() < 0.15 else msgspec.msgpack.encode(honest)

    answers: list[Any] = [] if rng.random() < 0.1 else [body]  # Or it says that it has read everything.
    more = [rng.getrandbits(64) & ~1 for _ in range(rng.choice([0, 0, 0, 1, 3]))]
    numbers = [0, 1, max(len(cut) - 1, 0), len(cut), len(cut) + 1, (1 << 31) - 1]
    more += [
        messages.Answer(Intent.GO_ON, rng.choice(numbers), rng.choice(numbers)).note
        for _ in range(rng.choice([0, 0, 1, 3]))
    ]
    return _serve(rng, member, cut, [*answers, *(request() for _ in range(rng.randrange(1, 6)))], more)


def want(
    member: Member, *, digests: bool = False, relay: bool = False, host: int = 0, **changes: Any
) -> tuple[bytes, parcels.Parcels]:
    """An honest want of all parcels of a member but for what is changed, and these parcels."""
    offer = member.cargo.offer
    cut = parcels.cut(regions.lay_out(member.manifest), offer.parcel_bytes)
    fields = {
        "fingerprint": parcels.fingerprint(cut),
        "parcel_bytes": offer.parcel_bytes,
        "burst_bytes": offer.burst_bytes,
        "digests": digests,
        "apart": [],
        "parts": [],
        "parcels": messages.pairs_of(range(len(cut))),
        "relay": relay,
        "host": host,
        "picks": None,
    } | changes
    return msgspec.msgpack.encode([fields[name] for name in messages.Want.__struct_fields__]), cut


def _lie(rng: random.Random, honest: Any) -> bytes:
    if rng.random() < 0.3:
        body = msgspec.msgpack.encode(honest)
        return hostile.mutate_bytes(rng, body, [body])
    plain = honest
    for _ in range(rng.choice([1, 1, 2])):
        plain = hostile.mutate_plain(rng, plain, hostile._paths(honest))
    try:
        return msgspec.msgpack.encode(plain)
    except (OverflowError, RecursionError):
        return b""


def _serve(
    rng: random.Random, member: Member, cut: parcels.Parcels, answers: list[Any], more: Sequence[int] = ()
) -> str:
    for _ in range(rng.randrange(3)):  # signs of life, with whatever the receiver says it has
        answers.insert(rng.randrange(len(answers) + 1), rng.choice(hostile.NOTES))
    wire = Wire(rng, member, answers, more=more)
    chains = rng.choice([None, hostile.Lined(rng.choice(hostile.AGREED))])
    cargo, progress, report = dataclasses.replace(member.cargo, chains=chains), Progress(), Report("send", (PEER,))
    try:
        source.serve(wire, 1, FIRST_TAG, cargo, caller=Caller(), progress=progress, report=report)
        outcome = "done"
    except TransfuseError as error:
        str(error)
        refuse_out_of_memory(error)
        outcome = type(error).__name__
    assert 0 <= report.read_bytes <= cargo.total_bytes
    # What it says that it has read, and every parcel as often as it may ask for it.
    assert 0 <= progress.bytes <= cargo.total_bytes + (LIMITS.max_repairs + 1) * cut.total_bytes
    str(report)
    return f"serve: {outcome}"


def hear_agreed(rng: random.Random, corpus: list[Member]) -> str:
    """An honest offer, and then neighbours that a receiver did not ask for, or that do not exist, or say nonsense."""
    member = rng.choice(corpus)
    honest = hostile.forge_agreed(rng)
    body = _lie(rng, honest) if rng.random() < 0.3 else msgspec.msgpack.encode(honest)
    wire = Wire(rng, member, [member.body], said={Message.WANT: body}, relays=rng.random() < 0.8)
    wire._filling = "honest"
    request = Request(
        target=rng.choice([None, member.target.state]),
        options=Options(weights_only_objects=True, same_host=False, relay=rng.random() < 0.9),
    )
    return f"agreed: {_gather(member, [wire], request)}"


def _gather(member: Member, wires: list[Wire], request: Request, *, honest: bool = True) -> str:
    """Receive a member's own bytes, if it is honest that these are offered."""
    result: list[Any] = []
    try:
        with hostile.patched_accept(*wires), torch.no_grad():
            result = hostile.gather(wires, request)
        outcome = "state"
    except TransfuseError as error:
        str(error)
        refuse_out_of_memory(error)
        for cause in error.causes.values() if isinstance(error, ReceiveFailed) else ():
            assert isinstance(cause, TransfuseError), repr(cause)
            refuse_out_of_memory(cause)
        outcome = type(error).__name__
    assert Ground.get().intact(), "memory was written that nobody gave"
    assert member.target.intact()
    if outcome == "state" and honest:
        assert member.target.unchanged()  # It is what it was: the source's own.
    hostile.touch(result)
    member.target.restore()
    return outcome


#: Members all of whose tensors are received in place.
PLAIN = ("dense", "dressed", "tied", "large", "tensor", "list")


def hear_comparison(rng: random.Random, corpus: list[Member]) -> str:
    """What was kept of an honest receive, and then answers about it, and about what else the receiver asks."""
    member = rng.choice([*corpus, *(m for m in corpus if m.name in PLAIN)])
    target = rng.choice([None, member.target.state])
    kept = hostile.interrupted(rng, member, target, rng.choice([None, None, 1, 1, 2]))
    if kept is None:
        return "compared: nothing was kept"
    if target is not None and member.name in PLAIN and rng.random() < 0.4:  # Somebody has written to it meanwhile.
        first = rng.choice([0, 0, len(member.target.memory) // 2])
        member.target.memory[first:][member.target.owned[first:]] = 0x11
    agreed, count = messages.encode(Agreed()), len(kept.landed)
    said: dict[Message, hostile.Said] = {}
    for kind, honest in (
        (Message.COMPARE, msgspec.msgpack.encode([hostile.forge_digests(rng, count)])),
        (Message.WANT, agreed),
        (Message.MORE, agreed),
        (Message.CHECK, agreed),
    ):
        if rng.random() < (0.7 if kind is Message.COMPARE else 0.1):
            said[kind] = honest if rng.random() < 0.5 else (rng.choice(list(Message)), _lie(rng, [[]]))
    honest_offer = rng.random() < 0.9
    body = member.body if honest_offer else hostile.mutate_offer(rng, member, corpus)
    wire = Wire(rng, member, [body], said=said)
    wire._filling = "honest"
    request = Request(
        target=target, resume=kept, options=Options(weights_only_objects=True, same_host=rng.random() < 0.2)
    )
    return f"compared: {_gather(member, [wire], request, honest=honest_offer)}"


def gather_from_two(rng: random.Random, corpus: list[Member]) -> str:
    """An honest source, and one that lies about anything but the state's bytes: what comes is the state."""
    member = rng.choice([*corpus, *(m for m in corpus if m.name in PLAIN)])
    said: dict[Message, hostile.Said] = {}
    for kind in (Message.WANT, Message.MORE, Message.CHECK):
        if rng.random() < 0.2:
            body = msgspec.msgpack.encode(hostile.forge_agreed(rng)) if rng.random() < 0.5 else _lie(rng, [["X", "y"]])
            said[kind] = rng.choice([Message.AGREED, Message.AGREED, Message.REFUSAL, *Message]), body
    honest_offer = rng.random() < 0.7
    body = _resized(rng, member) if honest_offer else hostile.mutate_offer(rng, member, corpus)
    bursts = rng.choice([None, None, 0, 1])
    wires = [
        Wire(rng, member, [member.body], peer=PEER),
        Wire(rng, member, [body], peer=PEER + 1, said=said, bursts=bursts, relays=rng.random() < 0.5),
    ]
    for wire in wires:
        wire._filling = "honest"
    rng.shuffle(wires)
    request = Request(
        target=rng.choice([None, member.target.state]), options=Options(weights_only_objects=True, same_host=False)
    )
    return f"two: {_gather(member, wires, request, honest=honest_offer)}"


def _resized(rng: random.Random, member: Member) -> bytes:
    """An offer of the same state, in parcels and bursts of other sizes."""
    names = ("parcel_bytes", "burst_bytes", "staged_bytes", "bursts_ahead", "max_bytes_per_second", "timeout")
    at = messages.Offer.__struct_fields__.index(rng.choice(names))
    sizes = [member.plain[at], 16, 16384, 16400, 40_000, 1 << 20, *hostile.INTS]
    return msgspec.msgpack.encode(hostile.put(member.plain, (at,), rng.choice(sizes)))


def hear_refusal(rng: random.Random, corpus: list[Member]) -> str:
    body = _lie(rng, [rng.choice(["StepMismatch", "SourceMutated", "X" * 9999, ""]), "because"])
    said = hostile.spoken(Message.REFUSAL, body, 1, FIRST_TAG)
    return _hear(Line(Group(hostile.Stream(said), CPU), PEER, 1.0, LIMITS), Message.OFFER)


def hear_stream(rng: random.Random, corpus: list[Member]) -> str:
    """Headers and bodies, honest and not, as they come off the wire."""
    body = rng.choice([b"", b"x" * 50, rng.choice(corpus).body])
    said = hostile.spoken(rng.choice(list(Message)), body, rng.choice([1, 2]), FIRST_TAG)
    head, rest = said[: messages.HEADER_BYTES], said[messages.HEADER_BYTES :]
    if rng.random() < 0.5:
        head = hostile.mutate_bytes(rng, head, [head])
    elif rng.random() < 0.5:
        # A forger knows the digest too.
        version = messages.WIRE_VERSION
        fields: list[Any] = [
            messages.MAGIC,
            rng.choice([version] * 3 + [0, 1, version - 1, version + 1, 65535]),
            rng.choice([*range(max(Message) + 2), 65535]),
        ]
        fields += [rng.choice([0, 1, 1 << 63]), rng.choice([0, 1, FIRST_TAG, (1 << 64) - 1])]
        fields += [rng.choice([len(body), 1 << 20, 1 << 28, (1 << 28) + 1, 1 << 40, (1 << 64) - 1])]
        bare = messages._HEADER.pack(*fields, rng.choice([xxhash.xxh3_64_intdigest(body), 0]), 0)[:-8]
        head = bare + xxhash.xxh3_64_intdigest(bare).to_bytes(8, "little")
    count = rng.choice([0, 0, 1, 2, LIMITS.max_working_records]) if rng.random() < 0.2 else 0
    alive = b"".join(messages.seal(Message.WORKING, 1, rng.choice(hostile.NOTES), b"") for _ in range(count))
    line = Line(Group(hostile.Stream(alive + head + rest), CPU), PEER, 1.0, LIMITS)
    heard: list[int] = []
    line.on_working = heard.append
    if rng.random() < 0.5:
        line.transfer, line.tag = 1, FIRST_TAG
        return _hear(line, *rng.choice(DUE))
    return _hear(line, Message.OFFER)


#: What either end may wait for after the offer.
DUE = [
    (Message.WANT, Message.DESCRIBE, Message.CHECK, Message.VERDICT),
    (Message.MORE, Message.COMPARE, Message.CHECK, Message.VERDICT),
    (Message.GOT,),
    (Message.AGREED,),
    (Message.DIGESTS,),
    (Message.OFFER,),
    (),
]


def _hear(line: Line, *kinds: Message) -> str:
    try:
        line.expect(*kinds, tag=None if line.transfer else 0)
    except TransfuseError as error:
        str(error)
        refuse_out_of_memory(error)
        return f"hear: {type(error).__name__}"
    return "hear: message"


def read_record(rng: random.Random, corpus: list[Member]) -> str:
    sent = tuple(rng.randrange(1 << 64) for _ in range(rng.randrange(4)))
    record = messages.seal_record(1, rng.choice([Intent.GO_ON, Intent.CANCEL]), sent)
    assert len(record) == messages.record_bytes(len(sent))
    if rng.random() < 0.3:  # sealed as it should be, but no record
        kind, note = rng.choice([Message.SENT, Message.GOT, *Message]), rng.choice([0, 1, 2, (1 << 64) - 1])
        head = messages.seal(kind, rng.choice([1, 1, 1, 2]), note, b"")
        record = head + record[len(head) :]
    if rng.random() < 0.6:
        mutated = hostile.mutate_bytes(rng, record, [record])
        record = mutated[: len(record)] + bytes(max(0, len(record) - len(mutated)))
    line = Line(Group(hostile.Nowhere(), CPU), PEER, 1.0, LIMITS)
    line.transfer, line.tag = 1, FIRST_TAG
    try:
        intent, digests = line.read_sent(torch.frombuffer(bytearray(record), dtype=torch.uint8))
    except TransfuseError as error:
        str(error)
        return f"record: {type(error).__name__}"
    assert intent in Intent
    assert digests is None or tuple(digests) == sent
    return "record: damaged digests" if digests is None else "record: read"


CASES: list[Callable[[random.Random, list[Member]], str]] = [
    *[accept_offer] * OFFERS,
    *[serve_want] * WANTS,
    *[serve_requests] * REQUESTS,
    *[hear_refusal] * REFUSALS,
    *[hear_stream] * STREAMS,
    *[read_record] * RECORDS,
    *[hear_agreed] * AGREEMENTS,
    *[hear_comparison] * COMPARISONS,
    *[gather_from_two] * PAIRS,
]


# --------------------------------------------------------------------------------------------------------- the loop


class Run:
    """Runs cases by number: a case follows from seed and number alone."""

    def __init__(self, corpus: list[Member], seed: int) -> None:
        self.corpus, self.seed = corpus, seed
        self.outcomes: collections.Counter[str] = collections.Counter()
        self._audit = Audit.get()

    def one(self, number: int, *, watch_memory: bool = False) -> None:
        rng = random.Random(f"{self.seed}/{number}")
        fn = CASES[number % len(CASES)]
        self._audit.events.clear()
        if TRACE is not None:
            pathlib.Path(TRACE).write_text(str(number))
        try:
            if watch_memory:
                tracemalloc.start()
            with self._audit.listening():
                outcome = fn(rng, self.corpus)
            if watch_memory:
                peak, largest = tracemalloc.get_traced_memory()[1], max(len(m.body) for m in self.corpus)
                assert peak < 200 * largest + 6 * MIB, f"{peak} bytes of Python objects"
            assert not self._audit.events, f"on behalf of a peer: {self._audit.events}"
        except Exception as error:
            error.add_note(
                f"to repeat: TRANSFUSE_HOSTILE_SEED={self.seed} TRANSFUSE_HOSTILE_CASE={number} ({fn.__name__})"
            )
            raise
        finally:
            if watch_memory:
                tracemalloc.stop()
        self.outcomes[outcome] += 1


@contextlib.contextmanager
def little_memory() -> Iterator[None]:
    """What asks for far more memory than it has a right to fails here, at once."""
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    pages = int(pathlib.Path("/proc/self/statm").read_text().split()[0])
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + HEADROOM, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def warm_up(corpus: list[Member]) -> None:
    """Messages of all kinds once: torch imports lazily, and msgspec evaluates our annotations when first used."""
    Ground.get()
    for cls in (MeshDescription, *msgspec.Struct.__subclasses__()):
        with contextlib.suppress(msgspec.ValidationError):
            msgspec.convert([], cls)
    for member in corpus:
        for target, same_host in itertools.product((None, member.target.state), (True, False)):
            wire = Wire(random.Random(0), member, [member.body])
            wire._filling = "honest"
            result: list[Any] = []
            request = Request(
                target=target, options=Options(weights_only_objects=True, same_host=same_host, verify=True)
            )
            with hostile.patched_accept(wire), torch.no_grad(), contextlib.suppress(Exception):
                result = hostile.gather([wire], request)
            hostile.touch(result)
            member.target.restore()
    rng = random.Random(0)
    for case in dict.fromkeys(CASES[OFFERS:]):
        for _ in range(20):
            case(rng, corpus)


@pytest.mark.parametrize("same_host", [True, False], ids=["memory", "group"])
@pytest.mark.parametrize("mode", ["fresh", "in place", "atomic", "strict"])
def test_honest_messages_arrive(mode: str, same_host: bool, corpus: list[Member]) -> None:
    """The other tests mutate these: they must be worth mutating."""
    for member in corpus:
        if mode == "strict" and not len(member.manifest.parts):
            continue
        wire = Wire(random.Random(0), member, [member.body])
        wire._filling = "honest"
        result: list[Any] = []
        request = Request(
            target=None if mode == "fresh" else member.target.state,
            options=Options(
                strict=mode == "strict", atomic=mode == "atomic", weights_only_objects=True, same_host=same_host
            ),
        )
        report = Report("receive", (PEER,))
        try:
            with hostile.patched_accept(wire), torch.no_grad():
                result = hostile.gather([wire], request, report=report)
            hostile.touch(result)
            assert report.route == ("" if not report.bytes else "memory" if same_host else "group")
            assert member.target.unchanged(), member.name
        except Exception as error:
            error.add_note(f"in member {member.name}")
            raise
        finally:
            member.target.restore()


def test_every_tag_is_in_the_corpus(corpus: list[Member]) -> None:
    found: set[int] = set()

    def walk(node: Any) -> None:
        if isinstance(node, list):
            if node and type(node[0]) is int:
                found.add(node[0])
            for child in node:
                walk(child)

    for member in corpus:
        walk(member.plain[hostile.MANIFEST][hostile.TREE : hostile.SHARED])
    missing = set(hostile.TAGS) - found
    assert missing <= {33}, f"tags {missing} (a WindowsPath exists only on Windows)"


@pytest.mark.timeout(600)
def test_20_000_hostile_messages(corpus: list[Member]) -> None:
    warm_up(corpus)
    run = Run(corpus, SEED)
    before, threads = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, set(threading.enumerate())
    with little_memory():
        if ONLY is not None:
            run.one(int(ONLY))
            return
        for number in range(len(CASES)):
            run.one(number, watch_memory=number % 50 == 0)
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) // 1024
    assert grown < 256, f"{grown} MiB more resident memory"
    assert run.outcomes.total() >= 20_000
    left = set(threading.enumerate()) - threads
    assert not [thread.name for thread in left if thread.name.startswith("transfuse")]
    for mode in ("fresh", "in place", "atomic", "strict"):
        for route in ("memory", "group"):
            assert run.outcomes[f"{mode}: state, {route}"] > 50, run.outcomes
    assert sum(n for outcome, n in run.outcomes.items() if outcome.endswith("memory+group")) > 10, run.outcomes
    for kind in ("agreed", "compared", "two"):
        assert run.outcomes[f"{kind}: state"] > 50, run.outcomes
    assert run.outcomes["serve: done"] > 200, run.outcomes


def test_hostile_sharded_tensors(corpus: list[Member]) -> None:
    """These need a default process group: one of this rank alone."""
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    try:
        members = [hostile.sharded_member(), next(m for m in corpus if m.name == "distributed")]
        warm_up(members)
        run = Run(members, SEED)
        with little_memory():
            for number in range(1000):
                run.one(number, watch_memory=number % 50 == 0)
        assert run.outcomes["fresh: state, memory"] > 10, run.outcomes
        assert run.outcomes["fresh: state, group"] > 10, run.outcomes
    finally:
        dist.destroy_process_group()


@pytest.mark.soak
def test_hostile_messages_for_long(corpus: list[Member]) -> None:
    warm_up(corpus)
    seconds = float(os.environ.get("TRANSFUSE_SOAK_SECONDS", "600"))
    run, until = (
        Run(corpus, int(os.environ.get("TRANSFUSE_HOSTILE_SEED", time.time_ns() % 10**9))),
        time.monotonic() + seconds,
    )
    number = 0
    with little_memory():
        while time.monotonic() < until:
            run.one(number, watch_memory=number % 50 == 0)
            number += 1
    assert number > 0


@pytest.mark.soak
def test_index_checks_for_long() -> None:
    _at_the_edge(time.time_ns() % 10**9, 60_000)


def test_index_checks_stay_within_memory() -> None:
    _at_the_edge(SEED, 1500)


def _at_the_edge(seed: int, count: int) -> None:
    """In a process of its own, where index tensors end at memory that may not be read."""
    script = f"import hostile; hostile.close_at_the_edge({seed}, {count})"
    path = os.pathsep.join([str(pathlib.Path(__file__).parent), *filter(None, [os.environ.get("PYTHONPATH")])])
    done = subprocess.run(
        [sys.executable, "-X", "faulthandler", "-c", script],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, f"seed {seed}: {done.stderr[-3000:]}"
    assert int(done.stdout) > 100


# ------------------------------------------------------------------------------------- small messages, large demands


def one_tensor(nbytes: int, sizes: list[int], strides: list[int], *, copies: int = 1) -> list[Any]:
    """An offer of uint8 tensors of this geometry, each in a storage of its own, in plain lists."""
    state = [torch.zeros(1, dtype=torch.uint8) for _ in range(copies)]
    plain: list[Any] = msgspec.msgpack.decode(messages.encode(hostile.load(state).offer))
    found = hostile.columns(plain[hostile.MANIFEST])
    found[hostile.STORAGE_NBYTES] = [nbytes] * copies
    found[hostile.NDIM] = [len(sizes)] * copies
    found[hostile.SIZES], found[hostile.STRIDES] = sizes * copies, strides * copies
    plain[hostile.MANIFEST] = hostile.with_columns(plain[hostile.MANIFEST], found)
    return plain


def with_leaf(name: str, meta: Any, parts: list[tuple[str, list[int], list[int]]]) -> list[Any]:
    """An offer of one composite leaf with parts of these dtypes, sizes and strides, each in 64 bytes of its own."""
    plain = one_tensor(64, [1], [1])
    wire = plain[hostile.MANIFEST]
    wire[hostile.KINDS] = bytes([Leaf.COMPOSITE])
    wire[hostile.DETAILS] = [[name, 0, meta, [0] * len(parts)]]
    wire[hostile.DTYPES_AT] = [dtype for dtype, _, _ in parts]
    count = len(parts)
    plain[hostile.MANIFEST] = hostile.with_columns(
        wire,
        {
            hostile.STORAGE_NBYTES: [64] * count,
            hostile.STORAGE_DEVICE: [0] * count,
            hostile.STORAGE: list(range(count)),
            hostile.DTYPE: list(range(count)),
            hostile.FLAGS: [0] * count,
            hostile.NDIM: [len(sizes) for _, sizes, _ in parts],
            hostile.OFFSET: [0] * count,
            hostile.SIZES: [n for _, sizes, _ in parts for n in sizes],
            hostile.STRIDES: [n for _, _, strides in parts for n in strides],
        },
    )
    return plain


def with_tree(tree: Any, kinds: bytes, details: list[Any]) -> list[Any]:
    plain = one_tensor(64, [1], [1])
    plain[hostile.MANIFEST][hostile.TREE : hostile.SHARED] = [tree, kinds, details]
    return plain


def deep(levels: int) -> Any:
    node: Any = 0
    for _ in range(levels):
        node = [4, None, [], [node]]
    return node


def nested(levels: int) -> Any:
    value: Any = 0
    for _ in range(levels):
        value = [6, value]
    return value


BOMBS: dict[str, Callable[[], Any]] = {
    "elements that overlap": lambda: one_tensor(CAP, [1 << 19, 1 << 18], [1, 1]),
    "elements that overlap, more than there is memory": lambda: one_tensor(CAP, [1 << 19, 1 << 14, 1 << 14], [1, 1, 1]),
    "many runs of memory": lambda: one_tensor(CAP // 4, [256, 250], [1009, 7], copies=4),
    "many storages": lambda: one_tensor(1 << 40, [1], [1], copies=50),
    "a storage of all addresses": lambda: one_tensor((1 << 63) - 1, [1], [1]),
    "a repeated element": lambda: one_tensor(64, [1 << 50], [0]),
    "repeated offsets": lambda: with_leaf(
        "jagged", [1, False, None, None], [("float32", [8, 2], [2, 1]), ("int64", [1 << 33], [0])]
    ),
    "repeated lengths": lambda: with_leaf(
        "jagged", [1, True, None, None], [("float32", [8, 2], [2, 1]), ("int64", [2], [1]), ("int64", [1 << 33], [0])]
    ),
    "repeated indices": lambda: with_leaf(
        "coo", [[4, 4], False], [("int64", [2, 1 << 30], [0, 0]), ("float32", [1 << 30], [0])]
    ),
    "repeated compressed indices": lambda: with_leaf(
        "compressed",
        ["torch.sparse_csr", [1 << 30, 4]],
        [("int64", [(1 << 30) + 1], [0]), ("int64", [0], [1]), ("float32", [0], [1])],
    ),
    "a sparse tensor of all addresses": lambda: with_leaf(
        "coo", [[1 << 62, 1], True], [("int64", [2, 1], [1, 1]), ("float32", [1], [1])]
    ),
    "a large array of nothing": lambda: with_leaf("array", ["<f8", [0, 1 << 40], "C"], [("uint8", [0], [1])]),
    "a large element of nothing": lambda: with_leaf("array", ["|V2147483647", [0], "C"], [("uint8", [0], [1])]),
    "an array of subarrays": lambda: with_leaf("array", [[["a", "<i4", [1 << 30]]], [0], "C"], [("uint8", [0], [1])]),
    "long paths to many leaves": lambda: with_tree(
        [1, None, ["k" * 100_000], [[4, None, [], [0] * 5001]]],
        bytes([Leaf.VALUE] * 5000 + [Leaf.COMPOSITE]),
        [None] * 5000 + [["object", 0, "a:b", [0]]],
    ),
    "deep nesting": lambda: with_tree(deep(5000), bytes([Leaf.TENSOR]), []),
    "deep values": lambda: with_tree(0, bytes([Leaf.VALUE]), [nested(900)]),
    "many dimensions of a mesh": lambda: with_leaf("dtensor", [[3], [1], [["R"]] * 60_000, 0], [("float32", [3], [1])]),
}


@pytest.fixture(scope="module")
def warm_corpus(corpus: list[Member]) -> list[Member]:
    warm_up(corpus)
    return corpus


@pytest.mark.parametrize("name", BOMBS)
def test_small_messages_demand_little(name: str, warm_corpus: list[Member]) -> None:
    plain = BOMBS[name]()
    if name == "many dimensions of a mesh":
        plain[hostile.MANIFEST][hostile.SHARED] = [["cpu", [1] * 60_000, [0], None]]
    try:
        body = hostile.resealed(msgspec.msgpack.encode(plain))
    except RecursionError:
        body = b"\x94\x04\xc0\x90\x91" * 5000 + b"\x00"
    for trace in (False, True):  # Tracing takes time of its own.
        wire = Wire(random.Random(0), warm_corpus[0], [body])
        wire._filling = "zero"
        length = 0
        gc.collect()
        with little_memory(), hostile.patched_accept(wire):
            began = time.monotonic()
            if trace:
                tracemalloc.start()
            try:
                hostile.gather([wire], Request())
            except TransfuseError as error:
                refuse_out_of_memory(error)
                length = len(str(error))
            finally:
                seconds, peak = time.monotonic() - began, tracemalloc.get_traced_memory()[1]
                tracemalloc.stop()
        assert peak < 64 * len(body) + 16 * MIB, f"{len(body)} bytes of message, {peak} bytes of memory"
        assert trace or seconds < 2, f"{seconds:.1f} s"
        assert length < 20_000, f"an error of {length} characters"


def test_offsets_that_wrap_are_refused() -> None:
    """Each of these steps is positive in 64 bits, and none is where the values are."""
    offsets = torch.tensor([0, (1 << 63) - 1, 20 - (1 << 63), 5])
    with pytest.raises(ValueError, match="nested tensor"):
        JaggedCodec().close([1, False, None, None], [torch.zeros(8, 1), offsets], Room())


@pytest.mark.parametrize(
    "cls", ["torch.nested._internal.nested_tensor:NestedTensor", "torch.distributed.tensor:DTensor"]
)
def test_tensors_with_a_codec_do_not_pass_as_wrappers(cls: str) -> None:
    """torch allows these classes by itself; the wrapper codec would build them without their own codec's checks."""
    context = values.encode({"requires_grad": False, "ragged_idx": 1})
    meta = [cls, ["_values", "_offsets"], context, [2, 4, 1], [4, 1, 1]]
    inner = [torch.zeros(8, 1), torch.tensor([0, 1 << 40, 8])]
    with pytest.raises((ValueError, CannotCarry)):
        WrapperCodec().promise(meta, 2, Room())
    with pytest.raises((ValueError, CannotCarry)):
        WrapperCodec().close(meta, inner, Room())


def test_text_that_does_not_exist_is_refused() -> None:
    """Python makes strings of whatever a numpy array of text holds."""
    data = torch.full((16,), 0xFF, dtype=torch.uint8)
    with pytest.raises(ValueError, match="text"):
        ArrayCodec().close(["<U4", [1], "C"], [data], Room())


@pytest.mark.parametrize("descr", ["(3,4)f4", "i4,f8", "9999999999f8", "float64", "T", [["a", "(2,)i4"]]])
def test_numpy_parses_no_language_of_a_peer(descr: Any) -> None:
    with pytest.raises(ValueError, match="numpy"):
        ArrayCodec().promise([descr, [0], "C"], 1, Room())


def accept_alone(offer: messages.Offer) -> accepting.Accepted:
    described = accepting.read_description(offer, LIMITS, PEER)
    choice = agreement.choose([PEER], {PEER: offer}, {offer.likeness: described}, Request())
    context = hostile.context((PEER,), LIMITS)
    return accepting.accept(choice.cohorts, choice.offers, offer, Request(), context, offer.parcel_bytes)


def test_names_of_classes_ask_them_nothing(corpus: list[Member]) -> None:
    """A class that answers with code is found, and refused, without being asked."""
    sprung = hostile.sprung
    for cls in ("TrappedTuple", "TrappedTensor"):
        name = f"hostile:{cls}"
        offers = [
            with_tree([6, name, [], [0]], bytes([Leaf.TENSOR]), []),
            with_tree([8, [name, None], [".x"], [0]], bytes([Leaf.TENSOR]), []),
            with_tree([2, [60, name, "x"], [], [0]], bytes([Leaf.TENSOR]), []),
            with_tree([2, [61, name, [9]], [], [0]], bytes([Leaf.TENSOR]), []),
            with_tree([2, [62, name], [], [0]], bytes([Leaf.TENSOR]), []),
            with_leaf("wrapper", [name, ["a"], None, [1], [1]], [("uint8", [1], [1])]),
        ]
        for plain in offers:
            sprung.clear()
            offer = accepting.read_offer(hostile.resealed(msgspec.msgpack.encode(plain)), LIMITS, PEER)
            with pytest.raises(TransfuseError):
                accept_alone(offer)
            assert not sprung, f"{plain[hostile.MANIFEST][:3]} asked for {sprung}"


@pytest.mark.parametrize("key", [[1, b"\x01" * 4000], [2, b"\xed\xa0\x80"]], ids=["digits", "surrogate"])
def test_odd_keys_do_not_hide_the_error(key: Any, corpus: list[Member]) -> None:
    """Keys that cannot be printed or sent as they are, on the path of a leaf that fails after it was written."""
    source_, target = {"a": torch.arange(4.0)}, {values.decode(key): torch.zeros(4)}
    plain = msgspec.msgpack.decode(messages.encode(hostile.load(source_).offer))
    plain[hostile.MANIFEST][hostile.TREE][2] = [key]

    class Liar(Wire):
        def post_recv_sent(self, digests: int) -> Any:
            self._digests = [0] * digests
            return super().post_recv_sent(digests)

    wire = Liar(random.Random(0), corpus[0], [hostile.resealed(msgspec.msgpack.encode(plain))])
    with hostile.patched_accept(wire), pytest.raises(CorruptData) as caught:
        hostile.gather([wire], Request(target=target))
    assert len(caught.value.torn) == 1
    str(caught.value)


def test_a_refusal_may_quote_anything(corpus: list[Member]) -> None:
    line = Line(Group(hostile.Nowhere(), CPU), PEER, 1.0, LIMITS)
    line.refuse(ValueError("a lone \ud800"))


# ------------------------------------------------------------------------------- memory, links, rates and ranges


class Stuck(TransfuseError):
    """A receive that would not have ended."""


class Received:
    """One receive of an honest member in place, but for what the source says about its memory, its rate or a chain."""

    def __init__(
        self,
        member: Member,
        *,
        memory: Any = None,
        rate: Any = None,
        agreed: Any = None,
        seconds: float = 10,
        **options: Any,
    ) -> None:
        plain = member.plain if memory is None else hostile.put(member.plain, (hostile.ROUTES,), hostile.routed(memory))
        plain = plain if rate is None else hostile.put(plain, (hostile.RATE,), rate)
        said = {} if agreed is None else {Message.WANT: msgspec.msgpack.encode(agreed)}
        wire = Wire(random.Random(0), member, [msgspec.msgpack.encode(plain)], said=said, relays=True)
        wire._filling = "honest"
        self.report, caller = Report("receive", (PEER,)), Caller()
        self.error: TransfuseError | None = None
        alarm = threading.Timer(seconds, caller.stop, [Stuck(f"{seconds} s")])
        alarm.start()
        try:
            with hostile.patched_accept(wire), torch.no_grad():
                hostile.gather(
                    [wire], Request(target=member.target.state, options=Options(**options)), caller, self.report
                )
        except TransfuseError as error:
            self.error = error
        finally:
            alarm.cancel()
        self.arrived = member.target.unchanged()
        self.memory = member.target.memory.copy()
        assert member.target.intact()
        assert Ground.get().intact()
        member.target.restore()

    def refused(self, text: str) -> None:
        assert isinstance(self.error, ProtocolError), repr(self.error)
        assert re.search(text, str(self.error)), str(self.error)
        assert self.error.rank == PEER
        assert self.arrived  # Nothing was written.

    def came_by(self, route: str) -> None:
        assert self.error is None, repr(self.error)
        assert self.report.route == route
        assert self.arrived


@pytest.fixture(scope="module")
def large(corpus: list[Member]) -> Member:
    return next(m for m in corpus if m.name == "large")


def described(member: Member, **changes: Any) -> Any:
    """What a member's offer says about its memory, with changes; ``storages`` is a function of their addresses."""
    memory = Entry.decode(member.cargo.offer.routes["memory"])
    found = np.frombuffer(memory.storages, dtype="<u8").tolist()
    if "storages" in changes:
        changed = changes["storages"](found)
        changes["storages"] = changed if isinstance(changed, bytes) else np.array(changed, dtype="<u8").tobytes()
    return [{**msgspec.structs.asdict(memory), **changes}[name] for name in Entry.__struct_fields__]


#: None of these is where the source's bytes are: they come over the group.
ELSEWHERE: dict[str, Callable[[], dict[str, Any]]] = {
    "a process that does not exist": lambda: {"pid": hostile.ABSENT_PID},
    "another token": lambda: {"token": b"x" * 32},
    "a token of zeros": lambda: {"token": bytes(32)},
    "a token at 0": lambda: {"token_address": 0},
    "a token beyond user space": lambda: {"token_address": 1 << 61},
    "a token that may not be read": lambda: {"token_address": Ground.get().hole},
    "a token that ends where nothing may be read": lambda: {"token_address": Ground.get().hole - 8},
    "storages at 0": lambda: {"storages": lambda found: [0 for _ in found]},
    "storages at 1": lambda: {"storages": lambda found: [1 for _ in found]},
    "storages that may not be read": lambda: {"storages": lambda found: [Ground.get().hole for _ in found]},
    "storages beyond user space": lambda: {"storages": lambda found: [(1 << 62) - 1 for _ in found]},
}

#: None of these can be meant.
NO_MEMORY: dict[str, dict[str, Any]] = {
    "process 0": {"pid": 0},
    "a negative process": {"pid": -1},
    "a process beyond 31 bits": {"pid": 1 << 31},
    "a short token": {"token": b"x"},
    "a long token": {"token": b"x" * 33},
    "a negative address": {"token_address": -1},
    "an impossible address": {"token_address": 1 << 63},
    "an impossible storage": {"storages": lambda found: [1 << 62] * len(found)},
    "a storage at the end of all addresses": {"storages": lambda found: [(1 << 64) - 1] * len(found)},
    "no storages": {"storages": lambda found: []},
    "a storage too many": {"storages": lambda found: [*found, 0]},
    "half an address": {"storages": lambda found: bytes(8 * len(found) - 4)},
}


@pytest.mark.parametrize("name", ELSEWHERE)
def test_what_cannot_be_read_comes_over_the_group(name: str, large: Member) -> None:
    memory = described(large, **ELSEWHERE[name]())
    for verify in (None, True):
        Received(large, memory=memory, verify=verify).came_by("group")
    Received(large, memory=memory, same_host=False).came_by("group")


@pytest.mark.parametrize("name", NO_MEMORY)
def test_impossible_memory_is_refused(name: str, large: Member) -> None:
    memory = described(large, **NO_MEMORY[name])
    Received(large, memory=memory).refused("malformed description of memory|impossible address|multiple of element")
    Received(large, memory=memory, same_host=False).came_by("group")


@pytest.mark.parametrize("verify", [None, True])
def test_single_parcels_that_cannot_be_read_come_over_the_group(verify: bool | None, large: Member) -> None:
    for bad in (0, 1, 4096, Ground.get().hole, Ground.get().hole - 8):
        for number in range(len(large.windows)):
            memory = described(large, storages=lambda found, at=bad, n=number: [*found[:n], at, *found[n + 1 :]])
            Received(large, memory=memory, verify=verify).came_by("memory+group")


def test_other_memory_lands_in_the_target_only() -> None:
    """A source may name whatever the receiver may read. It gets nothing of that, and nothing else is written."""
    one, ground = hostile.member("one", {"a": torch.arange(1000.0)}), Ground.get()
    own_token = {"token_address": ground.zeros, "token": bytes(32)}
    memory = described(one, storages=lambda found: [ground.secret for _ in found], **own_token)
    received = Received(one, memory=memory)
    assert received.error is None
    assert received.report.route == "memory"
    landed = received.memory[one.target.ZONE :][:4000]
    assert np.array_equal(landed, ground.memory[ground.secret - ground.zeros :][:4000])
    Received(one, memory=memory, same_host=False).came_by("group")


def test_memory_that_changes_while_it_is_read_is_an_error() -> None:
    """Here because it is the target's own, a little further on: what lands changes what is read."""
    one = hostile.member("one", {"a": torch.arange(1000.0)})
    inside = one.target.memory.ctypes.data + one.target.ZONE
    received = Received(one, memory=described(one, storages=lambda found: [inside + 4 for _ in found]), verify=True)
    assert isinstance(received.error, SourceMutated), repr(received.error)
    assert received.error.leaves == ("['a']",)
    assert received.error.torn == ("['a']",)
    assert not received.error.received


def test_a_token_is_looked_for_in_the_process_that_was_named() -> None:
    with MemoryLease() as lease, subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as other:
        memory = lease.describe(np.zeros(1, dtype=np.int64))
        Reader(memory, 1).close()
        with pytest.raises(Unreadable):
            Reader(msgspec.structs.replace(memory, pid=other.pid), 1)
        assert other.stdin is not None
        other.stdin.close()


@pytest.mark.parametrize("rate", [0.0, -0.0, -1.0, float("nan"), float("inf"), -float("inf")])
def test_impossible_rates_are_refused(rate: float, large: Member) -> None:
    for same_host in (True, False):
        Received(large, rate=rate, same_host=same_host).refused("malformed offer: an impossible rate")


@pytest.mark.parametrize("rate", [5e-324, 1e-300, 1e-9, 1.0])
def test_rates_are_not_waited_for_beyond_the_timeout(rate: float, large: Member) -> None:
    """Who reads waits by its own clock: a source that never lets it go on has to be noticed all the same."""
    began = time.monotonic()
    for same_host in (True, False):
        Received(large, rate=rate, same_host=same_host).came_by("group")
    assert time.monotonic() - began < 5


def test_any_other_rate_is_kept(large: Member) -> None:
    Received(large, rate=1e308).came_by("memory")


def link(rank: int = 1, tag: int = FIRST_LINK_TAG, transfer: int = 7) -> list[int]:
    return [rank, tag, transfer]


#: Neighbours that cannot be: the group has ranks 0 (this one) to 7.
IMPOSSIBLE_LINKS = {
    "rank -1": link(-1),
    "itself": link(0),
    "rank 8": link(8),
    "a far rank": link(1_000_000),  # gloo ends the process
    "a rank beyond 32 bits": link(1 << 32),
    "a rank beyond 63 bits": link((1 << 64) - 1),
    "the tag of offers": link(tag=OFFER_TAG),
    "the tag of a transfer": link(tag=FIRST_TAG),
    "the tag before": link(tag=FIRST_LINK_TAG - 1),
    "the tag after": link(tag=FIRST_LINK_TAG + LINK_TAGS),
    "a negative tag": link(tag=-1),
    "a tag beyond 32 bits": link(tag=1 << 32),
}


@pytest.mark.parametrize("name", IMPOSSIBLE_LINKS)
def test_impossible_links_are_refused(name: str, large: Member) -> None:
    for agreed in ([IMPOSSIBLE_LINKS[name], None, 0.1], [None, IMPOSSIBLE_LINKS[name], 0.1]):
        Received(large, agreed=agreed, same_host=False).refused("agreed to a chain")


@pytest.mark.parametrize("agreed", [[link(), None, 0.1], [None, link(), 0.1], [link(), link(), 0.1]])
def test_links_that_were_not_wanted_are_refused(agreed: Any, large: Member) -> None:
    Received(large, agreed=agreed, same_host=False, relay=False).refused("agreed to a chain that was not wanted")


@pytest.mark.parametrize("patience", [-1.0, -1e300, float("nan"), float("inf"), -float("inf")])
def test_impossible_patience_is_refused(patience: float, large: Member) -> None:
    Received(large, agreed=[link(), None, patience], same_host=False).refused("agreed to a chain")


@pytest.mark.parametrize("patience", [0.0, 5e-324, 0.1, 1e9, 1e10, 1e300])
def test_neighbours_that_talk_nonsense_are_left(patience: float, large: Member) -> None:
    """Whatever is received on a link here is what the memory held before."""
    for agreed in ([link(), None, patience], [None, link(), patience], [link(1), link(2), patience]):
        Received(large, agreed=agreed, same_host=False).came_by("group")


@pytest.mark.parametrize("read_bytes", [-1, -(1 << 63), 1 << 20, 1 << 62, (1 << 64) - 1])
@pytest.mark.parametrize("first", [True, False], ids=["instead of a want", "at the end"])
def test_impossible_numbers_of_bytes_read_are_not_counted(read_bytes: int, first: bool, large: Member) -> None:
    body, cut = want(large)
    verdict = (Message.VERDICT, msgspec.msgpack.encode([{"memory": read_bytes}]))
    answers: list[Any] = [verdict] if first else [body, verdict]
    progress, report = Progress(), Report("send", (PEER,))
    wire = Wire(random.Random(0), large, answers)
    source.serve(wire, 1, FIRST_TAG, large.cargo, caller=Caller(), progress=progress, report=report)
    assert report.read_bytes == 0
    assert report.bytes == (0 if first else cut.total_bytes)
    assert progress.bytes <= cut.total_bytes


def test_signs_of_life_do_not_count_beyond_what_there_is(large: Member) -> None:
    progress, total = Progress(), large.cargo.total_bytes
    shown: list[int] = []
    notes = [0, 5, 3, total, total + 1, (1 << 63) - 1, 1 << 63, (1 << 64) - 1]
    wire = Wire(random.Random(0), large, [*notes, (Message.VERDICT, msgspec.msgpack.encode([{"memory": total}]))])

    class Shown(Caller):
        def tick(self) -> None:
            shown.append(progress.bytes)

    source.serve(wire, 1, FIRST_TAG, large.cargo, caller=Shown(), progress=progress, report=Report("send", (PEER,)))
    assert shown == [0, 5, 5, *[total] * 5]


@pytest.mark.parametrize("host", [0, -(1 << 63), (1 << 64) - 1])
def test_a_chain_of_one_is_no_chain(host: int, large: Member) -> None:
    """The others are not waited for longer than a chain is worth."""
    body, _ = want(large, digests=True, relay=True, host=host)
    told: list[Agreed] = []

    class Told(Wire):
        def send(self, kind: Message, body: Any = b"", *, note: int = 0, tag: int | None = None) -> None:
            if kind is Message.AGREED:
                told.append(messages.decode(body, Agreed))
            super().send(kind, body, note=note, tag=tag)

    chains = Chains([PEER, PEER + 1], large.cargo.total_bytes, 1.0)
    began = time.monotonic()
    wire = Told(random.Random(0), large, [body, (Message.VERDICT, msgspec.msgpack.encode([{}]))])
    cargo = dataclasses.replace(large.cargo, chains=chains)
    source.serve(wire, 1, FIRST_TAG, cargo, caller=Caller(), progress=Progress(), report=Report("send", (PEER,)))
    assert time.monotonic() - began < 2
    assert [(agreed.upstream, agreed.downstream) for agreed in told] == [(None, None)]
    late, _ = chains.join(PEER + 1, None, host)
    assert (late.upstream, late.downstream) == (None, None)


# ---------------------------------------------------------------------------------------------- whole conversations

HONEST_SECONDS, HOSTILE_SECONDS = 3.0, 30.0

Bytes = Callable[[bytes], bytes]


class Liar(Line):
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
        self._message, self._head, self._record, self._heard, self._said = message, head, record, heard, said
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

    def expect(self, *kinds: Message, tag: int | None = None) -> tuple[messages.Header, bytearray]:
        header, body = super().expect(*kinds, tag=tag)
        if header.kind is self._deaf:
            assert self._ended is not None
            self._ended.wait()
        return header, body

    def post_send(self, tensor: torch.Tensor, tag: int | None = None) -> Posted:
        data = tensor.numpy().tobytes() if tensor.numel() < 1000 else b""
        if data[:4] == messages.MAGIC:
            change = self._head if data[6] != Message.SENT else self._record
            tensor = torch.frombuffer(bytearray(change(data)), dtype=torch.uint8)
        return super().post_send(tensor, tag)

    def post_sent(self, intent: Intent, digests: list[int]) -> Posted:
        return super().post_sent(intent, [self._said(digest) for digest in digests])

    def read_sent(self, tensor: torch.Tensor) -> tuple[Intent, Sequence[int] | None]:
        intent, digests = super().read_sent(tensor)
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


def in_turn(*changes: Any) -> Callable[[Message, bytes], tuple[Message, bytes]]:
    """One change for the first message, another for the second, and so on; the last for all others."""
    numbers = itertools.count()
    return lambda kind, body: changes[min(next(numbers), len(changes) - 1)](kind, body)


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
    """What a liar does, and the error that the honest end raises about it."""

    def __init__(self, text: str, error: type[PeerError] = ProtocolError, **how: Any) -> None:
        self.text, self.error, self.how = text, error, how

    def check(self, error: BaseException | None, rank: int) -> None:
        assert isinstance(error, self.error), repr(error)
        assert error.rank == rank
        assert re.search(f"rank {rank}.*{self.text}", str(error)), str(error)


def refusing(kind: str) -> Callable[[Message, bytes], tuple[Message, bytes]]:
    """A refusal of this kind instead of what the receiver is waiting for."""
    return instead(Message.AGREED, [kind, "why not"], Message.REFUSAL)


#: A source offers, agrees to the want, and agrees that nothing has changed: so many of its messages are honest first.
OFFERED, AGREED_TO = 1, 2

SOURCE_LIES = {
    "magic": Lie("while waiting for the offer: not a transfuse message", head=lambda d: b"HTTP" + d[4:]),
    "version": Lie("wire version 9", head=resealed(version=9)),
    "the version before": Lie(
        f"wire version {messages.WIRE_VERSION - 1}", head=resealed(version=messages.WIRE_VERSION - 1)
    ),
    "kind": Lie("unknown kind of message 99", head=resealed(kind=99)),
    "length": Lie("announced a message of 1099511627776 bytes", head=resealed(length=1 << 40)),
    "tag": Lie("sent an offer with an impossible tag 5", head=resealed(note=5)),
    "digest": Lie("while waiting for the offer: .*damaged", head=damaged),
    **{
        f"{kind.name} for an offer": Lie(
            f"sent {kind.name} where OFFER was due", message=instead(Message.OFFER, [[]], kind)
        )
        for kind in Message
        if kind not in (Message.OFFER, Message.REFUSAL, Message.WORKING)
    },
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
    "a place in no mesh": Lie(
        "a place in a mesh that was not described", message=altered(Message.OFFER, messages.Offer, coordinates=[[0]])
    ),
    "places that are no numbers": Lie(
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
    "a record of neither intent": Lie("where a record was due", record=resealed(note=2)),
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
            f"sent {kind.name} where WANT or DESCRIBE or CHECK or VERDICT was", message=instead(Message.WANT, b"", kind)
        )
        for kind in (Message.OFFER, Message.GOT, Message.AGREED, Message.MORE, Message.COMPARE, Message.DIGESTS)
    },
    "fingerprint": wanting("derived other parcels", fingerprint=1),
    "absent storages": wanting("wants tensors that were not", apart=[9]),
    "negative parts": wanting("wants tensors that were not", apart=[0], parts=[-1]),
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
        "sent WANT where MORE or COMPARE or CHECK or VERDICT was", message=instead(Message.CHECK, [], Message.WANT)
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
    "compares digests of its own": asking("malformed more", Message.COMPARE, [[0, 1], bytes(16)]),
    "compares garbage": asking("malformed more", Message.COMPARE, b"\xc1"),
    "a description too late": asking("sent DESCRIBE where MORE or COMPARE or CHECK", Message.DESCRIBE, b""),
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


def new_transport(pg: Any, target: object = None, seconds: float = HONEST_SECONDS) -> PGTransport:
    """Over the group: in these tests all ranks are one process, and could read each other's memory."""
    timeout, state_dict = datetime.timedelta(seconds=seconds), None if target is None else lambda: target
    return PGTransport(pg, timeout, CPU, state_dict, same_host=False)


@pytest.mark.parametrize("name", SOURCE_LIES)
def test_hostile_source(name: str) -> None:
    w = torch.zeros(1000)

    def lie(pg: Any, ended: threading.Event) -> None:
        cargo = new_transport(pg, seconds=1)._load(STATE, None, (1,), Leases(same_host=False))
        with (liar := Liar(pg, 1, ended=ended, **SOURCE_LIES[name].how)):
            source.serve(
                liar, 9, liar.group.new_tag(1), cargo, caller=Caller(), progress=Progress(), report=Report("send", (1,))
            )

    error = converse(lambda pg: new_transport(pg, {"w": w, "step": 0}).recv_checkpoint(0), lie, 1)
    SOURCE_LIES[name].check(error, 0)
    # What is torn is told; what is not torn is as it was.
    assert isinstance(error, PeerError)
    assert error.torn == ("['w']",) or not w.any()


def compare(**how: Any) -> tuple[BaseException | None, Report]:
    """Resume a receive of which one parcel of four has come, from a source that says what it likes about that one."""
    state, w = {"w": torch.arange(65536.0)}, torch.zeros(65536)
    kept = hostile.interrupted(random.Random(0), hostile.member("four", state), {"w": w}, bursts=1)
    assert kept is not None
    assert kept.landed.tolist() == [True, False, False, False]
    before, transports = w.clone(), []

    def honest(pg: Any) -> None:
        transports.append(new_transport(pg, {"w": w}))
        transports[0].recv_checkpoint(0, resume=kept)

    def lie(pg: Any, ended: threading.Event) -> None:
        cargo = new_transport(pg, seconds=1)._load(state, kept.step, (1,), Leases(same_host=False))
        with (liar := Liar(pg, 1, ended=ended, **how)):
            source.serve(
                liar, 9, liar.group.new_tag(1), cargo, caller=Caller(), progress=Progress(), report=Report("send", (1,))
            )

    error = converse(honest, lie, 1)
    assert transports[0].report is not None
    assert torch.equal(w, state["w"] if error is None else before)
    return error, transports[0].report


@pytest.mark.parametrize("name", COMPARING_LIES)
def test_hostile_comparison(name: str) -> None:
    error, _ = compare(**COMPARING_LIES[name].how)
    COMPARING_LIES[name].check(error, 0)
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


@pytest.mark.parametrize("kind", [Message.CHECK, Message.COMPARE, Message.DESCRIBE])
def test_questions_without_end_are_not_answered(kind: Message, large: Member) -> None:
    body, cut = want(large)
    question = {
        Message.CHECK: b"",
        Message.COMPARE: messages.encode(messages.More([0, len(cut)])),
        Message.DESCRIBE: b"",
    }[kind]
    told: collections.Counter[Message] = collections.Counter()

    class Told(Wire):
        def send(self, kind: Message, body: Any = b"", *, note: int = 0, tag: int | None = None) -> None:
            told[kind] += 1
            super(Wire, self).send(kind, body, note=note, tag=tag)

    wanted = [body] if kind is not Message.DESCRIBE else []
    wire = Told(random.Random(0), large, [*wanted, *[(kind, question)] * 1000])
    compares = kind is Message.COMPARE
    with pytest.raises(ProtocolError, match="compares the same again and again" if compares else "asks and asks"):
        source.serve(
            wire, 1, FIRST_TAG, large.cargo, caller=Caller(), progress=Progress(), report=Report("send", (PEER,))
        )
    assert told[Message.REFUSAL] == 1
    answers = told[Message.AGREED] + told[Message.DIGESTS] + told[Message.OFFER] - 1  # The offer itself.
    # A want is agreed to as well.
    assert answers == (LIMITS.max_repairs + 1 if compares else LIMITS.max_working_records)


@pytest.mark.parametrize("name", RECEIVER_LIES)
def test_hostile_receiver(name: str) -> None:
    def lie(pg: Any, ended: threading.Event) -> None:
        with Liar(pg, 0, ended=ended, **RECEIVER_LIES[name].how) as liar:
            hostile.gather([liar], Request())

    error = converse(lambda pg: new_transport(pg).send_checkpoint([1], STATE), lie, 0)
    assert isinstance(error, SendFailed), repr(error)
    RECEIVER_LIES[name].check(error.causes[1], 1)


@pytest.mark.parametrize("patience", [1e6, 1e300])
def test_patience_ends_with_the_timeout(patience: float) -> None:
    """The source says that a rank passes parcels on which knows nothing of it, and that this takes its time."""
    w, transports = torch.zeros(1000), {}

    def honest(pg: Any) -> None:
        transports[1] = new_transport(pg, {"w": w, "step": 0}, seconds=1.5)
        transports[1].recv_checkpoint(0)

    def lie(pg: Any, ended: threading.Event) -> None:
        cargo = new_transport(pg)._load(STATE, None, (1,), Leases(same_host=False))
        chain = hostile.Lined(Agreed(Link(0, FIRST_LINK_TAG, 7), None, patience))
        with Line(Group(pg, CPU), 1, 10.0, Limits()) as line:
            cargo = dataclasses.replace(cargo, chains=chain)
            source.serve(
                line, 9, line.group.new_tag(1), cargo, caller=Caller(), progress=Progress(), report=Report("send", (1,))
            )

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
@pytest.mark.parametrize("name", LINK_LIES)
def test_hostile_neighbour(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever one receiver does to its neighbour: the neighbour has everything in the end, from the source."""
    monkeypatch.setenv("TRANSFUSE_MIN_RELAY_BYTES", "1")
    monkeypatch.setattr(receiver, "this_host", lambda: 1)  # The receivers are on another host than the source.
    liar, how = LINK_LIES[name]
    state = {"w": torch.arange(100_000.0)}
    lied: list[int] = []

    with Ranks(3) as ranks:
        groups = ranks.pgs

        def new_line(group: Group, peer: int, timeout: float, limits: Limits) -> Line:
            if group.pg is not groups[liar]:
                return Line(group, peer, timeout, limits)
            lied.append(peer)
            return Liar(group.pg, peer, timeout=timeout, **how)

        def one(rank: int, pg: Any) -> Any:
            # A chain waits for its members for half the source's timeout at most.
            transport = new_transport(pg, seconds=HONEST_SECONDS * (1 if rank == liar else 2))
            began = time.monotonic()
            try:
                return transport.recv_checkpoint(0) if rank else transport.send_checkpoint([1, 2], state)
            finally:
                assert time.monotonic() - began < 2 * HONEST_SECONDS + 1

        with mock.patch.object(relay, "Line", new_line):
            sent, *received = ranks.outcomes(one)
    honest = received[(3 - liar) - 1]
    assert lied == [3 - liar]
    assert honest.error is None, repr(honest.error)
    assert torch.equal(honest.get()["w"], state["w"])
    assert sent.error is None or list(sent.error.causes) == [liar], repr(sent.error)  # type: ignore[attr-defined]


@pytest.mark.parametrize("honest_rank", [0, 1])
def test_silent_peer(honest_rank: int) -> None:
    """It connects, and says nothing."""

    def honest(pg: Any) -> None:
        transport = new_transport(pg)
        transport.send_checkpoint([1], STATE) if honest_rank == 0 else transport.recv_checkpoint(0)

    error = converse(honest, lambda pg, ended: ended.wait(), honest_rank)
    cause = error.causes[1] if isinstance(error, SendFailed) else error
    assert isinstance(cause, PeerTimeout), repr(cause)
    assert f"rank {1 - honest_rank} timed out" in str(cause)


def disagree(rank: int) -> Any:
    """Two honest ends of versions that cut a state into different parcels."""
    transport = new_transport(dist.group.WORLD)
    if rank == 0:
        return transport.send_checkpoint([1], STATE)
    with mock.patch.object(parcels, "fingerprint", return_value=1):
        return transport.recv_checkpoint(0)


def test_disagreement_over_parcels_ends_in_words() -> None:
    """In processes of their own: gloo ends a process that gets a longer message than it has posted a receive for."""
    with Fleet(2) as fleet:
        fleet.start(disagree)
        sent, received = fleet.outcomes()
    assert isinstance(sent.error, SendFailed), sent
    assert "rank 1 derived other parcels" in str(sent.error.causes[1])
    assert isinstance(received.error, PeerRefused), received
    assert "derived other parcels" in str(received.error)
