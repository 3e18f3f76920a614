"""One process of this machine, and the pipe to it. It does not outlive its parent, however that ends."""

from __future__ import annotations

import ctypes
import multiprocessing
import multiprocessing.connection
import multiprocessing.forkserver
import os
import pathlib
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any, Literal

import torch
from torch._C._distributed_c10d import TCPStore

from transfuse.testing.ranks.foreground import come_to_foreground

__all__ = [
    "HOST",
    "Method",
    "Worker",
    "interrupts_held",
    "loopback_environment",
    "loopback_store",
    "preload",
    "server_threads",
]

HOST = "127.0.0.1"

#: ``spawn``: a new interpreter, which imports everything itself. ``forkserver``: a fork of a process that has imported
#: torch and done nothing else, which takes a tenth of a second instead of two or more.
Method = Literal["spawn", "forkserver"]

_PR_SET_PDEATHSIG = 1

# What multiprocessing knows of a process can be read once: of two threads that ask how a process ended, one is told
# nonsense. To start a process asks about all others.
_asking = threading.Lock()

_preloaded = ["transfuse.testing.ranks"]


def preload(*modules: str) -> None:
    """Let the fork server import these as well. There is one for each process, started with the first fork."""
    _preloaded.extend(module for module in modules if module not in _preloaded)


def server_threads() -> int:
    """How many threads the fork server has. With more than one, what is forked from it may hang."""
    multiprocessing.get_context("forkserver").set_forkserver_preload(_preloaded)
    multiprocessing.forkserver.ensure_running()
    return len(os.listdir(f"/proc/{_fork_server()._forkserver_pid}/task"))


def _fork_server() -> Any:
    return getattr(multiprocessing.forkserver, "_forkserver")  # noqa: B009 - hidden from mypy


class Worker:
    """A fresh process that runs ``function(connection, *args)``, a function of a module.

    The function ends with the process, and that is an end of file on ``connection`` here. With ``spawn`` the process
    ends also with the thread that started it. ``environ`` is the whole environment, this process's own by default.
    Without ``interrupts`` the process ignores what a terminal sends to everyone, so that the parent alone answers it.
    """

    def __init__(
        self,
        function: Callable[..., None],
        *args: object,
        name: str,
        method: Method = "spawn",
        environ: Mapping[str, str] | None = None,
        threads: int = 1,
        interrupts: bool = True,
        daemon: bool = True,
    ) -> None:
        # Any: the stubs do not know that every context has Process.
        context: Any = multiprocessing.get_context(method)
        if method == "forkserver":
            context.set_forkserver_preload(_preloaded)
        self.connection, theirs = context.Pipe()
        self._exit_code: int | None = None
        life = (dict(os.environ if environ is None else environ), threads, interrupts)
        self._process = context.Process(target=_live, args=(theirs, life, function, args), name=name, daemon=daemon)
        try:
            with interrupts_held(), _asking:
                self._process.start()
                # The process alone now holds this end, so that its death is an end of file here.
                theirs.close()
        except BaseException:
            self.end()
            raise

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return int(self._process.pid)

    @property
    def sentinel(self) -> int:
        """A descriptor that is ready when the process has ended."""
        return int(self._process.sentinel)

    @property
    def state(self) -> str:
        """As the kernel names it: R, S, T if it is stopped, …, X if it is gone."""
        try:
            return pathlib.Path(f"/proc/{self.pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
        except (FileNotFoundError, ProcessLookupError):
            return "X"

    def wait(self, seconds: float | None = None) -> int | None:
        """Wait until it has ended: its exit code, negative for a signal. None if it is still there then."""
        if self._exit_code is None and multiprocessing.connection.wait([self.sentinel], seconds):
            with _asking:
                self._process.join()
                self._exit_code = self._process.exitcode
        return self._exit_code

    def signal(self, number: int) -> None:
        """Send a signal, unless the process has ended; do not wait for its effect."""
        with _asking:
            # A pid that has been waited for may be somebody else's by now.
            if self._exit_code is None and self._process.exitcode is None:
                os.kill(self.pid, number)

    def kill(self) -> None:
        self.signal(signal.SIGKILL)

    def freeze(self) -> None:
        """Stop the process, and return when all of it stands still."""
        self.signal(signal.SIGSTOP)
        until = time.monotonic() + 5
        while self.state not in "tTZX":
            assert time.monotonic() < until, f"process {self.pid} does not stop"
            time.sleep(0.001)

    def thaw(self) -> None:
        self.signal(signal.SIGCONT)

    def end(self) -> None:
        """Kill it if it is still there, and wait until it is gone."""
        if self._process.pid is not None:
            self.kill()
            self.wait()
        self.connection.close()


def loopback_environment() -> dict[str, str]:
    """Variables that let gloo take the loopback interface, without looking up this machine's name."""
    loopback = {name for _, name in socket.if_nameindex()} & {"lo", "lo0"}
    return {"GLOO_SOCKET_IFNAME": loopback.pop()} if loopback else {}


def loopback_store(timeout: timedelta) -> TCPStore:
    """A store for ranks to meet through, in this process, so that it outlives every one of them."""
    # On a socket of one's own: a store would listen on all interfaces, whatever host it is given.
    with socket.create_server((HOST, 0)) as listener:
        port = listener.getsockname()[1]
        return TCPStore(HOST, port, None, True, timeout, wait_for_workers=False, master_listen_fd=listener.detach())


@contextmanager
def interrupts_held() -> Iterator[None]:
    """Ctrl-C and its like take effect when this is over, and what is started meanwhile does not hear them.

    A terminal sends Ctrl-C, and that it is closed, to everyone; the parent alone answers.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    held = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    came: list[int] = []
    # Blocked in this thread, which is what a new process inherits; another thread may still be given the signal.
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, held)
    before = {number: signal.signal(number, lambda number, _: came.append(number)) for number in held}
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        for number, handler in before.items():
            signal.signal(number, handler)
    for late in came:
        os.kill(os.getpid(), late)


# ------------------------------------------------------------------------------------------------------- in the process


def _live(
    connection: Connection[Any, Any],
    life: tuple[dict[str, str], int, bool],
    function: Callable[..., None],
    args: tuple[object, ...],
) -> None:
    environ, threads, interrupts = life
    if interrupts:
        come_to_foreground()
    else:
        for number in (signal.SIGINT, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    _end_with_parent()
    # A fork server has the environment of the day it was started, and OMP_NUM_THREADS was read then, too.
    os.environ.clear()
    os.environ.update(environ)
    torch.set_num_threads(threads)
    function(connection, *args)


def _end_with_parent() -> None:
    """SIGKILL when the process that forked this one ends, even while this one is frozen."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    # A fork server ends with its parent only when no fork holds on to it.
    server = _fork_server()
    if server._forkserver_alive_fd is not None:
        os.close(server._forkserver_alive_fd)
        server._forkserver_alive_fd = None
    parent = multiprocessing.parent_process()
    # The parent may have ended before.
    if parent is not None and multiprocessing.connection.wait([parent.sentinel], 0):
        os._exit(1)
