"""States of DTensors, ShardedTensors, DDP and FSDP2, moved in a pool's workers."""

from __future__ import annotations

from datetime import timedelta
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._functional_collectives import all_reduce
from torch.distributed._shard.metadata import ShardMetadata
from torch.distributed._shard.sharded_tensor import init_from_local_shards
from torch.distributed._shard.sharded_tensor.shard import Shard as LocalShard
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

import transfuse
from transfuse.testing.exact import differences
from transfuse.testing.ranks import ProcessPool

CPU = torch.device("cpu")


def transport(target: object | None = None, pg: Any = None, **options: Any) -> transfuse.PGTransport:
    give = None if target is None else (lambda: target)
    return transfuse.PGTransport(cast(Any, pg or dist.group.WORLD), timedelta(seconds=15), CPU, give, **options)


def exchange(rank: int, source: int, receiver: int, state: object, target: object | None = None, **options: Any) -> Any:
    """Move a state between two of the pool's ranks; (kind, text or value) of the outcome for everybody."""
    try:
        if rank == source:
            transport().send_checkpoint([receiver], state)
            return None
        return transport(target, **options).recv_checkpoint(source) if rank == receiver else None
    except transfuse.TransfuseError as error:
        return error


def values(pool: ProcessPool, fn: Any, *args: Any) -> list[Any]:
    return [outcome.get() for outcome in pool.run(fn, *args)]


# ------------------------------------------------------------------------------------------------ DTensor, in place


def same_shard_in_place(rank: int, atomic: bool = False) -> Any:
    """HSDP: replica 0 (ranks 0, 1) heals replica 1 (ranks 2, 3)."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    full = torch.arange(35.0).view(7, 5)
    mine = distribute_tensor(full if rank < 2 else torch.zeros(7, 5), mesh["shard"], [Shard(0)])
    parameter = nn.Parameter(mine.clone())
    state = {"w": mine, "p": parameter, "s": {"step": torch.tensor(3.0)}}
    if rank < 2:
        transport().send_checkpoint([rank + 2], state)
        arrived: Any = state
    else:
        squares: Any = (parameter * parameter).sum()
        arrived = transport(state, atomic=atomic).recv_checkpoint(rank - 2)
        assert arrived["w"] is mine
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            squares.backward()
    return all(torch.equal(arrived[k].full_tensor(), full) for k in ("w", "p"))


def wrong_shard(rank: int, case: str) -> Any:
    mesh = init_device_mesh("cpu", (4,))
    full = torch.arange(32.0).view(8, 4)
    zeros = torch.zeros(8, 4)
    source = {"fine": torch.ones(2), "w": distribute_tensor(full, mesh, [Shard(0)])}
    makers: dict[str, Any] = {
        "coordinate": lambda: distribute_tensor(zeros, mesh, [Shard(0)]),
        "placement": lambda: distribute_tensor(zeros, mesh, [Shard(1)]),
        "replicate": lambda: distribute_tensor(zeros, mesh, [Replicate()]),
        "global shape": lambda: distribute_tensor(torch.zeros(12, 4), mesh, [Shard(0)]),
        "plain": lambda: torch.zeros(2, 4),
        "partial": lambda: DTensor.from_local(torch.zeros(2, 4), mesh, [Partial()], run_check=False),
    }
    spoiled: Any = makers[case]()
    fine = torch.zeros(2)
    outcome = exchange(rank, 0, 1, source, {"fine": fine, "w": spoiled})
    local = spoiled.to_local() if isinstance(spoiled, DTensor) else spoiled
    torn = outcome.torn if isinstance(outcome, transfuse.TransfuseError) else ()
    return type(outcome).__name__, str(outcome), bool(fine.any() or local.any() or torn)


def other_shards(rank: int) -> Any:
    """Rank 0 holds everything, whatever shard rank 1 has; all ranks together do, whatever shard each has."""
    mesh = init_device_mesh("cpu", (4,))
    full = torch.arange(35.0).view(7, 5)
    found: list[object] = []
    for placement in (Shard(0), Shard(1), Replicate()):
        target = {"w": distribute_tensor(torch.zeros(7, 5), mesh, [placement])}
        expected = distribute_tensor(full, mesh, [placement]).to_local()
        for state in ({"w": full}, {"w": distribute_tensor(full, mesh, [Replicate()])}):
            target["w"].to_local().zero_()
            arrived = exchange(rank, 0, 1, state, target)
            if rank == 1:
                found.append(arrived["w"] is target["w"] and torch.equal(target["w"].to_local(), expected))
        target["w"].to_local().zero_()
        spread = {"w": distribute_tensor(full, mesh, [Shard(1 if placement == Shard(0) else 0)])}
        try:
            if rank:
                transport().send_checkpoint([0], spread)
            else:
                transport({"w": torch.zeros(7, 5)}).recv_checkpoint((1, 2, 3))  # What rank 0 has itself is missing.
        except transfuse.TransfuseError as error:
            found.append(type(error).__name__)
    return found


def uneven(rank: int) -> Any:
    """Uneven and empty shards between two meshes of the same shape: ranks 0, 1 to ranks 2, 3."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))["shard"]
    full = {"five": torch.randn(5, 3), "one": torch.randn(1, 3), "none": torch.randn(0, 3)}
    for tensor in full.values():
        dist.broadcast(tensor, 0)
    mine = {k: distribute_tensor(t if rank < 2 else torch.zeros_like(t), mesh, [Shard(0)]) for k, t in full.items()}
    if rank < 2:
        transport().send_checkpoint([rank + 2], mine)
        return None
    arrived = transport(mine).recv_checkpoint(rank - 2)
    return [tuple(t.to_local().shape) for t in arrived.values()], all(
        torch.equal(arrived[k].full_tensor(), full[k]) for k in full
    )


