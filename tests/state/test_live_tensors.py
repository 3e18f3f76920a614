"""Columns say about many tensors at once what looking at each of them says, and refuse in the same words."""

from __future__ import annotations

import dataclasses
import operator
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from states import like, states
from transfuse._errors import TargetMismatch, UnsupportedLeaf
from transfuse._limits import Limits
from transfuse._plan import parcels
from transfuse._plan.match import Match, Prepared, match, prepare
from transfuse._plan.regions import Regions, lay_out
from transfuse._state import live_tensors, trees
from transfuse._state.leaves import dense
from transfuse._state.leaves.codec import BuildContext
from transfuse._state.leaves.registry import Registry
from transfuse._state.manifest import Described, Manifest, Wire, describe
from transfuse._state.region import Budget, Ints, canonical, cover, crowds
from transfuse._state.tensors import Shapes

relaxed = settings(deadline=None, suppress_health_check=list(HealthCheck), max_examples=150)

LIMITS = Limits()


# ------------------------------------------------------------------------------------------------------- the columns


def shrunk(nbytes: int) -> Tensor:
    tensor = torch.ones(8)
    tensor.untyped_storage().resize_(nbytes)
    return tensor


def odd_state() -> dict[str, Any]:
    """Tensors about which there is something to get wrong, none of them unusual."""
    base, array = torch.arange(60.0).view(6, 10), np.arange(12.0)
    wave = torch.randn(3, 4, dtype=torch.complex64)
    shared = torch.randn(5)
    marked = torch.ones(2)
    marked._is_param = True
    return {
        "view": base[1:5:2, 2:7],
        "transposed": base.t(),
        "of other dtype": base.view(torch.int32)[0],
        "expanded": torch.ones(1, 3).expand(4, 3),
        "overlapping": torch.ones(9).as_strided((4, 3), (2, 1)),
        "empty": torch.empty(0),
        "empty view": base[3:3],
        "empty of no memory": torch.empty(3, 0, dtype=torch.int64),
        "tied": [shared, shared, shared.detach(), shared[1:3]],
        "conj": wave.conj(),
        "neg": wave.conj().imag,
        "both": torch._neg_view(wave.conj()),
        "complex": wave,
        "parameter": nn.Parameter(torch.ones(3)),
        "frozen": nn.Parameter(torch.ones(3, dtype=torch.int32), requires_grad=False),
        "grad": torch.ones(3, requires_grad=True),
        "result": torch.ones(3, requires_grad=True) * 2,
        "buffer": nn.Buffer(torch.ones(3)),
        "not persistent": nn.Buffer(torch.ones(3), persistent=False),
        "marked": marked,
        "array": torch.from_numpy(array),
        "array again": torch.from_numpy(array),
        "part of array": torch.from_numpy(array[:5]),
        "bool": torch.tensor([True, False]),
        "scalar": torch.tensor(3, dtype=torch.int16),
        "size one": torch.ones(8)[::4].unsqueeze(0)[:, :1],
        "partly gone": shrunk(16)[:2],
    }


def unusual() -> dict[str, Tensor]:
    """Plain by their type, but not by their nature."""
    kept: dict[str, Tensor] = {}

    def keep(name: str) -> Callable[[Tensor], Tensor]:
        def function(tensor: Tensor) -> Tensor:
            kept[name] = tensor
            return tensor.sum()

        return function

    torch.func.vmap(keep("vmap"))(torch.ones(3, 2))
    torch.func.grad(keep("grad"))(torch.ones(3))
    torch.func.functionalize(keep("functionalize"))(torch.ones(3))
    return kept | {
        "coo": torch.eye(2).to_sparse(),
        "csr": torch.eye(2).to_sparse_csr(),
        "nested": torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
        "mkldnn": torch.ones(2, 2).to_mkldnn(),
        "meta": torch.ones(2, device="meta"),
        "quantized": torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8),
        "zeros": torch._efficientzerotensor(3),
        "freed": shrunk(0),
    }


