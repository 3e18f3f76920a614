"""Serve a state to readers outside the job's group: the usual conversation, over each reader's own connection."""

from __future__ import annotations

import atexit
import logging
import os
import threading
import time
import traceback
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from types import TracebackType
from typing import Annotated, Self, SupportsIndex, Unpack

import torch

from transfuse import _arguments
from transfuse._arguments import Given
from transfuse._errors import PeerLost, PeerTimeout, SendFailed, StateError, TransfuseError, as_utf8
from transfuse._job.face import one_manner
from transfuse._job.state import State
from transfuse._limits import Limits
from transfuse._options import ServeKeywords, check_names
from transfuse._progress import Progress
from transfuse._remote.ends import AtServer, ServedStream, Servers, server_end
from transfuse._remote.live_state import LiveState
from transfuse._remote.rwlock import RWLock
from transfuse._report import Report, Version
from transfuse._session.content import KnownContent, version_of
from transfuse._session.remembered import Remembered
from transfuse._timeouts import Patience
from transfuse._tls import tls_of
from transfuse._transport import PGTransport
from transfuse._tuning import HANDSHAKE_WAIT_SECONDS, SERVER_END_SECONDS
from transfuse._wire.handshake import READER, Come, ControlConnection, Join, ReaderRefused, Ready, Wait, key_of
from transfuse._wire.listener import Listener

logger = logging.getLogger("transfuse")


@one_manner
def serve(
    state: object,
    *,
    step: SupportsIndex | Callable[[], SupportsIndex | None] | None = None,
    host: str = "127.0.0.1",
    port: int = 0,
    token: str | bytes | None = None,
    timeout: timedelta | float = 60,
    max_readers: int = 4,
    on_report: Callable[[Report], object] | None = None,
    **options: Unpack[ServeKeywords],
) -> Server:
    """Serve a state from a background thread, until the returned server is closed.

    Args:
        state: what is served (:class:`State` says what it can be). Its ``state_dict()`` are called here and at the end
            of each change, in the thread that makes the change, and nowhere else: readers get the tensors that were
            returned last, as they are by then. They must not need other ranks. ``optimizer.step()`` of an optimizer in
            the state is a change; others are made within :meth:`Server.mutating`.
        host: the address to listen on, loopback by default. The guide on serving says what the network must provide
            for other addresses.
        port: 0 takes a free one; :attr:`Server.address` says which.
        token: a secret that the server and its readers share. Long and random: ``secrets.token_hex(32)``.
        timeout: how long a reader may go without progress, and so how long a stalled reader holds up training; a
            timedelta, or seconds.
        step: the step to tell readers, or a callable that returns it, which is called when the state is asked. Without
            it, readers that ask for a certain step refuse.
        max_readers: how many read at once; others wait for their turn. With a rate limit, one reads at a time.
        on_report: called with the :class:`Report` of every transfer, in the thread that served it.
        **options: the options of :class:`PGTransport` for a server: ``same_host`` (readers on this host may read
            straight from memory), ``device_memory``, ``nixl``, ``verify``, ``lanes``, ``tls``, ``max_bytes_per_second``
            (the rate limit) and ``history`` (1: readers with ``delta`` get only the items that have changed).
    """
    check_names(serve, options, ServeKeywords)
    return Server(ServeSettings(**locals()))


@dataclass(frozen=True, kw_only=True)
class ServeSettings(Given):
    """The arguments of :func:`serve`. A state may be a :class:`LiveState`, which knows its step itself."""

    state: object
    step: SupportsIndex | Callable[[], SupportsIndex | None] | None = None
    host: Annotated[str, _arguments.listening_host] = "127.0.0.1"
    port: Annotated[int, _arguments.listening_port] = 0
    token: str | bytes | None = field(default=None, repr=False)
    timeout: Annotated[float, _arguments.seconds_of] = 60
    max_readers: Annotated[int, _arguments.at_least(1)] = 4
    on_report: Annotated[Callable[[Report], object] | None, _arguments.check_callable] = None
    options: ServeKeywords = field(default_factory=ServeKeywords)


