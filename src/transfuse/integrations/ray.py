"""Ray actors exchange tensors over transfuse: a tensor transport for Ray Direct Transport.

    from transfuse.integrations import ray as over_transfuse

    over_transfuse.register()

    @ray.remote
    class Trainer:
        @ray.method(tensor_transport="TRANSFUSE")
        def weights(self): ...

The process that makes an object keeps its tensors, and serves all its objects from one :func:`transfuse.serve`. What
Ray tells the receivers about an object has the server's address and its token. A receiver fetches the one object.
Ray calls such a transport one-sided: the sender's own tasks and threads take no part in a transfer.
"""

from __future__ import annotations

import re
import secrets
import threading
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar

import torch

import transfuse
from transfuse._arguments import Given

try:
    import ray
    from ray.exceptions import RayDirectTransportError
    from ray.experimental.rdt import (
        CommunicatorMetadata,
        TensorTransportManager,
        TensorTransportMetadata,
        register_tensor_transport,
    )
    from ray.experimental.rdt.tensor_transport_manager import FetchRequest
    from ray.experimental.rdt.util import transport_manager_info
except ImportError as error:
    raise ImportError(
        "transfuse.integrations.ray needs ray 2.60 or newer, with Ray Direct Transport: pip install 'transfuse[ray]'"
    ) from error

__all__ = ["Settings", "TransfuseTransport", "register", "reports"]

#: How many objects a process fetches at once. Others wait: each fetch takes 7 file descriptors.
MOST_FETCHES = 8
#: Ray registers these when it first looks for a transport.
RAYS_OWN = ("CUDA_IPC", "GLOO", "NCCL", "NIXL", "OBJECT_STORE")
#: How many reports a process keeps: those of its last transfers.
MOST_REPORTS = 256

_reports: deque[transfuse.Report] = deque(maxlen=MOST_REPORTS)


def _name_of(what: str, name: object) -> str:
    if not isinstance(name, str) or not name:
        raise TypeError(f"{what} takes a text, got {name!r}")
    name = name.upper()  # As Ray does.
    if name in RAYS_OWN:
        raise ValueError(f"{name} is a transport of Ray's own: choose another name")
    return name


def _host_of(what: str, host: object) -> str | None:
    if not isinstance(host, str | None):
        raise TypeError(f"{what} takes an address as a text, got {host!r}")
    return host


def _devices_of(what: str, devices: Sequence[str]) -> tuple[str, ...]:
    if isinstance(devices, str) or not devices:
        raise TypeError(f'{what} takes types of device as ["cpu"], got {devices!r}')
    for device in devices:
        try:
            known = torch.device(device).type
        except (RuntimeError, TypeError):
            known = None
        if known != device:
            raise ValueError(f'{what} takes types of device as ["cpu"], got {device!r} among {list(devices)}')
    return tuple(devices)


@dataclass(frozen=True, kw_only=True)
class Settings(Given):
    """What :func:`register` was given. All processes that use the transport have the same settings."""

    name: Annotated[str, _name_of]
    devices: Annotated[tuple[str, ...], _devices_of]
    host: Annotated[str | None, _host_of]
    timeout: float
    max_readers: int
    same_host: bool
    verify: bool | None
    max_bytes_per_second: float | None

    def of_server(self) -> dict[str, Any]:
        """The options of the server of each sender."""
        return {name: value for name, value in vars(self).items() if name not in ("name", "devices", "host")}


