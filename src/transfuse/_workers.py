"""Workers: threads that are used again. To start a thread takes longer than many conversations do.

A worker that has nothing to do ends after a moment. While it waits it holds nothing of what it has run.
"""

from __future__ import annotations

import os
import queue
import threading
from collections.abc import Callable

from transfuse._tuning import WORKER_LINGER_SECONDS

IDLE = "transfuse-idle"


class Job:
    """Something that a worker runs. It gets the job itself."""

    def __init__(self, work: Callable[[Job], object], name: str) -> None:
        self.work = work
        self.name = name
        self.ended = threading.Lock()
        self.ended.acquire()

    def join(self) -> None:
        """Wait until it has run, and its worker holds nothing of it."""
        with self.ended:
            pass


class _WorkerThread:
    def __init__(self, job: Job) -> None:
        self.jobs: queue.SimpleQueue[Job] = queue.SimpleQueue()
        self.jobs.put(job)
        threading.Thread(target=self._run, name=job.name, daemon=True).start()

    def _run(self) -> None:
        thread = threading.current_thread()
        while (job := self._next()) is not None:
            thread.name, work, ended = job.name, job.work, job.ended
            del job.work
            well = False
            try:
                work(job)
                well = True
            finally:
                del work, job
                thread.name = IDLE
                if well:
                    with _lock:
                        _idle.append(self)
                ended.release()

    def _next(self) -> Job | None:
        """Wait for a job; None: nobody has one."""
        try:
            return self.jobs.get(timeout=WORKER_LINGER_SECONDS)
        except queue.Empty:
            with _lock:
                if self in _idle:
                    _idle.remove(self)
        # Somebody may have given it a job just now.
        return None if self.jobs.empty() else self.jobs.get()


_lock = threading.Lock()
_idle: list[_WorkerThread] = []


def run(work: Callable[[Job], object], name: str) -> Job:
    """Run this in another thread, which has this name meanwhile."""
    job = Job(work, name)
    with _lock:
        if _idle:
            _idle.pop().jobs.put(job)
            return job
    _WorkerThread(job)
    return job


def _after_fork() -> None:
    global _lock
    _lock = threading.Lock()
    _idle.clear()


os.register_at_fork(after_in_child=_after_fork)
