"""Hostile peers: honest messages of every kind, ways to mutate and forge them, and ends to feed them to.

Nothing here needs a process group: :class:`Wire` stands for one, and says and hears what the case tells it to.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import datetime
import decimal
import enum
import fractions
import functools
import os
import pathlib
import random
import re
import struct
import sys
import tokenize
import uuid
import warnings
import zoneinfo
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple
from unittest import mock

import msgspec
import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.distributed._shard.sharded_tensor import init_from_local_shards
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed._shard.sharded_tensor.shard import Shard as LocalShard
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.utils import _pytree

from transfuse.errors import PeerLost, ProtocolError, ReceiveFailed, TransfuseError
from transfuse.limits import KIB, MIB, Limits
from transfuse.memory.arena import ALIGNMENT
from transfuse.memory.digest import WIDE_BYTES, digest_of, wide_digest_of
from transfuse.options import Options
from transfuse.plan import parcels
from transfuse.plan.holdings import Holdings
from transfuse.plan.parcels import Parcels, Piece
from transfuse.plan.request import Picks, boxes_in
from transfuse.progress import Progress
from transfuse.report import Report
from transfuse.session import accepting, negotiation, receiver, source, threads
from transfuse.session.accepting import Accepted
from transfuse.session.context import Context, Request
from transfuse.session.partial import Partial
from transfuse.session.receive import Receive
from transfuse.session.relay import Chains
from transfuse.session.threads import Caller
from transfuse.state import manifest, mappings, trees
from transfuse.state.leaves import dense, values
from transfuse.state.leaves.codec import Room
from transfuse.state.leaves.registry import Kinds
from transfuse.state.manifest import Leaf, Manifest
from transfuse.transport import PGTransport
from transfuse.wire import messages
from transfuse.wire.channel import Line, Posted
from transfuse.wire.group import FIRST_LINK_TAG, FIRST_TAG, LINK_TAGS, OFFER_TAG, Group
from transfuse.wire.memory import TOKEN_BYTES, Entry, MemoryLease
from transfuse.wire.messages import Agreed, Header, Intent, Link, Message
from transfuse.wire.rate_limit import Pace
from transfuse.wire.route import Malformed
from transfuse.wire.routes import Leases

__all__ = [
    "CAP",
    "Audit",
    "Ground",
    "Guarded",
    "Lined",
    "Member",
    "Wire",
    "corpus",
    "forge_agreed",
    "forge_memory",
    "forge_pairs",
    "forge_request",
    "gather",
    "interrupted",
    "mutate_bytes",
    "mutate_offer",
    "mutate_plain",
    "touch",
]

CPU = torch.device("cpu")
PEER = 3
#: Most bytes that a case may allocate for fresh tensors.
CAP = 1 * MIB
LIMITS = Limits(max_receive_bytes=CAP)
#: Plans beyond this are checked, but no data is made up for them.
MAX_PLANNED = 8 * MIB

Columns = dict[int, list[int]]


# ---------------------------------------------------------------------------------------- classes that peers may name


class Point(NamedTuple):
    x: Any
    y: Any


class Listed(NamedTuple):
    x: Any
    y: Any


class Colour(enum.Enum):
    RED = 1
    BLUE = "blue"


class Access(enum.Flag):
    READ = 1
    WRITE = 2
    RUN = 4


@dataclasses.dataclass(frozen=True)
class Config:
    width: Any
    name: Any = "x"


@dataclasses.dataclass
class Moments:
    mean: Any
    variance: Any


class _Trapped(type):
    """Answers every question about its classes with code."""

    def __getattr__(cls, name: str) -> Any:
        sprung.append(name)
        raise AttributeError(name)

    def __hash__(cls) -> int:
        sprung.append("__hash__")
        return 1

    def __eq__(cls, other: object) -> bool:
        sprung.append("__eq__")
        return cls is other


#: What has been asked of the classes below.
sprung: list[str] = []


class TrappedTuple(tuple[Any, ...], metaclass=_Trapped):
    pass


class _TrappedTensorMeta(_Trapped, type(Tensor)):  # type: ignore[misc]
    pass


class TrappedTensor(Tensor, metaclass=_TrappedTensorMeta):  # type: ignore[metaclass]
    pass


class Plain:
    """Travels only as a pickle."""

    def __init__(self, x: Any) -> None:
        self.x = x


class Scaled(Tensor):
    """A traceable wrapper subclass: numbers and their scale."""

    numbers: Tensor
    scale: Tensor
    note: Any

    @staticmethod
    def __new__(cls, numbers: Tensor, scale: Tensor, note: Any) -> Scaled:
        made: Any = Tensor._make_wrapper_subclass(
            cls, numbers.size(), strides=numbers.stride(), dtype=scale.dtype, device=numbers.device
        )
        made.numbers, made.scale, made.note = numbers, scale, note
        return made  # type: ignore[no-any-return]

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return ["numbers", "scale"], self.note

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, Tensor], note: Any, size: Any, stride: Any) -> Scaled:
        return Scaled(inner["numbers"], inner["scale"], note)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        if func is torch.ops.aten.detach.default:
            (leaf,) = args
            return Scaled(leaf.numbers, leaf.scale, leaf.note)
        raise NotImplementedError(func)


_pytree.register_dataclass(Moments)
torch.serialization.add_safe_globals([Scaled, Config, Listed, Plain])


# ------------------------------------------------------------------------------------------------- what is carried


def _dense() -> dict[str, Any]:
    base = torch.arange(48.0).reshape(6, 8)
    return {
        "f32": torch.randn(3, 4),
        "f64": torch.randn(5, dtype=torch.float64),
        "bf16": torch.randn(2, 3).bfloat16(),
        "f8": torch.zeros(7, dtype=torch.float8_e4m3fn),
        "i8": torch.arange(9, dtype=torch.int8),
        "i64": torch.arange(4),
        "flag": torch.tensor([True, False, True]),
        "c64": torch.randn(2, 2, dtype=torch.complex64),
        "c128": torch.randn(3, dtype=torch.complex128),
        "scalar": torch.tensor(2.5),
        "empty": torch.empty(0, 3),
        "t": torch.randn(4, 3).t(),
        "channels_last": torch.randn(1, 2, 3, 4).to(memory_format=torch.channels_last),
        "gaps": base[:, ::2],
        "rows": base[1:3],
        "expanded": torch.randn(1, 3).expand(4, 3),
    }


def _dressed() -> dict[str, Any]:
    wave = torch.randn(3, dtype=torch.complex64)
    return {
        "parameter": nn.Parameter(torch.randn(3, 2)),
        "frozen": nn.Parameter(torch.arange(3), requires_grad=False),
        "buffer": nn.Buffer(torch.randn(2)),
        "volatile": nn.Buffer(torch.randn(2), persistent=False),
        "grad": torch.randn(3, requires_grad=True),
        "conj": wave.conj(),
        "neg": torch._neg_view(torch.randn(4)),
        "both": torch._neg_view(torch.randn(2, dtype=torch.complex128).conj()),
    }


def _tied() -> dict[str, Any]:
    shared, line = torch.randn(4, 4), torch.arange(12.0)
    tangle = torch.arange(20, dtype=torch.int16)
    return {
        "a": shared,
        "b": shared,
        "c": shared.t(),
        "flat": shared.view(-1),
        "head": line[:6],
        "tail": line[4:],
        "windows": tangle.as_strided((4, 6), (3, 2)),
        "own": tangle[3:9],
        "bytes": torch.arange(8, dtype=torch.uint8),
    }


def _sparse() -> dict[str, Any]:
    dense_, blocks = torch.eye(4) * torch.arange(4.0), torch.ones(4, 6)
    index = torch.tensor([[0, 1, 1], [2, 0, 0]])
    return {
        "coo": dense_.to_sparse(),
        "loose": torch.sparse_coo_tensor(index, torch.randn(3), (2, 3), check_invariants=True),
        "hybrid": torch.sparse_coo_tensor(index, torch.randn(3, 2), (2, 3, 2), check_invariants=True),
        "csr": dense_.to_sparse_csr(),
        "csc": dense_.to_sparse_csc(),
        "bsr": blocks.to_sparse_bsr((2, 3)),
        "bsc": blocks.to_sparse_bsc((2, 3)),
    }


def _jagged() -> dict[str, Any]:
    offsets = torch.tensor([0, 2, 5, 8])
    return {
        "jagged": torch.nested.nested_tensor_from_jagged(torch.randn(8, 2), offsets),
        "lengths": torch.nested.nested_tensor_from_jagged(torch.randn(8, 2), offsets, torch.tensor([1, 3, 0])),
        "cached": torch.nested.nested_tensor([torch.randn(2, 3), torch.randn(1, 3)], layout=torch.jagged),
    }


def _wrapped() -> dict[str, Any]:
    scale = torch.tensor([0.5])
    inner = Scaled(torch.arange(6, dtype=torch.int8).reshape(2, 3), scale, {"bits": 8, "name": "int8"})
    return {"scaled": inner, "again": Scaled(torch.zeros(3, dtype=torch.uint8), scale, None), "scale": scale}


def _blobs() -> dict[str, Any]:
    pair = np.dtype([("a", "<i4"), ("b", ">f8"), ("c", "S3")])
    return {
        "floats": np.random.default_rng(1).standard_normal((3, 4)),
        "fortran": np.asfortranarray(np.arange(6, dtype=np.int16).reshape(2, 3)),
        "flags": np.array([True, False]),
        "times": np.array(["2020-01-01", "1970-01-02"], dtype="M8[D]"),
        "pairs": np.zeros(2, dtype=pair),
        "none": np.zeros((0, 4), dtype=np.float32),
        "scalar": np.array(3.5),
        "names": np.array([b"ab", b"c"]),
        "bytes": bytes(range(256)) * 17,
        "bytearray": bytearray(5000),
        "str": "é" * 5000,
        "w": torch.randn(2),
    }


def _objects() -> dict[str, Any]:
    return {"object": Plain(3), "w": torch.randn(3)}


def _trees() -> Any:
    ordered = OrderedDict([("w", torch.randn(2)), ("b", torch.randn(1))])
    ordered._metadata = OrderedDict([("", {"version": 1}), ("w", {"version": 2, "n": (1, [2], {"k": None})})])  # type: ignore[attr-defined]
    return {
        "ordered": ordered,
        "point": Point(torch.randn(2), [1, torch.randn(1)]),
        "moments": Moments(torch.randn(2), torch.randn(2)),
        "default": defaultdict(list, {0: torch.randn(1), (1, "a"): 2}),
        "plain_default": defaultdict(None, {"x": 1}),
        "deque": deque([torch.randn(1), 5], maxlen=4),
        "tuple": (torch.randn(1), (), [], {}, {True: 1, None: 2, 1.5: 3, b"k": 4, torch.float32: 5}),
        3: [[[[torch.randn(1)]]]],
        Colour.RED: "red",
    }


def _values() -> dict[str, Any]:
    zone = zoneinfo.ZoneInfo("UTC")
    east = datetime.timezone(datetime.timedelta(hours=3), "east")
    return {
        "none": None, "bool": True, "int": -5, "float": 0.1, "nan": float("nan"), "bytes": b"abc", "str": "äöü",
        "big": 1 << 100, "least": -(1 << 63), "most": (1 << 64) - 1, "lone": "\ud800x", "complex": 1 - 2j,
        "bytearray": bytearray(b"xyz"),
        "set": {1, (2, 3), Listed(1, 2)}, "frozenset": frozenset({1.5}),
        "range": range(1, 10, 3), "slice": slice(None, 5, (1, 2)), "dots": ...,
        "inner": {frozenset({(1, 2)})},
        "nested": slice([1, {"a": (OrderedDict(b=[2]),)}], {3}, None),
        "date": datetime.date(2020, 2, 29), "time": datetime.time(1, 2, 3, 4, east, fold=1),
        "datetime": datetime.datetime(2020, 1, 2, 3, 4, 5, 6, zone), "delta": datetime.timedelta(-1, 2, 3),
        "timezone": east, "utc": datetime.UTC, "zone": zone,
        "pure": pathlib.PurePosixPath("/a/b"), "path": pathlib.Path("c"),
        "windows": pathlib.PureWindowsPath("c:/x"), "uuid": uuid.UUID(int=5),
        "decimal": decimal.Decimal("1.50"), "fraction": fractions.Fraction(2, 3),
        "dtype": torch.bfloat16, "layout": torch.strided, "format": torch.channels_last,
        "device": torch.device("cuda", 1), "size": torch.Size([2, 3]),
        "np_str": np.str_("q"), "np_bytes": np.bytes_(b"q"), "np_float": np.float32(1.5),
        "np_time": np.datetime64("2020-01-01"), "np_void": np.zeros((), dtype=[("a", "<i4"), ("b", "<f8")])[()],
        "enum": Colour.BLUE, "flags": Access.READ | Access.RUN, "config": Config(3, (1, [2])),
    }  # fmt: skip


def _distributed() -> dict[str, Any]:
    mesh = DeviceMesh("cpu", torch.tensor([0]), mesh_dim_names=("dp",), _init_backend=False, _rank=0)
    plane = DeviceMesh("cpu", torch.tensor([[0]]), _init_backend=False, _rank=0)
    return {
        "replicated": DTensor.from_local(torch.randn(2, 3), mesh, [Replicate()], run_check=False),
        "sharded": DTensor.from_local(torch.randn(4, 2), plane, [Shard(0), Shard(1)], run_check=False),
        "parameter": nn.Parameter(DTensor.from_local(torch.randn(3), mesh, [Shard(0)], run_check=False)),
    }


def _large() -> dict[str, Any]:
    return {
        "long": torch.randn(20_000),
        "wide": torch.randn(130, 300)[:, 10:200].t(),
        "small": [torch.randn(11) for _ in range(5)],
    }


_STATES: dict[str, Callable[[], Any]] = {
    "dense": _dense, "dressed": _dressed, "tied": _tied, "sparse": _sparse, "jagged": _jagged, "wrapped": _wrapped,
    "blobs": _blobs, "objects": _objects, "trees": _trees, "values": _values, "distributed": _distributed,
    "large": _large, "tensor": lambda: torch.randn(5), "list": lambda: [torch.randn(3), 1, None],
    "nothing": dict,
}  # fmt: skip


# ------------------------------------------------------------------------------------------------ targets with guards


class Guarded:
    """A copy of a state whose tensors lie in memory with guard bytes around and between their elements."""

    BYTE = 0xA5
    ZONE = 128

    def __init__(self, state: object) -> None:
        described = manifest.describe(state, Limits())
        wire = msgspec.msgpack.encode(described.manifest.encode())
        m = Manifest.decode(msgspec.msgpack.decode(wire, type=manifest.Wire), Limits(), described.manifest.coordinates)
        self._storages: list[tuple[int, int]] = []  # where each begins and ends, guards included
        size = 0
        for nbytes in m.storages.nbytes.tolist():
            self._storages.append((size, size + nbytes + -nbytes % self.ZONE + 2 * self.ZONE))
            size = self._storages[-1][1]
        self.memory: npt.NDArray[np.uint8] = np.full(max(size, 1), self.BYTE, dtype=np.uint8)
        owned = torch.zeros(max(size, 1), dtype=torch.uint8)
        parts = []
        storages = [torch.frombuffer(self.memory[a:b], dtype=torch.uint8).untyped_storage() for a, b in self._storages]
        for i, part in enumerate(described.parts):
            number, item = int(m.parts.storage[i]), int(m.parts.item[i])
            offset = int(m.parts.offset[i]) + self.ZONE // item
            copy = dense.over(storages[number], part.dtype, offset, part.size(), part.stride())
            if part.numel():
                first = self._storages[number][0] + offset * item
                owned.as_strided((*part.size(), item), (*(s * item for s in part.stride()), 1), first).fill_(1)
            parts.append(dense.dress(copy, dense.flags_of(part)))
        for number, window in enumerate(described.windows.tolist()):
            nbytes, real = int(m.storages.nbytes[number]), described.storages[number]
            if nbytes:
                source = dense.over(real, torch.uint8, window, (nbytes,), (1,)).numpy()
                a = self._storages[number][0] + self.ZONE
                keep = owned.numpy()[a : a + nbytes] == 1
                self.memory[a : a + nbytes][keep] = source[keep]
        #: Which bytes are elements'.
        self.owned: npt.NDArray[np.bool_] = owned.numpy() != 0
        self._before = self.memory.copy()
        supply = iter(parts)
        leaves = [
            values.decode(m.detail(i)) if kind == Leaf.VALUE else _close(m.detail(i), supply, m)
            for i, kind in enumerate(m.kinds)
        ]
        self.state = trees.unflatten(m.root, leaves)

    def intact(self) -> bool:
        """Whether every byte that is no element's is as it was."""
        return bool((self.memory[~self.owned] == self.BYTE).all())

    def unchanged(self) -> bool:
        return np.array_equal(self.memory, self._before)

    def restore(self) -> None:
        self.memory[:] = self._before


