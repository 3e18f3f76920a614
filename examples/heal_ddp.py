"""DDP: one of three ranks is killed in the middle of a step, started again, and healed in place by the other two.

A supervisor starts the ranks, and restarts a rank that has died; whatever runs your job (Slurm, Kubernetes, systemd)
can do this. The survivors stay: they form a new group with the newcomer, send it their state, and go on. All losses
and weights equal those of an undisturbed run, bit for bit.

python examples/heal_ddp.py
"""

import multiprocessing
import os
import signal
import time
import zlib
from collections.abc import Callable, Mapping
from datetime import timedelta
from multiprocessing.connection import wait
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import PrefixStore, Store, TCPStore  # type: ignore[attr-defined]
from torch.nn.parallel import DistributedDataParallel

import transfuse

HOST = "127.0.0.1"
RANKS, STEPS, FATAL_STEP = 3, 12, 5
TIMEOUT = timedelta(seconds=60)
CPU = torch.device("cpu")

#: Groups that have lost a member are kept: freeing one would wait for its operations, and gloo may never end them.
LEFT: list[object] = []


class Model(nn.Module):
    """Two heads that are used in turns."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Dropout(0.1), nn.Linear(64, 64), nn.ReLU())
        self.heads = nn.ModuleList([nn.Linear(64, 1), nn.Linear(64, 1)])

    def forward(self, batch: torch.Tensor, step: int) -> torch.Tensor:
        output: torch.Tensor = self.heads[step % 2](self.trunk(batch))
        return output


class Job:
    """Everything that a rank would lose by dying."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = Model()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        self.state = {"model": self.model, "optimizer": self.optimizer}
        #: The step that comes next. None: this rank has nothing yet.
        self.step: int | None = None


def join(store: Store, generation: int, rank: int) -> dist.ProcessGroup:
    """A new group, on keys that no earlier one has used. What is left of the old group cannot disturb it."""
    prefix = PrefixStore(f"generation {generation}", store)
    prefix.set(f"rank {rank}", "")
    while not prefix.check([f"rank {each}" for each in range(RANKS)]):
        if store.check([f"generation {generation + 1}"]):
            raise RuntimeError("another rank has died, and will not come to this generation")
        time.sleep(0.01)
    dist.init_process_group("gloo", store=prefix, rank=rank, world_size=RANKS, timeout=timedelta(seconds=10))
    assert dist.group.WORLD is not None
    return dist.group.WORLD


def announced(store: Store, generation: int, patience: timedelta) -> bool:
    """Whether there is such a generation, or comes to be one."""
    try:
        store.wait([f"generation {generation}"], patience)
    except RuntimeError:
        return False
    return True


def train(job: Job, step: int, store: Store, fatal_step: int | None) -> None:
    # Only now: DDP begins by broadcasting the weights of rank 0, which may be the rank that was lost. In each step one
    # head is unused. Saying so also keeps DDP from regrouping its buckets after the first step of each generation;
    # otherwise three ranks would sum in another order than in the undisturbed run.
    model = DistributedDataParallel(job.model, find_unused_parameters=True)
    while step < STEPS:
        # Data and dropout follow from step and rank, so there is no random state to be healed.
        torch.manual_seed(RANKS * step + dist.get_rank())
        batch = torch.randn(32, 16)
        loss = (model(batch, step) - batch.sum(1, keepdim=True)).square().mean()
        if step == fatal_step:
            os.kill(os.getpid(), signal.SIGKILL)
        job.optimizer.zero_grad()
        loss.backward()
        job.optimizer.step()
        store.set(f"loss {step} {dist.get_rank()}", loss.item().hex())
        job.step = step = step + 1
    # No rank leaves before all are done: if one dies until then, the others heal it.
    dist.barrier()


def work(rank: int, port: int, fatal_step: int | None) -> None:
    """A rank, from its start to the last step."""
    store = TCPStore(HOST, port, is_master=False)
    generation = int(store.get("generation"))
    job = Job()
    while True:
        try:
            group = join(store, generation, rank)
            # Atomic: if it fails half-way, each rank keeps what it had.
            job.step = transfuse.heal(job.state, step=job.step, group=group, atomic=True) or 0
            if generation > 0:
                print(f"generation {generation}: rank {rank} goes on with step {job.step}\n", end="", flush=True)
            train(job, job.step, store, fatal_step if generation == 0 else None)
            break
        except (RuntimeError, transfuse.TransfuseError):
            # Somebody is gone. Weights and moments are as after the last optimizer.step(), and stay.
            if dist.is_initialized():
                LEFT.append(dist.group.WORLD)
                dist.destroy_process_group()
            if not announced(store, generation + 1, timedelta(seconds=10)):
                # Nobody has died: ranks that live have failed each other, by a timeout perhaps.
                store.set(f"failed {generation}", "")
                store.wait([f"generation {generation + 1}"], timedelta(seconds=60))
            generation = int(store.get("generation"))
    for name, tensor in job.model.state_dict().items():
        store.set(f"weight {name} {rank}", str(zlib.crc32(tensor.numpy())))
    dist.destroy_process_group()


# ------------------------------------------------------------------- what runs the job, and compares in the end


def supervise(work: Callable[[int, int, int | None], None], fatal_steps: Mapping[int, int]) -> dict[str, bytes]:
    """Run the job. A rank that dies is restarted, and all are told. Returns every loss, and digests of the weights."""
    # The store outlives every rank: through it the ranks find each other again.
    store = TCPStore(HOST, 0, is_master=True, wait_for_workers=False)
    store.set("generation", "0")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch._dynamo", "transfuse"])

    def start(rank: int) -> Any:
        process = context.Process(target=work, args=(rank, store.port, fatal_steps.get(rank)), daemon=True)
        process.start()
        return process

    generation, since = 0, time.monotonic()

    def announce(why: str) -> None:
        nonlocal generation, since
        generation += 1
        print(f"{why}: generation {generation}", flush=True)
        if generation > RANKS:
            raise SystemExit("too many failures")
        store.set("generation", str(generation))
        store.set(f"generation {generation}", "")
        since = time.monotonic()

    running = {rank: start(rank) for rank in range(RANKS)}
    while running:
        wait([process.sentinel for process in running.values()], timeout=1)
        for rank, process in running.items():
            # Stuck in a collective of the old group. It is started again and healed, like any other.
            if time.monotonic() > since + 60 and not store.check([f"generation {generation}/rank {rank}"]):
                process.kill()
        for rank, process in list(running.items()):
            # Asked once: the process may end between two questions.
            code = process.exitcode
            if code == 0:
                del running[rank]
            elif code is not None:
                announce(f"rank {rank} ended with {code}")
                running[rank] = start(rank)
        if store.check([f"failed {generation}"]):
            announce("nobody has ended, but the group is of no more use")
    names = [f"loss {step} {rank}" for step in range(STEPS) for rank in range(RANKS)]
    names += [f"weight {name} {rank}" for name in Job().model.state_dict() for rank in range(RANKS)]
    return {name: store.get(name) for name in names}


def main(work: Callable[[int, int, int | None], None] = work) -> None:
    undisturbed = supervise(work, {})
    healed = supervise(work, {1: FATAL_STEP})
    wrong = [name for name in undisturbed if healed[name] != undisturbed[name]]
    if wrong:
        raise SystemExit(f"other than in the undisturbed run: {wrong}")
    first, last = (float.fromhex(healed[f"loss {step} 0"].decode()) for step in (0, STEPS - 1))
    print(f"loss from {first:.2f} to {last:.2f}")
    print("healed: every loss and weight on every rank as in the undisturbed run")


if __name__ == "__main__":
    main()
