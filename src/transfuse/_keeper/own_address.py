"""Where the other hosts of a job reach this one."""

from __future__ import annotations

import fcntl
import os
import socket
import struct
from contextlib import suppress


def own_address() -> str:
    """This host's address on the network of the job."""
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
