"""The caller's streams: work that is queued there comes first, and what follows there sees the result."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch

import transfuse
from device import kind
from device.kind import KIND, slow_fill_
from device.moving import FEW, TIMEOUT, Setting, assert_same, mine, sample, there, transport
from transfuse._memory import streams

pytestmark = pytest.mark.usefixtures("accelerator", "nothing_is_left")

SETTINGS = [pytest.param(setting, id=str(setting)) for setting in FEW]
DIRECT = [param for param, setting in zip(SETTINGS, FEW, strict=True) if setting.direct]

SECONDS = 0.08


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("side", [False, True], ids=["default", "side"])
def test_neither_end_synchronises(setting: Setting, in_place: bool, side: bool) -> None:
    """The source fills its tensor late, sends it and overwrites it. The receiver reads at once on the same stream."""
    size = 100_000

    def work(rank: int, pg: Any) -> Any:
        with torch.Stream(device=mine(rank)) if side else torch.accelerator.current_stream():
            if rank == 0:
                held = torch.zeros(size, device=mine(0))
                transport(pg, setting).send_checkpoint([1], {"w": slow_fill_(held, 3.0, SECONDS)})
                held.fill_(-1.0)
                return None
            target = torch.zeros(size, device=mine(1))
            # Work of the receiver's own that must not overwrite what arrives.
            slow_fill_(target, 9.0, SECONDS)
            got = transport(pg, setting, {"w": target} if in_place else None).recv_checkpoint(0)["w"]
            return got.to(mine(1), non_blocking=True).mul(2).cpu()

    with setting.ranks() as ranks:
        _, doubled = ranks.run(work)
    assert torch.equal(doubled, torch.full((size,), 6.0))


@pytest.mark.parametrize("setting", DIRECT)
@pytest.mark.parametrize("sources", [1, 2])
def test_fresh_memory_is_used_only_after_the_callers_stream_has_let_go_of_it(setting: Setting, sources: int) -> None:
    """While the receive runs, the caller's stream gets more to do. The allocator may give memory that is in use there.

    The imitation overwrites new memory on the stream for which it was allocated.
    """
    state, busy = sample(), threading.Event()

    def keep_busy(progress: object) -> None:
        if not busy.is_set():
            slow_fill_(torch.empty(1, device=mine(sources)), 0.0, 2 * SECONDS)
            busy.set()

    def work(rank: int, pg: Any) -> Any:
        if rank < sources:
            held = there(state, rank)
            busy.wait(10)
            return transport(pg, setting).send_checkpoint([sources], held)
        return transport(pg, setting, progress=keep_busy).recv_checkpoint(list(range(sources)))

    with setting.ranks(sources + 1) as ranks:
        got = ranks.run(work)[-1]
    assert_same(state, got)


def test_a_device_without_an_index_is_the_one_that_is_current_in_the_constructor() -> None:
    state = sample()

    def work(rank: int, pg: Any) -> Any:
        made = transfuse.PGTransport(pg, TIMEOUT, KIND, same_host=False)
        # Another device is current when the transfer begins.
        kind.set_device(1 - rank)
        if rank == 0:
            return made.send_checkpoint([1], there(state, 0))
        return made.recv_checkpoint(0)

    with Setting().ranks() as ranks:
        got = ranks.run(work)[1]
    assert {str(got["w"].device), str(got["t"].device)} == {str(mine(1))}
    assert_same(state, got)


@pytest.mark.parametrize("make", [str, torch.device])
def test_a_device_with_an_index(make: Any) -> None:
    state, name = sample(), make(f"{KIND}:1")

    def work(rank: int, pg: Any) -> Any:
        if rank == 0:
            return transport(pg, Setting()).send_checkpoint([1], there(state, 0))
        return transfuse.PGTransport(pg, TIMEOUT, name, same_host=False).recv_checkpoint(0)

    with Setting().ranks() as ranks:
        got = ranks.run(work)[1]
    assert str(got["w"].device) == f"{KIND}:1"
    assert_same(state, got)


def test_helper_threads_leave_a_conversation_on_its_stream() -> None:
    """A stream object of torch remembers one entry only: a second one, in another thread, would overwrite it."""
    kind.set_device(0)
    entered, leave = threading.Event(), threading.Event()

    def current() -> int:
        return torch.accelerator.current_stream().stream_id

    with streams.Streams([mine(0)]).conversation():
        own, inherited = current(), streams.inherit()

        def help_() -> None:
            with inherited():
                assert current() == own
                entered.set()
                leave.wait(10)

        helper = threading.Thread(target=help_)
        with inherited():
            helper.start()
            assert entered.wait(10)
        assert current() == own
        leave.set()
        helper.join()
        with streams.for_the_caller():
            assert current() != own
        assert current() == own
    assert current() != own
