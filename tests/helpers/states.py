"""Random states, and targets to receive them into.

Hypothesis draws the structure, so that a failure shrinks to few leaves of plain kinds; the bytes come from a seed.
"""

from __future__ import annotations

import dataclasses
import datetime
import enum
import functools
import math
import pathlib
import warnings
from collections import OrderedDict, deque
from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils import _pytree

__all__ = ["DTYPES", "KINDS", "RARE_DTYPES", "Color", "Config", "Pair", "Point", "dense", "layouts", "like", "states"]

T = TypeVar("T")


def _dtypes(*names: str) -> tuple[torch.dtype, ...]:
    """Those that this torch has: bcomplex32 came with 2.14."""
    return tuple(getattr(torch, name) for name in names if hasattr(torch, name))


_HALF_COMPLEX = _dtypes("complex32", "bcomplex32")

# All warn once for each process that they are young. Here, once, so that no test that draws a state has to expect it.
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    for _dtype in _HALF_COMPLEX:
        torch.empty(0, dtype=_dtype)
    torch.empty(0, 0, layout=torch.sparse_csr)


# Hypothesis prints the state that failed, and would die of a tensor that has no repr: of float4_e2m1fn_x2, for one.
_repr_of_torch: Callable[..., str] = Tensor.__repr__


def _repr(self: Tensor, **kw: Any) -> str:
    try:
        return _repr_of_torch(self, **kw)
    except Exception:
        return f"tensor(<{tuple(self.shape)}>, dtype={self.dtype})"


Tensor.__repr__ = _repr  # type: ignore[method-assign, assignment]


DTYPES = _dtypes(
    *("bool", "uint8", "int8", "uint16", "int16", "uint32", "int32", "uint64", "int64"),
    *("float16", "bfloat16", "float32", "float64", "complex32", "bcomplex32", "complex64", "complex128"),
    *("float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu", "float4_e2m1fn_x2"),
)
"""Every dtype that torch fully holds on the CPU."""

RARE_DTYPES = _dtypes(
    *("bits8", "bits16", "bits1x8", "bits2x4", "bits4x2"),
    *(f"{sign}int{bits}" for sign in ("", "u") for bits in range(1, 8)),
)
"""Those that are little more than a name for bytes: most have no copy kernel. Drawn on request only."""

KINDS = ("dense", "alias", "coo", "compressed", "jagged", "wrapper", "value")

_SHAPES = (
    *((3,), (), (0,), (1,), (7,), (2, 3), (1, 4), (4, 1), (1, 1), (0, 3), (3, 0), (5, 5), (2, 3, 4), (1, 3, 1)),
    *((2, 0, 2), (2, 3, 2, 2), (1, 2, 1, 3, 1), (257,), (33, 17)),
)
_LAYOUTS = (
    *("contiguous", "transposed", "stepped", "offset", "expanded", "channels_last", "overlapping", "odd", "loose"),
    "large",
)


# What trees are made of


class Point(NamedTuple):
    x: Any
    y: Any


@dataclasses.dataclass
class Config:
    x: Any = None
    y: Any = None


_pytree.register_dataclass(Config)


class Color(enum.Enum):
    RED = "r"
    BLUE = 2


class Pair(Tensor):
    """A traceable wrapper subclass: two inner tensors and a context that says which dtype it pretends to have."""

    data_: Tensor
    scale: Tensor
    context: dict[str, Any]

    @staticmethod
    def __new__(cls, data: Tensor, scale: Tensor, context: dict[str, Any], requires_grad: bool = False) -> Pair:
        self: Pair = Tensor._make_wrapper_subclass(
            cls, data.shape, strides=data.stride(), dtype=context["dtype"], requires_grad=requires_grad
        )
        self.data_, self.scale, self.context = data, scale, context
        return self

    def __tensor_flatten__(self) -> tuple[list[str], dict[str, Any]]:
        return ["data_", "scale"], self.context

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, Tensor], context: dict[str, Any], size: Any, stride: Any) -> Pair:
        return Pair(inner["data_"], inner["scale"], context)

    def __repr__(self) -> str:  # type: ignore[override]
        return f"Pair({self.context})"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        aten = torch.ops.aten
        if func in (aten.detach.default, aten.clone.default, aten.alias.default):
            return Pair(func(args[0].data_), func(args[0].scale), args[0].context)
        if func is aten.copy_.default:
            for name in ("data_", "scale"):
                getattr(args[0], name).copy_(getattr(args[1], name))
            return args[0]
        raise NotImplementedError(f"{func} of Pair")


