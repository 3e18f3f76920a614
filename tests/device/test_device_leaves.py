"""Random states of every kind of leaf that can be on a device, into fresh memory and into targets of other layouts."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from torch.utils import _pytree

from device.group import DeviceRanks
from device.kind import IMITATION
from device.mirror import Mirror, devices_of
from device.moving import FEW, Setting, mine, move
from states import DTYPES, KINDS, dense, layouts, like, states
from transfuse.testing.exact import assert_exact

pytestmark = pytest.mark.usefixtures("accelerator", "nothing_is_left")

SETTINGS = [pytest.param(setting, id=str(setting)) for setting in FEW]


@contextmanager
def some(setting: Setting) -> Iterator[DeviceRanks]:
    with setting.ranks() as ranks:
        yield ranks


def check(ranks: DeviceRanks, setting: Setting, state: Any, seed: int) -> Mirror:
    """Move a state fresh, then into targets with layouts of their own, and compare in main memory."""
    source = Mirror(mine(0))
    sources = {0: source.there(state)}
    ((got, _),) = move(ranks, setting, sources, {1: None}).values()
    assert_exact(state, Mirror(mine(1)).back(got))

    own, untouched = like(state, seed)
    target = Mirror(mine(1))
    mirrored = target.there(own)
    ((got, _),) = move(ranks, setting, sources, {1: mirrored}).values()
    assert devices_of(mirrored) == devices_of(got)
    assert_exact(state, target.back(got), in_place=True)
    assert_exact(state, own, in_place=True)
    untouched()
    return source


def run(setting: Setting, examples: int) -> None:
    @settings(
        max_examples=examples,
        deadline=None,
        database=None,
        derandomize=True,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(state=states(KINDS, max_leaves=12))
    def body(state: Any) -> None:
        check(ranks, setting, state, seed=1)

    with some(setting) as ranks:
        body()


@pytest.mark.parametrize("setting", SETTINGS)
def test_random_states(setting: Setting) -> None:
    run(setting, 10)


@pytest.mark.soak
@pytest.mark.parametrize("setting", SETTINGS)
def test_many_random_states(setting: Setting) -> None:
    run(setting, 600)


@pytest.mark.parametrize("setting", SETTINGS[:3])
def test_every_dtype_in_every_layout(setting: Setting) -> None:
    rng = np.random.default_rng(0)
    state = {
        f"{dtype}-{layout}": dense(rng, dtype, (2, 3, 2, 2), layout) for dtype in DTYPES for layout in layouts(dtype)
    }
    with some(setting) as ranks:
        source = check(ranks, setting, state, seed=2)
    assert not source.left, "every one of them lies on the device"


@pytest.mark.parametrize("kind", KINDS)
def test_what_can_be_on_the_device_is_there(kind: str) -> None:
    """The matrix would prove nothing if its states stayed in main memory."""
    mirror = Mirror(mine(0))
    there: list[torch.Tensor] = []

    @settings(max_examples=20, deadline=None, database=None, derandomize=True, phases=[Phase.generate])
    @given(state=states((kind,), max_leaves=6))
    def body(state: Any) -> None:
        tree = mirror.there(state)
        there.extend(leaf for leaf in _pytree.tree_iter(tree) if isinstance(leaf, torch.Tensor) and not leaf.is_cpu)

    body()
    # torch has no sparse tensors for devices that it does not build in, and Pair does not say where it is.
    absent = ("coo", "compressed") if IMITATION else ()
    if kind in absent:
        assert len(mirror.left) > 0
    elif kind not in ("value", "wrapper"):
        assert len(there) > 0
        assert not mirror.left
