"""Cold pairs: NCCL makes a pair's communicator in its first operation, and must not be given another one meanwhile."""

from __future__ import annotations

from types import ModuleType

import pytest

from device.group import backend_of
from device.moving import Setting, assert_same, move, sample, there
from transfuse._wire import group as group_module
from transfuse._wire.group import Group

pytestmark = [pytest.mark.usefixtures("device", "nothing_is_left"), pytest.mark.timeout(90)]

#: Groups with gloo for messages, whose pairs make a communicator each.
LAZY = [Setting(), Setting(waits="host")]


def check(setting: Setting) -> None:
    state = sample(1)
    with setting.ranks(4) as ranks:
        for sources in ([0, 1], [2, 3]):  # First one way, then the other.
            held = {rank: there(state, rank) for rank in sources}
            for got, report in move(ranks, setting, held, dict.fromkeys({0, 1, 2, 3} - {*sources})).values():
                assert_same(state, got, in_place=False)
                assert report.failed == {}


@pytest.mark.parametrize("setting", LAZY, ids=str)
def test_pairs_are_connected_one_at_a_time(setting: Setting, device: ModuleType) -> None:
    check(setting)
    assert device.counters()["racing_posts"] == 0


def test_without_the_hold_they_race(device: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Group, "_queue", lambda self, peer: peer)
    for _ in range(5):
        check(LAZY[0])
        if device.counters()["racing_posts"]:
            return
    raise AssertionError("no two threads posted at once in five runs")


@pytest.mark.parametrize("eager", [False, True])
def test_a_rank_makes_few_communicators_and_uses_main_memory_beyond(
    eager: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(group_module, "COLD_PAIRS", 2)
    setting, state = Setting(eager=eager), sample(1)
    with setting.ranks(5) as ranks:
        for _ in range(2):
            for got, report in move(ranks, setting, {0: there(state, 0)}, dict.fromkeys(range(1, 5))).values():
                assert_same(state, got, in_place=False)
                assert report.failed == {}
        made = ranks.run(lambda rank, pg: backend_of(pg).communicators)
    # A bound group has one communicator for all.
    assert made[0] == (1 if eager else 2)
    assert eager or sorted(made[1:]) == [0, 0, 1, 1]
