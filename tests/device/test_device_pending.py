"""``wait=False`` with targets on an accelerator: held in main memory, installed on the caller's stream."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch

from device.kind import slow_fill_
from device.mirror import devices_of, to_cpu
from device.moving import Setting, assert_same, blank, changed, mine, sample, there, transport
from transfuse import Pending

pytestmark = pytest.mark.usefixtures("accelerator", "nothing_is_left")

SETTING = Setting(direct=False)


def wait_for(pending: Pending[Any]) -> None:
    until = time.monotonic() + 20
    while not pending.done():
        assert time.monotonic() < until
        time.sleep(0.001)
    assert pending.error is None


@pytest.mark.parametrize("side", [False, True], ids=["default", "side"])
def test_work_queued_before_install_comes_first_and_work_queued_afterwards_sees_it(side: bool) -> None:
    state = sample()
    own = there(blank(state), 1)

    def work(rank: int, pg: Any) -> Any:
        if rank == 0:
            return transport(pg, SETTING).send_checkpoint(1, there(state, 0))
        with torch.Stream(device=mine(1)) if side else torch.accelerator.current_stream():
            pending = transport(pg, SETTING, own).recv_checkpoint(0, wait=False)
            wait_for(pending)
            assert_same(blank(state), own, in_place=True)
            slow_fill_(own["w"], 9.0, 0.08)
            got = pending.install()
            assert got["w"] is own["w"]
            assert pending.report is not None
            assert pending.report.held_bytes > 0
            return own["w"].mul(2).cpu()

    with SETTING.ranks() as ranks:
        _, doubled = ranks.run(work)
    assert torch.equal(doubled, state["w"].mul(2))
    assert_same(state, own, in_place=True)
    assert devices_of(own) == {str(mine(1))}


def test_with_delta_and_casts() -> None:
    state = sample()
    own = there(changed(state), 1)
    narrow = {"w": torch.zeros(1000, 30, dtype=torch.bfloat16), "t": torch.zeros(30, 1000, dtype=torch.bfloat16).t()}
    wide = {"w": torch.randn(1000, 30), "t": torch.randn(1000, 30)}
    there_narrow = there(narrow, 1)

    def work(rank: int, pg: Any) -> Any:
        if rank == 0:
            transport(pg, SETTING).send_checkpoint(1, there(state, 0))
            return transport(pg, SETTING).send_checkpoint(1, there(wide, 0))
        pending = transport(pg, SETTING, own, delta=True).recv_checkpoint(0, wait=False)
        wait_for(pending)
        pending.install()
        assert pending.report is not None
        assert 0 < pending.report.held_bytes <= pending.report.bytes
        assert pending.report.kept_bytes > 0
        transport(pg, SETTING, there_narrow, cast=True).recv_checkpoint(0, wait=False).install()
        return None

    with SETTING.ranks() as ranks:
        ranks.run(work)
    assert_same(state, own, in_place=True)
    for name, leaf in to_cpu(there_narrow).items():
        assert torch.equal(leaf, wide[name].bfloat16())


def test_a_group_whose_parcels_travel_on_the_device_is_refused() -> None:
    setting = Setting()

    def work(rank: int, pg: Any) -> None:
        with pytest.raises(ValueError, match="wait=False needs a group"):
            transport(pg, setting, there(blank(sample()), rank)).recv_checkpoint(1 - rank, wait=False)

    with setting.ranks() as ranks:
        ranks.run(work)
