"""The conformance cases for round trips, with every state and target on a device."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Store

from device import kind
from device.group import add_backend
from device.kind import KIND
from device.mirror import Mirror
from device.moving import FEW, Setting, mine, transport
from transfuse.testing import Case
from transfuse.testing._group import CountingGroup, GroupRanks, Transport
from transfuse.testing._round_trips import ROUND_TRIPS
from transfuse.testing._stage import Stage
from transfuse.testing._states import quiet

pytestmark = pytest.mark.usefixtures("accelerator", "nothing_is_left")

PATIENCE = 8.0


class DeviceGroup(CountingGroup):
    """The group of the cases, with a backend for the device: beside gloo, or alone."""

    def __init__(self, store: Store, rank: int, size: int, timeout: float, setting: Setting) -> None:
        # The constructor for subclasses, or the same with gloo.
        if setting.cpu:
            super().__init__(store, rank, size, timeout)
        else:
            dist.ProcessGroup.__init__(self, rank, size)  # type: ignore[call-arg]
            self.sent = self.received = 0
            self.trap = None
        kind.set_device(rank)
        bound = rank if setting.eager else None
        waits = {"waits": setting.waits} if kind.IMITATION else {}
        self.backend = add_backend(self, store, timeout, bound=bound, **waits)

    def send(self, tensors: list[torch.Tensor], dstRank: int, tag: int = 0) -> dist.Work:  # noqa: N803 - torch's name
        if tensors[0].device.type != KIND:
            return super().send(tensors, dstRank, tag)
        self.sent += sum(tensor.nbytes for tensor in tensors)
        work: dist.Work = self.backend.send(tensors, dstRank, tag)
        return work

    def recv(self, tensors: list[torch.Tensor], srcRank: int, tag: int = 0) -> dist.Work:  # noqa: N803
        if tensors[0].device.type != KIND:
            return super().recv(tensors, srcRank, tag)
        self.received += sum(tensor.nbytes for tensor in tensors)
        work: dist.Work = self.backend.recv(tensors, srcRank, tag)
        return work


class DeviceGroupRanks(GroupRanks):
    def __init__(self, size: int, patience: float, setting: Setting) -> None:
        super().__init__(size, patience)
        self._make = partial(DeviceGroup, setting=setting)

    def __enter__(self) -> DeviceGroupRanks:
        kind.require(self.n)
        super().__enter__()
        return self

    def __exit__(self, *exception: object) -> None:
        self._hang_up()
        super().__exit__(*exception)

    def _hang_up(self) -> None:
        for group in self.groups:
            assert isinstance(group, DeviceGroup)
            group.backend.abort()


class Mirrored:
    """A transport for states in main memory that moves their mirrors from device to device."""

    def __init__(self, group: CountingGroup, setting: Setting, callback: Callable[[], Any] | None) -> None:
        kind.set_device(group.rank())
        self._group, self._setting, self._callback = group, setting, callback

    def send_checkpoint(self, dst_ranks: list[int], state: Any, /) -> None:
        there = Mirror(mine(self._group.rank())).there(state)
        transport(self._group, self._setting).send_checkpoint(dst_ranks, there)

    def recv_checkpoint(self, src_rank: int, /) -> Any:
        mirror = Mirror(mine(self._group.rank()))
        target = None if self._callback is None else mirror.there(self._callback())
        got = transport(self._group, self._setting, target).recv_checkpoint(src_rank)
        return mirror.back(got)


class DeviceStage(Stage):
    def __init__(self, setting: Setting) -> None:
        super().__init__(_unused, PATIENCE)
        self._setting = setting

    def ranks(self, size: int) -> GroupRanks:
        return DeviceGroupRanks(size, self.patience, self._setting)

    def transport(
        self, group: CountingGroup, callback: Callable[[], Any] | None = None, timeout: float | None = None
    ) -> Transport:
        return Mirrored(group, self._setting, callback)


def _unused(*args: object) -> Transport:
    raise AssertionError("the stage makes its own transports")


#: The device memory route, between threads of one process: no memory has to be mapped there.
MAPPED = [Setting(mapped=True)] if kind.IMITATION else []

#: All cases with the first setting. With the others the soak runs them; the ordinary run has those that differ.
TELLING = ("fresh/large", "fresh/tied", "fresh/training-state", "in-place/strides", "in-place/guard", "fresh/jagged")


def cases() -> list[Any]:
    found = []
    for setting in (*FEW, *MAPPED):
        for case in ROUND_TRIPS:
            always = case.name in TELLING or (setting == FEW[0] and "many-small" not in case.name)
            found.append(pytest.param(case, setting, id=f"{setting}-{case}", marks=() if always else pytest.mark.soak))
    return found


@pytest.mark.parametrize(("case", "setting"), cases())
def test_a_device_conforms(case: Case, setting: Setting) -> None:
    quiet()
    case.body(DeviceStage(setting))
