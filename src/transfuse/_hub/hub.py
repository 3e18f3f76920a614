"""The Hub itself: ``transfuse.hub`` and what it returns."""

from __future__ import annotations

import atexit
import logging
import os
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from types import TracebackType
from typing import Annotated, NamedTuple, Self, SupportsIndex

from transfuse import _arguments
from transfuse._arguments import Given, alone
from transfuse._hub.adapter_versions import AdapterVersions
from transfuse._hub.adapters import CONFIG_NAME, TENSORS, WEIGHTS_NAME, PeftAdapter, config_text, names_of, peft_models
from transfuse._hub.assets import Assets
from transfuse._hub.commits import PATIENCE, Commits, Visitor
from transfuse._hub.gate import Gate
from transfuse._hub.repositories import Repositories
from transfuse._hub.repository import Repository
from transfuse._hub.sources import Layouts, LiveSource, Reached, ServerSource, Source
from transfuse._job.face import one_manner
from transfuse._job.state import Changing, State
from transfuse._remote.client import check_places
from transfuse._remote.live_state import LiveState
from transfuse._report import Version
from transfuse._tls import Encryption, check_tls
from transfuse._tuning import HTTP_END_SECONDS, HUB_MAX_SHARD_BYTES
from transfuse._wire.handshake import check_token, join_address
from transfuse._wire.http_server import HttpServer, listen

logger = logging.getLogger("transfuse")

DEFAULT_NAME, DEFAULT_ADAPTER = "live/model", "live/policy"
#: The file that says which class a model is of.
CONFIG = "config.json"
_NAME = re.compile(r"[A-Za-z0-9][\w.-]{0,95}(/[A-Za-z0-9][\w.-]{0,95})?", re.ASCII)


@one_manner
def hub(
    state: object = None,
    *,
    step: SupportsIndex | Callable[[], SupportsIndex | None] | None = None,
    name: str | None = None,
    assets: str | os.PathLike[str] | None = None,
    prefix: str = "",
    max_shard_bytes: int = HUB_MAX_SHARD_BYTES,
    adapter: object = None,
    adapter_name: str | Sequence[str] | None = None,
    adapter_config: object = None,
    versions: int = 4,
    hold: timedelta | float = 30,
    server_token: str | bytes | None = None,
    server_tls: Encryption = None,
    host: str = "127.0.0.1",
    port: int = 0,
    token: str | bytes | None = None,
    tls: Encryption = None,
    timeout: timedelta | float = 60,
) -> Hub:
    """Be a Hugging Face Hub whose repository has the weights of a running job, or one for each step of an adapter.

    In any other process ``HF_ENDPOINT=<endpoint>`` and ``from_pretrained("live/model")`` read them, as do
    ``huggingface_hub`` and all that use it. A commit is a step: a copy that is made when a client asks for ``main`` and
    the state has moved on. Clients never touch the state itself, and never hold up training but for that copy.

    With ``adapter=`` each step of a LoRA adapter is a repository of its own, ``live/policy-v7``, whose bytes never
    change: a copy that is made at the end of the change. ``state`` and ``adapter`` may be in one Hub.

    Args:
        state: whose weights they are (:class:`State` says what it can be): a model, for instance. Its ``state_dict()``
            are called here and at the end of each change, in the thread that makes the change, and must not need other
            ranks. ``optimizer.step()`` of an optimizer in the state is a change; others are made within
            :meth:`Hub.mutating`. Or ``host:port`` of a :func:`serve` server, or several of these: then the weights are
            theirs, put together from all shards here. Or ``file://DIR`` or another URL of a directory to which keepers
            save steps. Leaves that are no tensors are left out.
        name: what clients call the repository: ``user/model`` or ``model``. None: ``live/model``, and of an adapter
            alone ``live/policy``. A version of an adapter is called this, ``-v`` and the step. Without ``step=`` its
            number is that of the changes since the Hub was opened.
        assets: a directory with the other files: ``config.json``, the tokenizer, … They are read when asked for.
        step: the step of the state, or a callable that returns it, which is called when the state is asked. Servers
            tell their own.
        token: what clients must send as ``HF_TOKEN``. Over plain HTTP everybody on the way can read it.
        host: the address to listen on, loopback by default.
        port: 0 takes a free one; :attr:`Hub.endpoint` says which.
        max_shard_bytes: the most bytes of tensors in a file. A larger state has several files and an index.
        prefix: take only leaves whose names begin so, and leave it out of their names: ``"model."``. Those of a
            ``PeftModel`` are as peft calls them, whatever this says.
        adapter: whose versions these are: a ``PeftModel`` of peft, or a state that holds one (and its optimizer, whose
            ``step()`` is a change then). Or, together with ``adapter_config=``, a state of tensors, or addresses, as
            for ``state``: then a version is made when a client asks for the servers' present step.
        adapter_name: which adapter of the ``PeftModel``; None: its only one. Several are versions of their own, called
            ``name``, ``-``, the adapter, ``-v`` and the step.
        adapter_config: what ``adapter_config.json`` says, where no ``PeftModel`` says it: a mapping, or a config of
            peft.
        versions: how many versions of an adapter are held. Older ones that a client reads are held for ``hold``, at
            most as many again. Each takes the memory of the adapter.
        hold: how long a client may go on with a commit that it has been told of, after its last request.
        timeout: how long a client that takes nothing keeps its connection; and how long a server may take to answer.
        server_token: the secret of the servers.
        tls: a :class:`TLS`: clients come by https, and show certificates with one of its names. None: what
            ``TRANSFUSE_TLS_CERT``, ``_KEY``, ``_CA`` and ``_NAMES`` say. False: they come by http, whatever these say.
        server_tls: the same for what goes between the servers and this Hub.
    """
    # Refuse all wrong arguments before a state is read or a port is taken.
    given = HubSettings(**locals())
    addresses = [_addresses(one) for one in (state, adapter) if one is not None]
    if not any(addresses):
        if server_token is not None:
            raise ValueError("server_token= belongs to addresses of servers, and this is a state")
        if server_tls is not None:
            raise ValueError("server_tls= belongs to addresses of servers, and this is a state")
    elif all(addresses) and step is not None:
        raise ValueError("step= belongs to a state of this process: servers tell their own")
    return Hub.of(given)


