"""Limits of these tests, and classes that peers may name."""

from __future__ import annotations

import dataclasses
import datetime
import enum
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils import _pytree

from transfuse._errors import TransfuseError
from transfuse._limits import MIB, Limits

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
