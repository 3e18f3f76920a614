"""The reader's side: fetch a state from servers outside this process's own group."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import timedelta
from functools import partial
from typing import Annotated, Any, Literal, NoReturn, SupportsIndex, Unpack, overload

import torch

from transfuse import _arguments
from transfuse._arguments import Given, alone, check_step
from transfuse._errors import PeerTimeout, ProtocolError, ReceiveFailed, TransfuseError
from transfuse._job.face import one_manner
from transfuse._job.receipt import Receipt
from transfuse._job.state import State
from transfuse._limits import Limits
from transfuse._options import FetchKeywords, Options, check_names
from transfuse._plan.catalogue import Late
from transfuse._remote.ends import ReaderEnd, ServedStream, Servers, ToServer
from transfuse._remote.in_process import InProcess
from transfuse._report import Report, Version
from transfuse._session import threads
from transfuse._session.content import version_of
from transfuse._session.context import Partial, Permit
from transfuse._session.offers import ask_content, describe, read_offer
from transfuse._session.pending import Brought, Pending
from transfuse._session.remembered import Remembered
from transfuse._state.manifest import Manifest
from transfuse._timeouts import Patience
from transfuse._tls import TLS, Encryption, tls_of
from transfuse._transport import PGTransport, check_resume
from transfuse._tuning import FETCH_MAX_ENTRY_BYTES, HANDSHAKE_WAIT_SECONDS
from transfuse._wire import messages
from transfuse._wire.channel import Channel
from transfuse._wire.group import OFFER_TAG, Group
from transfuse._wire.handshake import READER, Come, ControlConnection, Ready, check_addresses, connect, key_of
from transfuse._wire.messages import Message

logger = logging.getLogger("transfuse")

CPU = torch.device("cpu")


#: What all fetches of this process remember: most fetch the same structure again and again.
_remembered = Remembered()


@dataclass(frozen=True)
class Fetched:
    """What :func:`fetch` has brought."""

    #: The whole state: in the target's own tensors where they took it, and fresh where not.
    state: Any
    #: The step that the servers gave it; None if they gave none.
    step: int | None
    report: Report

    @property
    def version(self) -> Version:
        """Which state that is. Its digest is None unless the servers knew it, or ``version=True`` asked for it."""
        return self.report.version or Version(self.step)

    def __getitem__(self, key: object) -> NoReturn:
        raise TypeError(f"fetch() returns a Fetched: the entry is .state[{key!r}]")


@overload
def fetch(
    address: str | Sequence[str],
    state: object = None,
    *,
    step: SupportsIndex | None = None,
    load: Callable[[Any], object] | None = None,
    entry: str | None = None,
    resume: Partial | None = None,
    version: bool = False,
    token: str | bytes | None = None,
    timeout: timedelta | float = 60,
    wait: Literal[True] = True,
    **options: Unpack[FetchKeywords],
) -> Fetched: ...


@overload
def fetch(
    address: str | Sequence[str],
    state: object = None,
    *,
    step: SupportsIndex | None = None,
    load: Callable[[Any], object] | None = None,
    entry: str | None = None,
    resume: Partial | None = None,
    version: bool = False,
    token: str | bytes | None = None,
    timeout: timedelta | float = 60,
    wait: Literal[False],
    **options: Unpack[FetchKeywords],
) -> Pending[Fetched]: ...


@one_manner
def fetch(
    address: str | Sequence[str],
    state: object = None,
    *,
    step: SupportsIndex | None = None,
    load: Callable[[Any], object] | None = None,
    entry: str | None = None,
    resume: Partial | None = None,
    version: bool = False,
    token: str | bytes | None = None,
    timeout: timedelta | float = 60,
    wait: bool = True,
    **options: Unpack[FetchKeywords],
) -> Fetched | Pending[Fetched]:
    """Fetch a state from one server, or from several at once that hold replicas, shards or stages of one state.

    Args:
        address: ``host:port`` of a server, or several. In errors and reports, rank ``i`` is the server of the
            i-th address, counted from 0. Or ``file://DIR``, a directory to which keepers have saved steps
            (``keep(directory=DIR)``), or another URL of one: then the newest step that is whole is read, without a
            keeper, and compared with its digests.
        state: what the bytes land in (:class:`State` says what it can be). An object for which something could not land
            in place gets it by its ``load_state_dict``. Without a state, every tensor is newly allocated.
        load: for a ``state`` that is a callable: called with all that has arrived.
        token: the secret that the servers were started with.
        timeout: how long the fetch may go without progress, as a timedelta or in seconds.
        step: the step that every server must serve. A server with another step, or with none, is refused. None accepts
            any step. Of a directory, the step that is read.
        entry: fetch this entry alone of a state that is a mapping, as if the server served ``state[entry]``: nothing
            else is described or sent, and ``state`` is a target for the entry.
        resume: ``error.partial`` of an earlier fetch that failed.
        version: have each server compute the digest of its content, unless it knows it: :attr:`Fetched.version` has it.
        wait: False: return a :class:`Pending` at once. The bytes arrive aside while the caller works, and its
            ``install()`` puts them into ``state`` and returns the :class:`Fetched`.
        **options: the receiver's options of :class:`PGTransport`: all but ``relay``, ``streams``,
            ``max_bytes_per_second`` and ``history``.

    If some of several servers are absent, the fetch goes on with the others, as long as those hold all that is needed.
    """
    check_names(fetch, options, FetchKeywords)
    request = FetchSettings(**locals())
    return fetch_if(None, request) if request.wait else _Fetching(None, request, None).ahead()


@dataclass(frozen=True, kw_only=True)
class FetchSettings(Given):
    """The arguments of :func:`fetch`. In the place of an address there may be a server of this process."""

    address: Annotated[Sequence[str | InProcess], alone(_check)]
    state: object = None
    step: Annotated[int | None, alone(check_step)] = None
    load: Callable[[Any], object] | None = None
    entry: Annotated[str | None, alone(_check_entry)] = None
    resume: Annotated[Partial | None, alone(check_resume)] = None
    version: Annotated[bool, alone(_check_version)] = False
    token: str | bytes | None = field(default=None, repr=False)
    timeout: Annotated[float, _arguments.seconds_of] = 60
    wait: Annotated[bool, alone(_check_wait)] = True
    options: FetchKeywords = field(default_factory=FetchKeywords)

    @property
    def directory(self) -> str | None:
        """The directory of steps that is to be read in the place of servers, if the address is one."""
        (first, *_) = self.address
        return first if isinstance(first, str) and is_directory(first) else None


def fetch_if(
    permit: Permit | None, request: FetchSettings, late: Late | None = None, *, only_compares: bool = False
) -> Fetched:
    """As :func:`fetch`, but ``permit`` is asked before a target is written, and may raise.

    ``late`` chooses the target in place of ``state``, when the servers have said what they have. ``only_compares``:
    nothing is fetched or written, and the result's ``state`` says how the target compares.
    """
    return _Fetching(permit, request, late, only_compares=only_compares).run()


class _Fetching:
    """One fetch: the state that it fills, asked for in the caller's thread, and the visit to the servers."""

    def __init__(
        self, permit: Permit | None, request: FetchSettings, late: Late | None, *, only_compares: bool = False
    ) -> None:
        self._permit, self._request, self._late, self._only_compares = permit, request, late, only_compares
        self._given = None if request.state is None else State.of(request.state, request.load)
        self._tls = tls_of(request.options.get("tls"))
        self._receipt: Receipt | None = None
        self._target: Any = None

    def _ask(self) -> None:
        """Ask for the state that is filled."""
        given, request = self._given, self._request
        if given is None:
            return
        self._receipt = receipt = None if given.is_made or self._only_compares else Receipt(given)
        self._target = given.tree() if receipt is None else receipt.target
        if self._permit is None and given.places():
            self._permit = None if receipt is None else partial(receipt.find_takers, options=request.options)

    def run(self) -> Fetched:
        brought = self._receive(self._ask)
        return self._finish(brought.found, brought.report)

    def ahead(self) -> Pending[Fetched]:
        """Ask for the state now, in this thread, and fetch it in another one."""
        request = self._request
        Options(**request.options).check(
            timedelta(seconds=request.timeout), Limits.from_environment(), in_place=self._given is not None
        )
        self._ask()
        receipt, given = self._receipt, self._given
        tree = None if receipt is None or given is None or receipt.has_copies else given.tree
        return Pending(partial(self._receive, lambda: None, hold=True), self._finish, tree)

    def _receive(
        self, ask: Callable[[], None], watch: Callable[[], object] = lambda: None, *, hold: bool = False
    ) -> Brought:
        request, directory = self._request, self._request.directory
        if directory is None:
            return self._visit(request, ask, watch, hold=hold)
        from transfuse._keeper import saved  # Which stands on this module.

        with saved.served(directory, step=request.step, entry=request.entry, seconds=request.timeout) as servers:
            return self._visit(replace(request, address=servers, step=None, entry=None), ask, watch, hold=hold)

    def _visit(
        self, request: FetchSettings, ask: Callable[[], None], watch: Callable[[], object], *, hold: bool
    ) -> Brought:
        visit = _ServerVisit(
            request.address, key_of(request.token), request.timeout, self._tls, request.entry, watch=watch
        )
        with visit:
            group, timeout = Servers(visit.groups, len(request.address)), timedelta(seconds=request.timeout)
            target = None if self._given is None else lambda: self._target
            transport = PGTransport(group, timeout, CPU, target, **request.options)
            transport.remembered = _remembered
            # Ask before any server holds its state still for this reader, and after all other arguments were checked.
            ask()
            ranks = visit.begin()
            try:
                with transport:
                    found = transport.receive(
                        ranks,
                        step=request.step,
                        resume=request.resume,
                        late=self._late,
                        absent=visit.absent,
                        permit=self._permit,
                        watch=watch,
                        hold=hold,
                        version=request.version,
                        only_compares=self._only_compares,
                    )
            except TransfuseError as error:
                visit.explain(error)
                raise
            assert transport.report is not None
            return Brought(found, transport.report)

    def _finish(self, found: Any, report: Report) -> Fetched:
        """Give what has arrived to the objects that take it."""
        if self._receipt is not None:
            self._receipt.load(found)
        elif self._given is not None and self._given.loads is not None and not self._only_compares:
            self._given.loads(found)
        return Fetched(found, report.step, report)


