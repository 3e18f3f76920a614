"""Plain Python values in terms that msgpack can carry, and back with type and value exact.

``None``, ``bool``, ``float``, ``bytes`` and nearly all ``int`` and ``str`` stay as they are. Every other value becomes
``[tag, *parts]``, where each part is encoded like a value. One table, ``_CODECS``, says for each type how to take a
value apart and how to build it again. Encoding and decoding both use this table. (A ``transfuse.Step`` goes as the int
that it is.)

:func:`decode` reads what a peer sent. It looks names up in tables of names that exist in this process, imports nothing,
calls no constructor outside the standard library, numpy and torch, and allocates in proportion to its input.
"""

from __future__ import annotations

import collections
import dataclasses
import datetime
import decimal
import enum
import fractions
import functools
import itertools
import os
import pathlib
import re
import uuid
import zoneinfo
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import msgspec
import numpy as np
import torch

from transfuse._report import Step
from transfuse._state import class_names

#: How deep containers may be nested. The limit is fixed, so that the source refuses a deeper value and the receiver's
#: free stack does not matter.
MAX_DEPTH = 100

#: The most bits of a Fraction's numerator or denominator. Reducing a Fraction costs the square of its size, and a peer
#: chooses the size.
MAX_FRACTION_BITS = 1 << 16

T = TypeVar("T")


class Unencodable(TypeError):
    """A value cannot be carried exactly. The message names its type and the remedy."""


@dataclasses.dataclass(frozen=True, slots=True)
class _ValueCodec:
    """How to carry one type, or each type that a predicate accepts."""

    tag: int  # stands for the type on the wire: never reuse a tag
    kind: type | Callable[[type], bool]
    split: Callable[[Any], Iterable[object]]  # raises ValueError for a single value that cannot be carried
    join: Callable[..., object]  # takes the parts; any exception becomes a ValueError
    # The exact types allowed for each part; `object` allows any type. None allows any number of parts of any type.
    shape: tuple[type | tuple[type, ...], ...] | None = None

    def check(self, parts: list[object]) -> None:
        if self.shape is None:
            return
        if len(parts) != len(self.shape):
            raise ValueError(f"{len(parts)} parts, expected {len(self.shape)}")
        for part, allowed in zip(parts, self.shape, strict=True):
            kinds = allowed if isinstance(allowed, tuple) else (allowed,)
            if allowed is not object and type(part) not in kinds:
                wanted = " or ".join(kind.__name__ for kind in kinds)
                raise ValueError(f"a part of type {type(part).__name__}, expected {wanted}")


def encode(value: object) -> object:
    """The value in terms of None, bool, int, float, str, bytes and lists of these; or raise :class:`Unencodable`."""
    try:
        return _encode(value, 0)
    except RecursionError:
        raise Unencodable(f"{_shown(type(value))} is nested too deeply for the rest of this thread's stack") from None


def decode(plain: object) -> object:
    """Inverse of :func:`encode`; ``ValueError`` for malformed data, and for names that this process does not know."""
    try:
        return _decode(plain, 0)
    except (ValueError, MemoryError):
        raise
    except Exception as e:
        raise ValueError(f"malformed value: {type(e).__name__}: {str(e)[:200]}") from e


def dtype_name(dtype: torch.dtype) -> str:
    """``"float32"`` for ``torch.float32``, the same for all aliases."""
    return _name_in(_DTYPES, dtype)


def dtype_named(name: str) -> torch.dtype:
    """Inverse of :func:`dtype_name`; ``ValueError`` for a dtype that this torch does not have."""
    return _named_in(_DTYPES, name)


