"""Faults of PyTorch's PGTransport that were reproduced, each the other way round here.

Numbers are those of the list in docs/design.md ("Faults this library answers").
"""

from __future__ import annotations

import os
import pickle
import time
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import distributed_states as distributed
import transfuse
from midway import tampered
from moves import CPU, TIMEOUT, Pair, pair
from transfuse.testing.exact import assert_exact
from transfuse.testing.ranks import ProcessPool, Ranks

pytestmark = pytest.mark.usefixtures("group_route")


@pytest.fixture(scope="module")
def two() -> Iterator[Pair]:
    with pair() as ranks:
        yield ranks


def test_01_constructor_timeout_is_honoured() -> None:
    """The group would wait 30 s; the constructor said 1 s."""
    with Ranks(2, timeout=30.0) as ranks:
        started = time.monotonic()
        outcomes = ranks.outcomes(
            lambda rank, pg: (
                transfuse.PGTransport(pg, timedelta(seconds=1), CPU).recv_checkpoint(0) if rank == 1 else None
            )
        )
    assert isinstance(outcomes[1].error, transfuse.PeerTimeout)
    assert time.monotonic() - started < 10.0


def test_02_a_thousand_one_element_views_send_a_thousand_elements(two: Pair) -> None:
    base = torch.arange(1_000_000, dtype=torch.float32)
    state = [base[i * 1000 : i * 1000 + 1] for i in range(1000)]
    sent, received = two.outcomes(state)
    assert_exact(state, received.get())
    assert sent.get().report.bytes == 4_000


def test_03_tied_tensors_are_sent_once_and_tied_again(two: Pair) -> None:
    weight = torch.randn(100, 10)
    sent, received = two.outcomes({"embed": weight, "head": weight})
    assert sent.get().report.bytes == weight.nbytes
    arrived = received.get()
    assert arrived["embed"].data_ptr() == arrived["head"].data_ptr()


def test_04_conj_and_neg_views_keep_their_values(two: Pair) -> None:
    z = torch.tensor([1 + 2j, 3 - 1j])
    arrived = two.move({"conj": z.conj(), "neg": torch._neg_view(torch.tensor([2.0, -1.0]))})
    assert arrived["conj"].tolist() == [1 - 2j, 3 + 1j]
    assert arrived["neg"].tolist() == [-2.0, 1.0]
    assert arrived["conj"].is_conj()
    assert arrived["neg"].is_neg()


def test_05_in_place_stride_mismatch_gets_the_right_values(two: Pair) -> None:
    own = torch.zeros(3, 2).t()
    two.move({"w": torch.arange(6.0).view(2, 3)}, {"w": own})
    assert own.tolist() == [[0, 1, 2], [3, 4, 5]]


def test_05_in_place_dtype_mismatch_is_an_error(two: Pair) -> None:
    own = torch.zeros(3, dtype=torch.int32)
    _, error = two.errors({"w": torch.tensor([1.0, 2.0, 3.0])}, {"w": own})
    assert "dtype: source torch.float32, target torch.int32" in str(error)
    assert own.tolist() == [0, 0, 0]


def test_05_in_place_shape_mismatch_is_an_error(two: Pair) -> None:
    _, error = two.errors({"w": torch.zeros(2, 3)}, {"w": torch.zeros(3, 2)})
    assert "shape: source (2, 3), target (3, 2)" in str(error)


def test_05_in_place_offset_mismatch_leaves_neighbours_alone(two: Pair) -> None:
    guard = torch.full((10,), -1.0)
    two.move({"w": torch.arange(10.0)[2:6]}, {"w": guard[5:9]})
    assert guard.tolist() == [-1, -1, -1, -1, -1, 2, 3, 4, 5, -1]


def test_06_parameter_as_source_and_as_target(two: Pair) -> None:
    own = nn.Parameter(torch.zeros(3))
    arrived = two.move({"w": nn.Parameter(torch.ones(3))}, {"w": own})
    assert arrived["w"] is own
    assert own.tolist() == [1, 1, 1]
    assert type(two.move({"w": own})["w"]) is nn.Parameter


def test_07_sharded_tensor_in_place(pool4: ProcessPool) -> None:
    outcomes = distributed.values(pool4, distributed.sharded_replicas)
    assert [outcomes[2][:2], outcomes[3][:2]] == [(True, 1.0), (True, 2.0)]


def test_08_rank_1s_shard_is_not_overwritten_by_rank_0s(pool4: ProcessPool) -> None:
    kind, _, written = distributed.values(pool4, distributed.wrong_shard, "coordinate")[1]
    assert kind == "NotCovered"
    assert not written


def test_08_uneven_shards_arrive_with_their_own_sizes(pool4: ProcessPool) -> None:
    outcomes = distributed.values(pool4, distributed.uneven)
    assert outcomes[2][1]
    assert outcomes[3][1]


def test_09_hsdp_full_tensor_works_after_healing(pool4: ProcessPool) -> None:
    assert distributed.values(pool4, distributed.same_shard_in_place) == [True] * 4
    assert distributed.values(pool4, distributed.fresh_dtensors)[2:] == [[True, True]] * 2


def test_10_sharded_tensor_offsets_are_right_on_the_receiver(pool4: ProcessPool) -> None:
    outcomes = distributed.values(pool4, distributed.sharded_replicas)
    assert outcomes[3][2:5] == ([2, 0], [2, 3], "rank:3/cpu")


def test_11_requires_grad_survives(two: Pair) -> None:
    arrived = two.move({"a": torch.ones(2, requires_grad=True), "b": torch.ones(2)})
    assert arrived["a"].requires_grad
    assert not arrived["b"].requires_grad


