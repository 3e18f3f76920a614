"""The Hub itself: ``transfuse.hub`` and what it returns."""

from __future__ import annotations

import atexit
import logging
import os
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from types import TracebackType
from typing import Annotated, Self, SupportsIndex

from transfuse import _arguments
from transfuse._arguments import Given, alone
from transfuse._hub.assets import Assets
from transfuse._hub.commits import PATIENCE, Commits, Visitor
from transfuse._hub.gate import Gate
from transfuse._hub.repository import Repository
from transfuse._hub.sources import Layouts, LiveSource, Reached, ServerSource, Source
from transfuse._job.face import one_manner
from transfuse._job.state import State
from transfuse._remote.client import check_places
from transfuse._remote.live_state import LiveState
from transfuse._report import Version
from transfuse._tls import Encryption, check_tls
from transfuse._tuning import HTTP_END_SECONDS, HUB_MAX_SHARD_BYTES
from transfuse._wire.handshake import check_token, join_address
from transfuse._wire.http_server import HttpServer, listen

logger = logging.getLogger("transfuse")

DEFAULT_NAME = "live/model"
#: The file that says which class a model is of.
CONFIG = "config.json"
_NAME = re.compile(r"[A-Za-z0-9][\w.-]{0,95}(/[A-Za-z0-9][\w.-]{0,95})?", re.ASCII)


@one_manner
def hub(
    state: object,
    *,
    step: SupportsIndex | Callable[[], SupportsIndex | None] | None = None,
    name: str = DEFAULT_NAME,
    assets: str | os.PathLike[str] | None = None,
    prefix: str = "",
    max_shard_bytes: int = HUB_MAX_SHARD_BYTES,
    hold: timedelta | float = 30,
    server_token: str | bytes | None = None,
    server_tls: Encryption = None,
    host: str = "127.0.0.1",
    port: int = 0,
    token: str | bytes | None = None,
    tls: Encryption = None,
    timeout: timedelta | float = 60,
) -> Hub:
    """Be a Hugging Face Hub with one repository, whose weights are those of a running job.

    In any other process ``HF_ENDPOINT=<endpoint>`` and ``from_pretrained("live/model")`` read them, as do
    ``huggingface_hub`` and all that use it. A commit is a step: a copy that is made when a client asks for ``main`` and
    the state has moved on. Clients never touch the state itself, and never hold up training but for that copy.

    Args:
        state: whose weights they are (:class:`State` says what it can be): a model, for instance. Its ``state_dict()``
            are called here and at the end of each change, in the thread that makes the change, and must not need other
            ranks. ``optimizer.step()`` of an optimizer in the state is a change; others are made within
            :meth:`Hub.mutating`. Or ``host:port`` of a :func:`serve` server, or several of these: then the weights are
            theirs, put together from all shards here. Or ``file://DIR`` or another URL of a directory to which keepers
            save steps. Leaves that are no tensors are left out.
        name: what clients call the repository: ``user/model`` or ``model``.
        assets: a directory with the other files: ``config.json``, the tokenizer, … They are read when asked for.
        step: the step of the state, or a callable that returns it, which is called when the state is asked. Servers
            tell their own.
        token: what clients must send as ``HF_TOKEN``. Over plain HTTP everybody on the way can read it.
        host: the address to listen on, loopback by default.
        port: 0 takes a free one; :attr:`Hub.endpoint` says which.
        max_shard_bytes: the most bytes of tensors in a file. A larger state has several files and an index.
        prefix: take only leaves whose names begin so, and leave it out of their names: ``"model."``.
        hold: how long a client may go on with a commit that it has been told of, after its last request.
        timeout: how long a client that takes nothing keeps its connection; and how long a server may take to answer.
        server_token: the secret of the servers.
        tls: a :class:`TLS`: clients come by https, and show certificates with one of its names. None: what
            ``TRANSFUSE_TLS_CERT``, ``_KEY``, ``_CA`` and ``_NAMES`` say. False: they come by http, whatever these say.
        server_tls: the same for what goes between the servers and this Hub.
    """
    # Refuse all wrong arguments before a state is read or a port is taken.
    given = HubSettings(**locals())
    addresses = _addresses(state)
    if addresses is None:
        if server_token is not None:
            raise ValueError("server_token= belongs to addresses of servers, and this is a state")
        if server_tls is not None:
            raise ValueError("server_tls= belongs to addresses of servers, and this is a state")
        return Hub.of_state(given)
    if step is not None:
        raise ValueError("step= belongs to a state of this process: servers tell their own")
    reached = Reached(addresses, given.server_token, given.server_tls)
    return Hub(ServerSource.at(reached, given.files, given.timeout), given)


def _addresses(state: object) -> list[str] | None:
    """The addresses, if it is one or several: no state is a text, or a list of texts."""
    several = [state] if isinstance(state, str) else state
    if not isinstance(several, Sequence) or isinstance(several, bytes) or not several:
        return None
    if not all(isinstance(one, str) for one in several):
        return None
    check_places(several)
    return list(several)