def _encode(value: object, depth: int) -> object:
    kind = type(value)
    if value is None or kind is bool or kind is float or kind is bytes:
        return value
    if type(value) is int and -(1 << 63) <= value < 1 << 64:
        return value
    if type(value) is str and _is_utf8(value):
        return value
    if isinstance(value, Step):
        return _encode(int(value), depth)
    codec = _BY_TYPE.get(kind) or next((c for covers, c in _FAMILIES if covers(kind)), None)
    if codec is None:
        raise Unencodable(f"{_shown(kind)} cannot be carried: {_remedy(kind)}")
    if depth == MAX_DEPTH:
        raise Unencodable(f"{_shown(kind)} is nested more than {MAX_DEPTH} deep, or within itself: flatten it")
    try:
        parts = list(codec.split(value))
        codec.check(parts)
    except (ValueError, TypeError, AttributeError) as e:
        raise Unencodable(f"this {_shown(kind)} cannot be carried: {e}") from None
    return [codec.tag, *[_encode(part, depth + 1) for part in parts]]


def _decode(plain: object, depth: int) -> object:
    if plain is None or type(plain) in (bool, int, float, str, bytes):
        return plain
    if type(plain) is not list or not plain:
        raise ValueError(f"malformed value: {type(plain).__name__}, expected a tagged list")
    if depth == MAX_DEPTH:
        raise ValueError(f"malformed value: nested more than {MAX_DEPTH} deep")
    codec = _BY_TAG.get(plain[0]) if type(plain[0]) is int else None
    if codec is None:
        raise ValueError("malformed value: a list without a known tag")
    if codec.shape is not None and len(codec.shape) != len(plain) - 1:
        raise ValueError(f"malformed value: {len(plain) - 1} parts after tag {codec.tag}, expected {len(codec.shape)}")
    parts = [_decode(part, depth + 1) for part in itertools.islice(plain, 1, None)]
    codec.check(parts)
    return codec.join(*parts)


def _shown(kind: type) -> str:
    return kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"


def _remedy(kind: type) -> str:
    if dataclasses.is_dataclass(kind) or _is_named_tuple(kind):
        return "allow its class with torch.serialization.add_safe_globals on both ends, or convert it to a dict"
    base = next((c for c in kind.__mro__ if c in _BY_TYPE or c in (bool, float, bytes)), None)
    return f"convert it to {base.__name__}" if base else "replace it with plain data or leave it out"


def _is_utf8(text: str) -> bool:
    if text.isascii():
        return True
    try:
        text.encode()
    except UnicodeEncodeError:  # lone surrogates, for example in a file name that is not UTF-8
        return False
    return True


# Tables of torch's named constants. The name is that of `str()`, so that aliases have one name.


def _constants(kind: type[T]) -> dict[str, T]:
    return {str(c).removeprefix("torch."): c for c in vars(torch).values() if type(c) is kind}


def _name_in(table: dict[str, T], constant: T) -> str:
    name = str(constant).removeprefix("torch.")
    if table.get(name) is not constant:
        raise ValueError(f"{constant} is not a constant of torch")
    return name


def _named_in(table: dict[str, T], name: str) -> T:
    if type(name) is not str or name not in table:
        raise ValueError(
            f"torch {torch.__version__} has no {str(name)[:50]!a}; use a newer torch here, or convert it at the source"
        )
    return table[name]


_DTYPES = _constants(torch.dtype)


def _constant_codec(tag: int, kind: type[T]) -> _ValueCodec:
    table = _constants(kind)
    return _ValueCodec(tag, kind, lambda c: (_name_in(table, c),), lambda name: _named_in(table, name), (str,))


# Containers.


def _in_one_order(members: set[Any] | frozenset[Any]) -> list[Any]:
    """Members in an order that does not depend on how the set was filled, nor on this process's hashes.

    Whether two ranks hold the same value is decided by its bytes.
    """
    kinds = set(map(type, members))
    if kinds <= {int} or kinds <= {str} or kinds <= {bytes}:
        return sorted(members)
    return sorted(members, key=lambda member: msgspec.msgpack.encode(encode(member)))


