"""``RNG``: the random number generators of a process, as an object of a state."""

from __future__ import annotations

import random
from types import ModuleType
from typing import Any

import numpy as np
import torch


class RNG:
    """Python's, numpy's and torch's global random number generators, and those of each accelerator of this process.

    It has ``state_dict()`` and ``load_state_dict()``, so it can stand in any state. Ranks draw different numbers, so it
    belongs to its rank: ``keep`` gives it back to the rank of the same number, and ``heal`` and ``serve`` leave it out.

    Args:
        shared: all ranks draw the same numbers: treat it as any other object of the state.
    """

    def __init__(self, *, shared: bool = False) -> None:
        self.is_rank_state = not shared

    def state_dict(self) -> dict[str, Any]:
        version, words, gauss = random.getstate()
        name, keys, position, has_gauss, cached = np.random.get_state()
        found: dict[str, Any] = {
            "python": (version, torch.tensor(words, dtype=torch.int64), gauss),
            "numpy": (name, torch.from_numpy(np.asarray(keys).astype(np.int64)), position, has_gauss, cached),
            "torch": torch.get_rng_state(),
        }
        accelerator = _accelerator()
        if accelerator is not None:
            found["accelerators"] = [accelerator.get_rng_state(i) for i in range(accelerator.device_count())]
        return found

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on with the random numbers that came after :meth:`state_dict`. Absent accelerators are left out."""
        version, words, gauss = state["python"]
        random.setstate((version, tuple(words.tolist()), gauss))
        name, keys, position, has_gauss, cached = state["numpy"]
        np.random.set_state((name, keys.numpy().astype(np.uint32), position, has_gauss, cached))
        torch.set_rng_state(state["torch"])
        accelerator = _accelerator()
        if accelerator is not None:
            here = range(accelerator.device_count())
            for device, generator in zip(here, state.get("accelerators", ()), strict=False):
                accelerator.set_rng_state(generator, device)


def _accelerator() -> ModuleType | None:
    if not torch.accelerator.is_available():
        return None
    found: ModuleType = torch.get_device_module(torch.accelerator.current_accelerator())
    return found
