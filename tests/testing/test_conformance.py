"""The conformance suite: our transports, PyTorch's for the record, and broken ones that it has to catch."""

from __future__ import annotations

import threading
import time
import zlib
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint import _pg_transport as pytorch

import transfuse
from transfuse._arguments import INSTALL_NIXL
from transfuse._wire import nixl_agent
from transfuse.dropin import torch as dropin
from transfuse.testing import CASES, Case, Factory, Results, assert_conforms, check

BY_NAME = {case.name: case for case in CASES}


def test_names_are_unique_and_every_case_says_what_it_promises() -> None:
    assert len(BY_NAME) == len(CASES)
    assert all(case.about.endswith(".") for case in CASES)


def over_the_group(*args: Any) -> transfuse.PGTransport:
    return transfuse.PGTransport(*args, same_host=False, streams=False)


def few(cases: list[Case]) -> list[Any]:
    """About every sixth in each run of the tests, and the others in `make soak`: only the route is another."""
    chosen = {case.name for case in cases if zlib.crc32(case.name.encode()) % 6 == 0}
    return [pytest.param(case, marks=[] if case.name in chosen else [pytest.mark.soak]) for case in cases]


#: What these let happen midway, they let happen to bytes that pass through the group.
ON_THE_WIRE = ("death/", "timeout/")


@pytest.mark.parametrize("case", CASES, ids=str)
def test_transfuse(case: Case) -> None:
    case.run(over_the_group, patience=8.0)


@pytest.mark.parametrize("case", [case for case in CASES if not case.name.startswith(ON_THE_WIRE)], ids=str)
def test_transfuse_from_memory(case: Case) -> None:
    case.run(transfuse.PGTransport, patience=8.0)


def over_nixl(*args: Any) -> transfuse.PGTransport:
    made = transfuse.PGTransport(*args, same_host=False, nixl=True)
    nixl_agent.get(60)
    return made


@pytest.mark.skipif(nixl_agent.installed() is None, reason=f"NIXL is not installed: {INSTALL_NIXL}")
@pytest.mark.parametrize("case", few([case for case in CASES if not case.name.startswith(ON_THE_WIRE)]), ids=str)
def test_transfuse_over_nixl(case: Case) -> None:
    case.run(over_nixl, patience=8.0)


# What others fail. A record: the tests below fail if a case is missing here or has come to pass.


def named(prefix: str, *names: str) -> frozenset[str]:
    return frozenset(prefix + name for name in names)


# PyTorch's wire has no words for these, and nothing flows back on it.
WIRE = frozenset[str]().union(
    # No conj and neg bits: PyTorch sends wrong values, the drop-in resolved ones.
    named("fresh/layout/", "conj", "neg", "conj-and-neg", "imag-of-conj"),
    # No flags: PyTorch raises for Parameters, the drop-in sends their values.
    named("fresh/role/", "requires-grad", "result", "parameter", "frozen-parameter", "buffer", "fleeting-buffer"),
    # One tensor is one storage.
    named("fresh/sparse/", "coo", "coo-uncoalesced", "csr", "csc", "bsr", "bsc"),
    named("", "fresh/jagged", "in-place/sparse"),
    # The tree is a pickled TreeSpec: no _metadata, and torch.Size is a tuple like any other.
    named("fresh/", "tree/module-state", "value/torch"),
    # Every leaf is sent with the whole storage behind it, and alone.
    named("fresh/", "tied", "overlapping-views", "view-sends-what-it-shows", "tied-sent-once"),
    # Neither end can say no: the other waits for its timeout.
    named("refusal/", "sender-cannot-encode", "receiver-hears-the-leaf", "callback-raises", "dtype", "shape", "size"),
    named("", "several/sender-cannot-encode", "reuse/after-refusal"),
    # Pickle.
    named("refusal/", "nothing-executes"),
)

DROP_IN = WIRE | frozenset(
    {
        # Of two values for one target the later stays.
        "in-place/untied-into-tied",
    }
)

PYTORCH = WIRE.union(
    # A storage that is no whole number of elements cannot be viewed.
    named("fresh/layout/", "odd-storage-of-wider"),
    # Into a target goes the source's storage, byte by byte: wrong values where strides or bits differ, neighbours
    # overwritten where it is a view, and an error without a name where the storages' sizes differ.
    named("in-place/from/", "transposed", "permuted", "channels-last", "conj", "neg", "conj-and-neg", "imag-of-conj"),
    named("in-place/from/", "empty-of-a-storage", "stepped", "offset", "expanded", "overlapping"),
    named("in-place/from/", "odd-storage", "odd-storage-of-wider"),
    named("in-place/into/", "transposed", "permuted", "channels-last", "conj", "neg", "conj-and-neg", "imag-of-conj"),
    named("in-place/into/", "empty-of-a-storage", "stepped", "offset", "odd-storage", "odd-storage-of-wider"),
    named("in-place/", "strides", "guard"),
    # Parameters are refused, as source and as target.
    named("in-place/", "source-parameter", "target-parameter"),
    # Mismatches are not noticed, or only when other targets have been written.
    named("in-place/", "dtype-mismatch", "shape-mismatch", "size-mismatch", "shared-element", "untied-into-tied"),
    # What comes back is another view of the target's memory, and autograd is not told.
    named("in-place/", "returns-own-tensors", "versions"),
    # The timeout of the constructor is not used.
    named("timeout/", "no-source", "no-receiver", "source-stalls", "receiver-stalls"),
    # One receiver holds up the others, and the error says neither which nor why.
    named("several/", "one-refuses", "one-absent", "error-names-the-rank"),
    named("death/", "receiver-killed", "error-names-the-rank"),
    named("refusal/", "sender-names-the-leaf"),
)


