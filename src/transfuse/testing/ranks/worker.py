"""One process on this machine, and the pipe to it. The process does not outlive its parent, however the parent ends."""

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

# multiprocessing can read a process's exit status only once: if two threads ask how a process ended, one of them gets a
# wrong answer. Starting a process asks about all others.
_asking = threading.Lock()

_preloaded = ["transfuse.testing.ranks"]
_SETTLED = "transfuse.testing.ranks.settled"


def preload(*modules: str) -> None:
    """Let the fork server import these modules too. Each process has one fork server, started with the first fork."""
    _preloaded.extend(module for module in modules if module not in _preloaded)


def server_threads() -> int:
    """How many threads the fork server has. With more than one, its forks may hang."""
    multiprocessing.get_context("forkserver").set_forkserver_preload([*_preloaded, _SETTLED])
    multiprocessing.forkserver.ensure_running()
    return len(os.listdir(f"/proc/{_fork_server()._forkserver_pid}/task"))


def _fork_server() -> Any:
    return getattr(multiprocessing.forkserver, "_forkserver")  # noqa: B009 - hidden from mypy


class Worker:
    """A fresh process that runs ``function(connection, *args)``, a function of a module.

    When the function ends, so does the process, and ``connection`` here gets an end of file. With ``spawn`` the process
    also ends when the thread that started it ends. ``environ`` is the whole environment, by default this process's own.
    Without ``interrupts`` the process ignores the signals that a terminal sends, so that only the parent answers them.
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
        # Any: the stubs do not know that every context has a Process.
        context: Any = multiprocessing.get_context(method)
        if method == "forkserver":
            context.set_forkserver_preload([*_preloaded, _SETTLED])
        self.connection, theirs = context.Pipe()
        self._exit_code: int | None = None
        life = (dict(os.environ if environ is None else environ), threads, interrupts)
        self._process = context.Process(target=_live, args=(theirs, life, function, args), name=name, daemon=daemon)
        try:
            with interrupts_held(), _asking:
                self._process.start()
                # From now on only the process holds this end, so that its death is an end of file here.
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
        """A descriptor that becomes ready when the process has ended."""
        return int(self._process.sentinel)

    @property
    def state(self) -> str:
        """The process's state by the kernel's letter."""
        return _state_in(pathlib.Path(f"/proc/{self.pid}/stat"))

    def wait(self, seconds: float | None = None) -> int | None:
        """Wait until it has ended; return its exit code, negative for a signal, or None if it still runs."""
        if self._exit_code is None and multiprocessing.connection.wait([self.sentinel], seconds):
            with _asking:
                self._process.join()
                self._exit_code = self._process.exitcode
        return self._exit_code

    def signal(self, number: int) -> None:
        """Send a signal, unless the process has ended; do not wait for its effect."""
        with _asking:
            # After the process has been waited for, its pid may belong to another process.
            if self._exit_code is None and self._process.exitcode is None:
                os.kill(self.pid, number)

    def kill(self) -> None:
        self.signal(signal.SIGKILL)

    def freeze(self) -> None:
        """Stop the process, and return once all its threads stand still."""
        self.signal(signal.SIGSTOP)
        until_frozen(self.pid)

    def thaw(self) -> None:
        self.signal(signal.SIGCONT)

    def end(self) -> None:
        """Kill the process if it still runs, and wait until it is gone."""
        if self._process.pid is not None:
            self.kill()
            self.wait()
        self.connection.close()


def freeze(pid: int) -> None:
    """Stop any process of this machine, and return once all its threads stand still."""
    os.kill(pid, signal.SIGSTOP)
    until_frozen(pid)


def until_frozen(pid: int) -> None:
    """Wait until no thread of a process runs. On a busy machine some go on for a moment after SIGSTOP."""
    until = time.monotonic() + 30
    while any(state not in "tTZX" for state in map(_state_in, pathlib.Path(f"/proc/{pid}/task").glob("*/stat"))):
        assert time.monotonic() < until, f"process {pid} does not stop"
        time.sleep(0.001)


def _state_in(stat: pathlib.Path) -> str:
    """The state in such a file of the kernel's, by its letter: R, S, T if it is stopped, …, X if it is gone."""
    try:
        return stat.read_text().rsplit(")", 1)[1].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return "X"


def loopback_environment() -> dict[str, str]:
    """Variables that make gloo use the loopback interface, without looking up this machine's name."""
    loopback = {name for _, name in socket.if_nameindex()} & {"lo", "lo0"}
    return {"GLOO_SOCKET_IFNAME": loopback.pop()} if loopback else {}


def loopback_store(timeout: timedelta) -> TCPStore:
    """A store in this process through which ranks meet, so that it outlives every rank."""
    # On a socket of our own: the store would listen on all interfaces, whatever host it is given.
    with socket.create_server((HOST, 0)) as listener:
        port = listener.getsockname()[1]
        return TCPStore(HOST, port, None, True, timeout, wait_for_workers=False, master_listen_fd=listener.detach())


@contextmanager
def interrupts_held() -> Iterator[None]:
    """Delay Ctrl-C and the like until the end of this block; processes started in it do not get these signals.

    A terminal sends Ctrl-C, and its own closing, to every process; only the parent should answer.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    held = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    came: list[int] = []
    # Blocked in this thread, because a new process inherits that; another thread may still get the signal.
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
    # A fork has the environment of its fork server's start, and OMP_NUM_THREADS was read then, too.
    os.environ.clear()
    os.environ.update(environ)
    torch.set_num_threads(threads)
    function(connection, *args)


def _end_with_parent() -> None:
    """Let the kernel send SIGKILL when the process that forked this one ends, even while this one is frozen."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    # A fork server ends with its parent only if no fork keeps its pipe open.
    server = _fork_server()
    if server._forkserver_alive_fd is not None:
        os.close(server._forkserver_alive_fd)
        server._forkserver_alive_fd = None
    parent = multiprocessing.parent_process()
    # The parent may have ended already.
    if parent is not None and multiprocessing.connection.wait([parent.sentinel], 0):
        os._exit(1)
