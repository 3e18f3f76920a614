"""A keeper that ends removes its directory, while workers of the next job may be starting another one there."""

from __future__ import annotations

import fcntl
import os
import pathlib
import random
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import pytest

import transfuse
from keeping import SECONDS, Home, Job, home, keepers_in, threaded, until  # noqa: F401
from transfuse._errors import TransfuseError
from transfuse._keeper import attach, frames, runs
from transfuse._keeper.attach import Lock
from transfuse._keeper.files import remove_files
from transfuse._keeper.frames import KeeperLink, KeeperLost
from transfuse._keeper.process import Keeper
from transfuse._keeper.runs import Process
from transfuse._tls import TLS
from transfuse.testing.ranks import freeze

pytestmark = pytest.mark.usefixtures("home")

WORKERS, ROUNDS, STARTERS = 4, 25, 20


class InThreads:
    """Starts keepers as threads of this process, which takes no time."""

    def __init__(self) -> None:
        self.started: list[tuple[Keeper, threading.Thread]] = []
        self.returncode = None

    def start(self, lock: Lock, tls: object = None) -> InThreads:
        passed_on = Lock.inherit(lock.directory, os.dup(lock.fd))

        def run() -> None:
            time.sleep(0.002)
            keeper = Keeper(passed_on)
            self.started.append((keeper, threading.current_thread()))
            keeper.run()

        threading.Thread(target=run, daemon=True).start()
        return self

    def poll(self) -> None:
        pass

    def wait(self) -> None:
        pass

    def stop(self) -> None:
        """Ask all to end. Do not wait."""
        for keeper, _ in self.started:
            keeper.stop()

    def ended(self) -> None:
        for _, thread in self.started:
            thread.join(SECONDS)
            assert not thread.is_alive()


@pytest.fixture
def in_threads(monkeypatch: pytest.MonkeyPatch) -> InThreads:
    starter = InThreads()
    monkeypatch.setattr(attach, "_start", starter.start)
    return starter


def join(run: runs.Run, rank: int, agent: Process | None = None) -> tuple[KeeperLink, str]:
    """As a worker does it: a keeper that is about to end does not count. Returns the keeper's address."""
    me = Process.of(os.getpid())
    assert me is not None
    hello = frames.Hello(frames.VERSION, rank, WORKERS, *me, *(agent or me), True, 600.0, None, 3)
    deadline = time.monotonic() + SECONDS
    while True:
        link = attach.attach(run, SECONDS)
        try:
            return link, link.ask(hello, frames.Welcome, SECONDS).keeper
        except KeeperLost:
            link.close()
            assert time.monotonic() < deadline


def test_workers_that_come_while_a_keeper_ends_find_one_and_the_same(home: Home, in_threads: InThreads) -> None:  # noqa: F811
    run = runs.find_run("next")
    with ThreadPoolExecutor(WORKERS) as pool:
        for _ in range(ROUNDS):
            old = list(in_threads.started)
            in_threads.started.clear()
            for keeper, _ in old:
                keeper.stop()
            joined = list(pool.map(join, [run] * WORKERS, range(WORKERS)))
            assert len({address for _, address in joined}) == 1
            assert len(in_threads.started) == 1
            for _, thread in old:
                thread.join(SECONDS)
            assert [one.name for one in runs.list_runs()] == ["next"]
            for link, _ in joined:
                link.close()
    in_threads.stop()
    in_threads.ended()
    assert list(home.base.iterdir()) == []


def test_while_a_keeper_lives_there_is_no_lock_for_another(home: Home) -> None:  # noqa: F811
    keeper = home.start("one")
    assert Lock.take(keeper.directory) is None
    keeper.stop()
    assert home.ended(keeper)
    assert list(home.base.iterdir()) == []


def test_a_keeper_never_takes_a_socket_on_which_another_one_listens(home: Home) -> None:  # noqa: F811
    """It has lost its lock, as by a cleaner of /tmp that has deleted the file."""
    old = home.start("taken")
    (old.directory / attach.LOCK_NAME).unlink()
    with Lock.take(old.directory) or pytest.fail("the lock is not free") as lock:
        with pytest.raises(TransfuseError, match="another keeper listens at"):
            Keeper(lock)
        assert home.status("taken")["address"] == old.address
        attach.attach(runs.find_run("taken"), SECONDS).close()  # To the one that listens: none is started.
        # Who ends without the lock leaves the files alone.
        old.stop()
        assert home.ended(old)
        assert (old.directory / attach.SOCKET_NAME).exists()