@contextmanager
def carefully() -> Iterator[None]:
    """A reader of columns is told that there is something unusual, and looks at every tensor by itself."""

    def refuse(tensors: object, *, roles: bool = True) -> live_tensors.LiveTensors:
        raise live_tensors.Unusual

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(live_tensors, "read", refuse)
        yield


def assert_same(one: Any, other: Any, but: tuple[str, ...] = ()) -> None:
    """All fields of two sets of columns."""
    for field in dataclasses.fields(one):
        if field.name not in but:
            mine, theirs = getattr(one, field.name), getattr(other, field.name)
            assert np.array_equal(mine, theirs), f"{field.name}: {mine} and {theirs}"


def message(described: Described) -> bytes:
    return msgspec.msgpack.encode(described.manifest.encode())


def assert_same_description(one: Described, other: Described) -> None:
    assert message(one) == message(other)
    assert_same(one, other, but=("manifest", "tensors"))
    assert list(map(id, one.tensors)) == list(map(id, other.tensors))
    assert [s.data_ptr() for s in one.storages] == [s.data_ptr() for s in other.storages]


def test_odd_tensors_read_together_and_one_by_one_are_the_same() -> None:
    tensors = describe(odd_state(), LIMITS).tensors
    assert len(tensors) == 30
    assert_same(live_tensors.read(tensors), live_tensors.read_carefully(tensors))
    signs = int(dense.Flags.CONJUGATE | dense.Flags.NEGATIVE)
    assert np.array_equal(
        live_tensors.read(tensors, roles=False).flags, live_tensors.read_carefully(tensors).flags & signs
    )


def test_more_tensors_than_are_read_together() -> None:
    tensors = [t for _ in range(2 * live_tensors.TOGETHER // 30 + 1) for t in describe(odd_state(), LIMITS).tensors]
    assert len(tensors) > 2 * live_tensors.TOGETHER
    assert_same(live_tensors.read(tensors), live_tensors.read_carefully(tensors))


def test_no_tensors() -> None:
    assert_same(live_tensors.read([]), live_tensors.read_carefully([]))
    described = describe({}, LIMITS)
    assert (len(described.manifest), len(described.storages), len(described.addresses)) == (0, 0, 0)


def test_an_odd_state_is_described_alike() -> None:
    state = odd_state()
    quick = describe(state, LIMITS)
    with carefully():
        assert_same_description(quick, describe(state, LIMITS))


@relaxed
@given(state=states())
def test_any_state_is_described_alike(state: Any) -> None:
    quick = describe(state, LIMITS)
    with carefully():
        again = describe(state, LIMITS)
    assert message(quick) == message(again)
    if all(map(operator.is_, quick.tensors, again.tensors)):  # Some are made anew whenever a leaf is opened.
        assert_same_description(quick, again)


@relaxed
@given(state=states(["dense", "alias"]))
def test_what_shapes_derive(state: Any) -> None:
    tensors = describe(state, LIMITS).tensors
    found = live_tensors.read(tensors)
    forms = [canonical(t.shape, t.stride()) for t in tensors]
    assert found.numel.tolist() == [t.numel() for t in tensors]
    assert found.contiguous.tolist() == [contiguous(t) for t in tensors]
    assert found.overlapping.tolist() == [form.overlapping for form in forms]
    for i, t in enumerate(tensors):
        last = sum((n - 1) * s for n, s in zip(t.shape, t.stride(), strict=True)) if t.numel() else -1
        assert found.reach[i] == last + 1
        assert (found.shape(i), found.stride(i)) == (tuple(t.shape), t.stride())
    rows = np.arange(len(tensors))[::-2]
    assert found.sizes[found.dimensions(rows)].tolist() == [n for i in rows for n in tensors[i].shape]


def contiguous(tensor: Tensor) -> bool:
    """In row-major order without gaps; of an empty tensor, if its strides say so."""
    expected = 1
    for size, stride in reversed(list(zip(tensor.shape, tensor.stride(), strict=True))):
        if size != 1 and stride != expected:
            return False
        expected *= size
    return True


@relaxed
@given(spans=st.lists(st.tuples(st.integers(0, 2), st.integers(0, 30), st.integers(1, 6)), max_size=12))
def test_crowds(spans: list[tuple[int, int, int]]) -> None:
    space, start, length = (np.array([span[i] for span in spans], dtype=np.int64) for i in range(3))
    found = {frozenset(group.tolist()) for group in crowds(space, start, start + length)}
    groups: list[set[int]] = []
    for i, (where, low, size) in enumerate(spans):
        touching = [
            group
            for group in groups
            if any(spans[j][0] == where and spans[j][1] < low + size and low < sum(spans[j][1:]) for j in group)
        ]
        groups = [group for group in groups if group not in touching] + [{i}.union(*touching)]
    assert found == {frozenset(group) for group in groups if len(group) > 1}


# ------------------------------------------------------------------------------------------------------ what is refused


@pytest.mark.parametrize("name", unusual())
def test_what_is_unusual_shows(name: str) -> None:
    with pytest.raises(live_tensors.Unusual):
        live_tensors.read([torch.ones(2), unusual()[name], torch.ones(2)])


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("vmap", "a tensor inside a torch.func transform; send it from outside"),
        ("grad", "a tensor inside a torch.func transform; send it from outside"),
        ("functionalize", "a tensor inside a torch.func transform; send it from outside"),
        ("nested", "a nested tensor of strided layout; use layout=torch.jagged"),
        ("mkldnn", "a tensor of layout torch._mkldnn has no codec; convert it with to_dense()"),
        ("meta", 'a meta tensor has no data; materialize it first, for example with to_empty(device="cpu")'),
        ("quantized", "a quantized tensor (torch.qint8)"),
        ("zeros", "a tensor of zeros that has no memory"),
        ("freed", "its storage has been freed or shrunk"),
    ],
)
def test_what_is_unusual_is_refused_with_its_reason(name: str, reason: str) -> None:
    with pytest.raises(UnsupportedLeaf) as caught:
        describe({"a": torch.ones(2), "b": [unusual()[name]], "c": 5}, LIMITS)
    assert caught.value.path == "['b'][0]"
    assert str(caught.value).partition(": ")[2].startswith(reason) or reason in str(caught.value)