def register(
    name: str = "TRANSFUSE",
    *,
    devices: Sequence[str] = ("cpu",),
    host: str | None = None,
    timeout: float = 60,
    max_readers: int = 4,
    same_host: bool = True,
    verify: bool | None = None,
    max_bytes_per_second: float | None = None,
) -> None:
    """Tell Ray about the transport. Call it before ``@ray.method`` names the transport, at the top of the module.

    Ray tells the actors that this process creates, each of them once. So an actor that Ray may restart
    (``max_restarts=``) calls it again in its ``__init__``. Another call with the same arguments changes nothing.

    Args:
        name: what ``@ray.method(tensor_transport=…)`` and ``ray.put(…, _tensor_transport=…)`` call it.
        devices: the types of device whose tensors it takes. It has run with ``"cpu"`` only.
        host: the address that every sender listens on. None: the address by which Ray knows the sender's node.
        timeout: how many seconds a transfer may go without progress.
        max_readers: how many receivers read from one sender at once. Others wait for their turn.
        same_host: receivers on the sender's host may read the sender's memory.
        verify: compare digests of the bytes that have landed. None: not on the memory route.
        max_bytes_per_second: the most that receivers take from one sender, one after the other.
    """
    settings = Settings(**locals())
    known = transport_manager_info.get(settings.name)
    if known is not None:
        if getattr(known.transport_manager_class, "settings", None) == settings:
            return
        raise ValueError(f"a transport {settings.name} is registered already with other settings: choose another name")
    # Refuse wrong values here, and not in an actor that makes its first object. What host is good there, only it knows.
    transfuse.serve({}, **settings.of_server()).close()
    # Ray makes the instances itself, without arguments. It sends this class to the actors by value.
    configured = type(TransfuseTransport.__name__, (TransfuseTransport,), {"settings": settings})
    register_tensor_transport(settings.name, list(settings.devices), configured, torch.Tensor)


def reports() -> list[transfuse.Report]:
    """Reports of this process's last transfers as a sender and as a receiver, oldest first.

    Those that failed are there too, if the two ends had met.
    """
    return list(_reports)


@dataclass
class Served(TensorTransportMetadata):  # type: ignore[misc]
    """What Ray carries from the sender to the receivers of an object: where its tensors are served."""

    address: str = ""
    token: str = field(default="", repr=False)
    #: The sender's name in errors.
    sender: str = ""


