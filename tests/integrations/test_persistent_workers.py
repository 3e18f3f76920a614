"""Loaders whose processes stay, started again in a later epoch: the same random numbers, and the same order."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from transfuse.integrations import persistent_workers


def make(**options: Any) -> DataLoader[Any]:
    # Not a fork of pytest's own process, where a lock may be held for ever.
    context: Any = {"num_workers": 1, "persistent_workers": True, "multiprocessing_context": "forkserver"}
    return DataLoader(TensorDataset(torch.arange(6)), shuffle=True, **context, **options)


def epoch(loader: DataLoader[Any]) -> list[Any]:
    """What an epoch reads, and a number that is drawn after it."""
    return [[batch.tolist() for (batch,) in loader], torch.rand(1).item()]


@pytest.mark.parametrize("batch_size", [2, None])
def test_the_second_epoch_is_as_if_the_first_had_been(batch_size: int | None) -> None:
    torch.manual_seed(3)
    undisturbed = make(batch_size=batch_size)
    epoch(undisturbed)
    state = torch.get_rng_state()
    expected = epoch(undisturbed)
    restarted = make(batch_size=batch_size)
    torch.set_rng_state(state)
    persistent_workers.start(restarted)
    processes = restarted._iterator
    assert epoch(restarted) == expected
    # It was started once, and is not started again.
    persistent_workers.start(restarted)
    assert restarted._iterator is processes
    # Without that the epoch is another one.
    torch.set_rng_state(state)
    assert epoch(make(batch_size=batch_size)) != expected


def test_other_loaders_are_left_alone() -> None:
    loader = DataLoader(TensorDataset(torch.arange(6)))
    persistent_workers.start(loader)
    assert loader._iterator is None
    persistent_workers.start([1, 2])
