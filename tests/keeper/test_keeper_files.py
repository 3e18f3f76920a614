"""A keeper that ends removes its directory, while workers of the next job may be starting another one there."""

from __future__ import annotations

import fcntl
import os
import pathlib
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from keeping import SECONDS, Home, home, until  # noqa: F401
from transfuse.keeper import attach, frames, runs
from transfuse.keeper.frames import KeeperLost, Link
from transfuse.keeper.process import Keeper, remove_files
from transfuse.keeper.runs import Process

pytestmark = pytest.mark.usefixtures("home")

WORKERS, ROUNDS = 4, 25


class InThreads:
    """Starts keepers as threads of this process, which takes no time."""

    def __init__(self) -> None:
        self.started: list[tuple[Keeper, threading.Thread]] = []
        self.returncode = None

    def start(self, directory: pathlib.Path) -> InThreads:
        def run() -> None:
            time.sleep(0.002)
            keeper = Keeper(directory)
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


def join(run: runs.Run, rank: int, agent: Process | None = None) -> tuple[Link, str]:
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


def test_a_keeper_leaves_the_files_to_the_one_that_took_its_place(home: Home) -> None:  # noqa: F811
    old, new = home.start("taken"), home.start("taken")
    files = sorted(path.name for path in new.directory.iterdir())
    old.stop()
    assert home.ended(old)
    assert sorted(path.name for path in new.directory.iterdir()) == sorted({*files, "lock"})
    assert home.status("taken")["address"] == new.address
    new.stop()
    assert home.ended(new)
    assert list(home.base.iterdir()) == []


def test_a_keeper_leaves_the_files_to_a_worker_who_is_starting_another(home: Home) -> None:  # noqa: F811
    keeper = home.start("held")
    run = runs.find_run("held")
    with attach.locked(run, time.monotonic() + SECONDS) as directory:
        keeper.stop()
        assert home.ended(keeper)
        assert (directory / runs.RUN_FILE).exists()
        with pytest.raises(KeeperLost):
            Link.to(str(directory / attach.SOCKET_NAME), SECONDS)
        later = Keeper(directory)
        later.close()  # Not for long: the lock is ours.
        assert (directory / attach.SOCKET_NAME).exists()


def test_the_lock_of_a_file_that_was_removed_meanwhile_does_not_count(
    home: Home,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Whoever comes next makes another file: both would have a lock."""
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
    assert attach.try_lock(directory) is None
    with attach.locked(run, time.monotonic() + SECONDS) as again:
        assert not left
        assert again == directory
        assert (directory / runs.RUN_FILE).exists()
        assert attach.try_lock(directory) is None


@pytest.mark.parametrize("linger", [None, 0.0])
def test_in_the_foreground_a_keeper_stays_unless_told_how_long(home: Home, linger: float | None) -> None:  # noqa: F811
    keeper = Keeper(home.directory("side"), in_foreground=True, linger=linger)
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
