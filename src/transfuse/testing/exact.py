"""Is a received state equal to the one that was sent? The oracle, which shares no code with what it judges.

:func:`differences` walks both trees side by side and returns one line for each difference. Silence is a claim: anything
that the oracle cannot compare counts as a difference. It does not compare devices, Python attributes set on plain
tensors, the identity of leaf objects, and the memory layout of numpy arrays.
"""

from __future__ import annotations

import collections
import dataclasses
import datetime
import decimal
import enum
import fractions
import pathlib
import struct
import sys
import types
import uuid
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils import _pytree
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

__all__ = ["assert_exact", "differences"]


def assert_exact(expected: object, got: object, *, in_place: bool = False) -> None:
    """Raise AssertionError with all :func:`differences`, if there are any."""
    __tracebackhide__ = True
    if lines := differences(expected, got, in_place=in_place):
        raise AssertionError("\n".join((f"{len(lines)} difference(s) between the state expected and got:", *lines)))


def differences(expected: object, got: object, *, in_place: bool = False) -> list[str]:
    """One line for each way in which `got` is not exactly `expected`: path, expected, got.

    With `in_place`, `got` lives in the receiver's own tensors. Their memory (strides, offsets, aliases, conj and neg
    bits, mesh) and their role in autograd (requires_grad, Parameter, Buffer) are the receiver's business: only tree,
    dtype, shape and logical values are compared.
    """
    with torch.no_grad():
        return _Comparison(in_place).run(expected, got)


class _Pair(NamedTuple):
    """One position in both trees."""

    path: str
    expected: Any
    got: Any
    # False for the inner tensors of a tensor, whose own requires_grad depends on how the outer one was made.
    grad: bool = True


# Types whose repr says everything about a value, where == says less: datetimes in two zones, Decimal("1.0") and "1.00".
_BY_REPR = (
    datetime.date,
    datetime.time,
    datetime.timedelta,
    datetime.tzinfo,
    decimal.Decimal,
    fractions.Fraction,
    range,
    slice,
    pathlib.PurePath,
    uuid.UUID,
    torch.dtype,
    torch.device,
    torch.layout,
    torch.memory_format,
)

_FUNCTIONS = (types.FunctionType, types.BuiltinFunctionType, types.MethodType, type)
_ATOMS = (type(None), int, float, complex, str, bytes, bytearray, enum.Enum, np.generic, *_FUNCTIONS, *_BY_REPR)

_COMPRESSED: dict[torch.layout, tuple[str, str]] = {
    torch.sparse_csr: ("crow_indices", "col_indices"),
    torch.sparse_bsr: ("crow_indices", "col_indices"),
    torch.sparse_csc: ("ccol_indices", "row_indices"),
    torch.sparse_bsc: ("ccol_indices", "row_indices"),
}

_PLAIN = (Tensor, nn.Parameter, nn.Buffer)
# Attributes that give a tensor's role in its module. Compared separately, and not at all in place.
_ROLE = ("_is_param", "_is_buffer", "persistent")

_IEEE = (torch.half, torch.bfloat16, torch.float, torch.double, torch.complex32, torch.complex64, torch.complex128)
# Made of two bfloat16; torch 2.14 and later have it.
_IEEE += (torch.bcomplex32,) if hasattr(torch, "bcomplex32") else ()
_SIGN_BYTE = -1 if sys.byteorder == "little" else 0


