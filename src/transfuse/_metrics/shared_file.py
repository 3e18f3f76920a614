"""What the processes of a host count about their transfers, in one file that they share: ``TRANSFUSE_METRICS``.

The file is in the text format of Prometheus, for the textfile collector of ``node_exporter``. Each process adds what it
has counted to what is there, under a lock, and gives the new file its name when it is whole. So numbers go on over
restarts of workers, there is one series for all processes of a host, and no file is left of a process that is gone. A
process that is killed takes with it what it has not written yet: at most what it counted in the last second.

A keeper does not pass these numbers on: transfers need no keeper, and a host may have several.
"""

from __future__ import annotations

import atexit
import fcntl
import logging
import os
import pathlib
import threading
import time
from contextlib import suppress

from transfuse._metrics import names
from transfuse._metrics.samples import Samples
from transfuse._report import Report
from transfuse._state.whole_file import write_whole
from transfuse._tuning import METRICS_EXIT_SECONDS, METRICS_LOCK_SECONDS, METRICS_WRITE_SECONDS

logger = logging.getLogger("transfuse")

VARIABLE = "TRANSFUSE_METRICS"


def note(report: Report) -> None:
    """Count a transfer, if the environment says in which file."""
    path = os.environ.get(VARIABLE)
    if path:
        _file_at(path).note(report)


def count(samples: Samples, report: Report) -> None:
    """Count a transfer that has ended."""
    direction, route = report.direction, report.route or names.NOWHERE
    samples.add(names.TRANSFERS, direction=direction, route=route, outcome=report.outcome)
    samples.observe(names.TRANSFER_TIMES, report.seconds, direction=direction)
    samples.add(names.MOVING_TIME, report.moving_seconds, direction=direction)
    samples.add(names.TRANSFERRED, report.bytes, direction=direction, route=route)
    samples.add(names.KEPT, report.kept_bytes)
    samples.add(names.REPAIRED, report.repaired, direction=direction)
    samples.add(names.LOST_SOURCES if direction == "receive" else names.LOST_RECEIVERS, len(report.failed))


class SharedFile:
    """The file at one path, for this process."""

    def __init__(self, path: pathlib.Path) -> None:
        self._path = path
        self._counted = Samples(names.WORKERS_OWN)
        self._turn, self._writing = threading.Lock(), threading.Lock()
        self._thread: threading.Thread | None = None
        self._has_complained = False

    def note(self, report: Report) -> None:
        """Count a transfer. It is written soon, by another thread."""
        if not self._path.is_absolute():
            self._complain(f"{VARIABLE} must be an absolute path, got {str(self._path)!r}: nothing is counted")
            return
        count(self._counted, report)
        with self._turn:
            if self._thread is None:
                self._thread = threading.Thread(target=self._write_soon, name="transfuse-metrics", daemon=True)
                self._thread.start()

    def _write_soon(self) -> None:
        while True:
            self.write(METRICS_WRITE_SECONDS)
            time.sleep(METRICS_WRITE_SECONDS)
            with self._turn:
                if not self._counted:
                    self._thread = None
                    return

    def write(self, seconds: float) -> None:
        """Add what was counted to the file. ``seconds``: how long other processes may take for theirs."""
        with self._writing:
            counted = self._counted.move()
            if not counted:
                return
            try:
                with _Locked(self._path, time.monotonic() + seconds):
                    there = self._read()
                    there.take(counted)
                    write_whole(self._path, there.text(), 0o644)
                    return
            except OSError as error:
                self._complain(f"the metrics of this host cannot be written to {self._path}: {error}; trying again")
            self._counted.take(counted)

    def _read(self) -> Samples:
        """What is there."""
        try:
            return Samples.read(names.WORKERS_OWN, self._path.read_text())
        except FileNotFoundError:
            pass
        except ValueError as error:
            self._complain(f"{self._path} is begun anew, since it is damaged, or of another version: {error}")
        there = Samples(names.WORKERS_OWN)
        there.begin(*names.WORKERS_OWN)
        return there

    def _complain(self, what: str) -> None:
        """Say it once."""
        if not self._has_complained:
            self._has_complained = True
            logger.warning("%s", what)


class _Locked:
    """Within this block no other process writes the file at a path."""

    def __init__(self, path: pathlib.Path, until: float) -> None:
        self._path, self._until = path.with_suffix(".lock"), until

    def __enter__(self) -> None:
        self._fd = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o644)
        try:
            # A process that was stopped while it writes must not stop all others for good.
            while True:
                with suppress(BlockingIOError):
                    fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    return
                if time.monotonic() > self._until:
                    raise TimeoutError(f"another process has locked {self._path}")
                time.sleep(METRICS_LOCK_SECONDS)
        except BaseException:
            os.close(self._fd)
            raise

    def __exit__(self, *_: object) -> None:
        os.close(self._fd)


_files: dict[str, SharedFile] = {}
_opening = threading.Lock()


def _file_at(path: str) -> SharedFile:
    with _opening:
        if path not in _files:
            if not _files:
                atexit.register(_write_all)
            _files[path] = SharedFile(pathlib.Path(path))
        return _files[path]


def _write_all() -> None:
    for one in list(_files.values()):
        one.write(METRICS_EXIT_SECONDS)


def _after_fork() -> None:
    """In the child of a fork: what was counted is the parent's, who writes it."""
    global _opening
    _opening = threading.Lock()
    _files.clear()


os.register_at_fork(after_in_child=_after_fork)