def _check_name(what: str, name: object) -> str:
    text = _arguments.check_text(what, name, "the name of a repository, such as live/model")
    if not _NAME.fullmatch(text) or text.split("/")[0] in ("api", "models", "datasets", "spaces"):
        raise ValueError(f"{what} must look like live/model, letters, digits, - _ . only, got {name!r}")
    return text


def _assets(given: Assets | str | os.PathLike[str] | None) -> Assets:
    return given if isinstance(given, Assets) else Assets(given)


def _secret(what: str, token: str | bytes | None) -> bytes | None:
    if token is not None:
        check_token(token, what)
    return token.encode() if isinstance(token, str) else token


def _header(what: str, token: str | bytes | None) -> bytes | None:
    secret = _secret(what, token)
    if secret is not None and not re.fullmatch(rb"[\x21-\x7e]+", secret):
        raise ValueError(
            f"{what} must be letters, digits and signs of ASCII, without spaces: clients send it in a header"
        )
    return secret


@dataclass(frozen=True, kw_only=True)
class HubSettings(Given):
    """The arguments of :func:`hub`."""

    state: object = None
    step: SupportsIndex | Callable[[], SupportsIndex | None] | None
    name: Annotated[str, _check_name]
    assets: Annotated[Assets, alone(_assets)]
    prefix: Annotated[str, partial(_arguments.check_text, takes="the beginning of names")]
    max_shard_bytes: Annotated[int, _arguments.at_least(1)]
    hold: Annotated[float, _arguments.seconds_of]
    server_token: Annotated[bytes | None, _secret] = field(default=None, repr=False)
    server_tls: Annotated[Encryption, check_tls] = None
    host: Annotated[str, _arguments.listening_host]
    port: Annotated[int, _arguments.listening_port]
    token: Annotated[bytes | None, _header] = field(repr=False)
    tls: Annotated[Encryption, check_tls] = None
    timeout: Annotated[float, _arguments.seconds_of]

    @property
    def files(self) -> Layouts:
        """Makes the layouts of the files."""
        return Layouts(self.prefix, self.max_shard_bytes)


class Hub:
    """A running Hub, made by :func:`hub`. As a context manager it closes on exit.

    Change the state only within :meth:`mutating`.
    """

    def __init__(
        self, source: Source, given: HubSettings, live: LiveState | None = None, state: State | None = None
    ) -> None:
        self._live, self._state = live, state
        self._name = given.name
        self._commits = Commits(source, given.hold)
        self._patience = given.hold * PATIENCE
        repository = Repository(given.name, self._commits, given.assets, needs_token=given.token is not None)
        self._server = HttpServer(
            listen(given.host, given.port),
            name="hub",
            tls=given.tls or None,
            seconds=given.timeout,
            greet=Visitor,
            gate=Gate(given.host, given.token).refusal,
            answer=repository.answer,
            leave=self._commits.leave,
            upkeep=self._commits.tidy,
        )
        scheme = "https" if given.tls else "http"
        self._endpoint = f"{scheme}://{join_address(given.host, self._server.port)}"
        self._process = os.getpid()
        if CONFIG not in given.assets.sizes():
            logger.warning(
                "the hub has no %s, without which from_pretrained(%r) cannot build the model: pass assets=, a "
                "directory that holds it (and the tokenizer)",
                CONFIG,
                self._name,
            )
        atexit.register(self._end)
        if live is not None and state is not None:
            state.join(live.changing)

    @classmethod
    def of_state(cls, given: HubSettings) -> Hub:
        """A Hub of a state in this process."""
        state = State.of(given.state)
        live = LiveState(state.tree, given.step, given.timeout)
        return cls(LiveSource(live, given.files), given, live, state)

    @property
    def endpoint(self) -> str:
        """``http://host:port``, or ``https://…`` with ``tls=``, for clients' ``HF_ENDPOINT``."""
        return self._endpoint

    @property
    def name(self) -> str:
        """The repository, for ``from_pretrained``."""
        return self._name

    @property
    def version(self) -> Version | None:
        """The newest commit that clients have got: its step, and in place of a digest its hash. None: there is none."""
        return self._commits.newest

    @contextmanager
    def mutating(self) -> Iterator[None]:
        """Change the state within this block. It waits while a copy is made; no client can make it wait longer.

        Blocks may be nested. At the end of the outermost one the state and its step are asked for again: an empty block
        is enough for that. This is :meth:`State.mutating`: all who read the same :class:`State` are waited for.
        """
        if self._live is None:
            raise RuntimeError("the state is the servers': change it within their mutating()")
        with self._live.changing() if self._state is None else self._state.mutating():
            yield

    def close(self, *, cancel: bool = False) -> None:
        """Answer no more requests, and free the copies.

        Downloads that are under way may end, unless ``cancel``. Those that take longer than ten times ``hold`` are cut.
        """
        if os.getpid() != self._process:
            return  # A fork: the socket is the other process's, too.
        self._commits.close()
        self._server.close(cancel=cancel, patience=self._patience)
        self._commits.free(HTTP_END_SECONDS)
        atexit.unregister(self._end)
        if self._live is not None and self._state is not None:
            self._state.leave(self._live.changing)
            self._live.forget()
            self._state = None

    def _end(self) -> None:
        self.close(cancel=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close(cancel=error is not None)