def test_a_shrunk_storage_is_refused_though_it_has_an_address() -> None:
    with pytest.raises(UnsupportedLeaf, match="freed or shrunk") as caught:
        describe({"a": torch.ones(2), "b": shrunk(16)}, LIMITS)
    assert caught.value.path == "['b']"


def test_of_several_refused_leaves_the_first_is_named() -> None:
    """Whatever is found first: a leaf that is opened, or one whose type is that of a plain tensor."""
    for state in (
        {"a": torch.ones(1), "b": torch.ones(1, device="meta"), "c": {1: lambda: 0}, "d": [lambda: 0]},
        {"a": torch.ones(1), "b": torch.ones(2, device="meta"), "c": np.array([None])},
    ):
        with pytest.raises(UnsupportedLeaf, match="meta") as caught:
            describe(state, LIMITS)
        assert caught.value.path == "['b']"


def test_sparse_among_plain_tensors_costs_nothing_but_time() -> None:
    state = {
        "a": torch.ones(2),
        "b": torch.eye(2).to_sparse(),
        "c": torch.ones(3),
        "d": 5,
        "e": nn.Parameter(torch.ones(1)),
    }
    described = describe(state, LIMITS)
    assert described.manifest.kinds == bytes([1, 2, 1, 0, 1])
    assert [tuple(tensor.shape) for tensor in described.tensors] == [(2,), (2, 2), (2,), (3,), (1,)]
    assert described.manifest.leaves_of(range(5)).tolist() == [0, 1, 1, 2, 4]
    assert [described.manifest.leaf_of(row) for row in range(5)] == [0, 1, 1, 2, 4]


# ----------------------------------------------------------------------------------------------------------- storages


