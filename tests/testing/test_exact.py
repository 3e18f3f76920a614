"""The oracle, tested by mutation: an equal pair gives no line, each single change gives one that names its place."""

from __future__ import annotations

import copy
import datetime
import decimal
import functools
import pathlib
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import HashStore

from transfuse.testing.exact import assert_exact, differences
from unequal import (
    UNEQUAL_TENSORS,
    UNEQUAL_TREES,
    UNEQUAL_VALUES,
    UTC,
    Color,
    Config,
    Money,
    Plain,
    Point,
    Registered,
    Z,
    coo,
    csr,
    jagged,
    wrapped,
)

pytestmark = [
    pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental:UserWarning"),
    pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta state:UserWarning"),
    pytest.mark.filterwarnings("ignore:Sparse invariant checks are implicitly disabled:UserWarning"),
    pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype stage:UserWarning"),
    pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor:UserWarning"),
]


@pytest.mark.parametrize(("expected", "got", "line"), [pytest.param(*c[1:], id=c[0]) for c in UNEQUAL_TREES])
def test_tree_difference_is_found(expected: Any, got: Any, line: str) -> None:
    for in_place in (False, True):
        found = differences(expected, got, in_place=in_place)
        assert any(line in text for text in found), found
    assert differences({"deep": [expected]}, {"deep": [got]})
    assert differences(expected, expected) == []


@pytest.mark.parametrize(("expected", "got"), [pytest.param(*c[1:], id=c[0]) for c in UNEQUAL_VALUES])
def test_value_difference_is_found(expected: Any, got: Any) -> None:
    for a, b in ((expected, got), (got, expected)):
        for in_place in (False, True):
            found = differences({"v": [a]}, {"v": [b]}, in_place=in_place)
            assert found, "no difference found"
            assert all(text.startswith("['v'][0]") for text in found), found
            assert all("\n" not in text for text in found)
        assert differences(a, copy.deepcopy(a)) == []


@pytest.mark.parametrize(
    ("expected", "got", "line", "matters_in_place"), [pytest.param(*c[1:], id=c[0]) for c in UNEQUAL_TENSORS]
)
def test_tensor_difference_is_found(
    expected: Callable[[], Any], got: Callable[[], Any], line: str, matters_in_place: bool
) -> None:
    for a, b in ((expected, got), (got, expected)):
        found = differences({"t": a()}, {"t": b()})
        assert any(text.startswith("['t']") for text in found), found
        assert bool(differences({"t": a()}, {"t": b()}, in_place=True)) == matters_in_place
    found = differences({"t": expected()}, {"t": got()})
    assert any(line in text for text in found), found
    if "cannot" not in line:
        for make in (expected, got):
            assert differences(make(), make()) == []
            assert differences(make(), make(), in_place=True) == []


@functools.cache
def dtypes() -> list[torch.dtype]:
    found = {d for d in vars(torch).values() if isinstance(d, torch.dtype)}
    return sorted((d for d in found if not str(d).startswith(("torch.q", "torch.quint"))), key=str)


@pytest.mark.parametrize("dtype", dtypes(), ids=str)
def test_every_bit_of_every_dtype_counts(dtype: torch.dtype) -> None:
    raw = torch.arange(32, dtype=torch.uint8) % (2 if dtype is torch.bool else 255)
    sent = raw.view(dtype)
    assert differences(sent, raw.clone().view(dtype)) == []
    for bit in (0, 7):
        for byte in (0, 17, 31):
            damaged = raw.clone()
            damaged[byte] ^= 1 << bit
            assert len(differences(sent, damaged.view(dtype))) == 1
            assert len(differences(sent, damaged.view(dtype), in_place=True)) == 1


