"""Ranks on several hosts, which are network namespaces of this machine; a second network between them; a firewall."""

from __future__ import annotations

import contextlib
import ctypes
import os
import pathlib
import socket
from collections.abc import Iterator, Sequence
from datetime import timedelta
from typing import Any, NamedTuple

import pytest
from benchmarks.hosts import LINK, Hosts, Unavailable, call, settle

from transfuse.testing.ranks import Fleet

__all__ = [
    "SECOND", "SECONDS", "Connection", "Firewall", "add_second_network", "connections", "make", "move_in", "ranks_on",
    "received_on", "run", "second_address", "small_parcels",
]  # fmt: skip

SECONDS = 20
#: The name of a host's interface on the second network.
SECOND = "second"
_CLONE_NEWUTS = 0x04000000


@contextlib.contextmanager
def make(count: int) -> Iterator[Hosts]:
    """Hosts; the test is skipped, with the reason, if there cannot be any."""
    with contextlib.ExitStack() as stack:
        try:
            hosts = stack.enter_context(Hosts(count, mbit=1000))
        except Unavailable as error:
            pytest.skip(str(error))
        yield hosts


@contextlib.contextmanager
def ranks_on(hosts: Hosts, placement: Sequence[int], **how: Any) -> Iterator[Fleet]:
    """Processes whose default group goes over the hosts' links. ``how``: see :func:`move_in`."""
    with Fleet(len(placement)) as fleet:
        run(fleet, move_in, [hosts.namespace(host) for host in placement], how)
        yield fleet


def run(fleet: Fleet, function: Any, *args: Any) -> list[Any]:
    fleet.start(function, *args)
    return [outcome.get() for outcome in fleet.outcomes(deadline=3 * SECONDS)]


def move_in(rank: int, namespaces: list[str], how: dict[str, Any]) -> None:
    """In a worker: move to a host. ``names``: the host's name for each rank. ``interface``: which the group uses."""
    if "names" in how:
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.unshare(_CLONE_NEWUTS) != 0:
            raise OSError(ctypes.get_errno(), "unshare")
        socket.sethostname(how["names"][rank])
    settle(namespaces[rank], timedelta(seconds=SECONDS), interface=how.get("interface", LINK))


# ---------------------------------------------------------------------------------------------- what a worker sees


class Connection(NamedTuple):
    """One end of a TCP connection in a worker's host."""

    local: str
    local_port: int
    remote: str
    remote_port: int


def connections() -> set[Connection]:
    """In a worker: all connections of its host that are open."""
    found = set()
    for line in pathlib.Path("/proc/thread-self/net/tcp").read_text().splitlines()[1:]:
        local, remote, state = line.split()[1:4]
        if state == "01":
            found.add(Connection(*_end(local), *_end(remote)))
    return found


def _end(text: str) -> tuple[str, int]:
    host, port = text.split(":")
    return socket.inet_ntoa(bytes.fromhex(host)[::-1]), int(port, 16)


def received_on(interface: str) -> int:
    """In a worker: how many bytes have come over an interface of its host so far; 0 if there is no such interface."""
    for line in pathlib.Path("/proc/thread-self/net/dev").read_text().splitlines():
        name, _, numbers = line.partition(":")
        if name.strip() == interface:
            return int(numbers.split()[0])
    return 0


# ------------------------------------------------------------------------------------------------ the second network


def second_address(host: int) -> str:
    return f"10.232.0.{host + 1}"


def add_second_network(hosts: Hosts) -> None:
    """Give every host an interface on another network."""
    call("ip", "-n", hosts.switch, "link", "add", "bridge2", "up", "type", "bridge")
    for host in range(hosts.count):
        name, port = hosts.namespace(host), f"second{host}"
        call("ip", "-n", hosts.switch, "link", "add", port, "type", "veth", "peer", "name", SECOND, "netns", name)
        call("ip", "-n", name, "link", "set", SECOND, "addrgenmode", "none", "up")
        call("ip", "-n", name, "address", "add", f"{second_address(host)}/24", "dev", SECOND)
        call("ip", "-n", hosts.switch, "link", "set", port, "addrgenmode", "none", "master", "bridge2", "up")


