"""A Lightning training that is kept: the program of a worker under torchrun. It dies as planned.

``kept_lightning.py <plan>``, where the plan is a :class:`Plan` as JSON.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import pathlib
import random
import signal
import sys
import threading
import warnings
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from framework_runs import note
from kept_training import digest

__all__ = ["Plan"]


@dataclasses.dataclass(frozen=True)
class Plan:
    """What the workers of a job do."""

    directory: str
    strategy: str = "auto"
    ranks: int = 2
    #: Each death: the rank, the moment ("backward", "validate", "epoch_end", "fitted") and the batch at which it dies,
    #: or later.
    deaths: list[tuple[int, str, int]] = dataclasses.field(default_factory=list)
    trainer: dict[str, Any] = dataclasses.field(default_factory=lambda: {"max_epochs": 3})
    keep: dict[str, Any] = dataclasses.field(default_factory=dict)
    workers: int = 0
    #: Whether the loaders' processes stay from epoch to epoch.
    persistent: bool = False
    #: Whether the module calls backward and the optimizer itself.
    manual: bool = False
    samples: int = 40
    #: Whether the job writes checkpoints, too, and asks for the last one at each start.
    checkpoints: bool = False


class Samples(Dataset[Any]):
    def __init__(self, count: int, noisy: bool) -> None:
        self._x = torch.randn(count, 8, generator=torch.Generator().manual_seed(1))
        self._noisy = noisy

    def __len__(self) -> int:
        return len(self._x)

    def __getitem__(self, index: int) -> Tensor:
        if not self._noisy:
            return self._x[index]
        # All three generators of the process take part.
        return self._x[index] + torch.randn(8) * random.random() * float(np.random.rand())


def preload() -> None:
    """Import what every rank will import."""
    import transfuse.integrations.lightning  # noqa: F401


def main(plan: Plan) -> None:
    from lightning.pytorch import LightningModule, Trainer, seed_everything
    from lightning.pytorch.callbacks import Callback, ModelCheckpoint
    from torchmetrics import MeanMetric

    from transfuse.integrations.lightning import KeepCallback

    warnings.filterwarnings("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    rank = int(os.environ["RANK"])
    directory = pathlib.Path(plan.directory)
    done = len(list(directory.glob("death*")))
    death = plan.deaths[done] if done < len(plan.deaths) else None

    def die_at(moment: str, batch: int) -> None:
        if death is not None and death[0] == rank and death[1] == moment and batch >= death[2]:
            (directory / f"death{done}").touch()
            os.kill(os.getpid(), signal.SIGKILL)
            threading.Event().wait()

    class Module(LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = not plan.manual
            normal = [] if plan.strategy == "fsdp2" else [torch.nn.BatchNorm1d(16)]
            self.layers = torch.nn.Sequential(
                torch.nn.Linear(8, 16), *normal, torch.nn.Dropout(0.2), torch.nn.Linear(16, 1)
            )
            self.average = torch.zeros(1)
            self.mean = MeanMetric(sync_on_compute=False)

        def configure_model(self) -> None:
            if plan.strategy == "fsdp2":
                from torch.distributed.fsdp import fully_shard

                assert self.device_mesh is not None
                fully_shard(self.layers, mesh=self.device_mesh["data_parallel"])

        def training_step(self, batch: Tensor, index: int) -> Tensor:
            loss: Tensor = (self.layers(batch) - batch.sum(1, keepdim=True)).square().mean()
            self.mean(loss.detach())
            self.log("loss", loss, on_epoch=True, on_step=True)
            note(directory, rank, batch=self.trainer.fit_loop.total_batch_idx, loss=float(loss).hex())
            if plan.manual:
                optimizer: Any = self.optimizers()
                optimizer.zero_grad()
                self.manual_backward(loss)
                optimizer.step()
            return loss

        def on_after_backward(self) -> None:
            die_at("backward", self.trainer.fit_loop.total_batch_idx)

        def on_train_batch_end(self, *_: Any) -> None:
            # A change of state after the optimizer's step, and after all callbacks.
            self.average = self.average * 0.9 + torch.rand(1)

        def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
            checkpoint["average"] = self.average

        def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
            self.average = checkpoint["average"]

        def validation_step(self, batch: Tensor, index: int) -> None:
            loss = self.layers(batch).square().mean()
            self.log("validation", loss, sync_dist=True)
            die_at("validate", self.trainer.fit_loop.total_batch_idx)

        def on_train_epoch_end(self) -> None:
            die_at("epoch_end", self.trainer.fit_loop.total_batch_idx)

        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
            plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.9, patience=0)
            return {
                "optimizer": optimizer,
                "lr_scheduler": {"scheduler": plateau, "monitor": "loss_epoch", "interval": "epoch"},
            }

    class Counter(Callback):  # type: ignore[misc]
        """A callback with a state of its own."""

        counts = 0

        def on_train_batch_end(self, *_: Any) -> None:
            self.counts += 1

        def on_validation_end(self, trainer: Any, module: Any) -> None:
            if not trainer.sanity_checking:
                value = trainer.callback_metrics["validation"].item().hex()
                note(directory, rank, validated=trainer.fit_loop.total_batch_idx, loss=value)

        def on_train_epoch_end(self, trainer: Any, module: Any) -> None:
            note(directory, rank, epoch=trainer.current_epoch)

        def state_dict(self) -> dict[str, Any]:
            return {"counts": self.counts}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            self.counts = state["counts"]

    class Accuracy(Callback):  # type: ignore[misc]
        """Notes what a metric of torchmetrics has averaged over an epoch."""

        def on_train_epoch_end(self, trainer: Any, module: Any) -> None:
            note(directory, rank, averaged=trainer.current_epoch, value=float(module.mean.compute()).hex())
            module.mean.reset()

    seed_everything(5 + rank, verbose=False)
    strategy: Any = plan.strategy
    if plan.strategy == "fsdp2":
        from lightning.pytorch.strategies import ModelParallelStrategy

        strategy = ModelParallelStrategy(data_parallel_size=plan.ranks, tensor_parallel_size=1)
    keep, counter = KeepCallback(**plan.keep), Counter()
    callbacks = [keep, counter, Accuracy()]
    if plan.checkpoints:
        path = directory / "checkpoints"
        callbacks.append(
            ModelCheckpoint(path, every_n_train_steps=3, save_last=True, monitor="loss_step", save_top_k=2)
        )
    trainer = Trainer(
        accelerator="cpu",
        devices=plan.ranks,
        strategy=strategy,
        callbacks=callbacks,
        logger=False,
        enable_checkpointing=plan.checkpoints,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=plan.directory,
        **plan.trainer,
    )
    module = Module()
    noisy = plan.workers == 0
    processes: Any = {"num_workers": plan.workers, "persistent_workers": plan.persistent}
    loader = DataLoader(Samples(plan.samples, noisy), batch_size=4, shuffle=True, **processes)
    note(directory, rank, start=done)
    validation = DataLoader(Samples(8, False), batch_size=4, **(processes if plan.persistent else {}))
    trainer.fit(module, loader, validation, ckpt_path="last" if plan.checkpoints else None)
    die_at("fitted", trainer.fit_loop.total_batch_idx)
    state = {"model": module.state_dict(), "optimizer": trainer.optimizers[0].state_dict()}
    note(
        directory,
        rank,
        end=digest(state),
        restored=keep.restored,
        counts=counter.counts,
        average=float(module.average).hex(),
        loss=trainer.callback_metrics["loss_epoch"].item().hex(),
        rates=[group["lr"] for group in trainer.optimizers[0].param_groups],
        steps=trainer.global_step,
        epoch=trainer.current_epoch,
        random=[random.random(), float(np.random.rand()), torch.rand(1).item()],
    )


if __name__ == "__main__":
    main(Plan(**json.loads(sys.argv[1])))
