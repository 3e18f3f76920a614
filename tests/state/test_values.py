from __future__ import annotations

import collections
import dataclasses
import datetime as dt
import decimal
import enum
import io
import math
import pathlib
import re
import struct
import sys
import tracemalloc
import typing
import uuid
import warnings
import zoneinfo
from collections.abc import Iterator
from fractions import Fraction
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from transfuse._state.leaves import values
from transfuse._state.leaves.values import MAX_DEPTH, Unencodable, decode, dtype_name, dtype_named, encode


class Color(enum.Enum):
    RED = 1
    ROUGE = 1  # noqa: PIE796
    BLUE = "blue"


class Level(enum.IntEnum):
    LOW = 1


class Word(str, enum.Enum):  # noqa: UP042
    ONE = "one"


class Perm(enum.Flag):
    R = 1
    W = 2
    X = 4


class IntPerm(enum.IntFlag):
    R = 1
    W = 4


class Conform(enum.Flag, boundary=enum.CONFORM):
    A = 1
    C = 4


class Eject(enum.IntFlag, boundary=enum.EJECT):
    A = 1
    C = 4


class Custom(enum.Flag):
    A = 1
    B = 2

    @classmethod
    def _missing_(cls, value: object) -> Any:
        return super()._missing_(value)


@dataclasses.dataclass
class Config:
    dtype: torch.dtype
    sizes: list[int] = dataclasses.field(default_factory=list)
    made: int = dataclasses.field(init=False, default=3)
    known: typing.ClassVar[int] = 0

    def __post_init__(self) -> None:
        type(self).known += 1


@dataclasses.dataclass(frozen=True, slots=True)
class Frozen:
    inner: Any


@dataclasses.dataclass
class Unlisted:
    x: int = 0


class Undecorated(Config):
    pass


@dataclasses.dataclass
class Made:
    x: int = 0

    def __new__(cls, *args: object, **kwargs: object) -> Made:
        return super().__new__(cls)


class Pair(typing.NamedTuple):
    a: object
    b: object


class UnlistedPair(typing.NamedTuple):
    a: object
    b: object


class Hooked(type):
    def __getattribute__(cls, name: str) -> object:
        raise AssertionError("a metaclass hook ran")


class Trap(metaclass=Hooked):
    pass


class MyInt(int):
    pass


class MyTuple(tuple[object, ...]):
    pass


@pytest.fixture
def listed() -> Iterator[None]:
    with torch.serialization.safe_globals([Config, (Frozen, "any.name"), Undecorated, Made, Pair, print]):
        yield


def wire(value: object) -> object:
    return msgspec.msgpack.decode(msgspec.msgpack.encode(encode(value)))


def same(a: Any, b: Any) -> bool:
    """Equal in type and value, all the way down and to the bit."""
    if type(a) is not type(b):
        return False
    if isinstance(a, float) and not isinstance(a, np.generic):
        return struct.pack("<d", a) == struct.pack("<d", b)
    if type(a) is complex:
        return same((a.real, a.imag), (b.real, b.imag))
    if type(a) in (tuple, list, Pair):
        return len(a) == len(b) and all(map(same, a, b))
    if type(a) in (dict, collections.OrderedDict):
        return same(list(a.items()), list(b.items()))
    if type(a) in (set, frozenset):
        return len(a) == len(b) and all(any(same(x, y) for y in b) for x in a)
    if type(a) in (slice, range):
        return same([a.start, a.stop, a.step], [b.start, b.stop, b.step])
    if isinstance(a, np.generic):
        return bool(a.dtype == b.dtype) and a.tobytes() == b.tobytes()
    if isinstance(a, (dt.datetime, dt.time)):
        return repr(a) == repr(b) and a.fold == b.fold and same(a.tzinfo, b.tzinfo)
    if isinstance(a, (dt.timezone, decimal.Decimal)):
        return repr(a) == repr(b)
    if isinstance(a, uuid.UUID):
        return a == b and a.is_safe is b.is_safe
    if isinstance(a, enum.Enum):
        return a is b
    if dataclasses.is_dataclass(a):
        return all(same(getattr(a, f.name), getattr(b, f.name)) for f in dataclasses.fields(a))
    return bool(a == b)


