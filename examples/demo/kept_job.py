"""The job of the second act: ``torchrun --max-restarts`` starts it, and starts it again when a worker has died.

In its first life a worker is killed. The second life goes on from the keeper's memory, saves files, and a worker is
killed again. The third life goes on from these files. In the end the same training runs undisturbed, and is compared.
"""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from examples.demo.kept_words import FATAL_STEPS, FILE_STEP, STEPS, VICTIM, Said
from examples.demo.model import Transformer, batch
from torch.nn.parallel import DistributedDataParallel

import transfuse


class Job:
    def __init__(self, rank: int, width: int, seed: int) -> None:
        torch.manual_seed(seed)
        self.model = DistributedDataParallel(Transformer(width))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.2 / width, weight_decay=0.1)
        self.losses = torch.zeros(STEPS)
        self._rank, self._seed = rank, seed
        torch.manual_seed(seed * 1000 + rank)

    def state(self) -> dict[str, Any]:
        return {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}

    def load(self, state: dict[str, Any]) -> None:
        self.optimizer.load_state_dict(state["optimizer"])

    def own(self) -> dict[str, Any]:
        return {"rng": torch.get_rng_state(), "losses": self.losses}

    def load_own(self, own: dict[str, Any]) -> None:
        torch.set_rng_state(own["rng"])
        self.losses.copy_(own["losses"])

    def save(self, file: Path) -> None:
        torch.save({"state": self.state(), "own": self.own()}, file)

    def load_file(self, file: Path) -> None:
        saved = torch.load(file, weights_only=True)
        self.model.load_state_dict(saved["state"]["model"])
        self.load(saved["state"])
        self.load_own(saved["own"])

    def train(self, step: int, *, is_fatal: bool = False) -> None:
        loss = self.model(batch(self._seed, step, self._rank))
        self.optimizer.zero_grad()
        loss.backward()
        self.losses[step] = loss.detach()
        if is_fatal:
            say("killed", step)
            os.kill(os.getpid(), signal.SIGKILL)
        self.optimizer.step()

    def bits(self) -> torch.Tensor:
        moments = [value for state in self.optimizer.state.values() for value in state.values()]
        tensors = [self.losses, *self.model.state_dict().values(), *moments]
        return torch.cat([tensor.flatten() for tensor in tensors]).view(torch.int32)


def say(what: str, step: int = 0, *, when: float | None = None) -> None:
    said = Said(
        int(os.environ["TORCHELASTIC_RESTART_COUNT"]),
        int(os.environ["RANK"]),
        os.getpid(),
        what,
        step,
        time.monotonic() if when is None else when,
    )
    # One write: lines of two workers do not run into each other.
    os.write(1, json.dumps(dataclasses.asdict(said)).encode() + b"\n")


def main(folder: Path, width: int, seed: int) -> None:
    say("started", when=_started())
    say("ready")
    dist.init_process_group("gloo", init_method="transfuse://")
    rank, life = dist.get_rank(), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    job, keep, step = Job(rank, width, seed), None, FILE_STEP
    say("formed")
    file = folder / f"rank-{rank}.pt"
    if life < len(FATAL_STEPS):
        keep = transfuse.keep(job.state, load=job.load, rank_state=job.own, load_rank_state=job.load_own)
        step = keep.restore() or 0
        if step:
            say("restored", step)
    else:
        job.load_file(file)
        say("loaded", step)
    while step < STEPS:
        job.train(step, is_fatal=life < len(FATAL_STEPS) and rank == VICTIM and step == FATAL_STEPS[life])
        step += 1
        say("done", step - 1)
        if keep is not None:
            keep.commit(step)
            if step == FILE_STEP:
                job.save(file)
    undisturbed = Job(rank, width, seed)
    for number in range(STEPS):
        undisturbed.train(number)
    say("equal" if torch.equal(job.bits(), undisturbed.bits()) else "different")
    dist.destroy_process_group()


def _started() -> float:
    """When this process was started, as ``time.monotonic()`` counts."""
    ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
    age = time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
    return time.monotonic() - age


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