def test_storages_have_addresses() -> None:
    base, empty = torch.arange(20.0), torch.empty(0)
    described = describe({"a": base[3:7], "b": empty, "c": base[10:12], "d": torch.ones(2)}, LIMITS)
    assert described.manifest.tensors.storage.tolist() == [0, 1, 0, 2]
    assert described.addresses.tolist()[:2] == [base.data_ptr() + 12, 0]
    assert described.windows.tolist() == [12, 0, 0]
    assert described.manifest.storages.on_cpu.tolist() == [True] * 3
    assert sent(described).storages.on_cpu.tolist() == [True] * 3


def test_memory_seen_through_two_storages_is_one_storage() -> None:
    array = np.arange(10.0)
    state = {"part": torch.from_numpy(array[:4]), "all": torch.from_numpy(array)}
    described = describe(state, LIMITS)
    assert described.manifest.tensors.storage.tolist() == [0, 0]
    assert described.storages[0].nbytes() == 80
    assert described.addresses.tolist() == [array.ctypes.data]


@relaxed
@given(state=states(["dense", "alias"]))
def test_alone(state: Any) -> None:
    """A tensor is alone if covering its storage leaves it as it is, and says so even where its box has a twin."""
    manifest = describe(state, LIMITS).manifest
    tensors = manifest.tensors
    for i in range(len(tensors)):
        spans = [
            (tensors.start[j], tensors.end[j])
            for j in range(len(tensors))
            if j != i and tensors.storage[j] == tensors.storage[i]
        ]
        lonely = tensors.numel[i] > 0 and not any(
            a < tensors.end[i] and tensors.start[i] < b for a, b in spans if b > a
        )
        assert tensors.alone[i] == lonely


# ------------------------------------------------------------------------------------------------------------- matching


def sent(described: Described) -> Manifest:
    return Manifest.decode(msgspec.msgpack.decode(message(described), type=Wire), LIMITS)


def lay_over(state: object, target: object, strict: bool = False) -> Match:
    manifest = sent(describe(state, LIMITS))
    build_context = BuildContext(manifest.shared, weights_only_objects=True)
    return match(manifest, target, build_context=build_context, registry=Registry(LIMITS), strict=strict, limits=LIMITS)


def leaf_by_leaf(target: object) -> Prepared:
    """A target of which nothing is known in advance."""
    ready = prepare(target, LIMITS)
    return dataclasses.replace(ready, row=np.full(len(ready.leaves), -1, dtype=np.int64))


@relaxed
@given(state=states(), seed=st.integers(0, 100))
def test_any_target_is_matched_alike(state: Any, seed: int) -> None:
    target, _ = like(state, seed, zero_indices=False)
    quick, slow = lay_over(state, prepare(target, LIMITS)), lay_over(state, leaf_by_leaf(target))
    assert_same(quick, slow, but=("merged", "target_leaves", "destinations"))
    assert [t is None for t in quick.destinations] == [t is None for t in slow.destinations]
    described = describe(state, LIMITS)
    for row, destination in enumerate(quick.destinations):
        if destination is None:
            assert (quick.address[row], quick.copies_as_bytes[row]) == (0, False)
            continue
        source = described.tensors[row]
        assert quick.address[row] == (dense.start_of(destination) if destination.numel() else 0)
        signs = (source.is_conj(), source.is_neg()) == (destination.is_conj(), destination.is_neg())
        assert quick.copies_as_bytes[row] == (contiguous(source) and contiguous(destination) and signs)


def test_a_tree_and_a_prepared_tree_are_the_same_target() -> None:
    state, target = (
        odd_state(),
        {"bool": torch.zeros(2, dtype=torch.bool), "scalar": torch.tensor(0, dtype=torch.int16)},
    )
    assert_same(
        lay_over(state, target),
        lay_over(state, prepare(target, LIMITS)),
        but=("merged", "target_leaves", "destinations"),
    )


def test_signs_decide_whether_memory_is_the_same() -> None:
    wave = torch.ones(3, dtype=torch.complex64)
    state = {"a": wave.conj(), "b": wave.clone().conj(), "c": wave.clone()}
    target = {
        "a": torch.zeros_like(wave).conj(),
        "b": torch.zeros_like(wave),
        "c": torch._neg_view(torch.zeros_like(wave)),
    }
    assert lay_over(state, target).copies_as_bytes.tolist() == [True, False, False]


