"""Pairs of states that differ in one thing, and what the oracle says of each."""

from __future__ import annotations

import collections
import dataclasses
import datetime
import decimal
import enum
import pathlib
import uuid
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils import _pytree


class Point(NamedTuple):
    x: Any
    y: Any


class Twin(NamedTuple):
    x: Any
    y: Any


class Color(enum.Enum):
    RED = 1
    BLUE = 2


class Level(enum.IntEnum):
    LOW = 1


@dataclasses.dataclass
class Config:
    x: Any
    y: Any = None


_pytree.register_dataclass(Config)


class Registered:
    """A pytree node with a context, and == that must not be trusted."""

    def __init__(self, children: list[Any], context: Any) -> None:
        self.children, self.context = children, context

    def __eq__(self, other: object) -> bool:
        return True

    __hash__ = None  # type: ignore[assignment]


_pytree.register_pytree_node(
    Registered, lambda r: (r.children, r.context), lambda children, context: Registered(list(children), context)
)


class Money:
    """Not a pytree node, but with == of its own."""

    def __init__(self, amount: int) -> None:
        self.amount, self.looked_at = amount, object()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Money) and self.amount == other.amount

    __hash__ = None  # type: ignore[assignment]


class Plain:
    def __init__(self, x: Any) -> None:
        self.x = x


class Slotted:
    __slots__ = ("x",)

    def __init__(self, x: Any) -> None:
        self.x = x


class Opaque:
    __slots__ = ()


class Marked(Tensor):
    """A subclass with memory of its own and a python attribute."""

    mark: int = 0


class Wrapped(Tensor):
    """The least traceable wrapper subclass: inner tensors and a context."""

    names_: list[str]
    context: Any

    @staticmethod
    def __new__(
        cls, context: Any, requires_grad: bool = False, stride: Any = (2, 1), offset: int = 0, **inner: Tensor
    ) -> Wrapped:
        made: Any = Tensor._make_wrapper_subclass(
            cls, (2, 2), strides=stride, storage_offset=offset, dtype=torch.float32, requires_grad=requires_grad
        )
        made.names_, made.context = list(inner), context
        vars(made).update(inner)
        return made  # type: ignore[no-any-return]

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return self.names_, self.context

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, Tensor], context: Any, size: Any, stride: Any) -> Wrapped:
        return Wrapped(context, False, (2, 1), 0, **inner)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        raise NotImplementedError(func)


def nan32(payload: int) -> Tensor:
    return torch.tensor([payload], dtype=torch.int32).view(torch.float32)


def metadata(state: dict[str, Any], value: Any) -> OrderedDict[str, Any]:
    made = OrderedDict(state)
    made._metadata = value  # type: ignore[attr-defined]
    return made


def marked(mark: int) -> Tensor:
    made = torch.ones(2).as_subclass(Marked)
    made.mark = mark
    return made


NAN_B = float(np.array([0x7FF8000000000001], np.uint64).view(np.float64)[0])


UTC, PLUS_ONE = datetime.UTC, datetime.timezone(datetime.timedelta(hours=1))

