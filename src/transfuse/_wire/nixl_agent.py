"""This process's NIXL agent: it registers memory, and reads the registered memory of other processes' agents.

There is one agent for the process. It is made in a thread, because that can take seconds. The bindings are used
directly: the class on top of them, ``nixl_agent``, makes a progress thread that never sleeps and takes a core.

Three rules make up for what NIXL does not promise:

- A transfer that has not ended with success may still write, even after NIXL has released it. So its memory is never
  used again: :meth:`Agent.leave` keeps the memory, its registration and the transfer for as long as the process lives.
- A forked child has the agent's memory but not its thread, and the agent's destructor would wait for that thread for
  ever. So the child drops the agent without calling the destructor.
- At exit the agent is destroyed before the interpreter is, unless transfers were left: then it stays as it is.
"""

from __future__ import annotations

import atexit
import ctypes
import faulthandler
import importlib
import importlib.util
import logging
import os
import secrets
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch.multiprocessing.reductions import StorageWeakRef

from transfuse._arguments import INSTALL_NIXL
from transfuse._memory.vm import Ranges
from transfuse._tuning import (
    NIXL_DESTROY_SECONDS,
    NIXL_EXIT_SECONDS,
    NIXL_LINGER_SECONDS,
    NIXL_LOOK_SECONDS,
    NIXL_PROGRESS_MICROSECONDS,
)

BACKEND = "UCX"

logger = logging.getLogger("transfuse")

#: A reference that tells when a storage is gone, which the lifetimes of its Python objects do not.
_weak_reference: Any = StorageWeakRef
#: The address of a run of memory, and its size in bytes.
Window = tuple[int, int]


class NixlFailed(Exception):
    """Says what NIXL could not do."""


def installed() -> str | None:
    """The version of NIXL; None if it is not installed."""
    try:
        return version("nixl") if importlib.util.find_spec("nixl") is not None else None
    except (PackageNotFoundError, ValueError):
        return None


class Transfer:
    """A read that has been posted."""

    def __init__(self, handle: Any, state: Any) -> None:
        self.handle = handle
        self.state = state