TWICE = torch.zeros(6)
WRONG: dict[str, tuple[Any, Any]] = {
    "shape": (torch.ones(3), torch.ones(4)),
    "number of dimensions": (torch.ones(3), torch.ones(3, 1)),
    "empty": (torch.ones(3), torch.ones(0)),
    "dtype": (torch.ones(3), torch.ones(3, dtype=torch.int32)),
    "unknown dtype": (torch.ones(3), torch.ones(3, dtype=torch.bfloat16)),
    "shape and dtype": (torch.ones(3, 2), torch.ones(2, 3, dtype=torch.float64)),
    "value": (torch.ones(3), 5),
    "tensor for a value": (5, torch.ones(3)),
    "sparse": (torch.ones(2, 2), torch.eye(2).to_sparse()),
    "sparse source": (torch.eye(2).to_sparse(), torch.eye(2)),
    "meta": (torch.ones(3), torch.ones(3, device="meta")),
    "nested": (torch.ones(3), torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])),
    "freed": (torch.ones(8), shrunk(0)),
    "shrunk": (torch.ones(8), shrunk(16)),
    "subclass": (torch.ones(3), nn.parameter.UninitializedParameter()),
    "array": (torch.ones(3), np.ones(3)),
    "tree": (torch.ones(3), [torch.ones(3)]),
    "repeated": (torch.ones(4, 3), torch.ones(1, 3).expand(4, 3)),
    "overlapping": (torch.ones(4, 3), torch.ones(9).as_strided((4, 3), (2, 1))),
    "overlaps": ([torch.ones(4), torch.ones(4)], [TWICE[:4], TWICE[2:]]),
    "the same": ([torch.ones(4), torch.ones(4)], [TWICE[:4], TWICE[:4]]),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_targets_are_refused_in_the_same_words(name: str) -> None:
    source, wrong = WRONG[name]
    state, target = (
        {"a": torch.ones(2), "b": source, "c": torch.ones(1)},
        {"c": torch.ones(1), "b": wrong, "a": torch.ones(2)},
    )
    said = []
    for ready in (prepare(target, LIMITS), leaf_by_leaf(target)):
        with pytest.raises(TargetMismatch) as caught:
            lay_over(state, ready)
        said.append(caught.value.mismatches)
    assert said[0] == said[1]
    assert len(said[0]) == (2 if name == "shape and dtype" else 1)
    assert said[0][0].startswith("['b']")


def test_all_wrong_targets_are_named_in_the_order_of_the_source() -> None:
    state = {name: source for name, (source, _) in WRONG.items()}
    target = {name: wrong for name, (_, wrong) in reversed(WRONG.items())}
    said = []
    for ready in (prepare(target, LIMITS), leaf_by_leaf(target)):
        with pytest.raises(TargetMismatch) as caught:
            lay_over(state, ready, strict=True)
        said.append(caught.value.mismatches)
    assert said[0] == said[1]
    assert len(said[0]) > 15


# ---------------------------------------------------------------------------------------------------------------- trees


def test_trees_of_leaves_are_matched_whatever_their_keys() -> None:
    tensors = [torch.ones(1), torch.ones(2)]
    same = {"a": 1, "b": 2}
    for source, target, partner in (
        (same, same, [0, 1]),
        (same, {"b": 2, "a": 1}, [1, 0]),
        (same, {"a": 1, "c": 2}, [0, -1]),
        ({1: 1, 2: 2}, {1: 1, 2: 2}, [0, 1]),
        (same, {tensors[0]: 1, tensors[1]: 2}, [-1, -1]),
        ([1, 2], (1, 2), [0, 1]),
        ([1, 2, 3], [1, 2], [0, 1, -1]),
        ({"x": same, "y": same}, {"y": same, "x": same}, [2, 3, 0, 1]),
        ({"x": same, "y": 5, "z": same}, {"x": same, "z": {"b": 2, "a": 1, "new": [7, 8]}}, [0, 1, -1, 3, 2]),
    ):
        one, other = (trees.flatten(tree, max_depth=9)[0] for tree in (source, target))
        merged = trees.merge(one, other)
        assert (merged.partner, merged.conflicts) == (partner, [])
        assert sorted(o for o in merged.origin if o >= 0) == list(range(len(partner)))
        adopted = sorted(~o for o in merged.origin if o < 0)
        assert sorted(adopted + [p for p in partner if p >= 0]) == list(range(len(trees.paths(other))))
        assert len(trees.paths(merged.root)) == len(merged.origin)


