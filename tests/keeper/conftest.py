"""Fixtures of the tests of the ring."""

from __future__ import annotations

import pathlib
from collections.abc import Iterator

import pytest

from ring_hosts import Job


@pytest.fixture
def job(tmp_path: pathlib.Path) -> Iterator[Job]:
    made = Job(tmp_path)
    try:
        yield made
    finally:
        made.close()