def partial_in_place(rank: int) -> Any:
    mesh = init_device_mesh("cpu", (4,))
    source = DTensor.from_local(torch.full((2, 2), float(rank)), mesh, [Partial("sum")], run_check=False)
    target = DTensor.from_local(torch.full((2, 2), -1.0), mesh, [Partial("sum")], run_check=False)
    other = DTensor.from_local(torch.full((2, 2), -1.0), mesh, [Partial("max")], run_check=False)
    arrived = exchange(rank, 3, 1, {"w": source}, {"w": target})
    refused = exchange(rank, 3, 1, {"w": source}, {"w": other})
    if rank == 1:
        return type(arrived).__name__, str(arrived), type(refused).__name__, target.to_local().tolist()
    if rank == 3:
        return type(arrived).__name__, type(refused).__name__
    return None


# --------------------------------------------------------------------------------------------------- DTensor, fresh


def fresh_dtensors(rank: int) -> Any:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    full = torch.arange(24.0).view(6, 4)
    shard = mesh["shard"]
    state = {
        "sharded": distribute_tensor(full, shard, [Shard(0)]),
        "2d": nn.Parameter(distribute_tensor(full, mesh, [Replicate(), Shard(1)])),
    }
    described: list[transfuse.MeshDescription] = []

    def make(description: transfuse.MeshDescription) -> DeviceMesh:
        described.append(description)
        return mesh if len(description.shape) == 2 else shard

    # Every rank of replica 0 sends to its twin in replica 1, which holds nothing but the mesh.
    if rank < 2:
        transport().send_checkpoint([rank + 2], state)
        return None
    arrived = transport(mesh=make).recv_checkpoint(rank - 2)
    assert described[0].shape == (2,)
    assert described[0].ranks == (0, 1)
    assert any(d.dim_names == ("replicate", "shard") for d in described)
    assert isinstance(arrived["2d"], nn.Parameter)
    return [torch.equal(arrived[k].full_tensor(), full) for k in state]


def fresh_on_one_rank(rank: int) -> Any:
    mesh = init_device_mesh("cpu", (4,))
    full = torch.arange(8.0).view(4, 2)
    replicated = {"r": distribute_tensor(full, mesh, [Replicate()])}
    sharded = {"ok": torch.ones(1), "s": distribute_tensor(full, mesh, [Shard(0)])}
    partial = {"p": DTensor.from_local(full, mesh, [Partial()], run_check=False)}
    arrived = exchange(rank, 2, 1, replicated)
    refused = exchange(rank, 2, 1, sharded)
    refused_too = exchange(rank, 2, 1, partial)
    # The next new_group of everybody still works: receiving has created no groups.
    group = dist.new_group([0, 1, 2, 3])
    dist.barrier(group)
    if rank == 1:
        whole = arrived["r"]
        return isinstance(whole, DTensor), torch.equal(whole.full_tensor(), full), str(refused), str(refused_too)
    return None


# ---------------------------------------------------------------------------------------------------- ShardedTensor


def sharded(rank: int, fill: float) -> Any:
    """A ShardedTensor of 8 rows over all 4 ranks."""
    world = dist.get_world_size()
    local = torch.full((2, 3), fill)
    metadata = ShardMetadata([rank * 2, 0], [2, 3], f"rank:{rank}/cpu")
    return init_from_local_shards([LocalShard(local, metadata)], 2 * world, 3)


