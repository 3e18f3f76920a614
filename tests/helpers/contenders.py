"""Everything that moves a state and is installed here, as transports of the conformance suite.

Each contender is run as its own documentation says. Those that do not send over the group use it to hand over an
address or a directory, past the group's count; what they move themselves is counted, and passes the trap that a case
has set, in their place: by a tap on their connection, or when the file is written.
"""

from __future__ import annotations

import contextlib
import inspect
import itertools
import os
import pathlib
import socket
import tempfile
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any
from unittest import mock

import torch
from safetensors import torch as safetensors
from torch.distributed.checkpoint import _pg_transport as pytorch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import _EmptyStateDictLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict, load
from torch.distributed.checkpoint.state_dict_saver import save

import transfuse
from tampering import Tampering
from transfuse._session import receive_from_one
from transfuse._timeouts import Patience

try:
    from torchft.checkpointing import HTTPTransport
    from torchft.checkpointing.pg_transport import PGTransport as TorchftPGTransport
except ImportError:  # It is an extra.
    HTTPTransport = TorchftPGTransport = None

__all__ = ["CONTENDERS", "FILES", "TORCHFT", "Contender", "Damaging"]

CPU = torch.device("cpu")
TORCHFT = HTTPTransport is not None

Callback = Callable[[], Any]