def _close(spec: Any, parts: Iterator[Any], m: Manifest) -> Any:
    return Kinds(Limits()).close(spec, parts, Room(m.shared, m.coordinates, weights_only_objects=True))


# -------------------------------------------------------------------------------------------------------- the corpus


@dataclasses.dataclass(frozen=True)
class Member:
    """An honest offer, in bytes and taken apart, with the memory behind it."""

    name: str
    cargo: source.Cargo
    body: bytes
    plain: Any
    paths: list[tuple[int, ...]]
    windows: list[bytes]
    target: Guarded

    @property
    def manifest(self) -> Manifest:
        return self.cargo.described.manifest


@functools.cache
def lease() -> MemoryLease:
    """One that lasts as long as this process."""
    return MemoryLease().__enter__()


def load(state: object, lease: MemoryLease | None = None) -> source.Cargo:
    """What a source offers of a state, in small parcels and bursts; without a lease, not to be read from memory."""
    transport = PGTransport(Nowhere(), datetime.timedelta(seconds=1), CPU, same_host=lease is not None)
    transport._limits = Limits(parcel_bytes=64 * KIB, burst_bytes=96 * KIB)
    leases = Leases(same_host=False)
    if lease is not None:
        leases._leases = {"memory": lease}
    return transport._load(state, 4, (PEER,), leases)