# expected, got, and what the line must name.
UNEQUAL_TREES: list[tuple[str, Any, Any, str]] = [
    ("dict-ordered", {"a": 1}, OrderedDict(a=1), "(root): type"),
    ("list-tuple", [1], (1,), "(root): type"),
    ("tuple-namedtuple", (1, 2), Point(1, 2), "(root): type"),
    ("two-namedtuples", {"p": Point(1, 2)}, {"p": Twin(1, 2)}, "['p']: type"),
    ("namedtuple-field", {"p": Point(1, 2)}, {"p": Point(1, 3)}, "['p'].y: value"),
    ("list-deque", [1], deque([1]), "(root): type"),
    ("deque-maxlen", deque([1], 3), deque([1], 4), "(root): maxlen"),
    ("deque-no-maxlen", deque([1], 3), deque([1]), "(root): maxlen"),
    ("deque-item", deque([1, 2]), deque([1, 3]), "[1]: value"),
    ("size-tuple", torch.Size([1]), (1,), "(root): type"),
    ("size", torch.Size([1, 2]), torch.Size([1, 3]), "[1]: value"),
    ("set-frozenset", {1}, frozenset({1}), "(root): type"),
    ("set-element", {1, 2}, {1, 3}, "(root): element missing: expected 2"),
    ("set-extra", {1}, {1, 2}, "(root): element unexpected: expected nothing, got 2"),
    ("set-bool", {1}, {True}, "(root): element missing"),
    ("set-zero", {0.0}, {-0.0}, "(root): element missing"),
    ("set-tuple", {(1, 2.0)}, {(1, 2)}, "(root): element missing"),
    ("nested-frozenset", {frozenset({1})}, {frozenset({1.0})}, "(root): element missing"),
    ("default-factory", defaultdict(list, a=1), defaultdict(dict, a=1), "(root): default_factory"),
    ("no-default-factory", defaultdict(list, a=1), defaultdict(None, a=1), "(root): default_factory"),
    ("defaultdict-dict", defaultdict(list, a=1), {"a": 1}, "(root): type"),
    ("counter", collections.Counter(a=1), collections.Counter(a=2), "['a']: value"),
    ("missing-key", {"a": 1, "b": 2}, {"a": 1}, "['b']: key missing: expected 2"),
    ("extra-key", {"a": 1}, {"a": 1, "b": 2}, "['b']: key unexpected: expected nothing, got 2"),
    ("key-order", {"a": 1, "b": 2}, {"b": 2, "a": 1}, "(root): key order"),
    ("key-int-bool", {1: 0}, {True: 0}, "[1]: key missing"),
    ("key-int-float", {1: 0}, {1.0: 0}, "[1]: key missing"),
    ("key-int-str", {1: 0}, {"1": 0}, "[1]: key missing"),
    ("key-in-tuple", {(1, "a"): 0}, {(True, "a"): 0}, "[(1, 'a')]: key missing"),
    ("key-namedtuple", {(1, 2): 0}, {Point(1, 2): 0}, "[(1, 2)]: key missing"),
    ("key-enum", {1: 0}, {Level.LOW: 0}, "[1]: key missing"),
    ("key-str-bytes", {"a": 0}, {b"a": 0}, "['a']: key missing"),
    ("nesting", {"model": {"w": [0, 1]}}, {"model": {"w": [0, 2]}}, "['model']['w'][1]: value: expected 1, got 2"),
    ("shorter", [1, 2], [1], "(root): length: expected 2, got 1"),
    ("longer", [1], [1, 2], "(root): length"),
    ("emptied", {"a": {}}, {"a": []}, "['a']: type"),
    ("metadata", metadata({"a": 1}, {"": {"version": 1}}), metadata({"a": 1}, {"": {"version": 2}}), "['version']"),
    ("metadata-lost", metadata({"a": 1}, {"": {"version": 1}}), OrderedDict(a=1), "._metadata: attribute missing"),
    ("metadata-extra", OrderedDict(a=1), metadata({"a": 1}, {}), "._metadata: attribute unexpected"),
    ("dataclass-field", {"c": Config(1, 2)}, {"c": Config(1, 3)}, "['c'].y: value"),
    ("dataclass-none", Config(1, None), Config(1, 0), ".y: type"),
    ("dataclass-dict", Config(1, 2), {"x": 1, "y": 2}, "(root): type"),
    ("pytree-child", Registered([1], "c"), Registered([2], "c"), "[0]: value"),
    ("pytree-context", Registered([1], "c"), Registered([1], "d"), ".<context>: value"),
    ("pytree-children", Registered([1], "c"), Registered([1, 2], "c"), "(root): number of children"),
    ("object-equality", Money(1), Money(2), "(root): value"),
    ("object-attribute", Plain(1), Plain(2), ".x: value"),
    ("object-attribute-lost", Plain(1), Plain.__new__(Plain), ".x: attribute missing"),
    ("slots", Slotted(1), Slotted(2), ".x: value"),
    ("opaque", Opaque(), Opaque(), "(root): cannot be compared"),
    ("tensor-value", torch.tensor(1), 1, "(root): type"),
    ("tensor-array", torch.ones(1), np.ones(1, np.float32), "(root): type"),
    ("tensor-none", {"a": None}, {"a": torch.ones(1)}, "['a']: type"),
]

