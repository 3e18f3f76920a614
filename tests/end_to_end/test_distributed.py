"""DTensor, ShardedTensor, DDP and FSDP2 in real processes. Functions here run in the pool's workers."""

from __future__ import annotations

import pytest
import torch

from distributed_states import (
    collective_tensors,
    fresh_dtensors,
    fresh_on_one_rank,
    other_shards,
    partial_in_place,
    same_shard_in_place,
    sharded_in_place,
    sharded_replicas,
    subgroup,
    uneven,
    values,
    wrapped_modules,
    wrong_shard,
)
from transfuse.testing.ranks import ProcessPool


@pytest.mark.parametrize("atomic", [False, True])
def test_a_replica_heals_from_another_and_keeps_its_own_mesh(pool4: ProcessPool, atomic: bool) -> None:
    assert values(pool4, same_shard_in_place, atomic) == [True] * 4


#: What one source that holds rows 0:2 cannot bring, and what no source could.
NOBODY_HOLDS = {
    "coordinate": "nobody holds [2:4, 0:4]",
    "placement": "nobody holds [2:4, 1:2]",
    "replicate": "nobody holds [2:4, 0:4]",
}


NO_SHARDING = {"global shape": "global shape", "plain": "global shape", "partial": "global shape"}


@pytest.mark.parametrize("case", [*NOBODY_HOLDS, *NO_SHARDING])
def test_another_shard_is_refused_by_name_and_never_written(pool4: ProcessPool, case: str) -> None:
    outcomes = values(pool4, wrong_shard, case)
    kind, text, written = outcomes[1]
    assert kind == ("NotCovered" if case in NOBODY_HOLDS else "TargetMismatch"), text
    assert "['w']" in text
    assert (NOBODY_HOLDS | NO_SHARDING)[case] in text
    assert not written
    kind, text, _ = outcomes[0]
    assert kind == "SendFailed"
    assert "['w']" in text


def test_what_a_source_holds_whole_arrives_in_any_shard(pool4: ProcessPool) -> None:
    outcomes = values(pool4, other_shards)
    assert outcomes[1] == [True, True, "SendFailed"] * 3
    assert outcomes[0] == ["NotCovered"] * 3


def test_uneven_and_empty_shards(pool4: ProcessPool) -> None:
    outcomes = values(pool4, uneven)
    assert outcomes[2] == ([(3, 3), (1, 3), (0, 3)], True)
    assert outcomes[3] == ([(2, 3), (0, 3), (0, 3)], True)


def test_partial_travels_only_onto_the_same_coordinate(pool4: ProcessPool) -> None:
    """What rank 3 holds of a sum is none of rank 1's."""
    outcomes = values(pool4, partial_in_place)
    kind, text, refused, left = outcomes[1]
    assert (kind, refused, left) == ("NotCovered", "TargetMismatch", [[-1.0, -1.0], [-1.0, -1.0]])
    assert "['w']" in text
    assert "coordinate (1,)" in text
    assert outcomes[3] == ("SendFailed", "SendFailed")


def test_fresh_dtensors_on_the_mesh_given(pool4: ProcessPool) -> None:
    assert values(pool4, fresh_dtensors)[2:] == [[True, True]] * 2


def test_fresh_dtensors_without_a_mesh(pool4: ProcessPool) -> None:
    is_dtensor, equal, refused, refused_too = values(pool4, fresh_on_one_rank)[1]
    assert is_dtensor
    assert equal
    assert "['s']: nobody holds [0:1, 0:2]" in refused
    assert "['s']: nobody holds [3:4, 0:2]" in refused
    assert "[2:3, 0:2]" not in refused  # Rank 2 holds that.
    assert "mesh=" in refused_too
    assert "['p']" in refused_too


def test_another_ranks_sharded_tensor_is_refused_by_name(pool4: ProcessPool) -> None:
    kind, text, total = values(pool4, sharded_in_place)[1]
    assert kind == "NotCovered"
    assert "['st']: nobody holds [2:4, 0:3]" in text
    assert total == 0


def test_sharded_tensors_in_place_and_fresh_with_the_right_offsets(pool4: ProcessPool) -> None:
    outcomes = values(pool4, sharded_replicas)
    assert outcomes[2] == (True, 1.0, [0, 0], [2, 3], "rank:2/cpu", 1.0)
    assert outcomes[3] == (True, 2.0, [2, 0], [2, 3], "rank:3/cpu", 2.0)


def test_ddp_and_fsdp2_and_groups_of_other_ranks(pool4: ProcessPool) -> None:
    for found in values(pool4, wrapped_modules):
        assert found
        assert all(found)


def test_ranks_are_ranks_within_the_group(pool4: ProcessPool) -> None:
    assert values(pool4, subgroup)[3] == [7.0] * 3


def test_an_async_collective_tensor_is_waited_for_first(pool4: ProcessPool) -> None:
    assert values(pool4, collective_tensors)[1] == (torch.Tensor, [6.0] * 4)
