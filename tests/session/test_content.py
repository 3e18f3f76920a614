"""The digest of a state's content: the same wherever the state lies, and another one for anything else."""

from __future__ import annotations

from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.tensor import Partial, Replicate, Shard

import transfuse
from shards import CPU, move, shard
from transfuse import PGTransport, Version, fetch, peek, serve
from transfuse._keeper.save_once import next_label, save_once
from transfuse._keeper.storage import Storage
from transfuse._limits import Limits
from transfuse._session.content import KnownContent, content_of, version_of
from transfuse._state.manifest import describe
from transfuse.testing.ranks import Ranks


def digest(state: object) -> bytes:
    return content_of(describe(state, Limits()), 10.0)


WEIGHT = torch.arange(2_000_000.0).reshape(1000, 2000)


@pytest.mark.parametrize(
    "other",
    [
        {"w": WEIGHT.clone(), "v": 1},
        {"v": 1, "w": WEIGHT},
        OrderedDict(w=WEIGHT, v=1),
        {"w": WEIGHT.t().contiguous().t(), "v": 1},
        {"w": torch.cat([WEIGHT, WEIGHT])[1000:], "v": 1},
        {"w": torch.cat([WEIGHT, WEIGHT], dim=1)[:, 2000:], "v": 1},
        {"w": torch.nn.Parameter(WEIGHT), "v": 1},
        {"w": shard(WEIGHT, [0, 1], 1, Replicate()), "v": 1},
        {"w": WEIGHT, "v": transfuse.Step(1)},
    ],
)
def test_the_same_content_has_the_same_digest(other: Any) -> None:
    assert digest(other) == digest({"w": WEIGHT, "v": 1})


def test_other_content_has_another_digest() -> None:
    zero = torch.zeros(4)
    states: list[Any] = [
        {"w": zero},
        {"v": zero},
        {"w": zero, "x": 1},
        {"w": zero, "x": True},
        {"w": zero, "x": 1.0},
        {"w": zero, "x": "1"},
        {"w": zero, "x": None},
        {"w": -zero},
        {"w": zero.double()},
        {"w": zero.view(torch.int32)},
        {"w": zero.view(2, 2)},
        {"w": zero[:3]},
        {"w": zero[:0]},
        {"w": zero.expand(2, 4)},
        {"w": {"w": zero}},
        {"w": [zero]},
        {"w": zero, "x": zero},
        {"w": zero.to_sparse()},
        {"w": zero.numpy()},
        {"w": np.zeros(4, dtype=np.float32), "x": "long" * 5000},
        {"w": shard(zero, [0, 1], 0, Shard(0))},
        {"w": shard(zero, [0, 1], 1, Shard(0))},
        {"w": shard(zero, [0, 1], 1, Partial())},
    ]
    assert len({digest(state) for state in states}) == len(states)
    assert [digest(state) for state in states] == [digest(state) for state in states]


@settings(max_examples=30, deadline=None)
@given(st.lists(st.integers(0, 40), max_size=3), st.randoms(use_true_random=False))
def test_any_layout_has_the_digest_of_its_elements(sizes: list[int], random: Any) -> None:
    whole = torch.randint(0, 255, sizes, dtype=torch.uint8)
    order = random.sample(range(len(sizes)), len(sizes))
    back = [order.index(dim) for dim in range(len(sizes))]
    laid = whole.permute(order).clone(memory_format=torch.contiguous_format).permute(back)
    assert digest([laid]) == digest([whole])
    if whole.numel():
        laid[(0,) * len(sizes)] ^= 1
        assert digest([laid]) != digest([whole])


def test_it_is_computed_once_for_each_change() -> None:
    w = torch.zeros(100)
    known = KnownContent()
    described = describe({"w": w}, Limits())
    name = described.manifest.encode().digest()
    assert known.known(name) == b""
    first = known.of(described, 10.0)
    assert known.known(name) == known.of(described, 10.0) == first
    assert known.known(b"another") == b""
    w[3] = 1
    assert known.known(name) == b""
    assert known.of(described, 10.0) != first


