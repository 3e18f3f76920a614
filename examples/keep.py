"""torchrun with --max-restarts: a worker is killed, torchrun starts all of them again, and they go on from memory.

When one worker fails, torchrun ends the others too. A keeper survives: a process that the workers start beside
themselves, and into whose memory they commit each step. After the restart every rank gets back what it had: the model
with BatchNorm's statistics, AdamW's moments, its random numbers and its place in the data. In the end losses, weights
and moments equal those of an undisturbed run, bit for bit.

torchrun --nproc-per-node 2 --max-restarts 3 examples/keep.py
"""

import os
import signal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import transfuse

STEPS, FATAL_STEP = 30, 17


class Job:
    def __init__(self, rank: int) -> None:
        torch.manual_seed(0)
        layers = nn.Linear(16, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Dropout(0.1), nn.Linear(64, 1)
        # BatchNorm's statistics are each rank's own.
        self.model = DistributedDataParallel(nn.Sequential(*layers), forward_sync_buffers=False)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        self.loader = transfuse.Loader(list(torch.randn(100, 16)), batch_size=8)  # type: ignore[arg-type]
        self.losses = torch.zeros(STEPS)
        torch.manual_seed(1 + rank)  # Dropout differs between the ranks.

    def train(self, step: int, batch: Tensor, *, fatal: bool = False) -> None:
        loss = (self.model(batch) - batch.sum(1, keepdim=True)).square().mean()
        self.optimizer.zero_grad()
        loss.backward()
        self.losses[step] = loss.detach()
        if fatal:
            os.kill(os.getpid(), signal.SIGKILL)
        self.optimizer.step()


def main() -> None:
    dist.init_process_group("gloo", init_method="transfuse://")
    rank = dist.get_rank()
    doomed = rank == 1 and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"

    job = Job(rank)
    keep = transfuse.keep(
        {"model": job.model, "optimizer": job.optimizer},
        rank_state={"rng": transfuse.RNG(), "loader": job.loader, "losses": job.losses},
    )
    step = keep.restore() or 0
    if step:
        print(f"rank {rank} goes on with step {step}\n", end="", flush=True)
    batches = iter(job.loader)
    while step < STEPS:
        job.train(step, next(batches), fatal=doomed and step == FATAL_STEP)
        step += 1
        keep.commit(step)

    # The same training in the same processes, which nobody disturbs and nobody keeps.
    undisturbed = Job(rank)
    for number, batch in zip(range(STEPS), undisturbed.loader, strict=False):
        undisturbed.train(number, batch)
    equal = torch.tensor(torch.equal(bits(job), bits(undisturbed)))
    dist.all_reduce(equal, dist.ReduceOp.MIN)
    if not equal:
        raise SystemExit("other losses, weights or moments than in the undisturbed run")
    keep.close()
    dist.destroy_process_group()
    if rank == 0:
        print("kept: losses, weights and moments are those of the undisturbed run, bit for bit")


def bits(job: Job) -> Tensor:
    """Losses, weights, statistics and moments of a job."""
    moments = [value for state in job.optimizer.state.values() for value in state.values()]
    tensors = [job.losses, *job.model.state_dict().values(), *moments]
    return torch.cat([tensor.flatten().double() for tensor in tensors]).view(torch.int64)


if __name__ == "__main__":
    main()