def _addresses(state: object) -> list[str] | None:
    """The addresses, if it is one or several: no state is a text, or a list of texts."""
    several = [state] if isinstance(state, str) else state
    if not isinstance(several, Sequence) or isinstance(several, bytes) or not several:
        return None
    if not all(isinstance(one, str) for one in several):
        return None
    check_places(several)
    return list(several)


def _check_name(what: str, name: object) -> str | None:
    if name is None:
        return None
    text = _arguments.check_text(what, name, "the name of a repository, such as live/model")
    if not _NAME.fullmatch(text) or text.split("/")[0] in ("api", "models", "datasets", "spaces"):
        raise ValueError(f"{what} must look like live/model, letters, digits, - _ . only, got {name!r}")
    return text


def _adapter_names(what: str, names: object) -> tuple[str, ...] | str | None:
    if names is None or isinstance(names, str):
        return names
    if not isinstance(names, Sequence) or not names or not all(isinstance(name, str) for name in names):
        raise TypeError(f"{what} takes the name of an adapter, or several, got {type(names).__name__}")
    return tuple(dict.fromkeys(names))


def _adapter_config(what: str, config: object) -> bytes | None:
    return None if config is None else config_text(what, config)


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
    name: Annotated[str | None, _check_name] = None
    assets: Annotated[Assets, alone(_assets)]
    prefix: Annotated[str, partial(_arguments.check_text, takes="the beginning of names")]
    max_shard_bytes: Annotated[int, _arguments.at_least(1)]
    adapter: object = None
    adapter_name: Annotated[tuple[str, ...] | str | None, _adapter_names] = None
    adapter_config: Annotated[bytes | None, _adapter_config] = None
    versions: Annotated[int, _arguments.at_least(1)] = 4
    hold: Annotated[float, _arguments.seconds_of]
    server_token: Annotated[bytes | None, _secret] = field(default=None, repr=False)
    server_tls: Annotated[Encryption, check_tls] = None
    host: Annotated[str, _arguments.listening_host]
    port: Annotated[int, _arguments.listening_port]
    token: Annotated[bytes | None, _header] = field(repr=False)
    tls: Annotated[Encryption, check_tls] = None
    timeout: Annotated[float, _arguments.seconds_of]

    @property
    def has_model(self) -> bool:
        """Whether there is more than an adapter."""
        return self.state is not None or self.adapter is None

    @property
    def repository(self) -> str:
        return self.name or (DEFAULT_NAME if self.has_model else DEFAULT_ADAPTER)

    @property
    def files(self) -> Layouts:
        """Makes the layouts of the files."""
        return Layouts(self.prefix, self.max_shard_bytes)

    def adapter_files(self, prefix: str) -> Layouts:
        """The same for an adapter: one file, as peft writes it."""
        return Layouts(prefix, sys.maxsize, only_name=WEIGHTS_NAME, with_aliases=False)


