"""Threads that are used again."""

from __future__ import annotations

import gc
import os
import threading
import time
import weakref
from collections.abc import Iterator

import pytest

from transfuse import _workers
from transfuse._workers import Job, run


@pytest.fixture(autouse=True)
def no_idle_workers() -> Iterator[None]:
    """Each test begins without workers of others, and leaves none."""
    wait_for_the_end()
    yield
    wait_for_the_end()


def wait_for_the_end() -> None:
    while any(thread.name == _workers.IDLE for thread in threading.enumerate()):
        time.sleep(0.05)
    assert not _workers._idle


def test_one_thread_runs_one_job_after_another() -> None:
    threads, names = set[int](), list[str]()

    def work(_: Job) -> None:
        threads.add(threading.get_ident())
        names.append(threading.current_thread().name)

    for number in range(5):
        run(work, f"job {number}").join()
    assert len(threads) == 1
    assert names == [f"job {number}" for number in range(5)]


def test_jobs_at_the_same_time_have_a_thread_each() -> None:
    all_here = threading.Barrier(4)
    jobs = [run(lambda _: all_here.wait(20), "together") for _ in range(4)]
    for job in jobs:
        job.join()
    assert len(_workers._idle) == 4


def test_a_worker_that_waits_holds_nothing_of_what_it_has_run() -> None:
    class Held:
        pass

    held = Held()
    gone = weakref.ref(held)
    job = run(lambda _, held=held: None, "holds")  # type: ignore[misc]
    job.join()
    del held, job
    gc.collect()
    assert gone() is None
    assert _workers._idle


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_job_that_raises_ends_its_thread_and_no_other() -> None:
    def fail(_: Job) -> None:
        raise ValueError("a fault")

    run(fail, "fails").join()
    ran = threading.Event()
    run(lambda _: ran.set(), "goes on").join()
    assert ran.is_set()


def test_a_forked_child_has_workers_of_its_own() -> None:
    run(lambda _: None, "before").join()
    with _workers._lock:  # The child must not find it held.
        child = os.fork()
        if not child:
            ran = threading.Event()
            run(lambda _: ran.set(), "in the child")
            os._exit(0 if ran.wait(20) else 1)
    assert os.waitpid(child, 0)[1] == 0