def refusal(plain: object) -> str:
    """Why it is not decoded, empty if it is. Only ValueError counts."""
    try:
        decode(plain)
    except ValueError as e:
        return str(e) or "refused"
    return ""


def check(value: object) -> None:
    back = decode(wire(value))
    assert same(value, back), (value, back)


def nan(bits: int) -> float:
    return struct.unpack("<d", struct.pack("<Q", bits))[0]  # type: ignore[no-any-return]


NANS = [nan(0x7FF8000000000000), nan(0xFFF8000000000123), nan(0x7FF0000000000001)]
UTC, PARIS = dt.UTC, zoneinfo.ZoneInfo("Europe/Paris")
TZIF = b"TZif" + bytes(16) + struct.pack(">6l", 0, 0, 0, 0, 1, 4) + bytes(6) + b"UTC\0"  # a zone without a key
KINDS: list[object] = [
    *[None, True, False, 0, 1, -1, 2**63 - 1, 2**63, 2**64 - 1, 2**64, -(2**63), -(2**63) - 1, 10**5000, -(10**50)],
    *[0.0, -0.0, 1.5, math.inf, -math.inf, 5e-324, *NANS],
    *[complex(-0.0, -0.0), complex(math.inf, -0.0), *(complex(n, m) for n in NANS for m in NANS)],
    *["", "text", "ü€😀", "\0", "\ud800", "a\udcffb", "\ud83d\ude00", b"", b"\0\xff", bytearray(), bytearray(b"ab")],
    *[(), [], {}, set(), frozenset(), (1,), [[]], [()], {1, "a", b"a", None, (1, 2)}, frozenset({frozenset()})],
    *[{"b": 1, "a": 2, (1, (2,)): [3], None: {}, 1.5: {2: 3}}, collections.OrderedDict([("b", 1), ("a", 2)])],
    *[{NANS[0]: 1, nan(0x7FF8000000000000): 2}],
    *[range(5), range(0, 10**30, 7), range(3, -3, -1), slice(None), slice(1, 10, -1), slice("a", [1]), ...],
    *[torch.float8_e4m3fn, torch.bfloat16, torch.bits8, torch.strided, torch.sparse_csr, torch.jagged],
    *[torch.channels_last, torch.contiguous_format, torch.preserve_format],
    *[torch.device("cpu"), torch.device("cuda"), torch.device("cuda:3"), torch.device("meta"), torch.device("cpu:0")],
    *[torch.Size([]), torch.Size([2, 0, 3]), torch.Size([2**62])],
    *[np.bool(True), np.int8(-1), np.uint64(2**64 - 1), np.longlong(5), np.ulonglong(5), np.intp(4), np.uintc(7)],
    *[np.float16(-0.0), np.float32("nan"), np.float64(1.5), np.longdouble(1) / 3, np.complex64(1j), np.clongdouble(2j)],
    *[np.str_(""), np.str_("aü\0"), np.bytes_(b""), np.bytes_(b"a\0"), np.void(b""), np.void(b"abc")],
    *[np.datetime64("2024-02-29T12:00", "ns"), np.datetime64("NaT"), np.timedelta64(3, ("s", 25)), np.timedelta64(3)],
    np.array([(1, 2.5, b"x")], dtype=[("a", ">i4"), ("b", "<f8"), ("c", "S3")])[0],
    np.zeros(1, np.dtype({"names": ["a", "b"], "formats": ["i1", "i8"], "offsets": [0, 8], "itemsize": 24}))[0],
    *[dt.date(1, 1, 1), dt.timedelta.min, dt.timedelta.max, dt.timedelta(microseconds=-1), dt.time.max],
    *[dt.time(1, 2, fold=1), dt.time(1, tzinfo=PARIS), dt.datetime.max, dt.datetime(2024, 10, 27, 2, 30, fold=1)],
    *[dt.datetime(2024, 10, 27, 2, 30, tzinfo=PARIS, fold=1), dt.datetime(2024, 1, 1, 1, 2, 3, 4, UTC)],
    *[UTC, dt.timezone(dt.timedelta(hours=1)), dt.timezone(dt.timedelta(hours=1), "UTC+01:00"), PARIS],
    *[dt.timezone(dt.timedelta(0), "UTC"), dt.timezone(dt.timedelta(seconds=-1, microseconds=5), "odd")],
    *[pathlib.Path("a/b"), pathlib.Path(), pathlib.Path("//x"), pathlib.Path("\udcff"), pathlib.PurePosixPath("/a")],
    *[pathlib.PureWindowsPath("C:\\a\\B"), pathlib.PureWindowsPath("//host/share/x"), pathlib.PureWindowsPath("c:x")],
    *[uuid.UUID(int=7), uuid.uuid1(), uuid.uuid4(), Fraction(-7, 3), Fraction(0), Fraction(10**40, 3)],
    *map(decimal.Decimal, ["0", "-0E+5", "1.10", "1E-999999", "NaN123", "-sNaN", "-Infinity", "1" * 200]),
    *[Color.RED, Color.ROUGE, Color.BLUE, Level.LOW, Word.ONE, Perm.R, Perm.R | Perm.X, Perm(0), ~Perm.R],
    *[
        IntPerm.R,
        IntPerm.R | IntPerm.W,
        IntPerm(0),
        ~IntPerm.R,
        Conform.A | Conform.C,
        Eject(5),
        {Level.LOW: 1, "one": 2},
    ],
]


