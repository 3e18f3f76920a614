"""The lock between the thread that changes a state and the threads that read it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import pytest

from transfuse._remote.rwlock import RWLock

SECONDS = 20.0


def nothing() -> None:
    pass


def change(rwlock: RWLock) -> None:
    with rwlock.changing():
        pass


@contextmanager
def thread(work: Callable[[], Any]) -> Iterator[threading.Event]:
    """Run in a thread, which has ended when the block is left; what it raised is raised. The event: it has ended."""
    ended, errors = threading.Event(), []

    def run() -> None:
        try:
            work()
        except BaseException as error:
            errors.append(error)
        ended.set()

    worker = threading.Thread(target=run, daemon=True)
    worker.start()
    yield ended
    assert ended.wait(SECONDS), "a thread does not end"
    worker.join()
    if errors:
        raise errors[0]


def wait_until(condition: Callable[[], bool]) -> None:
    until = time.monotonic() + SECONDS
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.002)


def test_readers_share() -> None:
    rwlock, together = RWLock(), threading.Barrier(3, timeout=SECONDS)

    def read() -> None:
        with rwlock.reading(nothing):
            together.wait()

    with thread(read), thread(read):
        read()


def test_who_changes_is_alone() -> None:
    rwlock, inside, most = RWLock(), [0], [0]
    lock = threading.Lock()

    def change() -> None:
        for _ in range(200):
            with rwlock.changing():
                with lock:
                    inside[0] += 1
                    most[0] = max(most[0], inside[0])
                with lock:
                    inside[0] -= 1

    def read() -> None:
        for _ in range(200):
            with rwlock.reading(nothing):
                assert inside[0] == 0

    with thread(change), thread(change), thread(read), thread(read):
        pass
    assert most == [1]


def test_first_come_first_served() -> None:
    rwlock, order = RWLock(), []

    def wait_for(name: str) -> None:
        with rwlock.reading(nothing) if name.startswith("read") else rwlock.changing():
            order.append(name)

    with ExitStack() as threads, rwlock.changing():
        for number, name in enumerate(["read 1", "change 1", "read 2", "change 2"], start=1):
            threads.enter_context(thread(partial(wait_for, name)))
            wait_until(partial(lambda number: len(rwlock._waiting) == number, number))
    assert order == ["read 1", "change 1", "read 2", "change 2"]


def test_a_stream_of_readers_does_not_keep_a_change_out() -> None:
    rwlock, stop = RWLock(), threading.Event()

    def read() -> None:
        while not stop.is_set():
            with rwlock.reading(nothing):
                time.sleep(0.005)

    with thread(read), thread(read), thread(read):
        for _ in range(20):
            with rwlock.changing():
                pass
        stop.set()


def test_a_busy_owner_does_not_keep_readers_out() -> None:
    rwlock, stop = RWLock(), threading.Event()

    def change() -> None:
        while not stop.is_set():
            with rwlock.changing():
                time.sleep(0.001)

    with thread(change):
        for _ in range(20):
            with rwlock.reading(nothing):
                pass
        stop.set()


def test_a_change_within_a_change() -> None:
    rwlock, read = RWLock(), threading.Event()

    def reading() -> None:
        with rwlock.reading(nothing):
            read.set()

    with ExitStack() as threads, rwlock.changing():
        with rwlock.changing():
            threads.enter_context(thread(reading))
            wait_until(lambda: len(rwlock._waiting) == 1)
        # Still held, by the outer one, while another thread waits.
        assert not read.wait(0.05)
    assert read.is_set()


def test_who_reads_may_not_change() -> None:
    rwlock = RWLock()
    with rwlock.reading(nothing), pytest.raises(RuntimeError, match="being read by this thread"), rwlock.changing():
        pytest.fail("a reader changed the state")
    with rwlock.changing():
        pass


def test_an_exception_ends_a_turn() -> None:
    rwlock = RWLock()
    for turn in (rwlock.changing, rwlock.changing, lambda: rwlock.reading(nothing), rwlock.changing):
        with pytest.raises(ZeroDivisionError), turn():
            raise ZeroDivisionError
    with thread(partial(change, rwlock)):
        pass


def test_who_waits_may_give_up() -> None:
    """What is raised meanwhile ends the wait, and leaves no ticket behind that others would wait for."""
    rwlock, calls = RWLock(), []

    def give_up() -> None:
        calls.append(threading.get_ident())
        if len(calls) == 2:
            raise ConnectionError("gone")

    def read() -> None:
        with pytest.raises(ConnectionError, match="gone"), rwlock.reading(give_up):
            pytest.fail("it read while the state was being changed")

    with rwlock.changing(), thread(read):
        pass
    assert len(calls) == 2
    with rwlock.changing():
        pass


def test_how_long_a_change_has_been_held_up() -> None:
    rwlock = RWLock()
    assert rwlock.held_up() == 0
    with ExitStack() as threads, rwlock.reading(nothing):
        threads.enter_context(thread(partial(change, rwlock)))
        wait_until(lambda: rwlock.held_up() > 0)
        before = rwlock.held_up()
        wait_until(lambda: rwlock.held_up() > before)
    assert rwlock.held_up() == 0
