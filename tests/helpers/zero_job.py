"""A DeepSpeed job with ZeRO-1 on CPUs, whose flat partitions are Blocks: it commits, or restores and compares.

``python -m torch.distributed.run --nproc-per-node N zero_job.py commit FILE`` trains two steps, commits, and saves the
whole state; ``… zero_job.py restore FILE``, on any number of ranks, restores and prints in what it differs.
"""

from __future__ import annotations

import os
import sys
from typing import Any

os.environ["DS_ACCELERATOR"] = "cpu"

import deepspeed
import torch
import torch.nn as nn
from deepspeed import comm
from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

import transfuse

CONFIG = {
    "train_micro_batch_size_per_gpu": 2,
    "gradient_accumulation_steps": 1,
    "bf16": {"enabled": True},
    "zero_optimization": {"stage": 1},
    "zero_allow_untested_optimizer": True,
    "zero_force_ds_cpu_optimizer": False,
}
MOMENTS = ("exp_avg", "exp_avg_sq")


class Job:
    def __init__(self) -> None:
        model = nn.Sequential(nn.Linear(16, 33), nn.ReLU(), nn.Linear(33, 5))
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        self.engine, self.optimizer, _, _ = deepspeed.initialize(model=model, optimizer=optimizer, config=CONFIG)

    def step(self, number: int) -> None:
        batch = torch.randn(2, 16, generator=torch.Generator().manual_seed(number)).bfloat16()
        loss = self.engine(batch).float().square().mean()
        self.engine.backward(loss)
        self.engine.step()

    def parameters(self) -> dict[str, Any]:
        return dict(self.engine.module.named_parameters())

    def flat(self, parameter: Any, key: str | None) -> transfuse.Block:
        """This rank's part of a flattened parameter's master or moment; an empty Block if it has none."""
        mapping = parameter._hp_mapping
        if mapping is None:
            return transfuse.Block(torch.empty(0), start=(0,), shape=(parameter.numel(),))
        part, place = mapping.get_hp_fragment(key).detach(), mapping.lp_fragment_address
        return transfuse.Block(part, start=(place.start,), shape=(parameter.numel(),))

    def state(self) -> dict[str, Any]:
        (inner, *_) = self.optimizer.state.values()
        return {
            "weights": {name: one.detach() for name, one in self.parameters().items()},
            "zero": {
                name: {key or "fp32": self.flat(one, key) for key in (None, *MOMENTS)}
                for name, one in self.parameters().items()
            },
            "step": float(inner["step"]),
        }

    def load(self, state: dict[str, Any]) -> None:
        for inner in self.optimizer.state.values():
            inner["step"] = torch.tensor(state["step"])

    def whole(self) -> dict[str, Any]:
        return {
            name: {
                "weight": one.detach().clone(),
                "fp32": safe_get_full_fp32_param(one),
                **{key: safe_get_full_optimizer_state(one, key) for key in MOMENTS},
            }
            for name, one in self.parameters().items()
        }


def main(mode: str, path: str) -> None:
    torch.set_num_threads(1)
    deepspeed.init_distributed(dist_backend="gloo", verbose=False)
    torch.manual_seed(0 if mode == "commit" else 99)
    job, rank = Job(), comm.get_rank()
    job.step(0)  # It makes the moments, so that there is something to receive into.
    keep = transfuse.keep(job.state, load=job.load, run="zero", timeout=60)
    step = keep.restore()
    if mode == "commit":
        job.step(1)
        job.step(2)
        report = keep.commit(3)
        whole = job.whole()
        if rank == 0:
            torch.save(whole, path)
        print(f"rank {rank} committed: {report is not None and report.outcome}\n", end="", flush=True)
        keep.detach()
        return
    whole, expected = job.whole(), torch.load(path)
    wrong = [(name, key) for name in expected for key, one in expected[name].items() if not one.equal(whole[name][key])]
    print(f"rank {rank} restored {step}, wrong: {wrong}\n", end="", flush=True)
    keep.close()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