@pytest.mark.parametrize("dtype", [torch.complex32, torch.complex64, torch.complex128], ids=str)
def test_lazy_bits_are_resolved_for_values_in_place(dtype: torch.dtype) -> None:
    z = torch.tensor([1 + 2j, -3 - 0j, complex("nan")], dtype=torch.complex128).to(dtype)
    # torch cannot resolve a complex32 that is both.
    both = [] if dtype is torch.complex32 else [torch._neg_view(z).conj()]
    for lazy in (z.conj(), torch._neg_view(z), z.conj().imag, *both):
        resolved = lazy.resolve_conj().resolve_neg()
        assert differences(lazy, resolved, in_place=True) == []
        assert differences(resolved, lazy, in_place=True) == []
        assert differences(lazy, resolved)


def test_lazy_bits_of_nothing() -> None:
    assert differences(torch.zeros(2, 0, 3), torch._neg_view(torch.zeros(2, 0, 3)), in_place=True) == []
    assert differences(Z[:0].conj(), Z[:0], in_place=True) == []


def test_values_of_lazy_negation_outside_ieee() -> None:
    assert differences(torch._neg_view(torch.tensor([1, -2])), torch.tensor([-1, 2]), in_place=True) == []


# Aliasing and offsets


def pair() -> list[Tensor]:
    base = torch.arange(8.0)
    return [base[:4], base[2:6]]


def test_aliasing_lost() -> None:
    a, b = pair()
    found = differences({"a": a, "b": b}, {"a": a.clone(), "b": b.clone()})
    assert found == ["['b']: storage: expected shared with ['a'], got of its own", *found[1:]]
    assert differences({"a": a, "b": b}, {"a": a.clone(), "b": b.clone()}, in_place=True) == []


def test_aliasing_invented() -> None:
    a, b = pair()
    assert "['b']: storage: expected of its own, got shared with ['a']" in differences(
        {"a": a.clone(), "b": b.clone()}, {"a": a, "b": b}
    )


def test_aliasing_with_another() -> None:
    x, y = torch.zeros(2), torch.zeros(2)
    found = differences([x, y, x], [x, y, y])
    assert found == ["[2]: storage: expected shared with [0], got shared with [1]"]


def test_aliasing_through_parts_of_composites() -> None:
    values = torch.ones(1)
    shared = [torch.sparse_coo_tensor(torch.tensor([[0]]), values, (2,)), wrapped(b=values)]
    assert differences(shared, shared) == []
    apart = [shared[0], wrapped(b=values.clone())]
    assert any("[1].b: storage" in line for line in differences(shared, apart))
    assert any("[1].b: storage" in line for line in differences(apart, shared))


def test_aliasing_of_tensors_without_elements() -> None:
    base = torch.zeros(4)
    assert differences([base, base[:0]], [base.clone(), torch.zeros(0)])
    # Where in the window they lie is not a fact that could be kept: the window may start after them.
    assert differences([base[2:], base[:0]], [base[2:], base[1:1]]) == []


def test_offsets_within_a_shared_storage() -> None:
    base, other = torch.zeros(8), torch.zeros(8)
    found = differences([base[:4], base[2:6]], [other[:4], other[3:7]])
    assert found == ["[1]: bytes from the start of what its storage's leaves show: expected 8, got 12"]
    # What moves is the window: what lies before it or after it is nobody's.
    assert differences([base[2:4], base[3:6]], [other[:2], other[1:4]]) == []
    assert differences([base[2:4]], [torch.zeros(2)]) == []


def test_offsets_are_bytes_across_dtypes() -> None:
    raw = torch.zeros(16, dtype=torch.uint8)
    assert differences([raw[3:5], raw[8:16].view(torch.int64)], [raw[3:5], raw[8:16].view(torch.int64)]) == []
    moved_ = torch.zeros(24, dtype=torch.uint8)
    assert differences(
        [raw[3:5], raw[8:16].view(torch.int64)], [moved_[11:13], moved_[16:24].view(torch.int64)]
    ) == []  # fmt: skip
    assert differences([raw[3:5], raw[8:16].view(torch.int64)], [moved_[2:4], moved_[8:16].view(torch.int64)])