UNEQUAL_VALUES: list[tuple[str, Any, Any]] = [
    ("none-false", None, False),
    ("int", 1, 2),
    ("huge", 10**50, 10**50 + 1),
    ("beyond-digits", 1 << 20000, (1 << 20000) + 1),
    ("int-bool", 1, True),
    ("int-float", 1, 1.0),
    ("float", 1.0, 1.0000000000000002),
    ("zero-sign", 0.0, -0.0),
    ("nan-inf", float("nan"), float("inf")),
    ("nan-payload", float("nan"), NAN_B),
    ("nan-sign", float("nan"), -float("nan")),
    ("complex", 1j, 2j),
    ("complex-zero", complex(0.0, 0.0), complex(0.0, -0.0)),
    ("str", "a", "b"),
    ("str-forms", "\u00e9", "e\u0301"),
    ("str-bytes", "a", b"a"),
    ("bytes", b"a", b"b"),
    ("bytes-array", b"a", bytearray(b"a")),
    ("bytearray", bytearray(b"a"), bytearray(b"b")),
    ("enum", Color.RED, Color.BLUE),
    ("enum-value", Level.LOW, 1),
    ("dtype", torch.float32, torch.float64),
    ("device", torch.device("cpu"), torch.device("cpu", 0)),
    ("layout", torch.strided, torch.sparse_coo),
    ("path", pathlib.Path("a"), pathlib.Path("b")),
    ("path-kind", pathlib.PurePosixPath("a"), pathlib.PureWindowsPath("a")),
    ("path-str", pathlib.Path("a"), "a"),
    ("date", datetime.date(2020, 1, 1), datetime.date(2020, 1, 2)),
    ("date-datetime", datetime.date(2020, 1, 1), datetime.datetime(2020, 1, 1)),
    ("instant", datetime.datetime(2020, 1, 1, 1, tzinfo=UTC), datetime.datetime(2020, 1, 1, 2, tzinfo=PLUS_ONE)),
    ("fold", datetime.datetime(2020, 1, 1), datetime.datetime(2020, 1, 1, fold=1)),
    ("timedelta", datetime.timedelta(1), datetime.timedelta(2)),
    ("decimal", decimal.Decimal("1.0"), decimal.Decimal("1.00")),
    ("uuid", uuid.UUID(int=1), uuid.UUID(int=2)),
    ("range", range(0), range(1, 1)),
    ("slice", slice(1), slice(2)),
    ("class", int, str),
    ("function", len, max),
    ("np-scalar", np.float32(1), np.float32(2)),
    ("np-scalar-dtype", np.float32(1), np.float64(1)),
    ("np-scalar-float", np.float64(1), 1.0),
    ("np-zero", np.float32(0.0), np.float32(-0.0)),
    ("np-datetime-unit", np.datetime64("2020-01-01", "D"), np.datetime64("2020-01-01", "s")),
    ("np-value", np.array([1, 2]), np.array([1, 3])),
    ("np-dtype", np.zeros(2, np.int32), np.zeros(2, np.uint32)),
    ("np-byte-order", np.zeros(2, "<i4"), np.zeros(2, ">i4")),
    ("np-shape", np.zeros((2, 1)), np.zeros((1, 2))),
    ("np-0d", np.array(1.0), np.array(2.0)),
    ("np-0d-scalar", np.array(1.0), np.float64(1.0)),
    ("np-nan", np.array([float("nan")]), np.array([NAN_B])),
    ("np-minus-zero", np.array([0.0]), np.array([-0.0])),
    ("np-fields", np.zeros(1, [("a", "i4")]), np.zeros(1, [("b", "i4")])),
    ("np-object", np.array([1, "a"], object), np.array([1, "b"], object)),
    ("np-object-type", np.array([1], object), np.array([True], object)),
    ("np-subclass", np.zeros(1), np.zeros(1).view(np.recarray)),
    ("np-mask", np.ma.array([1, 2], mask=[False, True]), np.ma.array([1, 2], mask=[False, False])),
]


def csr(layout: torch.layout, plain: list[int], value: float = 1.0, dtype: torch.dtype = torch.int64) -> Tensor:
    values = torch.full((2,), value) if layout in (torch.sparse_csr, torch.sparse_csc) else torch.full((2, 1, 1), value)
    compressed = torch.tensor([0, 1, 2], dtype=dtype)
    return torch.sparse_compressed_tensor(
        compressed, torch.tensor(plain, dtype=dtype), values, (2, 2), layout=layout, check_invariants=False
    )


