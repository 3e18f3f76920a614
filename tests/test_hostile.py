"""Hostile bytes: whatever a peer says, an honest end raises an error of the library, or carries on in bounds.

The bulk is a seeded loop, not hypothesis: 20,000 cases in the ordinary run. A failure names its seed and case;
``TRANSFUSE_HOSTILE_SEED=<seed> TRANSFUSE_HOSTILE_CASE=<case>`` runs that case alone.
"""

from __future__ import annotations

import collections
import contextlib
import os
import pathlib
import random
import resource
import time
import tracemalloc
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest
import torch

import hostile
from hostile import CAP, CPU, LIMITS, PEER, Audit, Member, Wire
from transfuse import messages, parcels, plan, receiver, source
from transfuse.errors import TransfuseError
from transfuse.limits import MIB
from transfuse.messages import Message
from transfuse.progress import Progress
from transfuse.receiver import Accepted, Wishes
from transfuse.report import Report
from transfuse.routes.group import FIRST_TAG, Group, Line
from transfuse.talks import Caller

pytestmark = [
    pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental:UserWarning"),
    pytest.mark.filterwarnings("ignore:Sparse .* tensor support is in beta state:UserWarning"),
    pytest.mark.filterwarnings("ignore:Sparse invariant checks are implicitly disabled:UserWarning"),
    pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype stage:UserWarning"),
]

SEED = int(os.environ.get("TRANSFUSE_HOSTILE_SEED", "20260801"))
ONLY = os.environ.get("TRANSFUSE_HOSTILE_CASE")
#: Memory beyond what the process has that a case may ask for: what a hostile number asks for is refused beyond doubt.
HEADROOM = 512 * MIB

OFFERS, WANTS, VERDICTS, REFUSALS, STREAMS, RECORDS = 17_000, 1500, 700, 300, 1000, 500


@pytest.fixture(scope="module")
def corpus() -> list[Member]:
    with contextlib.ExitStack() as stack:
        stack.enter_context(pytest.warns() if False else contextlib.nullcontext())
        return hostile.corpus()


# --------------------------------------------------------------------------------------------------------- one case


def accept_offer(rng: random.Random, corpus: list[Member]) -> str:
    """One forged offer, through the whole of a receive."""
    member = rng.choice(corpus)
    body = hostile.mutate_offer(rng, member, corpus)
    mode = rng.choice(["fresh", "fresh", "in place", "in place", "atomic", "strict"])
    target = None
    if mode != "fresh":
        target = member.target if rng.random() < 0.9 else rng.choice(corpus).target
    wishes = Wishes(
        step=rng.choice([None, None, None, 4]),
        target=None if target is None else target.state,
        verify=rng.choice([None, None, False]),
        strict=mode == "strict",
        atomic=mode == "atomic",
        weights_only_objects=rng.random() < 0.3,
    )
    wire = Wire(rng, member, [body])
    result: list[Any] = []
    try:
        with patched_accept(wire), torch.no_grad():
            receiver.receive(wire, wishes, Caller(), Progress(), Report("receive", (PEER,)), result)
        outcome = "state"
    except TransfuseError as error:
        str(error)
        refuse_out_of_memory(error)
        outcome = "too much" if isinstance(error, hostile.TooMuch) else type(error).__name__
    if target is not None:
        assert target.intact(), "memory outside the target's elements was written"
        if outcome != "state" and (wire.accepted is None or mode == "atomic"):
            assert target.unchanged(), f"{outcome}, but the target was written"
    hostile.touch(result)
    if target is not None:
        target.restore()
    return f"{mode}: {outcome}"


@contextlib.contextmanager
def patched_accept(wire: Wire) -> Iterator[None]:
    real = receiver.accept

    def accept(*args: Any) -> Accepted:
        accepted = real(*args)
        fresh = sum(storage.nbytes() for storage in accepted.landing._storages.values())
        assert fresh <= CAP, f"{fresh} bytes allocated"
        if accepted.cut.total_bytes > hostile.MAX_PLANNED:
            raise hostile.TooMuch("planned")
        wire.accepted = accepted
        return accepted

    with mock.patch.object(receiver, "accept", accept):
        yield