@pytest.mark.parametrize("value", KINDS, ids=lambda v: f"{type(v).__name__}")
def test_each_kind(value: object) -> None:
    check(value)
    if type(value) in (bytes, type(None), bool, float):
        assert encode(value) is value
    else:
        assert type(encode(value)) in (int, str, list)


def test_every_constant_of_torch() -> None:
    constants = [c for c in vars(torch).values() if type(c) in (torch.dtype, torch.layout, torch.memory_format)]
    assert len(constants) > 30
    for constant in constants:
        check(constant)
    assert dtype_name(torch.half) == dtype_name(torch.float16) == "float16"
    assert dtype_named("float16") is torch.float16
    wrong: list[Any] = ["half", "", "strided", "load", "torch.float16", "__name__", "x" * 10**6, None, []]
    for name in wrong:
        with pytest.raises(ValueError, match="has no"):
            dtype_named(name)


def test_structured_scalars_stay_writable() -> None:
    source = np.array([(1, 2.5)], dtype=[("a", "<i4"), ("b", "<f8")])[0]
    back: Any = decode(wire(source))
    back["a"] = 9
    assert (back["a"], source["a"]) == (9, 1)


def test_tags_are_unique() -> None:
    assert len(values._BY_TAG) == len(values._CODECS) == len(values._BY_TYPE) + len(values._FAMILIES)


def test_paths_of_another_system_come_back_pure() -> None:
    (tag,) = (c.tag for c in values._CODECS if c.kind is pathlib.WindowsPath)
    assert same(decode([tag, "c:\\x"]), pathlib.PureWindowsPath("c:\\x"))


@pytest.mark.usefixtures("listed")
def test_listed_classes() -> None:
    config = Config(torch.int8, [1, 2])
    before = Config.known
    for value in (config, Frozen(config), Frozen({Pair(1, 2): Frozen(Perm.W)}), Pair(Pair(1, []), config)):
        check(value)
    assert Config.known == before  # no __post_init__


