"""DDP: one of three ranks is killed in the middle of a step, started again, and healed in place by the other two.

A supervisor starts the ranks, and restarts a rank that has died; whatever runs your job (Slurm, Kubernetes, systemd)
can do this. The survivors stay: they form a new group with the newcomer, send it their state, and go on. All losses
and weights equal those of an undisturbed run, bit for bit.

python examples/heal_ddp.py
"""

import os
import signal
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import Store  # type: ignore[attr-defined]
from torch.nn.parallel import DistributedDataParallel

import transfuse

RANKS, STEPS, FATAL_STEP = 3, 12, 5


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

    def train(self, step: int, fatal_step: int | None, results: Path) -> None:
        # Only now: DDP begins by broadcasting the weights of rank 0, which may be the rank that was lost. In each step
        # one head is unused. Saying so also keeps DDP from regrouping its buckets after the first step of each
        # generation; otherwise three ranks would sum in another order than in the undisturbed run.
        model, rank = DistributedDataParallel(self.model, find_unused_parameters=True), dist.get_rank()
        while step < STEPS:
            # Data and dropout follow from step and rank, so there is no random state to be healed.
            torch.manual_seed(RANKS * step + rank)
            batch = torch.randn(32, 16)
            loss = (model(batch, step) - batch.sum(1, keepdim=True)).square().mean()
            if step == fatal_step:
                os.kill(os.getpid(), signal.SIGKILL)
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
            (results / f"loss {step} {rank}").write_text(loss.item().hex())
            self.step = step = step + 1
        # No rank leaves before all are done: if one dies until then, the others heal it.
        dist.barrier()


def work(store: Store, rank: int, size: int, results: Path, fatal_step: int | None) -> None:
    """A rank, from its start to the last step."""
    is_doomed = rank == 1 and store.add("rank 1 has started", 1) == 1
    job = Job()
    while True:
        try:
            transfuse.regroup(store, rank, size)
            # Atomic: if it fails half-way, each rank keeps what it had.
            job.step = transfuse.heal(job.state, step=job.step, atomic=True) or 0
            print(f"rank {rank} goes on with step {job.step}\n", end="", flush=True)
            job.train(job.step, fatal_step if is_doomed else None, results)
            break
        except (RuntimeError, transfuse.TransfuseError) as error:
            # Somebody is gone. Weights and moments are as after the last optimizer.step(), and stay.
            print(f"rank {rank} begins again: {error}", file=sys.stderr)
    torch.save(job.model.state_dict(), results / f"weights {rank}")
    dist.destroy_process_group()


def run(work: Callable[..., None], fatal_step: int | None) -> dict[str, bytes]:
    """Run the job. Returns every loss, and the weights of every rank."""
    with tempfile.TemporaryDirectory() as results:
        transfuse.supervise(work, RANKS, Path(results), fatal_step)
        return {path.name: path.read_bytes() for path in Path(results).iterdir()}


def main(work: Callable[..., None] = work) -> None:
    undisturbed, healed = run(work, None), run(work, FATAL_STEP)
    wrong = [name for name in undisturbed if healed[name] != undisturbed[name]]
    if wrong or len(healed) != RANKS * (STEPS + 1):
        raise SystemExit(f"other than in the undisturbed run: {wrong}")
    first, last = (float.fromhex(healed[f"loss {step} 0"].decode()) for step in (0, STEPS - 1))
    print(f"loss from {first:.2f} to {last:.2f}")
    print("healed: every loss and weight on every rank as in the undisturbed run")


if __name__ == "__main__":
    main()