torch.serialization.add_safe_globals([Pair, Point, Config, Color])

_KEYS: tuple[Any, ...] = (
    *("w", "b", 0, "layer.0.weight", (0, "a"), "ü", -7, "", (), 10**20, "it's", ((1,), 2), 1, " ", "\x00", "step"),
    *("日本", (None, True), 2**63, "_metadata"),
)
_VALUES: tuple[Any, ...] = (
    *(None, True, False, 0, -1, 2**63, -(2**64), 10**60, 0.5, -0.0, float("nan"), float("inf"), float("-inf"), 1e-320),
    *(
        complex(-0.0, float("nan")),
        1j,
        "",
        "naïve 日本 🜁",
        "\x00",
        b"",
        b"\x00\xff",
        Color.RED,
    ),
    *(set(), {1, "a", (2, 3)}, frozenset(), frozenset({None, 1.5, b"x"}), torch.float32, torch.float8_e5m2),
    *(torch.device("cpu"), torch.device("cuda", 1), torch.Size([]), torch.Size([2, 3]), Color.BLUE),
    *(np.float32(-0.0), np.float64("nan"), np.int8(-3), np.bool_(True), np.complex64(1j), np.uint64(2**64 - 1)),
    *(datetime.datetime(2024, 2, 29, 1, 2, 3, 4), datetime.datetime(2024, 1, 1, tzinfo=datetime.UTC)),
    *(datetime.date(1, 1, 1), datetime.timedelta(microseconds=-1), datetime.time(23, 59, fold=1)),
    *(pathlib.Path("/tmp/ü"), pathlib.Path()),
)
_ARRAY_DTYPES = ("f4", "f8", "i8", ">i2", "u1", "?", "c16", "f2", "U3", "S4", "M8[s]", "m8[ns]")
_ARRAY_SHAPES = ((3,), (), (0,), (2, 3), (1, 0, 2), (40, 50))


# Drawing


@functools.cache
def _integers(low: int, high: int) -> st.SearchStrategy[int]:
    return st.integers(low, high)


@functools.cache
def _one_of(choices: tuple[T, ...]) -> st.SearchStrategy[T]:
    return st.sampled_from(choices)


_SEEDS = st.integers(0, 2**32 - 1)
_FREE_VALUES = (
    st.integers(),
    st.floats(),
    st.complex_numbers(),
    st.text(max_size=8),
    st.binary(max_size=40),
    st.frozensets(st.integers() | st.text(max_size=3), max_size=3),
)


@st.composite
def states(
    draw: st.DrawFn,
    kinds: Collection[str] = KINDS,
    *,
    dtypes: Sequence[torch.dtype] = DTYPES,
    max_leaves: int = 10,
) -> Any:
    """A tree of up to `max_leaves` leaves of these kinds, a few KiB each and now and then a few hundred."""
    if unknown := set(kinds) - set(KINDS):
        raise ValueError(f"unknown kinds {sorted(unknown)}; there are {KINDS}")
    maker = _Maker(draw, tuple(dtypes))
    # Values twice, because there are many kinds of them.
    chosen = tuple(kind for kind in (*KINDS, "value") if kind in kinds)
    leaves = [getattr(maker, maker.one_of(chosen))() for _ in range(maker.integer(0, max_leaves))]
    return maker.tree(leaves)