def test_jagged_tensors_that_fit_each_other_still_do() -> None:
    offsets, again = torch.tensor([0, 2, 5]), torch.tensor([0, 2, 5])
    together = [jagged(torch.zeros(5), offsets), jagged(torch.ones(5), offsets)]
    assert differences(together, [jagged(torch.zeros(5), again), jagged(torch.ones(5), again)]) == []
    # Shares the storage, but not the tensor that stands for the ragged size: they can no longer be added.
    apart = [jagged(torch.zeros(5), again), jagged(torch.ones(5), again.view(3))]
    assert [line for line in differences(together, apart) if "ragged size" in line]
    assert [line for line in differences(apart, together) if "ragged size" in line]
    assert differences(together, apart, in_place=True) == []


# Trees that are equal


def state() -> dict[Any, Any]:
    base = torch.arange(12.0)
    ordered = OrderedDict(z=base[2:8].view(2, 3).t(), a=base)
    ordered._metadata = OrderedDict({"": {"version": 1}})  # type: ignore[attr-defined]
    return {
        "model": ordered,
        0: [nn.Parameter(torch.randn(2)), nn.Buffer(torch.zeros(1)), (None, True, 1, 1.5, float("nan"), 1j)],
        (1, "k"): deque([Point(torch.tensor(1), Config(torch.ones(0, 3), "ü"))], maxlen=4),
        "values": {1, 2.0, "x"},
        "more": [
            frozenset({1}),
            b"b",
            torch.float8_e5m2,
            torch.device("cpu"),
            torch.Size([1]),
            np.float32(1),
            Color.RED,
        ],
        "numpy": [np.arange(6).reshape(2, 3).T, np.array([1, None], object), np.datetime64("2020")],
        "times": [datetime.datetime(2020, 1, 1, tzinfo=UTC), pathlib.Path("a/b"), decimal.Decimal("NaN")],
        "factory": defaultdict(list, a=[1]),
        "registered": Registered([torch.ones(1)], {"a": 1}),
        "objects": [Plain(torch.ones(2)), Money(1)],
        "sparse": coo([[0, 1], [1, 1]], [1.0, 2.0]),
        "strided": [base.expand(2, 12), torch.zeros(2, 2, 2, 2).to(memory_format=torch.channels_last)],
    }


def test_equal_states() -> None:
    torch.manual_seed(0)
    sent = state()
    for got in (sent, copy.deepcopy(sent)):
        assert differences(sent, got) == []
        assert differences(sent, got, in_place=True) == []
        assert_exact(sent, got)


def test_identical_composites() -> None:
    nested, compressed = jagged(torch.zeros(5), [0, 2, 5]), csr(torch.sparse_bsc, [0, 1])
    for leaf in (wrapped(), nested, compressed, Z.conj().imag, torch._neg_view(Z)):
        assert differences([leaf, leaf], [leaf, leaf]) == []


def test_deepcopy_loses_lazy_bits_and_is_caught() -> None:
    assert differences(Z.conj(), copy.deepcopy(Z.conj()))


def test_assert_exact_lists_all() -> None:
    with pytest.raises(AssertionError, match=r"(?s)2 difference\(s\).*\['a'\]: value.*\['b'\]: type"):
        assert_exact({"a": 1, "b": 2}, {"a": 2, "b": "2"})
    with pytest.raises(AssertionError):
        assert_exact(torch.zeros(2), torch.zeros(2, 1), in_place=True)


def test_cycles_and_depth() -> None:
    loop: list[Any] = [1]
    loop.append(loop)
    assert differences(loop, loop) == []
    deep_a: list[Any] = [1]
    deep_b: list[Any] = [2]
    for _ in range(3000):
        deep_a, deep_b = [deep_a], [deep_b]
    assert len(differences(deep_a, deep_b)) == 1


def test_nothing_is_changed_by_comparing() -> None:
    short = torch.zeros(4)
    short.untyped_storage().resize_(8)
    before = short.untyped_storage().nbytes()
    assert differences(short, short)
    assert short.untyped_storage().nbytes() == before
    lazy = Z.conj()
    differences(lazy, Z.clone(), in_place=True)
    assert torch.equal(lazy, Z.conj())


# Distributed tensors, on a group of one


