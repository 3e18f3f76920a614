"""A training whose steps are saved: FSDP2 with BatchNorm, AdamW, a loader and random numbers, on any number of ranks.

``saved_training.py FOLDER NOTES STEPS PAUSE KIND`` is a worker under torchrun. With the kind "same" all ranks see the
same batch, and the number of ranks is a power of two: so the end does not depend on how many there are. With the kind
"own" each rank has batches, random numbers and statistics of its own, and so has its end.
"""

from __future__ import annotations

import hashlib
import json
import os
import pathlib
import random
import sys
import time
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import transfuse
from transfuse.testing.ranks import announce

__all__ = ["SAVE_EVERY", "train"]

SAVE_EVERY = 3
#: A save takes some tenths of a second: so it can be seen, and lost, under way.
RATE = 200e3


def build() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model = nn.Sequential(nn.Linear(16, 60), nn.BatchNorm1d(60), nn.ReLU(), nn.Dropout(0.1), nn.Linear(60, 1))
    for layer in (model[0], model[4], model):
        fully_shard(layer, mesh=mesh)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


def train(
    rank: int, folder: str, notes: str, steps: int, pause: float = 0.0, run: str | None = None, kind: str = "same"
) -> tuple[int | None, str]:
    """Train to the end. Returns the step that was restored, and a digest of all that the training has made."""
    torch.set_num_threads(1)
    model, optimizer = build()
    data = [torch.randn(16) for _ in range(60)]
    is_own = kind == "own"
    me, ranks = (rank, dist.get_world_size()) if is_own else (0, 1)
    loader = transfuse.Loader(data, 8, rank=me, ranks=ranks)  # type: ignore[arg-type]
    losses = torch.zeros(steps)
    parts = {"model": model, "optimizer": optimizer, "loader": loader, "losses": losses}
    state = {**parts, "rng": transfuse.RNG(shared=not is_own)}
    torch.manual_seed(1 + me)
    random.seed(1 + me)
    np.random.seed(1 + me)
    if not folder:
        return None, _train(rank, model, optimizer, loader, losses, notes, 0, steps, pause, None)
    keep = transfuse.keep(
        state, directory=folder, save_every=SAVE_EVERY, run=run, timeout=60, max_bytes_per_second=RATE
    )
    restored = keep.restore()
    found = None if restored is None else int(restored)
    with open(pathlib.Path(notes) / "starts", "a") as file:
        file.write(json.dumps({"rank": rank, "size": dist.get_world_size(), "restored": found}) + "\n")
    end = _train(rank, model, optimizer, loader, losses, notes, found or 0, steps, pause, keep)
    keep.close()
    return found, end


def _train(
    rank: int,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    loader: transfuse.Loader,
    losses: torch.Tensor,
    notes: str,
    step: int,
    steps: int,
    pause: float,
    keep: Any,
) -> str:
    batches = iter(loader)
    while step < steps:
        batch = next(batches)
        loss = (model(batch) - batch.sum(1, keepdim=True)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses[step] = loss.detach()
        step += 1
        if keep is not None:
            report = keep.commit(step)
            # Training waits for no slot; a job that wants its last step waits for one.
            while step == steps and report.outcome == "skipped":
                time.sleep(0.05)
                report = keep.commit(step)
        if rank == 0:
            (pathlib.Path(notes) / f"step {rank}").write_text(str(step))
        if "TORCHELASTIC_RUN_ID" not in os.environ:
            announce(f"step {step}")
        time.sleep(pause)
    found = [losses, *model.state_dict().values()]
    found += [value for some in optimizer.state.values() for value in some.values()]
    result = hashlib.sha256()
    for tensor in found:
        whole = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
        result.update(whole.detach().contiguous().numpy().tobytes())
    return result.hexdigest()


def main(folder: str, notes: str, steps: str, pause: str, kind: str) -> None:
    dist.init_process_group("gloo", init_method="transfuse://")
    rank = dist.get_rank()
    _, end = train(rank, folder, notes, int(steps), float(pause), kind=kind)
    (pathlib.Path(notes) / f"end {rank}").write_text(end)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
