"""A state of a device arrives exactly, in every kind of group: fresh, in place, and again over the same group."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from device.mirror import devices_of
from device.moving import SETTINGS, Setting, assert_same, beside, blank, mine, move, sample, there, transport
from transfuse._wire.group import Group

pytestmark = pytest.mark.usefixtures("accelerator", "nothing_is_left")


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("verify", [None, True])
def test_fresh_and_in_place(setting: Setting, verify: bool | None) -> None:
    with setting.ranks() as ranks:
        for seed in range(2):
            state = sample(seed)
            sources = {0: there(state, 0)}
            ((got, report),) = move(ranks, setting, sources, {1: None}, verify=verify).values()
            assert_same(state, got)
            # Fresh tensors lie where the wire is: on this rank's device, or in main memory.
            assert devices_of(got) == {str(mine(1)) if setting.direct else "cpu"}
            assert report.route == "group"

            own = there(blank(state), 1)
            ((got, _),) = move(ranks, setting, sources, {1: own}, verify=verify).values()
            assert_same(state, got, in_place=True)
            assert_same(state, own, in_place=True)
            assert got["w"] is own["w"]
            assert devices_of(got) == {str(mine(1))}


@pytest.mark.parametrize("setting", SETTINGS)
def test_both_ways_at_once(setting: Setting) -> None:
    """Both ranks send to each other at the same time, several times."""
    with setting.ranks() as ranks:
        for round_ in range(3):
            states = {rank: sample(10 * round_ + rank) for rank in range(2)}

            def swap(rank: int, pg: Any, states: dict[int, Any] = states) -> Any:
                held = there(states[rank], rank)
                with beside(rank) as pool:
                    sending = pool.submit(transport(pg, setting).send_checkpoint, [1 - rank], held)
                    got = transport(pg, setting).recv_checkpoint(1 - rank)
                    sending.result()
                return got

            for rank, got in enumerate(ranks.run(swap)):
                assert_same(states[1 - rank], got)


@pytest.mark.parametrize("eager", [False, True])
@pytest.mark.parametrize("cpu", [False, True])
def test_what_the_library_knows_of_the_group(cpu: bool, eager: bool) -> None:
    with Setting(cpu=cpu, eager=eager).ranks() as ranks:
        group = Group(ranks.pgs[0], mine(0))
        assert group.control == (torch.device("cpu") if cpu else mine(0))
        assert (group.tagged, group.agrees, group.polls) == (cpu, cpu, True)
        assert group.one_order is eager
        assert not group.relays
        if cpu:
            other = Group(ranks.pgs[0], torch.device("cpu"))
            assert (other.tagged, other.polls, other.control) == (True, False, torch.device("cpu"))
