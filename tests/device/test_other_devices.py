"""States on devices that are not the current one, with work pending on the caller's side streams there."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import safetensors.torch
import torch
from torch.distributed.checkpoint.state_dict_loader import load

import transfuse
from device import kind
from device.kind import slow_fill_
from device.moving import FEW, Setting, mine, there, transport
from hub_asking import ask
from transfuse.dcp import PeerReader

pytestmark = pytest.mark.usefixtures("accelerator", "nothing_is_left")

SIZE, SECONDS = 100_000, 0.15
TOKEN = "a token of many letters"
WEIGHTS = "/live/model/resolve/main/model.safetensors"


@contextmanager
def aside() -> Iterator[None]:
    """Device 0 is current, and this thread works on a side stream of device 1."""
    before = torch.accelerator.current_stream(mine(1))
    kind.set_device(0)
    torch.accelerator.set_stream(torch.Stream(device=mine(1)))
    kind.set_device(0)
    try:
        yield
    finally:
        torch.accelerator.set_stream(before)
        kind.set_device(0)


def pending() -> dict[str, torch.Tensor]:
    """Targets on device 1 that work which is still queued fills with nines."""
    return {name: slow_fill_(torch.zeros(SIZE, device=mine(1)), 9.0, SECONDS) for name in ("v", "w")}


def held() -> dict[str, torch.Tensor]:
    return {"v": torch.full((SIZE,), 3.0), "w": torch.full((SIZE,), 4.0)}


def doubled(target: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """What work that the caller queues next, on the same stream, makes of them."""
    return {name: tensor.mul(2).cpu() for name, tensor in target.items()}


def check(found: dict[str, torch.Tensor]) -> None:
    assert {name: {float(tensor.min()), float(tensor.max())} for name, tensor in found.items()} == {
        "v": {6.0},
        "w": {8.0},
    }


@pytest.mark.parametrize("options", [{}, {"atomic": True, "delta": True}], ids=["", "atomic-delta"])
@pytest.mark.parametrize("how", ["receive", "dcp"])
@pytest.mark.parametrize("setting", FEW, ids=str)
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_targets_on_another_device(setting: Setting, how: str, options: dict[str, Any]) -> None:
    def work(rank: int, pg: Any) -> Any:
        if rank == 1:
            transport(pg, setting).send_checkpoint([0], there(held(), 1))
            return None
        with aside():
            target = pending()
            if how == "receive":
                transport(pg, setting, target, **options).recv_checkpoint(1)
            else:
                with PeerReader(transport(pg, setting, **options), [1]) as reader:
                    load(target, storage_reader=reader, no_dist=True)
            return doubled(target)

    with setting.ranks() as ranks:
        check(ranks.run(work)[0])


@pytest.mark.parametrize("what", ["serve", "hub"])
def test_readers_see_what_a_change_has_queued_on_another_device(what: str) -> None:
    with aside():
        state = {name: torch.zeros(SIZE, device=mine(1)) for name in ("v", "w")}
        serving: Any = transfuse.serve(state, same_host=False) if what == "serve" else transfuse.hub(state)
        with serving:
            for turn in range(2):
                with serving.mutating():
                    for tensor in state.values():
                        slow_fill_(tensor, float(turn + 1), SECONDS)
                if what == "serve":
                    got = transfuse.fetch(serving.address, same_host=False).state
                else:
                    got = safetensors.torch.load(ask(serving.endpoint, "GET", WEIGHTS).body)
                assert {float(value) for one in got.values() for value in (one.min(), one.max())} == {turn + 1.0}


def test_a_fetch_into_targets_on_another_device() -> None:
    with aside(), transfuse.serve(held(), token=TOKEN) as server:
        target = pending()
        transfuse.fetch(server.address, target, token=TOKEN)
        check(doubled(target))
