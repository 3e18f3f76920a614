"""A manifest's tensors and storages as columns: one array for each property, not one object for each tensor.

A leaf is one plain tensor, or its codec opens it into several. A tensor's row is its number in the columns.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from transfuse._state.region import Form, Ints, Region, canonical, crowds

Bools = npt.NDArray[np.bool_]

#: The largest size, stride or offset that is accepted. Products of two such numbers are checked as floats first.
HUGE = 1 << 56


@dataclass(eq=False, kw_only=True)
class Shapes:
    """Columns of shapes. Tensor i has ``sizes[first[i] : first[i + 1]]``, and the same slice of ``strides``."""

    ndim: Ints
    sizes: Ints
    strides: Ints

    def __len__(self) -> int:
        return len(self.ndim)

    @cached_property
    def first(self) -> Ints:
        result = np.zeros(len(self) + 1, dtype=np.int64)
        np.cumsum(self.ndim, out=result[1:])
        return result

    def shape(self, i: int) -> tuple[int, ...]:
        return tuple(self.sizes[self.first[i] : self.first[i + 1]].tolist())

    def stride(self, i: int) -> tuple[int, ...]:
        return tuple(self.strides[self.first[i] : self.first[i + 1]].tolist())

    def form(self, i: int) -> Form:
        return canonical(self.shape(i), self.stride(i))

    def dimensions(self, rows: Ints) -> Ints:
        """Indices into ``sizes`` and ``strides`` for the dimensions of these tensors, tensor after tensor."""
        ndim = self.ndim[rows]
        end = np.cumsum(ndim)
        return np.repeat(self.first[rows] - end + ndim, ndim) + np.arange(end[-1] if len(end) else 0)

    def _each(self, column: npt.NDArray[Any], work: Callable[[Ints, Ints], npt.NDArray[Any]]) -> None:
        """Fill a column with the results of ``work``, which gets the sizes and strides as (tensors, dimensions) arrays.

        ``work`` is called once for each number of dimensions. Tensors of 0 dimensions keep what the column holds.
        """
        counts = np.bincount(self.ndim) if len(self) else self.ndim
        for dims in np.flatnonzero(counts).tolist():
            if dims == 0:
                continue
            if counts[dims] == len(self):  # Often all tensors have the same number of dimensions.
                column[:] = work(self.sizes.reshape(-1, dims), self.strides.reshape(-1, dims))
                return
            chosen = np.flatnonzero(self.ndim == dims)
            at = self.first[chosen][:, None] + np.arange(dims)
            column[chosen] = work(self.sizes[at], self.strides[at])

    @cached_property
    def numel(self) -> Ints:
        numel = np.ones(len(self), dtype=np.int64)
        self._each(numel, lambda sizes, _: sizes.prod(axis=1))
        return numel

    @cached_property
    def reach(self) -> Ints:
        """The distance in items from a tensor's first item to one past its last; 0 for an empty tensor."""
        reach = np.ones(len(self), dtype=np.int64)
        self._each(reach, lambda sizes, strides: 1 + ((sizes - 1) * strides).sum(axis=1))
        return np.where(self.numel > 0, reach, 0)

    @cached_property
    def contiguous(self) -> Bools:
        """Which tensors are one run of memory in row-major order."""
        result = np.ones(len(self), dtype=bool)
        self._each(result, contiguous)
        return result

    @cached_property
    def overlapping(self) -> Bools:
        """Which tensors have elements that share memory, not counting repetition by a stride of 0."""
        result = np.zeros(len(self), dtype=bool)
        self._each(result, _overlapping)
        return result & (self.numel > 0)

    @cached_property
    def repeated(self) -> Bools:
        """Which tensors repeat an element by a stride of 0."""
        result = np.zeros(len(self), dtype=bool)
        self._each(result, lambda sizes, strides: ((sizes > 1) & (strides == 0)).any(axis=1))
        return result

    def check(self) -> None:
        """Refuse columns that ``describe()`` never writes. Numbers are multiplied only after their range is checked."""
        if len(self) and (self.ndim.min() < 0 or self.ndim.max() > 64):
            raise ValueError(f"a tensor has {int(self.ndim.max())} dimensions, expected 0 to 64")
        dims = int(self.ndim.sum())
        if len(self.sizes) != dims or len(self.strides) != dims:
            raise ValueError(
                f"{len(self.sizes)} sizes and {len(self.strides)} strides for tensors of {dims} dimensions in all"
            )
        for column in (self.sizes, self.strides):
            if len(column) and (column.min() < 0 or column.max() > HUGE):
                raise ValueError("a size or stride of a tensor is out of range")
        extent = np.ones(len(self))
        self._each(extent, _extent)
        if len(self) and extent.max() * 16 > float(HUGE):
            raise ValueError("a tensor is too large to address")


