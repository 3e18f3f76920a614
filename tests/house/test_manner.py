"""One manner: what means the same in two public calls has the same name, default, kind and place."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from typing import Any

import pytest

import transfuse
from transfuse import dcp
from transfuse._job.face import BEFORE
from transfuse.integrations import ray

#: What torch chose: its transport's signature stays as people know it.
AS_TORCH = {"PGTransport"}
#: In this order, where there are several of them.
ORDER = (
    "address", "state", "rank_state", "step", "load", "load_rank_state", "group", "host", "port", "token", "timeout",
    "device", "on_report", "options",
)  # fmt: skip
#: The default of each name, wherever it has one.
DEFAULTS = {
    "rank_state": None,
    "step": None,
    "load": None,
    "load_rank_state": None,
    "group": None,
    "timeout": 60,
    "device": None,
    "token": None,
    "port": 0,
    "on_report": None,
    "same_host": True,
    "verify": None,
    "max_bytes_per_second": None,
    "max_readers": 4,
}
#: What may be given without a name.
BY_PLACE = {"address", "state", "store", "rank", "size", "work", "args", "dataset", "batch_size"}


def calls() -> Iterator[tuple[str, Callable[..., Any]]]:
    """Every public function, and every class that users construct."""
    for name in sorted(set(transfuse.__all__) - AS_TORCH):
        found = getattr(transfuse, name)
        is_error = inspect.isclass(found) and issubclass(found, Exception)
        if callable(found) and not is_error and not inspect.isclass(found):
            yield name, found
    yield from (("State", transfuse.State), ("RNG", transfuse.RNG), ("Loader", transfuse.Loader))
    yield from (("KeeperWriter", dcp.KeeperWriter), ("KeeperReader", dcp.KeeperReader), ("ray.register", ray.register))


CALLS = dict(calls())


def test_something_is_seen() -> None:
    assert {"heal", "keep", "serve", "fetch", "hub", "peek", "regroup", "supervise", "State"} <= CALLS.keys()


@pytest.mark.parametrize("name", CALLS)
def test_one_manner(name: str) -> None:
    parameters = dict(inspect.signature(CALLS[name]).parameters)
    assert not parameters.keys() & BEFORE.keys() - {"on_report"}, "names of earlier versions"
    known = [each for each in parameters if each in ORDER]
    assert known == sorted(known, key=ORDER.index), "in one order"
    for each, parameter in parameters.items():
        if each in DEFAULTS and parameter.default is not parameter.empty:
            assert parameter.default == DEFAULTS[each], each
        if each in ORDER and each not in BY_PLACE:
            assert parameter.kind in (parameter.KEYWORD_ONLY, parameter.VAR_KEYWORD), each


@pytest.mark.parametrize("name", ["heal", "keep", "serve", "fetch", "hub"])
def test_old_spellings_say_the_new_one(name: str) -> None:
    call, parameters = CALLS[name], inspect.signature(CALLS[name]).parameters
    for old, new in BEFORE.items():
        if old not in parameters:
            with pytest.raises(TypeError) as raised:
                call({}, **{old: None})
            assert str(raised.value) == f"{name}() has no {old}= any more: {new}"
    with pytest.raises(TypeError, match=rf"{name}\(\) takes .*, and everything else by name"):
        call(1, 2, 3, 4)


def test_what_is_returned_and_raised_has_the_report() -> None:
    assert {"report"} <= set(transfuse.Step.__annotations__)
    assert {"report", "step", "state"} <= set(transfuse.Fetched.__annotations__)
    assert transfuse.TransfuseError("x").report is None
