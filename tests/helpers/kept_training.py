"""A training that is kept: the program of a worker under torchrun. It dies as planned, and notes what it has seen.

``kept_training.py <plan>``, where the plan is a :class:`Plan` as JSON.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import pathlib
import random
import signal
import sys
import threading
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

import transfuse
from transfuse._memory import blocks
from transfuse._wire.roll_call import Agreement

__all__ = ["MOMENTS", "Plan", "digest"]

#: How long anything may take.
SECONDS = 60.0
#: When a rank may die. "late" is a number of milliseconds after the job has begun to train.
MOMENTS = ("forward", "step", "commit", "committed", "restore", "late")


@dataclasses.dataclass(frozen=True)
class Plan:
    """What the workers of a job do."""

    directory: str
    kind: str = "ddp"
    steps: int = 8
    #: Each death: the rank, the moment, and the step at which it dies or later.
    deaths: list[tuple[int, str, int]] = dataclasses.field(default_factory=list)
    close: bool = True
    overlap: bool = False
    #: Stop after this number of steps, without close().
    until: int | None = None
    linger: float = 600.0


class Worker:
    """Trains, dies as planned, and notes what it has seen."""

    def __init__(self, plan: Plan) -> None:
        self.plan, self.rank = plan, int(os.environ["RANK"])
        self.directory = pathlib.Path(plan.directory)
        done = len(list(self.directory.glob("death*")))
        self.number = done
        death = plan.deaths[done] if done < len(plan.deaths) else None
        self.death = death if death is not None and death[0] == self.rank else None

    def die_at(self, moment: str, step: int) -> None:
        if self.death is not None and self.death[1] == moment and step >= self.death[2]:
            self.die()

    def die(self) -> None:
        (self.directory / f"death{self.number}").touch()
        os.kill(os.getpid(), signal.SIGKILL)
        threading.Event().wait()

    def note(self, **what: Any) -> None:
        with open(self.directory / f"rank{self.rank}", "a") as file:
            file.write(json.dumps(what) + "\n")

    def prepare(self) -> None:
        """Die in the middle of a copy, or of a restore, if that is planned."""
        if self.death is None:
            return
        run, gather, moment = blocks.run, Agreement.gather, self.death[1]
        chance = random.Random(self.number)

        def run_and_die(tasks: Any, workers: int | None = None) -> None:
            if moment == "commit" and self.committing >= self.death[2]:  # type: ignore[index]
                run(tasks[: chance.randrange(len(tasks) + 1)], workers)
                self.die()
            run(tasks, workers)

        at = chance.randrange(4)

        def gather_and_die(agreement: Any, data: bytes, what: str) -> list[bytes]:
            nonlocal at
            if moment == "restore" and self.restoring:
                at -= 1
                if at < 0:
                    self.die()
            return gather(agreement, data, what)

        blocks.run = run_and_die
        Agreement.gather = gather_and_die  # type: ignore[assignment, method-assign]

    committing = -1
    restoring = False

    def run(self) -> None:
        plan = self.plan
        dist.init_process_group("gloo", init_method="transfuse://")
        model, optimizer, train = BUILD[plan.kind]()
        self.prepare()
        keep = transfuse.keep(
            lambda: {"model": model.state_dict(), "optimizer": optimizer.state_dict()},
            load=lambda state: optimizer.load_state_dict(state["optimizer"]),
            rank_state=lambda: {"rng": torch.get_rng_state()},
            load_rank_state=lambda own: torch.set_rng_state(own["rng"].clone()),
            timeout=SECONDS,
            linger=plan.linger,
            verify=True,
        )
        self.restoring = True
        found = keep.restore()
        self.restoring = False
        if self.death is not None and self.death[1] == "restore":
            self.die()  # There was nothing to restore, or it has taken fewer rounds than thought.
        self.note(restored=found)
        step = found or 0
        if found is None:
            torch.manual_seed(100 + self.rank)
        elif self.rank not in keep.rank_states:
            torch.manual_seed(1000 + self.rank)
        if self.death is not None and self.death[1] == "late":
            threading.Timer(self.death[2] / 1000, self.die).start()
        end = plan.steps if plan.until is None else plan.until
        while step < end:
            optimizer.zero_grad()
            loss = train()
            self.die_at("forward", step)
            loss.backward()
            with keep.mutating():
                if self.death is not None and self.death[1] == "step" and step >= self.death[2]:
                    # In the middle of the optimizer's step: some parameters have changed.
                    for parameter in list(model.parameters())[:2]:
                        parameter.data.add_(1)
                    self.die()
                optimizer.step()
            step += 1
            self.committing = step
            report = keep.commit(step, wait=not plan.overlap)
            self.note(step=step, outcome=None if report is None or plan.overlap else report.outcome)
            self.die_at("committed", step)
        self.note(end=digest({"model": model.state_dict(), "optimizer": optimizer.state_dict()}), step=step)
        if plan.close:
            keep.close()
        dist.barrier()
        if not plan.close:
            keep.detach()
        dist.destroy_process_group()


def build_ddp() -> Any:
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Linear(16, 64),
        torch.nn.BatchNorm1d(64),
        torch.nn.ReLU(),
        torch.nn.Linear(64, 600),
        torch.nn.Linear(600, 1),
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    wrapped = torch.nn.parallel.DistributedDataParallel(model, broadcast_buffers=False)
    return model, optimizer, lambda: wrapped(torch.randn(8, 16)).square().mean()


def build_fsdp() -> Any:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(0)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model = torch.nn.Sequential(torch.nn.Linear(16, 63), torch.nn.ReLU(), torch.nn.Linear(63, 1))
    for layer in (model[0], model[2], model):
        fully_shard(layer, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    return model, optimizer, lambda: model(torch.randn(8, 16)).square().mean()


BUILD: dict[str, Callable[[], Any]] = {"ddp": build_ddp, "fsdp": build_fsdp}


def digest(tree: Any) -> str:
    """An oracle of our own: all bytes of a state, in order."""
    result = hashlib.sha256()

    def visit(one: Any) -> None:
        if isinstance(one, torch.Tensor):
            whole = one.full_tensor() if hasattr(one, "full_tensor") else one
            result.update(f"{whole.dtype}{tuple(whole.shape)}".encode())
            result.update(whole.detach().contiguous().numpy().tobytes())
        elif isinstance(one, dict):
            for key, value in one.items():
                result.update(repr(key).encode())
                visit(value)
        elif isinstance(one, list | tuple):
            for value in one:
                visit(value)
        else:
            result.update(repr(one).encode())

    visit(tree)
    return result.hexdigest()


if __name__ == "__main__":
    Worker(Plan(**json.loads(sys.argv[1]))).run()
