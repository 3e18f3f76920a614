"""The ground that the conformance cases run on: the protocol of a transport, and groups with hooks for a case."""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import ProcessGroupGloo, Store

from transfuse.testing.ranks.outcome import Outcome
from transfuse.testing.ranks.threads import ThreadedRanks, gloo_group, in_threads
from transfuse.testing.ranks.worker import HOST

CPU = torch.device("cpu")

# No transport uses this tag, so nothing ever arrives on it.
_SILENT_TAG = 2**31 - 2


class Transport(Protocol):
    """The transport under test: any object with these two calls."""

    def send_checkpoint(self, dst_ranks: list[int], state: Any, /) -> None: ...

    def recv_checkpoint(self, src_rank: int, /) -> Any: ...


class Factory(Protocol):
    """Makes a transport for one rank: a function, or the class itself if its constructor takes these arguments.

    ``pg`` is a real :class:`torch.distributed.ProcessGroup` on gloo, made for the case. If ``state_dict`` is given, the
    transport calls it at the start of a receive, and the bytes land in the tensors of the tree that it returns. The
    cases ``death/…`` start processes and pickle the factory for them: it has to be a class or function of a module.
    """

    def __call__(
        self, pg: Any, timeout: timedelta, device: torch.device, state_dict: Callable[[], Any] | None = None, /
    ) -> Transport: ...


class CountingGroup(dist.ProcessGroup):
    """A gloo group that counts the bytes posted, and calls a hook of the case before each operation."""

    def __init__(self, store: Store, rank: int, size: int, timeout: float) -> None:
        # This is the constructor for subclasses, which the type stubs lack.
        super().__init__(rank, size)  # type: ignore[call-arg]
        self._gloo = gloo_group(store, rank, size, timeout, _loopback())
        kind = dist.ProcessGroup.BackendType.GLOO
        self._set_default_backend(kind)
        self._register_backend(CPU, kind, self._gloo)
        self.sent = 0
        self.received = 0
        self.closed = threading.Event()
        #: Called before a send or receive is posted. The count includes that operation already.
        self.trap: Callable[[CountingGroup], None] | None = None

    def send(self, tensors: list[torch.Tensor], dstRank: int, tag: int = 0) -> dist.Work:  # noqa: N803 - torch's name
        self.sent += sum(tensor.nbytes for tensor in tensors)
        if self.trap is not None:
            self.trap(self)
        work: dist.Work = self._gloo.send(tensors, dstRank, tag)
        return work

    def recv(self, tensors: list[torch.Tensor], srcRank: int, tag: int = 0) -> dist.Work:  # noqa: N803
        self.received += sum(tensor.nbytes for tensor in tensors)
        if self.trap is not None:
            self.trap(self)
        work: dist.Work = self._gloo.recv(tensors, srcRank, tag)
        return work

    def hang_up(self) -> None:
        """Close all connections, so that waits on them end: gloo closes them when a wait expires."""
        self.closed.set()
        for peer in range(self.size()):
            if peer != self.rank():
                with contextlib.suppress(Exception):
                    # For less than 1 ms gloo uses its own default.
                    self._gloo.recv([torch.empty(1)], peer, _SILENT_TAG).wait(timedelta(milliseconds=2))


@functools.cache
def _loopback() -> Any:
    # One device for all groups, because each device is a thread.
    return ProcessGroupGloo.create_device(hostname=HOST)


Job = Callable[[CountingGroup], Any]


class GroupRanks(ThreadedRanks[CountingGroup]):
    """``size`` such groups, one for each thread: ``with GroupRanks(2, 5.0) as ranks: ranks.run({0: …, 1: …}, 5.0)``."""

    def __init__(self, size: int, patience: float) -> None:
        super().__init__(size, patience, CountingGroup)

    @property
    def groups(self) -> list[CountingGroup]:
        return self.pgs

    def run(
        self, jobs: Mapping[int, Job], limit: float, *, only: int | None = None, all_well: bool = False
    ) -> dict[int, Outcome[Any]]:
        """Run each job with its rank's group. Jobs that have not ended by the limit are :class:`Late`.

        With ``only``, all jobs end when that rank's job ends. With ``all_well`` they end at the first error, because
        others may wait for that rank in vain; the limit then counts time without progress: a slow machine is no fault.
        """
        bound = {rank: functools.partial(job, self.groups[rank]) for rank, job in jobs.items()}
        stop = (lambda rank, end: end.error is not None) if all_well else (lambda rank, end: rank == only)
        moved = self._moved if all_well else lambda: 0
        return in_threads(bound, limit, hang_up=self._hang_up, stop=stop, moved=moved)

    def _moved(self) -> int:
        return sum(group.sent + group.received for group in self.groups)

    def _hang_up(self) -> None:
        for group in self.groups:
            group.hang_up()