@dataclass(frozen=True)
class Peeked:
    """The description of a server's state, without any tensor data."""

    step: int | None
    manifest: Manifest
    #: Which state that is. Its digest is None unless the server knew it, or ``version=True`` asked for it.
    version: Version


def peek(
    address: str,
    *,
    version: bool = False,
    token: str | bytes | None = None,
    tls: Encryption = None,
    timeout: timedelta | float = 60,
) -> Peeked:
    """Ask a server for the description of its state. No tensor moves. ``version``, ``tls``: as for :func:`fetch`."""
    _check_version(version)
    seconds, limits = _arguments.duration(timeout).total_seconds(), Limits.from_environment()
    found: list[tuple[messages.Offer, bytes]] = []
    if isinstance(address, str) and is_directory(address):
        from transfuse._keeper import saved  # Which stands on this module.

        if version:
            raise ValueError(f"nobody knows the digest of a step in {address}: fetch(..., version=True) computes it")
        step, manifest = saved.look(address)
        return Peeked(step, manifest, Version(step))
    with _ServerVisit(_check([address]), key_of(token), seconds, tls_of(tls)) as visit:
        visit.begin()
        group = Group(Servers(visit.groups, 1), CPU)

        def talk() -> None:
            with Channel(group, 0, seconds, limits) as channel:
                channel.phase = "waiting for the offer"
                _, body = channel.expect(Message.OFFER, tag=OFFER_TAG)
                offer = describe(channel, read_offer(body, limits, 0))
                found.append((offer, ask_content(channel, offer) if version else offer.content))
                # This reader wants no parcels, so everything it wants is here.
                channel.ask_last(Message.VERDICT, messages.encode(messages.Verdict()), Message.AGREED)

        failed = threads.run({0: talk}, threads.Caller(watching=False), lambda: None)
        if failed:
            raise failed[0]
        ((offer, content),) = found
        try:
            manifest = Manifest.decode(offer.described, limits, offer.coordinates)
            return Peeked(offer.step, manifest, version_of(offer.step, [content]))
        except ValueError as error:
            raise ProtocolError(0, f"{address} sent an invalid description of its state: {error}") from error


