"""Transformers: with ``Trainer(callbacks=[KeepCallback()])`` a run that torchrun restarts goes on from memory."""

from __future__ import annotations

import inspect
import json
import logging
import pathlib
import tempfile
from typing import Any

import torch
from torch.distributed.fsdp import FullyShardedDataParallel

import transfuse
from transfuse.integrations import check_options, missing, persistent_workers
from transfuse.integrations.rank_state import (
    Packer,
    is_sync_due,
    set_sync_due,
    unpack,
)

try:
    from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments
    from transformers.trainer_callback import ExportableState
except ImportError as error:
    raise missing("transformers", error) from error

__all__ = ["KeepCallback"]

logger = logging.getLogger("transfuse")

# TrainingArguments make the process group, mostly before a callback exists, and nobody is asked how.
transfuse.rendezvous_by_default()

#: What the Trainer counts beside its TrainerState. Its checkpoints do not have these, so after one of them the losses
#: that are logged next are those of fewer steps.
COUNTERS = (
    "_tr_loss",
    "_total_loss_scalar",
    "_globalstep_last_logged",
    "_initial_global_step",
    "_initial_num_input_tokens_seen",
    "current_flos",
)


class KeepCallback(TrainerCallback):  # type: ignore[misc]
    """Commits each optimizer step to the keeper of this host, and goes on from there when the job is started again.

    Kept are the model, optimizer, scheduler, scaler, the Trainer's state with its history of logs, other callbacks'
    states, and the random number generators of each rank. The place in the data follows from the step: the Trainer
    skips batches as it does for ``resume_from_checkpoint``. A step is committed when all that belongs to it is done,
    logging, evaluation and saving included: before the next step begins.

    Args:
        **options: those of :func:`transfuse.keep`, such as ``every``, ``run``, ``replicas``, ``timeout``.
    """

    def __init__(self, *given: object, **options: Any) -> None:
        check_options(given, options)
        transfuse.rendezvous_by_default()
        self._options = options
        self._packer = Packer()
        self._trainer: Any = None
        self._keep: transfuse.Keep | None = None
        self._kept: transfuse.KeptStep | None = None
        #: The newest step that was committed or restored.
        self._step = 0
        #: The random number generators with which a restored run goes on.
        self._generators: dict[str, Any] | None = None
        #: The names of the data that has been evaluated; None: the only one.
        self._evaluated: list[str | None] = []
        #: How many epochs this process has begun.
        self._epochs = 0
        #: The step that this run went on from; None if it began anew.
        self.restored: int | None = None

    # ------------------------------------------------------------------------------------------ the hooks

    def on_init_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Transformers does not pass the Trainer to its callbacks. Find it on the stack: its constructor calls this."""
        self._trainer = _calling_trainer()
        self._train = self._trainer.train
        self._trainer.train = self.train

    def train(self, resume_from_checkpoint: str | bool | None = None, *args: Any, **options: Any) -> Any:
        """In place of the Trainer's ``train``: it has to know the step before it makes its optimizer and loops."""
        trainer = self._trainer
        if trainer.is_deepspeed_enabled:
            raise transfuse.TransfuseError("KeepCallback cannot keep what DeepSpeed's engine holds")
        self._keep = keep = transfuse.keep(
            self._state, load=self._load, rank_state=self._own, load_rank_state=self._load_own, **self._options
        )
        try:
            self._step, self.restored, self._kept, self._epochs = 0, None, keep.look(), 0
            if self._kept is None:
                result = self._train(resume_from_checkpoint, *args, **options)
            else:
                result = self._go_on(*args, **options)
        except BaseException:
            # What is kept stays kept: torchrun may start the job again.
            keep.detach()
            raise
        keep.close()
        return result

    def _go_on(self, *args: Any, **options: Any) -> Any:
        """Train on, as from a checkpoint that has no weights: those come when everything is wrapped."""
        assert self._kept is not None
        assert self._keep is not None
        if self._kept.ranks != self._keep.world_size:
            raise transfuse.StateError(
                f"step {self._kept.step} was kept by {self._kept.ranks} ranks, and now there are "
                f"{self._keep.world_size}: places in the data do not fit. Start as many ranks as before, or go on from "
                "a checkpoint under another run="
            )
        with tempfile.TemporaryDirectory(prefix="transfuse-") as directory:
            state = unpack(self._kept.rank_states[self._keep.rank]["rank"])["state"]
            pathlib.Path(directory, "trainer_state.json").write_text(state)
            trainer, on_start = self._trainer, self._trainer.args.eval_on_start
            trainer.args.eval_on_start = False
            trainer._load_from_checkpoint = lambda *_, **__: None
            try:
                return self._train(directory, *args, **options)
            finally:
                del trainer._load_from_checkpoint
                trainer.args.eval_on_start = on_start

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Everything is wrapped now, and nothing has been trained."""
        if self._keep is None:
            raise transfuse.TransfuseError(
                "KeepCallback has to know the Trainer before train(): pass it as Trainer(callbacks=[KeepCallback()]), "
                "not with add_callback()"
            )
        if any(isinstance(module, FullyShardedDataParallel) for module in self._trainer.model_wrapped.modules()):
            raise transfuse.TransfuseError("KeepCallback cannot keep FSDP version 1. Set fsdp_config version 2")
        self._step = state.global_step
        expected = None if self._kept is None else self._kept.step
        # If there was nothing to look at, but steps have been kept, this raises: a run never begins anew by itself.
        self.restored = self._keep.restore()
        if self.restored != expected:
            raise transfuse.StateError(
                f"step {expected} was to be restored, and step {self.restored} was: the log says why. The loops are at "
                "another step. Start the job again"
            )
        self._kept = None
        for name in self._evaluated if args.dataloader_persistent_workers else ():
            persistent_workers.start(self._trainer.get_eval_dataloader(name))
        if self.restored is not None:
            logger.info("rank %d goes on after step %d, from the keeper's memory", self._keep.rank, self.restored)

    def on_epoch_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, train_dataloader: Any, **_: Any
    ) -> None:
        """The epoch in which a restored run goes on has a loader of its own. The next one needs the Trainer's."""
        self._epochs += 1
        if self.restored is not None and self._epochs > 1:
            persistent_workers.start(train_dataloader)

    def on_evaluate(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        data = self._trainer.eval_dataset
        self._evaluated = list(data) if isinstance(data, dict) else [None]

    def on_step_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """All that belongs to the last step is done, and the batches of the next one are there."""
        assert self._keep is not None
        if self._generators is not None:
            transfuse.RNG().load_state_dict(self._generators)
            self._generators = None
        elif state.global_step > self._step:
            self._keep.commit(state.global_step)
            self._step = state.global_step

    # ------------------------------------------------------------------------------------------- the state

    def _state(self) -> dict[str, Any]:
        return {"model": self._trainer.model.state_dict(), "optimizer": self._trainer.optimizer.state_dict()}

    def _load(self, state: dict[str, Any]) -> None:
        if not all(isinstance(value, torch.Tensor) for value in state["model"].values()):
            self._trainer.model.load_state_dict(state["model"])
        self._trainer.optimizer.load_state_dict(state["optimizer"])

    def _own(self) -> dict[str, Any]:
        trainer = self._trainer
        scaler = trainer.accelerator.scaler
        tree = {
            "state": json.dumps(vars(trainer.state)),
            "counters": {name: getattr(trainer, name) for name in COUNTERS if hasattr(trainer, name)},
            "scheduler": trainer.lr_scheduler.state_dict(),
            "scaler": None if scaler is None else scaler.state_dict(),
            "callbacks": [one.state()["attributes"] for one in self._others()],
            "evaluated": self._evaluated,
            "is_sync_due": is_sync_due(trainer.model_wrapped),
            "generators": transfuse.RNG().state_dict(),
        }
        return {"rank": self._packer.pack(tree)}

    def _load_own(self, own: dict[str, Any]) -> None:
        trainer, tree = self._trainer, unpack(own["rank"])
        trainer.lr_scheduler.load_state_dict(tree["scheduler"])
        if tree["scaler"] is not None:
            trainer.accelerator.scaler.load_state_dict(tree["scaler"])
        for name, value in tree["counters"].items():
            setattr(trainer, name, value)
        for one, attributes in zip(self._others(), tree["callbacks"], strict=True):
            for name, value in attributes.items():
                setattr(one, name, value)
        set_sync_due(trainer.model_wrapped, tree["is_sync_due"])
        self._evaluated, self._generators = tree["evaluated"], tree["generators"]

    def _others(self) -> list[Any]:
        """The callbacks that have a state."""
        return [one for one in self._trainer.callback_handler.callbacks if isinstance(one, ExportableState)]


def _calling_trainer() -> Any:
    frame = inspect.currentframe()
    while frame is not None:
        if isinstance(frame.f_locals.get("self"), Trainer):
            return frame.f_locals["self"]
        frame = frame.f_back
    raise transfuse.TransfuseError("KeepCallback was not called by a Trainer")
