"""What the strategies draw is varied, fast to make, and what it says it is."""

from __future__ import annotations

import time
from collections import Counter, OrderedDict, deque
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, Phase, find, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils import _pytree

from states import DTYPES, KINDS, RARE_DTYPES, Color, Config, Pair, Point, dense, layouts, like, states
from transfuse.testing.exact import differences

# Of a state with 70,000 bytes in it, when that is what failed or was found.
pytestmark = pytest.mark.filterwarnings("ignore:Generating overly large repr:hypothesis.errors.HypothesisWarning")

FEW = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])


@pytest.mark.parametrize("dtype", [*DTYPES, *RARE_DTYPES], ids=str)
def test_every_dtype_in_every_layout(dtype: torch.dtype) -> None:
    rng = np.random.default_rng(0)
    for layout in layouts(dtype):
        for shape in ((), (0,), (1, 3), (2, 3, 4), (2, 3, 2, 2)) if layout != "large" else ((),):
            t = dense(rng, dtype, shape, layout)
            assert (t.dtype, type(t)) == (dtype, Tensor)
            assert layout in ("channels_last", "large") or t.shape == shape
            assert (t.is_conj(), t.is_neg()) == ("conj" in layout, "neg" in layout or layout == "imag")
            assert differences(t, t) == []
            assert differences(t, dense(np.random.default_rng(1), dtype, shape, layout)) or t.numel() < 8


def test_layouts_are_what_they_say() -> None:
    rng = np.random.default_rng(0)
    made = {layout: dense(rng, torch.float32, (2, 3, 2, 2), layout) for layout in layouts(torch.float32)}
    assert made["contiguous"].is_contiguous()
    assert made["transposed"].stride() == (1, 2, 6, 12)
    assert made["channels_last"].is_contiguous(memory_format=torch.channels_last)
    assert made["overlapping"].stride() == (1, 1, 1, 1)
    assert made["offset"].storage_offset() == 3
    assert made["odd"].untyped_storage().nbytes() % 2 == 1
    assert made["large"].nbytes > 100_000
    assert dense(rng, torch.float32, (1, 1, 1), "loose").stride() != (1, 1, 1)


@FEW
@given(states())
def test_a_state_equals_itself(state: Any) -> None:
    assert differences(state, state) == []
    assert differences(state, state, in_place=True) == []


@FEW
@given(states(), st.integers(0, 5), st.booleans())
def test_target_has_the_form_of_the_state(state: Any, seed: int, zero_indices: bool) -> None:
    target, check = like(state, seed, zero_indices=zero_indices)
    lines = differences(state, target, in_place=True)
    assert all(": values, " in line for line in lines), lines
    if zero_indices:
        assert all(not bool(part) for part in zeros(target))
    storages = [t.untyped_storage()._cdata for t in parts(target)]
    assert len(storages) == len(set(storages)), "targets share no storage"
    check()


def parts(state: Any) -> list[Tensor]:
    found: list[Tensor] = []
    for leaf in _pytree.tree_leaves(state):
        if isinstance(leaf, Pair):
            found += [leaf.data_, leaf.scale]
        elif isinstance(leaf, Tensor) and leaf.layout is torch.strided:
            found.append(leaf.detach())
    return found


def zeros(state: Any) -> list[bool]:
    """For each strided part, whether it has a byte that is not zero."""
    # By copy_, because .contiguous() leaves odd strides where there is one element or none.
    copies = [torch.empty(t.shape, dtype=t.dtype).copy_(t) for t in parts(state)]
    return [bool(t.reshape(-1).view(torch.uint8).any()) for t in copies]


