"""One case of hostile bytes after the other: what is fed to an honest end, and what may come of it."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import itertools
import os
import pathlib
import random
import re
import resource
import subprocess
import sys
import threading
import tracemalloc
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest import mock

import msgspec
import numpy as np
import torch
import torch.distributed as dist
import xxhash

import hostile
from hostile import CAP, CPU, LIMITS, PEER, Audit, Ground, Member, Wire
from hostile_conversations import STATE, Liar, converse, new_transport, serve_by
from transfuse._errors import ProtocolError, ReceiveFailed, TransfuseError
from transfuse._limits import MIB
from transfuse._options import Options
from transfuse._plan import parcels
from transfuse._plan.regions import lay_out
from transfuse._progress import Progress
from transfuse._report import Report
from transfuse._session import offers, planning, source_choice
from transfuse._session.context import ReceiveRequest
from transfuse._session.threads import Caller
from transfuse._state.leaves.codec import MeshDescription
from transfuse._state.manifest import Leaf
from transfuse._wire import messages
from transfuse._wire.channel import Channel
from transfuse._wire.group import FIRST_LINK_TAG, FIRST_TAG, Group
from transfuse._wire.memory_route import MemoryEntry
from transfuse._wire.messages import Agreed, Intent, Message

SEED = int(os.environ.get("TRANSFUSE_HOSTILE_SEED", "20260801"))


ONLY = os.environ.get("TRANSFUSE_HOSTILE_CASE")


#: A file that holds the number of the case under way, for cases that end the process.
TRACE = os.environ.get("TRANSFUSE_HOSTILE_TRACE")


#: Memory beyond what the process has that a case may ask for: what a hostile number asks for is refused beyond doubt.
HEADROOM = 512 * MIB

OFFERS, WANTS, REQUESTS, REFUSALS, STREAMS, RECORDS, AGREEMENTS = 17_000, 1500, 1500, 300, 1000, 500, 300


COMPARISONS, PAIRS = 600, 400


# --------------------------------------------------------------------------------------------------------- one case


def accept_offer(rng: random.Random, corpus: list[Member]) -> str:
    """One forged offer, through the whole of a receive."""
    member = rng.choice(corpus)
    same_host = rng.random() < 0.4
    if same_host and rng.random() < 0.1:  # honest but for where its memory is
        member = max(corpus, key=lambda m: m.offered.total_bytes)
        memory = hostile.forge_memory(rng, member, len(member.manifest.storages))
        body = msgspec.msgpack.encode(hostile.put(member.plain, (hostile.ROUTES,), hostile.routed(memory)))
    else:
        body = hostile.mutate_offer(rng, member, corpus)
    mode = rng.choice(["fresh", "fresh", "in place", "in place", "atomic", "strict"])
    target = None
    if mode != "fresh":
        target = member.target if rng.random() < 0.9 else rng.choice(corpus).target
    request = ReceiveRequest(
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
    m, offer = member.manifest, member.offered.offer
    apart = sorted(rng.sample(range(len(m.storages)), rng.randrange(min(len(m.storages), 3) + 1)))
    tensors = [row for row in range(len(m.tensors)) if int(m.tensors.storage[row]) in apart and rng.random() < 0.8]
    size = rng.choice([offer.parcel_bytes, offer.parcel_bytes, LIMITS.min_parcel_bytes, LIMITS.min_parcel_bytes + 16])
    cut = parcels.cut(lay_out(m, apart, tensors), size)
    burst = rng.choice([offer.burst_bytes, offer.burst_bytes, 1, rng.randrange(1, offer.burst_bytes)])
    honest = [
        parcels.fingerprint(cut),
        size,
        burst,
        True,
        apart,
        tensors,
        messages.pairs_of(range(len(cut))),
        False,
        0,
        None,
    ]
    if rng.random() < 0.5:
        honest[6:9] = [hostile.forge_pairs(rng, len(cut)), rng.random() < 0.8, rng.choice(hostile.INTS)]
    if rng.random() < 0.1:
        honest[rng.choice([1, 2])] = rng.choice([*hostile.INTS, size + 16, offer.burst_bytes + 1])
    if rng.random() < 0.5:
        honest.append(hostile.forge_lanes(rng))
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
    offer = member.offered.offer
    cut = parcels.cut(lay_out(member.manifest), offer.parcel_bytes)
    fields = {
        "fingerprint": parcels.fingerprint(cut),
        "parcel_bytes": offer.parcel_bytes,
        "burst_bytes": offer.burst_bytes,
        "digests": digests,
        "apart": [],
        "tensors": [],
        "parcels": messages.pairs_of(range(len(cut))),
        "relay": relay,
        "host": host,
        "wanted_blocks": None,
        "lanes": None,
    } | changes
    return msgspec.msgpack.encode([fields[name] for name in messages.Want.__struct_fields__]), cut


def _lie(rng: random.Random, honest: Any) -> bytes:
    if rng.random() < 0.3:
        body = msgspec.msgpack.encode(honest)
        return hostile.mutate_bytes(rng, body, [body])
    plain = honest
    for _ in range(rng.choice([1, 1, 2])):
        plain = hostile.mutate_plain(rng, plain, hostile.paths_of(honest))
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
    offered, progress, report = dataclasses.replace(member.offered, chains=chains), Progress(), Report("send", (PEER,))
    try:
        hostile.serve(wire, offered, progress=progress, report=report)
        outcome = "done"
    except TransfuseError as error:
        str(error)
        refuse_out_of_memory(error)
        outcome = type(error).__name__
    assert 0 <= report.read_bytes <= offered.total_bytes
    # What it says that it has read, and every parcel as often as it may ask for it.
    assert 0 <= progress.bytes <= offered.total_bytes + (LIMITS.max_repairs + 1) * cut.total_bytes
    str(report)
    return f"serve: {outcome}"


def hear_agreed(rng: random.Random, corpus: list[Member]) -> str:
    """An honest offer, and then neighbours that a receiver did not ask for, or that do not exist, or say nonsense."""
    member = rng.choice(corpus)
    honest = hostile.forge_agreed(rng)
    body = _lie(rng, honest) if rng.random() < 0.3 else msgspec.msgpack.encode(honest)
    wire = Wire(rng, member, [member.body], said={Message.WANT: body}, relays=rng.random() < 0.8)
    wire._filling = "honest"
    request = ReceiveRequest(
        target=rng.choice([None, member.target.state]),
        options=Options(weights_only_objects=True, same_host=False, relay=rng.random() < 0.9),
    )
    return f"agreed: {_gather(member, [wire], request)}"


def _gather(member: Member, wires: list[Wire], request: ReceiveRequest, *, honest: bool = True) -> str:
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
    request = ReceiveRequest(
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
    request = ReceiveRequest(
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
    return _hear(Channel(Group(hostile.Stream(said), CPU), PEER, 1.0, LIMITS), Message.OFFER)


def hear_stream(rng: random.Random, corpus: list[Member]) -> str:
    """Headers and bodies, honest and not, as they come off the wire."""
    body = rng.choice([b"", b"x" * 50, rng.choice(corpus).body])
    said = hostile.spoken(rng.choice(list(Message)), body, rng.choice([1, 2]), FIRST_TAG)
    head, rest = said[: messages.HEADER_BYTES], said[messages.HEADER_BYTES :]
    if rng.random() < 0.5:
        head = hostile.mutate_bytes(rng, head, [head])[: len(head)].ljust(len(head), b"\0")
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
    alive = b"".join(hostile.spoken(Message.WORKING, b"", 1, rng.choice(hostile.NOTES)) for _ in range(count))
    channel = Channel(Group(hostile.Stream(alive + head + rest), CPU), PEER, 1.0, LIMITS)
    heard: list[int] = []
    channel.on_working = heard.append
    if rng.random() < 0.5:
        channel.transfer, channel.tag = 1, FIRST_TAG
        return _hear(channel, *rng.choice(DUE))
    return _hear(channel, Message.OFFER)


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


def _hear(channel: Channel, *kinds: Message) -> str:
    try:
        channel.expect(*kinds, tag=None if channel.transfer else 0)
    except TransfuseError as error:
        str(error)
        refuse_out_of_memory(error)
        return f"hear: {type(error).__name__}"
    return "hear: message"


def read_record(rng: random.Random, corpus: list[Member]) -> str:
    sent = tuple(rng.randrange(1 << 64) for _ in range(rng.randrange(4)))
    record = messages.seal_record(1, rng.choice(list(Intent)), sent)
    assert len(record) == messages.record_bytes(len(sent))
    if rng.random() < 0.3:  # sealed as it should be, but no record
        kind, note = rng.choice([Message.SENT, Message.GOT, *Message]), rng.choice([0, 1, 2, 3, (1 << 64) - 1])
        head = messages.seal(kind, rng.choice([1, 1, 1, 2]), note, b"")
        record = head + record[len(head) :]
    if rng.random() < 0.6:
        mutated = hostile.mutate_bytes(rng, record, [record])
        record = mutated[: len(record)] + bytes(max(0, len(record) - len(mutated)))
    channel = Channel(Group(hostile.Nowhere(), CPU), PEER, 1.0, LIMITS)
    channel.transfer, channel.tag = 1, FIRST_TAG
    try:
        intent, digests = channel.read_sent(record)
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
            request = ReceiveRequest(
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


def _at_the_edge(seed: int, count: int) -> None:
    """In a process of its own, where index tensors end at memory that may not be read."""
    script = f"import hostile; hostile.close_at_the_edge({seed}, {count})"
    folders = map(str, pathlib.Path(hostile.__file__).parents[1:3])
    path = os.pathsep.join([*folders, *filter(None, [os.environ.get("PYTHONPATH")])])
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


def with_leaf(name: str, meta: Any, tensors: list[tuple[str, list[int], list[int]]]) -> list[Any]:
    """An offer of one composite leaf with tensors of these dtypes, sizes and strides, each in 64 bytes of its own."""
    plain = one_tensor(64, [1], [1])
    wire = plain[hostile.MANIFEST]
    wire[hostile.KINDS] = bytes([Leaf.COMPOSITE])
    wire[hostile.DETAILS] = [[name, 0, meta, [0] * len(tensors)]]
    wire[hostile.DTYPES_AT] = [dtype for dtype, _, _ in tensors]
    count = len(tensors)
    plain[hostile.MANIFEST] = hostile.with_columns(
        wire,
        {
            hostile.STORAGE_NBYTES: [64] * count,
            hostile.STORAGE_DEVICE: [0] * count,
            hostile.STORAGE: list(range(count)),
            hostile.DTYPE: list(range(count)),
            hostile.FLAGS: [0] * count,
            hostile.NDIM: [len(sizes) for _, sizes, _ in tensors],
            hostile.OFFSET: [0] * count,
            hostile.SIZES: [n for _, sizes, _ in tensors for n in sizes],
            hostile.STRIDES: [n for _, _, strides in tensors for n in strides],
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


def accept_alone(offer: messages.Offer) -> planning.Accepted:
    described = offers.read_description(offer, LIMITS, PEER)
    choice = source_choice.choose([PEER], {PEER: offer}, {offer.likeness: described}, ReceiveRequest())
    context = hostile.context((PEER,), LIMITS)
    request, lock = ReceiveRequest(), threading.Condition()
    return planning.accept(choice.cohorts, choice.offers, offer, request, context, offer.parcel_bytes, lock)


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
                    [wire], ReceiveRequest(target=member.target.state, options=Options(**options)), caller, self.report
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


def described(member: Member, **changes: Any) -> Any:
    """What a member's offer says about its memory, with changes; ``storages`` is a function of their addresses."""
    memory = MemoryEntry.decode(member.offered.offer.routes["memory"])
    found = np.frombuffer(memory.storages, dtype="<u8").tolist()
    if "storages" in changes:
        changed = changes["storages"](found)
        changes["storages"] = changed if isinstance(changed, bytes) else np.array(changed, dtype="<u8").tobytes()
    return [{**msgspec.structs.asdict(memory), **changes}[name] for name in MemoryEntry.__struct_fields__]


def link(rank: int = 1, tag: int = FIRST_LINK_TAG, transfer: int = 7) -> list[int]:
    return [rank, tag, transfer]


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
        with (liar := Liar(pg, 1, ended=ended, **how)):
            serve_by(liar, new_transport(pg, seconds=1), state, kept.step)

    error = converse(honest, lie, 1)
    assert transports[0].report is not None
    assert torch.equal(w, state["w"] if error is None else before)
    return error, transports[0].report


def disagree(rank: int) -> Any:
    """Two honest ends of versions that cut a state into different parcels."""
    transport = new_transport(dist.group.WORLD)
    if rank == 0:
        return transport.send_checkpoint([1], STATE)
    with mock.patch.object(parcels, "fingerprint", return_value=1):
        return transport.recv_checkpoint(0)
