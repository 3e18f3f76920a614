"""HSDP: two replicas of two shards each. One rank is killed in the middle of a step, and healed from the other replica.

The survivors stay. They form a new group with the newcomer, build the model on its mesh, and take over their own shards
of weights and moments. The newcomer gets its shards from the rank that holds the same ones; no tensor is gathered. All
losses are exactly those of an undisturbed run.

python examples/heal_hsdp.py
"""

import os
import signal
import sys
import tempfile
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import Store  # type: ignore[attr-defined]
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.distributed_c10d import _set_pg_timeout
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_map

import transfuse

REPLICAS, SHARDS, STEPS, FATAL_STEP, DOOMED = 2, 2, 20, 10, 3
TIMEOUT = timedelta(seconds=60)


def build(mesh: DeviceMesh) -> dict[str, Any]:
    torch.manual_seed(0)
    # 99 is odd: of its rows one rank of each replica has 50, the other 49.
    model = nn.Sequential(nn.Linear(32, 99), nn.ReLU(), nn.Linear(99, 99), nn.ReLU(), nn.Linear(99, 1))
    for layer in model:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    return {"model": model, "optimizer": optimizer}


def onto(mesh: DeviceMesh, tree: Any) -> Any:
    """The same shards on another mesh of the same shape."""

    def move(leaf: Any) -> Any:
        if not isinstance(leaf, DTensor):
            return leaf
        local = leaf.to_local()
        return DTensor.from_local(local, mesh, leaf.placements, run_check=False, shape=leaf.shape, stride=leaf.stride())

    return tree_map(move, tree)


def train(state: dict[str, Any], step: int, fatal_step: int | None, results: Path) -> None:
    model, optimizer, rank = state["model"], state["optimizer"], dist.get_rank()
    batch = torch.randn(64, 32, generator=torch.Generator().manual_seed(4 * step + rank))
    loss = (model(batch) - batch.sum(1, keepdim=True)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    if step == fatal_step:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()  # No rank steps before all have their gradients.
    optimizer.step()
    (results / f"loss {step} {rank}").write_text(loss.item().hex())


def work(store: Store, rank: int, size: int, results: Path, fatal_step: int | None) -> None:
    """A rank, from its start to the last step."""
    is_doomed = rank == DOOMED and store.add("the doomed rank has started", 1) == 1
    state: dict[str, Any] | None = None
    step: int | None = None
    while True:
        try:
            transfuse.regroup(store, rank, size, timeout=TIMEOUT)
            mesh = init_device_mesh("cpu", (REPLICAS, SHARDS), mesh_dim_names=("replica", "shard"))
            for group in mesh.get_all_groups():
                _set_pg_timeout(TIMEOUT, group)  # Torch gives the groups of a mesh half an hour.
            before, state = state, build(mesh)
            if before is not None:  # A survivor's own shards, from the model of the old group.
                for name, built in state.items():
                    built.load_state_dict(onto(mesh, before[name].state_dict()))
            healed = transfuse.heal(state, step=step)
            if healed is not None and healed.report is not None and step is None:
                print(f"rank {rank}: {healed.report.bytes:,} bytes, by source {healed.report.by_source}", flush=True)
            step = healed or 0
            while step < STEPS:
                train(state, step, fatal_step if is_doomed else None, results)
                step += 1
            dist.barrier()  # No rank leaves before all are done: if one dies until then, the others heal it.
            break
        except (RuntimeError, transfuse.TransfuseError) as error:
            print(f"rank {rank} begins again: {error}", file=sys.stderr)
    dist.destroy_process_group()


def run(fatal_step: int | None) -> dict[str, float]:
    """Run the job. Returns every loss of every rank."""
    with tempfile.TemporaryDirectory() as results:
        transfuse.supervise(work, REPLICAS * SHARDS, Path(results), fatal_step)
        return {path.name: float.fromhex(path.read_text()) for path in Path(results).iterdir()}


def main() -> None:
    undisturbed, healed = run(None), run(FATAL_STEP)
    if healed != undisturbed:
        raise SystemExit(f"losses {healed}, undisturbed {undisturbed}")
    first, last = (healed[f"loss {step} 0"] for step in (FATAL_STEP, STEPS - 1))
    print(f"loss in step {FATAL_STEP}: {first:.3f}, in the last {last:.3f}")
    print("healed: every loss on every rank as in the undisturbed run")


if __name__ == "__main__":
    main()
