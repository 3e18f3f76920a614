"""Weights that note what a model's loader reads of them, so that the next update brings that part alone.

A loader of vLLM is given whole weights. What its rank needs of them it takes itself, by views and copies: the rows of
a tensor-parallel rank, the experts that live here. A :class:`WatchedWeight` gives it a tensor of the whole weight. To
take a view of this tensor reads nothing. Whatever else is done with it, or with a view of it, reads the box that is
shown there, and this box is noted. When the same loader gets the same weight again, it is enough that this box is here.
If the loader reads more, the whole weight is brought before it is read.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from math import prod
from typing import Any

import numpy as np
import torch

from transfuse import Block
from transfuse._state.leaves.layout import Box

Sizes = tuple[int, ...]

_NAMES_OF_FACTS = (
    "size dim ndimension numel nelement stride is_contiguous element_size is_floating_point __len__ __hash__"
)
_NAMES_OF_VALUES = "shape dtype device ndim nbytes itemsize layout requires_grad is_meta is_cuda is_cpu"
_NAMES_OF_VIEWS = (
    "__getitem__ chunk contiguous detach expand flatten narrow permute reshape select split squeeze t tensor_split "
    "transpose unbind unflatten unsqueeze view"
)
#: What is known of a weight without its data.
FACTS = {getattr(torch.Tensor, name) for name in _NAMES_OF_FACTS.split()} | {
    getattr(torch.Tensor, name).__get__ for name in _NAMES_OF_VALUES.split()
}
#: What may give views, and never writes.
VIEWS = {getattr(torch.Tensor, name) for name in _NAMES_OF_VIEWS.split()} | {
    *(getattr(torch, name) for name in ("chunk", "narrow", "permute", "split", "t", "transpose", "unbind")),
    *(getattr(torch.Tensor, name).__get__ for name in ("T", "mT", "data")),
}


def whole_box(shape: Sequence[int]) -> Box:
    return Box((0,) * len(shape), tuple(shape))


def joined(one: Box | None, other: Box) -> Box:
    """The smallest box that has both."""
    if one is None:
        return other
    start = tuple(map(min, one.start, other.start))
    stops = map(max, _stop(one), _stop(other))
    return Box(start, tuple(stop - low for low, stop in zip(start, stops, strict=True)))


def _stop(box: Box) -> Iterator[int]:
    return (low + size for low, size in zip(box.start, box.sizes, strict=True))


class WatchedWeight:
    """A weight, of which a box is here, or all, or nothing.

    Args:
        here: the box that the caller brings into :attr:`whole` before :attr:`tensor` is used. None: nothing.
        bring: called with :attr:`whole` to bring all of it, if the loader reads something else.
    """

    def __init__(
        self, shape: Sequence[int], dtype: torch.dtype, here: Box | None, bring: Callable[[torch.Tensor], object]
    ) -> None:
        numel = prod(shape)
        # Pages that nobody touches take no memory.
        memory = np.empty(max(numel, 1) * dtype.itemsize, np.uint8)
        #: Memory for all of it.
        self.whole = torch.from_numpy(memory).view(dtype)[:numel].view(tuple(shape))
        self.log = ReadingLog(tuple(shape), here, weakref.ref(memory))
        self._bring = bring

    @property
    def tensor(self) -> torch.Tensor:
        """The weight for a loader."""
        return _watched(self, self.whole)

    @property
    def piece(self) -> torch.Tensor:
        """What the box that is here shows of :attr:`whole`."""
        assert self.log.here is not None
        return self.whole[tuple(map(slice, self.log.here.start, _stop(self.log.here)))]

    @property
    def target(self) -> torch.Tensor | Block:
        """What the box that is here lands in."""
        assert self.log.here is not None
        if self.log.here == whole_box(self.log.shape):
            return self.whole
        return Block(self.piece, start=self.log.here.start, shape=self.log.shape)

    def read(self, view: torch.Tensor) -> torch.Tensor:
        """The view as a plain tensor, whose data is here now."""
        plain, log = view.as_subclass(torch.Tensor), self.log
        if plain.numel():
            box = box_of(plain, log.shape)
            log.box = joined(log.box, box)
            if log.here is None or joined(log.here, box) != log.here:
                self._bring(self.whole)
                log.here = whole_box(log.shape)
        return plain


class ReadingLog:
    """What has been read of a weight, which need not be here any more."""

    def __init__(self, shape: Sizes, here: Box | None, memory: weakref.ref[Any]) -> None:
        self.shape, self.here = shape, here
        #: The smallest box that has all that was read. None: nothing was read.
        self.box: Box | None = None
        self._memory = memory

    @property
    def is_kept(self) -> bool:
        """Whether somebody still has the weight, as after ``parameter.data = weight``, which reads it unseen."""
        return self._memory() is not None


def settle(logs: Mapping[str, ReadingLog]) -> list[str]:
    """After an update: what somebody has kept counts as read. Returns the names of those that were not here whole."""
    if any(log.is_kept for log in logs.values()):
        gc.collect()
    kept = {name: log for name, log in logs.items() if log.is_kept}
    for log in kept.values():
        log.box = whole_box(log.shape)
    return [name for name, log in kept.items() if log.here != log.box]


def box_of(view: torch.Tensor, shape: Sizes) -> Box:
    """The box of a contiguous tensor of this shape, at the beginning of its storage, that a view of it shows.

    All of it if a dimension of the view goes through several of the tensor's.
    """
    strides = tuple(prod(shape[dim + 1 :]) for dim in range(len(shape)))
    start = tuple(view.storage_offset() // stride % size for stride, size in zip(strides, shape, strict=True))
    sizes = [1] * len(shape)
    for size, stride in zip(view.shape, view.stride(), strict=True):
        if size == 1 or stride == 0:
            continue
        fitting = (dim for dim, one in enumerate(strides) if shape[dim] > 1 and one <= stride and stride % one == 0)
        dim = next(fitting, None)
        if dim is None:
            return whole_box(shape)
        sizes[dim] += (size - 1) * (stride // strides[dim])
    box = Box(start, tuple(sizes))
    return box if all(map(int.__le__, _stop(box), shape)) else whole_box(shape)


class _WeightView(torch.Tensor):
    """A watched weight, or a view of one."""

    _weight: WatchedWeight

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        with torch._C.DisableTorchFunctionSubclass():
            if func in FACTS:
                return func(*args, **kwargs)
            if (
                func in VIEWS
                and isinstance(args[0], _WeightView)
                and (views := _views(func, *args, **kwargs)) is not None
            ):
                return views
            return func(*_read(tuple(args)), **_read(kwargs))


def _views(func: Callable[..., Any], one: _WeightView, *args: Any, **kwargs: Any) -> Any:
    """What ``func`` makes of a watched tensor, watched too; None if it is no view of it."""
    plain = one.as_subclass(torch.Tensor)
    meta = torch.empty_strided(plain.shape, plain.stride(), dtype=plain.dtype, device="meta")
    try:
        made = func(meta, *args, **kwargs)
    except Exception:
        return None  # It will be raised again, or needs the data: an index that is a mask.
    several = made if isinstance(made, (tuple, list)) else [made]
    storage = meta.untyped_storage()._cdata
    if any(view.dtype != meta.dtype or view.untyped_storage()._cdata != storage for view in several):
        return None
    offset = plain.storage_offset()
    views = [
        _watched(one._weight, plain.as_strided(view.shape, view.stride(), offset + view.storage_offset()))
        for view in several
    ]
    return views[0] if several is not made else type(made)(views)


def _watched(weight: WatchedWeight, view: torch.Tensor) -> _WeightView:
    found: _WeightView = view.as_subclass(_WeightView)
    found._weight = weight
    return found


def _read(given: Any) -> Any:
    """Arguments with the data of watched tensors in their place."""
    if isinstance(given, _WeightView):
        return given._weight.read(given)
    if isinstance(given, dict):
        return {key: _read(value) for key, value in given.items()}
    return type(given)(map(_read, given)) if type(given) in (tuple, list) else given
