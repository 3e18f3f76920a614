"""Random states arrive exactly, in place and fresh, between threads and between processes."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from datetime import timedelta
from typing import Any, cast

import pytest
import torch.distributed as dist
from hypothesis import HealthCheck, given, settings
from hypothesis import seed as with_seed
from hypothesis import strategies as st

import transfuse
from moves import CPU, Pair, pair
from states import like, states
from transfuse.testing.exact import assert_exact, differences
from transfuse.testing.ranks import ProcessPool

relaxed = functools.partial(
    settings,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow, HealthCheck.data_too_large],
)


@pytest.fixture(scope="module")
def two() -> Iterator[Pair]:
    with pair() as ranks:
        yield ranks


@relaxed(max_examples=80)
@given(state=states(), same_host=st.booleans())
def test_fresh(two: Pair, state: Any, same_host: bool) -> None:
    assert_exact(state, two.move(state, same_host=same_host))


@relaxed(max_examples=80)
@given(state=states(), seed=st.integers(0, 1000), atomic=st.booleans(), same_host=st.booleans())
def test_in_place(two: Pair, state: Any, seed: int, atomic: bool, same_host: bool) -> None:
    target, check = like(state, seed)
    arrived = two.move(state, target, atomic=atomic, same_host=same_host)
    assert_exact(state, arrived, in_place=True)
    check()


@relaxed(max_examples=12)
@given(state=states(max_leaves=20), same_host=st.booleans())
def test_tiny_parcels(two: Pair, state: Any, same_host: bool) -> None:
    """The smallest parcels and bursts: everything is cut, and several bursts are under way."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRANSFUSE_PARCEL_BYTES", "256")
        patch.setenv("TRANSFUSE_MIN_PARCEL_BYTES", "256")
        patch.setenv("TRANSFUSE_BURST_BYTES", "512")
        assert_exact(state, two.move(state, same_host=same_host))
        target, check = like(state, 1)
        assert_exact(state, two.move(state, target, same_host=same_host), in_place=True)
        check()


@pytest.mark.soak
@relaxed(max_examples=3000)
@given(state=states(max_leaves=30), seed=st.integers(0, 1000), atomic=st.booleans())
def test_many(two: Pair, state: Any, seed: int, atomic: bool) -> None:
    assert_exact(state, two.move(state))
    target, check = like(state, seed)
    assert_exact(state, two.move(state, target, atomic=atomic), in_place=True)
    check()


def exchange(rank: int, batch: list[Any]) -> list[list[str]]:
    """Rank 0 sends each state to rank 1, fresh and in place; the differences rank 1 finds."""
    if rank > 1:
        return []
    found = []
    world = cast(Any, dist.group.WORLD)
    for state in batch:
        if rank == 0:
            sender = transfuse.PGTransport(world, timedelta(seconds=20), CPU)
            sender.send_checkpoint([1], state)
            sender.send_checkpoint([1], state)
            continue
        fresh = transfuse.PGTransport(world, timedelta(seconds=20), CPU).recv_checkpoint(0)
        found.append(differences(state, fresh))
        target, check = like(state, 2)
        transport = transfuse.PGTransport(world, timedelta(seconds=20), CPU, functools.partial(_same, target))
        found.append(differences(state, transport.recv_checkpoint(0), in_place=True))
        check()
    return found


def _same(target: Any) -> Any:
    return target


def test_between_processes(pool4: ProcessPool) -> None:
    """The same states on both ends by seed, so that the oracle is the receiver's own copy."""
    outcomes = pool4.run(by_seed, list(range(20)))
    found = outcomes[1].get()
    assert len(found) == 40
    assert [lines for lines in found if lines] == []


def by_seed(rank: int, seeds: list[int]) -> list[list[str]]:
    return exchange(rank, [example(seed) for seed in seeds]) if rank < 2 else []


def example(seed: int) -> Any:
    """One random state, the same in every process."""
    found: list[Any] = []

    @settings(database=None, max_examples=1, derandomize=False, deadline=None, suppress_health_check=list(HealthCheck))
    @given(states())
    def draw(state: Any) -> None:
        found.append(state)

    with_seed(seed)(draw)()
    return found[-1]
