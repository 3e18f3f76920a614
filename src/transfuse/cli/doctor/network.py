"""The network as gloo sees it: the interfaces, the addresses of the host's name, and where this process listens."""

from __future__ import annotations

import array
import fcntl
import ipaddress
import os
import socket
import struct
import threading
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from transfuse._tuning import DOCTOR_LOOKUP_SECONDS
from transfuse.cli.doctor.finding import Finding

__all__ = ["IFNAME_VARIABLE", "addresses_of_host", "interfaces", "judge", "listening"]

IFNAME_VARIABLE = "GLOO_SOCKET_IFNAME"

_SIOCGIFADDR = 0x8915
_LISTENS = "0A"


def interfaces() -> dict[str, list[str]]:
    """The network interfaces that have addresses, and their addresses."""
    found: dict[str, list[str]] = {}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            request = struct.pack("256s", name.encode())
            with suppress(OSError):
                answer = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, request)
                found.setdefault(name, []).append(socket.inet_ntoa(answer[20:24]))
    with suppress(OSError):
        for line in Path("/proc/net/if_inet6").read_text().splitlines():
            digits, *_, name = line.split()
            found.setdefault(name, []).append(str(ipaddress.IPv6Address(int(digits, 16))))
    return found


def addresses_of_host() -> list[str]:
    """The addresses of this host's name; empty if there are none, or the lookup takes too long."""
    found: list[str] = []

    def look_up() -> None:
        with suppress(OSError):
            answers = socket.getaddrinfo(socket.gethostname(), None, type=socket.SOCK_STREAM)
            found.extend(dict.fromkeys(str(address[0]) for *_, address in answers))

    thread = threading.Thread(target=look_up, daemon=True)
    thread.start()
    thread.join(DOCTOR_LOOKUP_SECONDS)
    return list(found)


def listening() -> dict[str, str]:
    """The sockets on which this process listens: their addresses, by inode number."""
    mine = set()
    for entry in os.listdir("/proc/self/fd"):
        with suppress(OSError):
            mine.add(os.readlink(f"/proc/self/fd/{entry}").removeprefix("socket:[").removesuffix("]"))
    found = {}
    for table in ("tcp", "tcp6"):
        with suppress(OSError):
            for line in Path(f"/proc/self/net/{table}").read_text().splitlines()[1:]:
                _, local, _, state, *_ = cells = line.split()
                if state == _LISTENS and cells[9] in mine:
                    found[cells[9]] = _address(local.partition(":")[0])
    return found


def _address(digits: str) -> str:
    """Decode an address from the kernel's tables: words of four bytes in the machine's own byte order."""
    words = array.array("I", (int(digits[at : at + 8], 16) for at in range(0, len(digits), 8)))
    return str(ipaddress.ip_address(words.tobytes()))


def judge(taken: Sequence[str], ifname: str | None, host: Sequence[str], there: dict[str, list[str]]) -> Finding:
    """Whether other hosts can reach the address where gloo listens."""
    about, name = "gloo address", socket.gethostname()
    known = {address: interface for interface, addresses in there.items() for address in addresses}
    # 127.0.1.1 and the like belong to the loopback interface without being listed there.
    shown = ", ".join(f"{one} on {known.get(one) or ('lo' if _is_loopback(one) else 'no interface')}" for one in taken)
    if ifname:
        why = f"as {IFNAME_VARIABLE}={ifname} says"
    elif not host:
        why = f"since the name of this host, {name}, leads to no address"
    elif not any(one in known or _is_loopback(one) for one in host):
        why = f"since the name of this host, {name}, leads to {', '.join(host)}, which is not of this machine"
    else:
        why = f"since the name of this host, {name}, leads to {', '.join(host)}"
    if not taken:
        return Finding("note", about, "could not be found out")
    if not all(map(_is_loopback, taken)):
        return Finding("ok", about, f"{shown}, {why}")
    outside = [name for name, addresses in there.items() if not all(map(_is_loopback, addresses))]
    if not outside:
        return Finding("ok", about, f"{shown}, {why}; this machine has no other interface")
    choices = " or ".join(f"{IFNAME_VARIABLE}={interface}" for interface in outside)
    return Finding(
        "warn", about, f"{shown}, {why}", f"other hosts cannot reach it: for a job on several, set {choices}"
    )


def _is_loopback(address: str) -> bool:
    return ipaddress.ip_address(address).is_loopback
