"""Shards of global tensors on meshes that need no process group, and transfers between ranks that are threads."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from transfuse import PGTransport, Report
from transfuse.testing.ranks import Outcome, Ranks

__all__ = ["Moved", "mesh_of", "move", "plain", "shard"]

CPU = torch.device("cpu")


def mesh_of(ranks: Sequence[Any], rank: int) -> DeviceMesh:
    """A mesh of these ranks, as nested lists, seen from one of them."""
    return DeviceMesh("cpu", torch.tensor(ranks), _init_backend=False, _rank=rank)


def shard(whole: torch.Tensor, ranks: Sequence[Any], rank: int, *placements: Placement) -> DTensor:
    """A rank's shard of a global tensor."""
    mesh = mesh_of(ranks, rank)
    coordinate = mesh.get_coordinate()
    local = whole
    for dim, placement in enumerate(placements):
        if isinstance(placement, (Shard, _StridedShard)) and coordinate is not None:
            local = placement._split_tensor(local, mesh.shape[dim], with_padding=False)[0][coordinate[dim]]
        else:
            assert isinstance(placement, (Replicate, Partial)) or coordinate is None
    local = local.clone(memory_format=torch.contiguous_format) if coordinate is not None else whole.new_empty(0)
    return DTensor.from_local(local, mesh, placements, run_check=False, shape=whole.shape, stride=whole.stride())


def plain(leaf: Any) -> torch.Tensor:
    """What a rank holds of a leaf."""
    result: torch.Tensor = leaf.to_local() if isinstance(leaf, DTensor) else leaf
    return result


@dataclass
class Moved:
    """What became of one receiver: its state, its target, and the report."""

    state: Any
    target: Any
    report: Report


def move(
    sources: Mapping[int, Any],
    targets: Mapping[int, Any],
    *,
    same_host: bool = False,
    seconds: float = 10.0,
    source_options: Mapping[str, Any] | None = None,
    wrap: Callable[[int, Any], Any] = lambda rank, pg: pg,
    **options: Any,
) -> dict[int, Outcome[Moved]]:
    """Send every source's state to every receiver, each a thread; a rank may be both. A target of None is fresh."""
    timeout = timedelta(seconds=seconds)

    def send(rank: int, pg: Any) -> None:
        transport = PGTransport(pg, timeout, CPU, same_host=same_host, **(source_options or {}))
        transport.send_checkpoint(sorted(targets), sources[rank])

    def receive(rank: int, pg: Any) -> Moved:
        target = targets[rank]
        callback = None if target is None else lambda: target
        transport = PGTransport(pg, timeout, CPU, callback, same_host=same_host, **options)
        state = transport.recv_checkpoint(sorted(sources))
        assert transport.report is not None
        return Moved(state, target, transport.report)

    def one(rank: int, pg: Any) -> Moved | None:
        pg = wrap(rank, pg)
        if rank not in targets:
            send(rank, pg) if rank in sources else None
            return None
        if rank not in sources:
            return receive(rank, pg)
        with ThreadPoolExecutor(1) as pool:
            sending = pool.submit(send, rank, pg)
            moved = receive(rank, pg)
            sending.result()
        return moved

    with Ranks(max((*sources, *targets)) + 1) as ranks:
        outcomes = ranks.outcomes(one)
    return {rank: outcome for rank, outcome in enumerate(outcomes) if rank in targets}  # type: ignore[misc]
