"""Find the keeper of this host and run, or start it."""

from __future__ import annotations

import fcntl
import os
import pathlib
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress

from transfuse._errors import TransfuseError
from transfuse._keeper import runs
from transfuse._keeper.frames import KeeperLink, KeeperLost
from transfuse._keeper.runs import Run
from transfuse._limits import TLS_VARIABLES, may_start_keeper
from transfuse._tls import TLS
from transfuse._tuning import KEEPER_AWAIT_SECONDS, KEEPER_LEAST_SECONDS, KEEPER_START_SECONDS

SOCKET_NAME, LOG_NAME, LOCK_NAME = "socket", "log", "lock"
#: Variables of launchers that are meant for workers, not for the keeper.
NOT_FOR_THE_KEEPER = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "KMP_AFFINITY", "GOMP_CPU_AFFINITY", "OMP_PROC_BIND")
#: The code with which a keeper ends that cannot write its files. Its log may be one of them.
CANNOT_WRITE = os.EX_CANTCREAT


def attach(
    run: Run, seconds: float, is_wanted: Callable[[], bool] = lambda: True, *, tls: TLS | None = None
) -> KeeperLink:
    """Connect to the keeper of a run. If there is none, start one, detached from this process.

    Where workers start none (``TRANSFUSE_KEEPER_START=0``), wait for it. If the keeper is not wanted any more by then,
    this raises, and starts none. ``tls``: for one that is started.
    """
    until = time.monotonic() + seconds
    if not may_start_keeper():
        return _await_service(run, seconds, until, is_wanted)
    found = find(run, until, is_wanted)
    if isinstance(found, KeeperLink):
        return found
    with found:
        process = _start(found, tls)
    return _await(process, run.directory, seconds, until)


def find(run: Run, until: float, is_wanted: Callable[[], bool] = lambda: True) -> KeeperLink | Lock:
    """A connection to the keeper of a run. If there is none, the lock of its directory, to start one."""
    path = str(run.directory / SOCKET_NAME)
    with suppress(KeeperLost):
        return KeeperLink.to(path, _left(until))
    while True:
        if not is_wanted():
            raise _not_wanted()
        lock = _try_lock(run)
        # The process that has the lock may listen by now.
        with suppress(KeeperLost):
            link = KeeperLink.to(path, _left(until))
            if lock is not None:
                lock.close()
            return link
        if lock is not None:
            return lock
        if time.monotonic() > until:
            raise TransfuseError(_in_vain(run.directory))
        time.sleep(KEEPER_START_SECONDS)


def _await_service(run: Run, seconds: float, until: float, is_wanted: Callable[[], bool]) -> KeeperLink:
    """The connection to a keeper that somebody else runs, as soon as it is there."""
    path = str(run.directory / SOCKET_NAME)
    while is_wanted():
        with suppress(KeeperLost):
            return KeeperLink.to(path, _left(until))
        if time.monotonic() > until:
            raise TransfuseError(
                f"no keeper of the run {run.name} answers at {path} within {seconds:g} s, and TRANSFUSE_KEEPER_START=0 "
                "says that workers start none. Start it there: transfuse keep, with the same TRANSFUSE_RUN and "
                "TRANSFUSE_KEEPER_DIR, as the same user; or unset the variable"
            )
        time.sleep(KEEPER_AWAIT_SECONDS)
    raise _not_wanted()


def _not_wanted() -> TransfuseError:
    return TransfuseError("the keeper is not wanted any more")


def _await(process: subprocess.Popen[bytes], directory: pathlib.Path, seconds: float, until: float) -> KeeperLink:
    """The connection to a keeper that this process has started."""
    path = str(directory / SOCKET_NAME)
    while time.monotonic() < until:
        with suppress(KeeperLost):
            link = KeeperLink.to(path, _left(until))
            # The keeper is a child of this process: if it ends first, no zombie stays.
            threading.Thread(target=process.wait, name="transfuse-keeper-ends", daemon=True).start()
            return link
        code = process.poll()
        if code == CANNOT_WRITE:
            raise TransfuseError(cannot_write(directory, _try_to_write(directory) or _last_words(directory)))
        if code is not None:
            raise TransfuseError(f"the keeper ended with code {code}:\n{_last_words(directory)}")
        time.sleep(KEEPER_START_SECONDS)
    process.kill()
    process.wait()
    raise TransfuseError(f"the keeper did not start within {seconds:g} s:\n{_last_words(directory)}")


def _left(until: float) -> float:
    return max(until - time.monotonic(), KEEPER_LEAST_SECONDS)