# ------------------------------------------------------------------------------------------------------- a firewall

#: Of a TCP packet over IPv4 without options: the flags, of which only SYN is set in the first of a connection.
_FIRST_PACKET = ("match", "ip", "protocol", "6", "0xff", "match", "u8", "0x02", "0x12", "at", "33")


class Firewall:
    """Drops packets on the switch, without a word, or has the hosts themselves reject new connections."""

    def __init__(self, hosts: Hosts) -> None:
        self._switch, self._ports = hosts.switch, [f"port{host}" for host in range(hosts.count)]
        self._namespaces = [hosts.namespace(host) for host in range(hosts.count)]
        self._addresses = [hosts.address(host) for host in range(hosts.count)]
        self._rules: list[tuple[str, str]] = []
        for port in self._ports:
            self._tc("qdisc", port, "replace", "root", "handle", "1:", "htb", "default", "1")
            for number in "12":
                self._tc("class", port, "add", "parent", "1:", "classid", f"1:{number}", "htb", "rate", "1gbit")
            self._tc("qdisc", port, "add", "parent", "1:2", "handle", "2:", "blackhole")

    def drop_new(self, to: Sequence[int] | None = None) -> None:
        """Drop what would make a new connection, to any host or to these. The old ones go on."""
        self._drop(*_FIRST_PACKET, to=to)

    def drop(self, local_ports: set[int]) -> None:
        """Drop all packets of the connections that have one of these ports at either end."""
        for port in sorted(local_ports):
            self._drop("match", "ip", "dport", str(port), "0xffff")
            self._drop("match", "ip", "sport", str(port), "0xffff")

    def reject_new(self, old: Sequence[set[Connection]]) -> None:
        """Let each host find others unreachable, but for its ``old`` connections."""
        for namespace, there in zip(self._namespaces, old, strict=True):
            for port in sorted({one.local_port for one in there}):
                rule = ("ipproto", "tcp", "sport", str(port), "lookup", "main")
                self._rule(namespace, "100", *rule)
            self._rule(namespace, "200", "to", "10.231.0.0/24", "ipproto", "tcp", "unreachable")

    def reject_port(self, port: int, to: int) -> None:
        """Let the others find this port of one host unreachable."""
        for host, namespace in enumerate(self._namespaces):
            if host != to:
                place = ("to", self._addresses[to], "ipproto", "tcp", "dport", str(port))
                self._rule(namespace, "200", *place, "unreachable")

    def open(self) -> None:
        """Let everything through again."""
        for port in self._ports:
            self._tc("qdisc", port, "del", "root")
        for namespace, preference in self._rules:
            call("ip", "-n", namespace, "rule", "del", "pref", preference)
        self._rules.clear()

    def _rule(self, namespace: str, preference: str, *rule: str) -> None:
        call("ip", "-n", namespace, "rule", "add", "pref", preference, *rule)
        self._rules.append((namespace, preference))

    def _drop(self, *match: str, to: Sequence[int] | None = None) -> None:
        for port in self._ports if to is None else [self._ports[host] for host in to]:
            self._tc(
                "filter", port, "add", "parent", "1:", "protocol", "ip", "prio", "1", "u32", *match, "flowid", "1:2"
            )

    def _tc(self, kind: str, port: str, action: str, *args: str) -> None:
        call("tc", "-n", self._switch, kind, action, "dev", port, *args)


def small_parcels() -> None:
    """In a worker: many parcels in a small state."""
    os.environ.update(TRANSFUSE_PARCEL_BYTES=str(64 << 10), TRANSFUSE_BURST_BYTES=str(256 << 10))