def refuse_out_of_memory(error: BaseException | None) -> None:
    """An allocation that failed was one that the message did not justify."""
    while error is not None:
        text = str(error).lower()
        assert not isinstance(error, MemoryError), f"out of memory: {error!r}"
        assert "allocate" not in text, f"out of memory: {error!r}"
        error = error.__cause__ or error.__context__


def serve_want(rng: random.Random, corpus: list[Member]) -> str:
    """One forged want, or an honest one and forged verdicts, through the whole of a send."""
    member = rng.choice(corpus)
    m = member.described.manifest
    apart = sorted(rng.sample(range(len(m.storages)), rng.randrange(min(len(m.storages), 3) + 1)))
    parts = [p for p in range(len(m.parts)) if int(m.parts.storage[p]) in apart and rng.random() < 0.8]
    cut = parcels.cut(plan.lay_out(m, apart, parts), member.offer.parcel_bytes)
    honest = [parcels.fingerprint(cut), True, apart, parts]
    body = _lie(rng, honest) if rng.random() < 0.8 else hostile.msgspec.msgpack.encode(honest)
    return _serve(rng, member, [body, hostile.msgspec.msgpack.encode([[]])])


def serve_verdict(rng: random.Random, corpus: list[Member]) -> str:
    member = rng.choice(corpus)
    cut = parcels.cut(plan.lay_out(member.described.manifest), member.offer.parcel_bytes)
    want = hostile.msgspec.msgpack.encode([parcels.fingerprint(cut), False, [], []])
    verdicts = [_lie(rng, [sorted(rng.sample(range(len(cut)), rng.randrange(len(cut) + 1)))]) for _ in range(3)]
    return _serve(rng, member, [want, *verdicts])


def _lie(rng: random.Random, honest: Any) -> bytes:
    if rng.random() < 0.3:
        body = hostile.msgspec.msgpack.encode(honest)
        return hostile.mutate_bytes(rng, body, [body])
    plain = honest
    for _ in range(rng.choice([1, 1, 2])):
        plain = hostile.mutate_plain(rng, plain, hostile._paths(honest))
    return hostile.msgspec.msgpack.encode(plain)


def _serve(rng: random.Random, member: Member, answers: list[bytes]) -> str:
    wire = Wire(rng, member, answers)
    cargo = source.Cargo(member.described, member.offer, member.body)
    try:
        source.serve(wire, 1, FIRST_TAG, cargo, Caller(), Progress(), Report("send", (PEER,)))
    except TransfuseError as error:
        str(error)
        refuse_out_of_memory(error)
        return f"serve: {type(error).__name__}"
    return "serve: done"


def hear_refusal(rng: random.Random, corpus: list[Member]) -> str:
    body = _lie(rng, [rng.choice(["StepMismatch", "X" * 9999, ""]), "because"])
    stream = messages.seal(Message.REFUSAL, 1, FIRST_TAG, body) + body
    return _hear(Line(Group(hostile.Stream(stream), CPU), PEER, 1.0, LIMITS), Message.OFFER)


def hear_stream(rng: random.Random, corpus: list[Member]) -> str:
    """Headers and bodies, honest and not, as they come off the wire."""
    body = rng.choice([b"", b"x" * 50, rng.choice(corpus).body])
    kind = rng.choice(list(Message))
    head = bytearray(messages.seal(kind, rng.choice([1, 2]), FIRST_TAG, body))
    if rng.random() < 0.5:
        head = bytearray(hostile.mutate_bytes(rng, bytes(head), [bytes(head)])[: messages.HEADER_BYTES])
    if rng.random() < 0.3 and len(head) == messages.HEADER_BYTES:
        # A forger knows the digest too.
        fields = [messages.MAGIC, rng.choice([1, 1, 1, 0, 2, 65535]), rng.choice([*range(9), 65535])]
        fields += [rng.choice([0, 1, 1 << 63]), rng.choice([0, 1, FIRST_TAG, (1 << 64) - 1])]
        fields += [rng.choice([len(body), 1 << 20, 1 << 28, (1 << 28) + 1, 1 << 40, (1 << 64) - 1])]
        bare = messages._HEADER.pack(*fields, 0)[:-8]
        head = bytearray(bare + messages._digest(bare, body).to_bytes(8, "little"))
    line = Line(Group(hostile.Stream(bytes(head) + body), CPU), PEER, 1.0, LIMITS)
    if rng.random() < 0.5:
        line.transfer, line.tag = 1, FIRST_TAG
        return _hear(line, Message.WANT)
    return _hear(line, Message.OFFER)