class Server:
    """A served state, made by :func:`serve`. As a context manager it closes the server on exit.

    Change the state only within :meth:`mutating`.
    """

    def __init__(self, given: ServeSettings, listener: Listener | None = None) -> None:
        """``listener``: one that listens already, and brings each connection to :meth:`answer`; None: make one."""
        self._key = key_of(given.token)
        self._seconds = given.timeout
        self._state: State | None = None
        if isinstance(given.state, LiveState):
            self._live = given.state
        else:
            self._state = State.of(given.state)
            self._live = LiveState(self._state.tree, given.step, self._seconds)
        timeout, device = timedelta(seconds=self._seconds), torch.device("cpu")
        self._transport = partial(PGTransport, timeout=timeout, device=device, relay=False, **given.options)
        self._transport(Servers({}, 0))  # Refuse wrong options here, before the first reader comes.
        self._on_report = given.on_report
        #: What the transports of all readers remember of the state.
        self._remembered = Remembered()
        self._places = threading.Semaphore(
            given.max_readers if given.options.get("max_bytes_per_second") is None else 1
        )
        #: Once the server closes: the cause for waiting readers. If it also cancels: the cause for active readers.
        self._closing: str | None = None
        self._cut: str | None = None
        self._streams: weakref.WeakSet[ServedStream] = weakref.WeakSet()
        #: Further connections of readers.
        self._meeting = AtServer()
        self._listener = listener or Listener(
            (given.host, given.port),
            self._key,
            self.answer,
            name="server",
            rank=READER,
            prove_seconds=Patience(self._seconds).handshake,
            tls=tls_of(given.options.get("tls")),
        )
        self._address = self._listener.address
        if listener is None:
            self._listener.start()
        if self._state is not None:
            self._state.join(self._live.changing)
        self._process = os.getpid()
        atexit.register(self._end)

    @property
    def address(self) -> str:
        """``host:port``, for :func:`fetch`."""
        return self._address

    @property
    def version(self) -> Version:
        """Which state is served now: its step, and the digest of this server's part of it.

        The digest is computed when this is asked for the first time after a change, and takes as long as to read the
        state from memory. From then on readers are told it with the state. Not within :meth:`mutating`.
        """
        if self._closing is not None:
            raise TransfuseError(self._closing)
        with self._live.reading(lambda: None) as seen:
            described = self._remembered.describe(seen.state, Limits.from_environment())
            return version_of(seen.step, [seen.content_of(None).of(described, self._seconds)])

    @contextmanager
    def mutating(self) -> Iterator[None]:
        """Change the state within this block. It waits until no reader is active, and readers wait until it ends.

        It waits for the readers that are active now; a stalled one delays it by at most the server's timeout.
        Blocks may be nested. At the end of the outermost one the state and its step are asked for again: an empty block
        is enough for that. This is :meth:`State.mutating`: all who read the same :class:`State` are waited for.
        """
        with self._live.changing() if self._state is None else self._state.mutating():
            yield

    def close(self, *, cancel: bool = False) -> None:
        """Accept no more readers. Active readers may finish, unless ``cancel``. Waiting readers are told."""
        if self._is_fork():
            return
        for thread in self._stop(cancel=cancel):
            if thread is threading.current_thread():
                continue  # ``on_report`` or another callable of the user's called this: the thread ends after it.
            try:
                thread.join()
            except BaseException:
                self._cut = self._closing
                raise
        atexit.unregister(self._end)
        if self._state is not None:
            self._state.leave(self._live.changing)
            self._state = None
        # This object and its listener refer to each other: until Python collects them, they would hold the state.
        self._live.forget()
        self._remembered = Remembered()

    def _stop(self, *, cancel: bool) -> Sequence[threading.Thread]:
        """Stop listening and tell the readers. Return the threads that end then."""
        self._closing = self._closing or f"the server at {self._address} was closed"
        if cancel:
            self._cut = self._closing
        return self._listener.close(cancel=cancel)

    def _is_fork(self) -> bool:
        """Whether this process is a fork of the serving one: a socket shut down here would be shut down there too."""
        return os.getpid() != self._process

    def _end(self) -> None:
        """Stop before the interpreter ends."""
        if self._is_fork():
            return
        until = time.monotonic() + SERVER_END_SECONDS
        for thread in self._stop(cancel=True):
            thread.join(max(0.0, until - time.monotonic()))
        # A reader that does not listen may have left a thread in a wait.
        for stream in list(self._streams):
            stream.cut()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close(cancel=error is not None)

    # ------------------------------------------------------------------------------------------------- connections

    def answer(self, control: ControlConnection) -> None:
        """Serve a reader that has proved the token."""
        try:
            try:
                self._receive(control)
            except Exception as error:
                # An error after a cancel is a consequence of the cancel.
                if self._cut is not None:
                    self._tell(control, TransfuseError(self._cut))
                    raise TransfuseError(self._cut) from error
                self._tell(control, error)
                raise
        except SendFailed as error:
            # Log text, not the error: a handler that keeps the record would keep all that the traceback holds.
            logger.warning("reader %s: %s", control.name, as_utf8(str(error.causes[READER])))
        except TransfuseError as error:
            logger.warning("reader %s: %s", control.name, as_utf8(str(error)))
        except Exception:
            logger.error("reader %s: the server failed\n%s", control.name, as_utf8(traceback.format_exc()))

    def _tell(self, control: ControlConnection, error: Exception) -> None:
        if control.is_released:
            return  # The conversation has told the reader.
        with suppress(TransfuseError):
            control.send(ReaderRefused(type(error).__name__, as_utf8(str(error)[:2000])), self._seconds)

    def _receive(self, control: ControlConnection) -> None:
        """Serve a reader that has proved the token: wait for a free slot, take the lock, send."""
        first: Come | Join = control.expect((Come, Join), self._seconds, "waiting for the first word", most_waits=0)
        if isinstance(first, Join):
            self._meeting.expected.bring(first.number, control)
            return
        meanwhile = _Meanwhile(control, self._seconds, lambda: self._closing)
        with self._place(meanwhile):
            control.send(Come(), self._seconds)
            entry = control.expect(Ready, self._seconds, "waiting for the reader to begin", most_waits=0).entry
            meanwhile()  # The server may have closed since.
            with self._live.reading(meanwhile) as seen:
                state = seen.state
                if entry is not None:
                    control.name += f" (entry {entry[:200]!r})"
                    state = _entry_of(state, entry)
                control.send(Ready(), self._seconds)
                with closing(server_end(control, self._seconds, self._meeting)) as stream:
                    self._streams.add(stream)
                    self._send(stream, state, seen.step, seen.content_of(entry), entry)

    @contextmanager
    def _place(self, meanwhile: _Meanwhile) -> Iterator[None]:
        while not self._places.acquire(timeout=HANDSHAKE_WAIT_SECONDS):
            meanwhile()
        try:
            yield
        finally:
            self._places.release()

    def _send(
        self, stream: ServedStream, state: object, step: int | None, content: KnownContent, entry: str | None
    ) -> None:
        guard = _Guard(self._live.rwlock, self._seconds, lambda: self._cut)
        transport = self._transport(stream, progress=guard)
        transport.remembered, transport.entry = self._remembered, entry
        try:
            with transport:
                transport.send([READER], lambda: state, step=step, content=content)
        finally:
            if self._on_report is not None and transport.report is not None:
                self._on_report(transport.report)