class _Maker:
    def __init__(self, draw: st.DrawFn, dtypes: tuple[torch.dtype, ...]) -> None:
        self.draw, self.dtypes = draw, dtypes
        self.rng = np.random.default_rng(draw(_SEEDS))
        self.shown: list[Tensor] = []
        self.ragged: list[tuple[Tensor, Tensor | None]] = []

    def integer(self, low: int, high: int) -> int:
        return self.draw(_integers(low, high))

    def one_of(self, choices: tuple[T, ...]) -> T:
        chosen: T = self.draw(_one_of(choices))
        return chosen

    # Trees

    def tree(self, items: list[Any]) -> Any:
        for _ in range(self.integer(0, 4)):
            start = self.integer(0, len(items))
            stop = self.integer(start, len(items))
            items[start:stop] = [self.container(items[start:stop])]
        if len(items) == 1 and self.integer(0, 3) == 3:
            return items[0]
        return self.container(items)

    def container(self, items: list[Any]) -> Any:
        match self.one_of(("dict", "list", "tuple", "ordered", "state_dict", "deque", "bounded", "point", "config")):
            case "dict":
                return self.keyed(items)
            case "list":
                return list(items)
            case "tuple":
                return tuple(items)
            case "ordered":
                return OrderedDict(self.keyed(items))
            case "state_dict":
                made = OrderedDict(self.keyed(items))
                made._metadata = OrderedDict({"": {"version": 1}, "layer": {"version": 2, "of": 1.5}})  # type: ignore[attr-defined]
                return made
            case "deque":
                return deque(items)
            case "bounded":
                return deque(items, maxlen=len(items) + 1)
            case "point":
                return Point(*self.two(items))
            case _:
                return Config(*self.two(items))

    def keyed(self, items: list[Any]) -> dict[Any, Any]:
        first = self.integer(0, len(_KEYS) - 1)
        # More items than there are keys only if a test asks for that number of leaves.
        keys = [*(_KEYS[first:] + _KEYS[:first]), *range(100, 100 + len(items))]
        return dict(zip(keys, items, strict=False))

    @staticmethod
    def two(items: list[Any]) -> tuple[Any, Any]:
        rest = items[1:]
        return (items[0] if items else None), (rest[0] if len(rest) == 1 else tuple(rest) if rest else None)

    # Leaves

    def dense(self) -> Tensor:
        t = self.part()
        made = self.role(t)
        self.shown.append(made)
        return made

    def part(self, dtypes: tuple[torch.dtype, ...] = ()) -> Tensor:
        dtype = self.one_of(dtypes or self.dtypes)
        return dense(self.rng, dtype, self.one_of(_SHAPES), self.one_of(layouts(dtype)))

    def role(self, t: Tensor) -> Tensor:
        can_grad = t.is_floating_point() or t.is_complex()
        match self.one_of(("plain", "grad", "parameter", "frozen", "buffer")):
            case "grad" if can_grad:
                return t.requires_grad_()
            case "parameter" if can_grad:
                return nn.Parameter(t)
            case "frozen":
                return nn.Parameter(t, requires_grad=False)
            case "buffer":
                return nn.Buffer(t, persistent=bool(self.integer(0, 1)))
            case _:
                return t

    def alias(self) -> Tensor:
        """A further look into the storage of an earlier leaf."""
        if not self.shown:
            return self.dense()
        t = self.shown[self.integer(0, len(self.shown) - 1)]
        how = self.one_of(("object", "view", "transposed", "slice", "dtype"))
        if how == "object":
            return t
        if how == "view":
            made = t.detach()
        elif how == "transposed":
            made = t.detach().permute(tuple(reversed(range(t.dim()))))
        else:
            # Any byte may be shown as any number, except as a bool.
            other = tuple(d for d in self.dtypes if d is not torch.bool) or self.dtypes
            made = self.window(t.untyped_storage(), t.dtype if how == "slice" else self.one_of(other))
        made = self.role(made)
        self.shown.append(made)
        return made

    def window(self, storage: torch.UntypedStorage, dtype: torch.dtype) -> Tensor:
        count = storage.nbytes() // dtype.itemsize
        start = self.integer(0, count)
        length, step = self.integer(0, min(count - start, 300)), self.integer(1, 2)
        return _view(storage, dtype, start, ((length + step - 1) // step,), (step,))

    def coo(self) -> Tensor:
        sizes, inner, nnz = self.one_of(((3,), (3, 4), (1, 2, 5))), self.one_of(((), (2,), (0,))), self.integer(0, 4)
        coalesced = bool(self.integer(0, 1))
        flat = self.rng.integers(0, math.prod(sizes), nnz)
        if coalesced:
            flat = np.unique(flat)
        indices = torch.from_numpy(np.array(np.unravel_index(flat, sizes), np.int64).reshape(len(sizes), len(flat)))
        values = self.values((len(flat), *inner))
        made = torch.sparse_coo_tensor(
            indices.clone(), values, (*sizes, *inner), is_coalesced=coalesced, check_invariants=False
        )
        return self.maybe_grad(made)

    def compressed(self) -> Tensor:
        layout = self.one_of((torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc))
        index = self.one_of((torch.int64, torch.int32))
        block = (2, 3) if layout in (torch.sparse_bsr, torch.sparse_bsc) else ()
        present = self.rng.random((self.integer(0, 3), self.integer(0, 3))) < 0.5
        grid = present if layout in (torch.sparse_csr, torch.sparse_bsr) else present.T
        compressed = torch.tensor([0, *np.cumsum(present.sum(1))], dtype=index)
        plain = torch.tensor(np.nonzero(present)[1], dtype=index)
        size = [n * b for n, b in zip(grid.shape, block or (1, 1), strict=True)]
        values = self.values((len(plain), *block))
        made = torch.sparse_compressed_tensor(compressed, plain, values, size, layout=layout, check_invariants=False)
        return self.maybe_grad(made)

    def values(self, shape: tuple[int, ...]) -> Tensor:
        return dense(self.rng, self.one_of(self.dtypes), shape, self.one_of(("contiguous", "stepped", "offset", "odd")))

    def maybe_grad(self, t: Tensor) -> Tensor:
        can_grad = t.is_floating_point() or t.is_complex()
        return t.requires_grad_() if can_grad and self.integer(0, 1) else t

    def jagged(self) -> Tensor:
        if self.ragged and self.integer(0, 1):
            offsets, lengths = self.ragged[-1]
        else:
            counts = self.rng.integers(0, 4, self.integer(1, 4))
            offsets = torch.tensor([0, *np.cumsum(counts)])
            lengths = torch.tensor(np.maximum(counts - 1, 0)) if self.integer(0, 1) else None
            self.ragged.append((offsets, lengths))
        total = int(offsets[-1])
        shape, ragged = self.one_of((((total,), 1), ((total, 2), 1), ((3, total), 2)))
        made: Tensor = torch.nested.nested_tensor_from_jagged(self.values(shape), offsets, lengths, jagged_dim=ragged)
        return self.maybe_grad(made)

    def wrapper(self) -> Tensor:
        context = {"dtype": self.one_of((torch.float32, torch.bfloat16)), "block": (self.integer(1, 3), "x")}
        made = Pair(self.part(), self.part(), context)
        return self.maybe_grad(made)

    def value(self) -> Any:
        which = self.integer(0, len(_FREE_VALUES) + 9)
        if which < len(_FREE_VALUES):
            return self.draw(_FREE_VALUES[which])
        if which < len(_FREE_VALUES) + 2:
            shape, dtype = self.one_of(_ARRAY_SHAPES), self.one_of(_ARRAY_DTYPES)
            array = self.rng.integers(0, 100, shape).astype(dtype)
            return array.T if self.integer(0, 1) else array
        if which == len(_FREE_VALUES) + 2:
            return self.rng.bytes(70_000)
        # By the seed: drawn from all of them, most would hardly ever appear.
        return _VALUES[self.rng.integers(len(_VALUES))]


# Tensors


@functools.cache
def layouts(dtype: torch.dtype) -> tuple[str, ...]:
    """How a tensor of this dtype may lie in memory: what :func:`dense` takes."""
    if dtype in _HALF_COMPLEX:
        # Of both at once torch cannot make a plain one.
        return (*_LAYOUTS, "conj", "neg")
    if dtype.is_complex:
        return (*_LAYOUTS, "conj", "neg", "conj_neg")
    return (*_LAYOUTS, "imag") if dtype in (torch.float16, torch.float32, torch.float64) else _LAYOUTS


def dense(rng: np.random.Generator, dtype: torch.dtype, shape: tuple[int, ...], layout: str) -> Tensor:
    """A strided tensor of random bytes. `shape` is a wish: some layouts need one of their own."""
    if layout == "channels_last":
        shape = shape if len(shape) == 4 else (2, 3, 2, 2)
    elif layout == "large":
        shape = ((100 << 10) // dtype.itemsize + 3,)
    elif layout == "imag":
        wide = {torch.float16: torch.complex32, torch.float32: torch.complex64, torch.float64: torch.complex128}
        return dense(rng, wide[dtype], shape, "conj").imag
    strides, offset, tail = _contiguous(shape), 0, 0
    match layout:
        case "transposed":
            strides = _contiguous(shape[::-1])[::-1]
        case "stepped":
            strides, offset = tuple(2 * s for s in strides), 1
        case "offset":
            offset, tail = 3, 2 * dtype.itemsize
        case "expanded":
            strides = tuple(0 if rng.random() < 0.5 else s for s in strides)
        case "channels_last":
            _, c, h, w = shape
            strides = (c * h * w, 1, c * w, c)
        case "overlapping":
            strides = (1,) * len(shape)
        case "odd":
            # An odd number of bytes, which is no number of elements of any wider dtype.
            offset, tail = 1, 1 + dtype.itemsize % 2
        case "loose":
            # The stride of a dimension of one element, or of an empty tensor, is anything.
            free = [size < 2 or 0 in shape for size in shape]
            strides = tuple(int(rng.integers(0, 9)) if f else s for f, s in zip(free, strides, strict=True))
    nbytes = _extent(shape, strides, offset) * dtype.itemsize + tail
    raw = torch.empty(nbytes, dtype=torch.uint8)
    raw.copy_(torch.from_numpy(rng.integers(0, 2 if dtype is torch.bool else 256, nbytes, np.uint8)))
    t = _view(raw.untyped_storage(), dtype, offset, shape, strides)
    if "neg" in layout:
        t = torch._neg_view(t)
    return t.conj() if "conj" in layout else t


def _contiguous(shape: tuple[int, ...]) -> tuple[int, ...]:
    strides, stride = [], 1
    for size in reversed(shape):
        strides.append(stride)
        stride *= max(size, 1)
    return tuple(reversed(strides))


def _extent(shape: Sequence[int], strides: Sequence[int], offset: int) -> int:
    """How many elements a storage needs."""
    if 0 in shape:
        return offset
    return offset + 1 + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))


def _view(
    storage: torch.UntypedStorage, dtype: torch.dtype, offset: int, shape: Sequence[int], strides: Sequence[int]
) -> Tensor:
    return torch.empty(0, dtype=dtype).set_(storage, offset, tuple(shape), tuple(strides))


# Targets


def like(state: Any, seed: int = 0, *, zero_indices: bool = True) -> tuple[Any, Callable[[], None]]:
    """A target to receive `state` in place, and a check that nothing outside its elements was written.

    The same tree and values, and for each strided tensor (part of a sparse, nested or wrapper tensor, or on its own)
    one of zeros with a layout of its own in a larger storage of 0xA5. No two share a storage. Without `zero_indices`,
    the indices of sparse tensors and the offsets of jagged ones are those of `state` instead of zeros.
    """
    maker = _TargetMaker(np.random.default_rng(seed), zero_indices)
    return maker.tree(state), maker.check


class _TargetMaker:
    def __init__(self, rng: np.random.Generator, zero_indices: bool) -> None:
        self.rng, self.zero_indices = rng, zero_indices
        self.guarded: list[tuple[Tensor, Tensor]] = []

    def check(self) -> None:
        for index, (raw, own) in enumerate(self.guarded):
            wrong = ((raw != _GUARD) & ~own).nonzero().flatten().tolist()
            assert not wrong, f"bytes {wrong[:10]} around target tensor {index} were overwritten"

    def tree(self, node: Any) -> Any:
        if isinstance(node, Tensor):
            return self.tensor(node)
        if isinstance(node, OrderedDict):
            made = OrderedDict((key, self.tree(child)) for key, child in node.items())
            vars(made).update(vars(node))
            return made
        if type(node) is dict:
            return {key: self.tree(child) for key, child in node.items()}
        if type(node) in (Point, Config):
            return type(node)(self.tree(node.x), self.tree(node.y))
        if type(node) in (list, tuple):
            return type(node)(self.tree(child) for child in node)
        if isinstance(node, deque):
            return deque((self.tree(child) for child in node), node.maxlen)
        return node

    def tensor(self, t: Any) -> Tensor:
        made: Tensor
        if isinstance(t, Pair):
            made = Pair(self.strided(t.data_), self.strided(t.scale), t.context)
        elif t.layout is torch.jagged:
            offsets, lengths = self.index(t._offsets), None if t._lengths is None else self.index(t._lengths)
            made = torch.nested.nested_tensor_from_jagged(
                self.strided(t._values), offsets, lengths, jagged_dim=t._ragged_idx
            )
        elif t.layout is torch.sparse_coo:
            parts = self.index(t._indices()), self.strided(t._values())
            made = torch.sparse_coo_tensor(*parts, t.shape, is_coalesced=t.is_coalesced(), check_invariants=False)
        elif t.layout in (torch.sparse_csr, torch.sparse_bsr):
            made = self.compressed(t, t.crow_indices(), t.col_indices())
        elif t.layout in (torch.sparse_csc, torch.sparse_bsc):
            made = self.compressed(t, t.ccol_indices(), t.row_indices())
        elif type(t) in (Tensor, nn.Parameter) and t.layout is torch.strided:
            made = self.strided(t)
        else:
            raise TypeError(f"no target for {type(t).__name__} of layout {t.layout}")
        if isinstance(t, nn.Parameter):
            return nn.Parameter(made, requires_grad=t.requires_grad)
        if isinstance(t, nn.Buffer):
            made = nn.Buffer(made, persistent=t.persistent)
        return made.requires_grad_(t.requires_grad)

    def compressed(self, t: Tensor, compressed: Tensor, plain: Tensor) -> Tensor:
        parts = self.index(compressed), self.index(plain), self.strided(t.detach().values())
        return torch.sparse_compressed_tensor(*parts, t.shape, layout=t.layout, check_invariants=False)

    def index(self, t: Tensor) -> Tensor:
        return self.strided(t) if self.zero_indices else self.strided(t).copy_(t)

    def strided(self, t: Tensor) -> Tensor:
        rng, size = self.rng, t.element_size()
        # Dimensions in any order in memory, each with room to spare after it.
        strides, stride = [0] * t.dim(), int(rng.integers(1, 3))
        for dim in rng.permutation(t.dim()):
            strides[dim] = stride
            stride = stride * max(t.shape[dim], 1) + int(rng.integers(0, 3))
        offset = int(rng.integers(0, 6))
        nbytes = (_extent(t.shape, strides, offset) + 1) * size + int(rng.integers(0, 8))
        raw, own = torch.full((nbytes,), _GUARD, dtype=torch.uint8), torch.zeros(nbytes, dtype=torch.bool)
        place = (*t.shape, size), (*(s * size for s in strides), 1), offset * size
        own.as_strided(*place).fill_(True)
        raw.as_strided(*place).zero_()
        self.guarded.append((raw, own))
        return _view(raw.untyped_storage(), t.dtype, offset, t.shape, strides)


_GUARD = 0xA5
