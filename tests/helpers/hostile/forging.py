"""Ways to mutate and to forge messages."""

from __future__ import annotations

import contextlib
import ctypes
import datetime
import functools
import pathlib
import random
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import torch

from hostile.classes import CAP, LIMITS, Access, Colour, Columns, Config, Listed, Moments, Plain, Point, Scaled
from hostile.corpus import Guarded, Member, get, lease, paths_of, put
from transfuse._limits import MIB
from transfuse._state import manifest
from transfuse._state.leaves import values
from transfuse._state.manifest import Leaf, Manifest
from transfuse._wire import messages
from transfuse._wire.group import FIRST_LINK_TAG, FIRST_TAG, LINK_TAGS, OFFER_TAG
from transfuse._wire.memory_route_read import TOKEN_BYTES
from transfuse._wire.messages import Message

# --------------------------------------------------------------------------------------------------------- mutations

INTS = [
    *range(-3, 18), 31, 32, 63, 64, 65, 127, 128, 255, 256, 1000, 65535, 65536, 1 << 20, (1 << 31) - 1, 1 << 31,
    1 << 32, 1 << 40, 1 << 52, (1 << 52) + 1, 1 << 56, 1 << 62, (1 << 63) - 1, 1 << 63, (1 << 64) - 1,
    -(1 << 31), -(1 << 63),
]  # fmt: skip


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
    "os:path.join", "sys:modules", "a" * 600, "builtins:int.__class__", f"{__name__}:Absent",
    *(f"{c.__module__}:{c.__qualname__}" for c in (Point, Listed, Colour, Access, Config, Moments)),
    *(f"{c.__module__}:{c.__qualname__}" for c in (Plain, Scaled, Guarded)),
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


STORAGE_DEVICE, STORAGE, DTYPE = (FIELDS.index(name) for name in ("storage_device", "tensor_storage", "tensor_dtype"))


FLAGS, NDIM, OFFSET = (FIELDS.index(name) for name in ("tensor_flags", "tensor_ndim", "tensor_offset"))


SIZES, STRIDES = (FIELDS.index(name) for name in ("tensor_sizes", "tensor_strides"))


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


def forge_tensors(rng: random.Random, wire: list[Any]) -> list[Any]:
    """Columns that agree with each other, and describe tensors that no honest source has."""
    found = columns(wire)
    count = len(found[STORAGE])
    if not count or len({len(found[at]) for at in (STORAGE, DTYPE, FLAGS, NDIM, OFFSET)}) > 1:
        return forge_column(rng, wire)
    row = rng.randrange(count)
    first = sum(found[NDIM][:row])
    dims = slice(first, first + found[NDIM][row])
    items = [
        getattr(torch, name).itemsize for name in wire[DTYPES_AT] if isinstance(getattr(torch, name, None), torch.dtype)
    ]
    try:
        sizes, strides = found[SIZES][dims], found[STRIDES][dims]
        item = items[found[DTYPE][row]]
        room = found[STORAGE_NBYTES][found[STORAGE][row]] // item
        match rng.randrange(9):
            case 0 if sizes:  # expanded
                i = rng.randrange(len(sizes))
                strides[i] = 0
                sizes[i] = max(1, sizes[i]) * rng.choice([1, 2, 1000, 1 << 20, 1 << 40])
            case 1 | 2:  # any view of the storage
                sizes, strides = view(rng, room)
                found[OFFSET][row] = max(0, room - reach(sizes, strides)) if rng.random() < 0.3 else 0
            case 3:  # to the very end, or one further
                found[OFFSET][row] = max(0, room - reach(sizes, strides)) + rng.choice([0, 0, 1])
            case 4:  # into another's storage
                found[STORAGE][row] = rng.randrange(len(found[STORAGE_NBYTES]))
            case 5:
                found[DTYPE][row] = rng.randrange(len(wire[DTYPES_AT]))
            case 6:
                found[FLAGS][row] = rng.randrange(64)
            case 7 if len(sizes) > 1:  # transposed
                order = rng.sample(range(len(sizes)), len(sizes))
                strides = [strides[d] for d in order]
                if rng.random() < 0.5:
                    sizes = [sizes[d] for d in order]
            case _:  # a storage of another size, a view with it
                number = found[STORAGE][row]
                found[STORAGE_NBYTES][number] = rng.choice([0, 1, 100, 4096, CAP, CAP + 1, 1 << 40, (1 << 63) - 1])
                if rng.random() < 0.7:
                    sizes, strides = view(rng, min(found[STORAGE_NBYTES][number] // item, 1 << 16))
        found[NDIM][row] = len(sizes)
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
        return forge_tensors(rng, wire)
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
        return forge_tensors(rng, wire)
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
            new = [*old[:2], mutate_plain(rng, old[2], paths_of(old[2])), old[3]]
    return put(wire, (DETAILS, i), new)  # type: ignore[no-any-return]


def forge_tree(rng: random.Random, wire: list[Any]) -> list[Any]:
    """Another tree: containers of other classes, other keys, other extras, over the same leaves."""
    paths = [p for p in paths_of(wire[TREE]) if isinstance(n := get(wire[TREE], p), list) and len(n) == 4]
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
    ground, honest = Ground.get(), lease().describe(member.offered.described.addresses)
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

    agreed = [link(), link(), rng.choice([0.01, 0.5, 1.0, *FLOATS])]
    return agreed if rng.random() < 0.5 else [*agreed, rng.random() < 0.1, forge_lanes(rng)]


def forge_lanes(rng: random.Random) -> Any:
    """Lanes of any numbers, at any place."""
    if rng.random() < 0.3:
        return None

    def number() -> int:
        return rng.randrange(1, 5) if rng.random() < 0.7 else rng.choice([0, -1, (1 << 62) - 1, 1 << 62, *INTS])

    new = [number() for _ in range(rng.choice([0, 1, 2, 15, 16]))]
    known = [number() for _ in range(rng.randrange(3))]
    return [known, new, rng.choice([0, 1, 5, -1, 1 << 62]), forge_place(rng)]


def forge_place(rng: random.Random) -> Any:
    """A place that may be none. Nobody listens there."""
    if rng.random() < 0.3:
        return None
    address = rng.choice(["127.0.0.1:1", "[::1]:1", "127.0.0.1:0", "127.0.0.1", "localhost:1", "", "x", "1" * 129])
    return [address, rng.randbytes(rng.choice([32, 32, 32, 0, 31, 33]))]


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
                [forge_column, forge_tensors, forge_alias, forge_detail, forge_tree], [10, 30, 10, 15, 12]
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
    """Other coordinates in the meshes, or other meshes."""

    def coordinate() -> Any:
        return rng.choice([None, [], [0], [1], [0, 0], [rng.choice(INTS)], [rng.choice(INTS), 0], [0] * 20])

    with contextlib.suppress(LookupError, TypeError):
        if rng.random() < 0.7:
            return put(plain, (COORDINATES,), [coordinate() for _ in range(rng.randrange(4))])
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
        return messages.encode(
            msgspec.structs.replace(offer, digest=wire.digest(), likeness=likeness, structure=wire.structure())
        )
    except Exception:
        return body
