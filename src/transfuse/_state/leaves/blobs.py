"""Blobs, leaves that travel as bytes: numpy arrays, long ``bytes`` and ``str``, and Python objects by opt-in."""

from __future__ import annotations

import ctypes
import io
import math
import pickle
import re
from typing import Any, Literal

import msgspec
import numpy as np
import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from transfuse._state.leaves import pickles
from transfuse._state.leaves.codec import BuildContext, CannotCarry, Opened, Shared

#: The most names in one error message.
MAX_NAMED = 5


def _over_bytes(data: bytes | bytearray) -> torch.Tensor:
    """A uint8 tensor over the bytes themselves, without a copy. They are only read.

    For ``bytes``, ``torch.frombuffer`` would warn that the tensor could be written, so it gets a window on the address.
    """
    if not data:
        return torch.empty(0, dtype=torch.uint8, device="cpu")
    if isinstance(data, bytearray):
        return torch.frombuffer(data, dtype=torch.uint8)
    address = ctypes.cast(ctypes.c_char_p(data), ctypes.c_void_p).value
    assert address is not None
    window = (ctypes.c_ubyte * len(data)).from_address(address)
    window._keeps_alive = data  # type: ignore[attr-defined]
    return torch.frombuffer(window, dtype=torch.uint8)


def _bytes_of(tensor: Any) -> np.ndarray[Any, np.dtype[np.uint8]]:
    if (
        not isinstance(tensor, torch.Tensor)
        or tensor.dtype is not torch.uint8
        or tensor.ndim != 1
        or not tensor.is_contiguous()
    ):
        raise ValueError("the data of a blob is not a one-dimensional, contiguous uint8 tensor")
    return tensor.cpu().numpy()


class _Blob:
    """Blobs are values also in place: the receiver gets a new object, and writes into no target."""

    checks_data = False

    def differences(self, source: Any, target: Any, build_context: BuildContext, target_shared: Shared) -> list[str]:
        return []

    def settle(self, meta: Any, target: Any) -> None:
        pass


class ArrayMeta(msgspec.Struct, array_like=True, frozen=True, forbid_unknown_fields=True):
    """``dtype`` is written as in numpy's own file format; ``order`` is C or F."""

    dtype: Any
    shape: tuple[int, ...]
    order: Literal["C", "F"]