def test_12_quantized_is_refused_not_broken(two: Pair) -> None:
    state = {"q": torch._empty_affine_quantized([3], scale=0.1, zero_point=0, dtype=torch.qint8)}
    sent, _ = two.errors(state)
    assert "['q']" in str(sent)


@pytest.mark.parametrize("kind", ["sparse", "nested", "strided nested", "unpicklable", "meta"])
def test_13_the_receiver_is_not_left_waiting(two: Pair, kind: str) -> None:
    """What can be carried arrives; what cannot is refused at both ends at once."""
    makers: dict[str, Any] = {
        "sparse": lambda: {"x": torch.eye(3).to_sparse()},
        "nested": lambda: {"x": torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged)},
        "strided nested": lambda: {"x": torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])},
        "unpicklable": lambda: {"x": lambda: 3},
        "meta": lambda: {"x": torch.empty(3, device="meta")},
    }
    state = makers[kind]()
    started = time.monotonic()
    if kind in ("sparse", "nested"):
        assert_exact(state, two.move(state))
    else:
        for error in two.errors(state):
            assert "['x']" in str(error)
    assert time.monotonic() - started < TIMEOUT.total_seconds() / 2


def test_13_the_sender_is_not_left_waiting(two: Pair) -> None:
    started = time.monotonic()
    sent, _ = two.errors({"w": torch.zeros(2)}, {"w": torch.zeros(3)})
    assert isinstance(sent, transfuse.SendFailed)
    assert time.monotonic() - started < TIMEOUT.total_seconds() / 2


def test_14_the_error_has_name_and_sizes(two: Pair) -> None:
    _, error = two.errors({"model": {"fc.weight": torch.zeros(2, 3)}}, {"model": {"fc.weight": torch.zeros(2, 4)}})
    assert "['model']['fc.weight']: shape: source (2, 3), target (2, 4)" in str(error)


def test_15_a_source_that_stops_midway_leaves_a_list_of_torn_leaves() -> None:
    """The source's connection breaks after some parcels: the error says which targets may be half new."""
    state = {f"w{i:02}": torch.full((1 << 20,), 1.0) for i in range(15)}
    own = {name: torch.zeros(1 << 20) for name in state}
    count = [0]

    def stop(tensor: torch.Tensor) -> torch.Tensor:
        count[0] += tensor.numel() >= 1 << 20
        if count[0] > 6:
            raise ConnectionResetError("the cable was pulled")
        return tensor

    _, received, _ = tampered(stop, state, own, timeout=timedelta(seconds=2))
    assert isinstance(received.error, transfuse.PeerError)
    touched = {f"['{name}']" for name, tensor in own.items() if tensor.any()}
    assert touched
    assert touched <= set(received.error.torn)
    assert len(received.error.torn) < 15
    assert "torn" in str(received.error)


def test_16_a_dead_receiver_does_not_starve_a_healthy_one() -> None:
    state = {f"w{i}": torch.randn(1 << 20) for i in range(3)}

    def work(rank: int, pg: Any) -> Any:
        transport = transfuse.PGTransport(pg, timedelta(seconds=2), CPU)
        if rank == 0:
            return transport.send_checkpoint([1, 2], state)
        return transport.recv_checkpoint(0) if rank == 1 else None

    with Ranks(3) as ranks:
        outcomes = ranks.outcomes(work)
    assert_exact(state, outcomes[1].get())
    assert isinstance(outcomes[0].error, transfuse.SendFailed)
    assert list(outcomes[0].error.causes) == [2]


def test_19_a_target_that_is_no_tensor_is_an_error_not_ignored(two: Pair) -> None:
    _, error = two.errors({"a": torch.ones(2), "b": torch.ones(2)}, {"a": torch.zeros(2), "b": 3})
    assert "['b']: kind: source is a tensor, target is a value of type int" in str(error)


def test_21_strict_notices_keys_missing_on_either_side(two: Pair) -> None:
    _, error = two.errors({"a": torch.ones(1), "b": torch.ones(1)}, {"a": torch.ones(1), "c": 1}, strict=True)
    assert "['b']: missing in the target" in str(error)
    assert "['c']: only in the target" in str(error)


class Payload:
    """What a hostile peer would send to an unpickler."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (self.path,)


@pytest.mark.parametrize("opted_in", [False, True])
def test_22_a_pickle_payload_does_not_run(two: Pair, tmp_path: Path, opted_in: bool) -> None:
    trap = tmp_path / "ran"
    _, error = two.errors({"x": Payload(str(trap)), "w": torch.ones(1)}, weights_only_objects=opted_in)
    assert isinstance(error, transfuse.TransfuseError)
    assert "['x']" in str(error)
    assert not trap.exists()
    pickle.loads(pickle.dumps(Payload(str(trap))))
    assert trap.exists(), "the payload would have worked"


def test_24_a_view_of_an_odd_sized_storage(two: Pair) -> None:
    storage = torch.arange(41, dtype=torch.uint8)
    state = {"f": storage[:40].view(torch.float32), "b": storage}
    assert_exact(state, two.move(state))


@dataclass
class Unregistered:
    weight: torch.Tensor


def test_25_tensors_hidden_in_an_unregistered_container_are_refused(two: Pair) -> None:
    sent, _ = two.errors({"c": Unregistered(torch.ones(3))})
    assert "['c']" in str(sent)
    assert "register_dataclass" in str(sent)


def test_26_a_flipped_bit_is_found_and_repaired() -> None:
    flipped: list[int] = []

    def flip(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.numel() == 4000 and not flipped:
            flipped.append(1)
            tensor[1234] ^= 8
        return tensor

    state = {"w": torch.randn(1000)}
    sent, received, report = tampered(flip, state)
    sent.get()
    assert_exact(state, received.get())
    assert report.repaired == 1
