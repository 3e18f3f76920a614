"""torchao's quantized tensors, the wrapper subclasses that users have."""

from __future__ import annotations

import functools
import importlib
import importlib.util
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

import transfuse
from moves import Pair, pair
from transfuse.testing.exact import assert_exact

pytestmark = [
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.skipif(importlib.util.find_spec("torchao") is None, reason="torchao is not installed"),
]


@functools.cache
def quantization() -> Any:
    """Its import takes seconds: only the process that runs these tests does it."""
    return importlib.import_module("torchao.quantization")


@pytest.fixture(scope="module")
def two() -> Iterator[Pair]:
    with pair() as ranks:
        yield ranks


def quantized(config: Any, seed: int) -> nn.Module:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(64, 128), nn.Linear(128, 32)).to(torch.bfloat16)
    quantization().quantize_(model, config)
    return model


CONFIGS = {
    "int8 weights": lambda: quantization().Int8WeightOnlyConfig(),
    "int8 dynamic": lambda: quantization().Int8DynamicActivationInt8WeightConfig(),
    "float8 weights": lambda: quantization().Float8WeightOnlyConfig(),
    "intx weights": lambda: quantization().IntxWeightOnlyConfig(),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_quantized_modules_arrive_exactly(two: Pair, name: str) -> None:
    source, target = quantized(CONFIGS[name](), 0), quantized(CONFIGS[name](), 1)
    state = source.state_dict()
    assert any(type(t) is not torch.Tensor for t in state.values()), "the case is meant to hold subclasses"
    arrived = two.move(state)
    assert_exact(state, arrived)
    x = torch.randn(2, 64, dtype=torch.bfloat16)
    fresh = quantized(CONFIGS[name](), 2)
    fresh.load_state_dict(arrived, assign=True)
    assert torch.equal(fresh(x), source(x))
    assert not torch.equal(target(x), source(x))
    two.move(state, target.state_dict())
    assert torch.equal(target(x), source(x))


def test_another_quantization_is_refused_by_name(two: Pair) -> None:
    source = quantized(quantization().Int8WeightOnlyConfig(), 0)
    target = quantized(quantization().Float8WeightOnlyConfig(), 0)
    _, error = two.errors(source.state_dict(), target.state_dict())
    assert isinstance(error, transfuse.TargetMismatch)
    assert "['0.weight']" in str(error)
    assert "Int8Tensor" in str(error)
