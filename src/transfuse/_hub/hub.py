"""The Hub itself: ``transfuse.hub`` and what it returns."""

from __future__ import annotations

import atexit
import logging
import os
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from types import TracebackType
from typing import Self, SupportsIndex

from transfuse import _arguments
from transfuse._hub.assets import Assets
from transfuse._hub.commits import PATIENCE, Commits
from transfuse._hub.http_server import HttpServer
from transfuse._hub.repository import Repository
from transfuse._hub.sources import LiveSource, ServerSource, Source
from transfuse._job.face import one_manner
from transfuse._job.state import State
from transfuse._remote.live_state import LiveState
from transfuse._tuning import HTTP_END_SECONDS, HUB_MAX_SHARD_BYTES
from transfuse._wire.handshake import check_token, join_address, split_address

logger = logging.getLogger("transfuse")

DEFAULT_NAME = "live/model"
#: The file that says which class a model is of.
CONFIG = "config.json"
MAX_PORT = 65535
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
    host: str = "127.0.0.1",
    port: int = 0,
    token: str | bytes | None = None,
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
            theirs, put together from all shards here. Leaves that are no tensors are left out.
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
    """
    seconds = _arguments.duration(timeout).total_seconds()
    shard_bytes = check_shard_bytes(max_shard_bytes)
    _arguments.check_text("prefix", prefix, "the beginning of names")
    addresses = _addresses(state)
    # Refuse all wrong arguments before a state is read or a port is taken.
    settings = HubSettings(name, assets, token, host, port, hold, seconds)
    if addresses is None:
        if server_token is not None:
            raise ValueError("server_token= belongs to addresses of servers, and this is a state")
        return Hub.of_state(State.of(state), settings, step=step, prefix=prefix, max_shard_bytes=shard_bytes)
    if step is not None:
        raise ValueError("step= belongs to a state of this process: servers tell their own")
    if server_token is not None:
        check_token(server_token, "server_token")
    source = ServerSource.at(addresses, server_token, prefix=prefix, max_shard_bytes=shard_bytes, seconds=seconds)
    return Hub(source, settings)


def check_shard_bytes(max_shard_bytes: int) -> int:
    shard_bytes = _arguments.whole("max_shard_bytes", max_shard_bytes)
    if shard_bytes < 1:
        raise ValueError(f"max_shard_bytes must be positive, got {shard_bytes}")
    return shard_bytes


def _addresses(state: object) -> list[str] | None:
    """The addresses, if it is one or several: no state is a text, or a list of texts."""
    several = [state] if isinstance(state, str) else state
    if not isinstance(several, Sequence) or isinstance(several, bytes) or not several:
        return None
    if not all(isinstance(one, str) for one in several):
        return None
    for one in several:
        split_address(one)
    if len(set(several)) != len(several):
        raise ValueError(f"an address appears twice in {list(several)}: give each server once")
    return list(several)


class HubSettings:
    """What every Hub needs, checked."""

    def __init__(
        self,
        name: str,
        assets: str | os.PathLike[str] | None,
        token: str | bytes | None,
        host: str,
        port: int,
        hold: timedelta | float,
        seconds: float,
    ) -> None:
        _arguments.check_text("name", name, "the name of a repository, such as live/model")
        if not _NAME.fullmatch(name) or name.split("/")[0] in ("api", "models", "datasets", "spaces"):
            raise ValueError(f"name must look like live/model, letters, digits, - _ . only, got {name!r}")
        _arguments.check_text("host", host, "an address to listen on")
        if not host:
            raise ValueError("host is empty, which would mean every interface: if you want that, pass 0.0.0.0")
        if not 0 <= _arguments.whole("port", port) <= MAX_PORT:
            raise ValueError(f"port must be 0, for a free one, or a number up to {MAX_PORT}, got {port}")
        self.name, self.host, self.port, self.seconds = name, host, _arguments.whole("port", port), seconds
        if token is not None:
            check_token(token)
        self.token = token.encode() if isinstance(token, str) else token
        if self.token is not None and not re.fullmatch(rb"[\x21-\x7e]+", self.token):
            raise ValueError(
                "token must be letters, digits and signs of ASCII, without spaces: clients send it in a header"
            )
        self.hold = _arguments.duration(hold, "hold").total_seconds()
        self.assets = Assets(assets)


class Hub:
    """A running Hub, made by :func:`hub`. As a context manager it closes on exit.

    Change the state only within :meth:`mutating`.
    """

    def __init__(
        self, source: Source, settings: HubSettings, live: LiveState | None = None, state: State | None = None
    ) -> None:
        self._live, self._state = live, state
        self._name = settings.name
        self._commits = Commits(source, settings.hold)
        self._patience = settings.hold * PATIENCE
        self._server = HttpServer(
            settings.host,
            settings.port,
            token=settings.token,
            seconds=settings.seconds,
            answer=Repository(
                settings.name, self._commits, settings.assets, needs_token=settings.token is not None
            ).answer,
            leave=self._commits.leave,
            upkeep=self._commits.tidy,
        )
        self._endpoint = f"http://{join_address(settings.host, self._server.port)}"
        self._process = os.getpid()
        if CONFIG not in settings.assets.sizes():
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
    def of_state(
        cls,
        state: State,
        settings: HubSettings,
        *,
        step: SupportsIndex | Callable[[], SupportsIndex | None] | None,
        prefix: str,
        max_shard_bytes: int,
    ) -> Hub:
        """A Hub of a state in this process."""
        live = LiveState(state.tree, step, settings.seconds)
        return cls(LiveSource(live, prefix=prefix, max_shard_bytes=max_shard_bytes), settings, live, state)

    @property
    def endpoint(self) -> str:
        """``http://host:port``, for clients' ``HF_ENDPOINT``."""
        return self._endpoint

    @property
    def name(self) -> str:
        """The repository, for ``from_pretrained``."""
        return self._name

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
