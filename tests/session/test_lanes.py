"""Lanes: parcels travel over several connections, and a connection that fails costs nothing but time."""

from __future__ import annotations

import gc
import logging
import os
import socket
import threading
import time
from contextlib import suppress
from typing import Any

import pytest
import torch

import transfuse
from laned import NBYTES, TIMEOUT, before_each_round, move, reports, state
from transfuse._session.rounds import RoundsIn, RoundsOut
from transfuse._timeouts import Patience
from transfuse._wire.messages import Place
from transfuse._wire.pool import Pool
from transfuse._wire.stream import Stream
from transfuse.testing.exact import assert_exact
from transfuse.testing.ranks import Ranks

pytestmark = pytest.mark.usefixtures("needs_streams")


@pytest.fixture(autouse=True)
def small_parcels(monkeypatch: pytest.MonkeyPatch, group_route: None) -> None:
    """Many parcels and bursts in a small state."""
    monkeypatch.setenv("TRANSFUSE_PARCEL_BYTES", str(64 * 1024))
    monkeypatch.setenv("TRANSFUSE_BURST_BYTES", str(256 * 1024))


@pytest.mark.parametrize("connections", [2, 3, 5])
@pytest.mark.parametrize("options", [{}, {"verify": False}, {"atomic": True}, {"delta": True}], ids=str)
def test_every_byte_arrives(connections: int, options: dict[str, Any]) -> None:
    outcomes, _ = move(lanes=connections, times=2, **options)
    sent, received = reports(outcomes)
    assert sent.bytes == received.bytes
    assert sent.parcels == received.parcels
    assert received.relayed_bytes == 0
    assert received.by_source == {0: received.bytes}


def test_several_sources() -> None:
    outcomes, _ = move(2, lanes=2, times=2)
    received = reports(outcomes)[-1]
    assert sum(received.by_source.values()) == received.bytes


def test_a_rate_holds_over_all_connections() -> None:
    rate = NBYTES * 2.0
    outcomes, _ = move(lanes=3, max_bytes_per_second=rate)
    assert reports(outcomes)[-1].seconds > 0.7 * NBYTES / rate


def test_lanes_are_kept_and_closed() -> None:
    numbers: list[set[int]] = []
    lock = threading.Lock()

    def look(rank: int, transport: transfuse.PGTransport) -> None:
        pool: Pool = transport._lanes
        with lock:
            numbers.append({number for some in pool._idle.values() for number in some})

    outcomes, made = move(lanes=3, times=3, between=look)
    assert reports(outcomes)[-1].connections == 3
    assert all(len(some) == 3 for some in numbers)
    assert len(set.union(*numbers)) == 3
    for transport in made:
        with transport:
            assert len(transport._lanes) == 3
        assert len(transport._lanes) == 0


@pytest.mark.parametrize(("receiver", "source"), [(1, 4), (4, 1)])
def test_either_end_may_forbid_them(receiver: int, source: int) -> None:
    outcomes, made = move(lanes=receiver, source_options={"lanes": source})
    assert [report.connections for report in reports(outcomes)] == [1, 1]
    assert [len(transport._lanes) for transport in made] == [1, 1]


@pytest.mark.parametrize("wrong", [0, 17, -1])
def test_impossible_numbers_are_refused(wrong: int) -> None:
    with pytest.raises(ValueError, match=rf"lanes must be from 1 to 16, got {wrong}"):
        transfuse.PGTransport(_Group(), TIMEOUT, "cpu", lanes=wrong)


class _Group:
    def send(self, tensors: list[torch.Tensor], rank: int, tag: int) -> Any: ...

    def recv(self, tensors: list[torch.Tensor], rank: int, tag: int) -> Any: ...