def test_several_sources_have_one_version_in_any_order() -> None:
    a, b = b"a" * 16, b"b" * 16
    assert version_of(1, [a, b, a]) == version_of(1, [b, a])
    assert version_of(1, [a]) == Version(1, a.hex()) == version_of(1, [a, a])
    assert version_of(1, [a]) != version_of(2, [a])
    for unknown in ([], [b""], [a, b""]):
        assert version_of(1, unknown) == Version(1, None)
    assert (str(Version(7, "3f2a" * 8)), str(Version(7)), str(Version(None, "3f2a" * 8))) == (
        "step 7 (3f2a3f2a…)",
        "step 7",
        "no step (3f2a3f2a…)",
    )


def test_a_step_that_was_brought_says_its_version() -> None:
    report = transfuse.Report("receive", (0,), 3, Version(3, "3f2a" * 8))
    assert transfuse.Step(3, report).version == Version(3, "3f2a" * 8)
    assert transfuse.Step(3).version == transfuse.Step(3, transfuse.Report("receive", (0,))).version == Version(3)
    assert transfuse.Fetched({}, 3, transfuse.Report("receive", (0,))).version == Version(3)


def test_who_asks_once_lets_all_readers_know() -> None:
    state = {"model": {"w": torch.arange(1000.0)}, "step": 5}
    with serve(state, step=5) as server:
        assert fetch(server.address).version == peek(server.address).version == Version(5)
        known = server.version
        assert known.step == 5
        brought = fetch(server.address)
        assert brought.version == brought.report.version == peek(server.address).version == known
        assert brought.report.to_dict()["version"] == {"step": 5, "digest": known.digest}
        # An entry has a digest of its own: that of a server of the entry.
        part = fetch(server.address, entry="model", version=True).version
        with serve(state["model"], step=5) as other:
            assert part == other.version != known
        with server.mutating():
            state["model"]["w"] += 1  # type: ignore[index]
        assert peek(server.address).version == Version(5)
        assert peek(server.address, version=True).version == server.version != known
        # What was received is the same version there.
        received = {"step": 0, "model": {"w": torch.zeros(1000)}}
        fetch(server.address, received)
        with serve(received, step=5) as next_one:
            assert next_one.version == server.version


@pytest.mark.parametrize("wrong", [None, 1, "yes"])
def test_version_is_a_flag(wrong: Any) -> None:
    for call in (fetch, peek):
        with pytest.raises(TypeError, match="version takes True or False"):
            call("127.0.0.1:1", version=wrong)


def test_a_transfer_in_a_group_says_what_is_known() -> None:
    def send(rank: int, pg: Any) -> Version | None:
        transport = PGTransport(pg, 10, CPU)
        if rank == 0:
            transport.send_checkpoint(1, {"w": torch.ones(3)}, step=4)
        else:
            transport.receive(0, version=True)
        assert transport.report is not None
        return transport.report.version

    with Ranks(2) as ranks:
        versions = [outcome.get() for outcome in ranks.outcomes(send)]
    assert versions == [version_of(4, [digest({"w": torch.ones(3)})])] * 2
    moved = move({0: {"w": torch.ones(3)}}, {1: None})[1].get()
    assert moved.report.version == Version(None)


def test_saved_steps_have_the_version_that_was_saved(tmp_path: Path) -> None:
    state = {"w": torch.randn(300, 40), "lr": 0.5, "small": [torch.randn(3) for _ in range(5)]}
    storage = Storage.at(tmp_path)
    save_once(state, storage, next_label(storage, 3))
    address = f"file://{tmp_path}"
    with serve(state, step=3) as server:
        assert fetch(address, version=True).version == server.version
        assert fetch(address).version == Version(3)
    with pytest.raises(ValueError, match=r"fetch\(.*computes it"):
        peek(address, version=True)
    found = transfuse.verify(address, state)
    assert found
    state["lr"] = 0.25
    assert list(transfuse.verify(address, state).differing) == ["['lr']"]
