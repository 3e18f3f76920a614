"""Hostile bytes: whatever a peer says, an honest end raises an error of the library, or carries on in bounds.

The bulk is a seeded loop, not hypothesis: 20,000 cases in the ordinary run. A failure names its seed and case;
``TRANSFUSE_HOSTILE_SEED=<seed> TRANSFUSE_HOSTILE_CASE=<case>`` runs that case alone.
"""

from __future__ import annotations

import gc
import os
import random
import resource
import threading
import time
import tracemalloc
from typing import Any

import msgspec
import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore

import hostile
from hostile import CPU, LIMITS, PEER, Member, Wire
from hostile_cases import (
    BOMBS,
    CASES,
    ONLY,
    SEED,
    Run,
    _at_the_edge,
    accept_alone,
    little_memory,
    refuse_out_of_memory,
    warm_up,
    with_leaf,
    with_tree,
)
from transfuse._errors import CorruptData, TransfuseError
from transfuse._limits import MIB
from transfuse._options import Options
from transfuse._report import Report
from transfuse._session.context import ReceiveRequest
from transfuse._session.offers import read_offer
from transfuse._state.leaves import values
from transfuse._state.leaves.blobs import ArrayCodec
from transfuse._state.leaves.codec import BuildContext, CannotCarry
from transfuse._state.leaves.sparse import JaggedCodec
from transfuse._state.leaves.subclass import WrapperCodec
from transfuse._state.manifest import Leaf
from transfuse._wire import messages
from transfuse._wire.channel import Channel
from transfuse._wire.group import Group
from wires import is_of_a_transfer

pytestmark = [
    pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental:UserWarning"),
    pytest.mark.filterwarnings("ignore:Sparse .* tensor support is in beta state:UserWarning"),
    pytest.mark.filterwarnings("ignore:Sparse invariant checks are implicitly disabled:UserWarning"),
    pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype stage:UserWarning"),
]


@pytest.mark.parametrize("same_host", [True, False], ids=["memory", "group"])
@pytest.mark.parametrize("mode", ["fresh", "in place", "atomic", "strict"])
def test_honest_messages_arrive(mode: str, same_host: bool, corpus: list[Member]) -> None:
    """The other tests mutate these: they must be worth mutating."""
    for member in corpus:
        if mode == "strict" and not len(member.manifest.tensors):
            continue
        wire = Wire(random.Random(0), member, [member.body])
        wire._filling = "honest"
        result: list[Any] = []
        request = ReceiveRequest(
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
@pytest.mark.parametrize("every", [10, pytest.param(1, marks=pytest.mark.soak)])
def test_hostile_messages(corpus: list[Member], every: int) -> None:
    """20,000 of them; in the ordinary run, every tenth."""
    warm_up(corpus)
    run = Run(corpus, SEED)
    before, threads = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, set(threading.enumerate())
    with little_memory():
        if ONLY is not None:
            run.one(int(ONLY))
            return
        for number in range(0, len(CASES), every):
            run.one(number, watch_memory=number % 50 == 0)
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) // 1024
    assert grown < 256, f"{grown} MiB more resident memory"
    assert run.outcomes.total() >= 20_000 // every
    left = set(threading.enumerate()) - threads
    assert not [thread.name for thread in left if is_of_a_transfer(thread)]
    for mode in ("fresh", "in place", "atomic", "strict"):
        for route in ("memory", "group"):
            assert run.outcomes[f"{mode}: state, {route}"] > 50 // every, run.outcomes
    assert sum(n for outcome, n in run.outcomes.items() if outcome.endswith("memory+group")) > 10 // every, run.outcomes
    for kind in ("agreed", "compared", "two"):
        assert run.outcomes[f"{kind}: state"] > 50 // every, run.outcomes
    assert run.outcomes["serve: done"] > 200 // every, run.outcomes


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
                hostile.gather([wire], ReceiveRequest())
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
        JaggedCodec().close([1, False, None, None], [torch.zeros(8, 1), offsets], BuildContext())


@pytest.mark.parametrize(
    "cls", ["torch.nested._internal.nested_tensor:NestedTensor", "torch.distributed.tensor:DTensor"]
)
def test_tensors_with_a_codec_do_not_pass_as_wrappers(cls: str) -> None:
    """torch allows these classes by itself; the wrapper codec would build them without their own codec's checks."""
    context = values.encode({"requires_grad": False, "ragged_idx": 1})
    meta = [cls, ["_values", "_offsets"], context, [2, 4, 1], [4, 1, 1]]
    inner = [torch.zeros(8, 1), torch.tensor([0, 1 << 40, 8])]
    with pytest.raises((ValueError, CannotCarry)):
        WrapperCodec().promise(meta, 2, BuildContext())
    with pytest.raises((ValueError, CannotCarry)):
        WrapperCodec().close(meta, inner, BuildContext())


def test_text_that_does_not_exist_is_refused() -> None:
    """Python makes strings of whatever a numpy array of text holds."""
    data = torch.full((16,), 0xFF, dtype=torch.uint8)
    with pytest.raises(ValueError, match="text"):
        ArrayCodec().close(["<U4", [1], "C"], [data], BuildContext())


@pytest.mark.parametrize("descr", ["(3,4)f4", "i4,f8", "9999999999f8", "float64", "T", [["a", "(2,)i4"]]])
def test_numpy_parses_no_language_of_a_peer(descr: Any) -> None:
    with pytest.raises(ValueError, match="numpy"):
        ArrayCodec().promise([descr, [0], "C"], 1, BuildContext())


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
            offer = read_offer(hostile.resealed(msgspec.msgpack.encode(plain)), LIMITS, PEER)
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
        hostile.gather([wire], ReceiveRequest(target=target))
    assert len(caught.value.torn) == 1
    str(caught.value)


def test_a_refusal_may_quote_anything(corpus: list[Member]) -> None:
    channel = Channel(Group(hostile.Nowhere(), CPU), PEER, 1.0, LIMITS)
    channel.refuse(ValueError("a lone \ud800"))