class _Comparison:
    def __init__(self, in_place: bool) -> None:
        self.in_place = in_place
        self.lines: list[str] = []
        self.dense: list[_Pair] = []
        self.ragged: list[tuple[str, int, int]] = []
        # A stack instead of recursion: a state may be nested deeper than Python recurses.
        self.stack: list[_Pair] = []
        # Pairs of containers already visited, for trees with cycles. Holding the objects keeps ids from being reused.
        self.met: dict[tuple[int, int], _Pair] = {}

    def run(self, expected: object, got: object) -> list[str]:
        self.stack.append(_Pair("", expected, got))
        while self.stack:
            pair = self.stack.pop()
            children: list[_Pair] = []
            try:
                children.extend(self.compare(pair))
            except Exception as error:
                self.say(pair.path, f"cannot be compared: {type(error).__name__}: {_short(str(error))}")
            self.stack.extend(reversed(children))
        if not self.in_place:
            self.compare_aliases()
        return self.lines

    def say(self, path: str, what: str) -> None:
        self.lines.append(f"{path or '(root)'}: {what}")

    def differ(self, path: str, what: str, expected: object, got: object) -> None:
        self.say(path, f"{what}: expected {_show(expected)}, got {_show(got)}")

    def check(self, path: str, what: str, expected: object, got: object) -> bool:
        if _key(expected) != _key(got):
            self.differ(path, what, expected, got)
            return False
        return True

    # The tree

    def compare(self, pair: _Pair) -> Iterator[_Pair]:
        """Report the differences of this one node and yield its children."""
        path, a, b, grad = pair
        if isinstance(a, Tensor) and isinstance(b, Tensor):
            yield from self.compare_tensors(path, a, b, grad)
            return
        if type(a) is not type(b):
            self.say(path, f"type: expected {_type(a)} {_show(a)}, got {_type(b)} {_show(b)}")
            return
        if isinstance(a, _ATOMS):
            if _key(a) != _key(b):
                self.differ(path, "value", a, b)
            return
        ids = id(a), id(b)
        if ids in self.met:
            return
        self.met[ids] = pair
        if isinstance(a, dict):
            yield from self.mapping(path, a, b)
        elif isinstance(a, (list, tuple, collections.deque)):
            yield from self.sequence(path, a, b)
        elif isinstance(a, (set, frozenset)):
            self.sets(path, a, b)
        elif isinstance(a, np.ndarray):
            yield from self.arrays(path, a, b)
        elif dataclasses.is_dataclass(a):
            yield from self.attributes(path, _fields(a), _fields(b))
        elif (node := _pytree.SUPPORTED_NODES.get(type(a))) is not None:
            yield from self.pytree_node(path, a, b, node)
        else:
            yield from self.objects(path, a, b)
        # OrderedDict._metadata of a state_dict, and any other attributes that a container carries beside its items.
        if isinstance(a, (dict, list, tuple, collections.deque, set, frozenset, np.ndarray)):
            yield from self.attributes(path, _vars(a), _vars(b))

    def mapping(self, path: str, a: dict[Any, Any], b: dict[Any, Any]) -> Iterator[_Pair]:
        if isinstance(a, collections.defaultdict) and isinstance(b, collections.defaultdict):
            self.check(path, "default_factory", a.default_factory, b.default_factory)
        yield from self.keyed(path, "key", a, b, lambda key: f"[{key!r}]")

    def attributes(self, path: str, a: Mapping[str, Any], b: Mapping[str, Any]) -> Iterator[_Pair]:
        # The order in which attributes were set means nothing.
        a, b = dict(sorted(a.items())), dict(sorted(b.items()))
        yield from self.keyed(path, "attribute", a, b, lambda key: f".{key}")

    def keyed(
        self, path: str, noun: str, a: Mapping[Any, Any], b: Mapping[Any, Any], step: Callable[[Any], str]
    ) -> Iterator[_Pair]:
        ours, theirs = {_key(k): k for k in a}, {_key(k): k for k in b}
        for exact, key in ours.items():
            if exact not in theirs:
                self.say(path + step(key), f"{noun} missing: expected {_show(a[key])}, got nothing")
        for exact, key in theirs.items():
            if exact not in ours:
                self.say(path + step(key), f"{noun} unexpected: expected nothing, got {_show(b[key])}")
        common = [exact for exact in ours if exact in theirs]
        if common != [exact for exact in theirs if exact in ours]:
            self.differ(path, f"{noun} order", list(a), list(b))
        for exact in common:
            yield _Pair(path + step(ours[exact]), a[ours[exact]], b[theirs[exact]])

    def sequence(self, path: str, a: Sequence[Any], b: Sequence[Any]) -> Iterator[_Pair]:
        self.check(path, "length", len(a), len(b))
        if isinstance(a, collections.deque) and isinstance(b, collections.deque):
            self.check(path, "maxlen", a.maxlen, b.maxlen)
        names = getattr(a, "_fields", None) if isinstance(a, tuple) else None
        for index, (x, y) in enumerate(zip(a, b, strict=False)):
            yield _Pair(path + (f".{names[index]}" if names else f"[{index}]"), x, y)

    def sets(self, path: str, a: AbstractSet[Any], b: AbstractSet[Any]) -> None:
        ours, theirs = {_key(x): x for x in a}, {_key(x): x for x in b}
        for exact, x in ours.items():
            if exact not in theirs:
                self.say(path, f"element missing: expected {_show(x)}, got nothing")
        for exact, x in theirs.items():
            if exact not in ours:
                self.say(path, f"element unexpected: expected nothing, got {_show(x)}")

    def arrays(self, path: str, a: np.ndarray[Any, Any], b: np.ndarray[Any, Any]) -> Iterator[_Pair]:
        # str() as well, because dtypes that differ in their metadata or byte order may still be ==.
        same = self.check(path, "dtype", (a.dtype.str, str(a.dtype)), (b.dtype.str, str(b.dtype)))
        if not (self.check(path, "shape", a.shape, b.shape) and same):
            return
        if a.dtype.hasobject:
            for index in np.ndindex(a.shape):
                yield _Pair(path + str(list(index)), a[index], b[index])
        elif a.tobytes() != b.tobytes():
            x, y = (np.frombuffer(t.tobytes(), np.uint8).reshape(a.size, -1) for t in (a, b))
            first = int(np.flatnonzero((x != y).any(1))[0])
            where = _index(np.unravel_index(first, a.shape))
            ours, theirs = (t[first].tobytes().hex() for t in (x, y))
            self.say(path, f"values, first at {where}: expected 0x{ours}, got 0x{theirs}")

    def pytree_node(self, path: str, a: Any, b: Any, node: _pytree.NodeDef) -> Iterator[_Pair]:
        (ours, our_context), (theirs, their_context) = node.flatten_fn(a), node.flatten_fn(b)
        self.check(path, "number of children", len(ours), len(theirs))
        yield _Pair(path + ".<context>", our_context, their_context)
        for index, (x, y) in enumerate(zip(ours, theirs, strict=False)):
            yield _Pair(f"{path}[{index}]", x, y)

    def objects(self, path: str, a: object, b: object) -> Iterator[_Pair]:
        if type(a).__eq__ is object.__eq__:
            ours, theirs = _vars(a), _vars(b)
            if ours or theirs:
                yield from self.attributes(path, ours, theirs)
            elif a is not b:
                self.say(path, f"cannot be compared: {_type(a)} has neither == nor attributes")
        elif not bool(a == b):
            self.differ(path, "value", a, b)

    # Tensors

    def compare_tensors(self, path: str, a: Tensor, b: Tensor, grad: bool) -> Iterator[_Pair]:
        ours, theirs = type(a), type(b)
        if self.in_place:
            ours, theirs = (Tensor if t in _PLAIN else t for t in (ours, theirs))
        if ours is not theirs:
            self.say(path, f"type: expected {_name(ours)}, got {_name(theirs)}")
            if ours not in _PLAIN or theirs not in _PLAIN:
                return
        # Before any attribute is read, because reading one of a ShardedTensor warns.
        if _is("torch.distributed._shard.sharded_tensor", "ShardedTensor", a):
            yield from self.sharded(path, a, b)
            return
        if not self.in_place:
            if ours is theirs:
                self.check(path, "is a Parameter", isinstance(a, nn.Parameter), isinstance(b, nn.Parameter))
            if self.check(path, "is a Buffer", isinstance(a, nn.Buffer), isinstance(b, nn.Buffer)):
                self.check(path, "persistent", getattr(a, "persistent", None), getattr(b, "persistent", None))
            if grad:
                self.check(path, "requires_grad", a.requires_grad, b.requires_grad)
        same = self.check(path, "dtype", a.dtype, b.dtype)
        same &= self.check(path, "layout", a.layout, b.layout)
        same &= self.check(path, "is_nested", a.is_nested, b.is_nested)
        same &= self.check(path, "dimensions", a.dim(), b.dim())
        if not same:
            return
        if a.layout is torch.jagged:
            yield from self.jagged(path, a, b)
            return
        if a.is_nested:
            yield from self.strided_nested(path, a, b)
            return
        same &= self.check(path, "shape", tuple(a.shape), tuple(b.shape))
        if _is("torch.distributed.tensor", "DTensor", a):
            yield from self.dtensor(path, a, b)
        elif a.layout is torch.sparse_coo:
            yield from self.coo(path, a, b)
        elif a.layout in _COMPRESSED:
            for name in (*_COMPRESSED[a.layout], "values"):
                yield _Pair(f"{path}.{name}", getattr(a, name)(), getattr(b, name)(), False)
        elif a.layout is not torch.strided:
            self.say(path, f"cannot be compared: layout {a.layout}")
        elif is_traceable_wrapper_subclass(a):
            yield from self.wrapper(path, a, b)
        else:
            self.strided(path, a, b, same)
            if ours not in _PLAIN:
                own = ({k: v for k, v in _vars(t).items() if k not in _ROLE} for t in (a, b))
                yield from self.attributes(path, *own)

    def strided(self, path: str, a: Tensor, b: Tensor, same_shape: bool) -> None:
        self.check(path, "names", getattr(a, "names", None), getattr(b, "names", None))
        if not self.in_place:
            self.check(path, "is_conj", a.is_conj(), b.is_conj())
            self.check(path, "is_neg", a.is_neg(), b.is_neg())
            self.check(path, "stride", a.stride(), b.stride())
        if a.is_quantized:
            self.check(path, "quantizer", _quantizer(a), _quantizer(b))
        self.dense.append(_Pair(path, a, b))
        if self.check(path, "is_meta", a.is_meta, b.is_meta) and same_shape and not a.is_meta:
            self.values(path, a, b)

    def values(self, path: str, a: Tensor, b: Tensor) -> None:
        if (a.is_conj(), a.is_neg()) == (b.is_conj(), b.is_neg()):
            x, y = _raw(a), _raw(b)
        else:
            x, y = _logical(a), _logical(b)
        x, y = x.to(y.device) if x.device != y.device else x, y
        if torch.equal(x, y):
            return
        unequal = (x != y).any(-1)
        first = unequal.nonzero()[0].tolist()
        where = _index(first)
        ours, theirs = (bytes(t[tuple(first)].tolist()).hex() for t in (x, y))
        count = f"{int(unequal.sum())} of {unequal.numel()} elements"
        self.say(path, f"values, {count}, first at {where}: expected 0x{ours}, got 0x{theirs}")

    def coo(self, path: str, a: Tensor, b: Tensor) -> Iterator[_Pair]:
        self.check(path, "sparse_dim", a.sparse_dim(), b.sparse_dim())
        self.check(path, "is_coalesced", a.is_coalesced(), b.is_coalesced())
        yield _Pair(path + ".indices", a._indices(), b._indices(), False)
        yield _Pair(path + ".values", a._values(), b._values(), False)

    def jagged(self, path: str, a: Any, b: Any) -> Iterator[_Pair]:
        if not self.check(path, "ragged dimension", a._ragged_idx, b._ragged_idx):
            return
        ragged = a._ragged_idx
        # The ragged size is a symbol of this process; the others are plain numbers.
        sizes = ([size for dim, size in enumerate(t.shape) if dim != ragged] for t in (a, b))
        self.check(path, "sizes beside the ragged one", *map(tuple, sizes))
        # Two jagged tensors can be added only if their ragged sizes are the same symbol.
        self.ragged.append((path, *(t.shape[ragged].node.nested_int() for t in (a, b))))
        yield _Pair(path + ".values", a._values, b._values, False)
        yield _Pair(path + ".offsets", a._offsets, b._offsets, False)
        yield _Pair(path + ".lengths", a._lengths, b._lengths, False)

    def strided_nested(self, path: str, a: Any, b: Any) -> Iterator[_Pair]:
        self.check(path, "sizes", a._nested_tensor_size().tolist(), b._nested_tensor_size().tolist())
        for index, (x, y) in enumerate(zip(a.unbind(), b.unbind(), strict=False)):
            yield _Pair(f"{path}[{index}]", x, y, False)

    def dtensor(self, path: str, a: Any, b: Any) -> Iterator[_Pair]:
        self.check(path, "placements", a.placements, b.placements)
        if not self.in_place:
            self.check(path, "global stride", a.stride(), b.stride())
            self.check(path, "mesh shape", tuple(a.device_mesh.shape), tuple(b.device_mesh.shape))
        yield _Pair(path + "._local_tensor", a._local_tensor, b._local_tensor, False)

    def sharded(self, path: str, a: Any, b: Any) -> Iterator[_Pair]:
        ours, theirs = a.metadata(), b.metadata()
        self.check(path, "shape", tuple(ours.size), tuple(theirs.size))
        self.check(path, "dtype", ours.tensor_properties.dtype, theirs.tensor_properties.dtype)
        if not self.in_place:
            grads = (t.tensor_properties.requires_grad for t in (ours, theirs))
            self.check(path, "requires_grad", *grads)
        ours, theirs = a.local_shards(), b.local_shards()
        self.check(path, "number of local shards", len(ours), len(theirs))
        for index, (x, y) in enumerate(zip(ours, theirs, strict=False)):
            step = f"{path}.local_shards()[{index}]"
            self.check(step, "offsets", tuple(x.metadata.shard_offsets), tuple(y.metadata.shard_offsets))
            self.check(step, "sizes", tuple(x.metadata.shard_sizes), tuple(y.metadata.shard_sizes))
            yield _Pair(step + ".tensor", x.tensor, y.tensor)

    def wrapper(self, path: str, a: Any, b: Any) -> Iterator[_Pair]:
        if not self.in_place:
            self.check(path, "stride", a.stride(), b.stride())
            self.check(path, "storage_offset", a.storage_offset(), b.storage_offset())
        (ours, our_context), (theirs, their_context) = a.__tensor_flatten__(), b.__tensor_flatten__()
        if not self.check(path, "inner tensors", list(ours), list(theirs)):
            return
        yield _Pair(path + ".<context>", our_context, their_context)
        for name in ours:
            yield _Pair(f"{path}.{name}", getattr(a, name), getattr(b, name))

    # Who shares memory with whom

    def compare_aliases(self) -> None:
        ours = [_storage(d.expected) for d in self.dense]
        theirs = [_storage(d.got) for d in self.dense]
        self.compare_partition("storage", [d.path for d in self.dense], ours, theirs)
        our_windows, their_windows = _windows([d.expected for d in self.dense]), _windows([d.got for d in self.dense])
        for d in self.dense:
            # A tensor without elements shows no bytes, so it has no position within the window to compare.
            if d.expected.numel() and d.got.numel():
                ours_at = _start(d.expected) - our_windows[_storage(d.expected)]
                theirs_at = _start(d.got) - their_windows[_storage(d.got)]
                self.check(d.path, "bytes from the start of what its storage's leaves show", ours_at, theirs_at)
        paths = [path for path, _, _ in self.ragged]
        self.compare_partition("ragged size", paths, [a for _, a, _ in self.ragged], [b for _, _, b in self.ragged])

    def compare_partition(self, noun: str, paths: list[str], ours: list[int], theirs: list[int]) -> None:
        """Two partitions are equal if and only if every member's set begins with the same member in both."""
        first_of_ours, first_of_theirs = ({x: i for i, x in reversed(list(enumerate(ids)))} for ids in (ours, theirs))
        for i, path in enumerate(paths):
            a, b = first_of_ours[ours[i]], first_of_theirs[theirs[i]]
            if a != b:
                shares = ("of its own" if j == i else f"shared with {paths[j] or '(root)'}" for j in (a, b))
                self.say(path, "{}: expected {}, got {}".format(noun, *shares))