def _unique(kind: Callable[[Iterable[object]], Any], *members: object) -> object:
    made = kind(members)
    if len(made) != len(members):
        raise ValueError("a member occurs twice")
    return made


def _join_dict(kind: Callable[[Iterable[tuple[object, object]]], Any], *parts: object) -> object:
    if len(parts) % 2:
        raise ValueError("a key without a value")
    made = kind(zip(parts[::2], parts[1::2], strict=True))
    if len(made) != len(parts) // 2:
        raise ValueError("a key occurs twice")
    return made


def _dict_codec(tag: int, kind: type) -> _ValueCodec:
    return _ValueCodec(
        tag, kind, lambda d: itertools.chain.from_iterable(d.items()), functools.partial(_join_dict, kind), None
    )


# Standard library.


def _split_timezone(zone: Any) -> Iterable[object]:
    # The method that pickle calls: the only way to learn whether the name was given or derived from the offset.
    offset, *name = zone.__getinitargs__()
    return offset, name[0] if name else None


def _join_timezone(offset: datetime.timedelta, name: str | None) -> datetime.timezone:
    return datetime.timezone(offset) if name is None else datetime.timezone(offset, name)


@functools.cache
def _zones() -> frozenset[str]:
    return frozenset(zoneinfo.available_timezones())


def _zone_key(zone: zoneinfo.ZoneInfo) -> tuple[str]:
    if zone.key not in _zones():
        raise ValueError("its key is not among zoneinfo.available_timezones(); convert to UTC")
    return (zone.key,)


def _join_zone(key: str) -> zoneinfo.ZoneInfo:
    # ZoneInfo searches the file system and packages for its argument, so it gets no string that a peer made up.
    if key not in _zones():
        raise ValueError(f"unknown time zone {key[:50]!a}")
    return zoneinfo.ZoneInfo(key)


def _split_path(path: pathlib.PurePath) -> tuple[str]:
    if type(path)(str(path)).parts != path.parts:  # './c:x' on Windows
        raise ValueError("a path made from its text is another path; use a plain str")
    return (str(path),)


def _path_codec(tag: int, kind: type[pathlib.PurePath], here: type[pathlib.PurePath]) -> _ValueCodec:
    return _ValueCodec(tag, kind, _split_path, here, (str,))


def _split_fraction(value: fractions.Fraction) -> tuple[int, int]:
    if max(value.numerator.bit_length(), value.denominator.bit_length()) > MAX_FRACTION_BITS:
        raise ValueError(f"more than {MAX_FRACTION_BITS} bits; carry numerator and denominator as int")
    return value.numerator, value.denominator


def _join_fraction(numerator: int, denominator: int) -> fractions.Fraction:
    if max(numerator.bit_length(), denominator.bit_length()) > MAX_FRACTION_BITS:
        raise ValueError("fraction too large")
    value = fractions.Fraction(numerator, denominator)
    if value.denominator != denominator:
        raise ValueError("fraction not reduced")
    return value


def _join_decimal(text: str) -> decimal.Decimal:
    value = decimal.Decimal(text)
    # If the context does not trap InvalidOperation, bad text becomes NaN. The context also chooses between E and e.
    if str(value).lower() != text.lower():
        raise ValueError("not a decimal")
    return value


def _find(name: str) -> type:
    try:
        return class_names.find(name)
    except LookupError as e:
        raise ValueError(f"{e}; both ends must have imported the same classes") from None


# Enums.


def _is_enum(kind: type) -> bool:
    return issubclass(kind, enum.Enum)


