"""Find the keeper of this host and run, or start it."""

from __future__ import annotations

import fcntl
import os
import pathlib
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from transfuse.errors import TransfuseError
from transfuse.keeper.frames import KeeperLost, Link
from transfuse.keeper.runs import Run, make_directory

__all__ = ["LOCK_NAME", "SOCKET_NAME", "attach", "locked", "try_lock"]

SOCKET_NAME, LOG_NAME, LOCK_NAME = "socket", "log", "lock"
#: Variables of launchers that are meant for workers, not for the keeper.
NOT_FOR_THE_KEEPER = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "KMP_AFFINITY", "GOMP_CPU_AFFINITY", "OMP_PROC_BIND")


def attach(run: Run, seconds: float) -> Link:
    """Connect to the keeper of a run. If there is none, start one, detached from this process."""
    until = time.monotonic() + seconds
    path = str(run.directory / SOCKET_NAME)
    with suppress(KeeperLost):
        return Link.to(path, seconds)
    with locked(run, until) as directory:
        # Another rank of this host may have started it meanwhile.
        with suppress(KeeperLost):
            return Link.to(path, max(until - time.monotonic(), 1.0))
        process = _start(directory)
        while time.monotonic() < until:
            with suppress(KeeperLost):
                link = Link.to(path, max(until - time.monotonic(), 1.0))
                # The keeper is a child of this process: if it ends first, no zombie stays.
                threading.Thread(target=process.wait, name="transfuse-keeper-ends", daemon=True).start()
                return link
            if process.poll() is not None:
                raise TransfuseError(f"the keeper ended with code {process.returncode}:\n{_last_words(directory)}")
            time.sleep(0.02)
        process.kill()
        process.wait()
        raise TransfuseError(f"the keeper did not start within {seconds:g} s:\n{_last_words(directory)}")


def _start(directory: pathlib.Path) -> subprocess.Popen[bytes]:
    environment = {name: value for name, value in os.environ.items() if name not in NOT_FOR_THE_KEEPER}
    # The keeper works in /, where relative paths would mean something else.
    environment["PYTHONPATH"] = os.pathsep.join(os.path.abspath(path) for path in sys.path if path)
    with open(directory / LOG_NAME, "ab") as log:
        # A session of its own, and no descriptor of ours: whoever reads our output must not wait for the keeper.
        return subprocess.Popen(
            [sys.executable, "-m", "transfuse.keeper.process", str(directory)],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env=environment,
            cwd="/",
            start_new_session=True,
            close_fds=True,
        )


def _last_words(directory: pathlib.Path) -> str:
    with suppress(OSError):
        return (directory / LOG_NAME).read_text(errors="replace")[-2000:]
    return ""


# ---------------------------------------------------------------------------------------------------- the lock
#
# Whoever makes a keeper's files, or removes them, holds the lock of the run's directory. A keeper that ends removes the
# lock's file and the directory, too. So a lock counts only if its file still has its name: somebody who waited for the
# lock of an ended keeper begins again, with a directory of its own.


@contextmanager
def locked(run: Run, until: float) -> Iterator[pathlib.Path]:
    """Hold the lock of a run's directory, which is made if it is not there."""
    while True:
        directory = make_directory(run)
        fd = try_lock(directory)
        if fd is not None:
            break
        if time.monotonic() > until:
            raise TransfuseError(f"another process has been starting the keeper in {directory} for too long")
        time.sleep(0.02)
    try:
        # The keeper that ended just now may have removed what we have just noted.
        make_directory(run)
        yield directory
    finally:
        os.close(fd)


def try_lock(directory: pathlib.Path) -> int | None:
    """Take the lock of a directory; None if another process has it, or if the directory is being removed."""
    path = directory / LOCK_NAME
    try:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except FileNotFoundError:
        return None
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.path.samestat(os.fstat(fd), path.stat()):
            return fd
    except (BlockingIOError, FileNotFoundError):
        pass
    os.close(fd)
    return None
