"""Fixtures for tests on an accelerator. A ``conftest.py`` imports them."""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator
from types import ModuleType

import pytest

from device import kind, phantom
from transfuse._wire import switchboard

__all__ = ["accelerator", "device", "nothing_is_left"]


@pytest.fixture
def accelerator() -> Iterator[None]:
    """The accelerator that ``TRANSFUSE_TEST_DEVICE`` names, by default the imitation; skipped where there is none.

    After the test torch finds no imitation, so that other tests in this process run as without it.
    """
    kind.load()
    yield
    kind.unload()


@pytest.fixture
def device() -> Iterator[ModuleType]:
    """The module ``device.phantom`` with the imitation in place and its counters at 0; skipped without a compiler."""
    if not kind.IMITATION:
        pytest.skip(f"this needs the imitation, and TRANSFUSE_TEST_DEVICE={kind.KIND} asks for a real device")
    kind.load()
    phantom.reset_counters()
    yield phantom
    kind.unload()


@pytest.fixture
def nothing_is_left() -> Iterator[None]:
    """After the test no more groups are watched, and no more conversations are left behind, than before it."""
    before = switchboard.leftovers()
    yield
    until = time.monotonic() + 5
    while switchboard.leftovers().watches > before.watches or switchboard.leftovers().left_behind > before.left_behind:
        assert time.monotonic() < until, switchboard.leftovers()
        gc.collect()
        time.sleep(0.02)