def _entry_of(state: object, entry: str) -> object:
    """The entry of a state that a reader asked for."""
    if not isinstance(state, Mapping):
        raise StateError(f"the state is a {type(state).__name__} and has no entries: fetch it without entry=")
    # Not only ``state[entry]``: a defaultdict would make the entry. Another thread may remove it between the two.
    if entry in state:
        with suppress(KeyError):
            return state[entry]
    raise StateError(f"the state has no entry {entry[:200]!r}")


class _Meanwhile:
    """Called while a reader waits: tell the reader so, and notice if it has left or the server closes."""

    def __init__(self, control: ControlConnection, seconds: float, closing: Callable[[], str | None]) -> None:
        self._control = control
        self._seconds = seconds
        self._closing = closing
        self._said_at = time.monotonic()

    def __call__(self) -> None:
        if (closing := self._closing()) is not None:
            raise TransfuseError(closing)
        if self._control.gone():
            raise PeerLost(READER, f"{self._control.name} closed its connection while it waited for its turn")
        if time.monotonic() - self._said_at >= HANDSHAKE_WAIT_SECONDS:
            self._control.send(Wait(), self._seconds)
            self._said_at = time.monotonic()


class _Guard:
    """Watches a transfer's progress: while training waits, only bytes buy a reader more time, not signs of life."""

    def __init__(self, rwlock: RWLock, seconds: float, cut: Callable[[], str | None]) -> None:
        self._rwlock = rwlock
        self._seconds = seconds
        self._cut = cut
        self._bytes = 0
        self._since = time.monotonic()

    def __call__(self, progress: dict[int, Progress]) -> None:
        if (cut := self._cut()) is not None:
            raise TransfuseError(cut)
        now, nbytes = time.monotonic(), sum(one.bytes for one in progress.values())
        if nbytes > self._bytes:
            self._bytes, self._since = nbytes, now
        idle = min(now - self._since, self._rwlock.held_up())
        if idle > self._seconds:
            raise PeerTimeout(READER, "the state could not be changed because it was being read", idle)
