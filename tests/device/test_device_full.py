"""A device with hardly any free memory: transfers use smaller pieces there, and are exact."""

from __future__ import annotations

import os
from collections.abc import Iterable
from functools import partial
from types import ModuleType
from typing import Any

import pytest
import torch

import transfuse
from device.kind import imitation_only
from device.moving import Setting, assert_same, blank, move, there, transport
from transfuse._memory.packing import Staging

pytestmark = [imitation_only, pytest.mark.usefixtures("accelerator", "nothing_is_left")]

MIB = 1 << 20


def state() -> dict[str, Any]:
    """Large, small and strided tensors: of all of these a parcel has to be packed, except of the large one."""
    generator = torch.Generator().manual_seed(0)
    return {
        "large": torch.randn(MIB, generator=generator),
        "turned": torch.randn(1500, 1000, generator=generator).t(),
        "small": [torch.randn(700 + i, generator=generator) for i in range(800)],
        "bytes": torch.arange(1001).to(torch.uint8)[1::2],
        "one": torch.tensor(3.0),
    }


def changed(tensors: dict[str, Any]) -> dict[str, Any]:
    made = {name: leaf.clone() for name, leaf in tensors.items() if name != "small"}
    made["large"][5] += 1
    made["turned"][7, 3] += 1
    return made | {"small": [leaf + (i % 3 == 0) for i, leaf in enumerate(tensors["small"])]}


def fill(device: ModuleType, free: int, ends: tuple[int, ...] = (0, 1)) -> None:
    torch.accelerator.synchronize()
    for index in ends:
        device.set_most_bytes(index, device.memory_allocated(index) + free)


@pytest.mark.parametrize("free", [MIB, MIB // 4])
@pytest.mark.parametrize("options", [{}, {"delta": True}, {"atomic": True}], ids=["", "delta", "atomic"])
def test_over_main_memory(options: dict[str, Any], free: int, device: ModuleType) -> None:
    expected, setting = state(), Setting(direct=False)
    source, own = there(expected, 0), there(changed(expected) if options.get("delta") else blank(expected), 1)
    with setting.ranks() as ranks:
        fill(device, free)
        ((got, _),) = move(ranks, setting, {0: source}, {1: own}, **options).values()
    device.reset_settings()
    assert_same(expected, got, in_place=True)


@pytest.mark.parametrize(
    ("options", "free", "ends"),
    [({}, MIB // 4, (0, 1)), ({}, MIB // 4, (0,)), ({}, MIB // 4, (1,)), ({"delta": True}, MIB // 4, (0, 1))],
    ids=["both", "source", "receiver", "delta"],
)
def test_on_the_backend_of_the_device(
    options: dict[str, Any], free: int, ends: tuple[int, ...], device: ModuleType
) -> None:
    """What has to be staged goes through main memory, and both ends know before either posts an operation."""
    expected, setting = state(), Setting()
    source, own = there(expected, 0), there(changed(expected) if options.get("delta") else blank(expected), 1)
    with setting.ranks() as ranks:
        fill(device, free, ends)
        ((got, _),) = move(ranks, setting, {0: source}, {1: own}, **options).values()
        device.reset_settings()
        assert_same(expected, got, in_place=True)
        # The group is whole, and its backend is used again as soon as there is room.
        blocked = blank(expected)
        device.reset_counters()
        ((got, _),) = move(ranks, setting, {0: source}, {1: there(blocked, 1)}).values()
        assert device.counters()["bytes_to_host"] < MIB
    assert_same(expected, got, in_place=True)


@pytest.mark.parametrize("end", [0, 1], ids=["source", "receiver"])
def test_room_that_is_gone_when_it_is_needed_fails_at_both_ends_at_once(end: int, device: ModuleType) -> None:
    """Both ends had agreed on the backend, and then another user of the device takes what was free."""
    expected, setting = state(), Setting()
    source, own = there(expected, 0), there(blank(expected), 1)
    found: dict[int, str] = {}
    with setting.ranks() as ranks:

        def one(rank: int, pg: Any) -> None:
            moving = transport(pg, setting, own if rank else None)
            work = partial(moving.recv_checkpoint, [0]) if rank else partial(moving.send_checkpoint, [1], source)
            with pytest.raises(transfuse.TransfuseError) as failed:
                work()
            found[rank] = str(failed.value)

        reserve = Staging.reserve

        def taken(staging: Staging, sizes: Iterable[int], most: int) -> bool:
            has_room = reserve(staging, sizes, most)
            if staging.device.index == end:
                device.set_most_bytes(end, device.memory_allocated(end))
            return has_room

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Staging, "reserve", taken)
            ranks.run(one)
        device.reset_settings()
        assert all("free bytes for staging" in text for text in found.values())
        ((got, _),) = move(ranks, setting, {0: source}, {1: own}).values()
    assert_same(expected, got, in_place=True)


def test_restore(device: ModuleType) -> None:
    expected = state()
    own = there(expected, 0)
    with transfuse.keep(transfuse.State(own), run=f"full-{os.getpid()}") as keep:
        keep.commit(1)
        with keep.mutating(), torch.no_grad():
            torch._foreach_zero_([own["large"], own["turned"], *own["small"], own["bytes"], own["one"]])
        fill(device, MIB // 4)
        assert keep.restore() == 1
    device.reset_settings()
    assert_same(expected, own, in_place=True)