def corpus() -> list[Member]:
    torch.manual_seed(7)
    return [member(name, make()) for name, make in _STATES.items()]


def sharded_member() -> Member:
    """Needs a default process group of this rank alone."""
    whole = init_from_local_shards([LocalShard.from_tensor_and_offsets(torch.randn(3, 4), [0, 0], 0)], 3, 4)
    return member("sharded", {"whole": whole, "w": torch.randn(2)})


def member(name: str, state: object, target: object = None) -> Member:
    """Of a state; ``target`` is what it is received into, if that is not its like."""
    cargo = load(state, lease())
    body = messages.encode(cargo.offer)
    plain, windows = msgspec.msgpack.decode(body), []
    for number, window in enumerate(cargo.described.windows.tolist()):
        nbytes, real = int(cargo.described.manifest.storages.nbytes[number]), cargo.described.storages[number]
        windows.append(bytes(dense.over(real, torch.uint8, window, (nbytes,), (1,)).numpy()) if nbytes else b"")
    return Member(name, cargo, body, plain, _paths(plain), windows, Guarded(state if target is None else target))


def _paths(plain: Any) -> list[tuple[int, ...]]:
    found: list[tuple[int, ...]] = []

    def walk(node: Any, path: tuple[int, ...]) -> None:
        found.append(path)
        if isinstance(node, list):
            for i, child in enumerate(node):
                walk(child, (*path, i))

    walk(plain, ())
    return found


def get(plain: Any, path: tuple[int, ...]) -> Any:
    for i in path:
        plain = plain[i]
    return plain


def put(plain: Any, path: tuple[int, ...], node: Any) -> Any:
    """``plain`` with another node at ``path``; the original stays as it is."""
    if not path:
        return node
    copy = list(plain)
    copy[path[0]] = put(plain[path[0]], path[1:], node)
    return copy


# --------------------------------------------------------------------------------------------------------- mutations

INTS = [
    *range(-3, 18), 31, 32, 63, 64, 65, 127, 128, 255, 256, 1000, 65535, 65536, 1 << 20, (1 << 31) - 1, 1 << 31,
    1 << 32, 1 << 40, 1 << 52, (1 << 52) + 1, 1 << 56, 1 << 62, (1 << 63) - 1, 1 << 63, (1 << 64) - 1,
    -(1 << 31), -(1 << 63),
]  # fmt: skip

_HERE = __name__

#: Names of classes and of what is no class: dangerous, absent, private, or merely of the wrong kind.
NAMES = [
    "os:system", "builtins:eval", "builtins:exec", "builtins:type", "builtins:object", "builtins:tuple", "os:_exit",
    "builtins:__import__", "subprocess:Popen", "antigravity:x", "this:s", "ctypes:CDLL", "pickle:Unpickler",
    "io:FileIO", "pathlib:Path", "threading:Thread", "importlib:import_module", "collections:namedtuple",
    "collections:OrderedDict", "enum:Enum", "enum:Flag", "signal:Signals", "re:RegexFlag", "os:stat_result",
    "sys:flags", "sys:version_info",
    "torch:Tensor", "torch:Size", "torch.nn.parameter:Parameter", "torch.nn.parameter:UninitializedParameter",
    "torch.nested._internal.nested_tensor:NestedTensor", "torch.distributed.tensor:DTensor",
    "torch.distributed.tensor._dtensor_spec:DTensorSpec", "torch.distributed.tensor._dtensor_spec:TensorMeta",
    "torch.distributed.device_mesh:DeviceMesh", "torch.return_types:max", "torch.return_types:linalg_lstsq",
    "torch._subclasses.fake_tensor:FakeTensor", "torch.fx.immutable_collections:immutable_dict",
    "torch.fx.immutable_collections:immutable_list", "torch._higher_order_ops.flat_apply:_ConstantFunction",
    "torch._higher_order_ops.auto_functionalize:SchemaHolder", "multiprocessing.context:Process", "", ":", "a:", ":b",
    "os:path.join", "sys:modules", "a" * 600, "builtins:int.__class__", f"{_HERE}:Absent",
    *(f"{_HERE}:{c.__qualname__}" for c in (Point, Listed, Colour, Access, Config, Moments, Plain, Scaled, Guarded)),
]  # fmt: skip

CODECS = ["dtensor", "sharded", "coo", "compressed", "jagged", "wrapper", "array", "text", "object", "tensor", ""]

TAGS = sorted(values._BY_TAG)

DTYPES = [str(d).removeprefix("torch.") for d in vars(torch).values() if isinstance(d, torch.dtype)]

#: Descriptions of numpy dtypes.
DESCRS: list[Any] = [
    "<f8", "|u1", "<U4", "<U1000000", "|S5", "|V0", "|V7", "|O", "O", "T", "<M8[ns]", "<m8[99999999999s]", "i4,f8",
    "(3,4)f4", "9999999999f8", "(99999999,99999999)f8", "V2147483647", "<f16", "<c32", "|b1", "object", "str", "np.f8",
    [["a", "<i4"], ["b", "<f8"]], [["a", "|O"]], [["a", "<U2"]], [["a", "<i4", [2, 3]]], [["a", "<i4", [1 << 40]]],
    [["a", "<i4"], ["a", "<i4"]], [[["t", "a"], "<i4"]], [["", "|V3"]], [], [[]], None, 5, {"names": ["a"]},
    [["a", [["b", [["c", "|O"]]]]]],
]  # fmt: skip


def evil(rng: random.Random) -> Any:
    """A node that may stand anywhere."""
    kind = rng.randrange(12)
    if kind < 4:
        return rng.choice(INTS)
    if kind == 4:
        return rng.choice([float("nan"), float("inf"), -0.0, 0.5, 1e300, None, True, False])
    if kind == 5:
        return rng.choice([*NAMES, *CODECS, *DTYPES, "x", "é", "a" * 5000, "\x00", "meta", "cuda:200", "mps"])
    if kind == 6:
        return rng.randbytes(rng.choice([0, 1, 2, 4, 7, 8, 16, 64]))
    if kind == 7:
        stamp = datetime.datetime(2020, 1, 1, tzinfo=datetime.UTC)
        return rng.choice([[], [[]], {}, {"a": 1}, {1: [2]}, msgspec.msgpack.Ext(5, b"x"), stamp])
    if kind == 8:
        return tagged(rng)
    if kind == 9:
        return tree(rng)
    if kind == 10:
        return spec(rng)
    deep: Any = 0
    for _ in range(rng.choice([10, 90, 101, 127, 129, 500])):
        deep = rng.choice([[deep], [4, None, [], [deep]], [5, deep], [6, deep]])
    return deep


def scalar(rng: random.Random) -> Any:
    return rng.choice([rng.choice(INTS), rng.choice(NAMES), None, True, 0.5, rng.randbytes(rng.randrange(9)), "x"])


def tagged(rng: random.Random, depth: int = 0) -> Any:
    """A value of some tag with parts of some kind."""
    parts = [
        tagged(rng, depth + 1) if depth < 3 and rng.random() < 0.3 else scalar(rng) for _ in range(rng.randrange(5))
    ]
    return [rng.choice([*TAGS, 0, 99]), *parts]


def tree(rng: random.Random, depth: int = 0) -> Any:
    """A tree node, more or less well formed."""
    if depth == 3 or rng.random() < 0.3:
        return 0
    kind = rng.randrange(0, 10)
    children = [tree(rng, depth + 1) for _ in range(rng.randrange(4))]
    keys: list[Any] = []
    if kind in (1, 2, 3, 8):
        keys = [rng.choice([scalar(rng), f"k{i}", tagged(rng)]) for i, _ in enumerate(children)]
    extra: Any = None
    if rng.random() < 0.8:
        match kind:
            case 2:
                extra = tagged(rng)
            case 3:
                extra = rng.choice(["list", "int", "eval", "__import__", 5])
            case 6:
                extra = rng.choice(NAMES)
            case 7:
                extra = rng.choice(INTS)
            case 8:
                extra = [rng.choice(NAMES), tagged(rng)]
    return [kind, extra, keys, children]


