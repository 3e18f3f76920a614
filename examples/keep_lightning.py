"""Lightning under torchrun: a worker is killed, torchrun starts all again, and the Trainer goes on from memory.

All that it takes is `callbacks=[KeepCallback()]`. In the end losses, weights and moments equal those of an undisturbed
run, bit for bit.

torchrun --nproc-per-node 2 --max-restarts 3 examples/keep_lightning.py
"""

import logging
import os
import signal
import warnings
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule, Trainer, seed_everything
from torch import Tensor, nn
from torch.utils.data import DataLoader

from transfuse.integrations.lightning import KeepCallback

EPOCHS, FATAL_STEP = 3, 9


class Model(LightningModule):  # type: ignore[misc]
    def __init__(self, *, mortal: bool) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(16, 64), nn.BatchNorm1d(64), nn.Dropout(0.1), nn.Linear(64, 1))
        self.losses: list[Tensor] = []
        self.mortal = mortal and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"

    def training_step(self, batch: Tensor) -> Tensor:
        loss: Tensor = (self.layers(batch) - batch.sum(1, keepdim=True)).square().mean()
        self.losses.append(loss.detach())
        return loss

    def on_after_backward(self) -> None:
        if self.mortal and self.global_rank == 1 and self.global_step == FATAL_STEP:
            os.kill(os.getpid(), signal.SIGKILL)

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def fit(*, kept: bool) -> tuple[Tensor, int]:
    """Train. Returns losses, weights and moments as bits, and how many steps this process has trained."""
    seed_everything(7, verbose=False)
    model = Model(mortal=kept)
    data: Any = DataLoader(list(torch.randn(96, 16)), batch_size=8, shuffle=True)  # type: ignore[arg-type]
    torch.manual_seed(int(os.environ["RANK"]))  # Dropout differs between the ranks.
    trainer = Trainer(
        accelerator="cpu",
        devices=int(os.environ["WORLD_SIZE"]),
        strategy="ddp",
        max_epochs=EPOCHS,
        callbacks=[KeepCallback()] if kept else [],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(model, data)
    moments = [value for state in trainer.optimizers[0].state.values() for value in state.values()]
    tensors = [torch.stack(model.losses[-3:]), *model.state_dict().values(), *moments]
    return torch.cat([tensor.flatten().double() for tensor in tensors]).view(torch.int64), len(model.losses)


def main() -> None:
    if "TORCHELASTIC_RESTART_COUNT" not in os.environ:
        raise SystemExit(
            "torchrun starts this: torchrun --nproc-per-node 2 --max-restarts 3 examples/keep_lightning.py"
        )
    warnings.filterwarnings("ignore")
    logging.getLogger("lightning").setLevel(logging.ERROR)
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    kept, trained = fit(kept=True)
    # The same training in the same processes, which nobody disturbs and nobody keeps.
    undisturbed, steps = fit(kept=False)
    print(f"rank {dist.get_rank()} trained {trained} of {steps} steps after the restart\n", end="", flush=True)
    equal = torch.tensor(torch.equal(kept, undisturbed))
    dist.all_reduce(equal, dist.ReduceOp.MIN)
    if not equal:
        raise SystemExit("other losses, weights or moments than in the undisturbed run")
    if dist.get_rank() == 0:
        print("kept: losses, weights and moments are those of the undisturbed run, bit for bit")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