def test_a_lock_that_was_deleted_is_taken_again(home: Home) -> None:  # noqa: F811
    keeper = home.start("mended")
    (keeper.directory / attach.LOCK_NAME).unlink()
    until(lambda: (keeper.directory / attach.LOCK_NAME).exists())
    until(lambda: Lock.take(keeper.directory) is None)
    assert home.status("mended")["address"] == keeper.address


def test_the_lock_of_a_file_that_was_removed_meanwhile_does_not_count(
    home: Home,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The next process makes another file: both would have a lock."""
    run = runs.find_run("gone")
    directory = home.directory("gone")
    left = [1, 2]

    def end_first(fd: int, how: int) -> None:
        if left:
            left.pop()
            remove_files(directory)  # The keeper ends between our open() and flock().
        flock(fd, how)

    flock = fcntl.flock
    monkeypatch.setattr(fcntl, "flock", end_first)
    assert Lock.take(directory) is None
    lock = attach.find(run, time.monotonic() + SECONDS)
    assert isinstance(lock, Lock)
    with lock:
        assert not left
        assert lock.directory == directory
        assert (directory / runs.RUN_FILE).exists()
        assert Lock.take(directory) is None


def test_a_forked_process_does_not_hold_the_lock(home: Home) -> None:  # noqa: F811
    """A data loader's process may be forked at any moment, and outlives the worker."""
    directory = home.directory("forked")
    lock = Lock.take(directory)
    assert lock is not None
    ready, end = os.pipe(), os.pipe()
    child = os.fork()
    if not child:
        os.write(ready[1], b"x")
        os.read(end[0], 1)
        os._exit(0)
    try:
        os.read(ready[0], 1)
        lock.close()
        with Lock.take(directory) or pytest.fail("the forked process holds the lock"):
            pass
    finally:
        os.write(end[1], b"x")
        os.waitpid(child, 0)
        for fd in (*ready, *end):
            os.close(fd)


# ------------------------------------------------------------------------------------------------ starters that die


@pytest.mark.processes
def test_starters_are_killed_at_any_moment_and_there_is_one_keeper(home: Home) -> None:  # noqa: F811
    """The lock does not die with its starter: else the next worker would start a second keeper, an empty one."""
    chance, run = random.Random(0), runs.find_run("started")
    for _ in range(STARTERS):
        child = os.fork()
        if not child:
            attach.attach(run, SECONDS)
            time.sleep(SECONDS)
            os._exit(0)
        time.sleep(chance.choice([0.0, 0.002, 0.01, 0.03, 0.1]))
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    # Some were killed before they have started one, others after. All who come now find one and the same.
    joined = [join(run, rank) for rank in range(WORKERS)]
    (pid,) = keepers_in(home.base)
    assert {link.peer_pid() for link, _ in joined} == {pid}
    assert len({address for _, address in joined}) == 1
    for link, _ in joined:
        link.close()


@pytest.mark.processes
def test_a_keeper_that_is_frozen_while_it_starts_is_named(home: Home) -> None:  # noqa: F811
    run = runs.find_run("frozen")
    found = attach.find(run, time.monotonic() + SECONDS)
    assert isinstance(found, Lock)
    with found:
        process = attach._start(found)
    freeze(process.pid)
    try:
        with pytest.raises(TransfuseError, match=rf"process {process.pid} is the keeper .*kill -CONT {process.pid}"):
            attach.attach(run, 0.1)
        process.send_signal(signal.SIGCONT)
        link, _ = join(run, 0)
        assert link.peer_pid() == process.pid
        link.close()
    finally:
        process.kill()
        process.wait()


@pytest.mark.parametrize("linger", [None, 0.0])
def test_in_the_foreground_a_keeper_stays_unless_told_how_long(home: Home, linger: float | None) -> None:  # noqa: F811
    lock = Lock.take(home.directory("side"))
    assert lock is not None
    keeper = Keeper(lock, in_foreground=True, linger=linger)
    thread = threading.Thread(target=keeper.run, daemon=True)
    thread.start()
    try:
        link, _ = join(runs.find_run("side"), 0, Process(1 << 30, 1))
        assert keeper._why_end() is None
        link.close()
        until(lambda: not keeper.status()["attached"])
        if linger is None:
            assert keeper._why_end() is None
            assert keeper._why_end() is None
        else:
            thread.join(SECONDS)
            assert not thread.is_alive()
    finally:
        keeper.stop()
        thread.join(SECONDS)
    assert list(home.base.iterdir()) == []


@pytest.mark.processes
@pytest.mark.parametrize("in_foreground", [False, True])
def test_a_place_is_free_when_its_worker_is_dead_and_a_child_holds_it(home: Home, in_foreground: bool) -> None:  # noqa: F811
    """A data loader's process, which a killed worker has left behind, has inherited the connection."""
    lock = Lock.take(home.directory("left"))
    assert lock is not None
    keeper = Keeper(lock, in_foreground=in_foreground)
    thread = threading.Thread(target=keeper.run, daemon=True)
    thread.start()
    run, (read, write) = runs.find_run("left"), os.pipe()
    worker = os.fork()
    if not worker:
        join(run, 0)
        if loader := os.fork():
            os.write(write, b"%d\n" % loader)
        time.sleep(SECONDS)
        os._exit(0)
    loader = int(os.read(read, 100))
    try:
        os.kill(worker, signal.SIGKILL)
        os.waitpid(worker, 0)
        link, _ = join(run, 0)
        os.kill(loader, 0)
        link.close()
    finally:
        os.kill(loader, signal.SIGKILL)
        os.close(read)
        os.close(write)
        keeper.stop()
        thread.join(SECONDS)


# ------------------------------------------------------------------------------------------------------- a full disk


def fill(path: pathlib.Path) -> None:
    with suppress(OSError), open(path / "data", "ab", buffering=0) as file:
        while True:
            file.write(bytes(4096))


@pytest.fixture
def full_disk(monkeypatch: pytest.MonkeyPatch) -> Iterator[pathlib.Path]:
    """The keepers' directory on a file system of four pages, which are used up."""
    if os.geteuid():
        pytest.skip("only root can mount a file system")
    path = pathlib.Path(tempfile.mkdtemp(prefix="full", dir="/tmp"))
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=16k,mode=700", "tmpfs", path], capture_output=True)
    try:
        if mounted.returncode:
            pytest.skip(f"mount: {mounted.stderr.decode().strip()}")
        fill(path)
        monkeypatch.setenv("TRANSFUSE_KEEPER_DIR", str(path / "keepers"))
        yield path
    finally:
        subprocess.run(["umount", "-l", path], check=not mounted.returncode, capture_output=True)
        path.rmdir()


@pytest.mark.processes
@pytest.mark.usefixtures("threaded")
@pytest.mark.parametrize("has_room_for_notes", [False, pytest.param(True, id="worker has room, keeper has none")])
def test_a_full_disk_is_named_on_all_ranks(
    full_disk: pathlib.Path, has_room_for_notes: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if has_room_for_notes:
        os.truncate(full_disk / "data", 0)
        start = attach._start

        def fill_first(lock: Lock, tls: TLS | None) -> subprocess.Popen[bytes]:
            fill(full_disk)
            return start(lock, tls)

        monkeypatch.setattr(attach, "_start", fill_first)
    with Job(2) as job:
        told = job.ranks.outcomes(lambda rank, pg: transfuse.keep(dict, group=pg, run="job", timeout=SECONDS))
    for outcome in told:
        text = str(outcome.error)
        assert isinstance(outcome.error, TransfuseError)
        assert all(f"rank {rank}: " in text for rank in range(2))  # Each has told the others.
        assert f"the keeper's files in {full_disk}/keepers/job-" in text
        assert "No space left on device" in text
        assert "set TRANSFUSE_KEEPER_DIR" in text