@pytest.mark.soak  # It waits for what others never do.
@pytest.mark.filterwarnings("ignore")  # Both warn about their own pickles, the second in a way that is not thread-safe.
@pytest.mark.parametrize(
    ("factory", "expected", "patience"),
    [(pytorch.PGTransport, PYTORCH, 3.0), (dropin.PGTransport, DROP_IN, 8.0)],  # The first waits in vain, mostly.
    ids=["pytorch", "drop-in"],
)
def test_the_record_of_what_others_fail(factory: Factory, expected: frozenset[str], patience: float) -> None:
    # Backwards, because the cases in which somebody waits come last and take the longest.
    results = check(factory, cases=CASES[::-1], patience=patience, workers=8)
    surprises = {name: error for name, error in results.items() if (error is not None) != (name in expected)}
    assert not surprises, f"\n{Results(surprises)}"


# Broken transports


class Deaf:
    """Never returns, whatever the timeout."""

    def __init__(self, *_: Any) -> None:
        pass

    def send_checkpoint(self, dst_ranks: list[int], state: Any) -> None:
        threading.Event().wait()

    def recv_checkpoint(self, src_rank: int) -> Any:
        threading.Event().wait()


@pytest.mark.parametrize("name", ["fresh/tree/dict", "timeout/no-source", "refusal/dtype", "several/one-absent"])
def test_a_transport_that_never_returns_is_a_failure_after_its_time(name: str) -> None:
    started = time.monotonic()
    with pytest.raises(AssertionError, match="had not ended") as caught:
        BY_NAME[name].run(Deaf, patience=0.2)
    assert time.monotonic() - started < 5
    assert "in recv_checkpoint" in caught.value.__notes__[0] or "in send_checkpoint" in caught.value.__notes__[0]


class Cheat:
    """Takes what it should copy."""

    region: Any = None

    def __init__(
        self, pg: Any, timeout: timedelta, device: torch.device, state_dict: Callable[[], Any] | None = None
    ) -> None:
        self.pg = pg

    def send_checkpoint(self, dst_ranks: list[int], state: Any) -> None:
        Cheat.region = state
        self.pg.send([torch.ones(1)], dst_ranks[0], 1).wait()

    def recv_checkpoint(self, src_rank: int) -> Any:
        self.pg.recv([torch.ones(1)], src_rank, 1).wait()
        return Cheat.region


def test_results_and_failures_are_listed() -> None:
    cases = [BY_NAME[name] for name in ("fresh/tree/dict", "reuse/write-after-return", "in-place/strides")]
    results = check(Cheat, cases=cases, patience=1.0)
    assert list(results) == [case.name for case in cases]
    assert list(results.failed) == ["reuse/write-after-return", "in-place/strides"]
    table = str(results).splitlines()
    assert table[0].split() == ["fresh/tree/dict", "passed"]
    assert table[1].split()[:3] == ["reuse/write-after-return", "FAILED", "AssertionError:"]
    assert table[-1] == "1 of 3 cases passed"
    with pytest.raises(AssertionError, match=r"2 of 3 cases failed") as caught:
        assert_conforms(Cheat, cases=cases, patience=1.0)
    assert BY_NAME["in-place/strides"].about in str(caught.value)
    assert isinstance(caught.value.__cause__, ExceptionGroup)
    assert_conforms(Cheat, cases=cases[:1], patience=1.0)


class Quitter(Cheat):
    def recv_checkpoint(self, src_rank: int) -> Any:
        raise KeyboardInterrupt


def test_an_exit_within_a_rank_is_a_failure_not_an_exit() -> None:
    with pytest.raises(AssertionError, match="KeyboardInterrupt"):
        BY_NAME["fresh/tree/dict"].run(Quitter, patience=1.0)


def test_a_factory_that_cannot_be_pickled_is_told_so() -> None:
    with pytest.raises(TypeError, match="function of a module"):
        BY_NAME["death/source-killed"].run(lambda *args: transfuse.PGTransport(*args))
    results = check(lambda *args: Cheat(*args), cases=[BY_NAME["death/source-killed"]])
    assert list(results.failed) == ["death/source-killed"]


def test_a_transport_that_dies_of_nothing_is_told_so() -> None:
    """What does not pass through the group cannot be stopped midway."""
    with pytest.raises(AssertionError, match="too few bytes passed through its group"):
        BY_NAME["death/source-killed"].run(Cheat, patience=1.0)
