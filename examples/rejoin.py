"""DDP, torch 2.14 or newer: a killed rank rejoins the group of the survivors, who keep it, and is healed.

A group made with ``enable_reconfigure=True`` is formed anew in place: no rank destroys its group or makes another. Job,
training and supervisor are those of heal_ddp.py. All losses and weights equal those of an undisturbed run, bit for bit.

python examples/rejoin.py
"""

import zlib
from typing import Any

import heal_ddp
import torch
import torch.distributed as dist
from heal_ddp import HOST, RANKS, TIMEOUT, Job, train
from torch.distributed import Store, TCPStore  # type: ignore[attr-defined]

import transfuse


def rejoin(store: Store, generation: int, rank: int) -> None:
    """Form the group anew, in place: every rank publishes its handle, and waits for those of the others."""
    torch_2_14: Any = dist
    store.set(f"generation {generation}/rank {rank}", torch_2_14._get_reconfigure_handle())
    keys = [f"generation {generation}/rank {each}" for each in range(RANKS)]
    store.wait(keys, TIMEOUT)
    handles = [store.get(key).decode() for key in keys]
    torch_2_14._reconfigure(uuid=generation + 1, handles=handles, timeout=TIMEOUT).wait()


def work(rank: int, port: int, fatal_step: int | None) -> None:
    """A rank, from its start to the last step."""
    store = TCPStore(HOST, port, is_master=False)
    options: Any = {"enable_reconfigure": True}
    dist.init_process_group("gloo", store=store, rank=rank, world_size=RANKS, timeout=TIMEOUT, **options)
    group = dist.group.WORLD
    assert group is not None
    generation = int(store.get("generation"))
    job = Job()
    while True:
        try:
            rejoin(store, generation, rank)
            job.step = transfuse.heal(
                job.state, step=job.step, load=job.load, atomic=True, group=group, timeout=TIMEOUT
            )
            if generation > 0:
                print(f"generation {generation}: rank {rank} goes on with step {job.step}\n", end="", flush=True)
            train(job, job.step, store, fatal_step if generation == 0 else None)
            break
        except (RuntimeError, transfuse.TransfuseError):
            # Somebody is gone. The group stays, and so do weights and moments.
            generation += 1
            store.wait([f"generation {generation}"], TIMEOUT)
    for name, tensor in job.model.state_dict().items():
        store.set(f"weight {name} {rank}", str(zlib.crc32(tensor.numpy())))
    dist.destroy_process_group()


if __name__ == "__main__":
    if not hasattr(dist, "_reconfigure"):
        raise SystemExit(f"torch {torch.__version__} cannot reconfigure a group; 2.14 and newer can")
    heal_ddp.main(work)
