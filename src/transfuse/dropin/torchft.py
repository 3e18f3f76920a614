"""torchft's ``CheckpointTransport`` on this library's wire, for ``torchft.Manager(checkpoint_transport=...)``.

Only the import changes: the constructor and the calls are those of ``torchft.checkpointing.pg_transport.PGTransport``.
Both ends of a job have to change it, because the wire is another. The Manager passes the source's metadata on to the
receiver. If the source uses another transport, the receiver sees that there and says so at once.

Every failure raises at both ends. The Manager catches the error, reports it and discards the step; the replica is still
behind then, and heals in the next quorum.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from functools import partial
from typing import Any, Generic, SupportsIndex, TypeVar, Unpack, cast

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from transfuse import _transport
from transfuse._arguments import whole
from transfuse._errors import ProtocolError, TransfuseError
from transfuse._options import OptionKeywords, check_names
from transfuse._report import Report
from transfuse._session.remembered import Remembered
from transfuse._state.leaves.codec import MeshDescription
from transfuse._wire.group import ProcessGroupLike, WorkLike

try:
    from torchft.checkpointing.transport import CheckpointTransport
    from torchft.process_group import ProcessGroup, ProcessGroupBaby, ProcessGroupGloo, ProcessGroupWrapper
except ImportError as error:
    raise ImportError(
        f"transfuse.dropin.torchft needs torchft, which cannot be imported here ({error}): "
        "pip install 'transfuse[torchft]'"
    ) from error

__all__ = ["PGTransport"]

T = TypeVar("T")

#: The metadata of a source on this wire. Versions are compared in the conversation, where both ends learn of it.
METADATA = "transfuse"


class PGTransport(CheckpointTransport[T], Generic[T]):  # type: ignore[misc]
    """Heals torchft replicas over the process group that the Manager configures for each quorum.

    Args:
        pg: one of torchft's groups, the one that the Manager gets too. Ranks are replica ranks, as in the quorum.
        timeout: how long a transfer may go without progress, for calls without a timeout. The Manager's have one.
        device: where the backend wants its tensors (``cpu`` for gloo, an accelerator for NCCL).
        state_dict: called at the start of a receive; the bytes then land in the tensors of the tree it returns. It has
            to be the Manager's tree, with the user's state below ``["user"]["default"]``. Use it together with
            ``Manager(use_async_quorum=False)``: otherwise the forward pass runs while its weights change.
        **options: those of :class:`transfuse.PGTransport`. ``mesh=None`` means a mesh like the source's, since replicas
            are laid out alike.
    """

    def __init__(
        self,
        pg: ProcessGroupLike,
        timeout: timedelta | float,
        device: torch.device | str,
        state_dict: Callable[[], object] | None = None,
        **options: Unpack[OptionKeywords],
    ) -> None:
        check_names(PGTransport, options, OptionKeywords)
        if options.get("mesh") is None:
            options["mesh"] = _same_mesh
        self._pg = _unwrapped(pg)
        self._timeout = timeout
        # A new transport for each call: the group and the timeout may differ every time.
        self._make = partial(_transport.PGTransport, device=device, state_dict=state_dict, **options)
        # Refuse wrong options here, not when a replica needs healing.
        self._make(self._pg, timeout)
        self._last: _transport.PGTransport | None = None
        self._remembered = Remembered()
        #: Targets that a failed receive has half-written. Until a receive succeeds, this replica cannot be a source.
        self._torn: tuple[str, ...] = ()
        self._changed = threading.Condition()
        self._under_way = 0
        self._closed = False

    @property
    def report(self) -> Report | None:
        """The report of the last transfer, also if it failed. None before the first."""
        return None if self._last is None else self._last.report

    def metadata(self) -> str:
        """The metadata that the Manager passes to receivers: which wire this source speaks."""
        return METADATA

    def send_checkpoint(
        self,
        dst_ranks: SupportsIndex | Sequence[SupportsIndex],
        step: SupportsIndex,
        state_dict: T,
        timeout: timedelta | float | None = None,
    ) -> None:
        """Send a state to the replicas ``dst_ranks``. When this returns, each has everything, and tensors may change.

        If some replicas fail, raises :class:`SendFailed` once all are done.
        """
        with self._transfer(timeout) as through:
            through.send_checkpoint(dst_ranks, state_dict, step=step)

    def disallow_checkpoint(self) -> None:
        """Does nothing: a send is over when :meth:`send_checkpoint` returns."""

    def recv_checkpoint(
        self, src_rank: SupportsIndex, metadata: str, step: SupportsIndex, timeout: timedelta | float | None = None
    ) -> T:
        """Receive the state that replica ``src_rank`` sends for this step, in place if there is a ``state_dict``."""
        if metadata != METADATA:
            rank = whole("src_rank", src_rank)
            raise ProtocolError(
                rank,
                f"rank {rank} announced {metadata!r} where {METADATA!r} was due: it has another checkpoint "
                "transport; all replicas need transfuse.dropin.torchft.PGTransport",
            )
        with self._transfer(timeout) as through:
            try:
                return cast(T, through.recv_checkpoint(src_rank, step=step))
            finally:
                self._torn = through.torn

    def shutdown(self, wait: bool = True) -> None:
        """Begin no more transfers. With ``wait``, return when the active transfers have ended or failed."""
        with self._changed:
            self._closed = True
            if wait:
                self._changed.wait_for(lambda: self._under_way == 0)

    @contextmanager
    def _transfer(self, timeout: timedelta | float | None) -> Iterator[_transport.PGTransport]:
        with self._changed:
            if self._closed:
                raise TransfuseError("this checkpoint transport was shut down: make a new one")
            self._under_way += 1
        try:
            self._last = through = self._make(_configured(self._pg), self._timeout if timeout is None else timeout)
            through.torn, through.remembered = self._torn, self._remembered
            with through:  # No later transfer uses its lanes.
                yield through
        finally:
            with self._changed:
                self._under_way -= 1
                if self._under_way == 0 and isinstance(self._pg, _InChild):
                    self._pg.let_go()
                self._changed.notify_all()


class _HeldWork:
    """A work of a group whose backend runs in a child process."""

    def __init__(self, work: WorkLike) -> None:
        self.work: WorkLike | None = work

    def wait(self, timeout: timedelta) -> Any:
        assert self.work is not None, "waited for after its transfer was over"
        try:
            return self.work.wait(timeout)
        except Exception as error:
            # Raise without the frames below, which hold the work.
            raise error.with_traceback(None) from error.__cause__


class _InChild:
    """One of torchft's groups whose backend runs in a child process.

    When a work of such a group is garbage-collected, the group sends the work's number to its child process. If the
    group has been reconfigured by then, the new child does not know the number and crashes. An error's traceback keeps
    works for as long as the error lives. So all works are released when a transfer ends, whatever still refers to them.
    """

    def __init__(self, pg: Any) -> None:
        self._pg = pg
        self._held: weakref.WeakSet[_HeldWork] = weakref.WeakSet()

    def send(self, tensors: list[torch.Tensor], rank: int, tag: int) -> WorkLike:
        return self._hold(self._pg.send(tensors, rank, tag))

    def recv(self, tensors: list[torch.Tensor], rank: int, tag: int) -> WorkLike:
        return self._hold(self._pg.recv(tensors, rank, tag))

    def getBackendName(self) -> str:  # noqa: N802 - torch's name
        return str(self._pg.getBackendName())

    def size(self) -> int:
        return int(self._pg.size())

    def let_go(self) -> None:
        for held in list(self._held):
            held.work = None

    def _hold(self, work: WorkLike) -> WorkLike:
        held = _HeldWork(work)
        self._held.add(held)
        return held


def _unwrapped(pg: Any) -> ProcessGroupLike:
    """The group inside torchft's wrappers.

    A managed group counts participants, not ranks, and waits for the quorum to do so. In the quorum's own thread that
    wait would never end.
    """
    while isinstance(pg, ProcessGroupWrapper) and isinstance(inner := _inside(pg), ProcessGroup):
        pg = inner
    return _InChild(pg) if isinstance(pg, ProcessGroupBaby) else cast(ProcessGroupLike, pg)


def _configured(pg: ProcessGroupLike) -> ProcessGroupLike:
    """The group as it is in this quorum.

    A group that is reconfigured stays the same object with another group inside. What a lost peer has left behind on
    the old inner group must not reach the new one. Groups for accelerators end waits in their own way: they stay
    wrapped.
    """
    inner = _inside(pg) if isinstance(pg, ProcessGroupWrapper) else pg
    if inner is None or (isinstance(pg, _InChild) and pg.size() < 0):
        raise TransfuseError("the process group is not configured: the Manager does that, or call pg.configure()")
    return cast(ProcessGroupLike, inner) if isinstance(pg, ProcessGroupGloo) else pg


def _inside(pg: Any) -> object | None:
    """The group that a wrapper wraps at the moment."""
    with suppress(AssertionError):
        return cast(object, pg.parent)
    return None


def _same_mesh(description: MeshDescription) -> DeviceMesh:
    """The source's mesh. In this replica group it means this group's ranks. Makes no process groups."""
    ranks = torch.tensor(description.ranks).reshape(description.shape)
    rank = dist.get_rank() if dist.is_initialized() else 0
    names = description.dim_names
    return DeviceMesh(description.device_type, ranks, mesh_dim_names=names, _init_backend=False, _rank=rank)
