"""``Pending``: a receive in a thread of its own, whose bytes wait aside until the caller has them installed."""

from __future__ import annotations

import atexit
import os
import threading
import time
import warnings
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from types import TracebackType
from typing import Any, Generic, NamedTuple, Self, TypeVar
from weakref import WeakSet

import torch

from transfuse import _workers
from transfuse._errors import StateError, let_go
from transfuse._memory import streams
from transfuse._report import Report
from transfuse._session.held_state import HeldState
from transfuse._timeouts import Patience

T = TypeVar("T")


class Brought(NamedTuple):
    """What a receive has brought: an :class:`~transfuse._session.held_state.HeldState`, or a state of fresh tensors."""

    found: Any
    report: Report


#: Runs a receive. What it is given is to be called now and then, and may raise to end it.
Receiving = Callable[[Callable[[], object]], Brought]


class FetchClosed(Exception):
    """The caller has closed what was fetched ahead."""


class _Ahead:
    """The receive itself. It does not know its :class:`Pending`: one that is forgotten is found and closed."""

    def __init__(self, receive: Receiving) -> None:
        self.pid = os.getpid()
        self.closed = False
        self.ended = threading.Event()
        self.brought: Brought | None = None
        self.error: BaseException | None = None
        self._receive: Receiving | None = receive
        #: The bytes come after what the caller has queued until now, and what is fresh belongs to these streams.
        self._streams = _current_streams(streams.current())
        _open.add(self)
        self.job = _workers.run(self._run, "transfuse-pending")

    def _run(self, _: _workers.Job) -> None:
        receive, self._receive = self._receive, None
        assert receive is not None
        try:
            with _entered(self._streams):
                brought = receive(self._check)
                if not self.closed:
                    self.brought = brought
        except BaseException as error:
            let_go(error)
            self.error = error
        finally:
            del receive
            if self.closed:
                self.brought = None
            self.ended.set()

    def _check(self) -> None:
        if self.closed:
            raise FetchClosed("the receiver has closed what it was fetching ahead")

    def close(self) -> None:
        """End the receive, or drop what it has brought. Takes no lock: it may run while garbage is collected."""
        self.closed = True
        if self.ended.is_set():
            self.brought = None


_open: WeakSet[_Ahead] = WeakSet()
#: What gives memory back to the system.
_freeing: list[_workers.Job] = []


@atexit.register
def _close_all() -> None:
    """End all receives that are under way: their threads must not outlive the interpreter."""
    left = [one for one in list(_open) if one.pid == os.getpid()]
    for one in left:
        one.close()
    for one in left:
        if one.ended.wait(Patience.GOODBYE_SECONDS):
            one.job.join()
    for job in _freeing:
        job.join()


def _after_fork() -> None:
    _open.clear()
    _freeing.clear()


os.register_at_fork(after_in_child=_after_fork)


