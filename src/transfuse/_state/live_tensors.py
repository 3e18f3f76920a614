"""Live plain tensors as columns: :func:`read` reads the properties of a hundred thousand tensors together.

Each property is read for all tensors by ``map`` over one of torch's own getters, so that no line of Python runs for
each tensor. An unusual tensor shows as an error or as an address of 0. Only then are all tensors read one by one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain, repeat
from operator import attrgetter, is_
from typing import Any, TypeVar

import numpy as np
import torch
from torch import nn

from transfuse._state.leaves import dense
from transfuse._state.memory_maps import Mappings
from transfuse._state.region import Ints
from transfuse._state.tensors import Bools, Shapes, on_cpu

#: Classes whose tensors the columns describe completely, if their layout is strided.
PLAIN: frozenset[type] = frozenset({torch.Tensor, nn.Parameter})

_address: Callable[[torch.Tensor], int] = torch._C.TensorBase.data_ptr
_offset: Callable[[torch.Tensor], Any] = torch._C.TensorBase.storage_offset
_stride: Callable[[torch.Tensor], tuple[int, ...]] = torch._C.TensorBase.stride
_storage: Callable[[torch.Tensor], torch.UntypedStorage] = torch._C.TensorBase.untyped_storage
_storage_nbytes: Callable[[torch.UntypedStorage], int] = torch._C.StorageBase.nbytes  # type: ignore[attr-defined]

#: How many tensors are read together, property after property: few enough to stay in the processor's caches.
TOGETHER = 512

_CPU = torch.device("cpu")

T = TypeVar("T")


class Unusual(Exception):
    """One of the tensors has no ordinary memory: it must be looked at by itself."""


@dataclass(eq=False, kw_only=True)
class LiveTensors(Shapes):
    """Columns of plain tensors."""

    #: The address of each tensor's first item; 0 for a tensor without items.
    address: Ints
    #: The distance from the start of the storage, in items.
    offset: Ints
    #: The number of bytes that the storage has now.
    storage_nbytes: Ints
    #: The address of the storage's first byte, or a negative number if it has no memory. Two tensors share a storage if
    #: this key and the device are equal.
    storage_key: Ints
    dtype: Ints
    dtypes: list[torch.dtype]
    device: Ints
    devices: list[str]
    flags: Ints

    @cached_property
    def item(self) -> Ints:
        """Bytes of one item."""
        return _item_sizes(self.dtypes)[self.dtype]

    @cached_property
    def end(self) -> Ints:
        """One past the address of each tensor's last byte."""
        return self.address + self.reach * self.item

    @cached_property
    def beyond(self) -> Bools:
        """Which tensors reach beyond their storage, because it has been freed or shrunk."""
        return ((self.offset + self.reach) * self.item > self.storage_nbytes) & (self.numel > 0)

    @cached_property
    def on_cpu(self) -> Bools:
        """Which tensors are in main memory."""
        return on_cpu(self.devices)[self.device]

    def equals(self, other: LiveTensors) -> bool:
        """Whether all columns are equal."""
        same = (self.dtypes, self.devices) == (other.dtypes, other.devices)
        return same and all(map(np.array_equal, self._columns, other._columns))

    @property
    def _columns(self) -> tuple[Ints, ...]:
        return (
            self.address,
            self.ndim,
            self.sizes,
            self.strides,
            self.offset,
            self.storage_nbytes,
            self.storage_key,
            self.dtype,
            self.device,
            self.flags,
        )

    def faults(self, rows: Ints, memory: Mappings, *, write: bool) -> dict[int, str]:
        """Tensors in ``rows`` that cannot be read (with ``write``, written): the index into ``rows``, and the reason.

        All memory between a tensor's first and last item is checked. Tensors that reach beyond their storage are
        skipped: ``beyond`` reports them.
        """
        here = np.flatnonzero((self.on_cpu & (self.numel > 0) & ~self.beyond)[rows])
        found = memory.faults(self.address[rows[here]], self.end[rows[here]], write=write)
        return {int(here[i]): why for i, why in found.items()}


def read(tensors: Sequence[torch.Tensor], *, roles: bool = True) -> LiveTensors:
    """The columns of these tensors. Each must be a ``torch.Tensor`` or ``nn.Parameter``, not of a subclass.

    :class:`Unusual` if one of them is not strided, is quantized, nested or inside a ``torch.func`` transform, or has
    items but no address. Without ``roles`` the flags hold only the conjugate and negative bits.
    """
    dtypes: dict[torch.dtype, int] = {}
    devices: dict[torch.device, int] = {}
    try:
        some = [
            _read_some(tensors[i : i + TOGETHER], dtypes, devices, roles)
            for i in range(0, max(len(tensors), 1), TOGETHER)
        ]
    except Exception as error:  # Some getters raise for tensors without memory of their own.
        raise Unusual from error
    if any(map(dense.is_quantized, dtypes)):
        raise Unusual
    result = LiveTensors(
        **{name: np.concatenate([columns[name] for columns in some]) for name in some[0]},
        dtypes=list(dtypes),
        devices=list(map(str, devices)),
    )
    nowhere = np.flatnonzero(result.address == 0)
    if (result.numel[nowhere] > 0).any():
        raise Unusual
    result.storage_key -= result.offset * result.item
    result.storage_key[nowhere] = [_key(_storage(tensors[i])) for i in nowhere.tolist()]
    return result


