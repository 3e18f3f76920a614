"""Data loaders whose processes stay from epoch to epoch, after a restart in a later epoch than the first.

A ``DataLoader`` draws a random number for its processes when it starts them: with ``persistent_workers`` that is in its
first epoch, otherwise in each. A restarted job has to start them again in a later epoch, and must not draw there.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.data import DataLoader

__all__ = ["start"]


def start(loader: Any) -> None:
    """Start the processes of a loader that keeps them, unless they run. Generators and samplers stay as they are."""
    loader = getattr(loader, "base_dataloader", loader)  # accelerate's loaders have one of torch's.
    if not isinstance(loader, DataLoader) or not loader.persistent_workers or loader._iterator is not None:
        return
    name = "batch_sampler" if loader.batch_sampler is not None else "sampler"
    sampler = getattr(loader, name)
    generator = torch.default_generator if loader.generator is None else loader.generator
    before = generator.get_state()
    # torch lets nobody set a sampler. With an empty one the processes have nothing to read yet.
    object.__setattr__(loader, name, ())
    try:
        loader._iterator = iterator = loader._get_iterator()
    finally:
        object.__setattr__(loader, name, sampler)
        generator.set_state(before)
    iterator._index_sampler = sampler
