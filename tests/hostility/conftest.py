"""Fixtures of the hostile tests."""

from __future__ import annotations

import warnings
from collections.abc import Iterator

import pytest
import torch

import hostile
from hostile import Member
from hostile_cases import warm_up


@pytest.fixture(scope="module")
def corpus() -> Iterator[list[Member]]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # The tensors are tiny.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # sparse and nested tensors say that they are young
        members = hostile.corpus()
    yield members
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def warm_corpus(corpus: list[Member]) -> list[Member]:
    warm_up(corpus)
    return corpus


@pytest.fixture(scope="module")
def large(corpus: list[Member]) -> Member:
    return next(m for m in corpus if m.name == "large")
