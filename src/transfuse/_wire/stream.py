"""Streams: TCP connections of our own. To a channel, a stream is a process group whose only other rank is the peer.

Bytes go straight between the kernel and the tensors: each call sends from, or receives into, several runs of memory.
With ``tls=`` they take one step more, piece by piece, to be encrypted or decrypted (:mod:`.secure`). What is said here
about sockets is about the kernel's, and the same for both.
Nothing is framed here. Both ends know every length, because messages announce theirs and parcels have been planned.

What a socket does and does not do, and what follows from it:

- ``close()`` neither wakes nor stops a call that another thread is in. ``shutdown()`` does, but a new call after it
  still delivers what the kernel had received before. So :meth:`Stream.cut` sets a flag that every call looks at first,
  then shuts the connection down. The memory of a receive is free when its call has returned.
- The kernel's own timeouts count a whole call. So calls last a slice of a second at most, and a clock here counts since
  the last byte.
- A peer that has filled the window of a connection which is shut down and then read empty learns nothing of its end:
  it asks whether there is room, and hears that there is none. So what is broken off is closed by a reset.
- A host that is gone sends no word of it. So the kernel asks idle peers whether they are there (keepalive), and gives
  up on bytes that nobody acknowledges. A peer that lives and does not read acknowledges, and has the whole timeout.
- A forked child holds copies of all descriptors, which would hide the parent's death from the peers. So the child
  closes them.
- A call that ends in the middle, by Ctrl-C for example, leaves the connection at a place that neither end knows. So
  it is of no more use, and says so to the next call that wants to use it.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import select
import socket
import struct
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import Any, TypeAlias

import numpy as np
import torch

from transfuse._memory.digest import Run
from transfuse._sizes import MOST_RUNS
from transfuse._tuning import SECURE_PIECE_BYTES, STREAM_MOST_BYTES, STREAM_MOST_SECONDS, STREAM_SLICE_SECONDS
from transfuse._wire.framed import AnySocket
from transfuse._wire.secure import Cipher, SecureSocket

#: What is sent, or received into. Bytes are only sent.
Part: TypeAlias = torch.Tensor | Run | bytes | bytearray

_libc = ctypes.CDLL(None, use_errno=True)
for _call in (_libc.sendmsg, _libc.recvmsg):
    _call.restype, _call.argtypes = ctypes.c_ssize_t, [ctypes.c_int, ctypes.c_void_p, ctypes.c_int]
_into_memory, _out_of_memory = _libc.preadv, _libc.pwritev
for _call in (_into_memory, _out_of_memory):
    _call.restype, _call.argtypes = ctypes.c_ssize_t, [ctypes.c_int, ctypes.c_void_p, ctypes.c_int, ctypes.c_int64]

#: Bytes that are dropped at a time.
MOST_DROPPED = 1 << 20
#: How many bytes are read of what a peer said before a write failed.
MOST_LAST = 1 << 20
QUESTIONS = 3


class _Head(ctypes.Structure):
    """``struct msghdr``: what ``sendmsg`` and ``recvmsg`` take."""

    _fields_ = (
        ("name", ctypes.c_void_p),
        ("namelen", ctypes.c_uint32),
        ("runs", ctypes.c_void_p),
        ("count", ctypes.c_size_t),
        ("control", ctypes.c_void_p),
        ("controllen", ctypes.c_size_t),
        ("flags", ctypes.c_int),
    )


_CUT = ConnectionAbortedError, ("this end has cut the connection",)
_INTERRUPTED = ConnectionAbortedError, ("a call on this connection was interrupted in the middle",)


class Stream:
    """One connection to one peer. One thread at a time receives on it; any thread may send, or cut it."""

    #: See :meth:`transfuse._wire.switchboard.Switchboard.pin`.
    outlives_waits = True

    def __init__(self, sock: AnySocket, *, seconds: float, rank: int | None = None, size: int | None = None) -> None:
        """``seconds``: how long the peer may take none of the bytes that are sent. ``rank``, ``size``: of the group."""
        self._cipher: Cipher | None = None
        if isinstance(sock, SecureSocket):
            self._cipher, sock = sock.cipher, sock.plain
        self._socket = sock
        self._scratch = None if self._cipher is None else Scratch()
        self._rank, self._size = rank, size
        #: A number by which both ends know this connection.
        self.number = 0
        #: Whether the source of the conversation has dialled, because the receiver could not.
        self.source_dials = False
        #: When bytes last came.
        self.heard_at = 0.0
        self._reading, self._writing = threading.Lock(), threading.Lock()
        #: Held for moments: after the socket is closed, its number may be another one's.
        self._ending = threading.Lock()
        self._is_cut = False
        self._look = select.poll()
        self._look.register(sock, select.POLLIN)
        #: Why the connection is of no more use: the type of the error and its arguments. (An error that has been raised
        #: holds all that its frames hold, and would keep the tensors of a failed call from being freed.)
        self._failure: tuple[type[OSError], tuple[Any, ...]] | None = None
        sock.setblocking(True)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.set_patience(seconds)
        _all.add(self)

    def set_patience(self, seconds: float) -> None:
        """The peer may take none of the bytes that are sent for this long, and its host may be gone for this long."""
        self._seconds = seconds
        part = min(STREAM_SLICE_SECONDS, seconds / 4)
        microseconds = max(int(1e6 * part), 1000)
        for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
            self._set(socket.SOL_SOCKET, option, struct.pack("ll", *divmod(microseconds, 1_000_000)))
        question = min(max(int(seconds / (QUESTIONS + 1)), 1), STREAM_MOST_SECONDS)
        self._set(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        self._set(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, question)
        self._set(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, question)
        self._set(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, QUESTIONS)
        self._set(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, min(int(1000 * seconds), 1 << 30))

    def _set(self, level: int, option: int, value: int | bytes) -> None:
        with suppress(OSError):  # The connection may be gone. The next call says so.
            self._socket.setsockopt(level, option, value)

    # -------------------------------------------------------------------------------- the methods of a process group

    def rank(self) -> int | None:
        return self._rank

    def size(self) -> int | None:
        return self._size

    def stream_to(self, rank: int) -> Stream:
        return self

    def getBackendName(self) -> str:  # noqa: N802 - torch's name
        return "stream"

    # ------------------------------------------------------------------------------------------------------- bytes

    def write(self, parts: Sequence[Part]) -> None:
        """Send these, one after another. Returns when the kernel has them."""
        runs = _runs(parts)
        with self._writing:
            try:
                if self._cipher is None or self._scratch is None:
                    self._move(_libc.sendmsg, socket.MSG_NOSIGNAL, runs, self._seconds)
                else:
                    self._write_sealed(self._cipher, self._scratch, runs)
            except BaseException:
                self._failure = self._failure or _INTERRUPTED
                raise

    def read(self, parts: Sequence[Part], seconds: float) -> None:
        """Fill these, one after another. ``seconds``: how long no byte may come."""
        runs = _runs(parts)
        with self._reading:
            try:
                if self._cipher is None or self._scratch is None:
                    self._move(_libc.recvmsg, socket.MSG_WAITALL, runs, seconds)
                else:
                    self._read_sealed(self._cipher, self._scratch, runs, seconds)
            except BaseException:
                self._failure = self._failure or _INTERRUPTED
                raise

    def _write_sealed(self, cipher: Cipher, scratch: Scratch, runs: list[int]) -> None:
        for some, count in _shares(runs):
            self._check()
            scratch.copy(some, count, self._fail, into=True)
            sealed = cipher.seal(scratch.sent[:count])
            self._move(_libc.sendmsg, socket.MSG_NOSIGNAL, _runs((sealed,)), self._seconds)

    def _read_sealed(self, cipher: Cipher, scratch: Scratch, runs: list[int], seconds: float) -> None:
        place = (ctypes.c_uint64 * 2)(ctypes.addressof(scratch.sealed), len(scratch.sealed))
        head, sealed = _Head(runs=ctypes.addressof(place), count=1), memoryview(scratch.sealed)
        for some, count in _shares(runs):
            at = 0
            while at < count:
                self._check()
                try:
                    at += cipher.open_into(scratch.received[at:count])
                except OSError as error:
                    self._fail(error)
                if at < count:
                    if cipher.has_ended:
                        self._fail(_ended())
                    cipher.feed(sealed[: self._receive(head, seconds)])
            scratch.copy(some, count, self._fail, into=False)

    def _receive(self, head: _Head, seconds: float) -> int:
        """Whatever comes next, as many bytes as are here."""
        began_at = time.monotonic()
        while not (moved := self._call(_libc.recvmsg, head, 0)):
            if time.monotonic() - began_at > seconds:
                self._fail(TimeoutError("timed out"))
        return moved

    def _move(self, call: ctypes._NamedFuncPointer, flags: int, runs: list[int], seconds: float) -> None:
        """Move all of these runs of memory: address, length, address, length, …"""
        table = (ctypes.c_uint64 * len(runs))(*runs)
        head, at, moved_at = _Head(), 0, time.monotonic()
        while at < len(table):
            head.runs = ctypes.addressof(table) + ctypes.sizeof(ctypes.c_uint64) * at
            head.count = min((len(table) - at) // 2, MOST_RUNS)
            if moved := self._call(call, head, flags):
                moved_at = time.monotonic()
                at = _advance(table, at, moved)
            elif time.monotonic() - moved_at > seconds:
                self._fail(TimeoutError("timed out"))

    def _call(self, call: ctypes._NamedFuncPointer, head: _Head, flags: int) -> int:
        """One call into the kernel. Returns how many bytes it has moved, or fails; 0: none within a slice of time."""
        self._check()
        moved: int = call(self._socket.fileno(), ctypes.byref(head), flags)
        if moved > 0:
            if call is _libc.recvmsg:
                self.heard_at = time.monotonic()
            return moved
        if moved == 0:
            self._fail(_ended())
        number = ctypes.get_errno()
        if number not in (errno.EAGAIN, errno.EINTR):
            # An address that cannot be written or read is the caller's fault: the connection itself is good, but
            # nobody knows any more where in it the next message begins.
            self._fail(OSError(number, os.strerror(number)))
        return 0

    def _check(self) -> None:
        """Fail if the connection is of no more use."""
        if self._is_cut and self._failure is None:
            self._failure = _CUT
        if self._failure is not None:
            kind, arguments = self._failure
            raise kind(*arguments)

    def _fail(self, error: OSError) -> None:
        # A call that was woken by a cut fails in other ways.
        if not self._is_cut and self._failure is None:
            self._failure = type(error), error.args
        self._check()

    # -------------------------------------------------------------------------------------------------------- ends

    def has_news(self) -> bool:
        """Whether bytes are here that nobody has read, or the end of the connection."""
        arrived = self._cipher is not None and self._cipher.has_bytes
        return self._is_cut or arrived or bool(self._look.poll(0))

    def can_write(self) -> bool:
        """Whether a short write would not have to wait, as far as can be seen."""
        with self._ending:
            if self._is_cut or self._failure is not None or self._writing.locked():
                return False
            look = select.poll()
            look.register(self._socket, select.POLLOUT)
            return bool(look.poll(0))

    def last_words(self) -> bytes:
        """What the peer has sent and nobody has read, for a caller whose write has failed. Empty if it is read now."""
        words = bytearray()
        if self._reading.acquire(blocking=False):
            try:
                with suppress(OSError):
                    while len(words) < MOST_LAST and (some := self._socket.recv(MOST_LAST, socket.MSG_DONTWAIT)):
                        words += some
                if self._cipher is not None:
                    words = self._opened(self._cipher, words)
            finally:
                self._reading.release()
        return bytes(words)

    def _opened(self, cipher: Cipher, sealed: bytearray) -> bytearray:
        opened = bytearray(len(sealed) + MOST_LAST)
        with suppress(OSError):
            cipher.feed(sealed)
            return opened[: cipher.open_into(memoryview(opened))]
        return bytearray()

    def is_alive(self) -> bool:
        """Whether the peer has neither closed the connection nor sent anything. For connections that are not in use."""
        return not self._is_cut and self._failure is None and not self.has_news()

    def cut(self, rank: int = 0) -> None:
        """End all calls, now and from now on, in any thread. When they have returned, their memory is free."""
        self._is_cut = True
        with self._ending, suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def stop(self) -> None:
        """Cut the connection, and wait until no call uses any memory."""
        self.cut()
        with self._reading, self._writing:
            pass

    def say_goodbye(self, seconds: float) -> None:
        """Send no more, and drop what still comes until the peer sends no more either, for these seconds at most.

        So the peer can read the last message. A socket that is closed while bytes have not been read ends with a reset,
        which may overtake what was sent before it.
        """
        with suppress(OSError), self._reading:
            self._socket.shutdown(socket.SHUT_WR)
            until, scratch = time.monotonic() + seconds, bytearray(MOST_DROPPED)
            while not self._is_cut and (left := until - time.monotonic()) > 0:
                if self._look.poll(1000 * left) and not self._socket.recv_into(scratch):
                    return

    def close(self) -> None:
        """Cut the connection, wait until no thread uses it, and free its descriptor."""
        breaks_off = self._is_cut
        self.cut()
        with self._reading, self._writing, self._ending:
            if breaks_off or self._failure is not None:
                self._set(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # Close by a reset.
            self._socket.close()
            if self._scratch is not None:
                self._scratch.close()

    def _leave_to_parent(self) -> None:
        """In the child of a fork: the connection is the parent's."""
        self._failure = ConnectionAbortedError, ("the connection belongs to the process that has forked this one",)
        self._is_cut = True
        self._reading, self._writing, self._ending = threading.Lock(), threading.Lock(), threading.Lock()
        self._socket.close()
        if self._scratch is not None:
            self._scratch.close()


