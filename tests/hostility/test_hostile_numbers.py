"""Hostile memory, links, rates and ranges: refused, or harmless."""

from __future__ import annotations

import dataclasses
import random
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

import hostile
from hostile import PEER, Ground, Member, Wire
from hostile_cases import Received, described, link, want
from transfuse._errors import SourceMutated
from transfuse._progress import Progress
from transfuse._report import Report
from transfuse._session.relay import Chains
from transfuse._session.threads import Caller
from transfuse._wire import messages
from transfuse._wire.group import FIRST_LINK_TAG, FIRST_TAG, LINK_TAGS, OFFER_TAG
from transfuse._wire.memory_route import MemoryLease, Reader
from transfuse._wire.messages import Agreed, Message
from transfuse._wire.route import Unreadable

pytestmark = [
    pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental:UserWarning"),
    pytest.mark.filterwarnings("ignore:Sparse .* tensor support is in beta state:UserWarning"),
    pytest.mark.filterwarnings("ignore:Sparse invariant checks are implicitly disabled:UserWarning"),
    pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype stage:UserWarning"),
]


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
    hostile.serve(wire, large.offered, progress=progress, report=report)
    assert report.read_bytes == 0
    assert report.bytes == (0 if first else cut.total_bytes)
    assert progress.bytes <= cut.total_bytes


def test_signs_of_life_do_not_count_beyond_what_there_is(large: Member) -> None:
    progress, total = Progress(), large.offered.total_bytes
    shown: list[int] = []
    notes = [0, 5, 3, total, total + 1, (1 << 63) - 1, 1 << 63, (1 << 64) - 1]
    wire = Wire(random.Random(0), large, [*notes, (Message.VERDICT, msgspec.msgpack.encode([{"memory": total}]))])

    class Shown(Caller):
        def tick(self) -> None:
            shown.append(progress.bytes)

    hostile.serve(wire, large.offered, Shown(), progress)
    assert shown == [0, 5, 5, *[total] * 5]


@pytest.mark.parametrize("host", [0, -(1 << 63), (1 << 64) - 1])
def test_a_chain_of_one_is_no_chain(host: int, large: Member) -> None:
    """The others are not waited for longer than a chain is worth."""
    body, _ = want(large, digests=True, relay=True, host=host)
    told: list[Agreed] = []

    class Told(Wire):
        def send(self, kind: Message, body: Any = b"", *, note: int = 0, tag: int | None = None) -> None:
            if kind is Message.AGREED and body:  # The answer to the verdict has none.
                told.append(messages.decode(body, Agreed))
            super().send(kind, body, note=note, tag=tag)

    chains = Chains([PEER, PEER + 1], large.offered.total_bytes, 1.0)
    began = time.monotonic()
    wire = Told(random.Random(0), large, [body, (Message.VERDICT, msgspec.msgpack.encode([{}]))])
    offered = dataclasses.replace(large.offered, chains=chains)
    hostile.serve(wire, offered)
    assert time.monotonic() - began < 2
    assert [(agreed.upstream, agreed.downstream) for agreed in told] == [(None, None)]
    late, _ = chains.join(PEER + 1, None, host)
    assert (late.upstream, late.downstream) == (None, None)
