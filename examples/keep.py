"""torchrun with --max-restarts: a worker is killed, torchrun starts all of them again, and they go on from memory.

When one worker fails, torchrun ends the others too. A keeper survives: a process that the workers start beside
themselves, and into whose memory they commit each step. After the restart every rank gets back what it had: the model
with BatchNorm's statistics, AdamW's moments, its random numbers and its place in the data. In the end losses, weights
and moments equal those of an undisturbed run, bit for bit.

torchrun --nproc-per-node 2 --max-restarts 3 examples/keep.py
"""

import os
import signal
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import BatchSampler, DataLoader, Dataset, DistributedSampler

import transfuse

STEPS, FATAL_STEP = 30, 17


class Loader:
    """A rank's batches, epoch after epoch. Its state says which batch is next."""

    def __init__(self, dataset: Dataset[Any], rank: int, ranks: int, batch_size: int, **options: Any) -> None:
        self._dataset, self._options = dataset, options
        self._sampler: DistributedSampler[Any] = DistributedSampler(dataset, ranks, rank, drop_last=True)
        self._batches = BatchSampler(self._sampler, batch_size, drop_last=True)
        self._epoch, self._next = 0, 0

    def __iter__(self) -> Iterator[Any]:
        while True:
            self._sampler.set_epoch(self._epoch)
            # What has been seen is left out before anything is read. A generator of its own: otherwise each new
            # iterator would draw a number from torch's, and a restarted job would draw one more.
            rest = list(self._batches)[self._next :]
            for batch in DataLoader(
                self._dataset, batch_sampler=rest, generator=torch.Generator().manual_seed(0), **self._options
            ):
                self._next += 1  # Counted when it is handed out, however far the loader's processes are ahead.
                yield batch
            self._epoch, self._next = self._epoch + 1, 0

    def state_dict(self) -> dict[str, int]:
        return {"epoch": self._epoch, "next": self._next}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Call this before the iteration begins."""
        self._epoch, self._next = state["epoch"], state["next"]


class Job:
    def __init__(self, rank: int, ranks: int) -> None:
        torch.manual_seed(0)
        layers = nn.Linear(16, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Dropout(0.1), nn.Linear(64, 1)
        # BatchNorm's statistics are each rank's own.
        self.model = DistributedDataParallel(nn.Sequential(*layers), forward_sync_buffers=False)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        self.loader = Loader(list(torch.randn(100, 16)), rank, ranks, batch_size=8)  # type: ignore[arg-type]
        self.losses = torch.zeros(STEPS)
        torch.manual_seed(1 + rank)  # Dropout differs between the ranks.

    def state(self) -> dict[str, Any]:
        return {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}

    def load(self, state: dict[str, Any]) -> None:
        # The model's tensors are in place. A new optimizer had none to land in: its moments arrived fresh.
        self.optimizer.load_state_dict(state["optimizer"])

    def own(self) -> dict[str, Any]:
        return {"rng": torch.get_rng_state(), "loader": self.loader.state_dict(), "losses": self.losses}

    def load_own(self, own: dict[str, Any]) -> None:
        torch.set_rng_state(own["rng"])
        self.loader.load_state_dict(own["loader"])
        self.losses.copy_(own["losses"])

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
    rank, ranks = dist.get_rank(), dist.get_world_size()
    doomed = rank == 1 and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"

    job = Job(rank, ranks)
    keep = transfuse.keep(job.state, load=job.load, own=job.own, load_own=job.load_own)
    step = keep.restore() or 0
    if step:
        print(f"rank {rank} goes on with step {step}\n", end="", flush=True)
    batches = iter(job.loader)
    while step < STEPS:
        job.train(step, next(batches), fatal=doomed and step == FATAL_STEP)
        step += 1
        keep.commit(step)

    # The same training in the same processes, which nobody disturbs and nobody keeps.
    undisturbed = Job(rank, ranks)
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
