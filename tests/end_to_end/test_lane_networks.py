"""Lanes between hosts, which are network namespaces: on which network they are, and what a firewall does to them."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from benchmarks.hosts import LINK

import transfuse
from several_hosts import (
    SECOND,
    SECONDS,
    Connection,
    Firewall,
    add_second_network,
    connections,
    make,
    ranks_on,
    received_on,
    run,
    second_address,
    small_parcels,
)
from transfuse._wire.channel import Channel
from transfuse._wire.stream import Stream
from transfuse.testing.exact import differences

pytestmark = pytest.mark.usefixtures("needs_streams")

LANES = 3


def state(seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {f"tensor{i}": torch.randn(1 << 18, generator=generator) for i in range(8)}


STATE_BYTES = sum(tensor.nbytes for tensor in state(0).values())


class Moved(NamedTuple):
    """What one end says of a transfer."""

    wrong: list[str]
    connections: int
    #: Warnings in the log.
    lines: list[str]
    seconds: float
    #: Connections that are there after it and were not there before.
    new: set[Connection]
    #: Bytes by interface.
    received: dict[str, int]


class _Lines(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def transfer(rank: int, options: dict[str, Any], times: int = 1, pause: float = 0.0, seconds: float = SECONDS) -> Moved:
    """In a worker: from rank 0 to rank 1, in place, several times with one transport, with a pause after each."""
    small_parcels()
    target, heard = state(2), _Lines()
    logging.getLogger("transfuse").addHandler(heard)
    transport = _transport(target, options, seconds)
    dist.barrier()
    before, came = connections(), {name: received_on(name) for name in (LINK, SECOND)}
    took, wrong = 0.0, []
    for number in range(times):
        began = time.monotonic()
        if rank == 0:
            transport.send_checkpoint([1], state(number))
        else:
            wrong += differences(state(number), transport.recv_checkpoint(0), in_place=True)
        took += time.monotonic() - began
        time.sleep(pause)
    received = {name: received_on(name) - already for name, already in came.items()}
    new = connections() - before
    dist.barrier()
    logging.getLogger("transfuse").removeHandler(heard)
    assert transport.report is not None
    return Moved(wrong, transport.report.connections, heard.lines, took, new, received)


def _transport(target: dict[str, torch.Tensor], options: dict[str, Any], seconds: float) -> transfuse.PGTransport:
    group = dist.group.WORLD
    assert group is not None
    options = {"same_host": False, "lanes": LANES, **options}
    return transfuse.PGTransport(group, timedelta(seconds=seconds), torch.device("cpu"), lambda: target, **options)


# --------------------------------------------------------------------------------------------------- two interfaces


def forget_interface(rank: int) -> None:
    """In a worker: the variable is only set while the group is made."""
    del os.environ["GLOO_SOCKET_IFNAME"]


def name_interface(rank: int, interface: str) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = interface


@pytest.mark.parametrize(
    ("interface", "name", "then"),
    [
        (LINK, "the other", "as it was"),
        (SECOND, "the other", "as it was"),
        (LINK, "loopback", "as it was"),
        (SECOND, "loopback", "unset"),
        (LINK, "the other", "unset"),
        (SECOND, "the other", "the other"),
    ],
)
def test_lanes_are_on_the_network_of_the_group(interface: str, name: str, then: str) -> None:
    """Whatever the host's name resolves to, and whatever becomes of GLOO_SOCKET_IFNAME when the group is there."""
    with make(2) as hosts:
        add_second_network(hosts)
        addresses = {LINK: [hosts.address(0), hosts.address(1)], SECOND: [second_address(0), second_address(1)]}
        (other,) = addresses.keys() - {interface}
        names = addresses[other] if name == "the other" else ["127.0.0.1"] * 2
        with ranks_on(hosts, [0, 1], interface=interface, names=names) as fleet:
            if then == "unset":
                run(fleet, forget_interface)
            elif then == "the other":
                run(fleet, name_interface, other)
            sent, received = run(fleet, transfer, {})
    assert received.wrong == []
    assert sent.connections == received.connections == LANES
    assert sent.lines == received.lines == []
    for moved, here, there in ((sent, 0, 1), (received, 1, 0)):
        ends = {(one.local, one.remote) for one in moved.new}
        assert ends == {(addresses[interface][here], addresses[interface][there])}
        assert len(moved.new) == LANES
    assert received.received[interface] >= STATE_BYTES
    assert received.received[other] < STATE_BYTES / 10


# -------------------------------------------------------------------------------------------------------- firewalls


def when_met(hook: Callable[[], object]) -> None:
    """In a worker: call ``hook`` once, when its conversation has got its own stream. It has no lanes by then."""
    move_to = Channel.move_to

    def move(channel: Channel, stream: Stream) -> None:
        move_to(channel, stream)
        Channel.move_to = move_to  # type: ignore[method-assign]
        hook()

    Channel.move_to = move  # type: ignore[method-assign, assignment]


def close_when_met(rank: int, firewall: Firewall) -> Moved:
    if rank == 1:
        when_met(firewall.drop_new)
    # Between the transfers those that connect give up.
    return transfer(rank, {}, times=2, pause=2.0)


def test_behind_a_firewall_the_one_connection_goes_on() -> None:
    """Only what is there already gets through. One line says so, however many transfers and lanes there are."""
    with make(2) as hosts, ranks_on(hosts, [0, 1]) as fleet:
        sent, received = run(fleet, close_when_met, Firewall(hosts))
    assert received.wrong == []
    assert sent.connections == received.connections == 1
    for moved, rank, peer in ((sent, 0, 1), (received, 1, 0)):
        assert len(moved.new) == 1
        assert len(moved.lines) <= 1
        for line in moved.lines:
            assert line.startswith(f"transfuse: rank {rank}: further connections to rank {peer} could not be made, ")
    assert sent.lines or received.lines


def fall_silent(rank: int, firewall: Firewall, seconds: float) -> Moved:
    """In a worker: when a quarter has arrived, all packets of all lanes are dropped."""
    before: set[Connection] = set()
    cut: set[int] = set()
    when_met(lambda: before.update(connections()))

    def watch(progress: dict[int, transfuse.Progress]) -> None:
        if not cut and progress[0].bytes > STATE_BYTES / 4:
            cut.update(one.local_port for one in connections() - before)
            firewall.drop(cut)

    # Slow enough that it is under way then.
    options: dict[str, Any] = {"max_bytes_per_second": 8e6} if rank == 0 else {"progress": watch}
    moved = transfer(rank, options, seconds=seconds)
    assert rank == 0 or len(cut) == LANES - 1, cut
    return moved


def test_lanes_that_fall_silent_under_way_cost_only_time() -> None:
    with make(2) as hosts, ranks_on(hosts, [0, 1]) as fleet:
        sent, received = run(fleet, fall_silent, Firewall(hosts), 4.0)
    assert received.wrong == []
    assert received.connections == LANES
    assert sent.lines == received.lines == []