@pytest.mark.parametrize(
    "plain",
    [
        [1, None, ["a", "b"], b"\0"],
        [1, None, ["a"], b"\1"],
        [1, None, ["a", "a"], b"\0\0"],
        [1, None, ["a", 5], b"\0"],
        [4, None, ["a"], b"\0"],
        [4, None, [], "\0"],
        [4, None, [], 1],
        [7, 1, [], b"\0\0"],
        [8, ["transfuse._limits:Limits", None], ["a"], b"\0\0"],
        b"\0",
        1,
        -1,
        [4, None, [], [1, [4, None, [], b"\0"]]],
        [4, None, [], [[4, None, [], b"\0"], 2]],
        [4, None, [], [[2, None, ["a"], b"\0"], 1]],
        [4, None, [], [[4, None, [], [0]], 1]],
        [4, None, [], [[4, None, [], b"\0"], True]],
        [4, None, [], [[4, None, [], b"\0"], -1]],
    ],
    ids=repr,
)
def test_malformed_leaves_are_refused(plain: Any) -> None:
    with pytest.raises(ValueError, match=r"."):
        trees.decode(plain, max_depth=9)


def test_both_spellings_of_leaves_are_read() -> None:
    for children in (b"\0\0", [0, 0]):
        root, count = trees.decode([1, None, ["a", "b"], children], max_depth=9)
        assert root is not None
        assert (count, root.leaves, root.children, root.keys) == (2, 2, [None, None], ["a", "b"])


def test_containers_that_are_alike_are_written_once() -> None:
    groups = [{"step": 1, "average": 2} for _ in range(1000)]
    state = {"state": dict(enumerate(groups)), "same": [(1, 2), (1, 2), [1, 2], {"step": 1}, {1: 1}, {True: 1}]}
    root, leaves = trees.flatten(state, max_depth=9)
    data = msgspec.msgpack.encode(trees.encode(root))
    assert len(data) < 6000
    again, count = trees.decode(msgspec.msgpack.decode(data), max_depth=9)
    assert count == len(leaves) == 2009
    arrived = trees.unflatten(again, leaves)
    assert arrived == state
    assert list(map(type, arrived["same"])) == list(map(type, state["same"]))
    assert [type(key) for one in arrived["same"][4:] for key in one] == [int, bool]
    arrived["state"][0]["step"] = 5
    assert arrived["state"][1]["step"] == 1
    assert trees.paths(again)[2003] == "['same'][1][1]"


# --------------------------------------------------------------------------------------------------- boxes and parcels


@relaxed
@given(state=states(["dense", "alias"]))
def test_regions_are_those_of_the_tensors(state: Any) -> None:
    manifest = describe(state, LIMITS).manifest
    regions = lay_out(manifest)
    found = [(int(regions.storage[i]), regions.region(i), regions.members(i)) for i in range(len(regions))]
    expected = []
    budget = Budget()
    for storage in range(len(manifest.storages)):
        numbers = np.flatnonzero((manifest.tensors.storage == storage) & (manifest.tensors.numel > 0)).tolist()
        for region, members in cover([(row, *manifest.tensors.region(row)) for row in numbers], budget):
            single = region._replace(sizes=(1,), strides=(1,)) if not region.sizes else region
            expected.append((storage, single, members))
    assert found == expected