class Pending(Generic[T]):
    """A state that is fetched ahead: ``fetch(…, wait=False)`` and ``recv_checkpoint(…, wait=False)`` return one.

    Bytes arrive and are verified in the background, and lie aside. The target has its old values until
    :meth:`install`, which writes all of it together. The source may go on as soon as everything is here: it waits for
    no :meth:`install`.

    As a context manager it is closed when the block is left.
    """

    def __init__(
        self,
        receive: Receiving,
        finish: Callable[[Any, Report], T],
        tree: Callable[[], object] | None = None,
    ) -> None:
        """``finish`` makes the result of what was installed. ``tree``: returns the target's tree of today."""
        self._finish: Callable[[Any, Report], T] | None = finish
        self._tree = tree
        self._result: list[T] = []
        self._report: Report | None = None
        self._installing = threading.Lock()
        self._ahead = _Ahead(receive)

    def __repr__(self) -> str:
        if self._result:
            word = "installed"
        elif self._ahead.closed:
            word = "closed"
        elif not self.done():
            word = "under way"
        else:
            word = "here" if self.error is None else f"failed: {self.error}"
        return f"<transfuse.Pending: {word}>"

    def done(self) -> bool:
        """Whether nothing is awaited any more: everything is here and verified, or the receive has failed.

        If it has failed, :attr:`error` says why, and :meth:`install` raises it.
        """
        return self._ahead.ended.is_set()

    @property
    def error(self) -> BaseException | None:
        """Why the receive has failed; None if it has not."""
        return None if self._ahead.closed else self._ahead.error

    @property
    def report(self) -> Report | None:
        """The report, once everything is here. ``held_bytes`` says how much lies aside."""
        brought = self._ahead.brought
        return self._report if brought is None else brought.report

    def install(self) -> T:
        """Write everything into the target, and return what the call would have returned with ``wait=True``.

        Waits if bytes are still on their way. Raises what the receive has raised, if it has failed; then the target is
        as it was. An interrupt while the target is written takes effect when it is written whole. After any other
        error, and after an interrupt, it may be called again. Once it has succeeded, it returns the same result.
        """
        with self._installing:
            if self._result:
                return self._result[0]
            ahead = self._ahead
            if ahead.pid != os.getpid():
                raise StateError("this was fetched ahead by the process that forked this one: only that can install it")
            while not ahead.closed and not ahead.ended.wait(Patience.SLICE_SECONDS):
                pass
            brought = ahead.brought
            if ahead.closed:
                raise StateError("this was closed, and what had arrived was dropped: fetch again")
            if brought is None:
                assert ahead.error is not None
                raise ahead.error
            assert self._finish is not None
            self._report = brought.report
            began = time.perf_counter()
            state = self._write(brought.found) if isinstance(brought.found, HeldState) else brought.found
            result = self._finish(state, brought.report)
            brought.report.install_seconds = time.perf_counter() - began
            self._result.append(result)
            del brought
            self._drop()
            return result

    def _write(self, arrived: HeldState) -> Any:
        """Write the targets in a thread that no interrupt ends."""
        arrived.check_target(self._tree)
        errors: list[BaseException] = []
        own = _current_streams(arrived.devices)

        def work(_: _workers.Job) -> None:
            try:
                with streams.enter(own, None), torch.inference_mode(False), torch.no_grad():
                    arrived.check_kept()
                    arrived.install()
            except BaseException as error:
                errors.append(error)

        job, interrupt = _workers.run(work, "transfuse-install"), None
        while True:
            try:
                job.join()
                break
            except BaseException as error:
                interrupt = interrupt or error
        try:
            if interrupt is not None:
                raise interrupt
            if errors:
                raise errors[0]
        finally:
            errors.clear()  # An error holds the frames that it went through, and so this list.
        return arrived.state

    def _drop(self) -> None:
        """Let go of what was held. Giving a GiB back to the system takes time: the caller need not wait for it."""
        brought, self._ahead.brought, self._finish, self._tree = self._ahead.brought, None, None, None
        held = [] if brought is None else [brought.found]
        del brought

        def work(_: _workers.Job) -> None:
            for found in held:
                if isinstance(found, HeldState):
                    found.remember()
            held.clear()

        _freeing[:] = [*(job for job in _freeing if job.ended.locked()), _workers.run(work, "transfuse-free")]

    def close(self) -> None:
        """Drop what has arrived, and cancel what is under way: the source is told. The target is as it was.

        After :meth:`install` there is nothing to close.
        """
        ahead = self._ahead
        if self._result or ahead.closed:
            return
        self._report = self.report
        ahead.close()
        if ahead.pid == os.getpid():
            ahead.ended.wait(2 * Patience.GOODBYE_SECONDS)
            ahead.close()
        self._finish = self._tree = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def __del__(self) -> None:
        ahead: _Ahead | None = getattr(self, "_ahead", None)
        if ahead is None or self._result or ahead.closed or ahead.error is not None or ahead.pid != os.getpid():
            return
        ahead.close()
        warnings.warn(
            "a transfuse.Pending was neither installed nor closed: what it fetched ahead is dropped",
            ResourceWarning,
            stacklevel=1,
            source=self,
        )


def _current_streams(devices: Iterable[torch.device]) -> list[torch.Stream]:
    """The streams on these accelerators that are current in this thread."""
    return [torch.accelerator.current_stream(device) for device in devices]


def _entered(own: Iterable[torch.Stream]) -> ExitStack:
    """A block in which these streams are the current ones of this thread."""
    stack = ExitStack()
    for stream in own:
        stack.enter_context(streams.again(stream))
    return stack
