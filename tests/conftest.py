"""Fixtures that all tests share."""

from __future__ import annotations

import gc
import os
import pathlib
import re
import signal
from collections.abc import Generator, Iterator

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

# Several of these processes share the cores with those that tests start, and OpenMP's threads spin while they wait.
torch.set_num_threads(1)
os.environ.setdefault("OMP_NUM_THREADS", "1")


#: What modules use that start processes.
_STARTS_PROCESSES = re.compile(r"\b(Fleet|ProcessPool|Running|run_program|subprocess)\b")


#: What parameters are called that say by which way the same is done.
_WAYS = {"group", "memory", "brief"}


def _take_turns(items: list[pytest.Item]) -> None:
    """A test with several cases and several ways to do each: the cases take turns at the ways.

    So the ordinary run has every case and every way, and `make soak` has all other pairs of them.
    """
    cases: dict[str, dict[str, list[pytest.Item]]] = {}
    for item in items:
        test, _, parameters = item.nodeid.rstrip("]").partition("[")
        words = parameters.split("-")
        if len(_WAYS.intersection(words)) == 1 and not item.get_closest_marker("soak"):
            case = "-".join(word for word in words if word not in _WAYS)
            cases.setdefault(test, {}).setdefault(case, []).append(item)
    for several in cases.values():
        for turn, ways in enumerate(several.values() if len(several) > 1 else ()):
            for other in ways[: turn % len(ways)] + ways[turn % len(ways) + 1 :]:
                other.add_marker(pytest.mark.soak)


@pytest.hookimpl(wrapper=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> Iterator[None]:
    """Mark tests whose module starts processes: `make test-fast` leaves them out. And begin with long ones."""
    started: dict[pathlib.Path, bool] = {}
    for item in items:
        if item.path not in started:
            started[item.path] = _STARTS_PROCESSES.search(item.path.read_text()) is not None
        if started[item.path]:
            item.add_marker(pytest.mark.processes)
    _take_turns(items)
    yield
    # Each worker gets a stretch of what has been chosen by now: a long test at its end would be waited for by all.
    workers = getattr(config, "workerinput", {"workercount": 1})["workercount"]
    long = [item for item in items if item.get_closest_marker("long")]
    others = [item for item in items if not item.get_closest_marker("long")]
    size = -(-len(others) // workers)
    stretches = (long[i::workers] + others[i * size : (i + 1) * size] for i in range(workers))
    items[:] = [item for stretch in stretches for item in stretch]


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """No garbage is collected during all the imports, and later collections pass over what they have made.

    A third of the time of the imports went there, and a quarter of that of the tests.
    """
    gc.disable()
    result = yield
    gc.collect()
    gc.freeze()
    gc.enable()
    return result


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
