"""The states that the conformance cases send: one for each thing that a transport may get wrong."""

from __future__ import annotations

import datetime
import enum
import functools
import math
import pathlib
import warnings
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils import _pytree


def _dtypes(*names: str) -> tuple[torch.dtype, ...]:
    return tuple(getattr(torch, name) for name in names if hasattr(torch, name))


DTYPES: dict[str, tuple[torch.dtype, ...]] = {
    str(dtype).removeprefix("torch."): (dtype,)
    for dtype in _dtypes(
        *("bool", "uint8", "int8", "uint16", "int16", "uint32", "int32", "uint64", "int64"),
        *("float16", "bfloat16", "float32", "float64", "complex32", "bcomplex32", "complex64", "complex128"),
        *("float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu", "float4_e2m1fn_x2"),
    )
} | {
    # These dtypes are little more than names for bytes.
    "bits": _dtypes("bits8", "bits16", "bits1x8", "bits2x4", "bits4x2"),
    "sub-byte": _dtypes(*(f"{sign}int{width}" for sign in ("", "u") for width in range(1, 8))),
}


@functools.cache
def quiet() -> None:
    """Some kinds of tensor warn once per process that they are in beta: trigger that here, where it fails no test."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for dtype in _dtypes("complex32", "bcomplex32"):
            torch.empty(0, dtype=dtype)
        torch.empty(0, 0, layout=torch.sparse_csr)
        SPARSE["coo"]()
        jagged(1)


def bits(dtype: torch.dtype, *shape: int, seed: int = 0) -> Tensor:
    """A tensor of random bits, including NaNs with payloads."""
    generator = torch.Generator().manual_seed(seed)
    high = 2 if dtype is torch.bool else 256
    raw = torch.randint(0, high, (math.prod(shape) * dtype.itemsize,), dtype=torch.uint8, generator=generator)
    strides = tuple(math.prod(shape[dim + 1 :]) for dim in range(len(shape)))
    return torch.empty(0, dtype=dtype).set_(raw.untyped_storage(), 0, shape, strides)


def numbers(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def _complex(*shape: int) -> Tensor:
    return torch.view_as_complex(numbers(*shape, 2))


def _odd() -> Tensor:
    """A storage of 41 bytes."""
    return torch.arange(41, dtype=torch.uint8)


LAYOUTS: dict[str, Callable[[], Tensor]] = {
    "contiguous": lambda: numbers(4, 5),
    "0-dim": lambda: numbers(),
    "empty": lambda: numbers(0, 3),
    "empty-of-a-storage": lambda: numbers(20)[5:5],
    "transposed": lambda: numbers(4, 5).t(),
    "permuted": lambda: numbers(2, 3, 4).permute(2, 0, 1),
    "stepped": lambda: numbers(240).view(12, 20)[::2, 3::4],
    "offset": lambda: numbers(240)[7:19],
    "expanded": lambda: numbers(3, 1).expand(3, 6),
    "channels-last": lambda: numbers(2, 3, 4, 5).to(memory_format=torch.channels_last),
    "overlapping": lambda: numbers(240).as_strided((10, 4), (2, 1)),
    "size-one": lambda: torch.empty_strided((1, 4), (77, 1)).fill_(3),
    "conj": lambda: _complex(4, 3).conj(),
    "neg": lambda: torch._neg_view(numbers(5)),
    "conj-and-neg": lambda: torch._neg_view(_complex(3).conj()),
    "imag-of-conj": lambda: _complex(4).conj().imag,
    "odd-storage": lambda: _odd()[4:41],
    "odd-storage-of-wider": lambda: _odd()[:40].view(torch.float32),
}

ROLES: dict[str, Callable[[], Tensor]] = {
    "requires-grad": lambda: numbers(3).requires_grad_(),
    "result": lambda: numbers(3).requires_grad_() * 2,
    "parameter": lambda: nn.Parameter(numbers(2, 2)),
    "frozen-parameter": lambda: nn.Parameter(numbers(2, 2), requires_grad=False),
    "buffer": lambda: nn.Buffer(numbers(3)),
    "fleeting-buffer": lambda: nn.Buffer(numbers(3), persistent=False),
}

SPARSE: dict[str, Callable[[], Tensor]] = {
    "coo": lambda: torch.sparse_coo_tensor(torch.tensor([[0, 1], [2, 0]]), numbers(2, 4), (2, 3, 4)).coalesce(),
    "coo-uncoalesced": lambda: torch.sparse_coo_tensor(torch.tensor([[0, 1, 0], [2, 0, 2]]), numbers(3), (2, 3)),
    "csr": lambda: torch.eye(4).to_sparse_csr(),
    "csc": lambda: torch.eye(4).to_sparse_csc(),
    "bsr": lambda: torch.eye(4).to_sparse_bsr((2, 2)),
    "bsc": lambda: torch.eye(4).to_sparse_bsc((2, 2)),
}


def jagged(*lengths: int, seed: int = 0) -> Tensor:
    return torch.nested.nested_tensor([numbers(n, 4, seed=seed + n) for n in lengths], layout=torch.jagged)


# Trees and values


class Point(NamedTuple):
    x: Any
    y: Any


@dataclass
class Config:
    weight: Any
    name: Any


_pytree.register_dataclass(Config)


class Colour(enum.Enum):
    RED = 1
    BLUE = "b"


TREES: dict[str, Callable[[], Any]] = {
    "dict": lambda: {"z": numbers(3), "a": {"b": numbers(2), "c": 1}, "": {}},
    "ordered-dict": lambda: OrderedDict(z=1, a=numbers(3)),
    "module-state": lambda: nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3)).state_dict(),
    "defaultdict": lambda: defaultdict(list, {"a": [1, numbers(3)]}),
    "list": lambda: [1, [2, [numbers(3)]], []],
    "tuple": lambda: (1, (), (numbers(3),)),
    "namedtuple": lambda: Point(numbers(3), Point(1, numbers(2))),
    "deque": lambda: deque([1, numbers(3)], maxlen=5),
    "dataclass": lambda: Config(numbers(3), "n"),
    "keys": lambda: {"a": numbers(3), 1: 2, (1, "x"): numbers(2), torch.float32: 4, None: 5, b"k": 7, 2.5: 8},
    "root-tensor": lambda: numbers(3),
    "root-value": lambda: 5,
    "root-none": lambda: None,
    "root-empty": dict,
}

VALUES: dict[str, Callable[[], Any]] = {
    "numbers": lambda: [True, False, 0, -1, 2**63, -(2**200), float("nan"), -0.0, 1e-310, complex(-0.0, float("inf"))],
    "text": lambda: ["", "ä∂", "\0", "\ud800", "x" * 10_000, b"", b"\0\xff", bytes(range(256)) * 1000],
    "sets": lambda: [{1, 2}, frozenset({"a", (1, 2)}), set()],
    "torch": lambda: [torch.bfloat16, torch.device("cuda:3"), torch.Size([2, 3]), torch.sparse_coo],
    "numpy": lambda: [np.float32(1.5), np.bool_(True), np.arange(6).reshape(2, 3), np.empty((0, 3)), np.array(["a"])],
    "time": lambda: [datetime.datetime(2026, 1, 2, tzinfo=datetime.UTC), datetime.timedelta(3), pathlib.Path("/tmp/x")],
    "enum": lambda: [Colour.RED, {Colour.BLUE: 1}],
}


def training(seed: int = 0) -> dict[str, Any]:
    """The state of a small training run after a step."""
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 2))
    with torch.no_grad():
        for index, parameter in enumerate(model.parameters()):
            parameter.copy_(numbers(*parameter.shape, seed=seed + index))
    # Without _metadata, which "module-state" covers.
    state: dict[str, Any] = {"model": dict(model.state_dict()), "rng": torch.get_rng_state(), "step": seed}
    for make in (torch.optim.AdamW, functools.partial(torch.optim.SGD, momentum=0.9)):
        optimizer = make(model.parameters(), lr=0.1)
        scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=10, cycle_momentum=False)
        model(numbers(6, 4, seed=seed)).sum().backward()
        optimizer.step()
        scheduler.step()
        state[type(optimizer).__name__] = {"optimizer": optimizer.state_dict(), "scheduler": scheduler.state_dict()}
    return state