#: What is in the URL of a directory of steps, and in no address of a server.
_URL = "://"


def is_directory(address: str) -> bool:
    """Whether an address is the URL of a directory of steps."""
    return _URL in address


def check_places(addresses: Sequence[object]) -> None:
    """Refuse what is neither addresses of servers nor one directory of steps."""
    directories = [one for one in addresses if isinstance(one, str) and is_directory(one)]
    if directories and len(addresses) > 1:
        raise ValueError(f"the directory {directories[0]} holds all ranks' states: give it alone")
    if not directories:
        check_addresses(addresses)


def _check(address: str | Sequence[str | InProcess]) -> tuple[str | InProcess, ...]:
    takes = "host:port, several of these, or the URL of a directory of steps"
    if isinstance(address, bytes | bytearray) or not isinstance(address, str | Iterable):
        _arguments.check_text("address", address, takes)
    addresses = (address,) if isinstance(address, str) else tuple(address)
    if not addresses:
        raise ValueError("address is empty: give host:port of at least one server")
    for one in addresses:
        if not isinstance(one, InProcess):
            _arguments.check_text("address", one, takes)
    check_places(addresses)
    return addresses


def _check_version(version: bool) -> bool:
    _arguments.check_flags(version=version)
    return version


def _check_wait(wait: bool) -> bool:
    _arguments.check_flags(wait=wait)
    return wait


