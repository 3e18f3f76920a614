"""Fixtures that all tests share."""

from __future__ import annotations

import gc
import pathlib
import re
import signal
from collections.abc import Iterator

import pytest
import torch

import transfuse
from transfuse._timeouts import Patience
from transfuse.testing.ranks import ProcessPool, preload
from wires import over_streams

# All that tests need in forks: there is one fork server for all of a run of pytest.
preload(
    "pytest",
    "torch.distributed.checkpoint",
    "torch.distributed.fsdp",
    "torch.distributed.run",
    "torch.distributed.tensor.parallel",
    "torch._dynamo",
    *(f"transfuse.{home}" for home in transfuse._HOMES),
)

# Several of these processes share the cores.
torch.set_num_threads(1)


#: What modules use that start processes.
_STARTS_PROCESSES = re.compile(r"\b(Fleet|ProcessPool|Running|run_program|subprocess)\b")


@pytest.hookimpl(wrapper=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> Iterator[None]:
    """Mark tests whose module starts processes: `make test-fast` leaves them out. And begin with long ones."""
    started: dict[pathlib.Path, bool] = {}
    for item in items:
        if item.path not in started:
            started[item.path] = _STARTS_PROCESSES.search(item.path.read_text()) is not None
        if started[item.path]:
            item.add_marker(pytest.mark.processes)
    yield
    # Each worker gets a stretch of what has been chosen by now: a long test at its end would be waited for by all.
    workers = getattr(config, "workerinput", {"workercount": 1})["workercount"]
    long = [item for item in items if item.get_closest_marker("long")]
    others = [item for item in items if not item.get_closest_marker("long")]
    size = -(-len(others) // workers)
    stretches = (long[i::workers] + others[i * size : (i + 1) * size] for i in range(workers))
    items[:] = [item for stretch in stretches for item in stretch]


def pytest_collection_finish() -> None:
    """Let collections of garbage pass over all test modules and what they import: a quarter of the time went there."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session")
def pool4() -> Iterator[ProcessPool]:
    """Four worker processes, made on first use and kept for the whole run."""
    with ProcessPool(4, method="forkserver", timeout=90.0) as pool:  # Keepers import torch before they answer.
        yield pool


@pytest.fixture
def interruptible() -> Iterator[None]:
    """SIGINT raises KeyboardInterrupt in this process, also where it was started with SIGINT ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture
def group_route(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is read from memory, also within this host."""
    monkeypatch.setenv("TRANSFUSE_SAME_HOST", "0")


@pytest.fixture
def group_wire(monkeypatch: pytest.MonkeyPatch) -> None:
    """No streams: the group's own send and recv carry everything. For what only they do."""
    monkeypatch.setenv("TRANSFUSE_STREAMS", "0")


@pytest.fixture
def needs_streams() -> None:
    """For what only streams do: lanes, for instance."""
    if not over_streams():
        pytest.skip("this is about streams, and TRANSFUSE_STREAMS=0 forbids them")


@pytest.fixture
def patient_chains(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a busy machine threads may come to a chain seconds apart: let it wait for them."""
    monkeypatch.setattr(Patience, "MIN_CHAIN_SECONDS", 5.0)
    monkeypatch.setattr(Patience, "MAX_CHAIN_SECONDS", 5.0)


@pytest.fixture(params=["group", "memory"])
def either_route(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same once over the group, and once from memory."""
    monkeypatch.setenv("TRANSFUSE_SAME_HOST", "1" if request.param == "memory" else "0")


@pytest.fixture
def small_parcels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Parcels and bursts so small that a state of some MiB has many."""
    monkeypatch.setenv("TRANSFUSE_PARCEL_BYTES", str(256 << 10))
    monkeypatch.setenv("TRANSFUSE_BURST_BYTES", str(512 << 10))
