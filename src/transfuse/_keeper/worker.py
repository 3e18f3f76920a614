"""A worker, as the keeper sees it: the connection, and the process behind it."""

from __future__ import annotations

import socket
import struct
from contextlib import suppress
from typing import TYPE_CHECKING

from transfuse._keeper import frames
from transfuse._keeper.books import Kept
from transfuse._keeper.frames import KeeperLink
from transfuse._keeper.runs import Process

if TYPE_CHECKING:
    from transfuse._remote.server import Server


class ConnectedWorker:
    """A connection, and what the worker behind it uses."""

    def __init__(self, link: KeeperLink) -> None:
        self.link = link
        self.hello: frames.Hello | None = None
        #: Its process; None if that is of another namespace of pids, and cannot be seen from here.
        self.process = _peer(link)
        self.agent: Process | None = None
        #: Whether it has told its peers, and so belongs to the job that runs now.
        self.has_joined = False
        #: Whether no other process can write to slots of this rank.
        self.is_only_writer = False
        self.has_closed = False
        self.pinned: list[Kept] = []
        self.servers: list[Server] = []


def uid_of(sock: socket.socket) -> int:
    """The user who has made a connection."""
    _, uid, _ = struct.unpack("3i", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i")))
    return int(uid)


def _peer(link: KeeperLink) -> Process | None:
    """The process that has made this connection, if it can be seen from here."""
    with suppress(OSError):
        pid = link.peer_pid()
        return Process.of(pid) if pid else None
    return None