def contiguous(sizes: Ints, strides: Ints) -> Bools:
    """Which rows of sizes and strides are one run of memory in row-major order."""
    expected = np.ones_like(sizes)
    if sizes.shape[1] > 1:
        expected[:, :-1] = np.cumprod(sizes[:, :0:-1], axis=1)[:, ::-1]
    return ((strides == expected) | (sizes == 1)).all(axis=1)  # type: ignore[no-any-return]


def _overlapping(sizes: Ints, strides: Ints) -> Bools:
    order = np.argsort(strides, axis=1, kind="stable")
    sizes, strides = np.take_along_axis(sizes, order, axis=1), np.take_along_axis(strides, order, axis=1)
    counted = (sizes != 1) & (strides != 0)
    spans = np.where(counted, (sizes - 1) * strides, 0)
    before = 1 + np.cumsum(spans, axis=1) - spans
    return (counted & (strides < before)).any(axis=1)  # type: ignore[no-any-return]


def _extent(sizes: Ints, strides: Ints) -> npt.NDArray[np.float64]:
    """The number of items or the reach, whichever is larger, as floats: integers could wrap around."""
    reach = 1 + (np.maximum(sizes - 1, 0).astype(float) * strides).sum(axis=1)
    return np.maximum(sizes.astype(float).prod(axis=1), reach)  # type: ignore[no-any-return]


@dataclass(eq=False, kw_only=True)
class Tensors(Shapes):
    """Columns of all tensors of a manifest."""

    storage: Ints
    dtype: Ints
    flags: Ints
    offset: Ints  # in items, from the start of the storage's window
    item: Ints  # bytes of one item

    def region(self, i: int) -> tuple[Region, bool]:
        """The region of tensor i, and whether the tensor overlaps itself."""
        form, item = self.form(i), int(self.item[i])
        return Region(int(self.offset[i]) * item, item, form.sizes, form.strides), form.overlapping

    @cached_property
    def start(self) -> Ints:
        """The first byte of each tensor in its storage's window."""
        return self.offset * self.item

    @cached_property
    def end(self) -> Ints:
        """One past the last byte of each tensor."""
        return self.start + self.reach * self.item

    @cached_property
    def alone(self) -> Bools:
        """Which tensors have elements and share no span of memory with another tensor, gaps between items included."""
        shown = np.flatnonzero(self.numel > 0)
        alone = np.zeros(len(self), dtype=bool)
        alone[shown] = True
        users = np.bincount(self.storage[shown]) if len(shown) else shown
        if len(users) and users.max() > 1:
            some = shown[users[self.storage[shown]] > 1]
            for crowd in crowds(self.storage[some], self.start[some], self.end[some]):
                alone[some[crowd]] = False
        return alone

    def check_in(self, storages: Storages) -> None:
        """Refuse columns that ``describe()`` never writes. Numbers are used only after their range is checked."""
        n = len(self)
        if any(len(column) != n for column in (self.storage, self.dtype, self.flags, self.offset, self.item)):
            raise ValueError("the columns of the tensors have different lengths")
        self.check()
        if n and (self.storage.min() < 0 or self.storage.max() >= len(storages)):
            raise ValueError("a tensor names a storage that was not described")
        if n and (self.flags.min() < 0 or self.flags.max() >= 64):
            raise ValueError("a tensor has unknown flags")
        if n and (self.offset.min() < 0 or self.offset.max() > HUGE):
            raise ValueError("the offset of a tensor is out of range")
        if n and float(self.offset.max()) * 16 > float(HUGE):
            raise ValueError("the offset of a tensor is too large to address")
        inside = (self.end <= storages.nbytes[self.storage]) | (self.numel == 0)
        if not inside.all():
            raise ValueError(f"tensor {int(np.argmin(inside))} reaches beyond its storage")


@dataclass(eq=False)
class Storages:
    """Columns of all storages. A storage's window runs from the first to the last byte that the tensors show."""

    nbytes: Ints
    device: Ints  # an index into devices
    devices: list[str]

    def __len__(self) -> int:
        return len(self.nbytes)

    @cached_property
    def on_cpu(self) -> Bools:
        """Which storages are in main memory."""
        return on_cpu(self.devices)[self.device]


def on_cpu(devices: list[str]) -> Bools:
    """Which of these devices are main memory."""
    return np.array([device_type(name) == "cpu" for name in devices], dtype=bool)


def device_type(name: str) -> str:
    """The type of a device. A peer may have types that torch does not know in this process."""
    return name.split(":")[0]
