"""Weight sync again and again, across different shardings: the plan is made once, and the bytes are those of today."""

from __future__ import annotations

from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

import transfuse
from moves import CPU, TIMEOUT
from transfuse.testing.ranks import ProcessPool

ROUNDS, TENSORS = 4, 12


def whole(number: int, step: int) -> torch.Tensor:
    return torch.arange(12 * 10, dtype=torch.float32).view(12, 10) + 1000 * number + step


def sync(rank: int, same_host: bool, move_memory: bool) -> Any:
    """Ranks 0 and 1 train, sharded by rows; ranks 2 and 3 serve, sharded by columns."""
    meshes = [
        DeviceMesh("cpu", group, _init_backend=True, mesh_dim_names=("d",))
        for group in (torch.tensor([0, 1]), torch.tensor([2, 3]))
    ]
    mover = transfuse.PGTransport(cast(Any, dist.group.WORLD), TIMEOUT, CPU, same_host=same_host)
    if rank < 2:
        used = []
        for step in range(ROUNDS):
            weights = {f"w{i}": distribute_tensor(whole(i, step), meshes[0], [Shard(0)]) for i in range(TENSORS)}
            mover.send_checkpoint([2, 3], {"model": weights, "step": step}, step=step)
            assert mover.report is not None
            used.append(set(mover.report.reused))
        return used
    own: dict[str, Any] = {
        "model": {f"w{i}": distribute_tensor(torch.zeros(12, 10), meshes[1], [Shard(1)]) for i in range(TENSORS)},
        "step": -1,
    }
    mover = transfuse.PGTransport(cast(Any, dist.group.WORLD), TIMEOUT, CPU, lambda: own, same_host=same_host)
    used, wrong = [], []
    for step in range(ROUNDS):
        if move_memory and step == 2:
            local = own["model"]["w5"].to_local()
            own["model"]["w5"] = DTensor.from_local(local.clone().zero_(), meshes[1], [Shard(1)])
        received = mover.recv_checkpoint([0, 1], step=step)
        assert mover.report is not None
        used.append(set(mover.report.reused))
        half = slice(0, 5) if rank == 2 else slice(5, 10)
        wrong += [
            (step, name)
            for i, name in enumerate(own["model"])
            if not torch.equal(own["model"][name].to_local(), whole(i, step)[:, half])
        ]
        assert received["step"] == step
    return used, wrong


@pytest.mark.parametrize("same_host", [True, False])
@pytest.mark.parametrize("move_memory", [False, True])
def test_resharding_again_uses_the_plan_again(pool4: ProcessPool, same_host: bool, move_memory: bool) -> None:
    outcomes = [outcome.get() for outcome in pool4.run(sync, same_host, move_memory)]
    for used in outcomes[:2]:
        assert [("description" in one, "parcels" in one) for one in used[1:]] == [(True, not same_host)] * (ROUNDS - 1)
    for used, wrong in outcomes[2:]:
        assert wrong == []
        assert ["plan" in one for one in used] == [False, True, not move_memory, True]
        assert ["description" in one for one in used] == [False, True, True, True]
