"""Honest messages of every kind: what is carried, targets with guards, and the corpus."""

from __future__ import annotations

import dataclasses
import datetime
import decimal
import fractions
import functools
import pathlib
import uuid
import zoneinfo
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import torch
from torch import nn
from torch.distributed._shard.sharded_tensor import init_from_local_shards
from torch.distributed._shard.sharded_tensor.shard import Shard as LocalShard
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from hostile.classes import CPU, PEER, Access, Colour, Config, Listed, Moments, Nowhere, Plain, Point, Scaled
from transfuse._limits import KIB, Limits
from transfuse._options import Options
from transfuse._session import source
from transfuse._state import manifest, trees
from transfuse._state.leaves import dense, values
from transfuse._state.leaves.codec import BuildContext
from transfuse._state.leaves.registry import Registry
from transfuse._state.manifest import Leaf, Manifest
from transfuse._transport import PGTransport
from transfuse._wire import messages
from transfuse._wire.memory_route import MemoryLease
from transfuse._wire.route_table import Leases

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
        tensors = []
        storages = [torch.frombuffer(self.memory[a:b], dtype=torch.uint8).untyped_storage() for a, b in self._storages]
        for i, tensor in enumerate(described.tensors):
            number, item = int(m.tensors.storage[i]), int(m.tensors.item[i])
            offset = int(m.tensors.offset[i]) + self.ZONE // item
            copy = dense.over(storages[number], tensor.dtype, offset, tensor.size(), tensor.stride())
            if tensor.numel():
                first = self._storages[number][0] + offset * item
                owned.as_strided((*tensor.size(), item), (*(s * item for s in tensor.stride()), 1), first).fill_(1)
            tensors.append(dense.dress(copy, dense.flags_of(tensor)))
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
        supply = iter(tensors)
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


def _close(spec: Any, tensors: Iterator[Any], m: Manifest) -> Any:
    return Registry(Limits()).close(spec, tensors, BuildContext(m.shared, m.coordinates, weights_only_objects=True))


# -------------------------------------------------------------------------------------------------------- the corpus


@dataclasses.dataclass(frozen=True)
class Member:
    """An honest offer, in bytes and taken apart, with the memory behind it."""

    name: str
    offered: source.OfferedState
    body: bytes
    plain: Any
    paths: list[tuple[int, ...]]
    windows: list[bytes]
    target: Guarded

    @property
    def manifest(self) -> Manifest:
        return self.offered.described.manifest


@functools.cache
def lease() -> MemoryLease:
    """One that lasts as long as this process."""
    return MemoryLease().__enter__()


def load(state: object, lease: MemoryLease | None = None) -> source.OfferedState:
    """What a source offers of a state, in small parcels and bursts; without a lease, not to be read from memory."""
    transport = PGTransport(Nowhere(), datetime.timedelta(seconds=1), CPU, same_host=lease is not None, streams=False)
    transport._limits = Limits(parcel_bytes=64 * KIB, burst_bytes=96 * KIB)
    leases = Leases(Options(same_host=False), 60)
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
    offered = load(state, lease())
    body = messages.encode(offered.offer)
    plain, windows = msgspec.msgpack.decode(body), []
    for number, window in enumerate(offered.described.windows.tolist()):
        nbytes, real = int(offered.described.manifest.storages.nbytes[number]), offered.described.storages[number]
        windows.append(bytes(dense.over(real, torch.uint8, window, (nbytes,), (1,)).numpy()) if nbytes else b"")
    return Member(name, offered, body, plain, paths_of(plain), windows, Guarded(state if target is None else target))


def paths_of(plain: Any) -> list[tuple[int, ...]]:
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