def coo(
    indices: list[list[int]], values: list[float], coalesced: bool = False, size: tuple[int, ...] = (3, 3)
) -> Tensor:
    made = torch.sparse_coo_tensor(torch.tensor(indices), torch.tensor(values), size, check_invariants=False)
    return made._coalesced_(coalesced)


def jagged(
    values: Tensor, offsets: list[int] | Tensor, lengths: list[int] | None = None, ragged: int = 1, grad: bool = False
) -> Tensor:
    made = torch.nested.nested_tensor_from_jagged(
        values,
        offsets if isinstance(offsets, Tensor) else torch.tensor(offsets),
        None if lengths is None else torch.tensor(lengths),
        jagged_dim=ragged,
    )
    return made.detach().requires_grad_(grad) if grad else made


def quantized(scale: float) -> Tensor:
    return torch._empty_affine_quantized([2], scale=scale, zero_point=0, dtype=torch.qint8).fill_(0)


def moved(t: Tensor, offset: int, stride: tuple[int, ...] | None = None) -> Tensor:
    """The same elements elsewhere in a larger storage."""
    stride = stride or t.stride()
    base = torch.zeros(offset + 4 * max(t.numel(), 1) * 4, dtype=t.dtype)
    return base.as_strided(t.shape, stride, offset).copy_(t)


Z = torch.tensor([1 + 2j, 3 - 4j])


INT4: torch.dtype = getattr(torch, "int4")  # noqa: B009 - not in the stubs


ZEROS = torch.zeros(5)


BITS = torch.tensor([1, 2, 3, 4], dtype=torch.uint8)