def _hear(line: Line, kind: Message) -> str:
    try:
        line.expect(kind, tag=None if line.transfer else 0)
    except TransfuseError as error:
        str(error)
        refuse_out_of_memory(error)
        return f"hear: {type(error).__name__}"
    return "hear: message"


def read_record(rng: random.Random, corpus: list[Member]) -> str:
    body = rng.randbytes(8 * rng.randrange(4))
    record = messages.seal(rng.choice([Message.SENT, Message.SENT, Message.GOT]), 1, rng.choice([0, 1, 2]), body) + body
    if rng.random() < 0.7:
        mutated = hostile.mutate_bytes(rng, record, [record])
        record = mutated[: len(record)] + bytes(max(0, len(record) - len(mutated)))
    line = Line(Group(hostile.Nowhere(), CPU), PEER, 1.0, LIMITS)
    line.transfer, line.tag = 1, FIRST_TAG
    try:
        _, digests = line.read_sent(torch.frombuffer(bytearray(record), dtype=torch.uint8))
    except TransfuseError as error:
        str(error)
        return f"record: {type(error).__name__}"
    assert len(digests) == len(body) // 8
    return "record: read"


CASES: list[Callable[[random.Random, list[Member]], str]] = [
    *[accept_offer] * OFFERS,
    *[serve_want] * WANTS,
    *[serve_verdict] * VERDICTS,
    *[hear_refusal] * REFUSALS,
    *[hear_stream] * STREAMS,
    *[read_record] * RECORDS,
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
        try:
            if watch_memory:
                tracemalloc.start()
            with self._audit.listening():
                outcome = fn(rng, self.corpus)
            if watch_memory:
                peak, largest = tracemalloc.get_traced_memory()[1], max(len(m.body) for m in self.corpus)
                assert peak < 200 * largest + 4 * MIB, f"{peak} bytes of Python objects"
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
    """Honest and broken messages of all kinds once: what torch imports lazily is imported then."""
    for member in corpus:
        for target in (None, member.target.state):
            wire = Wire(random.Random(0), member, [member.body])
            wire._filling = "honest"
            result: list[Any] = []
            wishes = Wishes(target=target, weights_only_objects=True)
            try:
                with patched_accept(wire), torch.no_grad():
                    receiver.receive(wire, wishes, Caller(), Progress(), Report("receive", (PEER,)), result)
            finally:
                member.target.restore()
            hostile.touch(result)
    rng = random.Random(0)
    for case in (serve_want, serve_verdict, hear_refusal, hear_stream, read_record):
        for _ in range(20):
            case(rng, corpus)


def test_20_000_hostile_messages(corpus: list[Member]) -> None:
    warm_up(corpus)
    run = Run(corpus, SEED)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with little_memory():
        if ONLY is not None:
            run.one(int(ONLY))
            return
        for number in range(len(CASES)):
            run.one(number, watch_memory=number % 50 == 0)
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) // 1024
    assert grown < 256, f"{grown} MiB more resident memory"
    assert run.outcomes.total() >= 20_000
    for mode in ("fresh", "in place", "atomic", "strict"):
        assert run.outcomes[f"{mode}: state"] > 100, run.outcomes


@pytest.mark.soak
def test_hostile_messages_for_long(corpus: list[Member]) -> None:
    warm_up(corpus)
    seconds = float(os.environ.get("TRANSFUSE_SOAK_SECONDS", "600"))
    run, until = Run(corpus, int(os.environ.get("TRANSFUSE_HOSTILE_SEED", time.time_ns() % 10**9))), time.monotonic() + seconds
    number = 0
    with little_memory():
        while time.monotonic() < until:
            run.one(number, watch_memory=number % 50 == 0)
            number += 1
    assert number > 0
