"""Which address of this host a process group uses, and a job: streams listen there, and nowhere else.

Devices of gloo do not tell their address. But a group of gloo puts it into its store before it looks for the others.
"""

from __future__ import annotations

import fcntl
import os
import socket
import struct
from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Store

from transfuse._tuning import INTERFACE_PROBE_SECONDS

_LENGTH, _FAMILY = struct.Struct("<Q"), struct.Struct("<H")
#: By family: where in a network address the host begins, and how many bytes it has.
_HOSTS = {int(socket.AF_INET): (4, 4), int(socket.AF_INET6): (8, 16)}


def host_of(pg: Any) -> str | None:
    """The address on which a group of gloo listens, as a number; None if it cannot be found out."""
    gloo: Any = dist.ProcessGroupGloo
    # The group's address may be another one than the host's name or GLOO_SOCKET_IFNAME say now.
    with suppress(Exception):  # Groups that wrap others may not have all of this.
        backend = pg._get_backend(torch.device("cpu")) if hasattr(pg, "_get_backend") else pg
        if host := _host_of_device(backend.options._devices[0]):
            return host
    interface = os.environ.get("GLOO_SOCKET_IFNAME", "").split(",")[0]
    with suppress(RuntimeError):
        return _host_of_device(
            gloo.create_device(interface=interface, lazy_init=False)
            if interface
            else gloo.create_default_device(lazy_init=False)
        )
    return None


class _AddressStore(Store):
    """A store that only hears at which address a device listens."""

    def __init__(self) -> None:
        super().__init__()
        self.address = b""

    def set(self, key: str, value: bytes | str) -> None:
        self.address = value.encode() if isinstance(value, str) else bytes(value)

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        raise RuntimeError("there is no other end")


def _host_of_device(device: Any) -> str | None:
    store = _AddressStore()
    gloo: Any = dist.ProcessGroupGloo
    options = gloo._Options()
    options._devices, options._timeout = [device], timedelta(seconds=INTERFACE_PROBE_SECONDS)
    with suppress(RuntimeError):
        gloo(store, 0, 2, options)
    # The address consists of a name (length first), a network address (length first), and numbers.
    with suppress(struct.error, OSError):
        (name,) = _LENGTH.unpack_from(store.address)
        data = store.address[2 * _LENGTH.size + name :]
        (family,) = _FAMILY.unpack_from(data)
        at, length = _HOSTS.get(family, (0, 0))
        if length and len(data) >= at + length:
            return socket.inet_ntop(family, data[at : at + length])
    return None


def own_address() -> str:
    """This host's address on the network of the job, where no group says it."""
    interface = os.environ.get("GLOO_SOCKET_IFNAME", "").split(",")[0]
    if interface:
        with suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
            packed = fcntl.ioctl(sock, 0x8915, struct.pack("256s", interface.encode()[:15]))  # SIOCGIFADDR
            return socket.inet_ntoa(packed[20:24])
    master = os.environ.get("MASTER_ADDR", "")
    with suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        # No packet is sent: the kernel only chooses the interface that leads there.
        sock.connect((master or "127.0.0.1", 9))
        return str(sock.getsockname()[0])
    return socket.gethostbyname(socket.gethostname())