def _read_some(
    tensors: Sequence[torch.Tensor], dtypes: dict[torch.dtype, int], devices: dict[torch.device, int], roles: bool
) -> dict[str, Ints]:
    n = len(tensors)
    address = _ints(map(_address, tensors), n)
    strides = list(map(_stride, tensors))
    dtype = _number(list(map(attrgetter("dtype"), tensors)), dtypes)
    return {
        "ndim": _ints(map(len, strides), n),
        "sizes": _ints(chain.from_iterable(map(attrgetter("shape"), tensors))),
        "strides": _ints(chain.from_iterable(strides)),
        "address": address,
        "offset": _ints(map(_offset, tensors), n),
        "storage_nbytes": _ints(map(_storage_nbytes, map(_storage, tensors)), n),
        "storage_key": address,  # read() turns this into the address of the storage
        "dtype": dtype,
        "device": _devices(tensors, devices),
        "flags": _signs(tensors, dtypes) | (_roles(tensors) if roles else 0),
    }


def read_any(tensors: Sequence[torch.Tensor]) -> LiveTensors:
    """The columns of plain tensors, unusual ones included."""
    try:
        return read(tensors)
    except Unusual:
        return read_carefully(tensors)


def read_carefully(tensors: Sequence[torch.Tensor]) -> LiveTensors:
    """The same columns as :func:`read`, for plain tensors of which some may be unusual: one tensor after the other."""
    storages = [tensor.untyped_storage() for tensor in tensors]
    dtypes: dict[torch.dtype, int] = {}
    devices: dict[str, int] = {}
    return LiveTensors(
        ndim=_ints(tensor.ndim for tensor in tensors),
        sizes=_ints(size for tensor in tensors for size in tensor.shape),
        strides=_ints(stride for tensor in tensors for stride in tensor.stride()),
        address=_ints(dense.start_of(tensor) if tensor.numel() else 0 for tensor in tensors),
        offset=_ints(dense.offset_of(tensor) for tensor in tensors),
        storage_nbytes=_ints(storage.nbytes() for storage in storages),
        storage_key=_ints(map(_key, storages)),
        dtype=_number([tensor.dtype for tensor in tensors], dtypes),
        dtypes=list(dtypes),
        device=_number([str(tensor.device) for tensor in tensors], devices),
        devices=list(devices),
        flags=_ints(dense.flags_of(tensor) for tensor in tensors),
    )


def _key(storage: torch.UntypedStorage) -> int:
    # A storage without memory is identified by torch's object for it, as a negative number, which is never an address.
    return storage.data_ptr() or ~storage._cdata


def _ints(values: Iterable[int], count: int = -1) -> Ints:
    return np.fromiter(values, dtype=np.int64, count=count)


def _bools(values: Iterable[Any], count: int) -> Bools:
    return np.fromiter(values, dtype=bool, count=count)


def _item_sizes(dtypes: list[torch.dtype]) -> Ints:
    return _ints(dtype.itemsize for dtype in dtypes)


def _number(column: list[T], numbers: dict[T, int]) -> Ints:
    """The number of each value in ``numbers``; a value that is new there gets the next number."""
    distinct = dict.fromkeys(column)
    for value in distinct:
        numbers.setdefault(value, len(numbers))
    if len(distinct) > 1:
        return _ints(map(numbers.__getitem__, column), len(column))
    return np.full(len(column), numbers[column[0]] if column else 0, dtype=np.int64)


def _devices(tensors: Sequence[torch.Tensor], devices: dict[torch.device, int]) -> Ints:
    if all(map(attrgetter("is_cpu"), tensors)):
        return np.full(len(tensors), devices.setdefault(_CPU, len(devices)) if tensors else 0, dtype=np.int64)
    return _number(list(map(attrgetter("device"), tensors)), devices)


def _signs(tensors: Sequence[torch.Tensor], dtypes: Iterable[torch.dtype]) -> Ints:
    flags = np.zeros(len(tensors), dtype=np.int64)
    flags[_bools(map(torch.Tensor.is_neg, tensors), len(tensors))] |= int(dense.Flags.NEGATIVE)
    if any(dtype.is_complex for dtype in dtypes):
        flags[_bools(map(torch.Tensor.is_conj, tensors), len(tensors))] |= int(dense.Flags.CONJUGATE)
    return flags


def _roles(tensors: Sequence[torch.Tensor]) -> Ints:
    n = len(tensors)
    flags = np.zeros(n, dtype=np.int64)
    flags[_bools(map(attrgetter("requires_grad"), tensors), n)] = int(dense.Flags.REQUIRES_GRAD)
    if nn.Parameter in set(map(type, tensors)):
        flags[_bools(map(is_, map(type, tensors), repeat(nn.Parameter)), n)] |= int(dense.Flags.PARAMETER)
    for mark in ("_is_buffer", "_is_param"):  # Attributes that nn.Buffer, and nn.Parameter of other classes, set.
        for i in np.flatnonzero(_bools(map(getattr, tensors, repeat(mark), repeat(False)), n)).tolist():
            flags[i] = dense.role_of(tensors[i])
    return flags