@FEW
@given(states(kinds=["dense"], dtypes=[torch.int32, torch.float64]), st.data())
def test_guard_bytes_are_guarded(state: Any, data: st.DataObject) -> None:
    target, check = like(state, data.draw(st.integers(0, 3)))
    for t in parts(target):
        t.fill_(7)
    check()
    if found := parts(target):
        t = data.draw(st.sampled_from(found))
        own = {t.storage_offset() + int(i) for i in np.ravel(_positions(t))}
        size, storage = t.element_size(), t.untyped_storage()
        foreign = [i for i in range(storage.nbytes()) if i // size not in own]
        storage[data.draw(st.sampled_from(foreign))] = 0
        with pytest.raises(AssertionError, match="were overwritten"):
            check()


def _positions(t: Tensor) -> Any:
    grid = np.indices(t.shape)
    return np.tensordot(np.array(t.stride(), int), grid, 1) if t.dim() else np.zeros((), int)


def test_everything_appears() -> None:
    seen: Counter[Any] = Counter()

    @settings(max_examples=500, deadline=None, database=None, derandomize=True, phases=[Phase.generate])
    @given(states())
    def draw(state: Any) -> None:
        nodes, stack = [], [state]
        while stack:
            node = stack.pop()
            nodes.append(node)
            if isinstance(node, dict):
                stack += node.values()
                seen.update(type(key) for key in node)
                seen["_metadata"] += isinstance(node, OrderedDict) and hasattr(node, "_metadata")
            elif type(node) in (Point, Config):
                stack += [node.x, node.y]
            elif type(node) in (list, tuple, deque):
                stack += node
        tensors = [node for node in nodes if isinstance(node, Tensor)]
        seen.update(type(node) for node in nodes)
        seen.update(t.dtype for t in tensors)
        seen.update(t.layout for t in tensors)
        seen["buffer"] += any(isinstance(t, nn.Buffer) for t in tensors)
        seen["grad"] += any(t.requires_grad for t in tensors)
        storages = [t.untyped_storage()._cdata for t in parts(state)]
        seen["alias"] += len(set(storages)) < len(storages)
        seen["large bytes"] += any(isinstance(node, bytes) and len(node) > 64 << 10 for node in nodes)

    began = time.process_time()
    draw()
    per_example = (time.process_time() - began) / 500
    wanted: list[Any] = [*DTYPES, dict, OrderedDict, list, tuple, deque, Point, Config, Color, Pair, nn.Parameter]
    wanted += [np.ndarray, str, int, set, frozenset, complex, float, bytes, "large bytes"]
    wanted += ["buffer", "grad", "alias", "_metadata", torch.strided, torch.jagged]
    wanted += [torch.sparse_coo, torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc]
    assert [what for what in wanted if not seen[what]] == []
    # Far above what it takes, some 5 ms.
    assert per_example < 0.05, f"{1e3 * per_example:.1f} ms for each example"


@pytest.mark.parametrize("kind", KINDS)
def test_kinds_are_chosen_and_shrink(kind: str) -> None:
    def fits(state: Any) -> bool:
        leaves = _pytree.tree_leaves(state)
        return any(isinstance(leaf, (int, float) if kind == "value" else Tensor) for leaf in leaves)

    smallest = find(states(kinds=[kind]), fits, settings=settings(database=None, max_examples=200))
    # The one it takes, and the None that fills a Point or Config.
    assert len(_pytree.tree_leaves(smallest)) <= 3


def test_all_can_be_printed() -> None:
    assert "float4_e2m1fn_x2" in repr(dense(np.random.default_rng(0), torch.float4_e2m1fn_x2, (2,), "contiguous"))
    assert repr(torch.ones(2)) == "tensor([1., 1.])"


def test_unknown_kinds_are_refused() -> None:
    with pytest.raises(ValueError, match="unknown kinds"):
        find(states(kinds=["tensor"]), lambda _: True)


def test_wrapper_behaves() -> None:
    pair = Pair(torch.ones(2), torch.ones(1), {"dtype": torch.bfloat16, "block": 1})
    parameter = nn.Parameter(pair)
    assert isinstance(parameter, nn.Parameter)
    assert isinstance(parameter, Pair)
    assert parameter.requires_grad
    other = pair.clone()
    assert isinstance(other, Pair)
    other.scale.zero_()
    assert differences(pair, other)
    other.copy_(pair)
    assert differences(pair, other) == []
    with pytest.raises(NotImplementedError):
        pair + 1
