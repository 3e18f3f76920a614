"""Lightning: with ``Trainer(callbacks=[KeepCallback()])`` a run that torchrun restarts goes on from memory."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset

import transfuse
from transfuse.integrations import check_options, missing, persistent_workers
from transfuse.integrations.rank_state import (
    Packer,
    is_sync_due,
    set_sync_due,
    unpack,
)

try:
    from lightning.pytorch import Callback, LightningModule, Trainer
    from lightning.pytorch.strategies import DeepSpeedStrategy, FSDPStrategy
    from torchmetrics import Metric
except ImportError as error:
    raise missing("lightning", error) from error

__all__ = ["KeepCallback"]

logger = logging.getLogger("transfuse")


class KeepCallback(Callback):  # type: ignore[misc]
    """Commits each optimizer step to the keeper of this host, and goes on from there when the job is started again.

    Kept are the model, optimizers, schedulers, the precision plug-in (scaler), the progress of loops, the place in the
    data, other callbacks' and the data module's states, what is being averaged over the epoch, and the random number
    generators of each rank. A step is committed when all that belongs to it is done, validation included: before the
    next batch is fetched.

    Args:
        **options: those of :func:`transfuse.keep`, such as ``every``, ``run``, ``replicas``, ``timeout``.
    """

    def __init__(self, *given: object, **options: Any) -> None:
        check_options(given, options)
        # This comes before Lightning makes the process group, and Lightning does not ask how.
        transfuse.rendezvous_by_default()
        self._options = options
        self._packer = Packer()
        self._keep: transfuse.Keep | None = None
        self._trainer: Trainer | None = None
        #: The newest step that was committed or restored.
        self._step = 0
        #: What the strategy does with a data loader; None while it is asked itself.
        self._process_dataloader: Callable[[object], object] | None = None
        #: The state that is being committed.
        self._taken: dict[str, Any] | None = None
        #: The random number generators with which a restored run goes on.
        self._generators: dict[str, Any] | None = None
        #: What had been logged in the epoch that was restored, by key.
        self._logged: dict[str, Any] = {}
        #: Whether there has been a validation.
        self._validated = False
        #: The step that this run went on from; None if it began anew.
        self.restored: int | None = None

    # ------------------------------------------------------------------------------------------ the hooks

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Everything is wrapped now, and nothing has been trained."""
        if isinstance(trainer.strategy, FSDPStrategy | DeepSpeedStrategy):
            raise transfuse.TransfuseError(
                f"KeepCallback cannot keep what {type(trainer.strategy).__name__} holds. Use ModelParallelStrategy"
            )
        self._trainer = trainer
        self._keep = transfuse.keep(
            self._state, load=self._load, rank_state=self._own, load_rank_state=self._load_own, **self._options
        )
        self.restored, self._step = None, trainer.global_step
        found = self._keep.restore()
        self._process_dataloader = trainer.strategy.process_dataloader
        trainer.strategy.process_dataloader = self._wrap
        if found is None:
            return
        if self.restored is None:
            raise transfuse.StateError(
                f"step {found} was kept by {len(self._keep.rank_states)} ranks, and now there are "
                f"{trainer.world_size}: places in the data do not fit. Start as many ranks as before, or go on from a "
                "checkpoint under another run="
            )
        logger.info("rank %d goes on after step %d, from the keeper's memory", trainer.global_rank, found)
        self._forget_checkpoint(trainer)

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._validated = True

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._add_logged()
        self._logged = {}
        # Lightning leaves ReduceLROnPlateau out at the end of an epoch that was resumed, because its checkpoints do not
        # have what was logged before. Here it is, unless it was a checkpoint that the run went on from.
        if self.restored is not None:
            trainer.fit_loop._restarting = False

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if self._keep is not None:
            self._keep.close()
            self._leave(trainer)

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """What is kept stays kept: torchrun may start the job again."""
        if self._keep is not None:
            self._keep.detach()
            self._leave(trainer)

    def _leave(self, trainer: Trainer) -> None:
        if self._process_dataloader is not None:
            trainer.strategy.process_dataloader = self._process_dataloader
        self._keep = self._process_dataloader = None

    def _forget_checkpoint(self, trainer: Trainer) -> None:
        """The keeper's step is newer than what ``fit(ckpt_path=...)`` has read, and would now load."""
        if not trainer.ckpt_path:
            return
        if trainer.strategy.restore_checkpoint_after_setup:
            raise transfuse.StateError(
                f"fit(ckpt_path={trainer.ckpt_path!r}) would overwrite step {self.restored}, which the keeper holds: "
                f"{type(trainer.strategy).__name__} loads checkpoints last. Leave ckpt_path out when the job restarts "
                "(TORCHELASTIC_RESTART_COUNT)"
            )
        trainer._checkpoint_connector._loaded_checkpoint = {}

    # ------------------------------------------------------------------------------------------- the state

    def _state(self) -> dict[str, Any]:
        assert self._trainer is not None
        return {
            "state_dict": self._trainer.lightning_module.state_dict(),
            "optimizer_states": [optimizer.state_dict() for optimizer in self._trainer.optimizers],
        }

    def _load(self, state: dict[str, Any]) -> None:
        assert self._trainer is not None
        if not all(isinstance(value, torch.Tensor) for value in state["state_dict"].values()):
            self._trainer.lightning_module.load_state_dict(state["state_dict"])
        for optimizer, found in zip(self._trainer.optimizers, state["optimizer_states"], strict=True):
            optimizer.load_state_dict(found)

    def _own(self) -> dict[str, Any]:
        """What Lightning's checkpoints have beside weights and moments, and what they do not have."""
        trainer = self._trainer
        assert trainer is not None
        module, data = trainer.lightning_module, trainer.datamodule
        checkpoint: dict[str, Any] = {
            "epoch": trainer.current_epoch,
            "global_step": trainer.global_step,
            "loops": trainer.fit_loop.state_dict(),
            "callbacks": {one.state_key: state for one in self._others(trainer) if (state := one.state_dict())},
            "lr_schedulers": [config.scheduler.state_dict() for config in trainer.lr_scheduler_configs],
            **(self._taken or self._state()),
        }
        trainer.precision_plugin.on_save_checkpoint(checkpoint)
        for one in self._others(trainer):
            one.on_save_checkpoint(trainer, module, checkpoint)
        module.on_save_checkpoint(checkpoint)
        del checkpoint["state_dict"], checkpoint["optimizer_states"]
        tree = {
            "checkpoint": checkpoint,
            "precision": trainer.precision_plugin.state_dict(),
            "data": None if data is None else data.state_dict(),
            "logged": _logged(trainer),
            "metrics": {name: _metric_state(metric) for name, metric in _metrics(module)},
            "validated": self._validated,
            "is_sync_due": is_sync_due(trainer.strategy.model),
            "generators": transfuse.RNG().state_dict(),
        }
        return {"rank": self._packer.pack(tree)}

    def _load_own(self, own: dict[str, Any]) -> None:
        trainer = self._trainer
        assert trainer is not None
        module, tree = trainer.lightning_module, unpack(own["rank"])
        checkpoint = {**tree["checkpoint"], **self._state()}
        module.on_load_checkpoint(checkpoint)
        for one in self._others(trainer):
            one.on_load_checkpoint(trainer, module, checkpoint)
            if one.state_key in checkpoint["callbacks"]:
                one.load_state_dict(checkpoint["callbacks"][one.state_key])
        if trainer.datamodule is not None:
            trainer.datamodule.load_state_dict(tree["data"])
        for config, state in zip(trainer.lr_scheduler_configs, checkpoint["lr_schedulers"], strict=True):
            config.scheduler.load_state_dict(state)
        trainer.precision_plugin.on_load_checkpoint(checkpoint)
        trainer.precision_plugin.load_state_dict(tree["precision"])
        trainer.fit_loop.load_state_dict(checkpoint["loops"])
        for name, metric in _metrics(module):
            _set_metric_state(metric, tree["metrics"][name])
        set_sync_due(trainer.strategy.model, tree["is_sync_due"])
        self._validated = tree["validated"]
        self._logged = tree["logged"]
        self._generators = tree["generators"]
        self.restored = self._step = checkpoint["global_step"]

    def _others(self, trainer: Trainer) -> list[Callback]:
        return [one for one in trainer.callbacks if one is not self]

    # ------------------------------------------------------------------------------------------- the data

    def _wrap(self, loader: object) -> object:
        """Called by Lightning with each data loader."""
        assert self._trainer is not None
        assert self._process_dataloader is not None
        loader = self._process_dataloader(loader)
        if not self._trainer.training:
            if self.restored is not None and self._validated:
                persistent_workers.start(loader)
            return loader
        return _KeptLoader(loader, self._before_fetch, self._count, self._take_generators)

    def _before_fetch(self) -> None:
        """All that belongs to the last batch is done."""
        trainer, keep = self._trainer, self._keep
        assert trainer is not None
        self._add_logged()
        if keep is not None and trainer.global_step > self._step:
            self._taken = self._state()
            try:
                keep.commit(trainer.global_step, state=self._taken)
            finally:
                self._taken = None
            # With several loaders, only the first that is asked commits: none of them has gone on yet.
            self._step = trainer.global_step

    def _count(self) -> int:
        """How many batches of this epoch have been trained on."""
        assert self._trainer is not None
        return int(self._trainer.fit_loop.epoch_loop.batch_progress.current.completed)

    def _take_generators(self) -> dict[str, Any] | None:
        """The random number generators with which the run goes on, once."""
        found, self._generators = self._generators, None
        return found

    def _add_logged(self) -> None:
        """Add what had been logged in this epoch before the restart to what has been logged since."""
        if not self._logged:
            return
        assert self._trainer is not None
        results = self._trainer.fit_loop.epoch_loop._results
        for key in [key for key in self._logged if key in results]:
            metric, (value, count) = results[key], self._logged.pop(key)
            if metric.meta.is_max_reduction or metric.meta.is_min_reduction:
                metric.value = metric.meta.reduce_fx(value, metric.value)
            else:
                metric.value = value + metric.value
                if count is not None:
                    metric.cumulated_batch_size = count + metric.cumulated_batch_size


