"""The memory route: a receiver on the source's host reads straight from the source's address space.

A source gives a :class:`MemoryLease`, a receiver opens its :class:`Entry` by a :class:`Reader`. Names of hosts prove
nothing, and process ids are reused: what proves that a receiver reads the right memory is a random token that it finds
at the address which the offer names. The token is wiped before the source's call returns, and read again after the last
byte: as long as it is there, so are the tensors.
"""

from __future__ import annotations

import ctypes
import errno
import hmac
import os
import secrets
import select
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from transfuse.memory import vm
from transfuse.memory.vm import Ranges
from transfuse.state.manifest import Described
from transfuse.wire.memory_route_read import Reading
from transfuse.wire.route import Malformed, Pull, SourceEnded, Unreadable

__all__ = ["TOKEN_BYTES", "Entry", "MemoryLease", "MemoryRoute", "Reader"]

TOKEN_BYTES = 32
#: No user space reaches this far, and offsets within a storage can be added to what is below.
HIGHEST_ADDRESS = 1 << 62

_PR_SET_PTRACER = 0x59616D61
_PR_SET_PTRACER_ANY = ctypes.c_ulong(-1)


class Entry(msgspec.Struct, array_like=True, frozen=True, forbid_unknown_fields=True):
    """Where a source's bytes lie, for receivers that can read them there."""

    pid: int
    #: Who finds ``token`` at this address of that process reads the right memory, until it is wiped.
    token_address: int
    token: bytes
    #: For each storage, the address of its window's first byte, or 0 (u64 each).
    storages: bytes

    def encode(self) -> bytes:
        return msgspec.msgpack.encode(self)

    @classmethod
    def decode(cls, data: bytes) -> Entry:
        try:
            return _decoder.decode(data)
        except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
            raise Malformed(f"a malformed description of memory: {error}") from error


# Made here, once: two threads that make msgspec look into a type at the same time end the process.
_decoder = msgspec.msgpack.Decoder(Entry)


class _Permission:
    """Under Yama only a parent may read a process's memory, unless that process permits others to: while it serves."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._holders = 0

    def take(self) -> None:
        with self._lock:
            self._holders += 1
            if self._holders == 1:
                self._set(_PR_SET_PTRACER_ANY)

    def give_back(self) -> None:
        with self._lock:
            self._holders -= 1
            if self._holders == 0:
                self._set(ctypes.c_ulong(0))

    @staticmethod
    def _set(who: ctypes.c_ulong) -> None:
        # Without Yama this fails, and nothing has to be permitted.
        libc: Any = ctypes.CDLL(None)
        libc.prctl(_PR_SET_PTRACER, who, ctypes.c_ulong(0), ctypes.c_ulong(0), ctypes.c_ulong(0))


_permission = _Permission()


class MemoryLease:
    """A source's permission to read its memory, from ``with`` until its end. Nothing is readable by it afterwards."""

    def __init__(self) -> None:
        self._token = secrets.token_bytes(TOKEN_BYTES)
        self._page = ctypes.create_string_buffer(TOKEN_BYTES)

    def __enter__(self) -> MemoryLease:
        _permission.take()
        ctypes.memmove(self._page, self._token, TOKEN_BYTES)
        return self

    def __exit__(self, *_: object) -> None:
        self.end()
        _permission.give_back()

    def end(self) -> None:
        """Wipe the token: whoever reads on, knows."""
        ctypes.memset(self._page, 0, TOKEN_BYTES)

    def export(self, described: Described) -> bytes | None:
        return self.describe(described.addresses).encode() if described.addresses.any() else None

    def describe(self, storages: npt.NDArray[np.int64]) -> Entry:
        """What an offer says about this memory, given the address of each storage."""
        return Entry(os.getpid(), ctypes.addressof(self._page), self._token, storages.astype("<u8").tobytes())


class Reader:
    """A receiver's view of a source's memory, proven by the token. :class:`Unreadable` if it cannot be had."""

    def __init__(self, memory: Entry, storages: int, call_bytes: int = 0) -> None:
        if not vm.AVAILABLE:
            raise Unreadable("this system has no process_vm_readv")
        self._memory = memory
        self._call_bytes = call_bytes
        #: The address of each storage's window, or 0.
        if len(memory.storages) % 8:
            raise Malformed("a malformed description of memory")
        self.storages = np.frombuffer(memory.storages, dtype="<u8")
        highest = max(memory.token_address, int(self.storages.max(initial=0)))
        if len(self.storages) != storages or len(memory.token) != TOKEN_BYTES or not 0 < memory.pid < 1 << 31:
            raise Malformed("a malformed description of memory")
        if memory.token_address < 0 or highest >= HIGHEST_ADDRESS:
            raise Malformed("an impossible address")
        #: Becomes readable when the source's process ends, whoever has its number by then.
        self._process: int | None = None
        if memory.pid != os.getpid():
            with suppress(OSError, AttributeError):
                self._process = os.pidfd_open(memory.pid)
        try:
            self.recheck()
        except Unreadable:
            self.close()
            raise

    def __enter__(self) -> Reader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        if self._process is not None:
            os.close(self._process)
            self._process = None

    def recheck(self) -> None:
        """Make sure that the lease is still good, and so that everything read until now was read under it."""
        self._check_alive()
        found = np.zeros(TOKEN_BYTES, dtype=np.uint8)
        at = np.array([self._memory.token_address], dtype=np.uint64)
        size = np.array([TOKEN_BYTES])
        failed = self.read(vm.ranges(at, size), vm.ranges(np.array([found.ctypes.data]), size))
        if len(failed) or not hmac.compare_digest(found.tobytes(), self._memory.token):
            raise Unreadable(f"process {self._memory.pid} of this host does not hold the token")
        # Alive still: so nobody else had its number in between.
        self._check_alive()

    def _check_alive(self) -> None:
        if self._process is None:
            return
        poll = select.poll()
        poll.register(self._process, select.POLLIN)
        if poll.poll(0):
            raise SourceEnded(f"process {self._memory.pid} has ended")

    def read(self, theirs: Ranges, mine: Ranges, **watchers: Callable[[int], object]) -> npt.NDArray[np.int64]:
        """Read ranges of the source's memory into ranges of our own, as :func:`vm.read` does; the rows that failed."""
        try:
            pid, calls = self._memory.pid, self._call_bytes
            return vm.read(pid, theirs, mine, workers=vm.threads(), call_bytes=calls, **watchers)
        except vm.ReadFailed as error:
            pid = self._memory.pid
            if error.errno == errno.ESRCH:
                raise SourceEnded(f"there is no process {pid} on this host") from error
            if error.errno == errno.EPERM:
                raise Unreadable(
                    f"reading the memory of process {pid} is not permitted (another user, Yama's ptrace_scope, or a "
                    "container without CAP_SYS_PTRACE)"
                ) from error
            raise Unreadable(f"process_vm_readv of process {pid}: {error.strerror}") from error


class MemoryRoute:
    name = "memory"
    same_host = True

    def lease(self) -> MemoryLease:
        return MemoryLease()

    def open(self, entry: bytes, pull: Pull) -> Reading:
        call_bytes = pull.at_once(vm.CALL_BYTES)
        return Reading(Reader(Entry.decode(entry), len(pull.manifest.storages), call_bytes), pull)
