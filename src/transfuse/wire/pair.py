"""Pairs: gloo groups of two ranks. They are formed over a connection that the two ends already have.

torch forms a group through a store, in which each end finds the other end's address. Here the two ends exchange their
addresses themselves, so there is no store, and nobody else can read or write in one.
"""

from __future__ import annotations

import atexit
import ctypes
import os
import socket
import struct
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Store

from transfuse.wire.group import WorkLike

__all__ = ["Pair", "form", "host_of", "is_address"]

NOBODYS_TAG = 0x5446_0002
_LENGTH = struct.Struct("<Q")
_FAMILY = struct.Struct("<H")
#: By family: where in a network address the host begins, and how many bytes it has.
_HOSTS = {int(socket.AF_INET): (4, 4), int(socket.AF_INET6): (8, 16)}
MAX_HOST_NAME = 255
#: How long the process waits at its end for threads that form pairs.
EXIT_SECONDS = 10.0

#: How many threads are in gloo's constructor, and who waits for them.
_inside = 0
_left = threading.Condition()


def is_address(theirs: bytes, mine: bytes) -> bool:
    """Whether ``theirs`` is an address of gloo, judged by one's own. Check it: gloo trusts every length in it.

    Each consists of a name (length first), a network address (length first), and numbers. A network address begins with
    its family, which is the same at both ends.
    """
    one, other = _after_name(theirs), _after_name(mine)
    same = _LENGTH.size + _FAMILY.size
    return len(one) == len(other) > same and one[:same] == other[:same]


def _after_name(data: bytes) -> bytes:
    """What follows the name in an address of gloo; empty if this is none."""
    if len(data) < _LENGTH.size:
        return b""
    (length,) = _LENGTH.unpack_from(data)
    return b"" if length > MAX_HOST_NAME else data[_LENGTH.size + length :]


class _Listen(Store):
    """A store that only hears at which address a device listens."""

    def __init__(self) -> None:
        super().__init__()
        self.address = b""

    def set(self, key: str, value: bytes | str) -> None:
        self.address = value.encode() if isinstance(value, str) else bytes(value)

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        raise RuntimeError("there is no other end")


def host_of(device: Any) -> str | None:
    """The address on which a device of gloo listens, as a number; None if gloo does not say.

    Devices do not tell it. But a group puts it into its store before it looks for the others.
    """
    store = _Listen()
    with suppress(RuntimeError):
        form(store, 0, 1.0, device)
    data = _after_name(store.address)[_LENGTH.size :]
    with suppress(struct.error, OSError):
        (family,) = _FAMILY.unpack_from(data)
        at, length = _HOSTS.get(family, (0, 0))
        if length and len(data) >= at + length:
            return socket.inet_ntop(family, data[at : at + length])
    return None


def form(store: Store, rank: int, seconds: float, device: Any) -> Any:
    """Form a group of two on this device of gloo. Raises ``RuntimeError`` if the other end does not answer."""
    gloo: Any = dist.ProcessGroupGloo
    options = gloo._Options()
    options._devices = [device]
    options._timeout = timedelta(seconds=seconds)
    try:
        with _in_gloo():
            return gloo(store, rank, 2, options)
    finally:
        # Tracebacks hold this frame: the device would stay and listen until garbage collection.
        del options, device


@contextmanager
def _in_gloo() -> Iterator[None]:
    global _inside
    with _left:
        _inside += 1
    try:
        yield
    finally:
        with _left:
            _inside -= 1
            _left.notify_all()


@atexit.register
def _leave_gloo() -> None:
    """At the end of the process: a thread that comes out of gloo while the interpreter ends is a SIGABRT."""
    with _left:
        _left.wait_for(lambda: not _inside, EXIT_SECONDS)


def _after_fork() -> None:
    global _inside, _left
    _inside, _left = 0, threading.Condition()


os.register_at_fork(after_in_child=_after_fork)


class Pair:
    """A gloo group of two that has been formed. It may be closed at any time, from any thread."""

    #: A thread that is left in a wait keeps gloo alive by :meth:`_hold`, for the length of that wait only.
    outlives_waits = True

    def __init__(self, gloo: Any, peer: int) -> None:
        self._gloo: Any = gloo
        #: The other end's rank in the pair: 0 or 1.
        self._other = peer
        self._lock = threading.Lock()
        self._waits = 0
        self._held = False

    def close(self) -> None:
        """Free the group with its threads and connections, even if other code still holds this object.

        If a thread waits in the group, freeing it now would end the process. An interrupt has left that thread behind,
        and it still has to tell the peer: the group is freed when the thread returns.
        """
        with self._lock:
            if self._waits:
                self._hold()
                return
            gone, self._gloo = self._gloo, None
        # Outside the lock: gloo joins its threads.
        del gone

    def break_off(self, until: float) -> None:
        """Close the connection, which ends all waits that can be ended."""
        with suppress(RuntimeError):
            # When a wait expires, gloo closes all connections of the group.
            nothing = torch.zeros(1, dtype=torch.uint8)
            self._post_recv([nothing], NOBODYS_TAG).wait(timedelta(milliseconds=2))
        while self._waits and time.monotonic() < until:
            time.sleep(0.01)

    def _hold(self) -> None:
        """Keep gloo alive during a wait, even while the interpreter ends and modules drop what they hold."""
        if not self._held:
            self._held = True
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(self._gloo))

    def getBackendName(self) -> str:  # noqa: N802 - torch's name
        return "gloo"

    def _post_send(self, tensors: list[torch.Tensor], tag: int) -> WorkLike:
        return _Work(self, self._open().send(tensors, self._other, tag))

    def _post_recv(self, tensors: list[torch.Tensor], tag: int) -> WorkLike:
        return _Work(self, self._open().recv(tensors, self._other, tag))

    def _open(self) -> Any:
        with self._lock:
            if self._gloo is None:
                raise RuntimeError("the pair was closed")
            return self._gloo

    @contextmanager
    def _waiting(self) -> Iterator[None]:
        with self._lock:
            self._waits += 1
        try:
            yield
        finally:
            with self._lock:
                self._waits -= 1
                if self._held and not self._waits:
                    self._held = False
                    ctypes.pythonapi.Py_DecRef(ctypes.py_object(self._gloo))


class _Work:
    """A send or receive of a pair. It stays alive while a thread waits for it."""

    def __init__(self, pair: Pair, work: WorkLike) -> None:
        self._pair = pair
        self._work = work

    def wait(self, timeout: timedelta) -> Any:
        with self._pair._waiting():
            return self._work.wait(timeout)