def _windows(tensors: Sequence[Tensor]) -> dict[int, int]:
    """For each storage, the first byte that any of these tensors shows. Strides are never negative."""
    starts: dict[int, int] = {}
    for t in tensors:
        if t.numel():
            starts[_storage(t)] = min(_start(t), starts.get(_storage(t), _start(t)))
    return starts


def _storage(t: Tensor) -> int:
    return int(t.untyped_storage()._cdata)


def _start(t: Tensor) -> int:
    return int(t.storage_offset() * t.element_size())


def _index(index: Iterable[Any]) -> str:
    return "".join(f"[{int(i)}]" for i in index) or "its one element"


def _raw(t: Tensor) -> Tensor:
    """The bytes of each element as they lie in memory, as one more dimension. Uses no kernel of the dtype."""
    size, storage = t.element_size(), t.untyped_storage()
    last = sum((n - 1) * s for n, s in zip(t.shape, t.stride(), strict=True))
    end = _start(t) + (last + 1) * size if t.numel() else 0
    # Otherwise set_ would enlarge the storage, which belongs to the state.
    if storage.nbytes() < end or (end and not storage.data_ptr()):
        raise ValueError(f"its storage holds {storage.nbytes()} bytes where its elements need {end}")
    raw = torch.empty(0, dtype=torch.uint8, device=t.device)
    return raw.set_(storage, _start(t) if end else 0, (*t.shape, size), (*(s * size for s in t.stride()), 1))


