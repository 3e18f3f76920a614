"""Streams between hosts, which are network namespaces: firewalls, links that go down, connections that are cut.

Skipped, with the reason, where namespaces cannot be made.
"""

from __future__ import annotations

import logging
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from benchmarks.hosts import LINK, Hosts, Unavailable, call

from one_transport import Ended, Left, both, left, look, move, opens, set_up
from several_hosts import SECOND, Connection, Firewall, add_second_network, make, ranks_on, second_address
from transfuse._wire import pool
from transfuse.testing.ranks import Fleet

pytestmark = [pytest.mark.usefixtures("needs_streams"), pytest.mark.timeout(200)]

PORT = 29600
SECONDS = 3.0
#: So slow that a transfer takes two seconds.
SLOWLY = {"max_bytes_per_second": 4e6}


@contextmanager
def two_hosts(monkeypatch: pytest.MonkeyPatch, **how: Any) -> Iterator[tuple[Hosts, Fleet]]:
    """Rank 0 and rank 1 on two hosts. Each listens for streams on a port that is known."""
    monkeypatch.setenv("TRANSFUSE_PORT", str(PORT))
    with make(2) as hosts, ranks_on(hosts, [0, 1], **how) as fleet:
        yield hosts, fleet


def streams(fleet: Fleet) -> list[set[Connection]]:
    """Of each rank: its open connections that are streams."""
    return [{one for one in there if PORT in (one.local_port, one.remote_port)} for there in both(fleet, opens)]


class _Lines(logging.Handler):
    lines: list[str] = []  # noqa: RUF012 - of a worker

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def listen_to_log(rank: int) -> None:
    logging.getLogger("transfuse").addHandler(_Lines(logging.WARNING))


def warnings(rank: int) -> list[str]:
    return _Lines.lines


def try_again_at_once(rank: int) -> None:
    setattr(pool, "POOL_AGAIN_SECONDS", 0.0)  # noqa: B010


def ended_well(ended: list[Ended]) -> None:
    for one in ended:
        assert (one.error, one.wrong) == (None, []), one.text


# -------------------------------------------------------------------------------------------------------- firewalls