def spec(rng: random.Random, depth: int = 0) -> Any:
    """A description of a composite leaf, more or less well formed."""
    if depth == 2 or (depth and rng.random() < 0.7):
        return 0
    name = rng.choice(CODECS)
    ints = [rng.choice([0, 1, 2, 3, 4, rng.choice(INTS)]) for _ in range(rng.randrange(4))]
    small = rng.randrange(3)
    makers: dict[str, Callable[[], Any]] = {
        "coo": lambda: [ints, rng.random() < 0.5],
        "compressed": lambda: [rng.choice(["torch.sparse_csr", "torch.sparse_bsc", "torch.strided", "x"]), ints],
        "jagged": lambda: [rng.choice(INTS), rng.random() < 0.5, *rng.choices([None, small, -1, 1 << 62], k=2)],
        "wrapper": lambda: [rng.choice(NAMES), ["numbers", "scale"], tagged(rng), ints, ints],
        "array": lambda: [rng.choice(DESCRS), ints, rng.choice("CFA")],
        "text": lambda: rng.choice(["bytes", "str", "bytearray", "eval", 5]),
        "object": lambda: rng.choice(NAMES),
        "dtensor": lambda: [
            ints,
            ints,
            rng.choice([[["S", small], ["R"]][:small], [["X", small, rng.choice(INTS)]]]),
            small,
        ],
        "sharded": lambda: [ints, "float32", [[ints, ints, "rank:0/cpu"]], [0], False],
    }
    meta = makers.get(name, lambda: scalar(rng))()
    count = {"coo": 2, "compressed": 3, "jagged": 2, "wrapper": 2}.get(name, 1) + rng.choice([0, 0, 0, 0, 1, -1])
    return [name, rng.choice([0, 0, 0, 1, 2, 8, 9, 63, 64, -1]), meta, [spec(rng, depth + 1) for _ in range(count)]]


def mutate_bytes(rng: random.Random, body: bytes, others: list[bytes]) -> bytes:
    """Flip, cut, insert, repeat, splice."""
    data = bytearray(body)
    for _ in range(rng.choice([1, 1, 1, 2, 4])):
        at = rng.randrange(len(data) + 1)
        match rng.randrange(7):
            case 0 | 1 if data:
                at = min(at, len(data) - 1)
                data[at] ^= 1 << rng.randrange(8)
            case 2 if data:
                data[min(at, len(data) - 1)] = rng.choice([0, 0x7F, 0x80, 0x90, 0xC0, 0xDD, 0xDF, 0xC6, 0xFF])
            case 3:
                del data[at:]
            case 4:
                data[at:at] = rng.randbytes(rng.randrange(1, 9))
            case 5:
                other = rng.choice(others)
                data[at:] = other[rng.randrange(len(other) + 1) :]
            case _:
                end = at + rng.randrange(64)
                data[at:at] = data[at:end]
    return bytes(data)


def mutate_plain(rng: random.Random, plain: Any, paths: list[tuple[int, ...]]) -> Any:
    """Replace, swap, drop or repeat one node."""
    path = rng.choice(paths)
    try:
        node = get(plain, path)
        match rng.randrange(8):
            case 0:
                other = rng.choice(paths)
                return put(put(plain, path, get(plain, other)), other, node)
            case 1:
                return put(plain, path, get(plain, rng.choice(paths)))
            case 2 if path:
                siblings = list(get(plain, path[:-1]))
                del siblings[path[-1]]
                return put(plain, path[:-1], siblings)
            case 3 if path:
                siblings = list(get(plain, path[:-1]))
                siblings.insert(rng.randrange(len(siblings) + 1), node)
                return put(plain, path[:-1], siblings)
            case 4 if type(node) is int:
                return put(plain, path, node + rng.choice([-1, 1, 2, 64]))
            case 4 if type(node) is bytes and node:
                at = rng.randrange(len(node))
                return put(plain, path, node[:at] + rng.randbytes(1) + node[at + rng.randrange(3) :])
        return put(plain, path, evil(rng))
    except (LookupError, TypeError):  # an earlier mutation has taken the path away
        return plain


#: Where fields are in an offer.
ROUTES, RATE, MANIFEST, COORDINATES = (
    messages.Offer.__struct_fields__.index(name)
    for name in ("routes", "max_bytes_per_second", "manifest", "coordinates")
)
#: Where the manifest's columns are in it, with their items.
FIELDS = manifest.Wire.__struct_fields__
TREE, KINDS, DETAILS, SHARED = (FIELDS.index(name) for name in ("tree", "kinds", "details", "shared"))
DTYPES_AT, STORAGE_NBYTES = FIELDS.index("dtypes"), FIELDS.index("storage_nbytes")
STORAGE_DEVICE, STORAGE, DTYPE = (FIELDS.index(name) for name in ("storage_device", "part_storage", "part_dtype"))
FLAGS, NDIM, OFFSET = (FIELDS.index(name) for name in ("part_flags", "part_ndim", "part_offset"))
SIZES, STRIDES = (FIELDS.index(name) for name in ("part_sizes", "part_strides"))
CODES = {STORAGE_NBYTES: "<i8", STORAGE_DEVICE: "<u1", STORAGE: "<i4", DTYPE: "<u1", FLAGS: "<u1", NDIM: "<u1",
         OFFSET: "<i8", SIZES: "<i8", STRIDES: "<i8"}  # fmt: skip

_RANGES = {code: (int(np.iinfo(code).min), int(np.iinfo(code).max)) for code in set(CODES.values())}


def columns(wire: list[Any]) -> Columns:
    return {at: np.frombuffer(wire[at], code).tolist() for at, code in CODES.items()}


def with_columns(wire: list[Any], found: Columns) -> list[Any]:
    result = list(wire)
    for at, code in CODES.items():
        low, high = _RANGES[code]
        result[at] = np.array([min(max(n, low), high) for n in found[at]], dtype=code).tobytes()
    return result


def forge_column(rng: random.Random, wire: list[Any]) -> list[Any]:
    """Wrong numbers in one column."""
    found = columns(wire)
    at = rng.choice(list(CODES))
    column = found[at]
    for _ in range(rng.choice([1, 1, 2])):
        if not column:
            column.append(rng.choice(INTS))
            continue
        i = rng.randrange(len(column))
        match rng.randrange(6):
            case 0 | 1:
                column[i] = rng.choice(INTS)
            case 2:
                column[i] += rng.choice([-1, 1, 2, 7])
            case 3:
                j = rng.randrange(len(column))
                column[i], column[j] = column[j], column[i]
            case 4:
                column[i] *= rng.choice([2, 3, -1, 1 << 20, 0])
            case _:
                if rng.random() < 0.5:
                    del column[i]
                else:
                    column.insert(i, column[i])
    return with_columns(wire, found)