def _logical(t: Tensor) -> Tensor:
    """The bytes of each element with conj and neg applied: for IEEE numbers, NaNs included, sign bits flipped."""
    if t.is_neg() and t.dtype not in _IEEE:
        t = t.resolve_neg()
    raw = _raw(t).clone(memory_format=torch.contiguous_format)
    count = 2 if t.is_complex() else 1
    parts = raw.view(*t.shape, count, t.element_size() // count)
    if t.is_neg():
        parts[..., _SIGN_BYTE] ^= 0x80
    if t.is_conj():
        parts[..., 1, _SIGN_BYTE] ^= 0x80
    return raw


def _quantizer(t: Tensor) -> tuple[object, ...]:
    if t.qscheme() in (torch.per_tensor_affine, torch.per_tensor_symmetric):
        return str(t.qscheme()), t.q_scale(), t.q_zero_point()
    scales, zero_points = t.q_per_channel_scales(), t.q_per_channel_zero_points()
    return str(t.qscheme()), tuple(scales.tolist()), tuple(zero_points.tolist()), t.q_per_channel_axis()


def _is(module: str, name: str, value: object) -> bool:
    """isinstance without importing the class: if an instance exists, its class has been imported."""
    return module in sys.modules and isinstance(value, getattr(sys.modules[module], name))


def _key(value: object) -> Hashable:
    """A key that two plain values share only if they are exactly equal: 1, True, 1.0 and np.float64(1) all differ."""
    exact: Hashable
    if isinstance(value, enum.Enum):
        exact = value.name if value.name is not None else value.value
    elif isinstance(value, np.generic):
        exact = value.dtype.str, str(value.dtype), value.tobytes()
    elif isinstance(value, float):
        exact = struct.pack("<d", value)
    elif isinstance(value, complex):
        exact = struct.pack("<dd", value.real, value.imag)
    elif isinstance(value, bytearray):
        exact = bytes(value)
    elif isinstance(value, (tuple, list)):
        exact = tuple(map(_key, value))
    elif isinstance(value, frozenset):
        exact = frozenset(map(_key, value))
    elif isinstance(value, _BY_REPR):
        exact = repr(value)
    elif isinstance(value, Hashable):
        exact = value
    else:
        raise TypeError(f"{_type(value)} has no exact key")
    return type(value), exact


def _fields(value: Any) -> dict[str, Any]:
    return _vars(value) | {f.name: getattr(value, f.name) for f in dataclasses.fields(value) if hasattr(value, f.name)}


def _vars(value: object) -> dict[str, Any]:
    names = [name for cls in type(value).__mro__ for name in _slots(cls)]
    return {name: getattr(value, name) for name in names if hasattr(value, name)} | getattr(value, "__dict__", {})


def _slots(cls: type) -> list[str]:
    slots = cls.__dict__.get("__slots__", ())
    names = [slots] if isinstance(slots, str) else slots
    return [name for name in names if name not in ("__dict__", "__weakref__")]


def _name(cls: type) -> str:
    return cls.__qualname__ if cls.__module__ == "builtins" else f"{cls.__module__}.{cls.__qualname__}"


def _type(value: object) -> str:
    return _name(type(value))


def _show(value: object) -> str:
    # A tensor's repr needs kernels that some dtypes lack.
    if isinstance(value, Tensor):
        return f"<{_type(value)}>"
    try:
        return _short(repr(value))
    except Exception:
        return f"<{_type(value)} without a repr>"


def _short(text: str) -> str:
    text = " ".join(text.split("\n"))
    return text if len(text) <= 120 else f"{text[:100]}… ({len(text)} characters)"
