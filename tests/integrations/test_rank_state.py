"""Counters, histories and random number generators in one tensor."""

from __future__ import annotations

import importlib
import random
import sys
from typing import Any

import numpy as np
import pytest
import torch

from transfuse import RNG, StateError
from transfuse._tuning import RANK_STATE_LEAST_BYTES
from transfuse.integrations.rank_state import Packer, unpack


def draws() -> list[float]:
    return [
        random.random(),
        random.gauss(0, 1),
        float(np.random.rand()),
        float(np.random.normal()),
        float(torch.rand(1)),
    ]


def test_generators_go_on() -> None:
    draws()  # Both normal distributions now have a second number in store.
    packed = Packer().pack({"generators": RNG().state_dict()})
    expected = draws() + draws()
    assert draws() != expected[:5]
    RNG().load_state_dict(unpack(packed)["generators"])
    assert draws() + draws() == expected


def test_a_history_grows_and_the_tensor_seldom_does() -> None:
    packer, history = Packer(), []
    sizes = []
    for step in range(400):
        history.append({"loss": step / 7, "step": step, "text": "x" * 40})
        packed = packer.pack({"history": history, "nothing": None, "tuple": (1, float("nan"))})
        sizes.append(len(packed))
    assert unpack(packed)["history"] == history
    assert len(set(sizes)) <= 5
    assert sizes[0] == RANK_STATE_LEAST_BYTES


class Unreadable:
    pass


def test_what_cannot_be_read_again_is_named_at_once() -> None:
    tree: dict[str, Any] = {"callbacks": {"mine": {"a": 1, "b": Unreadable()}}}
    with pytest.raises(StateError, match=r"callbacks\.mine\.b cannot be kept: Unreadable is not made of"):
        Packer().pack(tree)
    # Also if it comes later: a restart could not read it.
    packer = Packer()
    packer.pack({"callbacks": {"mine": None}})
    with pytest.raises(StateError, match=r"callbacks\.mine\.b cannot be kept"):
        packer.pack(tree)


@pytest.mark.parametrize(("extra", "library"), [("lightning", "lightning"), ("transformers", "transformers")])
def test_a_missing_library_says_which_extra_to_install(
    extra: str, library: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [name for name in sys.modules if name.split(".")[0] == library]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, library, None)
    monkeypatch.delitem(sys.modules, f"transfuse.integrations.{extra}", raising=False)
    with pytest.raises(ImportError, match=rf"pip install 'transfuse\[{extra}\]'"):
        __import__(f"transfuse.integrations.{extra}")


@pytest.mark.filterwarnings("ignore")  # Those of the frameworks' imports.
@pytest.mark.parametrize("framework", ["lightning", "transformers"])
def test_a_callback_takes_options_by_name(framework: str) -> None:
    pytest.importorskip(framework)
    callback = importlib.import_module(f"transfuse.integrations.{framework}").KeepCallback
    with pytest.raises(
        TypeError, match=r"KeepCallback\(\) takes options by name, such as KeepCallback\(every=10\), got 10"
    ):
        callback(10)
    for name, why in (
        ("load", "chooses load itself"),
        ("own", "has no own= any more: it chooses rank_state itself"),
        ("digests", "has no digests= any more: verify= takes it"),
    ):
        with pytest.raises(TypeError, match=rf"KeepCallback\(\) {why}"):
            callback(**{name: print})
    with pytest.raises(TypeError, match="unexpected keyword argument 'evry'"):
        callback(evry=10)
