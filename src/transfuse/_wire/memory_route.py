"""The memory route: a receiver on the source's host reads straight from the source's address space.

The source gives a :class:`MemoryLease`. The receiver opens the source's :class:`MemoryEntry` with a :class:`Reader`.
Host names prove nothing, and process ids are reused: the proof is the token (:mod:`.memory_route_read`).
"""

from __future__ import annotations

import ctypes
import errno
import os
import select
import threading
from collections.abc import Sequence
from contextlib import suppress
from types import TracebackType
from typing import Any, Self

import msgspec
import numpy as np
import numpy.typing as npt

from transfuse._memory import vm
from transfuse._memory.vm import Ranges
from transfuse._state.manifest import Described
from transfuse._state.mapped_file import MappedFile
from transfuse._tuning import VM_CALL_BYTES
from transfuse._wire.memory_route_read import RangeReader, Reading, TokenEntry, TokenLease, decode
from transfuse._wire.route import MalformedEntry, Pull, SourceEnded, Unreadable

_PR_SET_PTRACER = 0x59616D61
_PR_SET_PTRACER_ANY = ctypes.c_ulong(-1)


class MemoryEntry(TokenEntry, msgspec.Struct, array_like=True, frozen=True, forbid_unknown_fields=True):
    """Where a source's bytes lie, for receivers that can read them there."""

    pid: int
    token_address: int
    token: bytes
    storages: bytes

    @classmethod
    def decode(cls, data: bytes) -> MemoryEntry:
        return decode(_decoder, data, "memory")


# Made once, at import: if two threads make msgspec inspect a type at the same time, the process ends.
_decoder = msgspec.msgpack.Decoder(MemoryEntry)


class _Permission:
    """Permits other processes to read this process's memory while it serves. Yama allows only ancestors otherwise."""

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
        # Without Yama this call fails, and no permission is needed.
        libc: Any = ctypes.CDLL(None)
        libc.prctl(_PR_SET_PTRACER, who, ctypes.c_ulong(0), ctypes.c_ulong(0), ctypes.c_ulong(0))


_permission = _Permission()

#: For leases of this very process whose memory is mapped from files, by token: the storages, and the files.
_mapped: dict[bytes, tuple[bytes, Sequence[MappedFile]]] = {}


class MemoryLease(TokenLease):
    def __enter__(self) -> Self:
        _permission.take()
        return super().__enter__()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        super().__exit__(kind, error, at)
        _permission.give_back()

    def end(self) -> None:
        _mapped.pop(self._token, None)
        super().end()

    def export(self, described: Described) -> bytes | None:
        if not described.addresses.any():
            return None
        entry = self.describe(described.addresses)
        if described.files:
            _mapped[self._token] = entry.storages, described.files
        return entry.encode()

    def describe(self, storages: npt.NDArray[np.int64]) -> MemoryEntry:
        """The entry for an offer, given the address of each storage."""
        return MemoryEntry(os.getpid(), self._window[0], self._token, storages.astype("<u8").tobytes())


class Reader(RangeReader):
    def __init__(self, memory: MemoryEntry, storages: int, call_bytes: int = 0) -> None:
        if not vm.AVAILABLE:
            raise Unreadable("this system has no process_vm_readv")
        super().__init__(memory, storages, f"process {memory.pid} of this host")
        self._memory = memory
        self._call_bytes = call_bytes
        if not 0 < memory.pid < 1 << 31:
            raise MalformedEntry(f"a malformed description of memory: process {memory.pid}")
        #: A pidfd: becomes readable when the source's process ends, even if the process id is in use again.
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
        self._check_alive()
        super().recheck()
        # The process is still alive, so no other process had its id in between.
        self._check_alive()

    def _check_alive(self) -> None:
        if self._process is None:
            return
        poll = select.poll()
        poll.register(self._process, select.POLLIN)
        if poll.poll(0):
            raise SourceEnded(f"the source's process {self._memory.pid} has ended")

    def read(self, theirs: Ranges, mine: Ranges, **watchers: Any) -> npt.NDArray[np.int64]:
        """Read ranges of the source's memory into our own, as :func:`vm.read` does. Return the rows that failed."""
        try:
            pid, calls = self._memory.pid, self._call_bytes
            storages, files = _mapped.get(self._memory.token, (b"", ()))
            if storages != self._memory.storages:
                files = ()
            return vm.read(pid, theirs, mine, workers=vm.threads(), call_bytes=calls, files=files, **watchers)
        except vm.ReadFailed as error:
            pid = self._memory.pid
            if error.errno == errno.ESRCH:
                raise SourceEnded(f"there is no process {pid} on this host") from error
            if error.errno == errno.EPERM:
                raise Unreadable(
                    f"reading the memory of process {pid} is not permitted (another user, Yama's ptrace_scope, or a "
                    "container without CAP_SYS_PTRACE)"
                ) from error
            raise Unreadable(f"process_vm_readv of process {pid} failed: {error.strerror}") from error


class MemoryRoute:
    name = "memory"
    same_host = True
    opt_in = False
    compared = False

    def lease(self, seconds: float) -> MemoryLease:
        return MemoryLease()

    def open(self, entry: bytes, pull: Pull) -> Reading:
        call_bytes = pull.at_once(VM_CALL_BYTES)
        return Reading(Reader(MemoryEntry.decode(entry), len(pull.manifest.storages), call_bytes), pull)
