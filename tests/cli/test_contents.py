"""Contents: every kind of leaf as a row, from a manifest of one's own and from a peer's."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from torch import nn
from torch.distributed._shard.metadata import ShardMetadata
from torch.distributed._shard.sharded_tensor import init_from_local_shards
from torch.distributed._shard.sharded_tensor.shard import Shard as LocalShard
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

import transfuse
from shards import shard
from states import Color, Pair, states
from transfuse._limits import Limits
from transfuse._state.manifest import Manifest, Wire, describe
from transfuse.cli import contents
from transfuse.cli.contents import Contents, Folded, Row, fold
from transfuse.cli.tables import printable
from transfuse.testing.ranks import ProcessPool

PAIR = Pair(torch.zeros(2, dtype=torch.int8), torch.zeros(1), {"dtype": torch.float32})
WHOLE = torch.arange(40.0).reshape(10, 4)


def contents_of(state: object) -> Contents:
    return Contents.of(describe(state, Limits()).manifest)


def sent(manifest: Manifest) -> Manifest:
    """The same as a peer has it."""
    wire = msgspec.msgpack.decode(msgspec.msgpack.encode(manifest.encode()), type=Wire)
    return Manifest.decode(wire, Limits(), manifest.coordinates)


def row_of(leaf: object) -> Row:
    (row,) = contents_of({"x": leaf}).rows
    return row


@settings(max_examples=60, deadline=None)
@given(states())
def test_any_state_is_shown_and_a_peers_the_same(state: Any) -> None:
    described = describe(state, Limits())
    manifest = described.manifest
    shown = Contents.of(manifest)
    assert Contents.of(sent(manifest)) == shown
    assert [row.path for row in shown.rows] == [printable(path) for path in manifest.paths]
    totals = shown.totals
    assert (totals.leaves, totals.tensors) == (len(manifest), sum(row.is_tensor for row in shown.rows))
    assert totals.bytes == sum(tensor.numel() * tensor.element_size() for tensor in described.tensors)
    assert totals.bytes_once <= totals.bytes
    for row in shown.rows:
        assert all(text.isprintable() for text in (row.label, row.what, row.dtype, row.value or "", row.device))
    json.dumps([row.to_dict() for row in shown.rows])


@pytest.mark.parametrize(
    ("leaf", "what", "dtype", "shape", "nbytes"),
    [
        (torch.zeros(2, 3, dtype=torch.bfloat16), "tensor", "bfloat16", (2, 3), 12),
        (torch.tensor(1.0), "tensor", "float32", (), 4),
        (nn.Parameter(torch.zeros(3)), "parameter", "float32", (3,), 12),
        (nn.Buffer(torch.zeros(3)), "buffer", "float32", (3,), 12),
        (torch.eye(3).to_sparse(), "sparse_coo", "float32", (3, 3), 3 * 2 * 8 + 12),
        (torch.eye(3).to_sparse_csr(), "sparse_csr", "float32", (3, 3), 4 * 8 + 3 * 8 + 12),
        (PAIR, "Pair", "int8, float32", (2,), 6),
        (np.zeros((2, 3)), "array", "<f8", (2, 3), 48),
        ("x" * 9000, "value", "str", None, 9000),
    ],
)
def test_kinds(leaf: object, what: str, dtype: str, shape: tuple[int, ...] | None, nbytes: int) -> None:
    row = row_of(leaf)
    assert (row.what, row.dtype, row.shape, row.nbytes) == (what, dtype, shape, nbytes)
    assert row.device == "cpu"


def test_jagged_tensors_have_no_shape_of_their_own() -> None:
    row = row_of(torch.nested.nested_tensor_from_jagged(torch.zeros(5, 2), torch.tensor([0, 2, 5])))
    assert (row.what, row.dtype, row.shape, row.nbytes) == ("jagged", "float32", None, 40 + 24)


@pytest.mark.parametrize(
    ("value", "kind", "text"),
    [
        (7, "int", "7"),
        (None, "None", "None"),
        ("a\x1b[2J", "str", r"'a\x1b[2J'"),
        (Color.RED, "Color", "<Color.RED: 'r'>"),
        pytest.param(10**6000, "int", "<int>", id="huge"),
        (b"x" * 1000, "bytes", "b'" + "x" * 197 + "…"),
    ],
)
def test_values(value: object, kind: str, text: str) -> None:
    row = row_of(value)
    assert (row.kind, row.dtype, row.value, row.nbytes, row.device) == ("value", kind, text, 0, "")


def test_a_value_of_a_class_that_is_not_here_is_said_to_be() -> None:
    manifest = describe({"c": Color.RED}, Limits()).manifest
    # As another process would name an enum of its own.
    manifest.details[0][1] = "elsewhere:Hue"
    (row,) = Contents.of(manifest).rows
    assert row.dtype == "?"
    assert "elsewhere" in (row.value or "")


def test_what_shares_a_storage_has_the_same_number() -> None:
    weight, flat = nn.Parameter(torch.zeros(4, 4)), torch.zeros(8)
    state = {"a": weight, "b": flat[:4], "c": torch.zeros(2), "d": weight, "e": flat[4:], "f": weight.detach()[0]}
    found = contents_of(state)
    assert [row.shares for row in found.rows] == [(1,), (2,), (), (1,), (2,), (1,)]
    # A second and a third look at the same bytes; two halves are two halves.
    assert found.totals.bytes - found.totals.bytes_once == 64 + 16


def test_empty_views_share_nothing() -> None:
    flat = torch.zeros(4)
    assert [row.shares for row in contents_of([flat, flat[:0]]).rows] == [(), ()]


@pytest.mark.parametrize(
    ("placements", "rank", "text"),
    [
        ((Replicate(), Shard(0)), 3, "Replicate(), Shard(0) on 2×2: [5:10, 0:4]"),
        ((Shard(0), Shard(0)), 3, "Shard(0), Shard(0) on 2×2: [8:10, 0:4]"),
        ((_StridedShard(0, split_factor=2), Shard(0)), 0, "_StridedShard(0, 2), Shard(0) on 2×2: [0:3, 0:4]"),
        ((Replicate(), Partial()), 1, "Replicate(), Partial(sum) on 2×2: [0:10, 0:4]"),
        ((Shard(0), Replicate()), 9, "Shard(0), Replicate() on 2×2: nothing (outside the mesh)"),
    ],
)
def test_dtensors(placements: Any, rank: int, text: str) -> None:
    leaf = shard(WHOLE, [[0, 1], [2, 3]], rank, *placements)
    row = row_of(leaf)
    assert (row.what, row.shape, str(row.sharding)) == ("DTensor", (10, 4), text)
    assert row.nbytes == leaf._local_tensor.numel() * 4
    assert json.loads(json.dumps(row.to_dict()))["sharding"]["mesh"]["shape"] == [2, 2]


def test_blocks() -> None:
    row = row_of(transfuse.Block(torch.zeros(3, 2), start=(5, 1), shape=(10, 4)))
    assert (row.what, row.dtype, row.shape, row.nbytes) == ("Block", "float32", (10, 4), 24)
    assert str(row.sharding) == "[5:8, 1:3]"
    manifest = describe({"bad": transfuse.Block(torch.zeros(3), start=(5,), shape=(10,))}, Limits()).manifest
    manifest.details[0][2] = [[8], [10]]
    with pytest.raises(ValueError, match=r"leaf \['bad'\]: a malformed Block: the box \[8:11\] reaches beyond"):
        Contents.of(manifest)


def test_many_blocks_are_cut_short() -> None:
    whole = torch.zeros(64, 1)
    row = row_of(shard(whole, [[0, 1], [2, 3]], 0, _StridedShard(0, split_factor=8), Shard(0)))
    assert row.sharding is not None
    assert len(row.sharding.blocks) <= contents.MAX_BLOCKS + 1


def test_names_do_not_reach_a_terminal_as_commands() -> None:
    rows = contents_of({"\x1b]0;title\x07": torch.zeros(1), "\udc80": 1, "ü日本": 2}).rows
    assert [row.name for row in rows] == [r"\x1b]0;title\x07", r"\udc80", "ü日本"]


def test_names_that_are_empty_are_shown_somehow() -> None:
    assert contents_of(torch.zeros(1)).rows[0].label == "<root>"
    assert contents_of({"": 1}).rows[0].label == "['']"


def test_a_leaf_with_other_parts_than_its_kind_has_is_named() -> None:
    manifest = describe({"good": 1, "bad": torch.eye(2).to_sparse()}, Limits()).manifest
    spec = manifest.details[1]
    manifest.details[1] = ["dtensor", *spec[1:]]
    with pytest.raises(ValueError, match=r"leaf \['bad'\]: a leaf with other tensors"):
        Contents.of(manifest)


def test_a_dtensor_on_a_mesh_that_nobody_described_is_named() -> None:
    manifest = describe({"bad": shard(WHOLE, [0, 1], 0, Shard(0))}, Limits()).manifest
    manifest.shared.clear()
    with pytest.raises(ValueError, match=r"leaf \['bad'\]: a DTensor is on mesh 0, but 0 meshes are described"):
        Contents.of(manifest)


def test_folding_keeps_what_there_is_to_know() -> None:
    weight = torch.zeros(4)
    state = {"m": {"a.w": weight, "a.b": torch.zeros(1, dtype=torch.int8), "c": weight}, "step": 3, "opt": [1, 2]}
    rows = contents_of(state).rows
    one = fold(rows, 1)
    assert one == [Folded("m", 3, ("float32", "int8"), 33, (1,)), rows[3], Folded("opt", 2, (), 0, ())]
    two = fold(rows, 2)
    # A name with a dot in it folds as its parts do: a state_dict's names are paths.
    assert two[:2] == [Folded("m.a", 2, ("float32", "int8"), 17, (1,)), rows[2]]
    assert fold(rows, 9) == list(rows)


def test_filtering_is_by_name() -> None:
    found = contents_of({"model": {"a.weight": 1, "b.weight": 2, "b.bias": 3}, "step": 4})
    assert [row.value for row in found.matching("model.*.weight")] == ["1", "2"]
    assert found.matching("weight") == ()


def show_sharded(rank: int) -> Row:
    metadata = ShardMetadata([2 * rank, 0], [2, 3], f"rank:{rank}/cpu")
    return row_of(init_from_local_shards([LocalShard(torch.zeros(2, 3), metadata)], 8, 3))


def test_sharded_tensors(pool4: ProcessPool) -> None:
    row = pool4.run(show_sharded)[1].get()
    assert (row.what, row.dtype, row.shape, row.nbytes) == ("ShardedTensor", "float32", (8, 3), 24)
    assert str(row.sharding) == "4 shards: [2:4, 0:3]"