class Agent:
    """An agent of NIXL with its UCX backend. Every method may be called by any thread."""

    def __init__(self) -> None:
        #: Other agents know this one by its name, so it must be nobody else's.
        self.name = f"transfuse-{secrets.token_hex(16)}"
        self.version = installed() or "unknown"
        self._nixl = _import()
        config = self._nixl.nixlAgentConfig()
        config.useProgThread = True
        config.useListenThread = False
        config.syncMode = self._nixl.NIXL_THREAD_SYNC_STRICT
        config.pthrDelay = NIXL_PROGRESS_MICROSECONDS
        with _saying("make an agent"):
            self._agent = self._nixl.nixlAgent(self.name, config)
            self._backends = [self._agent.createBackend(BACKEND, {})]
        #: Held while windows of storages are registered or deregistered.
        self._registering = threading.Lock()
        #: Registered windows, by address and size, each with the storages that it was registered for.
        self._registered: dict[Window, dict[int, Any]] = {}
        #: Guards all that follows.
        self._lock = threading.Lock()
        #: How many readers use each remote agent.
        self._users: dict[str, int] = {}
        #: What transfers that were given up may still write to, and the transfers themselves.
        self._left: list[Any] = []
        #: What remote agents may still be reading although the lease has ended.
        self._lingering: list[object] = []
        self._closed = False
        #: How many threads are inside the agent.
        self._calls = 0

    @contextmanager
    def _calling(self, what: str) -> Iterator[Any]:
        with self._lock:
            if self._closed:
                raise NixlFailed("the agent was closed, because the process ends")
            self._calls += 1
        try:
            with _saying(what):
                yield self._agent
        finally:
            with self._lock:
                self._calls -= 1

    # -- memory

    def _regions(self, windows: Sequence[Window]) -> Any:
        return self._nixl.nixlRegDList(self._nixl.DRAM_SEG, [(address, size, 0, b"") for address, size in windows])

    def register(self, windows: Sequence[Window]) -> None:
        """Register memory, given by address and size, so that remote agents can read it, or reads can land in it."""
        with self._calling("register memory") as agent:
            agent.registerMem(self._regions(windows), self._backends)

    def deregister(self, windows: Sequence[Window]) -> None:
        with self._calling("deregister memory") as agent:
            agent.deregisterMem(self._regions(windows), self._backends)

    def register_storages(self, windows: Sequence[Window], storages: Sequence[torch.UntypedStorage]) -> None:
        """Register windows of storages, those that are not registered yet. The caller keeps the storages alive.

        A window stays registered for later calls while its storage lives. Nobody tells when a storage has gone, so this
        also looks for windows whose storages have.
        """
        with self._registering:
            self._drop_dead()
            fresh = [window for window in dict.fromkeys(windows) if window not in self._registered]
            if fresh:
                self.register(fresh)
            for window, storage in zip(windows, storages, strict=True):
                known = self._registered.setdefault(window, {})
                if storage._cdata not in known:
                    known[storage._cdata] = _weak_reference(storage)

    def drop_dead(self) -> None:
        """Deregister windows whose storages are gone."""
        with self._registering:
            self._drop_dead()

    def _drop_dead(self) -> None:
        dead = [window for window, known in self._registered.items() if all(one.expired() for one in known.values())]
        for window in dead:
            del self._registered[window]
        if dead:
            self.deregister(dead)

    def metadata(self, windows: Sequence[Window]) -> bytes:
        """What a remote agent must know to read these registered windows."""
        with self._calling("describe memory") as agent:
            return bytes(agent.getLocalPartialMD(self._regions(windows), True, self._backends))

    # -- other agents

    def connect(self, name: str, metadata: bytes) -> None:
        """Get to know a remote agent. The caller has to call :meth:`disconnect` later."""
        if name == self.name:
            return  # A process may read its own memory. Its agent knows itself.
        with self._lock:
            self._users[name] = self._users.get(name, 0) + 1
        try:
            with self._calling("connect") as agent:
                found = agent.loadRemoteMD(metadata)
            found = found.decode() if isinstance(found, bytes) else str(found)
            if found != name:
                raise NixlFailed("NIXL could not connect: the metadata are another agent's")
        except BaseException:
            self.disconnect(name)
            raise

    def disconnect(self, name: str) -> None:
        if name == self.name:
            return
        with self._lock:
            self._users[name] -= 1
            if self._users[name]:
                return
            del self._users[name]
        with suppress(NixlFailed), self._calling("disconnect") as agent:
            agent.invalidateRemoteMD(name)

    # -- reading

    def prepare(self, name: str, theirs: Ranges, mine: Ranges) -> Any:
        """Prepare to read ranges of a remote agent's registered memory into our own. Nothing is read yet."""
        with self._calling("prepare a read") as agent:
            ends = [self._nixl.nixlXferDList(self._nixl.DRAM_SEG, _descriptors(ranges)) for ranges in (mine, theirs)]
            return agent.createXferReq(self._nixl.NIXL_READ, *ends, name, b"", self._backends)

    def post(self, handle: Any) -> Transfer:
        """Begin a read. If this raises, the read may have begun nevertheless."""
        with self._calling("read") as agent:
            return Transfer(handle, agent.postXferReq(handle, b""))

    def is_done(self, transfer: Transfer) -> bool:
        """Whether the read has ended with success."""
        if transfer.state == self._nixl.NIXL_IN_PROG:
            with self._calling("read") as agent:
                transfer.state = agent.getXferStatus(transfer.handle)
        if transfer.state == self._nixl.NIXL_IN_PROG:
            return False
        if transfer.state != self._nixl.NIXL_SUCCESS:
            raise NixlFailed(f"NIXL could not read: {transfer.state}")
        return True

    def release(self, handle: Any) -> None:
        """Free a prepared read that was not posted, or that is done."""
        with suppress(NixlFailed), self._calling("release a read") as agent:
            agent.releaseXferReq(handle)

    def leave(self, *what: object) -> None:
        """Keep for ever what a read that was given up may still use, and keep the agent alive at exit."""
        with self._lock:
            self._left.append(what)

    def keep_for_now(self, what: object) -> None:
        """Keep what remote agents may still be reading, for :data:`NIXL_LINGER_SECONDS`."""
        with self._lock:
            self._lingering.append(what)

        def drop() -> None:
            with self._lock:
                self._lingering.remove(what)

        timer = threading.Timer(NIXL_LINGER_SECONDS, drop)
        timer.daemon = True
        timer.start()

    @property
    def left(self) -> int:
        """How many reads were given up."""
        return len(self._left)

    # -- the end

    def close(self) -> None:
        """Destroy the agent, before the interpreter ends. If it may still write somewhere, keep it as it is."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
        until = time.monotonic() + NIXL_EXIT_SECONDS
        while self._calls and time.monotonic() < until:
            time.sleep(NIXL_LOOK_SECONDS)
        if self._calls or self._left:
            self.drop()
        # The destructor deregisters all memory, and waits for the progress thread.
        self._agent = None

    def drop(self) -> None:
        """See to it that the agent's destructor is never called."""
        if self._agent is not None:
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(self._agent))


