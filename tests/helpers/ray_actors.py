"""Actors that exchange tensors over transfuse, and what they exchange. Ray's workers import this module."""

from __future__ import annotations

import gc
import os
import weakref
from typing import Any

import ray
import torch
from ray.experimental.rdt.util import get_tensor_transport_manager

import transfuse
from transfuse.integrations import ray as over_transfuse

__all__ = ["BIG", "SLOW_BYTES", "Phoenix", "Worker", "manager", "register", "some_tensors"]

#: A number of float32 that make 64 MiB.
BIG = 16 << 20
#: Seconds that a transfer may take: others may have the cores.
TIMEOUT = 180
#: Slow enough for a transfer of 64 MiB to be under way for as long as a test needs.
SLOW_BYTES = 4 << 20


def register() -> None:
    """An ordinary transport, one that goes over the network in any case, a slow one, and one with all defaults."""
    over_transfuse.register("LOCAL", host="127.0.0.1", timeout=TIMEOUT)
    over_transfuse.register("NETWORK", host="127.0.0.1", timeout=TIMEOUT, same_host=False)
    over_transfuse.register(
        "SLOW", host="127.0.0.1", timeout=TIMEOUT, same_host=False, max_bytes_per_second=float(SLOW_BYTES)
    )
    over_transfuse.register("HASTY", host="127.0.0.1", timeout=3)
    over_transfuse.register()


def manager(name: str = "LOCAL") -> Any:
    return get_tensor_transport_manager(name)


def some_tensors() -> dict[str, Any]:
    """Tensors of many kinds; the same each time."""
    generator = torch.Generator().manual_seed(3)
    matrix = torch.randn(33, 17, generator=generator)
    dtypes = [torch.bfloat16, torch.float16, torch.float64, torch.float8_e4m3fn, torch.complex64, torch.bool]
    whole = [torch.int8, torch.uint8, torch.int16, torch.uint16, torch.int32, torch.int64, torch.uint64]
    return {
        "dtypes": [(matrix * 3).to(dtype) for dtype in dtypes] + [(matrix * 3).abs().to(dtype) for dtype in whole],
        "scalar": torch.tensor(3.5),
        "empty": [torch.empty(0), torch.empty(0, 3, dtype=torch.int32)],
        "views": {"transposed": matrix.t(), "strided": matrix[::3, 1::2], "wide": torch.ones(1).expand(5, 4)},
        "odd": (float("nan") * torch.ones(3), -torch.zeros(2), torch.full((2,), float("-inf"))),
        "conjugate": torch.randn(5, dtype=torch.complex64, generator=generator).conj(),
        "sparse": torch.eye(4).to_sparse(),
        "twice": [matrix, matrix],
        "learned": matrix.clone().requires_grad_(),
        "plain": {"step": 7, "name": "λ", 3: None},
    }


register()


class _Actor:
    @ray.method(tensor_transport="LOCAL")
    def some(self) -> dict[str, Any]:
        return some_tensors()

    @ray.method(tensor_transport="NETWORK")
    def some_over_the_network(self) -> dict[str, Any]:
        return some_tensors()

    @ray.method(tensor_transport="LOCAL")
    def count(self, numel: int, start: int = 0) -> torch.Tensor:
        return torch.arange(start, start + numel, dtype=torch.float32)

    @ray.method(tensor_transport="NETWORK")
    def count_over_the_network(self, numel: int) -> torch.Tensor:
        return torch.arange(numel, dtype=torch.float32)

    @ray.method(tensor_transport="HASTY")
    def count_quickly_given_up(self) -> torch.Tensor:
        return torch.arange(1000, dtype=torch.float32)

    @ray.method(tensor_transport="SLOW")
    def count_slowly(self, numel: int = BIG) -> list[torch.Tensor]:
        return [torch.arange(numel, dtype=torch.float32)]

    @ray.method(tensor_transport="LOCAL")
    def nothing(self) -> dict[str, str]:
        return {"no": "tensor"}

    @ray.method(tensor_transport="LOCAL")
    def meta(self) -> torch.Tensor:
        return torch.empty(3, device="meta")

    def compare(self, received: object) -> list[str]:
        """How this differs from ``some_tensors()``."""
        from transfuse.testing.exact import differences

        return [str(one) for one in differences(some_tensors(), received)]

    def same(self, received: dict[str, Any]) -> bool:
        return received["twice"][0] is received["twice"][1]

    def is_count(self, received: torch.Tensor, numel: int, start: int = 0) -> bool:
        return torch.equal(received, torch.arange(start, start + numel, dtype=torch.float32))

    def sizes(self, *received: torch.Tensor) -> list[float]:
        return [float(one.sum()) for one in received]

    def take(self, received: object) -> object:
        return type(received).__name__

    @ray.method(tensor_transport="LOCAL")
    def double(self, received: torch.Tensor) -> torch.Tensor:
        return received * 2

    @ray.method(tensor_transport="LOCAL")
    def watched(self, numel: int) -> torch.Tensor:
        """A tensor that :meth:`freed` watches."""
        made = torch.ones(numel)
        self.watch = weakref.ref(made)
        return made

    def freed(self) -> bool:
        gc.collect()
        return self.watch() is None

    def held(self, name: str = "LOCAL") -> int:
        """How many objects this process serves."""
        return len(manager(name)._objects)

    def fetching(self, name: str) -> bool:
        """Whether a conversation with a sender is under way."""
        return any(fetch._landing for fetch in list(manager(name)._fetches))

    def reports(self) -> list[transfuse.Report]:
        return over_transfuse.reports()

    def pid(self) -> int:
        return os.getpid()

    def fetch_whole(self, refs: list[Any]) -> list[bool]:
        """Get objects by refs that arrived inside a list: this process borrows them."""
        return [torch.equal(one, torch.ones(7)) for one in ray.get(refs)]


# Threads, so that an actor answers while a task of its own waits for tensors.
Worker = ray.remote(num_cpus=0, max_concurrency=8)(_Actor)


@ray.remote(num_cpus=0, max_restarts=1)
class Phoenix:
    """An actor that Ray restarts."""

    def __init__(self) -> None:
        register()

    @ray.method(tensor_transport="LOCAL")
    def ones(self) -> torch.Tensor:
        return torch.ones(7)

    def total(self, received: torch.Tensor) -> float:
        return float(received.sum())

    def pid(self) -> int:
        return os.getpid()