class TransfuseTransport(TensorTransportManager):  # type: ignore[misc]
    """This process's end of the transport. Ray makes one instance in a process, and calls it from several threads."""

    settings: ClassVar[Settings]

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._server: transfuse.Server | None = None
        self._token = ""
        self._job = ""
        #: By Ray's id of the object: the tensors that this process made and serves.
        self._objects: dict[str, dict[str, torch.Tensor]] = {}
        self._pool = ThreadPoolExecutor(MOST_FETCHES, thread_name_prefix="transfuse-ray")
        #: The fetches that have not ended, for Ray to abort.
        self._fetches: set[_ObjectFetch] = set()

    def tensor_transport_backend(self) -> str:
        return self.settings.name

    @staticmethod
    def is_one_sided() -> bool:
        return True

    @staticmethod
    def can_abort_transport() -> bool:
        """An aborted fetch ends, and the sender's server goes on: Ray need not kill the actors."""
        return True

    def actor_has_tensor_transport(self, actor: Any) -> bool:
        return True  # There is no group to join. What an actor lacks to fetch, the fetch will say.

    def get_communicator_metadata(self, src_actor: Any, dst_actor: Any, backend: str | None = None) -> Any:
        return CommunicatorMetadata()

    # ------------------------------------------------------------------------------------------------ the sender

    def extract_tensor_transport_metadata(self, obj_id: str, rdt_object: list[torch.Tensor]) -> Served:
        """Begin to serve the tensors of a new object. A task that Ray runs again replaces its object."""
        shapes = [(tensor.shape, tensor.dtype) for tensor in rdt_object]
        if not rdt_object:
            return Served(tensor_meta=shapes)
        device = self._device_of(rdt_object)
        with self._lock:
            server = self._serve()
            self._objects[obj_id] = _named(rdt_object)
        return Served(shapes, device, address=server.address, token=self._token, sender=_this_process())

    def _device_of(self, tensors: list[torch.Tensor]) -> str:
        devices = {tensor.device for tensor in tensors}
        kinds = sorted({device.type for device in devices})
        if len(kinds) > 1:
            raise ValueError(f"the tensors of one object are on devices of one type, got {kinds}: return two objects")
        if kinds[0] not in self.settings.devices:
            raise ValueError(
                f"the transport {self.settings.name} was registered for tensors on {list(self.settings.devices)}, "
                f"got one on {kinds[0]}"
            )
        if kinds[0] != "cpu":
            # The server's threads must not read before the work is done that the actor's thread has queued.
            for device in devices:
                torch.accelerator.synchronize(device)
        return kinds[0]

    def _serve(self) -> transfuse.Server:
        """This process's server. Objects and address of an earlier ``ray.init()`` mean nothing any more."""
        job = ray.get_runtime_context().get_job_id()
        if self._server is None or job != self._job:
            if self._server is not None:
                self._server.close(cancel=True)
            self._objects = {}
            self._token = secrets.token_hex(32)
            self._job = job
            host = self.settings.host or ray.util.get_node_ip_address()
            try:
                self._server = transfuse.serve(
                    self._objects,
                    host=host,
                    token=self._token,
                    on_report=_reports.append,
                    **self.settings.of_server(),
                )
            except OSError as error:
                raise OSError(
                    f"{_this_process()} cannot listen on {host} for the transport {self.settings.name}: {error}; "
                    "register(host=) takes an address of the sender's own node, and None the address that Ray knows"
                ) from error
        return self._server

    def garbage_collect(self, obj_id: str, tensor_transport_meta: Any, tensors: list[torch.Tensor]) -> None:
        """Forget an object that no ref names any more. A fetch that reads it now finishes."""
        with self._lock:
            self._objects.pop(obj_id, None)

    def send_multiple_tensors(self, tensors: Any, tensor_transport_metadata: Any, communicator_metadata: Any) -> None:
        raise NotImplementedError("receivers fetch: Ray does not ask a one-sided transport to send")

    # ---------------------------------------------------------------------------------------------- the receiver

    def recv_multiple_tensors(
        self,
        obj_id: str,
        tensor_transport_metadata: Any,
        communicator_metadata: Any,
        target_buffers: list[torch.Tensor] | None = None,
    ) -> list[torch.Tensor]:
        request = self.fetch_multiple_tensors(obj_id, tensor_transport_metadata, communicator_metadata, target_buffers)
        return self.wait_fetch_complete(request)

    def fetch_multiple_tensors(
        self,
        obj_id: str,
        tensor_transport_metadata: Any,
        communicator_metadata: Any,
        target_buffers: list[torch.Tensor] | None = None,
    ) -> Any:
        """Begin to fetch an object, in a thread of the pool."""
        if not tensor_transport_metadata.tensor_meta:
            return FetchRequest(obj_id, [])
        targets = self._targets(tensor_transport_metadata, target_buffers)
        fetch = _ObjectFetch(self.settings, obj_id, tensor_transport_metadata, targets)
        with self._lock:
            self._fetches.add(fetch)
        self._pool.submit(self._run, fetch)
        return Request(obj_id, [], fetch)

    def wait_fetch_complete(self, fetch_request: Any, timeout: float = -1) -> list[torch.Tensor]:
        if not isinstance(fetch_request, Request):
            return list(fetch_request.tensors)
        try:
            return fetch_request.fetch.wait(None if timeout < 0 else timeout)
        except TimeoutError as error:
            # Ray's error keeps the request until the caller drops the error, and the caller may use the targets now.
            fetch_request.fetch.cancel_landing(f"it took longer than {timeout:g} s")
            raise TimeoutError(f"object {fetch_request.obj_id} has not arrived in {timeout:g} s") from error

    def abort_transport(self, obj_id: str, communicator_metadata: Any) -> None:
        """End the fetches of an object here. The sender's server notices that its reader has gone."""
        with self._lock:
            fetches = [fetch for fetch in self._fetches if fetch.obj_id == obj_id]
        for fetch in fetches:
            fetch.cancel("Ray has aborted the transfer: it took too long, or an actor of it has died")

    def _targets(self, served: Served, buffers: list[torch.Tensor] | None) -> list[torch.Tensor] | None:
        if buffers is not None or served.tensor_device == "cpu":
            return buffers
        return [torch.empty(shape, dtype=dtype, device=served.tensor_device) for shape, dtype in served.tensor_meta]

    def _run(self, fetch: _ObjectFetch) -> None:
        try:
            fetch.run()
        finally:
            with self._lock:
                self._fetches.discard(fetch)