class ArrayCodec(_Blob):
    name = "array"

    def takes(self, leaf: object) -> bool:
        return type(leaf) is np.ndarray

    def open(self, leaf: Any, shared: Shared) -> Opened:
        if leaf.dtype.hasobject:
            raise CannotCarry("a numpy array of Python objects; convert it to a list or to a numeric dtype")
        if leaf.dtype.metadata or leaf.dtype.isalignedstruct or _has_titles(leaf.dtype):
            raise CannotCarry(
                f"a numpy array of dtype {leaf.dtype} with metadata, titles or alignment; use a plain dtype"
            )
        order: Literal["C", "F"] = "F" if leaf.flags.f_contiguous and not leaf.flags.c_contiguous else "C"
        flat = np.asarray(leaf, order=order).reshape(-1, order=order)
        descr = np.lib.format.dtype_to_descr(leaf.dtype)
        if np.lib.format.descr_to_dtype(descr) != leaf.dtype:
            raise CannotCarry(
                f"a numpy array of dtype {leaf.dtype}, which has no plain description; convert it to another dtype"
            )
        if not flat.flags.writeable and flat.nbytes:
            # torch warns about memory that is not writable, so it gets a window on the address instead.
            window = (ctypes.c_ubyte * flat.nbytes).from_address(flat.ctypes.data)
            window._keeps_alive = flat  # type: ignore[attr-defined]
            tensor = torch.frombuffer(window, dtype=torch.uint8)
        else:
            tensor = (
                torch.from_numpy(flat.view(np.uint8))
                if flat.nbytes
                else torch.empty(0, dtype=torch.uint8, device="cpu")
            )
        return Opened(ArrayMeta(descr, tuple(leaf.shape), order), [tensor])

    def _dtype(self, m: ArrayMeta) -> np.dtype[Any]:
        _check_descr(m.dtype)
        try:
            dtype = np.lib.format.descr_to_dtype(_tupled(m.dtype))
        except Exception as error:
            raise ValueError(f"unknown numpy dtype: {error}") from error
        if dtype.hasobject or (not dtype.itemsize and 0 not in m.shape):
            raise ValueError("a numpy dtype holds objects, or has items of 0 bytes")
        if len(m.shape) > 64 or any(n < 0 for n in m.shape):
            raise ValueError("a numpy array has a negative size, or more than 64 dimensions")
        return dtype

    def promise(self, meta: Any, children: int, build_context: BuildContext) -> None:
        self._dtype(msgspec.convert(meta, ArrayMeta))
        if children != 1:
            raise ValueError(f"a numpy array travels as one tensor of bytes, got {children}")

    def close(self, meta: Any, children: list[Any], build_context: BuildContext) -> Any:
        m = msgspec.convert(meta, ArrayMeta)
        dtype, data = self._dtype(m), _bytes_of(children[0])
        if math.prod(m.shape) * dtype.itemsize != data.nbytes:
            raise ValueError(f"{data.nbytes} bytes do not fill a numpy array of shape {m.shape}")
        if dtype.kind == "U" and data.nbytes and int(data.view(dtype.str[0] + "u4").max()) > 0x10FFFF:
            raise ValueError("a numpy array of text has code points that do not exist")
        if not data.nbytes:
            return np.empty(m.shape, dtype, order=m.order)
        return np.ndarray(m.shape, dtype, buffer=data.data, order=m.order)


#: The dtype descriptions of a peer that numpy may parse: numbers, raw bytes, text, times. Others have a grammar of
#: their own.
_DESCR = re.compile(r"[<>|](?:[biufc]\d{1,2}|[SVU]\d{1,9}|[mM]8(?:\[\d{0,9}[A-Za-z]{1,2}\])?)", re.ASCII)


def _check_descr(descr: Any, depth: int = 0) -> None:
    if isinstance(descr, str) and _DESCR.fullmatch(descr) and (not depth or "U" not in descr):
        return
    if not isinstance(descr, list) or depth > 8:
        raise ValueError("unknown numpy dtype")
    for field in descr:
        if not isinstance(field, list) or len(field) not in (2, 3) or type(field[0]) is not str:
            raise ValueError("unknown numpy dtype")
        _check_descr(field[1], depth + 1)


def _has_titles(dtype: np.dtype[Any]) -> bool:
    return dtype.fields is not None and any(len(f) > 2 or _has_titles(f[0]) for f in dtype.fields.values())


def _tupled(descr: Any) -> Any:
    """A dtype's description with tuples in place of inner lists, as numpy expects them. msgpack has only lists."""
    if isinstance(descr, list):
        return [tuple(_tupled(x) if i == 1 else tuple(x) if i == 2 else x for i, x in enumerate(f)) for f in descr]
    return descr


class TextCodec(_Blob):
    """``bytes``, ``bytearray`` and ``str`` that are too long to travel inside the manifest."""

    name = "text"

    def __init__(self, inline_bytes: int) -> None:
        self._inline_bytes = inline_bytes

    def takes(self, leaf: object) -> bool:
        return type(leaf) in (bytes, bytearray, str) and len(leaf) > self._inline_bytes  # type: ignore[arg-type]

    def open(self, leaf: Any, shared: Shared) -> Opened:
        data = leaf.encode("utf-8", "surrogatepass") if type(leaf) is str else leaf
        return Opened(type(leaf).__name__, [_over_bytes(data)])

    def promise(self, meta: Any, children: int, build_context: BuildContext) -> None:
        if meta not in ("bytes", "bytearray", "str") or children != 1:
            raise ValueError("malformed text: expected one tensor for bytes, bytearray or str")

    def close(self, meta: Any, children: list[Any], build_context: BuildContext) -> Any:
        data = _bytes_of(children[0]).tobytes()
        if meta == "str":
            return data.decode("utf-8", "surrogatepass")
        return bytearray(data) if meta == "bytearray" else data