@pytest.mark.usefixtures("listed")
def test_classes_that_are_not_listed() -> None:
    for value in (Unlisted(), UnlistedPair(1, 2)):
        with pytest.raises(Unencodable, match="add_safe_globals"):
            encode(value)
    for odd in (Undecorated(torch.int8), Made()):  # fields of a base; a constructor of its own
        with pytest.raises(Unencodable):
            encode(odd)
    more = Config(torch.int8)
    more.more = 1  # type: ignore[attr-defined]
    with pytest.raises(Unencodable, match="not fields: more"):
        encode(more)
    less = Config(torch.int8)
    del less.sizes
    with pytest.raises(Unencodable, match="not set"):
        encode(less)
    plain: Any = wire(Config(torch.int8))
    pair: Any = wire(Pair(1, 2))
    here = __name__
    for name in ("Unlisted", "Undecorated", "Made", "UnlistedPair", "Pair", "Color", "same", "Absent"):
        with pytest.raises(ValueError, match=r"not a dataclass|not a class|no 'Absent'"):
            decode([plain[0], f"{here}:{name}", *plain[2:]])
    for name in ("Unlisted", "UnlistedPair", "Config", "MyTuple"):
        with pytest.raises(ValueError, match="not a named tuple"):
            decode([pair[0], f"{here}:{name}", 1, 2])
    for state in ({}, {"dtype": 1}, {"dtype": 1, "sizes": [], "made": 3, "__class__": 1}, {1: 2}):
        with pytest.raises(ValueError, match="these fields"):
            decode([*plain[:2], encode(state)])
    for tail in ([], [[9]], ["x"], [1], [1, 2]):
        for tag in (60, 61, 62):
            assert refusal([tag, f"{here}:Trap", *tail])
    for bad in ([*pair, 3], pair[:-1], pair[:1]):
        assert refusal(bad)


def test_listing_is_asked_of_the_receiver_too() -> None:
    with torch.serialization.safe_globals([Config, Pair]):
        plain = wire(Config(torch.int8)), wire(Pair(1, 2))
    for each in plain:
        with pytest.raises(ValueError, match="add_safe_globals"):
            decode(each)


def test_configs_of_torchao() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        pytest.importorskip("torchao.quantization")
        from torchao.float8.inference import Float8MMConfig
        from torchao.quantization.granularity import PerBlock, PerRow
        from torchao.quantization.quantize_.workflows.float8.float8_tensor import QuantizeTensorToFloat8Kwargs
    for config in (PerRow(), PerBlock((1, 128)), Float8MMConfig(), QuantizeTensorToFloat8Kwargs()):
        back = decode(wire(config))
        assert type(back) is type(config)
        assert back == config


class Local:
    """Holds what has no name of its own to be found by."""

    @staticmethod
    def member() -> enum.Enum:
        class Hidden(enum.Enum):
            A = 1

        return Hidden.A


