"""Connections over loopback, for tests of streams."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

import certificates
from transfuse._wire.secure import SecureSocket, secured
from transfuse._wire.stream import Stream

__all__ = [
    "WAIT",
    "InThread",
    "connected",
    "descriptors",
    "ended",
    "forked",
    "interrupting",
    "one_byte_at_a_time",
    "sealed",
    "streams",
]

#: The longest that a test waits for what must happen.
WAIT = 30.0


class InThread:
    """A call in a thread, and how it has ended."""

    def __init__(self, call: Callable[[], object]) -> None:
        self.error: BaseException | None = None
        self._call = call
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._call()
        except BaseException as error:
            self.error = error.with_traceback(None)

    @property
    def runs(self) -> bool:
        return self._thread.is_alive()

    def end(self) -> BaseException | None:
        self._thread.join(WAIT)
        assert not self.runs, "the thread is stuck"
        return self.error


def connected(*, buffer: int | None = None) -> tuple[socket.socket, socket.socket]:
    """Two connected sockets. ``buffer``: about how many bytes each of their buffers holds."""
    with socket.socket() as listener:
        if buffer is not None:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, buffer)  # Inherited by what it accepts.
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        one = socket.socket()
        if buffer is not None:
            one.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, buffer)
        one.connect(listener.getsockname())
        other, _ = listener.accept()
    for end in (one, other):
        if buffer is not None:
            end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, buffer)
        end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return one, other


def streams(seconds: float = WAIT, *, buffer: int | None = None, encrypted: bool = False) -> tuple[Stream, Stream]:
    """Two ends of one connection, both as streams."""
    ends: Any = connected(buffer=buffer)
    one, other = sealed(*ends) if encrypted else ends
    return Stream(one, seconds=seconds), Stream(other, seconds=seconds)


def sealed(one: socket.socket, other: socket.socket) -> tuple[SecureSocket, SecureSocket]:
    """Both ends, when they have agreed on TLS."""
    with ThreadPoolExecutor(1) as thread:
        listens = thread.submit(secured, one, certificates.tls(), WAIT, listens=True)
        dials = secured(other, certificates.tls(), WAIT, listens=False)
        return listens.result(), dials


@contextlib.contextmanager
def one_byte_at_a_time(seconds: float = WAIT, sizes: Callable[[], int] = lambda: 1) -> Iterator[tuple[Stream, Stream]]:
    """Two streams, and between them somebody who passes on one byte at a time, or as many as ``sizes`` says."""
    left, one = connected()
    other, right = connected()

    def pass_on(come: socket.socket, go: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := come.recv(sizes()):
                go.sendall(data)
        for end in (come, go):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    threads = [threading.Thread(target=pass_on, args=ends, daemon=True) for ends in ((one, other), (other, one))]
    for thread in threads:
        thread.start()
    ends = Stream(left, seconds=seconds), Stream(right, seconds=seconds)
    try:
        yield ends
    finally:
        for stream in ends:
            stream.close()
        for thread in threads:
            thread.join(WAIT)
        one.close()
        other.close()


@contextlib.contextmanager
def interrupting(handle: Callable[[], object], every: float = 0.0005) -> Iterator[None]:
    """The main thread, which is in this block, gets a signal all the time. For each one ``handle`` is called."""
    main, over = threading.main_thread().ident, threading.Event()
    assert main == threading.get_ident()

    def fire() -> None:
        while not over.wait(every):
            signal.pthread_kill(main, signal.SIGUSR1)

    before = signal.signal(signal.SIGUSR1, lambda *_: handle())
    thread = threading.Thread(target=fire, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join(WAIT)
        signal.signal(signal.SIGUSR1, before)


@contextlib.contextmanager
def forked(run: Callable[[], object]) -> Iterator[int]:
    """A forked process that runs this and ends, with 0 if nothing was raised. It is killed at the end of the block."""
    child = os.fork()
    if not child:
        code = 1
        try:
            run()
            code = 0
        except BaseException as error:
            os.write(2, f"in the forked process: {error!r}\n".encode())
        finally:
            os._exit(code)
    try:
        yield child
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(child, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            os.waitpid(child, 0)


def ended(child: int) -> int:
    """The exit code of a forked process, as soon as it ends."""
    until = time.monotonic() + WAIT
    while time.monotonic() < until:
        found, status = os.waitpid(child, os.WNOHANG)
        if found:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.01)
    pytest.fail("the forked process is stuck")


def descriptors() -> dict[int, str]:
    """The sockets of this process, by their descriptors."""
    found = {}
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            what = os.readlink(f"/proc/self/fd/{name}")
            if what.startswith("socket:"):
                found[int(name)] = what
    return found