def _logged(trainer: Trainer) -> dict[str, Any]:
    """The running sums of ``self.log(..., on_epoch=True)``, which Lightning's checkpoints do not have."""
    found = {}
    for key, metric in trainer.fit_loop.epoch_loop._results.items():
        if metric.is_tensor and metric.meta.on_epoch and not metric.has_reset:
            found[key] = metric.value, getattr(metric, "cumulated_batch_size", None)
    return found


def _metrics(module: LightningModule) -> list[tuple[str, Metric]]:
    return [(name, one) for name, one in module.named_modules() if isinstance(one, Metric)]


def _metric_state(metric: Metric) -> dict[str, Any]:
    return {"count": metric._update_count, "state": dict(metric.metric_state)}


def _set_metric_state(metric: Metric, kept: dict[str, Any]) -> None:
    metric._update_count = kept["count"]
    for name, value in kept["state"].items():
        setattr(metric, name, value)


class _KeptLoader:
    """A data loader that tells before each fetch, and that goes on where it was.

    A loader draws random numbers at the beginning of an epoch. What the generators were then is part of its state: a
    restarted loader draws the same, and leaves out the batches that were trained on without reading them.
    """

    _NAMES = ("_loader", "_before", "_count", "_generators", "_start", "_resume", "_begun", "_is_stateful")

    def __init__(
        self,
        loader: Any,
        before: Callable[[], None],
        count: Callable[[], int],
        take_generators: Callable[[], dict[str, Any] | None],
    ) -> None:
        self._loader, self._before, self._count, self._generators = loader, before, count, take_generators
        self._is_stateful = hasattr(loader, "state_dict") and hasattr(loader, "load_state_dict")
        #: The random number generators when the epoch's iterator was made.
        self._start: dict[str, Any] | None = None
        self._resume: dict[str, Any] | None = None
        #: How many epochs have begun.
        self._begun = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in self._NAMES:
            object.__setattr__(self, name, value)
        else:
            setattr(self._loader, name, value)

    def __len__(self) -> int:
        return len(self._loader)

    def state_dict(self) -> dict[str, Any]:
        inner = self._loader.state_dict() if self._is_stateful else None
        return {"start": self._start, "next": self._count(), "inner": inner, "begun": self._begun}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._resume = state
        self._begun = state["begun"] - (state["start"] is not None)
        if self._is_stateful and state["inner"] is not None:
            self._loader.load_state_dict(state["inner"])

    def __iter__(self) -> Iterator[Any]:
        self._start = None
        # The first fetch makes the iterator: only then the sampler knows which epoch it is.
        return _Batches(self)

    def begin(self) -> Iterator[Any]:
        """Make the iterator of this epoch."""
        resume, self._resume = self._resume, None
        self._begun += 1
        if resume is None or resume["start"] is None:
            self._go_on()
            self._start = self._all_generators()
            return self._iterate(self._loader)
        self._set_all_generators(resume["start"])
        self._start = resume["start"]
        skipped = 0 if self._is_stateful else resume["next"]
        batches: Iterator[Any]
        loader: Any = self._loader
        if skipped and isinstance(loader, DataLoader) and not isinstance(loader.dataset, IterableDataset):
            rest = _Rest(loader.batch_sampler if loader.batch_sampler is not None else loader.sampler, skipped)
            loader = copy.copy(loader)
            name = "batch_sampler" if loader.batch_sampler is not None else "sampler"
            object.__setattr__(loader, name, rest)
            batches = self._iterate(loader)
            rest.begin()
        else:
            batches = self._iterate(loader)
            for _ in range(skipped):
                next(batches)
        self._go_on()
        return batches

    def _iterate(self, loader: Any) -> Iterator[Any]:
        if self._begun > 1:
            persistent_workers.start(loader)
        return iter(loader)

    def _go_on(self) -> None:
        found = self._generators()
        if found is not None:
            transfuse.RNG().load_state_dict(found)

    def _all_generators(self) -> dict[str, Any]:
        """Those of the process, and those that the loader and its sampler were given."""
        return {
            **transfuse.RNG().state_dict(),
            "own": [one.get_state() for one in self._own_generators()],
        }

    def _set_all_generators(self, states: dict[str, Any]) -> None:
        transfuse.RNG().load_state_dict(states)
        for one, state in zip(self._own_generators(), states["own"], strict=True):
            one.set_state(state)

    def _own_generators(self) -> list[torch.Generator]:
        batch_sampler = getattr(self._loader, "batch_sampler", None)
        owners = self._loader, getattr(self._loader, "sampler", None), getattr(batch_sampler, "sampler", None)
        found = [getattr(owner, "generator", None) for owner in owners]
        return list({id(one): one for one in found if isinstance(one, torch.Generator)}.values())


class _Batches:
    """One epoch of a :class:`_KeptLoader`."""

    def __init__(self, loader: _KeptLoader) -> None:
        self._loader = loader
        self._batches: Iterator[Any] | None = None

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        self._loader._before()
        if self._batches is None:
            self._batches = self._loader.begin()
        return next(self._batches)


class _Rest:
    """What a sampler yields after its first ``skipped`` items."""

    def __init__(self, sampler: Any, skipped: int) -> None:
        self._sampler, self._skipped = sampler, skipped
        self._rest: Iterator[Any] | None = None

    def __len__(self) -> int:
        return max(len(self._sampler) - self._skipped, 0)

    def begin(self) -> Iterator[Any]:
        if self._rest is None:
            rest: Iterator[Any] = iter(self._sampler)
            for _ in range(self._skipped):
                next(rest, None)
            self._rest = rest
        return self._rest

    def __iter__(self) -> Iterator[Any]:
        # Not before the first index is asked for: a data loader draws its own random number first.
        yield from self.begin()