@pytest.mark.parametrize(
    ("value", "hint"),
    [
        (lambda: 0, "plain data"),
        (object(), "plain data"),
        (print, "plain data"),
        (int, "plain data"),
        (sys, "plain data"),
        (NotImplemented, "plain data"),
        (MyInt(1), "convert it to int"),
        (MyTuple(), "convert it to tuple"),
        (collections.defaultdict(int), "convert it to dict"),
        (collections.Counter(), "convert it to dict"),
        (np.array([object()], dtype=object), "plain data"),
        (np.zeros(1, [("a", object)])[0], "use a tensor"),
        (np.zeros(1, [("a", "i4", (2,))])[0], "use a tensor"),
        (np.zeros(1, [("a", [("b", "i4")])])[0], "use a tensor"),
        (np.zeros(1, [("a", "U3")])[0], "use a tensor"),
        (np.zeros(1, np.dtype([("a", "i1"), ("b", "i8")], align=True))[0], "use a tensor"),
        (np.zeros(1, [("a", np.dtype("i4", metadata={"x": 1}))])[0], "use a tensor"),
        (np.rec.array([(1, 2)], dtype=[("a", "i4"), ("b", "i4")])[0], "use a tensor"),
        (type("MyFloat", (np.float64,), {})(1), "use a tensor"),
        (Local.member(), "top of its module"),
        (IntPerm(1 | 64), "combination"),
        (Custom.A | Custom.B, "combination"),
        (zoneinfo.ZoneInfo.from_file(io.BytesIO(TZIF)), "convert to UTC"),
        (dt.datetime(1, 1, 1, tzinfo=type("Z", (dt.tzinfo,), {})()), "expected NoneType or timezone or ZoneInfo"),
        (Fraction(1 << 70000, 3), "numerator and denominator"),
        (torch.Size([typing.cast(int, np.int64(3))]), "convert them"),
        (torch.zeros(1), "plain data"),
        (type("MyPath", (type(pathlib.Path()),), {})("x"), "convert it to PosixPath"),
    ],
    ids=lambda v: v if type(v) is str else type(v).__name__,
)
def test_refusals(value: object, hint: str) -> None:
    for nested in (value, [value], {"a": (value,)}, slice(value)):
        with pytest.raises(Unencodable, match=hint) as caught:
            encode(nested)
        assert type(value).__qualname__ in str(caught.value) or "datetime" in str(caught.value)


def test_depth() -> None:
    deep: list[object] = []
    for _ in range(MAX_DEPTH - 1):
        deep = [deep]
    check(deep)
    with pytest.raises(Unencodable, match="deep"):
        encode([deep])
    with pytest.raises(ValueError, match="deep"):
        decode([6, encode(deep)])
    deep.append(deep)
    with pytest.raises(Unencodable, match="within itself"):
        encode(deep)


def test_little_stack_left() -> None:
    deep: list[object] = []
    for _ in range(MAX_DEPTH - 1):
        deep = [deep]
    plain = encode(deep)

    def dig(levels: int) -> None:
        if levels:
            return dig(levels - 1)
        with pytest.raises(Unencodable, match="stack"):
            encode(deep)
        with pytest.raises(ValueError, match="RecursionError"):
            decode(plain)
        return None

    frame: Any = sys._getframe()
    used = 0
    while frame:
        used, frame = used + 1, frame.f_back
    dig(sys.getrecursionlimit() - used - 120)


# Round trips of anything.


def is_hashable(value: object) -> bool:
    try:
        hash(value)
    except (TypeError, ValueError):  # a signalling NaN, a time without a unit
        return False
    return True


def pick(choices: list[object]) -> st.SearchStrategy[object]:
    return st.sampled_from(range(len(choices))).map(choices.__getitem__)  # sampled_from hashes what it samples


zones = st.sampled_from([None, UTC, PARIS, dt.timezone(dt.timedelta(hours=-3), "x")])
scalars = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    st.integers(0, 2**64 - 1).map(nan),
    st.complex_numbers(),
    st.text(st.characters()),
    st.binary(),
    st.datetimes(timezones=zones, allow_imaginary=True),
    st.times(),
    st.timedeltas(),
    st.decimals(),
    st.fractions(),
    st.uuids(),
    st.floats(width=32).map(np.float32),
    st.text(st.characters()).map(np.str_),
    st.text(st.characters(exclude_categories=["Cs"])).map(pathlib.PurePosixPath),
    pick([k for k in KINDS if isinstance(k, (enum.Enum, torch.dtype, torch.device, np.generic))]),
)
hashables = st.recursive(
    scalars.filter(is_hashable),
    lambda inner: st.lists(inner, max_size=3).map(tuple) | st.frozensets(inner, max_size=3),
    max_leaves=4,
)
anything = st.recursive(
    scalars | st.binary().map(bytearray),
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.lists(inner, max_size=4).map(tuple),
        st.sets(hashables, max_size=4),
        st.dictionaries(hashables, inner, max_size=4),
        st.dictionaries(hashables, inner, max_size=4).map(collections.OrderedDict),
        st.builds(slice, inner, inner, inner),
    ),
    max_leaves=12,
)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(anything)
def test_round_trip(value: object) -> None:
    check(value)