class Damaging(Tampering):
    """A group that flips one bit of the first large thing that leaves, whatever carries it."""

    SMALLEST = 1 << 16

    def __init__(self, pg: Any) -> None:
        super().__init__(pg)
        self._done = threading.Lock()

    @property
    def damaged(self) -> bool:
        return self._done.locked()

    def tamper(self, tensor: torch.Tensor, rank: int) -> torch.Tensor:
        if tensor.nbytes >= self.SMALLEST and self._done.acquire(blocking=False):
            tensor.view(torch.uint8)[tensor.nbytes // 2] ^= 1
        return tensor

    def damage(self, data: bytearray) -> None:
        if len(data) >= self.SMALLEST and self._done.acquire(blocking=False):
            data[len(data) // 2] ^= 1


# --------------------------------------------------------------------------------------------- beside the group

#: Where those that go by way of a file have it. The caller removes it when all of them are done.
FILES = pathlib.Path(tempfile.gettempdir(), f"transfuse-comparison-{os.getpid()}")

_ADDRESS_TAG, _FAREWELL_TAG = 101, 102


class _Beside:
    """What does not send its bytes over the group, but over something that both ends find through it."""

    def __init__(self, pg: Any, timeout: timedelta, device: torch.device, state_dict: Callback | None = None) -> None:
        self.pg, self.timeout, self.callback = pg, timeout, state_dict
        self._under_way: list[Any] = []
        #: The conformance suite's own group, which counts and has traps, and below it the one that does neither.
        self.group = getattr(pg, "_pg", pg)

    def tell(self, ranks: list[int], text: str) -> None:
        data = torch.zeros(4096, dtype=torch.uint8)
        data[: len(text)] = torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)
        # Not waited for: one who is absent must not keep the others from theirs.
        self._under_way = [self.group._gloo.send([data], rank, _ADDRESS_TAG) for rank in ranks]

    def hear(self, rank: int) -> str:
        data = torch.zeros(4096, dtype=torch.uint8)
        self.group._gloo.recv([data], rank, _ADDRESS_TAG).wait(self.timeout)
        return bytes(data.tolist()).rstrip(b"\0").decode()

    def passed(self, count: int, *, sent: bool) -> None:
        if sent:
            self.group.sent += count
        else:
            self.group.received += count
        if self.group.trap is not None:
            self.group.trap(self.group)


class _Tap:
    """A port that passes a connection on to another, and what comes back through `look`."""

    def __init__(self, port: int, look: Callable[[bytearray], None]) -> None:
        self._port, self._look = port, look
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # Wakes up who accepts.
        self._listener.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                near, _ = self._listener.accept()
                threading.Thread(target=self._serve, args=(near,), daemon=True).start()

    def _serve(self, near: socket.socket) -> None:
        # Whatever goes wrong, a connection that closes is all that either end may notice.
        with near, contextlib.suppress(Exception), socket.create_connection(("127.0.0.1", self._port)) as far:
            far.sendall(near.recv(1 << 16))
            while data := bytearray(far.recv(1 << 18)):
                self._look(data)
                near.sendall(data)


class Http(_Beside):
    """torchft's HTTPTransport. Its manager hands the address over and stops serving when the others have theirs."""

    def send_checkpoint(self, dst_ranks: list[int], state: Any, *, step: int = 0) -> None:
        server = HTTPTransport(self.timeout, num_chunks=0)

        def look(data: bytearray) -> None:
            if isinstance(self.pg, Damaging):
                self.pg.damage(data)
            self.passed(len(data), sent=True)

        tap = _Tap(server._server.socket.getsockname()[1], look)
        try:
            server.send_checkpoint(dst_ranks, step, state, self.timeout)
            self.tell(dst_ranks, str(tap.port))
            for rank in dst_ranks:
                with contextlib.suppress(RuntimeError):  # One that is lost must not keep the server open.
                    self.group._gloo.recv([torch.empty(1)], rank, _FAREWELL_TAG).wait(self.timeout)
            server.disallow_checkpoint()
        finally:
            server.shutdown()
            server._server.server_close()
            tap.close()

    def recv_checkpoint(self, src_rank: Any, *, step: int = 0) -> Any:
        if not isinstance(src_rank, int):
            return HTTPTransport(self.timeout, 0).recv_checkpoint(src_rank, src_rank, step, self.timeout)
        tap = _Tap(int(self.hear(src_rank)), lambda data: self.passed(len(data), sent=False))
        try:
            return _http_get(tap.port, step, self.timeout)
        finally:
            tap.close()
            self.group._gloo.send([torch.zeros(1)], src_rank, _FAREWELL_TAG)


def _http_get(port: int, step: int, timeout: timedelta) -> Any:
    """As ``recv_checkpoint`` of a transport without chunks, which would start a server of its own to no end."""
    return HTTPTransport._load_from_address(f"http://127.0.0.1:{port}/checkpoint/{step}/full", timeout)


class _File(_Beside):
    """Save, then load."""

    _numbers = itertools.count()

    def save(self, state: Any, path: pathlib.Path) -> None:
        raise NotImplementedError

    def load(self, path: pathlib.Path) -> Any:
        raise NotImplementedError

    def send_checkpoint(self, dst_ranks: list[int], state: Any) -> None:
        path = self.new()
        self.save(state, path)
        files = [file for file in path.rglob("*") if file.is_file()]
        largest = max(files, key=lambda file: file.stat().st_size)
        if isinstance(self.pg, Damaging):
            data = bytearray(largest.read_bytes())
            self.pg.damage(data)
            largest.write_bytes(data)
        try:
            self.passed(sum(file.stat().st_size for file in files), sent=True)
        except ConnectionError:  # This rank was made to stop midway: what can be read stops midway.
            os.truncate(largest, largest.stat().st_size // 2)
        self.tell(dst_ranks, str(path))
        for work in self._under_way:
            work.wait(self.timeout)

    def recv_checkpoint(self, src_rank: int) -> Any:
        return self.load(pathlib.Path(self.hear(src_rank)))

    def new(self) -> pathlib.Path:
        path = FILES / str(next(self._numbers))
        path.mkdir(parents=True)
        return path


#: Where a dict is asked for, and the state is something else.
_ROOT = "state"


def _rooted(state: Any) -> dict[Any, Any]:
    return state if isinstance(state, dict) else {_ROOT: state}


def _unrooted(state: dict[Any, Any]) -> Any:
    return state[_ROOT] if list(state) == [_ROOT] else state


@contextlib.contextmanager
def _an_exception() -> Iterator[None]:
    """DCP's own error is none."""
    try:
        yield
    except CheckpointException as error:
        raise RuntimeError(str(error)) from error


class Dcp(_File):
    @_an_exception()
    def save(self, state: Any, path: pathlib.Path) -> None:
        save(_rooted(state), checkpoint_id=path, no_dist=True)

    @_an_exception()
    def load(self, path: pathlib.Path) -> Any:
        if self.callback is not None:
            target = self.callback()
            load(target, checkpoint_id=path, no_dist=True)
            return target
        # What torch's own dcp_to_torch_save does to load all there is.
        fresh: dict[str, Any] = {}
        reader, planner = FileSystemReader(path), _EmptyStateDictLoadPlanner()  # type: ignore[no-untyped-call]
        _load_state_dict(fresh, storage_reader=reader, planner=planner, no_dist=True)
        return _unrooted(fresh)


class Safetensors(_File):
    def save(self, state: Any, path: pathlib.Path) -> None:
        safetensors.save_file(_rooted(state), path / "model.safetensors")

    def load(self, path: pathlib.Path) -> Any:
        return _unrooted(safetensors.load_file(path / "model.safetensors"))


class TorchftPG:
    """torchft's PGTransport, with the timeout of the constructor for each call: its own is not used."""

    def __init__(self, pg: Any, timeout: timedelta, device: torch.device, state_dict: Callback | None = None) -> None:
        self.transport, self.timeout = TorchftPGTransport(pg, timeout, device, state_dict), timeout

    def send_checkpoint(self, dst_ranks: list[int], state: Any, *, step: int = 0) -> None:
        self.transport.send_checkpoint(dst_ranks, step, state, self.timeout)

    def recv_checkpoint(self, src_rank: int, *, step: int = 0) -> Any:
        return self.transport.recv_checkpoint(src_rank, "<n/a>", step, self.timeout)


# -------------------------------------------------------------------------------------------------- contenders


@dataclass(frozen=True)
class Contender:
    """A column of the table."""

    title: str
    factory: Callable[..., Any]
    #: Source and receiver are there at the same time.
    meet: bool = True
    #: What arrives lands in the tensors that the callback gives.
    in_place: bool = True
    #: What has to be given for something that a row asks for.
    options: dict[str, dict[str, Any]] = field(default_factory=dict)
    #: The parameter that takes a callable to be told how far it is.
    progress: str | None = None
    #: The parameters that can be given, so that a new one is noticed.
    parameters: tuple[tuple[Callable[..., Any], str], ...] = ()
    #: A state to one who is in no group.
    outside: Callable[[Any], Any] | None = None
    #: A receive from a source that never sends, where :meth:`make` would wait for the address before.
    of_nothing: Callable[[timedelta], Any] | None = None
    #: Makes ranks of this process pass for ranks of several hosts.
    apart: Callable[[], contextlib.AbstractContextManager[None]] = contextlib.nullcontext

    def make(self, wish: str = "", **more: Any) -> Callable[..., Any]:
        options = self.options.get(wish, {}) | more
        return lambda *args: self.factory(*args, **options)

    def unknown(self) -> list[str]:
        """Calls whose parameters are others than known."""
        shown = [(call, " ".join(p for p in inspect.signature(call).parameters)) for call, _ in self.parameters]
        return [
            f"{call.__qualname__}: {now}"
            for (call, now), (_, then) in zip(shown, self.parameters, strict=True)
            if now != then
        ]


def _transfuse(*args: Any, **options: Any) -> transfuse.PGTransport:
    return transfuse.PGTransport(*args, **{"same_host": False} | options)


def _transfuse_outside(state: Any) -> Any:
    with transfuse.serve(state) as server:
        return transfuse.fetch(server.address, timeout=timedelta(seconds=20)).state


@contextlib.contextmanager
def _other_hosts() -> Iterator[None]:
    with (
        mock.patch.object(receive_from_one, "this_host", return_value=1),
        mock.patch.object(Patience, "MIN_CHAIN_SECONDS", 5.0),
        mock.patch.object(Patience, "MAX_CHAIN_SECONDS", 5.0),
    ):
        yield


def _http_outside(state: Any) -> Any:
    timeout = timedelta(seconds=20)
    server = HTTPTransport(timeout, num_chunks=0)
    try:
        server.send_checkpoint([], 0, state, timeout)
        return _http_get(server._server.socket.getsockname()[1], 0, timeout)
    finally:
        server.shutdown()
        server._server.server_close()


def _http_of_nothing(timeout: timedelta) -> Any:
    server = HTTPTransport(timeout, num_chunks=0)
    try:
        return _http_get(server._server.socket.getsockname()[1], 0, timeout)
    finally:
        server.shutdown()
        server._server.server_close()


def _from_file(kind: type[_File]) -> Callable[[Any], Any]:
    def move(state: Any) -> Any:
        file = kind(None, timedelta(seconds=20), CPU)
        path = file.new()
        file.save(state, path)
        return file.load(path)

    return move


CONTENDERS: dict[str, Contender] = {
    contender.title: contender
    for contender in (
        Contender(
            "transfuse",
            _transfuse,
            options={
                "atomic": {"atomic": True},
                "cast": {"cast": True},
                "delta": {"delta": True},
                "rate": {"max_bytes_per_second": 1 << 30},
                "same host": {"same_host": True},
            },
            progress="progress",
            outside=_transfuse_outside,
            apart=_other_hosts,
        ),
        Contender(
            "torch `PGTransport`",
            pytorch.PGTransport,
            parameters=(
                (pytorch.PGTransport, "pg timeout device state_dict"),
                (pytorch.PGTransport.send_checkpoint, "self dst_ranks state_dict"),
                (pytorch.PGTransport.recv_checkpoint, "self src_rank"),
            ),
        ),
        Contender(
            "torch DCP",
            Dcp,
            meet=False,
            parameters=(
                (save, "state_dict checkpoint_id storage_writer planner process_group no_dist use_collectives"),
                (load, "state_dict checkpoint_id storage_reader planner process_group no_dist"),
            ),
            outside=_from_file(Dcp),
        ),
        Contender(
            "safetensors",
            Safetensors,
            meet=False,
            in_place=False,
            parameters=(
                (safetensors.save_file, "tensors filename metadata"),
                (safetensors.load_file, "filename device backend"),
            ),
            outside=_from_file(Safetensors),
        ),
    )
}

if TORCHFT:
    CONTENDERS |= {
        contender.title: contender
        for contender in (
            Contender(
                "torchft `PGTransport`",
                TorchftPG,
                parameters=(
                    (TorchftPGTransport, "pg timeout device state_dict"),
                    (TorchftPGTransport.send_checkpoint, "self dst_ranks step state_dict timeout"),
                    (TorchftPGTransport.recv_checkpoint, "self src_rank metadata step timeout"),
                ),
            ),
            Contender(
                "torchft `HTTPTransport`",
                Http,
                in_place=False,
                parameters=(
                    (HTTPTransport, "timeout num_chunks"),
                    (HTTPTransport.send_checkpoint, "self dst_ranks step state_dict timeout"),
                    (HTTPTransport.recv_checkpoint, "self src_rank metadata step timeout"),
                ),
                outside=_http_outside,
                of_nothing=_http_of_nothing,
            ),
        )
    }
