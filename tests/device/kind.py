"""Which accelerator the tests use: the imitation, or real ones with ``TRANSFUSE_TEST_DEVICE=cuda`` (``make gpu``)."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch

from device import build, phantom

__all__ = ["IMITATION", "KIND", "imitation_only", "load", "require", "set_device", "slow_fill_", "unload"]

#: The type of device, as torch names it.
KIND = os.environ.get("TRANSFUSE_TEST_DEVICE", "phantom")
IMITATION = KIND == "phantom"

#: For tests that use what only the imitation has: counters, frozen ranks, a choice of how ``wait`` behaves.
imitation_only = pytest.mark.skipif(
    not IMITATION, reason=f"only the imitation can do this; TRANSFUSE_TEST_DEVICE={KIND} asks for a real device"
)


def load() -> None:
    """Make the accelerator usable in this process, or skip the test and say why."""
    if not IMITATION:
        require(2)
        return
    try:
        phantom.load()
    except build.Unavailable as reason:
        pytest.skip(str(reason))
    phantom.set_available(True)


def unload() -> None:
    """Hide the imitation, so that other tests in this process run as without it. What tests have set is undone."""
    if IMITATION:
        phantom.reset_settings()
        phantom.set_available(False)


def require(count: int) -> None:
    """Skip the test unless there is a real device for each rank. The imitation makes as many."""
    if IMITATION:
        phantom.set_device_count(max(2, count))
    elif KIND != "cuda":
        pytest.skip(f"TRANSFUSE_TEST_DEVICE={KIND}: expected phantom or cuda")
    elif not torch.cuda.is_available():
        pytest.skip("TRANSFUSE_TEST_DEVICE=cuda, but torch finds no CUDA device here")
    elif torch.cuda.device_count() < count:
        pytest.skip(f"needs {count} CUDA devices, one for each rank; there are {torch.cuda.device_count()}")


def set_device(index: int) -> None:
    module: Any = torch.get_device_module(KIND)
    module.set_device(index)


def slow_fill_(tensor: torch.Tensor, value: float, seconds: float) -> torch.Tensor:
    """Work on the current stream that fills a tensor only after about this time."""
    if IMITATION:
        return phantom.slow_fill_(tensor, value, seconds)
    torch.cuda._sleep(int(seconds * 1.5e9))  # type: ignore[no-untyped-call]
    return tensor.fill_(value)
