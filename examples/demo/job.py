"""A worker: it trains, notices that another worker has died, and heals others or is healed."""

from __future__ import annotations

import logging
import math
import os
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import xxhash
from examples.demo.generation import Generation, GenerationOver, Parent
from examples.demo.model import Transformer, batch
from examples.demo.words import (
    Begun,
    Done,
    Finished,
    Formed,
    Go,
    Healed,
    Healing,
    Left,
    Loaded,
    Moving,
    Ready,
    Saved,
    Settings,
    Warned,
)
from torch.utils._pytree import keystr, tree_flatten_with_path

import transfuse
from transfuse.testing.ranks import hear, say

__all__ = ["Job", "size_of", "work"]

TIMEOUT = timedelta(seconds=20)
CPU = torch.device("cpu")
#: The step of a worker without a state: it has just been started, or a transfer into it has failed.
NOTHING = -1


def work(rank: int, settings: Settings, port: int) -> None:
    """A worker's main loop: one generation after another, until the parent ends the process."""
    parent = Parent(say, hear)
    logging.getLogger("transfuse").addHandler(_Warnings(parent))
    job = Job(rank, settings, parent)
    while True:
        parent.say(Ready())
        go = parent.order()
        try:
            if go.begin == "seed":
                job.begin()
            elif isinstance(go.begin, int):
                job.load(go.begin)
            generation = Generation(go.generation, rank, settings.workers, port, parent)
            parent.say(Formed(go.generation))
            job.heal(generation, go)
            while job.step < go.until:
                if rank == 0 and job.step in go.saves:
                    job.save()
                job.train(generation)
        except GenerationOver as over:
            parent.say(Left(go.generation, job.step, str(over)))
        else:
            parent.say(Finished(go.generation, job.digests()))


class _Warnings(logging.Handler):
    """Send warnings to the parent, not to stderr: the parent draws on that screen."""

    def __init__(self, parent: Parent) -> None:
        super().__init__(logging.WARNING)
        self._parent = parent

    def emit(self, record: logging.LogRecord) -> None:
        self._parent.say(Warned(record.getMessage().removeprefix("transfuse: ")))


