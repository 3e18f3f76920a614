"""Without the garbage collector: nothing holds a group once its calls have ended, and an error holds no state."""

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
from transfuse._errors import TransfuseError, let_go
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


def _raise(*_: object) -> None:
    raise ValueError("no")


def all_is_well(rank: int, pg: dist.ProcessGroup) -> None:
    _receive(pg, lambda: {"w": torch.zeros(1 << 20)}) if rank else _send(pg)


def over_lanes(rank: int, pg: dist.ProcessGroup) -> None:
    options: dict[str, Any] = {"lanes": 2, "same_host": False}
    state = {"w": torch.ones(4 << 20)}
    if rank:
        _receive(pg, lambda: state, **options)
    else:
        PGTransport(pg, 20.0, "cpu", **options).send_checkpoint(1, state)


def another_step(rank: int, pg: dist.ProcessGroup) -> None:
    _receive(pg, lambda: {"w": torch.zeros(1 << 20)}, step=2) if rank else _send(pg, step=1)


def another_shape(rank: int, pg: dist.ProcessGroup) -> None:
    _receive(pg, lambda: {"w": torch.zeros(2)}) if rank else _send(pg)


def no_target(rank: int, pg: dist.ProcessGroup) -> None:
    _receive(pg, _raise) if rank else _send(pg)


def no_state(rank: int, pg: dist.ProcessGroup) -> None:
    if rank:
        _receive(pg, lambda: {"w": torch.zeros(1 << 20)})
    else:
        PGTransport(pg, 20.0, "cpu").send(1, _raise)


def stopped_midway(rank: int, pg: dist.ProcessGroup) -> None:
    _receive(pg, lambda: {"w": torch.zeros(1 << 20)}, progress=_raise) if rank else _send(pg)


def healed(rank: int, pg: dist.ProcessGroup) -> None:
    state = {"w": torch.ones(2)}
    assert transfuse.heal(lambda: state, step=2 - rank, group=pg, timeout=20.0) == 2


def not_healed(rank: int, pg: dist.ProcessGroup) -> None:
    state = {"w": torch.ones(2 + rank)}
    transfuse.heal(lambda: state, step=2 - rank, group=pg, timeout=20.0)


@pytest.mark.parametrize(
    "call",
    [all_is_well, over_lanes, another_step, another_shape, no_target, no_state, stopped_midway, healed, not_healed],
)
def test_no_group_waits_for_the_garbage_collector(call: Call) -> None:
    def quiet(rank: int, pg: dist.ProcessGroup) -> bool:
        try:
            call(rank, pg)
        except (TransfuseError, ValueError):
            return False
        return True

    with Ranks(2) as ranks:
        groups = [weakref.ref(pg) for pg in ranks.pgs]
        assert ranks.run(quiet) == [call in (all_is_well, over_lanes, healed)] * 2
    assert [group() for group in groups] == [None, None]


def test_an_error_that_is_kept_keeps_no_state() -> None:
    kept: list[BaseException] = []
    states: list[weakref.ref[torch.Tensor]] = []

    def call(rank: int, pg: dist.ProcessGroup) -> None:
        state = {"w": torch.ones(1 << 20 if rank else 2)}
        states.append(weakref.ref(state["w"]))
        try:
            if rank:
                _receive(pg, lambda: state)
            else:
                PGTransport(pg, 20.0, "cpu").send_checkpoint(1, state)
        except TransfuseError as error:
            kept.append(error.with_traceback(None))  # Without the frame of this function.

    with Ranks(2) as ranks:
        ranks.run(call)
    assert len(kept) == 2
    assert [state() for state in states] == [None, None]


def test_frames_of_others_stay_as_they_are() -> None:
    def callback() -> None:
        told = "what a debugger shows"
        raise ValueError(told)

    def call(rank: int, pg: dist.ProcessGroup) -> None:
        _receive(pg, callback) if rank else _send(pg)

    with Ranks(2) as ranks:
        error = ranks.outcomes(call)[1].error
    assert isinstance(error, ValueError)
    at = error.__traceback__
    while at is not None and at.tb_frame.f_code is not callback.__code__:
        at = at.tb_next
    assert at is not None
    assert at.tb_frame.f_locals["told"] == "what a debugger shows"


def test_errors_in_a_circle_and_frames_that_run() -> None:
    one, other = ValueError("one"), ValueError("other")
    one.__cause__, other.__context__ = other, one
    try:
        raise one
    except ValueError as error:
        let_go(error)
    assert one.__cause__ is other