def _enum_member(cls: type, key: str | int) -> enum.Enum:
    if not issubclass(cls, enum.Enum):
        raise ValueError("the class of an enum member is not an Enum")
    if type(key) is str:
        if key not in cls.__members__:
            raise ValueError(f"{_shown(cls)} has no member {key[:50]!a}")
        return cls.__members__[key]
    # A combination of flags is made by calling the class. That is done only if the call runs no code outside the enum
    # module, and only for bits that members have, because the class keeps every combination that was ever made.
    if (
        type(key) is int
        and issubclass(cls, enum.Flag)
        and type(cls).__call__ is enum.EnumMeta.__call__
        and cls._missing_.__func__ is enum.Flag._missing_.__func__  # type: ignore[attr-defined]
        and 0 <= key < 1 << max((m._value_.bit_length() for m in cls.__members__.values()), default=0)
    ):
        made: object = cls(key)
        if type(made) is cls and made._value_ == key:  # otherwise the class has ejected or dropped bits
            return made
    raise ValueError(f"not a member of {_shown(cls)}, nor a plain combination of its flags")


def _split_enum(member: enum.Enum) -> tuple[str, str | int]:
    cls, key = type(member), member._name_
    if cls.__members__.get(key) is not member:  # a combination of flags has no name, or a derived one
        key = member._value_
    if type(key) not in (str, int) or _enum_member(cls, key) is not member:
        raise ValueError("it is not among the members of its class; use one of the members")
    return class_names.name_of(cls), key


# Classes that the user, or a library that the user imported, has declared safe to load.


def _is_listed(cls: type) -> bool:
    # An entry is an object, or a pair of an object and the name to find it by. This is the first question about a class
    # that a peer has named, because further questions may run code of its metaclass.
    return any((e[0] if type(e) is tuple else e) is cls for e in torch.serialization.get_safe_globals())


def _is_safe_dataclass(cls: type) -> bool:
    # The fields must be its own, not those of a base. It must have no constructor but object's, since none is run.
    return _is_listed(cls) and "__dataclass_fields__" in vars(cls) and vars(object)["__new__"] is cls.__new__


def _is_named_tuple(cls: type) -> bool:
    return cls.__bases__ == (tuple,) and type(vars(cls).get("_fields")) is tuple


def _is_safe_named_tuple(cls: type) -> bool:
    return _is_listed(cls) and _is_named_tuple(cls)


def _field_names(cls: Any) -> set[str]:
    return {f.name for f in dataclasses.fields(cls)}


def _split_dataclass(value: Any) -> tuple[str, dict[str, object]]:
    cls, names = type(value), _field_names(type(value))
    state: Any = object.__getstate__(value)
    held = [d for d in (state if type(state) is tuple else (state,)) if d]  # __dict__ and slots; either may be missing
    if extra := sorted(set().union(*held) - names):
        raise ValueError(f"it has attributes that are not fields: {', '.join(map(str, extra))[:200]}; remove them")
    try:
        return class_names.name_of(cls), {name: getattr(value, name) for name in sorted(names)}
    except AttributeError as e:
        raise ValueError(f"a field is not set ({e}); set all fields") from None


def _join_dataclass(name: str, state: dict[str, object]) -> object:
    cls = _find(name)
    if not _is_safe_dataclass(cls) or _field_names(cls) != set(state):
        raise ValueError(f"{name} is not a dataclass of these fields that torch.serialization.add_safe_globals allows")
    value: object = object.__new__(cls)
    for field, content in state.items():
        object.__setattr__(value, field, content)
    return value


def _split_named_tuple(value: tuple[object, ...]) -> tuple[object, ...]:
    if getattr(value, "__dict__", None):
        raise ValueError("it has attributes besides its items; remove them")
    return class_names.name_of(type(value)), *tuple.__iter__(value)


def _join_named_tuple(name: str, *items: object) -> object:
    cls: Any = _find(name)
    if not _is_safe_named_tuple(cls) or len(cls._fields) != len(items):
        raise ValueError(f"{name} is not a named tuple of this length that torch.serialization.add_safe_globals allows")
    return tuple.__new__(cls, items)


# torch and numpy.


def _sizes(*sizes: object) -> torch.Size:
    if not all(type(n) is int and -(1 << 63) <= n < 1 << 63 for n in sizes):
        raise ValueError("its sizes must be int of at most 64 bits; convert them")
    return torch.Size(sizes)  # type: ignore[arg-type]