@pytest.mark.parametrize("closed", [0, 1], ids=["source", "receiver"])
@pytest.mark.parametrize("how", ["drop", "reject"])
def test_a_firewall_in_one_direction_is_no_obstacle(closed: int, how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One host takes no new connections. So its process dials, for the conversation and for its lanes."""
    with two_hosts(monkeypatch) as (hosts, fleet):
        both(fleet, listen_to_log)
        both(fleet, set_up, 10.0, {"lanes": 3})
        firewall = Firewall(hosts)
        if how == "drop":
            firewall.drop_new(to=[closed])
        else:
            firewall.reject_port(PORT, to=closed)
        for seed in range(2):
            ended = both(fleet, move, seed)
            ended_well(ended)
            assert [one.connections for one in ended] == [3, 3]
        there = streams(fleet)
        said = both(fleet, warnings)
    assert [len(some) for some in there] == [3, 3]
    # The end that was dialled has the port.
    assert all((one.local_port == PORT) is (rank != closed) for rank in range(2) for one in there[rank])
    assert said == [[], []]


@pytest.mark.parametrize("how", ["drop", "reject", "drop the port"])
def test_where_no_connection_can_be_made_the_group_carries_all(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One line at each end says so; it is not tried again at once; and streams are used when it is, and succeeds."""
    with two_hosts(monkeypatch) as (hosts, fleet):
        both(fleet, listen_to_log)
        both(fleet, set_up, 10.0, {"lanes": 3})
        firewall = Firewall(hosts)
        if how == "drop":
            firewall.drop_new()
        elif how == "reject":
            firewall.reject_new(both(fleet, opens))
        else:
            firewall.drop({PORT})
        for seed in range(2):
            ended_well(both(fleet, move, seed))
            assert streams(fleet) == [set(), set()]
        said = both(fleet, warnings)
        for rank, lines in enumerate(said):
            (line,) = lines
            assert f"rank {1 - rank}: no connection could be made in either direction; its bytes go over the" in line
        firewall.open()
        both(fleet, try_again_at_once)
        ended_well(both(fleet, move, 2))
        assert [len(some) for some in streams(fleet)] == [3, 3]


# -------------------------------------------------------------------------------------------------- two interfaces


@pytest.mark.parametrize("interface", [LINK, SECOND])
def test_streams_listen_and_connect_on_the_interface_of_the_group_and_on_no_other(
    interface: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRANSFUSE_PORT", str(PORT))
    with make(2) as hosts:
        add_second_network(hosts)
        addresses = [hosts.address(host) if interface == LINK else second_address(host) for host in range(2)]
        with ranks_on(hosts, [0, 1], interface=interface) as fleet:
            both(fleet, set_up, 10.0, {"lanes": 2})
            ended_well(both(fleet, move, 0))
            there = streams(fleet)
            listening = [call("ip", "netns", "exec", hosts.namespace(host), "ss", "-Htln") for host in range(2)]
    for rank in range(2):
        assert {(one.local, one.remote) for one in there[rank]} == {(addresses[rank], addresses[1 - rank])}
        assert len(there[rank]) == 2
        places = [line.split()[3] for line in listening[rank].splitlines()]
        assert [place for place in places if place.endswith(f":{PORT}")] == [f"{addresses[rank]}:{PORT}"]


# ---------------------------------------------------------------------------------------------- in the middle of it


def nothing_is_left(fleet: Fleet) -> None:
    assert both(fleet, left, 10.0) == [Left(0, 0, canaries=False, written=False)] * 2


@pytest.mark.parametrize("host", [0, 1], ids=["source", "receiver"])
def test_a_link_that_goes_down(host: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both ends notice within their timeout, and nothing is left. When it is up again, the next transfer succeeds."""
    with two_hosts(monkeypatch) as (hosts, fleet):
        both(fleet, set_up, SECONDS, SLOWLY)
        ended_well(both(fleet, move, 0))
        both(fleet, look)
        fleet.start(move, 1)
        fleet.wait_for(1, "moving", 30)
        call("ip", "-n", hosts.switch, "link", "set", f"port{host}", "down")
        cut = time.monotonic()
        ended = [outcome.get() for outcome in fleet.outcomes(60)]
        for one in ended:
            assert one.error in ("PeerTimeout", "PeerLost"), one
            assert one.at - cut < SECONDS + 5
        nothing_is_left(fleet)
        assert streams(fleet) == [set(), set()]
        call("ip", "-n", hosts.switch, "link", "set", f"port{host}", "up")
        ended_well(both(fleet, move, 2))
        nothing_is_left(fleet)


def test_a_link_that_is_down_for_a_moment_costs_only_time(monkeypatch: pytest.MonkeyPatch) -> None:
    with two_hosts(monkeypatch) as (hosts, fleet):
        both(fleet, set_up, 10.0, SLOWLY)
        fleet.start(move, 1)
        fleet.wait_for(1, "moving", 30)
        call("ip", "-n", hosts.switch, "link", "set", "port0", "down")
        time.sleep(1.0)
        call("ip", "-n", hosts.switch, "link", "set", "port0", "up")
        ended_well([outcome.get() for outcome in fleet.outcomes(60)])


@pytest.mark.parametrize("lanes", [1, 3])
@pytest.mark.parametrize("host", [0, 1], ids=["source", "receiver"])
def test_connections_that_somebody_else_cuts(host: int, lanes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """An administrator, or a firewall that forgets: both ends learn of it at once, and the next transfer succeeds."""
    if shutil.which("ss") is None:
        pytest.skip("`ss` is not installed (Debian: apt-get install iproute2)")
    with two_hosts(monkeypatch) as (hosts, fleet):
        both(fleet, set_up, 10.0, {**SLOWLY, "lanes": lanes})
        ended_well(both(fleet, move, 0))
        both(fleet, look)
        fleet.start(move, 1)
        fleet.wait_for(1, "moving", 30)
        # `dport` is the port of the other end: one of the two has the known one.
        which = f"( sport = :{PORT} or dport = :{PORT} )"
        try:
            killed = call("ip", "netns", "exec", hosts.namespace(host), "ss", "-HK", "state", "established", which)
        except Unavailable as error:
            killed = str(error)
        cut = time.monotonic()
        ended = [outcome.get() for outcome in fleet.outcomes(60)]
        if len(killed.splitlines()) != lanes or "failed" in killed:
            pytest.skip(f"`ss -K` cuts no connections here: {killed}")
        for one in ended:
            assert one.error == "PeerLost", one
            assert one.at - cut < 5
        nothing_is_left(fleet)
        ended_well(both(fleet, move, 2))
        assert [len(some) for some in streams(fleet)] == [lanes, lanes]
        nothing_is_left(fleet)
