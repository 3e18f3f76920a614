"""Lanes: parcels travel over several connections, and a connection that fails costs nothing but time."""

from __future__ import annotations

import gc
import logging
import os
import threading
import time
from typing import Any

import pytest
import torch

import transfuse
from laned import NBYTES, TIMEOUT, before_each_burst, move, reports, state
from transfuse.session import lanes as session_lanes
from transfuse.session.bursts import Incoming, Outgoing
from transfuse.testing.exact import assert_exact
from transfuse.testing.ranks import Ranks
from transfuse.timeouts import Patience
from transfuse.wire import lanes
from transfuse.wire.channel import Channel
from transfuse.wire.lanes import Entrance, Lane, Pool
from transfuse.wire.messages import Address


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
            numbers.append({number for some in pool._lanes.values() for number in some})

    outcomes, made = move(lanes=3, times=3, between=look)
    assert reports(outcomes)[-1].connections == 3
    assert all(len(some) == 2 for some in numbers)
    assert len(set.union(*numbers)) == 2
    for transport in made:
        with transport:
            assert len(transport._lanes) == 2
        assert len(transport._lanes) == 0


@pytest.mark.parametrize(("receiver", "source"), [(1, 4), (4, 1)])
def test_either_end_may_forbid_them(receiver: int, source: int) -> None:
    outcomes, made = move(lanes=receiver, source_options={"lanes": source})
    assert [report.connections for report in reports(outcomes)] == [1, 1]
    assert not any(len(transport._lanes) for transport in made)


@pytest.mark.parametrize("wrong", [0, 17, -1])
def test_impossible_numbers_are_refused(wrong: int) -> None:
    with pytest.raises(ValueError, match=rf"lanes must be from 1 to 16, got {wrong}"):
        transfuse.PGTransport(_Group(), TIMEOUT, "cpu", lanes=wrong)


class _Group:
    def send(self, tensors: list[torch.Tensor], rank: int, tag: int) -> Any: ...

    def recv(self, tensors: list[torch.Tensor], rank: int, tag: int) -> Any: ...


@pytest.mark.parametrize("end", [Incoming, Outgoing])
@pytest.mark.parametrize("after", [0, 1, 5])
def test_a_lane_that_breaks_costs_nothing(end: Any, after: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """One lane's connection is closed under way. The others bring what it owed."""
    lock, seen = threading.Lock(), [0]
    broken: list[Lane] = []

    def break_one(_: Any, lane: Lane | None) -> None:
        if lane is None:
            return
        with lock:
            seen[0] += 1
            breaks = seen[0] > after and not broken
            if breaks:
                broken.append(lane)
        if breaks:
            lane.break_off(0.0)

    before_each_burst(monkeypatch, end, break_one)
    outcomes, _ = move(lanes=3)
    reports(outcomes)  # Every byte was compared.
    assert broken


def test_a_lane_that_falls_silent_costs_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """One of the source's lanes never answers. Its parcels come over the others, before the timeout."""
    silent: list[Lane] = []
    lock = threading.Lock()
    go_on = threading.Event()

    def silence_one(_: Any, lane: Lane | None) -> None:
        with lock:
            if lane is None or silent:
                return
            silent.append(lane)
        go_on.wait(60)

    before_each_burst(monkeypatch, Outgoing, silence_one)
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

    def silence(outgoing: Outgoing, _: Lane | None) -> None:
        if outgoing._channel.group.rank() == 1 and outgoing._channel.peer == 2 and outgoing.parcels > 2:
            silent.set()
            go_on.wait(100)

    before_each_burst(monkeypatch, Outgoing, silence)
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


def test_who_cannot_prove_itself_gets_nothing(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Somebody connects to the ports, but does not know the secret."""
    original = lanes._proof

    def proof(key: bytes, number: int, *, by_source: bool) -> bytes:
        return original(key if by_source else key + b"?", number, by_source=by_source)

    talked: list[Channel] = []
    monkeypatch.setattr(lanes, "_proof", _for_receivers(original, proof))
    monkeypatch.setattr(session_lanes.LaneWorkers, "_talk", lambda self, lane, channel: talked.append(channel))
    with caplog.at_level(logging.WARNING):
        outcomes, _ = move(lanes=3)
    assert reports(outcomes)[-1].connections == 1
    assert not talked
    assert "going on without them: no proof over the new connection" in caplog.text


def _for_receivers(original: Any, wrong: Any) -> Any:
    """The source computes the right proofs, the receiver wrong ones."""

    def proof(key: bytes, number: int, *, by_source: bool) -> bytes:
        is_source_thread = threading.current_thread().name == "transfuse-lane-1"
        result: bytes = (original if is_source_thread else wrong)(key, number, by_source=by_source)
        return result

    return proof


def test_addresses_that_lead_nowhere_cost_a_line(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    original = Entrance.connect

    def connect(self: Entrance, address: Address | None, key: bytes, *, known: bool = False) -> None:
        nowhere = None if address is None else Address(address.number, address.key, b"\xff" * 170)
        original(self, nowhere, key, known=known)

    monkeypatch.setattr(Entrance, "connect", connect)
    with caplog.at_level(logging.WARNING):
        outcomes, made = move(lanes=3)
    assert [report.connections for report in reports(outcomes)] == [1, 1]
    assert not any(len(transport._lanes) for transport in made)
    assert "could not be made, going on without them" in caplog.text


def gloo_threads() -> set[int]:
    """The threads of this process, of Python and of gloo."""
    return set(map(int, os.listdir("/proc/self/task")))


def test_garbage_closes_them() -> None:
    before = gloo_threads()
    outcomes, made = move(lanes=4)
    reports(outcomes)
    assert [len(transport._lanes) for transport in made] == [3, 3]
    held = len(gloo_threads() - before)
    made.clear()
    del outcomes
    gc.collect()
    until = time.monotonic() + 20
    while len(gloo_threads() - before) > max(0, held - 6) and time.monotonic() < until:
        time.sleep(0.05)
    assert len(gloo_threads() - before) <= held - 6


def test_a_forked_child_drops_them() -> None:
    """The child has none of gloo's threads: it must neither use nor close its parent's lanes."""
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
    assert [len(transport._lanes) for transport in made] == [2, 2]
