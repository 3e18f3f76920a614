"""A ``state_dict`` that returns copies: without ``load=`` refused before a byte lands, with it checked afterwards."""

# ruff: noqa: F811

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

import transfuse
from bringing import RANKS, Bring, Training, bring, fresh, home, threaded, trained  # noqa: F401
from shards import mesh_of
from transfuse._state.returned_copies import ReturnedCopies

COPIES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {"clone": torch.clone, "half": torch.Tensor.half}


class Copying(Training):
    """A job whose state has copies of the model's tensors."""

    def __init__(self, copy: Callable[[torch.Tensor], torch.Tensor], takes_model: bool) -> None:
        super().__init__(2, torch.optim.SGD, lr=0.1)
        self.copy, self.takes_model = copy, takes_model
        self.asked = 0

    def state(self) -> dict[str, Any]:
        self.asked += 1
        state = super().state()
        return {**state, "model": {name: self.copy(tensor) for name, tensor in state["model"].items()}}

    def load(self, state: dict[str, Any]) -> None:
        super().load(state)
        if self.takes_model:
            self.model.load_state_dict(state["model"])


def jobs(how: str, *, takes_model: bool = True) -> tuple[list[Any], list[Any]]:
    torch.manual_seed(1)
    before = Copying(COPIES[how], takes_model)
    return [before] * RANKS, [Copying(COPIES[how], takes_model) for _ in range(RANKS)]


@pytest.mark.parametrize("how", COPIES)
def test_without_load_they_are_refused_before_anything_lands(bring: Bring, how: str) -> None:
    before, now = jobs(how)
    weights = [one.weights() for one in now]
    error = bring(before, now, False)[0]
    assert isinstance(error, transfuse.StateError)
    assert "state_dict() returned copies of 4 leaves: ['model']['0.weight'], ['model']['0.bias']" in str(error)
    assert "load=" in str(error)
    assert [one.weights() for one in now] == weights


@pytest.mark.parametrize("how", COPIES)
def test_a_load_that_takes_them_is_enough(bring: Bring, how: str) -> None:
    before, now = jobs(how)
    assert bring(before, now, True) == [None] * RANKS
    arrived = [COPIES[how](parameter).float().flatten().tolist() for parameter in before[0].model.parameters()]
    assert [one.weights() for one in now] == [arrived] * RANKS
    assert len({one.asked for one in now}) == 1, "there may be collectives in it"


def test_a_load_that_does_not_take_them_is_named(bring: Bring) -> None:
    before, now = jobs("clone", takes_model=False)
    error = bring(before, now, True)[0]
    assert isinstance(error, transfuse.StateError)
    assert "4 leaves were not taken by load= or load_state_dict(): ['model']['0.weight']" in str(error)


@pytest.mark.parametrize("load", [False, True])
def test_tensors_that_stay_where_they_are_are_no_copies(bring: Bring, load: bool) -> None:
    before, now = trained(2, torch.optim.SGD, lr=0.1), fresh(2, torch.optim.SGD, lr=0.1)
    options = StateDictOptions(cpu_offload=True)  # Of a model that is in main memory already.
    for one in {*before, *now}:
        one.more = {"again": get_model_state_dict(one.model, options=options)}
    assert bring(before, now, load) == [None] * RANKS
    assert [one.weights() for one in now] == [before[0].weights()] * RANKS


def leaves() -> dict[str, Any]:
    """One leaf of each kind. What ``numpy`` has allocated is in another storage at each call."""
    dtensor = torch.distributed.tensor.DTensor.from_local(torch.ones(3), mesh_of([0], 0), run_check=False)
    return {
        "plain": torch.ones(3),
        "view": torch.arange(6.0)[1:4],
        "dtensor": dtensor,
        "sparse": torch.eye(3).to_sparse(),
        "jagged": torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged),
        "empty": torch.ones(0),
        "array": torch.from_numpy(np.ones(3)),
        "value": 1,
    }


def test_leaves_of_all_kinds() -> None:
    state = leaves()
    ReturnedCopies(state, {**state, "array": torch.from_numpy(state["array"].numpy())}).refuse()
    copied = {name: leaf.clone() if isinstance(leaf, torch.Tensor) else leaf for name, leaf in state.items()}
    copies = ReturnedCopies(state, copied)
    with pytest.raises(transfuse.StateError, match="copies of 6 leaves") as raised:
        copies.refuse()
    assert "['empty']" not in str(raised.value), "it has no bytes"
    copies.check_taken(lambda: copied)
    for name in ("plain", "view", "dtensor", "sparse", "jagged", "array"):
        wrong = {**copied, name: 2 * copied[name]}
        with pytest.raises(transfuse.StateError, match=rf"1 leaves were not taken by .*: \['{name}'\]"):
            copies.check_taken(wrong.copy)


def test_a_tensor_that_is_gone_the_second_time_is_no_place_to_land_in() -> None:
    with pytest.raises(transfuse.StateError, match=r"\['a'\]"):
        ReturnedCopies({"a": torch.ones(2), "b": torch.ones(2)}, {"c": torch.ones(2)}).refuse()