def _start(lock: Lock, tls: TLS | None = None) -> subprocess.Popen[bytes]:
    """Start a keeper, which has the lock from now on, whatever becomes of this process."""
    directory = lock.directory
    own = {*NOT_FOR_THE_KEEPER, *TLS_VARIABLES}
    environment = {name: value for name, value in os.environ.items() if name not in own}
    environment |= {} if tls is None else tls.as_environment()
    # The keeper works in /, where relative paths would mean something else.
    environment["PYTHONPATH"] = os.pathsep.join(os.path.abspath(path) for path in sys.path if path)
    try:
        log = open(directory / LOG_NAME, "ab")  # noqa: SIM115
    except OSError as error:
        raise TransfuseError(cannot_write(directory, error)) from error
    with log:
        # A session of its own, and no descriptor of ours but the lock: readers of our output must not wait for it.
        process = subprocess.Popen(
            [sys.executable, "-m", "transfuse._keeper.process", str(directory), str(lock.fd)],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env=environment,
            cwd="/",
            start_new_session=True,
            close_fds=True,
            pass_fds=[lock.fd],
        )
        lock.note(process.pid)
        return process


def _last_words(directory: pathlib.Path) -> str:
    with suppress(OSError):
        return (directory / LOG_NAME).read_text(errors="replace")[-2000:]
    return ""


def _try_to_write(directory: pathlib.Path) -> OSError | None:
    """Why no file can be written in a directory; None: it can be. A log there cannot say so."""
    path = directory / f"probe.{os.getpid()}"
    try:
        path.write_bytes(bytes(4096))
    except OSError as error:
        return error
    finally:
        with suppress(OSError):
            path.unlink()
    return None


def cannot_write(directory: pathlib.Path, why: object) -> str:
    """What to say if the keeper's files cannot be written."""
    room = ""
    with suppress(OSError):
        system = os.statvfs(directory if directory.exists() else directory.parent)
        room = f" ({system.f_bavail * system.f_frsize >> 10} KiB and {system.f_favail} files are free there)"
    return (
        f"the keeper's files in {directory} cannot be written{room}: {why}\nMake room there, or set "
        "TRANSFUSE_KEEPER_DIR, on all ranks of the host, to a directory that has some. The keeper needs a few KiB"
    )


# ---------------------------------------------------------------------------------------------------- the lock
#
# To make a keeper's files, or remove them, a process holds the lock of the run's directory. A keeper holds it while
# it lives: it inherits the descriptor from the process that starts it, so there is no moment between the two. A keeper
# that ends removes the lock's file and the directory, too. So a lock counts only if its file still has its name:
# somebody who waited for the lock of an ended keeper begins again, with a directory of its own.

#: Descriptors of locks that this process holds. A process that it forks, such as a data loader's, must not hold them.
_held: set[int] = set()
_forking = threading.RLock()


def _let_go() -> None:
    for fd in _held:
        with suppress(OSError):
            os.close(fd)
    _held.clear()
    _forking.release()


os.register_at_fork(before=_forking.acquire, after_in_parent=_forking.release, after_in_child=_let_go)


class Lock:
    """The lock of a run's directory, held until `close`, or the end of its block; in a keeper, as long as it lives."""

    def __init__(self, directory: pathlib.Path, fd: int) -> None:
        """``fd``: a descriptor of the lock's file, which this object closes."""
        self.directory, self.fd = directory, fd
        _held.add(fd)

    @classmethod
    def take(cls, directory: pathlib.Path) -> Lock | None:
        """Take the lock of a directory; None if another process has it, or if the directory is being removed."""
        try:
            with _forking:
                lock = cls(directory, os.open(directory / LOCK_NAME, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
        except FileNotFoundError:
            return None
        with suppress(BlockingIOError):
            fcntl.flock(lock.fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if lock.counts():
                return lock
        lock.close()
        return None

    @classmethod
    def inherit(cls, directory: pathlib.Path, fd: int) -> Lock:
        """The lock that the process which has started this one has passed on."""
        os.set_inheritable(fd, False)
        return cls(directory, fd)

    def counts(self) -> bool:
        """Whether its file still has its name."""
        with suppress(OSError):
            return self.fd >= 0 and os.path.samestat(os.fstat(self.fd), (self.directory / LOCK_NAME).stat())
        return False

    def note(self, pid: int) -> None:
        """Note in the file who has the lock, for the errors of processes that wait."""
        with suppress(OSError):
            os.pwrite(self.fd, b"%-10d" % pid, 0)

    def close(self) -> None:
        """Give the lock back, unless a keeper that was started meanwhile has it."""
        with _forking:
            fd, self.fd = self.fd, -1
            if fd in _held:
                _held.discard(fd)
                os.close(fd)

    def __enter__(self) -> Lock:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _try_lock(run: Run) -> Lock | None:
    """The lock of a run's directory, which is made if it is not there; None if another process has it."""
    try:
        lock = Lock.take(runs.make_directory(run))
        if lock is not None:
            # The keeper that ended just now may have removed what we have just noted.
            runs.make_directory(run)
        return lock
    except OSError as error:
        raise TransfuseError(cannot_write(run.directory, error)) from error


def _in_vain(directory: pathlib.Path) -> str:
    pid = ""
    with suppress(OSError):
        pid = (directory / LOCK_NAME).read_text().strip()
    who = f"process {pid}" if pid else "another process"
    cure = f" (kill -CONT {pid} lets it go on, kill -9 {pid} ends it)" if pid else ""
    return (
        f"{who} is the keeper in {directory}, or starts it, and does not answer: it was stopped{cure}, or the machine "
        "is too busy"
    )