def forge_parts(rng: random.Random, wire: list[Any]) -> list[Any]:
    """Columns that agree with each other, and describe tensors that no honest source has."""
    found = columns(wire)
    count = len(found[STORAGE])
    if not count or len({len(found[at]) for at in (STORAGE, DTYPE, FLAGS, NDIM, OFFSET)}) > 1:
        return forge_column(rng, wire)
    part = rng.randrange(count)
    first = sum(found[NDIM][:part])
    dims = slice(first, first + found[NDIM][part])
    items = [
        getattr(torch, name).itemsize for name in wire[DTYPES_AT] if isinstance(getattr(torch, name, None), torch.dtype)
    ]
    try:
        sizes, strides = found[SIZES][dims], found[STRIDES][dims]
        item = items[found[DTYPE][part]]
        room = found[STORAGE_NBYTES][found[STORAGE][part]] // item
        match rng.randrange(9):
            case 0 if sizes:  # expanded
                i = rng.randrange(len(sizes))
                strides[i] = 0
                sizes[i] = max(1, sizes[i]) * rng.choice([1, 2, 1000, 1 << 20, 1 << 40])
            case 1 | 2:  # any view of the storage
                sizes, strides = view(rng, room)
                found[OFFSET][part] = max(0, room - reach(sizes, strides)) if rng.random() < 0.3 else 0
            case 3:  # to the very end, or one further
                found[OFFSET][part] = max(0, room - reach(sizes, strides)) + rng.choice([0, 0, 1])
            case 4:  # into another's storage
                found[STORAGE][part] = rng.randrange(len(found[STORAGE_NBYTES]))
            case 5:
                found[DTYPE][part] = rng.randrange(len(wire[DTYPES_AT]))
            case 6:
                found[FLAGS][part] = rng.randrange(64)
            case 7 if len(sizes) > 1:  # transposed
                order = rng.sample(range(len(sizes)), len(sizes))
                strides = [strides[d] for d in order]
                if rng.random() < 0.5:
                    sizes = [sizes[d] for d in order]
            case _:  # a storage of another size, a view with it
                number = found[STORAGE][part]
                found[STORAGE_NBYTES][number] = rng.choice([0, 1, 100, 4096, CAP, CAP + 1, 1 << 40, (1 << 63) - 1])
                if rng.random() < 0.7:
                    sizes, strides = view(rng, min(found[STORAGE_NBYTES][number] // item, 1 << 16))
        found[NDIM][part] = len(sizes)
        found[SIZES][dims], found[STRIDES][dims] = sizes, strides
    except (LookupError, ValueError):  # an earlier mutation has made nonsense of them
        return forge_column(rng, wire)
    return with_columns(wire, found)


def reach(sizes: list[int], strides: list[int]) -> int:
    return 1 + sum((n - 1) * s for n, s in zip(sizes, strides, strict=True))


def view(rng: random.Random, room: int) -> tuple[list[int], list[int]]:
    """Sizes and strides that stay within ``room`` items, overlapping as they like."""
    sizes, strides, left = [], [], max(room - 1, 0)
    for _ in range(rng.randrange(5)):
        stride = rng.choice([0, 1, 1, 2, 3, rng.randrange(1 + left)])
        size = 1 + (rng.randrange(1 + min(left // stride, 40)) if stride else rng.randrange(5))
        left -= (size - 1) * stride
        sizes.append(size)
        strides.append(stride)
    return sizes, strides


def forge_alias(rng: random.Random, wire: list[Any]) -> list[Any]:
    """One more leaf, which looks into a storage of others."""
    root, found = wire[TREE], columns(wire)
    if not (isinstance(root, list) and len(root) == 4 and isinstance(root[3], list) and found[STORAGE_NBYTES]):
        return forge_parts(rng, wire)
    try:
        number = rng.randrange(len(found[STORAGE_NBYTES]))
        code = rng.randrange(len(wire[DTYPES_AT]))
        sizes, strides = view(
            rng, min(found[STORAGE_NBYTES][number] // getattr(torch, wire[DTYPES_AT][code]).itemsize, 9999)
        )
        keys = [*root[2], f"alias{rng.random()}"] if root[0] in (1, 2, 3) else root[2]
        more = [([STORAGE], number), ([DTYPE], code), ([FLAGS], 0), ([OFFSET], 0), ([NDIM], len(sizes))]
        for (at,), n in more:
            found[at].append(n)
        found[SIZES] += sizes
        found[STRIDES] += strides
        result = with_columns(wire, found)
        result[TREE] = [root[0], root[1], keys, [*root[3], 0]]
        result[KINDS] = wire[KINDS] + bytes([Leaf.TENSOR])
    except (LookupError, ValueError, TypeError, AttributeError):
        return forge_parts(rng, wire)
    return result


def forge_detail(rng: random.Random, wire: list[Any]) -> list[Any]:
    """Another description of a leaf, of the same or another kind."""
    if not isinstance(wire[DETAILS], list) or not wire[DETAILS]:
        return wire
    i = rng.randrange(len(wire[DETAILS]))
    old = wire[DETAILS][i]
    new = rng.choice([spec, tagged, evil])(rng)
    if isinstance(old, list) and len(old) == 4 and isinstance(old[0], str) and rng.random() < 0.7:
        # The meta of another leaf of its kind, or one number of it.
        fresh = next((s for s in (spec(rng) for _ in range(40)) if isinstance(s, list) and s[0] == old[0]), new)
        if isinstance(fresh, list) and len(fresh) == 4:
            new = [old[0], rng.choice([old[1], fresh[1]]), fresh[2], old[3]]
        if rng.random() < 0.5:
            new = [*old[:2], mutate_plain(rng, old[2], _paths(old[2])), old[3]]
    return put(wire, (DETAILS, i), new)  # type: ignore[no-any-return]


def forge_tree(rng: random.Random, wire: list[Any]) -> list[Any]:
    """Another tree: containers of other classes, other keys, other extras, over the same leaves."""
    paths = [p for p in _paths(wire[TREE]) if isinstance(n := get(wire[TREE], p), list) and len(n) == 4]
    if not paths:
        return put(wire, (TREE,), tree(rng))  # type: ignore[no-any-return]
    path = (TREE, *rng.choice(paths))
    kind, extra, keys, children = get(wire, path)
    match rng.randrange(6):
        case 0 if isinstance(keys, list) and keys:
            keys = list(keys)
            keys[rng.randrange(len(keys))] = rng.choice(
                [rng.choice(keys), tagged(rng), scalar(rng), [1, b"\x01" * 3000]]
            )
        case 1:
            kind = rng.randrange(10)
            keys = keys if kind in (1, 2, 3, 8) else []
        case 2:
            extra = rng.choice([evil, tagged])(rng)
        case 3:
            kind, extra, keys = rng.choice(
                [
                    (6, rng.choice(NAMES), []),
                    (
                        8,
                        [rng.choice(NAMES), rng.choice([None, tagged(rng), scalar(rng)])],
                        [f".{i}" for i, _ in enumerate(children)],
                    ),
                    (7, rng.choice([None, len(children), 1 << 62]), []),
                    (5, None, []),
                ]
            )
        case 4:
            children = [*children, tree(rng)] if isinstance(children, list) else evil(rng)
        case _:
            return put(wire, path, tree(rng))  # type: ignore[no-any-return]
    return put(wire, path, [kind, extra, keys, children])  # type: ignore[no-any-return]


# ---------------------------------------------------------------------------------- memory, links and ranges of parcels

#: What a sign of life may say has arrived.
NOTES = [0, 1, 1000, (1 << 31) - 1, 1 << 40, (1 << 63) - 1, 1 << 63, (1 << 64) - 1]
#: Numbers for seconds and rates.
FLOATS = [float("nan"), float("inf"), -float("inf"), 0.0, -0.0, -1.0, 5e-324, 1e-300, 1e-9, 0.001, 1e9, 1e10, 1e300]
_PAGE = 4096
#: More than any storage of the corpus has.
_HOLE = 1 * MIB


def _map_up_to_a_hole(nbytes: int) -> int:
    """The address of fresh memory, after which there is some that may not be read."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
    libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    base: int = libc.mmap(None, nbytes + _HOLE, 3, 0x22, -1, 0)
    assert libc.mprotect(base + nbytes, _HOLE, 0) == 0
    return base


class Ground:
    """Memory of this process that is nobody's target: some that holds something, some that may not be read."""

    NBYTES = 16 * _PAGE

    def __init__(self) -> None:
        #: Where a page's worth of zeros begins, and something else after it.
        self.zeros = _map_up_to_a_hole(self.NBYTES)
        self.secret = self.zeros + _PAGE
        #: Where the memory ends that may be read.
        self.hole = self.zeros + self.NBYTES
        memory = (ctypes.c_ubyte * self.NBYTES).from_address(self.zeros)
        self.memory: npt.NDArray[np.uint8] = np.frombuffer(memoryview(memory), dtype=np.uint8)
        self.memory[_PAGE:] = np.arange(self.NBYTES - _PAGE, dtype=np.int64) % 251 + 1
        self._before = self.memory.copy()

    @classmethod
    @functools.cache
    def get(cls) -> Ground:
        return cls()

    def intact(self) -> bool:
        return np.array_equal(self.memory, self._before)


#: The number of a process that does not exist: these are given out from below.
ABSENT_PID = int(pathlib.Path("/proc/sys/kernel/pid_max").read_text()) - 1

#: Addresses at which nothing is, or can be.
_FAR = [4096, (1 << 47) - 100, 1 << 47, (1 << 62) - 1, 1 << 62, 1 << 63, (1 << 64) - 1, (1 << 64) - 4096]


def routed(memory: list[Any]) -> dict[str, bytes]:
    """A description of memory as an offer has it."""
    return {"memory": msgspec.msgpack.encode(memory)}


def forge_memory(rng: random.Random, member: Member, storages: int) -> list[Any]:
    """A description of memory that is not where the source has it, or is no description of memory."""
    ground, honest = Ground.get(), lease().describe(member.cargo.described.addresses)
    pid, address, token = honest.pid, honest.token_address, honest.token
    found = np.frombuffer(honest.storages, dtype="<u8").tolist()
    found = [*found[:storages], *[ground.secret] * (storages - len(found))]
    for _ in range(rng.choice([1, 1, 2])):
        match rng.randrange(12):
            case 0:
                pid = rng.choice([0, -1, ABSENT_PID, (1 << 31) - 1, 1 << 31, 1 << 40, -(1 << 63), (1 << 64) - 1])
            case 1:
                token = rng.choice([b"", bytes(TOKEN_BYTES), rng.randbytes(TOKEN_BYTES), token[1:], token + b"x"])
            case 2:
                address = rng.choice([0, 1, address + 1, ground.hole, ground.hole - 8, ground.secret, *_FAR])
            case 3:  # a token of the forger's own, at an address that it knows
                address, token = ground.zeros, bytes(TOKEN_BYTES)
            case 4:
                found = rng.choice([[], found[1:], [*found, 0], found * 2])
            case 5:
                return [pid, address, token, rng.randbytes(rng.randrange(40))]
            case _:
                inside = member.target.memory.ctypes.data
                for i, at in enumerate(found):
                    if rng.random() < 0.5:
                        near = [0, 1, at + 1, at + 64, inside, ground.secret, ground.hole - 100, ground.hole]
                        found[i] = rng.choice([*near, *near, *_FAR])
    clipped = [n & (1 << 64) - 1 for n in found]
    return [pid, address, token, np.array(clipped, dtype="<u8").tobytes()]


def forge_agreed(rng: random.Random) -> list[Any]:
    """Links to neighbours of any rank on any tag, and patience of any length."""

    def link() -> Any:
        if rng.random() < 0.3:
            return None
        sound = rng.random() < 0.7
        rank = rng.randrange(8) if sound else rng.choice([-1, 7, 8, 9, 1 << 20, 1 << 31, 1 << 32, *INTS])
        low, high = FIRST_LINK_TAG, FIRST_LINK_TAG + LINK_TAGS
        tag = rng.choice([low, high - 1])
        if rng.random() < 0.3:
            tag = rng.choice([low - 1, high, FIRST_TAG, OFFER_TAG, 0, -1, 1 << 31, 1 << 32, (1 << 64) - 1])
        return [rank, tag, rng.choice([0, 1, 2, (1 << 63) - 1, (1 << 64) - 1])]

    return [link(), link(), rng.choice([0.01, 0.5, 1.0, *FLOATS])]


def forge_pairs(rng: random.Random, count: int) -> list[int]:
    """Ranges of parcels: rising or not, in bounds or not."""
    pairs = sorted(rng.sample(range(count + 1), min(count + 1, 2 * rng.randrange(4))))
    for _ in range(rng.choice([0, 1, 1, 2])):
        i = rng.randrange(len(pairs) + 1)
        match rng.randrange(4):
            case 0:
                pairs.insert(i, rng.choice([*INTS, count, count + 1]))
            case 1 if pairs:
                pairs[i % len(pairs)] = rng.choice([*INTS, count, count + 1])
            case 2:
                pairs.reverse()
            case _:
                pairs += pairs[-2:]
    return pairs


def forge_digests(rng: random.Random, count: int) -> bytes:
    """Digests of parcels, mostly of as many as there may be."""
    number = max(rng.choice([0, 1, count, count, rng.randrange(count + 1), count + 1]), 0)
    size = 16 * number + rng.choice([0, 0, 0, 0, -1, 1, 8]) * (number > 0)
    return rng.randbytes(size) if rng.random() < 0.5 else bytes(size)


def forge_request(rng: random.Random, count: int) -> tuple[Message, Any]:
    """What a receiver of ``count`` parcels may ask a source, mostly when it may, with numbers of its own."""
    pairs = messages.pairs_of(sorted(rng.sample(range(count), rng.randrange(count + 1))))
    if rng.random() < 0.15:
        pairs = forge_pairs(rng, count)
    kind = rng.choice([*[Message.MORE, Message.COMPARE, Message.CHECK] * 8, *[Message.VERDICT] * 4, *Message])
    bodies: dict[Message, Any] = {
        Message.MORE: [pairs],
        Message.COMPARE: [pairs],
        Message.VERDICT: [rng.choice([{}, {"memory": rng.choice([0, *INTS])}, rng.choice(INTS)])],
        Message.REFUSAL: [rng.choice(["SourceMutated", "StepMismatch", "X"]), "because"],
    }
    return kind, bodies.get(kind, rng.choice([[], 0, b"x" * 50]))


def mutate_offer(rng: random.Random, member: Member, others: list[Member]) -> bytes:
    """A forged offer: one of ``member``'s with one or more lies in it."""
    if rng.random() < 0.2:
        return mutate_bytes(rng, member.body, [other.body for other in others])
    plain = member.plain
    for _ in range(rng.choice([1, 1, 1, 2, 3])):
        wire = plain[MANIFEST] if isinstance(plain, list) and len(plain) == len(member.plain) else None
        well_formed = isinstance(wire, list) and len(wire) == len(FIELDS)
        well_formed = well_formed and all(isinstance(wire[at], bytes) for at in CODES)  # type: ignore[index]
        lie = rng.random()
        if well_formed and lie < 0.08:
            with contextlib.suppress(LookupError, TypeError):
                storages = len(wire[STORAGE_NBYTES]) // 8  # type: ignore[index]
                plain = put(plain, (ROUTES,), routed(forge_memory(rng, member, storages)))
        elif well_formed and lie < 0.1:
            plain = put(plain, (RATE,), rng.choice(FLOATS))
        elif not well_formed or lie < 0.18:
            plain = mutate_plain(rng, plain, member.paths)
        elif lie < 0.22:
            other = rng.choice(others).plain[MANIFEST]
            at = rng.randrange(len(FIELDS))
            plain = put(plain, (MANIFEST, at), other[at])
        else:
            forge = rng.choices(
                [forge_column, forge_parts, forge_alias, forge_detail, forge_tree], [10, 30, 10, 15, 12]
            )[0]
            with contextlib.suppress(ValueError, TypeError):  # an earlier lie has left nothing to forge
                plain = put(plain, (MANIFEST,), forge(rng, wire))  # type: ignore[arg-type]
    if rng.random() < 0.15:
        plain = forge_places(rng, plain)
    try:
        body = msgspec.msgpack.encode(plain)
    except (OverflowError, RecursionError):
        return mutate_bytes(rng, member.body, [other.body for other in others])
    return resealed(body) if rng.random() < 0.95 else body


def forge_places(rng: random.Random, plain: Any) -> Any:
    """Other places in the meshes, or other meshes."""

    def place() -> Any:
        return rng.choice([None, [], [0], [1], [0, 0], [rng.choice(INTS)], [rng.choice(INTS), 0], [0] * 20])

    with contextlib.suppress(LookupError, TypeError):
        if rng.random() < 0.7:
            return put(plain, (COORDINATES,), [place() for _ in range(rng.randrange(4))])
        shape = rng.choice([[1], [2], [1, 1], [2, 2], [1 << 20], [1 << 40, 1 << 40], [0], [-1], [1] * 20])
        ranks = list(range(rng.choice([1, 2, 4, 5])))
        return put(plain, (MANIFEST, SHARED), [["cpu", shape, ranks, None]] * rng.randrange(1, 4))
    return plain


def resealed(body: bytes) -> bytes:
    """An offer with the digests of what it says: a forger knows them too."""
    try:
        offer = messages.decode(body, messages.Offer)
        wire = offer.described
        likeness = Manifest.decode(wire, LIMITS, offer.coordinates).likeness(wire)
        return messages.encode(msgspec.structs.replace(offer, digest=wire.digest(), likeness=likeness))
    except Exception:
        return body


# ------------------------------------------------------------------------------------------------------ the two ends


class TooMuch(TransfuseError):
    """A plan too large to make up data for."""


class _Done:
    def wait(self, timeout: datetime.timedelta) -> bool:
        return True


class Nowhere:
    """A process group without peers: what is sent is dropped, what is received was made up before."""

    def send(self, tensors: list[Tensor], rank: int, tag: int) -> _Done:
        return _Done()

    def recv(self, tensors: list[Tensor], rank: int, tag: int) -> _Done:
        return _Done()

    def rank(self) -> int:
        return 0

    def size(self) -> int:
        return 8


class Recorder(Nowhere):
    """Keeps what is sent."""

    def __init__(self) -> None:
        self.said = bytearray()

    def send(self, tensors: list[Tensor], rank: int, tag: int) -> _Done:
        self.said += tensors[0].numpy().tobytes()
        return _Done()


def spoken(kind: Message, body: bytes, transfer: int, note: int) -> bytes:
    """A message as it goes over the wire."""
    line = Line(Group(group := Recorder(), CPU), PEER, 1.0, LIMITS)
    line.transfer, line.tag = transfer, FIRST_TAG
    line.send(kind, body, note=note)
    return bytes(group.said)


class Stream(Nowhere):
    """A peer that has said ``data`` and then fallen silent."""

    def __init__(self, data: bytes) -> None:
        self._data, self._at = data, 0

    def recv(self, tensors: list[Tensor], rank: int, tag: int) -> _Done:
        (tensor,) = tensors
        data = self._data[self._at : self._at + tensor.numel()]
        if len(data) < tensor.numel():
            raise RuntimeError("timed out")
        self._at += len(data)
        if data:
            tensor.copy_(torch.frombuffer(bytearray(data), dtype=torch.uint8))
        return _Done()


class Lined(Chains):
    """Chains in which everybody is told the same at once."""

    def __init__(self, agreed: Agreed) -> None:
        super().__init__([PEER], 0, 1.0)
        self._agreed = agreed

    def join(self, rank: int, key: Hashable, host: int) -> tuple[Agreed, Pace]:
        return self._agreed, Pace(None)


#: What one receiver may be told of its neighbours.
AGREED = [
    Agreed(upstream, downstream, 0.01)
    for upstream in (None, Link(1, FIRST_LINK_TAG, 1))
    for downstream in (None, Link(2, FIRST_LINK_TAG + 1, 2))
]


Said = bytes | tuple[Message, bytes]


class Wire(Line):
    """A line to a peer that says ``answers`` in turn, sends made-up parcels, and tells the truth about them.

    Answers are bodies of the first kind that is due, or come with their kind. A number among them is a sign of life.
    A source's answers to questions are said by themselves: what ``said`` has for that kind of question, once, and
    otherwise nothing special or the truth. After ``bursts`` bursts it cancels. A receiver that gets parcels asks for
    ``more`` meanwhile.
    """

    def __init__(
        self,
        rng: random.Random,
        member: Member,
        answers: Sequence[Said | int],
        *,
        said: Mapping[Message, Said] | None = None,
        bursts: int | None = None,
        more: Sequence[int] = (),
        relays: bool = False,
        peer: int = PEER,
    ) -> None:
        super().__init__(Group(Nowhere(), CPU), peer, 1.0, LIMITS)
        self.group.tagged = relays
        self._rng, self._member, self._answers = rng, member, deque(answers)
        self._said, self._bursts, self._more = dict(said or {}), bursts, deque(more)
        self._filling = rng.choice(["random", "honest", "honest", "zero", "small", "full", "edges"])
        self._asked: Message | None = None
        self._true_digests: bytes = b""
        #: How the member cuts what is wanted from it, if it has that at all.
        self._cut: Parcels | None = None
        self._digests: list[int] = []
        self._due: deque[int] = deque()
        self.accepted: Accepted | None = None

    def expect(self, *kinds: Message, tag: int | None = None) -> tuple[Header, bytearray]:
        self.transfer, self.tag = 1, FIRST_TAG
        if Message.GOT in kinds:
            # Perhaps with parcels that it wants in addition.
            note = self._more.popleft() if self._more and self._rng.random() < 0.5 else int(Intent.GO_ON)
            return Header(Message.GOT, 1, note, 0, 0), bytearray()
        if Message.AGREED in kinds or Message.DIGESTS in kinds:
            assert self._asked is not None
            plain = self._true_digests if Message.DIGESTS in kinds else messages.encode(Agreed())
            return self._say(self._said.pop(self._asked, plain), kinds)
        while self._answers:
            answer = self._answers.popleft()
            if not isinstance(answer, int):
                return self._say(answer, kinds)
            if self.on_working is not None:
                self.on_working(answer)
        raise PeerLost(self.peer, f"rank {self.peer}: has no more to say")

    def _say(self, answer: Said, kinds: tuple[Message, ...]) -> tuple[Header, bytearray]:
        kind, body = answer if isinstance(answer, tuple) else (kinds[0], answer)
        if kind is Message.REFUSAL:
            self._refused = True
            raise self.refused(self.decode(body, messages.Refusal))
        if kind not in kinds:
            raise ProtocolError(self.peer, f"rank {self.peer} sent {kind.name}, which was not due")
        return Header(kind, 1, FIRST_TAG, len(body), 0), bytearray(body)

    def send(self, kind: Message, body: bytes | Tensor = b"", *, note: int = 0, tag: int | None = None) -> None:
        if kind is Message.GOT:
            answer = messages.Answer.of(note)
            self._due += range(answer.first, answer.first + answer.number)
        if kind in (Message.WANT, Message.MORE, Message.COMPARE):
            assert isinstance(body, bytes)
            assert self.accepted is not None
            count = len(self.accepted.cut)
            if kind is Message.WANT:
                want = messages.decode(body, messages.Want)
                self._cut = self.accepted.cut if want.picks is None else self._picked(want.picks, want.parcel_bytes)
                self._due = deque(messages.numbers_in(want.parcels, count))
            elif kind is Message.MORE:
                self._due += messages.numbers_in(messages.decode(body, messages.More).parcels, count)
            else:
                numbers = messages.numbers_in(messages.decode(body, messages.More).parcels, count)
                self._true_digests = messages.encode(messages.Digests(b"".join(map(self._true_digest, numbers))))
        if kind in (Message.WANT, Message.MORE, Message.COMPARE, Message.CHECK):
            self._asked = kind
        super().send(kind, body, note=note, tag=tag)

    def post_recv(self, tensor: Tensor, tag: int | None = None) -> Posted:
        data = self._parcel(self._due.popleft(), tensor.numel(), self._made_up)
        if data:
            tensor.copy_(torch.frombuffer(data, dtype=torch.uint8))
        self._digests.append(digest_of(tensor))
        return super().post_recv(tensor, tag)

    def post_recv_sent(self, digests: int) -> Posted:
        said = self._digests if digests else []
        assert len(said) == digests
        self._digests = []
        intent = Intent.CANCEL if self._bursts == 0 else Intent.GO_ON
        self._bursts = None if self._bursts is None else max(self._bursts - 1, 0)
        record = messages.seal_record(self.transfer, intent, said)
        return super().post_recv(torch.frombuffer(bytearray(record), dtype=torch.uint8))

    def _picked(self, picks: Picks, parcel_bytes: int) -> Parcels | None:
        try:
            return parcels.cut(boxes_in(Holdings(self._member.manifest), picks), parcel_bytes, all_staged=True)
        except ValueError:  # What was offered is not what the member has.
            return None

    def _parcel(self, number: int, nbytes: int, fill: Callable[[Piece], bytes]) -> bytearray:
        data = bytearray(nbytes)
        if self._cut is None or number >= len(self._cut):
            return bytearray(self._rng.randbytes(nbytes))
        for piece in self._cut.pieces(number):
            data[piece.position : piece.position + piece.high - piece.low] = fill(piece)
        return data[:nbytes].ljust(nbytes, b"\0")

    def _true_digest(self, number: int) -> bytes:
        """Of a parcel as the member has it."""
        assert self.accepted is not None
        if self._cut is None or number >= len(self._cut):
            return bytes(WIDE_BYTES)
        data = self._parcel(number, int(self._cut.nbytes[number]), self._honest)
        return wide_digest_of(torch.frombuffer(data, dtype=torch.uint8))

    def _made_up(self, piece: Piece) -> bytes:
        size = piece.high - piece.low
        if self._filling == "random":
            return self._rng.randbytes(size)
        if self._filling == "honest":
            return self._honest(piece)
        pattern = {"zero": b"\0", "full": b"\xff"}.get(self._filling)
        if pattern is None:
            ints = range(4) if self._filling == "small" else INTS
            pattern = struct.pack("<9Q", *(self._rng.choice(ints) & (1 << 64) - 1 for _ in range(9)))
        return (pattern * (size // len(pattern) + 1))[:size]

    def _honest(self, piece: Piece) -> bytes:
        return self._box(piece)[piece.low : piece.high].ljust(piece.high - piece.low, b"\0")

    def _box(self, piece: Piece) -> bytes:
        """What the member's own storages hold where the box says, as far as there is such a thing."""
        assert self._cut is not None
        boxes, windows = self._cut.boxes, self._member.windows
        storage, box = int(boxes.storage[piece.box]), boxes.box(piece.box)
        if storage >= len(windows) or box.end > len(windows[storage]):
            return b""
        strides = (*(s * box.item for s in box.strides), 1)
        window = np.frombuffer(windows[storage], np.uint8)[box.start :]
        return np.lib.stride_tricks.as_strided(window, (*box.sizes, box.item), strides).tobytes()


def context(
    ranks: tuple[int, ...],
    limits: Limits,
    timeout: float = 60.0,
    caller: Caller | None = None,
    report: Report | None = None,
) -> Context:
    """What a transport makes for each call."""
    return Context(
        ranks=ranks,
        limits=limits,
        device=CPU,
        timeout=timeout,
        caller=caller or Caller(),
        report=report or Report("receive", ranks),
        progress={rank: Progress() for rank in ranks},
    )


def gather(
    lines: Sequence[Line], request: Request, caller: Caller | None = None, report: Report | None = None
) -> list[Any]:
    """Receive over these lines, as a transport does; the state in a list."""
    ranks = tuple(line.peer for line in lines)
    caller = caller or Caller()
    receive = Receive(request, context(ranks, lines[0].limits, lines[0].timeout, caller, report))
    failed: dict[int, BaseException] = {}
    try:
        if len(lines) == 1:
            try:
                receiver.receive(lines[0], receive)
            except TransfuseError as error:
                failed[ranks[0]] = error
        else:
            talking = {line.peer: functools.partial(receiver.receive, line, receive) for line in lines}
            failed = threads.run(talking, caller, lambda: None, receive.watch, receive.roster.park)
        if not receive.result:
            raise receive.failure or (failed[ranks[0]] if len(lines) == 1 else ReceiveFailed(failed))
    except BaseException as error:
        receive.account_for(error)
        raise
    finally:
        receive.close()
    return receive.result


@contextlib.contextmanager
def patched_accept(*wires: Wire) -> Iterator[None]:
    """Tell the wires what was accepted. No case allocates more than it may, or looks at other processes."""

    def read_offer(*args: Any) -> messages.Offer:
        offer = accepting.read_offer(*args)
        with contextlib.suppress(Malformed):
            entry = Entry.decode(offer.routes.get("memory", b""))
            if 0 < entry.pid < 1 << 31 and entry.pid != os.getpid():
                # Other processes are none of a test's business.
                absent = msgspec.structs.replace(entry, pid=ABSENT_PID).encode()
                offer = msgspec.structs.replace(offer, routes={**offer.routes, "memory": absent})
        return offer

    def accept_offer(*args: Any) -> Accepted:
        accepted = accepting.accept(*args)
        memory = accepted.landing.fresh
        fresh = sum(map(len, memory.arena.blocks))
        fresh += sum(storage.nbytes() for storage in memory.arena._storages.values())
        fresh += sum(tensor.nbytes for tensor in memory.local_tensors.values())
        assert fresh <= CAP + ALIGNMENT * len(accepted.manifest.storages), f"{fresh} bytes allocated"
        if accepted.cut.total_bytes > MAX_PLANNED:
            raise TooMuch("planned")
        for wire in wires:
            wire.accepted = accepted
        return accepted

    with (
        mock.patch.object(receiver, "read_offer", read_offer),
        mock.patch.object(negotiation, "accept", accept_offer),
    ):
        yield


def interrupted(rng: random.Random, member: Member, target: object | None, bursts: int | None) -> Partial | None:
    """What is left of an honest receive that ended after so many bursts, or when all had come."""
    wire = Wire(rng, member, [member.body], bursts=bursts)
    wire._filling = "honest"
    request = Request(target=target, options=Options(weights_only_objects=True, same_host=False))
    try:
        with patched_accept(wire), mock.patch.object(Receive, "_build", side_effect=TransfuseError), torch.no_grad():
            gather([wire], request)
    except TransfuseError as error:
        left: Partial | None = error.partial
        return left
    raise AssertionError("it was built all the same")


class Audit:
    """Records what the interpreter does on behalf of a peer: imports, code, files, processes, sockets."""

    _WATCHED = re.compile(
        r"import|exec|compile|open|os\..*|subprocess\..*|shutil\..*|socket\..*|urllib\..*|pty\..*|marshal\..*"
        r"|pickle\.find_class|ctypes\.(dlopen|dlsym|call_function)|code\.__new__|signal\..*|mmap\.__new__|tempfile\..*"
    )
    _installed: list[Audit] = []  # noqa: RUF012 - a hook stays for the life of the process, so there is one

    def __init__(self) -> None:
        self.active = False
        self.events: list[tuple[Any, ...]] = []
        self._zones = tuple(str(path) for path in zoneinfo.TZPATH)
        sys.addaudithook(self._hear)

    @classmethod
    def get(cls) -> Audit:
        if not cls._installed:
            cls._installed.append(Audit())
        return cls._installed[0]

    def _hear(self, event: str, args: tuple[Any, ...]) -> None:
        if self.active and self._WATCHED.fullmatch(event) and not self._benign(event, args):
            frame, trail = sys._getframe(1), list[str]()
            while frame is not None and len(trail) < 8:
                trail.append(f"{pathlib.PurePath(frame.f_code.co_filename).name}:{frame.f_lineno}")
                frame = frame.f_back  # type: ignore[assignment]
            self.events.append((event, *(str(a)[:200] for a in args), " < ".join(trail)))

    def _benign(self, event: str, args: tuple[Any, ...]) -> bool:
        if event == "mmap.__new__":
            return bool(args[0] == -1)  # Memory, and no file.
        if event != "open" or not isinstance(args[0], str) or args[1] not in ("r", "rb"):
            return False
        # A known time zone is a file of the time zone database; torch quotes source lines where it reports errors.
        quoting = args[0].endswith(".py") and sys._getframe(2).f_code is tokenize.open.__code__
        # Which memory of this process can be written, no peer has a say in.
        return quoting or args[0] == mappings.MAPS or args[0].startswith(self._zones)

    @contextlib.contextmanager
    def listening(self) -> Iterator[None]:
        self.active = True
        try:
            yield
        finally:
            self.active = False


# ----------------------------------------------------------------------------------------------------------- results

#: Tensors of more elements are not read: an expanded one may claim any number.
MAX_READ = 1 << 16


def touch(state: Any) -> None:
    """Use a received state as its owner would: read every element, convert what can be converted."""
    _, leaves = trees.flatten(state, max_depth=1000)
    for leaf in leaves:
        if isinstance(leaf, Tensor):
            _touch_tensor(leaf)
        elif isinstance(leaf, np.ndarray):
            leaf.tobytes()
            if leaf.size < MAX_READ:
                leaf.tolist()
        else:
            with contextlib.suppress(ValueError):  # more digits than Python prints
                repr(leaf)


def _touch_tensor(leaf: Tensor) -> None:
    with torch.no_grad():
        if isinstance(leaf, Scaled):
            _touch_tensor(leaf.numbers)
            _touch_tensor(leaf.scale)
        elif isinstance(leaf, DTensor):
            _touch_tensor(leaf._local_tensor)
        elif isinstance(leaf, ShardedTensor):
            for shard in leaf.local_shards():
                _touch_tensor(shard.tensor)
        elif leaf.is_nested:
            if leaf._values.numel() < MAX_READ and leaf._offsets.numel() < MAX_READ:  # type: ignore[attr-defined]
                with contextlib.suppress(RuntimeError):  # torch unbinds only what has no gaps
                    [piece.clone() for piece in leaf.unbind()]
        elif leaf.layout is not torch.strided:
            if leaf.numel() < MAX_READ and leaf._nnz() < MAX_READ:
                leaf.detach().to_dense()
        elif leaf.numel() < MAX_READ:
            dense.raw(leaf.detach()).clone()
            with contextlib.suppress(NotImplementedError, RuntimeError):  # not every dtype has every kernel
                leaf.detach().clone().resolve_conj().resolve_neg()


# --------------------------------------------------------------------------------------------- at the edge of memory


class Edge:
    """Memory that ends where the process may not read: one element too far is the end of the process."""

    def __init__(self) -> None:
        self._pages: list[int] = []
        self._used = 0

    def put(self, tensor: Tensor, gaps: bool = False) -> Tensor:
        """A copy of a small tensor that ends at the edge. It lives until the next :meth:`clear`.

        With gaps, every other element is none of the tensor's, and far from any index.
        """
        if gaps and tensor.ndim == 1:
            apart = self.put(torch.full((2 * len(tensor),), 1 << 30, dtype=tensor.dtype))[::2]
            return apart.copy_(tensor)
        size = tensor.numel() * tensor.element_size()
        assert size <= _PAGE
        if self._used == len(self._pages):
            self._pages.append(_map_up_to_a_hole(_PAGE))
        base = self._pages[self._used]
        self._used += 1
        if not size:
            return tensor.clone()
        window = (ctypes.c_ubyte * size).from_address(base + _PAGE - size)
        return torch.frombuffer(window, dtype=tensor.dtype).view(tensor.shape).copy_(tensor)

    def clear(self) -> None:
        self._used = 0


def close_at_the_edge(seed: int, count: int) -> None:
    """Builds sparse and jagged tensors from forged indices that end at the edge, and uses those that can be built."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    edge, kinds, built = Edge(), Kinds(Limits()), 0
    for number in range(count):
        rng = random.Random(f"{seed}/{number}")
        print(number, end="\r", file=sys.stderr, flush=True)
        edge.clear()
        torch.manual_seed(number)
        name, meta, children = _index_leaf(rng)
        parts = [edge.put(child, not child.is_floating_point() and rng.random() < 0.1) for child in children]
        with contextlib.suppress(ValueError, TypeError, RuntimeError, TransfuseError):
            leaf = kinds.close([name, 0, meta, [0] * len(parts)], iter(parts), Room())
            built += 1
            touch([leaf])
    print(built)


def _index_leaf(rng: random.Random) -> tuple[str, Any, list[Tensor]]:
    """A composite leaf with index tensors, honest but for a few numbers."""
    rows, columns_ = rng.randrange(1, 5), rng.randrange(1, 6)
    layout = rng.choice(
        ["coo", "torch.sparse_csr", "torch.sparse_csc", "torch.sparse_bsr", "torch.sparse_bsc", "jagged"]
    )
    block = (rng.randrange(1, 3), rng.randrange(1, 3)) if "bs" in layout else (1, 1)
    shape = [rows * block[0], columns_ * block[1]]
    kind = rng.choice([torch.int64, torch.int64, torch.int32])
    cells = torch.ones(shape) * (torch.rand(shape) < 0.6)
    meta: Any
    if layout == "coo":
        made = cells.to_sparse()
        meta, children = [shape, rng.random() < 0.7], [made._indices(), made._values()]
    elif layout == "jagged":
        lengths = [rng.randrange(4) for _ in range(rows)]
        offsets = torch.tensor([0, *lengths]).cumsum(0).to(kind)
        meta, children = [1, False, None, None], [torch.randn(sum(lengths), 2), offsets]
        if rng.random() < 0.3:
            meta, children = [1, True, None, None], [*children, torch.tensor(lengths, dtype=kind)]
    else:
        by_block = {"torch.sparse_bsr": cells.to_sparse_bsr, "torch.sparse_bsc": cells.to_sparse_bsc}
        plain = {"torch.sparse_csr": cells.to_sparse_csr, "torch.sparse_csc": cells.to_sparse_csc}
        made = by_block[layout](block) if layout in by_block else plain[layout]()
        row_wise = layout.endswith("r")
        indices = [made.crow_indices(), made.col_indices()] if row_wise else [made.ccol_indices(), made.row_indices()]
        meta, children = [layout, shape], [*(i.to(kind) for i in indices), made.values()]
    for _ in range(rng.choice([0, 1, 1, 2, 3])):
        child = rng.choice([c for c in children if not c.is_floating_point()])
        if child.numel():
            low, high = torch.iinfo(child.dtype).min, torch.iinfo(child.dtype).max
            at = rng.randrange(child.numel())
            child.view(-1)[at] = min(max(rng.choice([*INTS, int(child.view(-1)[at]) + 1]), low), high)
    if rng.random() < 0.4:  # room for large indices
        sizes = meta[1] if layout.startswith("torch") else meta[0] if layout == "coo" else []
        if sizes:
            sizes[rng.randrange(len(sizes))] = rng.choice([1 << 20, 1 << 31, 1 << 40, (1 << 63) - 1])
    return ("compressed" if layout.startswith("torch") else layout), meta, children