# Hostile input.

TAGS = sorted(values._BY_TAG)
atoms = st.one_of(
    st.none(),
    st.booleans(),
    st.sampled_from(TAGS),
    st.integers(-2, 70),
    st.integers(-(2**63), 2**64 - 1),
    st.floats(),
    st.text(max_size=4),
    st.binary(max_size=20),
    st.sampled_from(["|V3", "<f8", "<M8[ns]", "|O", "<U9", "i4,i4", "cpu", "float32", "Europe/Paris", "UTC", "NaN"]),
    st.sampled_from([f"{__name__}:{name}" for name in ("Color", "Perm", "Custom", "Config", "Pair", "same", "R")]),
)
hostile = st.recursive(
    atoms,
    lambda inner: (
        st.lists(inner, max_size=10)
        | st.tuples(st.sampled_from(TAGS), st.lists(inner, max_size=9)).map(lambda p: [p[0], *p[1]])
    ),
    max_leaves=25,
)


@settings(max_examples=400, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(hostile)
def test_hostile_input_is_a_value_error_or_a_value(plain: object) -> None:
    if not refusal(plain):
        check(decode(plain))  # what is accepted is as good as any other value


@settings(max_examples=150, deadline=None)
@given(pick(KINDS), st.data())
def test_damaged_encodings(value: object, data: st.DataObject) -> None:
    plain = wire(value)
    if type(plain) is not list:
        return
    at = data.draw(st.integers(0, len(plain) - 1))
    plain[at] = data.draw(hostile)
    refusal(plain)


@pytest.mark.parametrize(
    "plain",
    [
        [],
        {},
        (),
        object(),
        msgspec.msgpack.Ext(1, b""),
        dt.datetime(1, 1, 1),
        [None],
        [True, b"1"],
        [6.0],
        [0],
        [999],
        [2**64 - 1],
        [[6]],
        ["tuple"],
        [6, []],
        [6, {}],
        [7, 1, 1],
        [7, 1, 1.0],
        [7, [6]],
        [8, [9]],
        [9, 1],
        [9, 1, 2, 1, 3],
        [9, [6], 1],
        [10, 1, 2, True, 3],
        [7, [35, "sNaN"]],
        [11, 1, 2, 0],
        [11, 1, 2.0, 1],
        [11, True, 2, 1],
        [11, 1],
        [13, 1],
        [1, "1"],
        [1],
        [2, b"\xff"],
        [3, 1, 2.0],
        [20, 0, 1, 1],
        [20, 2024, 2, 30],
        [20, 10**15, 1, 1],
        [21, 1, 1, 1, 1, [23, 0, 0, 0], 0],
        [21, 1, 1, 1, 1, None, 2],
        [23, 10**12, 0, 0],
        [24, [23, 2, 0, 0], None],
        [25, "../../etc/passwd"],
        [25, "/etc/passwd"],
        [25, "Europe"],
        [25, "antigravity"],
        [34, b"short", 0],
        [34, bytes(16), 5],
        [35, "zero"],
        [35, "1E9999999999999999999"],
        [36, 1, 0],
        [36, 2, 4],
        [36, 1, -2],
        [40, "half"],
        [40, "strided"],
        [41, "float32"],
        [43, "cuda", 300],
        [43, "cuda", -1],
        [43, "cuda:1", None],
        [43, "nothing", None],
        [44, 1.0],
        [44, [1, bytes(8) + b"\1"]],
        [52, "|O", bytes(8)],
        [52, "O", bytes(8)],
        [52, "<i8", bytes(7)],
        [52, "<i9", bytes(9)],
        [52, "<i8\n", bytes(8)],
        [52, "i4,i4", bytes(8)],
        [52, "<U1", b"\xff" * 4],
        [52, "<M8[zz]", bytes(8)],
        [52, [6, [5, "a", "|O"]], bytes(8)],
        [52, [6, [5, "a", "<i4"], [5, "a", "<i4"]], bytes(8)],
        [52, [6, [5, "a", "<i4", [5, 10**9]]], bytes(8)],
        [52, [6, [5, "a", [6]]], bytes(8)],
        [60, f"{__name__}:Color", "GREEN"],
        [60, f"{__name__}:Color", 1],
        [60, f"{__name__}:Color", "__class__"],
        [60, f"{__name__}:Perm", 8],
        [60, f"{__name__}:Perm", -1],
        [60, f"{__name__}:Perm", True],
        [60, f"{__name__}:IntPerm", 64],
        [60, f"{__name__}:Custom", 3],
        [60, f"{__name__}:Conform", 2],
        [60, f"{__name__}:Eject", 2],
        [60, f"{__name__}:Config", "dtype"],
        [60, "builtins:int", "real"],
        [60, "enum:Enum", "x"],
        [60, "enum:Flag", 0],
    ],
    ids=lambda plain: re.sub(" at 0x[0-9a-f]+", "", str(plain)),
)
def test_malformed(plain: object) -> None:
    assert refusal(plain)


def test_a_trap_that_is_off_lets_no_bad_decimal_through() -> None:
    with decimal.localcontext() as context:
        context.traps[decimal.InvalidOperation] = False
        with pytest.raises(ValueError, match="decimal"):
            decode([35, "zero"])
        context.capitals = 0
        check(decimal.Decimal("1e+50"))


@pytest.mark.parametrize("tag", TAGS)
def test_nothing_is_imported(tag: int) -> None:
    assert "antigravity" not in sys.modules
    for tail in ([], ["x"], [1], [[9]], [[9, "x", 1]], [1, 2]):
        refusal([tag, "antigravity:x", *tail])
    assert "antigravity" not in sys.modules


@pytest.mark.parametrize(
    "plain",
    [
        [52, "<U1000000000", b"abcd"],
        [52, "|S999999999", b"abcd"],
        [52, "|V999999999", b"abcd"],
        [52, "|V999999999999", b"abcd"],
        [52, [6, [5, "a", "|V999999999"], [5, "b", "|V999999999"], [5, "c", "|V999999999"]], b"abcd"],
        [52, [6, [5, "", "|V4"], [5, "b", "|V999999999"]], b"abcd"],
        [52, [6, [5, "a", "<i4", [5, 10**5, 10**4]]], b"abcd"],
        [50, 10**9],
        [51, 10**9],
        [4, 10**9],
        [5, 10**9],
        [1, 10**9],
        [11, 0, 10**18, 1],
        [7, [11, 0, 10**18, 1]],
        [35, "1E999999999999999999"],
        [35, "1E999999999"],
        [44, 10**18],
        [23, 999999999, 0, 0],
        [60, f"{__name__}:IntPerm", [1, b"\x7f" * 1000]],
        [60, "x" * 1000 + ":y", "z"],
        [61, "x." * 100 + "x:y", [9]],
        [43, "c" * 10000, None],
        [40, "f" * 10000],
        [25, "f" * 10000],
    ],
    ids=lambda plain: str(plain)[:50],
)
def test_small_input_takes_little_memory(plain: object) -> None:
    values._zones()  # kept for good, not on account of the input
    tracemalloc.start()
    try:
        message = refusal(plain)
    finally:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert peak < 1 << 20
    assert len(message) < 2000


def test_large_fractions_take_little_time() -> None:
    with pytest.raises(ValueError, match="too large"):
        decode([36, [1, b"\x55" * 10**6], [1, b"\x33" * 10**6]])