class _ObjectFetch:
    """One fetch of one object. It can be cancelled at any time, from any thread."""

    def __init__(self, settings: Settings, obj_id: str, served: Served, targets: list[torch.Tensor] | None) -> None:
        self.obj_id = obj_id
        self._settings = settings
        self._served = served
        self._targets = targets
        self._outcome: Future[list[torch.Tensor]] = Future()
        # The garbage collector may cancel this fetch in any thread at any moment, also in the one that runs it.
        self._lock = threading.RLock()
        self._thread: int | None = None
        self._cause: str | None = None
        #: Whether bytes may land in the targets from now on, and whether none will any more.
        self._landing = False
        self._ended = threading.Event()

    def run(self) -> None:
        self._thread = threading.get_ident()
        try:
            tensors = self._fetch()
        except BaseException as error:
            self._end(None, error)
        else:
            self._end(tensors, None)
        finally:
            self._ended.set()
            self._targets = None

    def _fetch(self) -> list[torch.Tensor]:
        settings = self._settings
        self._show({})
        try:
            fetched = transfuse.fetch(
                self._served.address,
                None if self._targets is None else _named(self._targets),
                entry=self.obj_id,
                token=self._served.token,
                timeout=settings.timeout,
                same_host=settings.same_host,
                verify=settings.verify,
                progress=self._show,
                strict=self._targets is not None,
            )
        except transfuse.TransfuseError as error:
            if error.report is not None:
                _reports.append(error.report)
            raise
        _reports.append(fetched.report)
        return list(fetched.state.values())

    def _show(self, progress: dict[int, transfuse.Progress]) -> None:
        """Called before the conversation begins and all the time in it: an error ends it at both ends."""
        with self._lock:
            if self._cause is not None:
                raise InterruptedError(self._cause)
            self._landing = bool(progress)

    def _end(self, tensors: list[torch.Tensor] | None, error: BaseException | None) -> None:
        with self._lock:
            if self._outcome.done():
                return  # Cancelled: the caller that waited has an error already.
            if tensors is not None:
                self._outcome.set_result(tensors)
            elif error is not None:
                # Not the error itself: Ray takes a PeerTimeout for a timeout of ray.get, and drops its text. And an
                # error that Ray keeps would keep what has arrived.
                told = RayDirectTransportError(
                    f"object {self.obj_id} of {self._served.sender} at {self._served.address} has not arrived: "
                    f"{type(error).__name__}: {self._cause_of(error)}\nThis process lives on. {self._remedy(error)}"
                )
                self._outcome.set_exception(told)

    def _cause_of(self, error: BaseException) -> str:
        """An error's text in Ray's words. A fetch calls its only server rank 0, and asks whether that rank sends."""
        if isinstance(error, transfuse.PeerTimeout):
            return f"the sender made no progress for {error.seconds:.1f} s while {error.phase}"
        return re.sub(r"\brank 0\b", "the sender", str(error))

    def _remedy(self, error: BaseException) -> str:
        if isinstance(error, transfuse.PeerTimeout):
            return (
                f"The transport {self._settings.name} allows {self._settings.timeout:g} s without progress: if the "
                "sender is only slow, register it with a longer timeout="
            )
        return "If the sender has died, or has freed the object, have the object made again."

    def wait(self, seconds: float | None) -> list[torch.Tensor]:
        """Wait ``seconds`` for the tensors. A TimeoutError means that the fetch goes on."""
        return self._outcome.result(seconds)

    def cancel_landing(self, cause: str) -> None:
        """End the fetch if it has targets. Without targets it may go on: it writes to nobody's memory."""
        if self._targets is not None:
            self.cancel(cause)

    def cancel(self, cause: str) -> None:
        """End the fetch. Its targets are not written to after this has returned."""
        with self._lock:
            self._cause = cause
            landing = self._landing
        self._end(None, InterruptedError(cause))
        if landing and self._targets is not None and self._thread != threading.get_ident():
            self._ended.wait()


@dataclass
class Request(FetchRequest):  # type: ignore[misc]
    """Ray's handle of a fetch. Once nobody holds it, nobody wants the tensors any more."""

    fetch: _ObjectFetch

    def __del__(self) -> None:
        self.fetch.cancel("nobody waits for it any more")


def _named(tensors: Sequence[torch.Tensor]) -> dict[str, torch.Tensor]:
    """The tensors of an object as they are served and fetched: the names are for errors."""
    return {f"tensor {number}": tensor for number, tensor in enumerate(tensors)}


def _this_process() -> str:
    """This process's name in errors: the actor's, if it is one."""
    context = ray.get_runtime_context()
    if context.get_actor_id() is None:
        return f"the driver on node {context.get_node_id()}"
    name = context.get_actor_name()
    return repr(context.current_actor) + (f" named {name!r}" if name else "")
