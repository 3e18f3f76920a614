"""A state that training changes and other threads read, in turns: what :func:`serve` and :func:`hub` share.

The user's callables are called in the user's own threads only: once at the start, and where a block that changes the
state begins and ends. In another thread, FSDP2's ``state_dict()`` would reshard a module that is computing.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import SupportsIndex

import torch

from transfuse._arguments import check_step
from transfuse._errors import TransfuseError, as_utf8
from transfuse._memory import streams
from transfuse._memory.mutation import MutationWatch
from transfuse._remote.rwlock import RWLock
from transfuse._session.content import KnownContent

logger = logging.getLogger("transfuse")


@dataclass(eq=False)
class StateView:
    """The state as readers find it between two blocks that change it."""

    state: object
    step: int | None
    #: How many blocks have changed the state so far.
    changes: int
    #: A reader's own watch over the state since it looked: a job may forget to change it within a block.
    watch: MutationWatch | None = None
    #: What is known of the content of the whole state (None) and of its entries.
    contents: dict[str | None, KnownContent] = field(default_factory=dict)

    def content_of(self, entry: str | None) -> KnownContent:
        return self.contents.setdefault(entry, KnownContent())


class LiveState:
    """The caller's state and step, each given or returned by a callable, and the lock between training and readers."""

    def __init__(
        self, state_dict: object, step: SupportsIndex | Callable[[], SupportsIndex | None] | None, seconds: float
    ) -> None:
        self._state_dict = state_dict
        self._step = step if callable(step) else check_step(step)
        #: How long an accelerator may take for what training had queued.
        self.seconds = seconds
        self.rwlock = RWLock()
        #: How many blocks the owner of the lock is in.
        self._depth = 0
        #: What readers find, or why they find nothing.
        self.seen: StateView | Exception = StateView(*self._ask(), 0)
        #: Where readers come after training, and the devices on which the state was when somebody looked last.
        self._marks = streams.ChangeMarks()
        self._lies_on: set[torch.device] = set()
        self._mark()
        #: How many blocks have changed the state and ended. A block within another one is a part of it.
        self.changes = 0
        self._has_warned = False

    @contextmanager
    def changing(self) -> Iterator[None]:
        """Change the state within this block. It waits until no reader is active, and readers wait until it ends."""
        with self.rwlock.changing():
            before = self.seen
            if not self._depth:
                self._check_step_stayed()
                # What readers find if an interrupt keeps this thread from looking again.
                self.seen = TransfuseError("the last change of the state was interrupted: wait for the next mutating()")
            self._depth += 1
            try:
                yield
            finally:
                try:
                    if self._depth == 1:
                        self._look(were_refused=isinstance(before, Exception))
                    else:
                        self._mark()
                finally:
                    self._depth -= 1

    @contextmanager
    def reading(self, meanwhile: Callable[[], object]) -> Iterator[StateView]:
        """Read the state within this block. ``meanwhile`` is called now and then during the wait; it may raise."""
        with self.rwlock.reading(meanwhile):
            if isinstance(self.seen, Exception):
                raise self.seen.with_traceback(None)
            # Nothing else orders this thread's work after training's.
            if not self._marks.have_passed(self.seconds):
                raise TransfuseError(
                    f"the work that training had queued on the accelerator has not ended in {self.seconds:g} s"
                )
            yield self.seen

    @contextmanager
    def glimpsing(self) -> Iterator[StateView | None]:
        """The state as it was seen last, which nobody changes in this block. None if somebody is changing it now."""
        with self.rwlock.trying() as may:
            yield self.seen if may and isinstance(self.seen, StateView) else None

    def forget(self) -> None:
        """Hold the state no longer: nobody reads any more."""
        self._state_dict = self._step = None
        self.seen = StateView(None, None, self.changes)

    def _ask(self) -> tuple[object, int | None]:
        state = self._state_dict() if callable(self._state_dict) else self._state_dict
        return state, self._ask_step()

    def _ask_step(self) -> int | None:
        return check_step(self._step(), "what step() gives") if callable(self._step) else self._step

    def _look(self, *, were_refused: bool) -> None:
        """Note what readers will find from now on. If a callable raises, they are told; training goes on."""
        self.changes += 1
        self._marks.hold_back()  # Blocks within this one may have ended on other streams.
        try:
            self.seen = StateView(*self._ask(), self.changes)
        except Exception as error:
            if not were_refused:
                said = as_utf8(f"{type(error).__name__}: {error}")
                logger.warning("readers are refused until the next mutating(): the state cannot be had: %s", said)
            self.seen = error.with_traceback(None)
        finally:
            self._mark()

    def _mark(self) -> None:
        """Readers come after what this thread has queued by now."""
        if isinstance(self.seen, StateView):
            self._lies_on = streams.devices_of(self.seen.state)
        self._marks.set(self._lies_on.union(streams.current()))

    def _check_step_stayed(self) -> None:
        """Warn once if the step has moved on since the last block: readers were told another one meanwhile."""
        if self._has_warned or not callable(self._step) or isinstance(self.seen, Exception):
            return
        with suppress(Exception):  # The end of this block will tell.
            step = self._ask_step()
            if step != self.seen.step:
                self._has_warned = True
                logger.warning(
                    "the step went from %s to %s outside of mutating(), and readers were told %s until now. Change "
                    "it together with the weights: with server.mutating(): optimizer.step(); step += 1",
                    self.seen.step,
                    step,
                    self.seen.step,
                )


class AskedState(LiveState):
    """A state that every reader's thread asks for: that of a process in which nobody trains, such as the keeper."""

    def __init__(self, state_dict: Callable[[], object], step: Callable[[], int | None], seconds: float) -> None:
        super().__init__(None, None, seconds)
        self._state_dict, self._step = state_dict, step

    @contextmanager
    def reading(self, meanwhile: Callable[[], object]) -> Iterator[StateView]:
        with self.rwlock.reading(meanwhile):
            yield StateView(*self._ask(), self.changes)
