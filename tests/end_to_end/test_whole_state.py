"""A whole state into another model or another optimizer: refused before a byte is written, by name, on all ranks."""

# ruff: noqa: F811

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

import pytest
import torch

import transfuse
from bringing import RANKS, Bring, Training, bring, fresh, home, threaded, trained  # noqa: F401


def refused(bring: Bring, before: list[Training], now: list[Training], load: bool, **options: Any) -> str:
    """The error that all ranks raise. Nothing was written, and load was not called."""
    weights = [one.weights() for one in now]
    error = bring(before, now, load, **options)[0]
    assert isinstance(error, transfuse.TargetMismatch), error
    assert [one.weights() for one in now] == weights
    assert not any(one.loaded for one in now)
    if "this run has kept steps" in str(error):
        lines = str(error).splitlines()
        assert "the kept steps are whole, and stay for 600 s" in lines[-1]
        assert len(set(lines)) == len(lines), error
    assert "anew" not in str(error)
    return str(error)


def test_a_model_that_grew_is_named(bring: Bring) -> None:
    text = refused(bring, trained(2), fresh(3), True)
    assert "['model']['2.weight']: only in the target" in text
    assert "['model']['2.bias']: only in the target" in text
    assert "strict=False" in text


def test_a_model_that_grew_keeps_its_own_if_the_caller_says_so_and_load_gets_the_sources_list(bring: Bring) -> None:
    before, now = trained(2), fresh(3)
    for one in now:
        one.takes_optimizer = False  # Torch would refuse four parameters for an optimizer of six.
    own = [one.weights()[4:] for one in now]
    assert bring(before, now, True, strict=False) == [None] * RANKS
    assert [one.weights() for one in now] == [before[0].weights() + mine for mine in own]
    for one in now:
        (state,) = one.loaded
        assert state["optimizer"]["param_groups"][0]["params"] == [0, 1, 2, 3]


@pytest.mark.parametrize("load", [False, True])
def test_a_removed_layer_is_named(bring: Bring, load: bool) -> None:
    text = refused(bring, trained(3), fresh(2), load)
    assert "['model']['2.weight']: missing in the target" in text
    assert "['model']['2.bias']: missing in the target" in text


def test_a_moment_that_the_optimizer_does_not_keep_any_more_is_named(bring: Bring) -> None:
    now = [one.step() for one in fresh(2)]
    assert "['max_exp_avg_sq']: missing in the target" in refused(bring, trained(2, amsgrad=True), now, True)


@pytest.mark.parametrize("load", [False, True])
@pytest.mark.parametrize("reverse", [False, True])
def test_another_optimizer_is_named(bring: Bring, load: bool, reverse: bool) -> None:
    kinds = [torch.optim.AdamW, torch.optim.SGD]
    before, now = reversed(kinds) if reverse else kinds
    text = refused(bring, trained(2, before, lr=0.1), fresh(2, now, lr=0.1), load)
    assert f"['optimizer']['param_groups'][0]['{'betas' if reverse else 'momentum'}']" in text


def test_an_optimizer_that_is_new_or_has_some_moments_gets_all(bring: Bring) -> None:
    before, now = trained(2), fresh(2)
    # One rank is behind with moments for some of its parameters.
    for parameter in list(now[1].model.parameters())[2:]:
        parameter.requires_grad_(False)
    now[1].step()
    assert 0 < len(now[1].state()["optimizer"]["state"]) < 4
    assert bring(before, now, True) == [None] * RANKS
    for one in now:
        assert one.weights() == before[0].weights()
        moments = one.optimizer.state_dict()["state"]
        for number, wanted in before[0].optimizer.state_dict()["state"].items():
            assert all(torch.equal(moments[number][name], value) for name, value in wanted.items())


@pytest.mark.parametrize("kind", [list, deque])
@pytest.mark.parametrize("longer", ["source", "target"])
def test_a_list_of_another_length_is_the_sources(bring: Bring, kind: Callable[[Any], Any], longer: str) -> None:
    many, few = kind([0.5, 0.25, 0.125]), kind([0.75])
    before, now = trained(1, torch.optim.SGD, lr=0.1), fresh(1, torch.optim.SGD, lr=0.1)
    before[0].more = {"losses": many if longer == "source" else few}
    for one in now:
        one.more = {"losses": few if longer == "source" else many}
    weights = [one.weights() for one in now]
    (without, _) = bring(before, now, False)
    assert isinstance(without, transfuse.StateError)
    assert "['losses'][1]" in str(without)
    assert [one.weights() for one in now] == weights
    assert bring(before, now, True) == [None] * RANKS
    for one in now:
        assert one.loaded[0]["losses"] == before[0].more["losses"]
        assert type(one.loaded[0]["losses"]) is kind


def test_tensors_of_a_longer_list_are_named(bring: Bring) -> None:
    before, now = trained(1), fresh(1)
    before[0].more = {"bank": [torch.ones(2)]}
    for one in now:
        one.more = {"bank": [torch.zeros(2), torch.zeros(2)]}
    text = refused(bring, before, now, True)
    assert "['bank'][1]: only in the target" in text
    assert bring(before, now, True, strict=False) == [None] * RANKS
    for one in now:
        assert [tensor.tolist() for tensor in one.more["bank"]] == [[1, 1], [0, 0]]
        assert len(one.loaded[0]["bank"]) == 1


@pytest.mark.parametrize("strict", [None, True, False])
def test_fetch_into_a_grown_target(strict: bool | None) -> None:
    source, target = trained(2)[0], fresh(3)[0]
    own = target.weights()
    with transfuse.serve(source.model.state_dict()) as server:
        if strict is False:
            transfuse.fetch(server.address, target.model.state_dict(), strict=strict)
            assert target.weights() == source.weights() + own[4:]
            return
        with pytest.raises(transfuse.TargetMismatch) as raised:
            transfuse.fetch(server.address, target.model.state_dict(), strict=strict)
        assert "['2.weight']: only in the target" in str(raised.value)
        assert target.weights() == own
        # A reader may want a part of what there is.
        part = {"0.weight": torch.zeros(3, 3)}
        if strict is None:
            transfuse.fetch(server.address, part, strict=strict)
            assert part["0.weight"].flatten().tolist() == source.weights()[0]


def test_rules_that_do_not_reach_a_target_are_told() -> None:
    with transfuse.serve({"a": torch.ones(2)}) as server:
        target = {"b": torch.zeros(2), "c": torch.zeros(2)}
        with pytest.raises(transfuse.TargetMismatch, match=r"\['c'\]: only in the target"):
            transfuse.fetch(server.address, target, map_path={"a": "b"})
        assert not target["b"].any()
        transfuse.fetch(server.address, target, map_path={"a": "b"}, strict=False)
        assert target["b"].all()