class Scratch:
    """Where bytes are encrypted and decrypted: the kernel copies them out of the tensors, and into them.

    So memory that somebody has unmapped or protected is an error here, as it is without encryption. OpenSSL, which
    would write there by itself, would end the process.
    """

    def __init__(self) -> None:
        self._fd = os.memfd_create("transfuse-tls", os.MFD_CLOEXEC)
        try:
            os.ftruncate(self._fd, 2 * SECURE_PIECE_BYTES)
            self._memory = mmap.mmap(self._fd, 2 * SECURE_PIECE_BYTES)
        except BaseException:
            os.close(self._fd)
            raise
        self.sent = memoryview(self._memory)[:SECURE_PIECE_BYTES]
        self.received = memoryview(self._memory)[SECURE_PIECE_BYTES:]
        #: What comes from the kernel before it is decrypted.
        self.sealed = (ctypes.c_ubyte * SECURE_PIECE_BYTES)()

    def copy(self, runs: list[int], count: int, fail: Callable[[OSError], None], *, into: bool) -> None:
        """Copy ``count`` bytes from these runs of memory ``into`` what is sent, or to them from what was received."""
        call, at = (_out_of_memory, 0) if into else (_into_memory, SECURE_PIECE_BYTES)
        moved = call(self._fd, (ctypes.c_uint64 * len(runs))(*runs), len(runs) // 2, at)
        if moved != count:
            number = ctypes.get_errno() if moved < 0 else errno.EFAULT
            fail(OSError(number, os.strerror(number)))

    def close(self) -> None:
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)
            with suppress(BufferError):  # In a forked child, a thread of the parent's may have been using them.
                self.sent.release()
                self.received.release()
                self._memory.close()