def _join_device(kind: str, index: int | None) -> torch.device:
    device = torch.device(kind) if index is None else torch.device(kind, index)
    if device.type != kind or device.index != index:  # torch would parse "cuda:1", and an index wraps at 8 bits
        raise ValueError("not a device")
    return device


# Allowed dtypes: numbers by kind and size or by letter (np.longlong has no other name of its own), raw bytes, times. No
# objects. No text either: from code points that do not exist numpy makes strings that crash Python.
_DTYPE = re.compile(
    r"[<>|](?:[hilqHILQefdgFDG]|[biufc]\d{1,2}|[SV]\d{1,9}|[mM]8(?:\[\d{0,9}[A-Za-z]{1,2}\])?)", re.ASCII
)


def _numpy_dtype(descr: object, size: int) -> np.dtype[Any]:
    """The dtype of this description. A description that is not simple, or not of this size, never reaches numpy."""
    flat: list[Any] = [("", descr)] if type(descr) is str else descr  # type: ignore[assignment]
    total = 0
    for field in flat:
        if not (type(field) is tuple and [type(x) for x in field] == [str, str] and _DTYPE.fullmatch(field[1])):
            raise ValueError("its dtype is not a number, raw bytes, a time or a flat structure of them; use a tensor")
        total += np.dtype(field[1]).itemsize
    if total != size:
        raise ValueError(f"{size} bytes of data for a dtype of {total} bytes")
    return np.lib.format.descr_to_dtype(descr)  # type: ignore[arg-type]


def _split_numpy(value: Any) -> tuple[object, bytes]:
    dtype, data = value.dtype, value.tobytes()
    descr = dtype.str if dtype.names is None else dtype.descr
    if type(descr) is str and np.dtype(descr).type is not type(value):
        descr = dtype.str[0] + dtype.char
    made = _numpy_dtype(descr, len(data))
    plain = all(d.metadata is None for d in (dtype, *(dtype[name] for name in dtype.names or ())))
    if made.type is not type(value) or made != dtype or made.isalignedstruct != dtype.isalignedstruct or not plain:
        raise ValueError("its dtype is not one of numpy's own; use a tensor")
    return descr, data


def _join_numpy(descr: object, data: bytes) -> object:
    dtype = _numpy_dtype(descr, len(data))
    # A structured scalar stays a view of this array. A bytearray makes its memory writable, like the source's.
    return np.ndarray((), dtype, bytearray(data))[()]


_NONE = type(None)
_ZONE = (_NONE, datetime.timezone, zoneinfo.ZoneInfo)
_POSIX = os.name == "posix"

