"""A worker, as the keeper sees it: the connection, and the process behind it."""

from __future__ import annotations

import os
import socket
import struct
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

from transfuse._keeper import frames
from transfuse._keeper.frames import KeeperLink
from transfuse._keeper.runs import Process, WatchedProcess
from transfuse._keeper.saved_steps import OpenFiles, SavedSteps
from transfuse._keeper.slot_file import Label
from transfuse._keeper.slot_policy import Kept

if TYPE_CHECKING:
    from transfuse._remote.server import Server


class ConnectedWorker:
    """A connection, and what the worker behind it uses."""

    def __init__(self, link: KeeperLink) -> None:
        self.link = link
        self.hello: frames.Hello | None = None
        #: Its process, and whether it can be seen from here: it may be of another namespace of pids, or hidden.
        self.process = _peer(link)
        self.is_visible = self.process is not None
        self.agent: Process | None = None
        #: Whether it has told its peers, and so belongs to the job that runs now.
        self.has_joined = False
        #: Whether no other process can write to slots of this rank.
        self.is_only_writer = False
        self.has_closed = False
        self.pinned: list[Kept] = []
        self.servers: list[Server] = []
        #: Files on storage that are open for it.
        self.files: OpenFiles | None = None

    def open_files(self, steps: SavedSteps, label: Label, ranks: Sequence[int]) -> Mapping[int, int] | None:
        """Descriptors of the files that hold these ranks' states, by rank; None: not yet, ask again."""
        files = self.files
        if files is None or (files.label, files.ranks) != (label, list(ranks)):
            self.close_files()
            files = self.files = OpenFiles(steps, label, ranks)
        return files.get()

    def close_files(self) -> None:
        files, self.files = self.files, None
        if files is not None:
            files.close()

    def meet(self, hello: frames.Hello, descriptors: Sequence[int]) -> None:
        """Learn its process and its agent. ``descriptors``: of both, in case that they cannot be seen from here."""
        process, agent = Process(hello.pid, hello.started), Process(hello.agent_pid, hello.agent_started)
        if len(descriptors) == 2:
            process, agent = map(_seen, (process, agent), descriptors)
        self.is_visible = self.is_visible or isinstance(process, WatchedProcess)
        self.process, self.agent = self.process or process, agent


def _seen(process: Process, fd: int) -> Process:
    """A process that can be seen from here; else what its descriptor tells of it."""
    return process if process.alive() else WatchedProcess.by(process, os.dup(fd))


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