class Job:
    """One worker's model and all that is needed to train it.

    ``rng`` holds the state of every rank's random number generator at the beginning of the step. The ranks exchange
    them along with the gradients: a restarted worker has to get its own back from another.
    """

    def __init__(self, rank: int, settings: Settings, parent: Parent) -> None:
        self.rank, self.settings, self.parent = rank, settings, parent
        # Random weights of a new process. Healing must overwrite all of them.
        self.build(int.from_bytes(os.urandom(4)))
        self.step = NOTHING

    def build(self, seed: int) -> None:
        torch.manual_seed(seed)
        self.model = Transformer(self.settings.width)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.2 / self.settings.width, weight_decay=0.1)
        # AdamW makes these in its first step. Here they exist from the beginning, so that a worker that has not trained
        # yet has the same leaves as any other, and memory for all of them to land in.
        for parameter in self.model.parameters():
            average, square = torch.zeros_like(parameter), torch.zeros_like(parameter)
            self.optimizer.state[parameter] = {"step": torch.tensor(0.0), "exp_avg": average, "exp_avg_sq": square}
        self.scheduler = torch.optim.lr_scheduler.LambdaLR(self.optimizer, self._pace)
        self.rng = torch.zeros(self.settings.workers, len(torch.get_rng_state()), dtype=torch.uint8)

    def _pace(self, step: int) -> float:
        """The learning rate: a short rise, then down to half along a cosine."""
        return min(1.0, (step + 1) / 5) * (0.75 + 0.25 * math.cos(math.pi * min(1.0, step / self.settings.steps)))

    def begin(self) -> None:
        """Make the same model on every rank, and a generator of its own for each rank."""
        self.build(self.settings.seed)
        for rank, row in enumerate(self.rng):
            row.copy_(torch.Generator().manual_seed(self.settings.seed * 1000 + rank).get_state())
        self.step = 0

    # ------------------------------------------------------------------------------------------------------- the state

    def state(self) -> dict[str, Any]:
        return {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "scheduler": self.scheduler.state_dict(),
            "rng": self.rng,
            "step": self.step,
        }

    def take(self, state: dict[str, Any]) -> None:
        """Take the received numbers. The tensors are in place already."""
        self.optimizer.load_state_dict(state["optimizer"])
        self.scheduler.load_state_dict(state["scheduler"])
        self.step = state["step"]

    def digests(self) -> dict[str, str]:
        leaves, _ = tree_flatten_with_path(self.state())
        return {keystr(path): _digest(leaf) for path, leaf in leaves}

    # --------------------------------------------------------------------------------------------------- the other way

    def file_of(self, step: int) -> Path:
        return self.settings.folder / f"step-{step}.pt"

    def save(self) -> None:
        """Save a file as one would without transfuse: a whole file or none."""
        started = time.monotonic()
        file = self.file_of(self.step)
        new = file.with_suffix(".new")
        try:
            with new.open("wb") as stream:
                torch.save(self.state(), stream)
                stream.flush()
                os.fsync(stream.fileno())
            new.replace(file)
        except (OSError, RuntimeError) as error:
            # After the error of a full disk torch raises errors of its own.
            cause = error.__context__ if isinstance(error.__context__, OSError) else error
            raise OSError(
                f"the state cannot be saved in {file.parent} ({cause}); set TMPDIR to a roomier place"
            ) from error
        self.parent.say(Saved(self.step, time.monotonic() - started, file.stat().st_size))

    def load(self, step: int) -> None:
        state = torch.load(self.file_of(step), weights_only=True)
        self.model.load_state_dict(state["model"])
        self.rng = state["rng"]
        self.take(state)
        self.parent.say(Loaded(self.step))

    # -------------------------------------------------------------------------------------------------------- the work

    def train(self, generation: Generation) -> None:
        """Do one step. This rank applies it if and only if everything that the ranks exchange has arrived here."""
        self.parent.say(Begun(self.step))
        # A copy: torch ignores where in its storage a view begins.
        torch.set_rng_state(self.rng[self.rank].clone())
        self.optimizer.zero_grad()
        loss = self.model(batch(self.settings.seed, self.step, self.rank))
        loss.backward()
        parameters = list(self.model.parameters())
        losses = torch.zeros(generation.size)
        losses[self.rank] = loss.detach()
        # New memory for every step: the memory of an abandoned sum belongs to the abandoned group.
        total = torch.cat([*(_gradient(parameter).flatten() for parameter in parameters), losses])
        rng = torch.zeros_like(self.rng)
        rng[self.rank] = torch.get_rng_state()
        generation.sum(total, rng)
        *gradients, losses = torch.split(total, [*(parameter.numel() for parameter in parameters), generation.size])
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient.view_as(parameter) / generation.size
        self.optimizer.step()
        self.scheduler.step()
        self.rng.copy_(rng)
        self.step += 1
        self.parent.say(Done(generation.number, self.step - 1, tuple(losses.tolist())))

    def heal(self, generation: Generation, go: Go) -> None:
        """Heal: the workers that have applied most steps are sources; all others receive from all of these at once."""
        steps = generation.gather(self.step)
        newest = max(steps)
        if newest == NOTHING:
            raise RuntimeError("no worker is left that has a state: too many were killed at once")
        sources = tuple(rank for rank, step in enumerate(steps) if step == newest)
        behind = [rank for rank, step in enumerate(steps) if step != newest]

        def show(progress: dict[int, transfuse.Progress]) -> None:
            total = sum(one.total_bytes or 0 for one in progress.values())
            self.parent.say(Moving(sum(one.bytes for one in progress.values()), total, sources))

        transport = transfuse.PGTransport(
            generation.group,
            TIMEOUT,
            CPU,
            self.state,
            strict=True,
            same_host=self.settings.same_host,
            max_bytes_per_second=go.max_bytes_per_second,
            progress=show if self.rank in behind else False,
        )
        try:
            if self.rank in behind:
                self.parent.say(Healing(newest, sources))
                self.step = NOTHING
                state = transport.recv_checkpoint(sources, step=newest)
                self.take(state)
                assert transport.report is not None
                self.parent.say(Healed(generation.number, newest, transport.report))
            elif behind:
                transport.send_checkpoint(behind, self.state(), step=newest)
        except transfuse.TransfuseError as error:
            # The next generation will try again.
            raise GenerationOver(str(error)) from error


def size_of(width: int) -> tuple[int, int]:
    """How many parameters a model of this width has, and how many bytes its state has: weights and two moments."""
    with torch.device("meta"):
        parameters = sum(parameter.numel() for parameter in Transformer(width).parameters())
    return parameters, 12 * parameters


def _gradient(parameter: torch.nn.Parameter) -> torch.Tensor:
    assert parameter.grad is not None
    return parameter.grad


def _digest(leaf: object) -> str:
    if not isinstance(leaf, torch.Tensor):
        return repr(leaf)
    raw = leaf.detach().contiguous().view(-1).view(torch.uint8).numpy()
    return f"{leaf.dtype} {tuple(leaf.shape)} {xxhash.xxh3_128_hexdigest(raw.data)}"