_CODECS: tuple[_ValueCodec, ...] = (
    _ValueCodec(
        1,
        int,
        lambda n: (n.to_bytes(n.bit_length() // 8 + 1, "little", signed=True),),
        lambda data: int.from_bytes(data, "little", signed=True),
        (bytes,),
    ),
    _ValueCodec(
        2,
        str,
        lambda s: (s.encode("utf-8", "surrogatepass"),),
        lambda data: data.decode("utf-8", "surrogatepass"),
        (bytes,),
    ),
    _ValueCodec(3, complex, lambda c: (c.real, c.imag), complex, (float, float)),
    _ValueCodec(4, bytearray, lambda b: (bytes(b),), bytearray, (bytes,)),
    _ValueCodec(5, tuple, lambda t: t, lambda *parts: parts),
    _ValueCodec(6, list, lambda x: x, lambda *parts: list(parts)),
    _ValueCodec(7, set, _in_one_order, functools.partial(_unique, set)),
    _ValueCodec(8, frozenset, _in_one_order, functools.partial(_unique, frozenset)),
    _dict_codec(9, dict),
    _dict_codec(10, collections.OrderedDict),
    _ValueCodec(11, range, lambda r: (r.start, r.stop, r.step), range, (int, int, int)),
    _ValueCodec(12, slice, lambda s: (s.start, s.stop, s.step), slice, (object, object, object)),
    _ValueCodec(13, type(...), lambda _: (), lambda: ..., ()),
    _ValueCodec(20, datetime.date, lambda d: (d.year, d.month, d.day), datetime.date, (int, int, int)),
    _ValueCodec(
        21,
        datetime.time,
        lambda t: (t.hour, t.minute, t.second, t.microsecond, t.tzinfo, t.fold),
        lambda *parts: datetime.time(*parts[:-1], fold=parts[-1]),
        (int, int, int, int, _ZONE, int),
    ),
    _ValueCodec(
        22,
        datetime.datetime,
        lambda t: (t.year, t.month, t.day, t.hour, t.minute, t.second, t.microsecond, t.tzinfo, t.fold),
        lambda *parts: datetime.datetime(*parts[:-1], fold=parts[-1]),
        (int, int, int, int, int, int, int, _ZONE, int),
    ),
    _ValueCodec(
        23, datetime.timedelta, lambda d: (d.days, d.seconds, d.microseconds), datetime.timedelta, (int, int, int)
    ),
    _ValueCodec(24, datetime.timezone, _split_timezone, _join_timezone, (datetime.timedelta, (_NONE, str))),
    _ValueCodec(25, zoneinfo.ZoneInfo, _zone_key, _join_zone, (str,)),
    # A concrete path of the other operating system cannot be made here: it becomes a pure path.
    _path_codec(30, pathlib.PurePosixPath, pathlib.PurePosixPath),
    _path_codec(31, pathlib.PosixPath, pathlib.PosixPath if _POSIX else pathlib.PurePosixPath),
    _path_codec(32, pathlib.PureWindowsPath, pathlib.PureWindowsPath),
    _path_codec(33, pathlib.WindowsPath, pathlib.PureWindowsPath if _POSIX else pathlib.WindowsPath),
    _ValueCodec(
        34,
        uuid.UUID,
        lambda u: (u.bytes, u.is_safe.value),
        lambda data, safe: uuid.UUID(bytes=data, is_safe=uuid.SafeUUID(safe)),
        (bytes, (int, _NONE)),
    ),
    _ValueCodec(35, decimal.Decimal, lambda d: (str(d),), _join_decimal, (str,)),
    _ValueCodec(36, fractions.Fraction, _split_fraction, _join_fraction, (int, int)),
    _constant_codec(40, torch.dtype),
    _constant_codec(41, torch.layout),
    _constant_codec(42, torch.memory_format),
    _ValueCodec(43, torch.device, lambda d: (d.type, d.index), _join_device, (str, (int, _NONE))),
    _ValueCodec(44, torch.Size, lambda s: _sizes(*s), _sizes),
    # numpy's str_ and bytes_ travel by content: as arrays they would lose trailing zeros.
    _ValueCodec(50, np.str_, lambda s: (str.__str__(s),), np.str_, (str,)),
    _ValueCodec(51, np.bytes_, lambda b: (bytes(b),), np.bytes_, (bytes,)),
    _ValueCodec(52, lambda kind: issubclass(kind, np.generic), _split_numpy, _join_numpy, ((str, list), bytes)),
    _ValueCodec(60, _is_enum, _split_enum, lambda name, key: _enum_member(_find(name), key), (str, (str, int))),
    _ValueCodec(61, _is_safe_dataclass, _split_dataclass, _join_dataclass, (str, dict)),
    _ValueCodec(62, _is_safe_named_tuple, _split_named_tuple, _join_named_tuple),
)

_BY_TAG = {codec.tag: codec for codec in _CODECS}
_BY_TYPE = {codec.kind: codec for codec in _CODECS if isinstance(codec.kind, type)}
_FAMILIES = [(codec.kind, codec) for codec in _CODECS if not isinstance(codec.kind, type)]
