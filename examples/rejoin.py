"""DDP, torch 2.14 or newer: a killed rank rejoins the group of the survivors, who keep it, and is healed.

A group made with ``enable_reconfigure=True`` is formed anew in place: no rank destroys its group or makes another. Job
and training are those of heal_ddp.py. All losses and weights equal those of an undisturbed run, bit for bit.

python examples/rejoin.py
"""

import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import heal_ddp
import torch
import torch.distributed as dist
from heal_ddp import RANKS, Job
from torch.distributed import Store  # type: ignore[attr-defined]

import transfuse

TIMEOUT = timedelta(seconds=60)


def rejoin(store: Store, generation: int, rank: int) -> None:
    """Form the group anew, in place: every rank publishes its handle, and waits for those of the others."""
    torch_2_14: Any = dist
    store.set(f"generation {generation}/rank {rank}", torch_2_14._get_reconfigure_handle())
    keys = [f"generation {generation}/rank {each}" for each in range(RANKS)]
    store.wait(keys, TIMEOUT)
    handles = [store.get(key).decode() for key in keys]
    torch_2_14._reconfigure(uuid=generation + 1, handles=handles, timeout=TIMEOUT).wait()


def work(store: Store, rank: int, size: int, results: Path, fatal_step: int | None) -> None:
    """A rank, from its start to the last step."""
    starts = store.add(f"starts of rank {rank}", 1)
    # A rank that was started again begins a generation, and the survivors follow.
    generation = store.add("generation", int(starts > 1))
    options: Any = {"enable_reconfigure": True}
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=TIMEOUT, **options)
    group = dist.group.WORLD
    assert group is not None
    job = Job()
    while True:
        try:
            rejoin(store, generation, rank)
            job.step = transfuse.heal(job.state, step=job.step, group=group, atomic=True) or 0
            print(f"rank {rank} goes on with step {job.step}\n", end="", flush=True)
            job.train(job.step, fatal_step if rank == 1 and starts == 1 else None, results)
            break
        except (RuntimeError, transfuse.TransfuseError):
            # Somebody is gone. The group stays, and so do weights and moments.
            generation += 1
            while store.add("generation", 0) < generation:
                time.sleep(0.02)
    torch.save(job.model.state_dict(), results / f"weights {rank}")
    dist.destroy_process_group()


if __name__ == "__main__":
    if not hasattr(dist, "_reconfigure"):
        raise SystemExit(f"torch {torch.__version__} cannot reconfigure a group; 2.14 and newer can")
    heal_ddp.main(work)