@pytest.mark.parametrize("end", [RoundsIn, RoundsOut])
@pytest.mark.parametrize("after", [0, 1, 5])
def test_a_lane_that_breaks_costs_nothing(end: Any, after: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """One lane's connection is closed under way. The others bring what it owed."""
    lock, seen = threading.Lock(), [0]
    broken: list[Stream] = []
    is_broken = threading.Event()

    def break_one(_: Any, lane: Stream | None) -> None:
        if lane is None:
            is_broken.wait(TIMEOUT / 2)  # Otherwise it brings everything, on a busy machine.
            return
        with lock:
            seen[0] += 1
            breaks = seen[0] > after and not broken
            if breaks:
                broken.append(lane)
        if breaks:
            lane.cut()
            is_broken.set()

    before_each_round(monkeypatch, end, break_one)
    outcomes, _ = move(lanes=3)
    reports(outcomes)  # Every byte was compared.
    assert broken


def test_a_lane_that_falls_silent_costs_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """One of the source's lanes never answers. Its parcels come over the others, before the timeout."""
    silent: list[Stream] = []
    lock = threading.Lock()
    go_on, is_silent = threading.Event(), threading.Event()

    def silence_one(_: Any, lane: Stream | None) -> None:
        if lane is None:
            is_silent.wait(TIMEOUT / 2)  # Otherwise it brings everything, on a busy machine.
            return
        with lock:
            if silent:
                return
            silent.append(lane)
        is_silent.set()
        go_on.wait(60)

    before_each_round(monkeypatch, RoundsOut, silence_one)
    monkeypatch.setattr(Patience, "lane", property(lambda self: 1.0))
    try:
        outcomes, _ = move(lanes=3)
    finally:
        go_on.set()
    assert silent
    reports(outcomes)


def test_a_source_that_falls_silent_on_all_its_connections(monkeypatch: pytest.MonkeyPatch) -> None:
    """One of two sources freezes midway. The other one brings the rest, and nothing lands after the receive."""
    go_on, silent = threading.Event(), threading.Event()

    def silence(outgoing: RoundsOut, _: Stream | None) -> None:
        if outgoing._channel.group.rank() == 1 and outgoing._channel.peer == 2 and outgoing.parcels > 2:
            silent.set()
            go_on.wait(100)
        elif outgoing._channel.group.rank() == 0 and outgoing.parcels > 2:
            silent.wait(1)  # Otherwise it brings everything, on a busy machine.

    before_each_round(monkeypatch, RoundsOut, silence)
    seen: list[Any] = []

    def work(rank: int, pg: Any) -> Any:
        target = state(7, zeros=True)
        transport = transfuse.PGTransport(pg, 4.0, "cpu", (lambda: target) if rank == 2 else None, lanes=3)
        if rank < 2:
            return transport.send_checkpoint([2], state(1))
        try:
            assert_exact(state(1), transport.recv_checkpoint([0, 1]))
            target["large"].zero_()
            seen.append(target["large"])
        finally:
            go_on.set()
        return transport.report

    with Ranks(3, 60) as ranks:
        outcomes = ranks.outcomes(work)
    assert silent.is_set()
    outcomes[2].get()
    outcomes[0].get()
    assert isinstance(outcomes[1].error, transfuse.SendFailed)
    assert not seen[0].any()


def test_places_that_lead_nowhere_cost_a_line(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The source says that it listens where nobody does, or where somebody else does."""
    with socket.create_server(("127.0.0.1", 0)) as stranger:
        address = f"127.0.0.1:{stranger.getsockname()[1]}"
        monkeypatch.setattr(Pool, "place", lambda self, peer: Place(address, bytes(32)))
        with caplog.at_level(logging.WARNING):
            outcomes, _ = move(lanes=3)
            # The transfer does not wait for lanes that wait for the stranger's word.
            until = time.monotonic() + 20
            while "could not be made, going on without them" not in caplog.text:
                assert time.monotonic() < until
                time.sleep(0.05)
    assert [report.connections for report in reports(outcomes)] == [1, 1]


def sockets() -> int:
    count = 0
    for fd in os.listdir("/proc/self/fd"):
        with suppress(FileNotFoundError):  # Closed meanwhile; among them the one by which the directory is read.
            count += os.readlink(f"/proc/self/fd/{fd}").startswith("socket:")
    return count


def test_garbage_closes_them() -> None:
    outcomes, made = move(lanes=4)
    reports(outcomes)
    lanes = sum(len(transport._lanes) for transport in made)  # On a busy machine not all eight are made in time.
    assert lanes > 2
    held = sockets()
    made.clear()
    del outcomes
    gc.collect()
    until = time.monotonic() + 20
    while sockets() > held - lanes and time.monotonic() < until:
        time.sleep(0.05)
    assert sockets() <= held - lanes


def test_a_forked_child_drops_them() -> None:
    """The child must not use its parent's streams."""
    gc.collect()  # Groups that earlier tests left as garbage do not survive their end in a child either.
    outcomes, made = move(lanes=3)
    reports(outcomes)
    groups = [transport._group for transport in made]  # The groups themselves do not survive their end in a child.
    child = os.fork()
    if child == 0:
        code = 1
        try:
            empty = [len(transport._lanes) for transport in made] == [0, 0]
            for transport in made:
                transport.close()
            made.clear()
            gc.collect()
            code = 0 if empty and groups else 2
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert [len(transport._lanes) for transport in made] == [3, 3]