def _descriptors(ranges: Ranges) -> npt.NDArray[np.uint64]:
    """Rows of address, size and device number."""
    return np.concatenate([ranges, np.zeros((len(ranges), 1), dtype=np.uint64)], axis=1)


def _import() -> Any:
    """NIXL's bindings."""
    before = logging.raiseExceptions
    try:
        return importlib.import_module("nixl")._bindings
    except (ImportError, AttributeError, OSError) as error:
        raise NixlFailed(f"NIXL cannot be imported: {error}; {INSTALL_NIXL}") from error
    finally:
        logging.raiseExceptions = before  # NIXL changes it for the whole process.


@contextmanager
def _saying(what: str) -> Iterator[None]:
    """Turn NIXL's errors, which are of many classes without a common base, into :class:`NixlFailed`."""
    try:
        yield
    except NixlFailed:
        raise
    except Exception as error:
        raise NixlFailed(f"NIXL could not {what}: {str(error) or type(error).__name__}") from error


class _Holder:
    """This process's agent, or the thread that makes it, or why there is none."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.ready = threading.Event()
        self.agent: Agent | None = None
        self.failure: NixlFailed | None = None
        self.begun = False

    def make(self) -> None:
        try:
            agent = Agent()
        except NixlFailed as error:
            self.failure = error
            logger.warning("%s; transfers do without NIXL", error)
        else:
            self.agent = agent
        self.ready.set()


_holder = _Holder()
#: In a forked child: the parent's agents.
_dropped: list[_Holder] = []


def begin() -> None:
    """Begin to make this process's agent, in a thread, unless that was begun before."""
    with _holder.lock:
        if _holder.begun:
            return
        _holder.begun = True
        threading.Thread(target=_holder.make, name="transfuse-nixl", daemon=True).start()


def get(seconds: float) -> Agent:
    """This process's agent. Waits at most ``seconds`` for it. Raises :class:`NixlFailed` if there is none by then."""
    begin()
    _holder.ready.wait(seconds)
    if _holder.failure is not None:
        raise _holder.failure
    if _holder.agent is None:
        raise NixlFailed("this process's NIXL agent is still being made")
    return _holder.agent


def _after_fork() -> None:
    global _holder
    _dropped.append(_holder)
    if _holder.agent is not None:
        _holder.agent.drop()
    _holder = _Holder()


def _at_exit() -> None:
    """Destroy the agent. If NIXL hangs in that, end the process: it holds the interpreter's lock all the while."""
    if _holder.agent is None:
        return
    if sys.__stderr__ is not None:
        with suppress(Exception):  # Some streams have no file descriptor.
            faulthandler.dump_traceback_later(NIXL_DESTROY_SECONDS, exit=True, file=sys.__stderr__)
    _holder.agent.close()
    faulthandler.cancel_dump_traceback_later()


os.register_at_fork(after_in_child=_after_fork)
atexit.register(_at_exit)