def columns_of_regions(sizes: list[tuple[int, int, int]]) -> Regions:
    """Boxes of the given numbers of items and bytes on these devices."""
    ints: Callable[[list[int]], Ints] = lambda column: np.array(column, dtype=np.int64)  # noqa: E731
    count = len(sizes)
    items = ints([item for _, item, _ in sizes])
    return Regions(
        storage=np.arange(count),
        space=np.sort(ints([device for _, _, device in sizes])),
        start=np.zeros(count, dtype=np.int64),
        nbytes=ints([n for n, _, _ in sizes]) * items,
        item=items,
        tensor=np.arange(count),
        strided={},
        also={},
    )


SIZES = st.one_of(st.integers(1, 40), st.integers(100, 300))


@relaxed
@given(
    sizes=st.lists(st.tuples(SIZES, st.sampled_from([1, 2, 4, 8, 16]), st.integers(0, 2)), max_size=60),
    parcel_bytes=st.sampled_from([256, 272, 1024]),
)
def test_every_byte_travels_once(sizes: list[tuple[int, int, int]], parcel_bytes: int) -> None:
    regions = columns_of_regions(sizes)
    cut = parcels.cut(regions, parcel_bytes)
    seen: list[tuple[int, int]] = []
    for number in range(len(cut)):
        extents = list(cut.extents(number))
        assert 0 < cut.nbytes[number] <= parcel_bytes
        assert extents[-1].position + extents[-1].high - extents[-1].low == cut.nbytes[number]
        assert len({int(regions.space[extent.region]) for extent in extents}) == 1
        chosen, positions = cut.columns(number)
        assert list(range(chosen.start, chosen.stop)) == [extent.region for extent in extents]
        assert positions.tolist() == [extent.position for extent in extents]
        end = 0
        for extent in extents:
            assert extent.position >= end
            assert extent.position - end < 16
            assert extent.position % regions.item[extent.region] == extent.low % regions.item[extent.region] == 0
            end = extent.position + extent.high - extent.low
            seen += [(extent.region, byte) for byte in range(extent.low, extent.high)]
    assert seen == [(region, byte) for region in range(len(regions)) for byte in range(regions.nbytes[region])]


def test_small_regions_fill_parcels() -> None:
    cut = parcels.cut(columns_of_regions([(100, 4, 0)] * 1000), 64 << 10)
    assert (cut.nbytes[:-1] > 7 * (64 << 10) // 8 - 400).all()


# ---------------------------------------------------------------------------------------------------------------- speed


def everything(leaves: int) -> int:
    """How many Python functions run from describing to the plan of a state of this number of tensors."""
    state = {"a": {f"t{i}": torch.ones(2) for i in range(leaves)}, "b": [torch.ones(1)]}
    target = {"a": {f"t{i}": torch.ones(2) for i in range(leaves)}, "b": [torch.ones(1)]}
    calls = 0

    def count(frame: object, event: str, argument: object) -> None:
        nonlocal calls
        calls += event == "call"

    sys.setprofile(count)
    try:
        manifest = sent(describe(state, LIMITS))
        found = match(
            manifest, target, build_context=BuildContext(), registry=Registry(LIMITS), strict=True, limits=LIMITS
        )
        parcels.fingerprint(parcels.cut(lay_out(manifest, found.apart, found.wanted), LIMITS.parcel_bytes))
    finally:
        sys.setprofile(None)
    assert found.copies_as_bytes.all()
    return calls


def test_no_line_of_python_runs_for_each_tensor() -> None:
    everything(10)
    few, many = everything(2_000), everything(12_000)
    assert many - few < 10_000 / 5


def test_shapes_of_all_dimensions() -> None:
    ndim = np.array([0, 1, 2, 3, 1, 0], dtype=np.int64)
    shapes = Shapes(ndim=ndim, sizes=np.array([5, 2, 3, 1, 4, 0, 7]), strides=np.array([1, 3, 1, 9, 1, 1, 2]))
    assert shapes.numel.tolist() == [1, 5, 6, 0, 7, 1]
    assert shapes.reach.tolist() == [1, 5, 6, 0, 13, 1]
    assert shapes.contiguous.tolist() == [True, True, True, False, False, True]