def _check_entry(entry: str | None) -> str | None:
    if entry is None:
        return None
    _arguments.check_text("entry", entry, "a key of the state's mapping")
    try:
        nbytes = len(entry.encode())
    except UnicodeEncodeError:
        raise ValueError(f"entry is a text that UTF-8 cannot write, got {entry[:200]!a}") from None
    if nbytes > FETCH_MAX_ENTRY_BYTES:
        raise ValueError(f"entry is at most {FETCH_MAX_ENTRY_BYTES} bytes long, got {nbytes}")
    return str.__str__(entry)  # A class that is derived from str cannot be sent.


class _ServerVisit:
    """What precedes the conversation: connect to every server at once, and wait until each holds its state still."""

    def __init__(
        self,
        addresses: Sequence[str | InProcess],
        key: bytes,
        seconds: float,
        tls: TLS | None,
        entry: str | None = None,
        watch: Callable[[], object] = lambda: None,
    ) -> None:
        """``watch`` is called now and then, and may raise to end the visit."""
        self._addresses = addresses
        self._key = key
        self._tls = tls
        self._entry = entry
        self._watch = watch
        self._seconds = seconds
        self._patience = Patience(seconds)
        # The most `Wait` frames to accept: in all, as long as signs of life in a conversation are believed.
        limits = Limits.from_environment()
        self._waits = self._patience.signs_of_life(limits.max_working_records, HANDSHAKE_WAIT_SECONDS)
        self._controls: dict[int, ControlConnection] = {}
        self._ready: dict[int, ReaderEnd] = {}
        self._causes: dict[int, BaseException] = {}
        #: Numbers of the servers that this reader has given up.
        self._left: set[int] = set()
        self._lock = threading.Lock()
        #: By address number: the stream to each server that is ready.
        self.groups: dict[int, ReaderEnd] = {}

    def __enter__(self) -> _ServerVisit:
        return self

    def __exit__(self, *_: object) -> None:
        for number in range(len(self._addresses)):
            self._leave(number)

    def begin(self) -> list[int]:
        """Connect to every server. Return the numbers of those that hold still now."""
        # A connected server waits for this reader's word, so the others may use only part of that server's patience.
        met = self._all(self._meet, range(len(self._addresses)), "the others were there", self._patience.other_servers)

        # A server that is ready holds up its own training, so the others get little time.
        ready = self._all(self._get_ready, sorted(met), "the others were ready", self._patience.other_states)
        if not ready:
            causes = self._causes
            raise causes[0] if len(self._addresses) == 1 else ReceiveFailed(causes)
        for address, cause in self.absent.items():
            logger.warning("going on without %s: %s", address, str(cause))
        self.groups.update((number, self._ready[number]) for number in ready)
        return sorted(ready)

    @property
    def absent(self) -> dict[str, BaseException]:
        """The servers that the fetch goes on without: a map from address to cause."""
        return {str(self._addresses[number]): cause for number, cause in sorted(self._causes.items())}

    def explain(self, error: TransfuseError) -> None:
        """Add notes to the error: which address each rank is, and which servers were absent."""
        if len(self._addresses) > 1:
            error.add_note("; ".join(f"rank {rank} is {name}" for rank, name in enumerate(self._addresses)))
            for address, cause in self.absent.items():
                error.add_note(f"{address} was not there: {cause}")

    def _meet(self, number: int) -> None:
        """Connect to a server, and wait until it has room for this reader."""
        server = self._addresses[number]
        if isinstance(server, InProcess):
            return
        connected = partial(self._connected, number)
        control = connect(server, self._key, self._seconds, number, connected, tls=self._tls)
        control.send(Come(), self._seconds)
        control.expect(Come, self._seconds, "waiting for the server to have room", self._waits)

    def _connected(self, number: int, control: ControlConnection) -> None:
        with self._lock:
            self._controls[number] = control
            left = number in self._left
        if left:
            control.close()

    def _get_ready(self, number: int) -> None:
        """Wait until a server holds its state still. From then on its connection is the conversation's stream."""
        server = self._addresses[number]
        end: ReaderEnd
        if isinstance(server, InProcess):
            end = server.begin()
        else:
            control = self._controls[number]
            control.send(Ready(self._entry), self._seconds)
            control.expect(Ready, self._seconds, "waiting for the server's state to hold still", self._waits)
            end = ServedStream(control, READER, self._seconds, ToServer(server, self._key, self._tls))
        with self._lock:
            self._ready[number] = end
            left = number in self._left
        if left:
            end.close()

    def _leave(self, number: int) -> None:
        with self._lock:
            self._left.add(number)
            control, end = self._controls.get(number), self._ready.get(number)
        if control is not None:
            control.close()
        if end is not None:
            end.close()

    def _all(self, task: Callable[[int], None], numbers: Sequence[int], phase: str, patience: float) -> list[int]:
        """Run ``task`` for all ``numbers`` at once; return the numbers of those that succeeded.

        Once one has succeeded, the others get ``patience`` seconds more.
        """
        if len(numbers) == 1 and isinstance(self._addresses[numbers[0]], InProcess):
            task(numbers[0])  # Nothing to wait for.
            return list(numbers)
        results: queue.SimpleQueue[tuple[int, BaseException | None]] = queue.SimpleQueue()

        def work(number: int) -> None:
            try:
                task(number)
                results.put((number, None))
            except BaseException as error:
                results.put((number, error))

        for number in numbers:
            threading.Thread(target=work, args=(number,), name=f"transfuse-visit-{number}", daemon=True).start()
        done: list[int] = []
        waiting = set(numbers)
        until = float("inf")
        while waiting and time.monotonic() < until:
            # Wait in slices, so that Ctrl-C takes effect.
            self._watch()
            with suppress(queue.Empty):
                number, error = results.get(timeout=Patience.SLICE_SECONDS)
                waiting.discard(number)
                if error is None:
                    done.append(number)
                    until = min(until, time.monotonic() + patience)
                else:
                    self._causes[number] = error
        for number in waiting:
            self._leave(number)
            self._causes[number] = PeerTimeout(number, f"{phase} ({self._addresses[number]})", patience)
        return done
