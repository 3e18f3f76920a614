"""Transfers between ranks that are threads with a device each: in which settings, and the short way to run them."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import transfuse
from device import kind
from device.group import DeviceRanks, Waits
from device.kind import IMITATION, KIND
from device.mirror import Mirror, to_cpu
from transfuse.testing.exact import assert_exact

__all__ = [
    "FEW",
    "SETTINGS",
    "TIMEOUT",
    "Setting",
    "assert_same",
    "beside",
    "blank",
    "changed",
    "mine",
    "move",
    "sample",
    "there",
    "transport",
]

TIMEOUT = timedelta(seconds=20)


@dataclass(frozen=True)
class Setting:
    """A kind of group, and the device that the wire is on."""

    #: Whether the group has gloo beside the device's backend.
    cpu: bool = True
    #: Whether parcels travel on the device's backend.
    direct: bool = True
    waits: Waits = "nccl"
    #: Whether the group is bound to its device from the start.
    eager: bool = False
    #: Whether receivers copy from the sources' memory by themselves.
    mapped: bool = False

    @property
    def wire(self) -> str:
        return KIND if self.direct else "cpu"

    def ranks(self, n: int = 2) -> DeviceRanks:
        return DeviceRanks(n, cpu=self.cpu, waits=self.waits, eager=self.eager)

    def __str__(self) -> str:
        kind = "hybrid" if self.cpu else "device-only"
        words = [kind, "device" if self.direct else "cpu", "wire", self.waits, "eager" if self.eager else "lazy"]
        return "-".join([*words, *["mapped"] * self.mapped])


_ALL_WAITS: tuple[Waits, ...] = ("nccl", "stream", "host") if IMITATION else ("nccl",)

# Without gloo the wire can only be on the device.
_EACH = [
    Setting(cpu, direct, waits, eager)
    for cpu, direct in ((True, True), (True, False), (False, True))
    for waits in _ALL_WAITS
    for eager in (False, True)
]

#: One setting of each kind, for the ordinary run. The rest is for the soak.
FEW = [
    Setting(),
    Setting(waits=_ALL_WAITS[-2 % len(_ALL_WAITS)], eager=True),
    Setting(direct=False),
    Setting(cpu=False),
]

SETTINGS = [pytest.param(one, id=str(one), marks=() if one in FEW else pytest.mark.soak) for one in _EACH]


def transport(pg: Any, setting: Setting, target: Any = None, **options: Any) -> transfuse.PGTransport:
    give = None if target is None else lambda: target
    mapped = setting.mapped
    return transfuse.PGTransport(pg, TIMEOUT, setting.wire, give, same_host=mapped, device_memory=mapped, **options)


def mine(rank: int) -> torch.device:
    """The device of a rank."""
    return torch.device(KIND, rank)


def beside(rank: int) -> ThreadPoolExecutor:
    """A second thread of a rank, with the same current device."""
    return ThreadPoolExecutor(1, initializer=kind.set_device, initargs=(rank,))


def there(tree: Any, rank: int) -> Any:
    """A copy of a tree on the device of a rank."""
    return Mirror(mine(rank)).there(tree)


def sample(seed: int = 0) -> dict[str, Any]:
    """A state in main memory with large, small, tied, strided and empty leaves."""
    generator = torch.Generator().manual_seed(seed)

    def numbers(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    weight = numbers(200_000)
    return {
        "w": weight,
        "tied": weight,
        "t": numbers(300, 200).t(),
        "steps": numbers(9_000)[::3],
        "p": nn.Parameter(numbers(7)),
        "half": numbers(33, 3).bfloat16(),
        "whole": torch.arange(seed, 1000 + seed),
        "small": [numbers(5) for _ in range(20)],
        "empty": numbers(0, 3),
        "n": seed,
    }


def blank(state: dict[str, Any]) -> dict[str, Any]:
    """The same tree, with zeros. What is tied stays tied."""
    made = dict(state)
    for name, leaf in state.items():
        if isinstance(leaf, nn.Parameter):
            made[name] = nn.Parameter(torch.zeros_like(leaf))
        elif isinstance(leaf, Tensor):
            made[name] = torch.zeros_like(leaf)
        elif isinstance(leaf, list):
            made[name] = [torch.zeros_like(one) for one in leaf]
    if "tied" in made:
        made["tied"] = made["w"]
    return made


def changed(state: dict[str, Any]) -> dict[str, Any]:
    """A state in main memory that differs from this one in a few bytes."""
    made = copy.deepcopy(state)
    made["w"][10] += 1
    return made


def move(
    ranks: DeviceRanks,
    setting: Setting,
    sources: Mapping[int, Any],
    targets: Mapping[int, Any],
    *,
    source_options: Mapping[str, Any] | None = None,
    **options: Any,
) -> dict[int, tuple[Any, transfuse.Report]]:
    """Send every source's state to every receiver. A target of None is fresh. A rank may be source and receiver.

    The states and targets are on their devices. Returns what each receiver got, and its report.
    """

    def send(rank: int, pg: Any) -> None:
        sender = transport(pg, setting, **source_options or {})
        sender.send_checkpoint(sorted(targets), sources[rank])

    def receive(rank: int, pg: Any) -> tuple[Any, transfuse.Report]:
        taker = transport(pg, setting, targets[rank], **options)
        got = taker.recv_checkpoint(sorted(sources))
        assert taker.report is not None
        return got, taker.report

    def one(rank: int, pg: Any) -> Any:
        if rank not in targets:
            return send(rank, pg) if rank in sources else None
        if rank not in sources:
            return receive(rank, pg)
        with beside(rank) as pool:
            sending = pool.submit(send, rank, pg)
            got = receive(rank, pg)
            sending.result()
        return got

    results: Sequence[Any] = ranks.run(one)
    return {rank: results[rank] for rank in targets}


def assert_same(expected: Any, got: Any, *, in_place: bool = False) -> None:
    """What arrived on a device is exactly what a state in main memory says."""
    torch.accelerator.synchronize()
    assert_exact(expected, to_cpu(got), in_place=in_place)
