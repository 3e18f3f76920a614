"""A training with Transformers' Trainer that is kept: the program of a worker under torchrun. It dies as planned.

``kept_transformers.py <plan>``, where the plan is a :class:`Plan` as JSON.
"""

from __future__ import annotations

import dataclasses
import json
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
from torch.utils.data import Dataset

from framework_runs import note
from kept_training import digest

__all__ = ["Plan"]


@dataclasses.dataclass(frozen=True)
class Plan:
    """What the workers of a job do."""

    directory: str
    ranks: int = 2
    #: Each death: the rank, the moment ("backward", "evaluate", "save", "trained") and the step at which it dies, or
    #: later.
    deaths: list[tuple[int, str, int]] = dataclasses.field(default_factory=list)
    arguments: dict[str, Any] = dataclasses.field(default_factory=lambda: {"num_train_epochs": 3})
    keep: dict[str, Any] = dataclasses.field(default_factory=dict)
    samples: int = 40


class Samples(Dataset[Any]):
    def __init__(self, count: int) -> None:
        self._x = torch.randint(0, 64, (count, 8), generator=torch.Generator().manual_seed(1))

    def __len__(self) -> int:
        return len(self._x)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"input_ids": self._x[index], "labels": self._x[index]}


def preload() -> None:
    """Import what every rank will import."""
    from transformers import GPT2LMHeadModel, Trainer  # noqa: F401

    import transfuse.integrations.transformers  # noqa: F401


def main(plan: Plan) -> None:
    from transformers import EarlyStoppingCallback, GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

    from transfuse.integrations.transformers import KeepCallback

    warnings.filterwarnings("ignore")
    rank = int(os.environ["RANK"])
    directory = pathlib.Path(plan.directory)
    done = len(list(directory.glob("death*")))
    death = plan.deaths[done] if done < len(plan.deaths) else None

    def die_at(moment: str, step: int) -> None:
        if death is not None and death[0] == rank and death[1] == moment and step >= death[2]:
            (directory / f"death{done}").touch()
            os.kill(os.getpid(), signal.SIGKILL)
            threading.Event().wait()

    class Noting(Trainer):  # type: ignore[misc]
        def training_step(self, *words: Any, **options: Any) -> Any:
            loss = super().training_step(*words, **options)
            batch, draws = words[1]["input_ids"].tolist(), [random.random(), float(np.random.rand())]
            note(directory, rank, step=[self.state.global_step, batch], loss=loss.item().hex(), draws=draws)
            die_at("backward", self.state.global_step)
            return loss

        def evaluate(self, *words: Any, **options: Any) -> Any:
            metrics = super().evaluate(*words, **options)
            note(directory, rank, evaluated=self.state.global_step, loss=float(metrics["eval_loss"]).hex())
            die_at("evaluate", self.state.global_step)
            return metrics

        def save_model(self, *words: Any, **options: Any) -> Any:
            die_at("save", self.state.global_step)
            return super().save_model(*words, **options)

    options = {
        "output_dir": plan.directory + "/out",
        "use_cpu": True,
        "per_device_train_batch_size": 2,
        "logging_steps": 3,
        "eval_strategy": "steps",
        "eval_steps": 4,
        "save_strategy": "no",
        "report_to": [],
        "disable_tqdm": True,
        "metric_for_best_model": "eval_loss",
        **plan.arguments,
    }
    arguments = TrainingArguments(**options)
    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config(vocab_size=64, n_positions=8, n_embd=16, n_layer=2, n_head=2))
    keep, stopping = KeepCallback(**plan.keep), EarlyStoppingCallback(early_stopping_patience=100)
    trainer = Noting(
        model=model,
        args=arguments,
        train_dataset=Samples(plan.samples),
        eval_dataset=Samples(6),
        callbacks=[keep, stopping],
    )
    note(directory, rank, start=done)
    result = trainer.train()
    die_at("trained", trainer.state.global_step)
    state = {"model": model.state_dict(), "optimizer": trainer.optimizer.state_dict()}
    history = [
        {key: value for key, value in one.items() if "runtime" not in key and "per_second" not in key}
        for one in trainer.state.log_history
    ]
    note(
        directory,
        rank,
        end=digest(state),
        restored=keep.restored,
        history=history,
        loss=result.training_loss.hex(),
        scheduler=trainer.lr_scheduler.state_dict()["_last_lr"],
        patience=stopping.early_stopping_patience_counter,
        steps=trainer.state.global_step,
        flos=trainer.state.total_flos,
        random=[random.random(), float(np.random.rand()), torch.rand(1).item()],
    )


if __name__ == "__main__":
    main(Plan(**json.loads(sys.argv[1])))