def _runs(parts: Sequence[Part]) -> list[int]:
    """Where these lie in memory: address, length, address, length, …"""
    runs: list[int] = []
    for part in parts:
        if isinstance(part, tuple):
            address, left = part
        elif isinstance(part, torch.Tensor):
            address, left = part.data_ptr(), part.numel() * part.element_size()
        else:
            address, left = np.frombuffer(part, np.uint8).__array_interface__["data"][0] if part else 0, len(part)
        while left > 0:
            runs += (address, min(left, STREAM_MOST_BYTES))
            address, left = address + STREAM_MOST_BYTES, left - STREAM_MOST_BYTES
    return runs


def _shares(runs: list[int]) -> Iterator[tuple[list[int], int]]:
    """The same runs in lists of a limited number of bytes, which follow."""
    some: list[int] = []
    room = SECURE_PIECE_BYTES
    for address, length in zip(runs[::2], runs[1::2], strict=True):
        while length > 0:
            part = min(length, room)
            some += (address, part)
            address, length, room = address + part, length - part, room - part
            if not room or len(some) == 2 * MOST_RUNS:
                yield some, SECURE_PIECE_BYTES - room
                some, room = [], SECURE_PIECE_BYTES
    if some:
        yield some, SECURE_PIECE_BYTES - room


def _ended() -> OSError:
    return ConnectionResetError("the peer has closed the connection")


def _advance(table: ctypes.Array[ctypes.c_uint64], at: int, moved: int) -> int:
    """Count these bytes as moved, from the run at ``at`` on. Return where the first run begins that is not done."""
    while moved:
        left = table[at + 1]
        if moved < left:
            table[at] += moved
            table[at + 1] -= moved
            return at
        moved -= left
        at += 2
    return at


_all: weakref.WeakSet[Stream] = weakref.WeakSet()


def _after_fork() -> None:
    for stream in list(_all):
        stream._leave_to_parent()


os.register_at_fork(after_in_child=_after_fork)
