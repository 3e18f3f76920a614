"""HSDP: two replicas of two shards each. One replica loses everything, and is healed in place from the other.

Each healed rank gets its own shard of weights and moments from the rank that holds the same one; no tensor is gathered.
Then training goes on, and every loss is exactly that of an undisturbed run.

torchrun --nproc-per-node 4 examples/heal_hsdp.py
(or python examples/heal_hsdp.py)
"""

import os
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.run import main as torchrun

import transfuse

LOST = [2, 3]


def build(mesh: DeviceMesh) -> nn.Module:
    torch.manual_seed(0)
    # 99 is odd: of its rows one rank of each replica has 50, the other 49.
    model = nn.Sequential(nn.Linear(32, 99), nn.ReLU(), nn.Linear(99, 99), nn.ReLU(), nn.Linear(99, 1))
    for layer in model:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def make_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: Iterable[int]) -> list[float]:
    losses = []
    for step in steps:
        batch = torch.randn(64, 32, generator=torch.Generator().manual_seed(4 * step + dist.get_rank()))
        loss = (model(batch) - batch.sum(1, keepdim=True)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def heal(
    model: nn.Module, optimizer: torch.optim.Optimizer, step: int | None, group: dist.ProcessGroup
) -> tuple[int, str]:
    """Called by all ranks, with whatever they have. The step to go on with, and what happened."""
    healed = transfuse.heal({"model": model, "optimizer": optimizer}, step=step, group=group)
    assert healed is not None
    assert healed.report is not None
    return healed, f"{healed.report.bytes:,} bytes, by source {healed.report.by_source}"


def lose(model: nn.Module) -> torch.optim.Optimizer:
    """The effect of a restart: other weights, no gradients, and an optimizer without state."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(float("nan"))
            parameter.grad = None
    return torch.optim.AdamW(model.parameters(), lr=1.0)


def main() -> None:
    dist.init_process_group("gloo")
    group, rank = dist.group.WORLD, dist.get_rank()
    assert group is not None
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replica", "shard"))

    model = build(mesh)
    undisturbed = train(model, make_optimizer(model), range(20))

    model = build(mesh)
    optimizer = make_optimizer(model)
    losses = train(model, optimizer, range(10))
    if rank in LOST:
        optimizer = lose(model)
    step, line = heal(model, optimizer, None if rank in LOST else 10, group)
    losses += train(model, optimizer, range(step, 20))

    lines: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(lines, (losses == undisturbed, line))
    if rank == 0:
        for each in LOST:
            print(f"rank {each}: {lines[each][1]}")
        print(f"loss in step {step}: {losses[step]:.3f}, in the last {losses[-1]:.3f}")
    if not all(same for same, _ in lines):
        raise SystemExit(f"rank {rank}: losses {losses}, undisturbed {undisturbed}")
    if rank == 0:
        print("healed: every loss on every rank as in the undisturbed run")
    dist.destroy_process_group()


if __name__ == "__main__":
    if "RANK" in os.environ:
        main()
    else:
        torchrun(["--standalone", "--nproc-per-node=4", __file__])
