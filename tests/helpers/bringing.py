"""Both calls that bring a whole state to ranks that have none: ``heal``, and ``keep`` with a restart of all ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import transfuse
from keeping import Home, Job, home, threaded
from transfuse.testing.ranks import Ranks

__all__ = ["RANKS", "Bring", "Training", "bring", "fresh", "home", "threaded", "trained"]

RANKS = 2


class Training:
    """A model and its optimizer, as a job has them."""

    def __init__(self, layers: int, optimizer: Callable[..., Any] = torch.optim.AdamW, **options: Any) -> None:
        self.model = nn.Sequential(*(nn.Linear(3, 3) for _ in range(layers)))
        self.optimizer = optimizer(self.model.parameters(), **options)
        self.more: dict[str, Any] = {}
        self.loaded: list[Any] = []
        self.takes_optimizer = True

    def step(self) -> Training:
        self.model(torch.randn(4, 3)).square().sum().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return self

    def state(self) -> dict[str, Any]:
        return {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict(), **self.more}

    def load(self, state: dict[str, Any]) -> None:
        self.loaded.append(state)
        if self.takes_optimizer:
            self.optimizer.load_state_dict(state["optimizer"])

    def weights(self) -> list[list[float]]:
        return [parameter.flatten().tolist() for parameter in self.model.parameters()]


Bring = Callable[..., list[BaseException | None]]


def by_heal(before: list[Any], now: list[Any], load: bool, **options: Any) -> list[BaseException | None]:
    """Ranks below RANKS have the newest step, the others come back. The outcomes of the latter."""
    with Ranks(2 * RANKS) as ranks:

        def work(rank: int, pg: Any) -> int | None:
            one = [*before, *now][rank]
            step = 7 if rank < RANKS else None
            return transfuse.heal(
                one.state, step=step, load=one.load if load else None, group=pg, timeout=20, **options
            )

        outcomes = ranks.outcomes(work)
    errors = [outcome.error for outcome in outcomes]
    assert len({(type(error), str(error)) for error in errors}) == 1, errors
    return errors[RANKS:]


def by_keep(before: list[Any], now: list[Any], load: bool, **options: Any) -> list[BaseException | None]:
    with Job(RANKS) as job:
        job.start([one.state for one in before])
        assert job.commit(7) == ["committed"] * RANKS
    with Job(RANKS, **options) as job:
        job.start([one.state for one in now], [{"load": one.load} if load else {} for one in now])
        errors = job.errors(lambda keep: keep.restore())
    assert len({(type(error), str(error)) for error in errors}) == 1, errors
    return errors


@pytest.fixture(params=["heal", "keep"])
def bring(request: pytest.FixtureRequest, home: Home, threaded: None) -> Bring:
    """Both calls that bring a whole state: ``heal``, and ``keep`` with a restart of all ranks."""
    if request.param == "heal":
        return by_heal
    home.start()
    return by_keep


def trained(*args: Any, **options: Any) -> list[Training]:
    torch.manual_seed(1)
    one = Training(*args, **options).step()
    return [one] * RANKS


def fresh(*args: Any, **options: Any) -> list[Training]:
    torch.manual_seed(2)
    return [Training(*args, **options) for _ in range(RANKS)]