@pytest.fixture
def group() -> Iterator[dist.ProcessGroup]:
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    yield dist.group.WORLD  # type: ignore[misc]
    dist.destroy_process_group()


def test_dtensors(group: dist.ProcessGroup) -> None:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

    line, square = DeviceMesh("cpu", [0], mesh_dim_names=("x",)), DeviceMesh("cpu", [[0]], mesh_dim_names=("x", "y"))

    def make(t: Tensor, mesh: DeviceMesh = line, placements: tuple[Placement, ...] = (Shard(0),), **kw: Any) -> Tensor:
        return DTensor.from_local(t, mesh, placements, run_check=False, **kw)

    zeros = torch.zeros(2, 2)
    assert differences(make(zeros), make(zeros.clone())) == []
    for got, line_, in_place in (
        (make(torch.ones(2, 2)), "._local_tensor: values", True),
        (make(zeros.double()), "dtype", True),
        (make(zeros, placements=(Shard(1),)), "placements", True),
        (make(zeros, placements=(Replicate(),)), "placements", True),
        (make(zeros, square, (Shard(0), Replicate())), "mesh shape", True),
        (make(zeros, shape=torch.Size([3, 2]), stride=(2, 1)), "shape", True),
        (make(zeros.t()), "[0]: global stride", False),
        (make(zeros).requires_grad_(), "requires_grad", False),
        (nn.Parameter(make(zeros), requires_grad=False), "is a Parameter", False),
        (zeros, "type", True),
    ):
        found = differences([make(zeros)], [got])
        assert any(line_ in text for text in found), (line_, found)
        assert bool(differences([make(zeros)], [got], in_place=True)) == in_place, line_
    # The mesh is the receiver's own in place.
    replicated = make(zeros, square, (Shard(0), Shard(0))), make(zeros, DeviceMesh("cpu", [[0]]), (Shard(0), Shard(0)))
    assert differences(*replicated) == []
    # Local tensors take part in aliasing.
    assert any("storage" in text for text in differences([zeros, make(zeros)], [zeros, make(zeros.clone())]))


def test_sharded_tensors(group: dist.ProcessGroup) -> None:
    from torch.distributed._shard.sharded_tensor import init_from_local_shards
    from torch.distributed._shard.sharded_tensor.shard import Shard

    def make(t: Tensor, *sizes: int, offset: int = 0) -> Tensor:
        halves = [
            Shard.from_tensor_and_offsets(piece, [row, 0], 0)
            for piece, row in ((t[:1], offset), (t[1:], 1 - offset if len(t) == 2 else 1))
        ]
        made: Tensor = init_from_local_shards(halves, *sizes)
        return made

    sent = make(torch.zeros(2, 2), 2, 2)
    assert differences(sent, make(torch.zeros(2, 2), 2, 2)) == []
    for got, line in (
        (make(torch.ones(2, 2), 2, 2), ".local_shards()[0].tensor: values"),
        (make(torch.zeros(2, 2).double(), 2, 2), "[0]: dtype"),
        (make(torch.zeros(2, 3), 2, 3), "[0]: shape"),
        (make(torch.zeros(2, 2), 2, 2, offset=1), ".local_shards()[0]: offsets"),
        (
            init_from_local_shards([Shard.from_tensor_and_offsets(torch.zeros(2, 2), [0, 0], 0)], 2, 2),
            "number of local",
        ),
        (torch.zeros(2, 2), "type"),
    ):
        for in_place in (False, True):
            found = differences([sent], [got], in_place=in_place)
            assert any(line in text for text in found), (line, found)
    with_grad = make(torch.zeros(2, 2).requires_grad_(), 2, 2)
    assert any(line.startswith("[0]: requires_grad") for line in differences([sent], [with_grad]))
    assert differences([sent], [with_grad], in_place=True) == []
    uneven = make(torch.zeros(3, 2), 3, 2)
    even = init_from_local_shards(
        [Shard.from_tensor_and_offsets(torch.zeros(n, 2), [row, 0], 0) for n, row in ((2, 0), (1, 2))], 3, 2
    )
    assert any("sizes" in line for line in differences([uneven], [even]))
