"""A state that training changes and other threads read, in turns: what :func:`serve` and :func:`hub` share."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple, SupportsIndex

import torch

from transfuse.arguments import check_step
from transfuse.errors import TransfuseError
from transfuse.memory import streams
from transfuse.remote.rwlock import RWLock

__all__ = ["LiveState", "Seen"]


class Seen(NamedTuple):
    """The state as a reader finds it while it holds still."""

    state: object
    step: int | None
    #: How many blocks have changed the state so far.
    changes: int


class LiveState:
    """The caller's state and step, each given or returned by a callable, and the lock between training and readers."""

    def __init__(
        self, state_dict: object, step: SupportsIndex | Callable[[], SupportsIndex | None] | None, seconds: float
    ) -> None:
        self._state_dict = state_dict
        self._step = step if callable(step) else check_step(step)
        self._seconds = seconds
        self.rwlock = RWLock()
        #: The user's callables run in one thread at a time.
        self._asking = threading.Lock()
        self._last_change = _Moment()
        #: How many blocks have changed the state and ended.
        self.changes = 0

    @contextmanager
    def changing(self) -> Iterator[None]:
        """Change the state within this block. It waits until no reader is active, and readers wait until it ends."""
        with self.rwlock.changing():
            try:
                yield
            finally:
                self._last_change.record()
                self.changes += 1

    @contextmanager
    def reading(self, meanwhile: Callable[[], object]) -> Iterator[Seen]:
        """Read the state within this block. ``meanwhile`` is called now and then during the wait; it may raise."""
        with self.rwlock.reading(meanwhile):
            # Before the user's callable, which may copy: nothing else orders this thread's work after training's.
            self._last_change.wait(self._seconds)
            with self._asking:
                state = self._state_dict() if callable(self._state_dict) else self._state_dict
                step = check_step(self._step(), "what step() gives") if callable(self._step) else self._step
            yield Seen(state, step, self.changes)

    def step_now(self, seconds: float | None) -> int | None:
        """The step, as far as it is told while training goes on; ``TimeoutError`` if that takes longer."""
        if not callable(self._step):
            return self._step
        if not self._asking.acquire(timeout=-1 if seconds is None else seconds):
            raise TimeoutError
        try:
            return check_step(self._step(), "what step() gives")
        finally:
            self._asking.release()

    def forget(self) -> None:
        """Hold the state no longer: nobody reads any more."""
        self._state_dict = self._step = None


class _Moment:
    """Marks the accelerator work that one thread has queued so far; another thread can wait for that work."""

    def __init__(self) -> None:
        self._events: list[torch.Event] = []
        self.record()

    def record(self) -> None:
        self._events = [torch.accelerator.current_stream(device).record_event() for device in streams.current()]

    def wait(self, seconds: float) -> None:
        """Raise after so many seconds."""
        until = time.monotonic() + seconds
        if not all(streams.poll(event.query, until) for event in self._events):
            raise TransfuseError(f"the work that training had queued on the accelerator has not ended in {seconds:g} s")
