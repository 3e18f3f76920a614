"""DDP, torch 2.14 or newer: a killed rank rejoins the group of the survivors, who keep it, and is healed.

A group made with ``enable_reconfigure=True`` is formed anew in place: no rank destroys its group or makes another. All
losses and weights equal those of an undisturbed run, bit for bit.

python examples/rejoin.py
"""

import multiprocessing
import os
import signal
import zlib
from datetime import timedelta
from multiprocessing.connection import wait
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import Store, TCPStore  # type: ignore[attr-defined]
from torch.nn.parallel import DistributedDataParallel

import transfuse

HOST = "127.0.0.1"
RANKS, STEPS, VICTIM, FATAL_STEP = 3, 12, 1, 5
TIMEOUT = timedelta(seconds=30)
CPU = torch.device("cpu")


class Job:
    """Everything that a rank would lose by dying."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 1))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)

    def state(self) -> dict[str, Any]:
        return {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}

    def load(self, state: dict[str, Any]) -> None:
        self.optimizer.load_state_dict(state["optimizer"])


def join(store: Store, rank: int, generation: int) -> None:
    """Form the group anew, in place: every rank publishes its handle, and waits for those of the others."""
    reconfigure: Any = dist
    store.set(f"{generation} handle {rank}", reconfigure._get_reconfigure_handle())
    keys = [f"{generation} handle {each}" for each in range(RANKS)]
    store.wait(keys, TIMEOUT)
    handles = [store.get(key).decode() for key in keys]
    reconfigure._reconfigure(uuid=generation, handles=handles, timeout=TIMEOUT).wait()


def work(rank: int, port: int, fatal_step: int | None) -> None:
    """A rank, from its start to the last step."""
    store = TCPStore(HOST, port, is_master=False)
    options: Any = {"enable_reconfigure": True}
    dist.init_process_group("gloo", store=store, rank=rank, world_size=RANKS, timeout=TIMEOUT, **options)
    group = dist.group.WORLD
    assert group is not None
    job = Job()
    step: int | None = None
    generation = int(store.get("generation"))
    while step is None or step < STEPS:
        try:
            join(store, rank, generation)
            step = transfuse.heal(group, TIMEOUT, CPU, job.state, step=step, load=job.load)
            if generation > 1:
                print(f"rank {rank}, process group {id(group):x}, goes on with step {step}\n", end="", flush=True)
            model = DistributedDataParallel(job.model, find_unused_parameters=True)
            while step < STEPS:
                torch.manual_seed(RANKS * step + rank)
                batch = torch.randn(32, 16)
                loss = (model(batch) - batch.sum(1, keepdim=True)).square().mean()
                if step == fatal_step:
                    os.kill(os.getpid(), signal.SIGKILL)
                job.optimizer.zero_grad()
                loss.backward()
                job.optimizer.step()
                store.set(f"loss {step} {rank}", loss.item().hex())
                step += 1
        except (RuntimeError, transfuse.TransfuseError):
            # Somebody is gone. The group stays, and so does the state: as after the last optimizer.step().
            generation += 1
            store.wait([f"generation {generation}"], TIMEOUT)
    for name, tensor in job.model.state_dict().items():
        store.set(f"weight {name} {rank}", str(zlib.crc32(tensor.numpy())))
    dist.barrier()
    dist.destroy_process_group()


def supervise(fatal_step: int | None) -> dict[str, bytes]:
    """Run the job. A rank that dies is started again, and all are told. Returns every loss, and digests of weights."""
    store = TCPStore(HOST, 0, is_master=True, wait_for_workers=False)
    store.set("generation", "1")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch._dynamo", "transfuse"])

    def start(rank: int, fatal_step: int | None = None) -> Any:
        process = context.Process(target=work, args=(rank, store.port, fatal_step), daemon=True)
        process.start()
        return process

    running = {rank: start(rank, fatal_step if rank == VICTIM else None) for rank in range(RANKS)}
    generation = 1
    while running:
        wait([process.sentinel for process in running.values()])
        for rank, process in list(running.items()):
            code = process.exitcode
            if code == 0:
                del running[rank]
            elif code is not None:
                generation += 1
                if generation > RANKS:
                    raise SystemExit("too many failures")
                print(f"rank {rank} ended with {code}, and is started again", flush=True)
                running[rank] = start(rank)
                store.set("generation", str(generation))
                store.set(f"generation {generation}", "")
    names = [f"loss {step} {rank}" for step in range(STEPS) for rank in range(RANKS)]
    names += [f"weight {name} {rank}" for name in Job().model.state_dict() for rank in range(RANKS)]
    return {name: store.get(name) for name in names}


def main() -> None:
    undisturbed = supervise(None)
    healed = supervise(FATAL_STEP)
    wrong = [name for name in undisturbed if healed[name] != undisturbed[name]]
    if wrong:
        raise SystemExit(f"other than in the undisturbed run: {wrong}")
    print("rejoined: every loss and weight on every rank as in the undisturbed run")


if __name__ == "__main__":
    if not hasattr(dist, "_reconfigure"):
        raise SystemExit(f"torch {torch.__version__} cannot reconfigure a group; 2.14 and newer can")
    main()
