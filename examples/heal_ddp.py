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
from collections.abc import Mapping
from datetime import timedelta
from multiprocessing.connection import wait
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import PrefixStore, Store, TCPStore  # type: ignore[attr-defined]
from torch.nn.parallel import DistributedDataParallel

from transfuse import PGTransport, TransfuseError

HOST = "127.0.0.1"
RANKS, STEPS, FATAL_STEP = 3, 12, 5

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
        self.step = 0

    def state(self) -> dict[str, Any]:
        return {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict(), "step": self.step}

    def load(self, state: dict[str, Any]) -> None:
        # The model's tensors are in place. A new optimizer had none to receive into: its moments arrived fresh.
        self.optimizer.load_state_dict(state["optimizer"])
        self.step = state["step"]


def join(store: Store, generation: int, rank: int) -> None:
    """A new group, on keys that no earlier one has used. What is left of the old group cannot disturb it."""
    prefix = PrefixStore(f"generation {generation}", store)
    prefix.set(f"rank {rank}", "")
    while not prefix.check([f"rank {each}" for each in range(RANKS)]):
        if store.check([f"generation {generation + 1}"]):
            raise RuntimeError("another rank has died, and will not come to this generation")
        time.sleep(0.01)
    dist.init_process_group("gloo", store=prefix, rank=rank, world_size=RANKS, timeout=timedelta(seconds=10))


def announced(store: Store, generation: int, patience: timedelta) -> bool:
    """Whether there is such a generation, or comes to be one."""
    try:
        store.wait([f"generation {generation}"], patience)
    except RuntimeError:
        return False
    return True


def heal(job: Job) -> str:
    """Called by all ranks of a new group: who is behind receives from all who are not."""
    steps: list[Any] = [None] * RANKS
    dist.all_gather_object(steps, job.step)
    # A survivor may have finished the step that another one was cut off in.
    newest = [rank for rank in range(RANKS) if steps[rank] == max(steps)]
    behind = [rank for rank in range(RANKS) if rank not in newest]
    group = dist.group.WORLD
    assert group is not None
    # Atomic: a rank whose healing fails half-way keeps what it had, and may be the newest next time.
    transport = PGTransport(group, timedelta(seconds=60), torch.device("cpu"), job.state, atomic=True)
    if dist.get_rank() in newest:
        transport.send_checkpoint(behind, job.state(), step=max(steps))
        return f"has sent step {job.step} to {behind}"
    job.load(transport.recv_checkpoint(newest, step=max(steps)))
    report = transport.report
    assert report is not None
    return f"has got step {job.step}, {report.bytes:,} bytes from {sorted(report.by_source)}"


def train(job: Job, store: Store, fatal_step: int | None) -> None:
    # Only now: DDP begins by broadcasting the weights of rank 0, which may be the rank that was lost. In each step one
    # head is unused. Saying so also keeps DDP from regrouping its buckets after the first step of each generation;
    # otherwise three ranks would sum in another order than in the undisturbed run.
    model = DistributedDataParallel(job.model, find_unused_parameters=True)
    while job.step < STEPS:
        # Data and dropout follow from step and rank, so there is no random state to be healed.
        torch.manual_seed(RANKS * job.step + dist.get_rank())
        batch = torch.randn(32, 16)
        loss = (model(batch, job.step) - batch.sum(1, keepdim=True)).square().mean()
        if job.step == fatal_step:
            os.kill(os.getpid(), signal.SIGKILL)
        job.optimizer.zero_grad()
        loss.backward()
        job.optimizer.step()
        store.set(f"loss {job.step} {dist.get_rank()}", loss.item().hex())
        job.step += 1
    # No rank leaves before all are done: if one dies until then, the others heal it.
    dist.barrier()


def work(rank: int, port: int, fatal_step: int | None) -> None:
    """A rank, from its start to the last step."""
    store = TCPStore(HOST, port, is_master=False)
    generation = int(store.get("generation"))
    job = Job()
    while True:
        try:
            join(store, generation, rank)
            told = heal(job)
            if generation > 0:
                print(f"generation {generation}: rank {rank} {told}", flush=True)
            train(job, store, fatal_step if generation == 0 else None)
            break
        except (RuntimeError, TransfuseError):
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


def supervise(fatal_steps: Mapping[int, int]) -> dict[str, bytes]:
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


def main() -> None:
    undisturbed = supervise({})
    healed = supervise({1: FATAL_STEP})
    wrong = [name for name in undisturbed if healed[name] != undisturbed[name]]
    if wrong:
        raise SystemExit(f"other than in the undisturbed run: {wrong}")
    first, last = (float.fromhex(healed[f"loss {step} 0"].decode()) for step in (0, STEPS - 1))
    print(f"loss from {first:.2f} to {last:.2f}")
    print("healed: every loss and weight on every rank as in the undisturbed run")


if __name__ == "__main__":
    main()