def sharded_in_place(rank: int) -> Any:
    """Rank 0 has rows 0:2. Rank 1 has another shard: refused. A target of the same rows: written."""
    source, target = sharded(rank, float(rank + 1)), sharded(rank, 0.0)
    refused = exchange(rank, 0, 1, {"st": source}, {"st": target})
    if rank == 1:
        return type(refused).__name__, str(refused), float(target.local_tensor().sum())
    return None


def sharded_replicas(rank: int) -> Any:
    """Two replicas of two ranks, each with a ShardedTensor over its own group."""
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    half, place = divmod(rank, 2)

    def make(fill: float) -> Any:
        metadata = ShardMetadata([place * 2, 0], [2, 3], f"rank:{rank}/cpu")
        return init_from_local_shards(
            [LocalShard(torch.full((2, 3), fill), metadata)], 4, 3, process_group=groups[half]
        )

    state = {"st": make(float(place + 1) if half == 0 else 0.0)}
    if half == 0:
        transport().send_checkpoint([rank + 2], state)
        transport().send_checkpoint([rank + 2], state)
        return None
    arrived = transport(state).recv_checkpoint(rank - 2)
    same = arrived["st"] is state["st"]
    fresh = transport().recv_checkpoint(rank - 2)["st"]
    (shard,) = fresh.local_shards()
    where = next(m for m in fresh.metadata().shards_metadata if m.shard_offsets == shard.metadata.shard_offsets)
    return (
        same,
        float(arrived["st"].local_tensor().mean()),
        shard.metadata.shard_offsets,
        shard.metadata.shard_sizes,
        str(where.placement),
        float(shard.tensor.mean()),
    )


# ------------------------------------------------------------------------------------- modules, groups, subclasses


def wrapped_modules(rank: int) -> Any:
    """DDP over ranks 0 and 1, FSDP2 over two replicas; over a group whose ranks are not the global ones."""
    torch.manual_seed(rank)
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    backwards = dist.new_group([3, 2, 1, 0], use_local_synchronization=False)
    results = []

    ddp = DistributedDataParallel(nn.Linear(4, 4), process_group=pairs[rank // 2])
    if rank == 0:
        transport().send_checkpoint([2], ddp.state_dict())
    elif rank == 2:
        before = ddp.module.weight.detach().clone()
        arrived = transport(ddp.state_dict()).recv_checkpoint(0)
        results.append(not torch.equal(before, ddp.module.weight))
        results.append(all(name.startswith("module.") for name in arrived))
        results.append(arrived["module.weight"].data_ptr() == ddp.module.weight.data_ptr())

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replica", "shard"))
    model: Any = nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 3))
    for module in (*model, model):
        fully_shard(module, mesh=mesh["shard"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    torch.manual_seed(rank // 2)
    model(torch.randn(2, 5)).sum().backward()
    optimizer.step()
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    # Rank 3 of the group is global rank 3: torch sorts, so ask the group itself.
    mine = dist.get_group_rank(backwards, rank)
    if rank < 2:
        transport(pg=backwards).send_checkpoint([dist.get_group_rank(backwards, rank + 2)], state)
        full = [p.full_tensor() for p in model.parameters()]
    else:
        arrived = transport(state, pg=backwards, strict=True).recv_checkpoint(dist.get_group_rank(backwards, rank - 2))
        results.append(differences(state, arrived, in_place=True) == [])
        full = [p.full_tensor() for p in model.parameters()]
        results.append(mine is not None)
    for tensor in full:
        theirs = tensor.detach().clone()
        dist.broadcast(theirs, 0)
        results.append(torch.equal(tensor, theirs))
    return results


def subgroup(rank: int) -> Any:
    """In the group of global ranks 1 and 3, rank 0 is global rank 1."""
    group = dist.new_group([1, 3])
    if rank == 1:
        transport(pg=group).send_checkpoint([1], {"w": torch.full((3,), 7.0)})
    elif rank == 3:
        return transport(pg=group).recv_checkpoint(0)["w"].tolist()
    return None


def collective_tensors(rank: int) -> Any:
    pending = all_reduce(torch.full((4,), float(rank)), "sum", cast(Any, dist.group.WORLD))
    arrived = exchange(rank, 0, 1, {"w": pending})
    return (type(arrived["w"]), arrived["w"].tolist()) if rank == 1 else None
