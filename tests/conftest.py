"""Fixtures that all tests share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from ranks import ProcessPool


@pytest.fixture(scope="session")
def pool4() -> Iterator[ProcessPool]:
    """Four worker processes, made on first use and kept for the whole run."""
    with ProcessPool(4) as pool:
        yield pool