# expected, got, what the line must name, and whether it is a difference in place as well.
UNEQUAL_TENSORS: list[tuple[str, Callable[[], Any], Callable[[], Any], str, bool]] = [
    ("value", lambda: torch.zeros(2, 2), lambda: torch.eye(2), "values, 2 of 4 elements, first at [0][0]", True),
    ("scalar", lambda: torch.tensor(1.0), lambda: torch.tensor(2.0), "values", True),
    ("last-bit", lambda: torch.tensor([1.0]), lambda: torch.tensor([1.0]).nextafter(torch.tensor(2.0)), "values", True),
    ("minus-zero", lambda: torch.tensor([0.0]), lambda: torch.tensor([-0.0]), "values", True),
    ("nan-payload", lambda: nan32(0x7FC00000), lambda: nan32(0x7FC00001), "expected 0x0000c07f, got 0x0100c07f", True),
    ("dtype", lambda: torch.zeros(2), lambda: torch.zeros(2, dtype=torch.int32), "dtype", True),
    ("float8", lambda: BITS.view(torch.float8_e4m3fn), lambda: BITS.view(torch.float8_e5m2), "dtype", True),
    ("float4", lambda: BITS.view(torch.float4_e2m1fn_x2), lambda: (BITS + 1).view(torch.float4_e2m1fn_x2), "val", True),
    ("int4", lambda: BITS.view(INT4), lambda: (BITS + 1).view(INT4), "values", True),
    ("shape", lambda: torch.zeros(2, 1), lambda: torch.zeros(1, 2), "shape", True),
    ("dimensions", lambda: torch.zeros(1), lambda: torch.tensor(0.0), "dimensions", True),
    ("empty-shape", lambda: torch.zeros(0, 2), lambda: torch.zeros(0, 3), "shape", True),
    ("stride", lambda: torch.zeros(2, 2), lambda: torch.zeros(2, 2).t(), "stride", False),
    ("stride-of-one", lambda: torch.zeros(1, 2), lambda: torch.zeros(2).as_strided((1, 2), (7, 1)), "stride", False),
    ("stride-of-none", lambda: torch.zeros(0, 2), lambda: torch.zeros(0).as_strided((0, 2), (9, 1)), "stride", False),
    ("expanded", lambda: torch.zeros(1).expand(3), lambda: torch.zeros(3), "stride", False),
    (
        "channels-last",
        lambda: torch.zeros(2, 2, 2, 2),
        lambda: torch.zeros(2, 2, 2, 2).permute(0, 2, 3, 1),
        "str",
        False,
    ),
    ("requires-grad", lambda: torch.zeros(2), lambda: torch.zeros(2, requires_grad=True), "requires_grad", False),
    ("parameter", lambda: torch.zeros(2), lambda: nn.Parameter(torch.zeros(2), False), "type", False),
    ("parameter-lost", lambda: nn.Parameter(torch.zeros(2)), lambda: torch.zeros(2).requires_grad_(), "type", False),
    ("buffer", lambda: torch.zeros(2), lambda: nn.Buffer(torch.zeros(2)), "is a Buffer", False),
    ("persistent", lambda: nn.Buffer(torch.ones(2)), lambda: nn.Buffer(torch.ones(2), persistent=False), "pers", False),
    ("conj", lambda: Z.clone().conj(), lambda: Z.clone().conj().resolve_conj(), "is_conj", False),
    ("conj-value", lambda: Z.clone().conj(), lambda: Z.clone(), "values", True),
    ("conj-and-conj", lambda: Z.clone().conj(), lambda: (Z + 1j).conj(), "values", True),
    (
        "neg",
        lambda: Z.clone().conj().imag,
        lambda: moved(Z.clone().conj().imag.resolve_neg(), 0, (2,)),
        "is_neg",
        False,
    ),
    ("neg-value", lambda: torch._neg_view(Z.clone()), lambda: Z.clone(), "values", True),
    ("neg-int", lambda: torch._neg_view(torch.tensor([1])), lambda: torch.tensor([1]), "values", True),
    ("half-conj", lambda: Z.to(torch.complex32).conj(), lambda: Z.to(torch.complex32), "values", True),
    ("subclass", lambda: torch.ones(2), lambda: marked(0), "type", True),
    ("subclass-attribute", lambda: marked(1), lambda: marked(2), ".mark: value", True),
    ("meta", lambda: torch.zeros(2), lambda: torch.zeros(2, device="meta"), "is_meta", True),
    ("quantizer", lambda: quantized(0.5), lambda: quantized(0.25), "quantizer", True),
    ("sparse-layout", lambda: coo([[0], [0]], [1.0]).to_dense(), lambda: coo([[0], [0]], [1.0]), "layout", True),
    ("coo-indices", lambda: coo([[0], [1]], [1.0]), lambda: coo([[0], [2]], [1.0]), ".indices: values", True),
    ("coo-values", lambda: coo([[0], [1]], [1.0]), lambda: coo([[0], [1]], [2.0]), ".values: values", True),
    ("coo-size", lambda: coo([[0], [1]], [1.0]), lambda: coo([[0], [1]], [1.0], size=(3, 4)), "shape", True),
    ("coo-nnz", lambda: coo([[0], [1]], [2.0]), lambda: coo([[0, 0], [1, 1]], [1.0, 1.0]), ".indices: shape", True),
    ("coalesced", lambda: coo([[0], [1]], [1.0]), lambda: coo([[0], [1]], [1.0], True), "is_coalesced", True),
    (
        "coo-dense-dim",
        lambda: torch.sparse_coo_tensor(torch.zeros(1, 1, dtype=torch.int64), torch.ones(1, 1), (1, 1)),
        lambda: torch.sparse_coo_tensor(torch.zeros(2, 1, dtype=torch.int64), torch.ones(1), (1, 1)),
        "sparse_dim",
        True,
    ),
    (
        "coo-requires-grad",
        lambda: coo([[0], [1]], [1.0]),
        lambda: coo([[0], [1]], [1.0]).requires_grad_(),
        "requires_grad",
        False,
    ),
    *(
        case
        for layout in (torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc)
        for case in (
            (
                f"{layout}-plain",
                lambda layout=layout: csr(layout, [0, 1]),
                lambda layout=layout: csr(layout, [1, 0]),
                "_indices: values",
                True,
            ),
            (
                f"{layout}-values",
                lambda layout=layout: csr(layout, [0, 1]),
                lambda layout=layout: csr(layout, [0, 1], 2.0),
                ".values: values",
                True,
            ),
            (
                f"{layout}-index-type",
                lambda layout=layout: csr(layout, [0, 1]),
                lambda layout=layout: csr(layout, [0, 1], 1.0, torch.int32),
                "_indices: dtype",
                True,
            ),
        )
    ),
    ("csr-csc", lambda: csr(torch.sparse_csr, [0, 1]), lambda: csr(torch.sparse_csc, [0, 1]), "layout", True),
    (
        "jag-values",
        lambda: jagged(torch.zeros(5), [0, 2, 5]),
        lambda: jagged(torch.ones(5), [0, 2, 5]),
        ".values",
        True,
    ),
    ("jag-off", lambda: jagged(torch.zeros(5), [0, 2, 5]), lambda: jagged(torch.zeros(5), [0, 3, 5]), ".offsets", True),
    (
        "jagged-lengths",
        lambda: jagged(torch.zeros(5), [0, 2, 5], [1, 2]),
        lambda: jagged(torch.zeros(5), [0, 2, 5], [2, 2]),
        ".lengths: values",
        True,
    ),
    (
        "jagged-no-lengths",
        lambda: jagged(torch.zeros(5), [0, 2, 5], [2, 3]),
        lambda: jagged(torch.zeros(5), [0, 2, 5]),
        ".lengths: type",
        True,
    ),
    (
        "jagged-dimension",
        lambda: jagged(torch.zeros(5, 5), [0, 2, 5]),
        lambda: jagged(torch.zeros(5, 5), [0, 2, 5], ragged=2),
        "ragged dimension",
        True,
    ),
    (
        "jagged-inner",
        lambda: jagged(torch.zeros(5, 2), [0, 2, 5]),
        lambda: jagged(torch.zeros(5, 3), [0, 2, 5]),
        "sizes beside",
        True,
    ),
    (
        "jagged-requires-grad",
        lambda: jagged(torch.zeros(5), [0, 2, 5]),
        lambda: jagged(torch.zeros(5), [0, 2, 5], grad=True),
        "requires_grad",
        False,
    ),
    (
        "nested-sizes",
        lambda: torch.nested.nested_tensor([torch.zeros(1), torch.zeros(2)]),
        lambda: torch.nested.nested_tensor([torch.zeros(2), torch.zeros(1)]),
        "sizes",
        True,
    ),
    (
        "nested-values",
        lambda: torch.nested.nested_tensor([torch.zeros(1), torch.zeros(2)]),
        lambda: torch.nested.nested_tensor([torch.zeros(1), torch.ones(2)]),
        "[1]: values",
        True,
    ),
    ("nested-dense", lambda: torch.nested.nested_tensor([ZEROS]), lambda: ZEROS[None], "is_nested", True),
    ("mkldnn", lambda: torch.ones(2).to_mkldnn(), lambda: torch.ones(2).to_mkldnn(), "cannot be compared", True),
    ("inner", lambda: wrapped(), lambda: wrapped(b=torch.zeros(1)), ".b: values", True),
    ("inner-dtype", lambda: wrapped(), lambda: wrapped(b=torch.ones(1, dtype=torch.int8)), ".b: dtype", True),
    ("inner-type", lambda: wrapped(), lambda: wrapped(b=nn.Parameter(torch.ones(1), False)), ".b: type", False),
    ("inner-grad", lambda: wrapped(), lambda: wrapped(b=torch.ones(1).requires_grad_()), ".b: requires_grad", False),
    ("context", lambda: wrapped(), lambda: wrapped(context=("block", 5)), ".<context>[1]: value", True),
    ("context-type", lambda: wrapped(), lambda: wrapped(context=["block", 4]), ".<context>: type", True),
    ("outer-grad", lambda: wrapped(), lambda: wrapped(requires_grad=True), "requires_grad", False),
    ("outer-offset", lambda: wrapped(), lambda: wrapped(offset=1), "storage_offset", False),
    ("inner-names", lambda: wrapped(), lambda: wrapped(c=torch.ones(1)), "inner tensors", True),
    ("outer-stride", lambda: wrapped(), lambda: wrapped(stride=(1, 2)), "stride", False),
    (
        "nested-inner",
        lambda: wrapped(b=wrapped()),
        lambda: wrapped(b=wrapped(a=torch.zeros(2, 2))),
        ".b.a: values",
        True,
    ),
    ("unwrapped", lambda: wrapped(), lambda: torch.ones(2, 2), "type", True),
    ("freed", freed := lambda: _freed(), freed, "cannot be compared", True),
]


def wrapped(**kw: Any) -> Tensor:
    parts: dict[str, Any] = {"a": torch.ones(2, 2), "b": torch.ones(1), "context": ("block", 4)}
    return Wrapped(**(parts | kw))


def _freed() -> Tensor:
    t = torch.ones(2)
    t.untyped_storage().resize_(0)
    return t
