"""Without the garbage collector: nothing holds a group once its calls have ended well."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist

import transfuse
from transfuse import PGTransport
from transfuse.testing.ranks import Ranks

pytestmark = pytest.mark.usefixtures("either_route")

Call = Callable[[int, dist.ProcessGroup], Any]


@pytest.fixture(autouse=True)
def without_collector() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def _send(pg: dist.ProcessGroup, **options: Any) -> None:
    PGTransport(pg, 20.0, "cpu").send_checkpoint(1, {"w": torch.ones(1 << 20)}, **options)


def _receive(pg: dist.ProcessGroup, state_dict: Callable[[], Any], step: int | None = None, **options: Any) -> None:
    PGTransport(pg, 20.0, "cpu", state_dict, **options).recv_checkpoint(0, step=step)


def all_is_well(rank: int, pg: dist.ProcessGroup) -> None:
    _receive(pg, lambda: {"w": torch.zeros(1 << 20)}) if rank else _send(pg)


def over_lanes(rank: int, pg: dist.ProcessGroup) -> None:
    options: dict[str, Any] = {"lanes": 2, "same_host": False}
    state = {"w": torch.ones(4 << 20)}
    if rank:
        _receive(pg, lambda: state, **options)
    else:
        PGTransport(pg, 20.0, "cpu", **options).send_checkpoint(1, state)


def healed(rank: int, pg: dist.ProcessGroup) -> None:
    state = {"w": torch.ones(2)}
    assert transfuse.heal(pg, 20.0, "cpu", lambda: state, step=2 - rank) == 2


@pytest.mark.parametrize("call", [all_is_well, over_lanes, healed])
def test_no_group_waits_for_the_garbage_collector(call: Call) -> None:
    with Ranks(2) as ranks:
        groups = [weakref.ref(pg) for pg in ranks.pgs]
        ranks.run(call)
    assert [group() for group in groups] == [None, None]
