"""``pccl``, a make-believe NCCL for tensors of ``phantom``: alone or beside gloo, for threads or processes.

It behaves as ProcessGroupNCCL does; :file:`source/group.cpp` says how. With ``TRANSFUSE_TEST_DEVICE=cuda`` the real
one takes its place.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, Literal, Self, TypeVar

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store

from device import build, kind, phantom
from transfuse.testing.ranks.outcome import Outcome
from transfuse.testing.ranks.threads import Ranks, ThreadedRanks, gloo_group

__all__ = [
    "DeviceRanks",
    "Waits",
    "add_backend",
    "backend_of",
    "device_group",
    "hybrid_group",
    "make",
    "make_nccl",
    "register",
]

#: What ``work.wait`` does beyond ordering the current stream after the operation. ``stream``: nothing, as UCC and HCCL.
#: ``host``: it blocks until the end or the timeout, as NCCL's blocking wait. ``nccl``: the latter if it is given a
#: timeout.
Waits = Literal["stream", "host", "nccl"]

_INIT_TIMEOUT = 600.0

T = TypeVar("T")


def make(
    store: Store,
    rank: int,
    size: int,
    timeout: float,
    *,
    waits: Waits = "nccl",
    bound: int | None = None,
    init_timeout: float = _INIT_TIMEOUT,
) -> Any:
    """The bare backend.

    Args:
        bound: the device that the group is bound to from the start. None: communicators are made by the first operation
            of each pair of ranks, which blocks until the peer's first operation, for ``init_timeout`` at most.
    """
    phantom.load()
    backend = build.load().Group(store, rank, size, timeout, init_timeout, waits)
    if bound is not None:
        backend.eager_connect_single_device(torch.device("phantom", bound))
    return backend


def make_nccl(store: Store, rank: int, size: int, timeout: float, *, bound: int | None = None, **_: Any) -> Any:
    """The same with real devices: the bare ``ProcessGroupNCCL``. It has no choice of how ``wait`` behaves."""
    nccl: Any = getattr(dist, "ProcessGroupNCCL")  # noqa: B009 - builds for the CPU lack it
    kind.set_device(rank)
    options = nccl.Options()
    options._timeout = timedelta(seconds=timeout)
    backend = nccl(store, rank, size, options)
    if bound is not None:
        backend.eager_connect_single_device(torch.device("cuda", bound))
    return backend


def add_backend(pg: dist.ProcessGroup, store: Store, timeout: float, **options: Any) -> Any:
    """Give a group the device's backend; return it."""
    types = dist.ProcessGroup.BackendType
    create, type_ = (make, types.CUSTOM) if kind.IMITATION else (make_nccl, types.NCCL)
    backend = create(PrefixStore("device", store), pg.rank(), pg.size(), timeout, **options)
    pg._register_backend(torch.device(kind.KIND), type_, backend)
    pg._set_default_backend(type_)
    if (bound := options.get("bound")) is not None:
        # As init_process_group(device_id=) does.
        pg.bound_device_id = torch.device(kind.KIND, bound)
    return backend


def device_group(store: Store, rank: int, size: int, timeout: float, **options: Any) -> dist.ProcessGroup:
    """A group for tensors of the device only, without torch's global state."""
    pg = dist.ProcessGroup(store, rank, size)
    add_backend(pg, store, timeout, **options)
    return pg


def hybrid_group(store: Store, rank: int, size: int, timeout: float, **options: Any) -> dist.ProcessGroup:
    """The same with gloo for tensors on the CPU."""
    pg = device_group(store, rank, size, timeout, **options)
    gloo = gloo_group(PrefixStore("gloo", store), rank, size, timeout)
    pg._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, gloo)
    return pg


def backend_of(pg: dist.ProcessGroup) -> Any:
    """The group's ``pccl``: ``process_would_end``, ``communicators``, ``set_waits``, ``freeze``, ``thaw``, ``abort``.

    A frozen rank still posts, but nothing that it posted begins to run. After ``set_abort_seconds(60)``, ``abort``
    blocks for 60 s before it aborts anything, or until that is set to less.
    """
    return pg._get_backend(torch.device(kind.KIND))


def register(waits: Waits = "nccl", init_timeout: float = _INIT_TIMEOUT) -> None:
    """Load the device and make ``init_process_group("cpu:gloo,phantom:pccl")`` possible in this process.

    With ``device_id=torch.device("phantom:0")`` the group is bound to that device from the start.
    """
    phantom.load()

    def create(store: Store, rank: int, size: int, timeout: timedelta) -> Any:
        return make(store, rank, size, timeout.total_seconds(), waits=waits, init_timeout=init_timeout)

    if "PCCL" not in dist.Backend._plugins:
        dist.Backend.register_backend("pccl", create, devices=["phantom"])


class DeviceRanks(Ranks):
    """Like ``Ranks``, with ``pccl`` and, unless ``cpu`` is False, gloo in each rank's group.

    Rank n has the device of index n, which is the current one in its thread. Ranks must not share a device: waiting
    for one rank's operation on a stream would block the other rank's work there. The counters are those of the process,
    all ranks together. On exit all operations are aborted, so that streams that are stuck in them end.
    """

    def __init__(
        self,
        n: int,
        timeout: float = 20.0,
        *,
        cpu: bool = True,
        waits: Waits = "nccl",
        eager: bool = False,
        init_timeout: float = _INIT_TIMEOUT,
    ) -> None:
        kind = hybrid_group if cpu else device_group

        def one(store: Store, rank: int, size: int, timeout: float) -> dist.ProcessGroup:
            bound = rank if eager else None
            return kind(store, rank, size, timeout, waits=waits, bound=bound, init_timeout=init_timeout)

        ThreadedRanks.__init__(self, n, timeout, one)

    def __enter__(self) -> Self:
        if kind.IMITATION:
            phantom.load()
        kind.require(self.n)
        return super().__enter__()

    def __exit__(self, *exception: object) -> None:
        for pg in self.pgs:
            if kind.IMITATION:
                backend_of(pg).set_abort_seconds(0)
            backend_of(pg).abort()
        super().__exit__(*exception)

    def _outcomes(
        self, fn: Callable[..., T], per_rank: tuple[Sequence[Any], ...], deadline: float
    ) -> dict[int, Outcome[T]]:
        def on_device(rank: int, pg: dist.ProcessGroup, *args: Any) -> T:
            kind.set_device(rank)
            return fn(rank, pg, *args)

        return super()._outcomes(on_device, per_rank, deadline)