class ObjectCodec(_Blob):
    """Any other Python object, for receivers that have opted in to ``torch.load(weights_only=True)``.

    The source does not know which receivers have opted in, so it always offers the object. Pickling runs only the
    object's own code. A receiver that has not opted in refuses the object by its class's name, before a byte moves.
    """

    name = "object"

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes

    def takes(self, leaf: object) -> bool:
        return not isinstance(leaf, (torch.Tensor, dict, list, tuple, set, frozenset))

    def open(self, leaf: Any, shared: Shared) -> Opened:
        cls = f"{type(leaf).__module__}.{type(leaf).__qualname__}"
        if isinstance(leaf, nn.Module | Optimizer | LRScheduler):
            raise CannotCarry(f"{cls} is an object that has a state, not a state: pass its state_dict() here")
        if _holds_tensors(leaf):
            raise CannotCarry(
                f"{cls} holds tensors, which must not travel inside a pickle; register the class with "
                "torch.utils._pytree.register_dataclass or register_pytree_node, or send a dict"
            )
        buffer = io.BytesIO()
        try:
            torch.save(leaf, buffer)
        except Exception as error:
            raise CannotCarry(
                f"{cls} cannot be carried: pickling it failed ({error}); remove it, or convert it to plain data"
            ) from error
        if buffer.tell() > self._max_bytes:
            raise CannotCarry(
                f"{cls} is {buffer.tell()} bytes when pickled, more than "
                f"TRANSFUSE_MAX_OBJECT_BYTES={self._max_bytes}; raise that, or convert it to plain data"
            )
        return Opened(cls, [_over_bytes(buffer.getvalue())])

    def promise(self, meta: Any, children: int, build_context: BuildContext) -> None:
        if not isinstance(meta, str) or children != 1:
            raise ValueError("malformed object: expected a class name and one tensor of bytes")
        if not build_context.weights_only_objects:
            raise CannotCarry(
                f"Python object {meta[:200]} is refused; convert it to plain data, or opt in on the receiver with "
                "weights_only_objects=True and torch.serialization.add_safe_globals"
            )

    def close(self, meta: Any, children: list[Any], build_context: BuildContext) -> Any:
        data = _bytes_of(children[0]).tobytes()
        try:
            return torch.load(io.BytesIO(data), weights_only=True)
        except pickle.UnpicklingError as error:
            why = pickles.explain(io.BytesIO(data), error)
            if why.damage:
                raise ValueError(f"a damaged pickle of {meta[:200]}: {why.damage}") from error
            needs = f", which needs {', '.join(why.names[:MAX_NAMED])}" if why.names else f" ({why.text})"
            raise CannotCarry(
                f"torch.load(weights_only=True) refuses {meta[:200]}{needs}; convert it to plain data, or allow what "
                "it needs on the receiver with torch.serialization.add_safe_globals, if you trust it"
            ) from error
        except Exception as error:
            raise ValueError(f"a damaged pickle of {meta[:200]}: {error!r}") from error


def _holds_tensors(leaf: Any, depth: int = 3) -> bool:
    if isinstance(leaf, torch.Tensor):
        return True
    if depth == 0:
        return False
    if isinstance(leaf, dict):
        inside: list[Any] = [*leaf.keys(), *leaf.values()]
    elif isinstance(leaf, (list, tuple, set, frozenset)):
        inside = list(leaf)
    else:
        inside = list(getattr(leaf, "__dict__", {}).values())
    return any(_holds_tensors(item, depth - 1) for item in inside)