#: Gives the servers for the time of one conversation.
Reach = Callable[[], AbstractContextManager[Reached]]


class _Joined(NamedTuple):
    """A state of this process that the Hub reads, and what a change of it is within."""

    state: State
    live: LiveState
    changing: Changing


def _servers(state: object, layouts: Layouts, given: HubSettings, reach: Reach | None) -> ServerSource | None:
    """The servers that a state is at; None if it is in this process."""
    if reach is not None:
        source = ServerSource(reach, layouts, given.timeout)
        source.mark(None)  # An address that leads nowhere is told now, not to the first client.
        return source
    addresses = _addresses(state)
    if addresses is None:
        return None
    return ServerSource.at(Reached(addresses, given.server_token, given.server_tls), layouts, given.timeout)


def _model(given: HubSettings, reach: Reach | None, joined: list[_Joined]) -> Source:
    servers = _servers(given.state, given.files, given, reach)
    if servers is not None:
        return servers
    state = State.of(given.state)
    live = LiveState(state.tree, given.step, given.timeout)
    joined.append(_Joined(state, live, live.changing))
    return LiveSource(live, given.files)


def _adapters(given: HubSettings, reach: Reach | None, joined: list[_Joined]) -> list[AdapterVersions]:
    """The versions of all adapters that were asked for."""
    stem, config = given.repository, given.adapter_config
    servers = _servers(given.adapter, given.adapter_files(given.prefix), given, reach)
    state = None if servers is not None else State.of(given.adapter)
    models = [] if state is None else peft_models(state)
    if len(models) > 1:
        raise ValueError(f"adapter= holds {len(models)} models of peft: give one of them")
    if models and config is not None:
        raise ValueError("adapter_config= belongs to an adapter without a PeftModel, which has a config of its own")
    if not models and config is None:
        raise TypeError("adapter= takes a PeftModel, or tensors or addresses together with adapter_config=")
    if not models and given.adapter_name is not None:
        raise ValueError("adapter_name= belongs to a PeftModel")
    if servers is not None:
        assert config is not None
        _check_stem(stem)
        return [AdapterVersions(stem, servers, count=given.versions, hold=given.hold, config=config)]
    assert state is not None
    trees, prefix = {stem: lambda: {TENSORS: state.tree(), CONFIG_NAME: config}}, f"{TENSORS}.{given.prefix}"
    if models:
        asked, prefix = given.adapter_name, f"{TENSORS}."
        names = names_of(models[0], (asked,) if isinstance(asked, str) else asked or ())
        several = isinstance(asked, tuple)
        trees = {f"{stem}-{name}" if several else stem: PeftAdapter(models[0], name).tree for name in names}
    found = []
    for name, tree in trees.items():
        _check_stem(name)
        live = LiveState(tree, given.step, given.timeout)
        source = LiveSource(live, given.adapter_files(prefix))
        found.append(AdapterVersions(name, source, count=given.versions, hold=given.hold, live=live))
        joined.append(_Joined(state, live, found[-1].changing))
    return found


def _check_stem(name: str) -> None:
    """Whether clients take the names of an adapter's versions."""
    longest = f"{name}-v{sys.maxsize}"
    if not _NAME.fullmatch(longest) or "--" in longest or ".." in longest:
        raise ValueError(
            f"{name!r}, -v and a step are no name that clients take: letters, digits, - _ . only, no -- and no .., "
            "and at most 96 in all"
        )


class Hub:
    """A running Hub, made by :func:`hub`. As a context manager it closes on exit.

    Change the state only within :meth:`mutating`.
    """

    def __init__(
        self,
        given: HubSettings,
        model: Source | None,
        adapters: Sequence[AdapterVersions],
        joined: Sequence[_Joined],
    ) -> None:
        self._name = given.repository
        self._patience = given.hold * PATIENCE
        self._adapters, self._joined, self._is_live = adapters, joined, bool(joined)
        self._commits = None if model is None else Commits(model, given.hold)
        needs_token, repository = given.token is not None, None
        if self._commits is not None:
            repository = Repository(self._name, self._commits, given.assets, needs_token=needs_token)
        self._server = HttpServer(
            listen(given.host, given.port),
            name="hub",
            tls=given.tls or None,
            seconds=given.timeout,
            greet=Visitor,
            gate=Gate(given.host, given.token).refusal,
            answer=Repositories(repository, adapters, needs_token=needs_token).answer,
            leave=(lambda visitor: None) if self._commits is None else self._commits.leave,
            upkeep=(lambda: None) if self._commits is None else self._commits.tidy,
        )
        scheme = "https" if given.tls else "http"
        self._endpoint = f"{scheme}://{join_address(given.host, self._server.port)}"
        self._process = os.getpid()
        if model is not None and CONFIG not in given.assets.sizes():
            logger.warning(
                "the hub has no %s, without which from_pretrained(%r) cannot build the model: pass assets=, a "
                "directory that holds it (and the tokenizer)",
                CONFIG,
                self._name,
            )
        atexit.register(self._end)
        for state, _, changing in joined:
            state.join(changing)

    @classmethod
    def of(cls, given: HubSettings, reach: Reach | None = None) -> Hub:
        """A Hub of what was given. ``reach``: of what these servers have, which are asked now."""
        if given.assets.are_given and not given.has_model:
            raise ValueError(
                "assets= belongs to a model: a version of an adapter has its two files, which never change"
            )
        joined: list[_Joined] = []
        model = _model(given, reach, joined) if given.has_model else None
        adapters = [] if given.adapter is None else _adapters(given, reach, joined)
        return cls(given, model, adapters, joined)

    @property
    def endpoint(self) -> str:
        """``http://host:port``, or ``https://…`` with ``tls=``, for clients' ``HF_ENDPOINT``."""
        return self._endpoint

    @property
    def name(self) -> str:
        """The repository, for ``from_pretrained``."""
        return self._name

    @property
    def adapters(self) -> list[str]:
        """The versions of adapters that are held now, by the names for ``from_pretrained``, newest first."""
        return [name for versions in self._adapters for name in versions.names()]

    @property
    def version(self) -> Version | None:
        """The newest commit that clients have got: its step, and in place of a digest its hash. None: there is none."""
        return None if self._commits is None else self._commits.newest

    @contextmanager
    def mutating(self) -> Iterator[None]:
        """Change the state within this block. It waits while a copy is made; no client can make it wait longer.

        Blocks may be nested. At the end of the outermost one the state and its step are asked for again: an empty block
        is enough for that. Adapters are copied then, unless it raises. This is :meth:`State.mutating`: all who read the
        same :class:`State` are waited for.
        """
        if not self._is_live:
            raise RuntimeError("the state is the servers': change it within their mutating()")
        with ExitStack() as stack:
            for state in {id(state): state for state, *_ in self._joined}.values():
                stack.enter_context(state.mutating())
            yield

    def close(self, *, cancel: bool = False) -> None:
        """Answer no more requests, and free the copies.

        Downloads that are under way may end, unless ``cancel``. Those that take longer than ten times ``hold`` are cut.
        """
        if os.getpid() != self._process:
            return  # A fork: the socket is the other process's, too.
        copies: list[AdapterVersions | Commits] = [*self._adapters]
        if self._commits is not None:
            copies.append(self._commits)
        for one in copies:
            one.close()
        self._server.close(cancel=cancel, patience=self._patience)
        for one in copies:
            one.free(HTTP_END_SECONDS)
        atexit.unregister(self._end)
        for state, live, changing in self._joined:
            state.leave(changing)
            live.forget()
        self._joined = ()

    def _end(self) -> None:
        self.close(cancel=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close(cancel=error is not None)
