"""One manner: what means the same in two public calls has the same name, default, kind and place."""

from __future__ import annotations

import ast
import dataclasses
import inspect
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import transfuse
from transfuse import dcp, integrations
from transfuse._hub.hub import HubSettings
from transfuse._job.face import BEFORE, RENAMED
from transfuse._keeper.settings import KeepSettings
from transfuse._remote.client import FetchSettings
from transfuse._remote.server import ServeSettings
from transfuse.integrations import check_options, ray

#: What torch chose: its transport's signature stays as people know it.
AS_TORCH = {"PGTransport"}
#: In this order, where there are several of them.
ORDER = (
    "address", "state", "rank_state", "step", "load", "load_rank_state", "group", "host", "port", "token", "tls",
    "timeout", "device", "on_report", "options",
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
    "tls": None,
    "port": 0,
    "on_report": None,
    "same_host": True,
    "verify": None,
    "max_bytes_per_second": None,
    "max_readers": 4,
}
#: What may be given without a name.
BY_PLACE = {"address", "state", "store", "rank", "size", "work", "args", "dataset", "batch_size"}
#: Classes of the public rooms that users construct.
MADE = (dcp.KeeperReader, dcp.KeeperWriter, dcp.PeerReader, dcp.DirectoryReader)


def calls() -> Iterator[tuple[str, Callable[..., Any]]]:
    """Every public function, and every class that users construct."""
    for name in sorted(set(transfuse.__all__) - AS_TORCH):
        found = getattr(transfuse, name)
        is_error = inspect.isclass(found) and issubclass(found, Exception)
        if callable(found) and not is_error and not inspect.isclass(found):
            yield name, found
    yield from (("State", transfuse.State), ("RNG", transfuse.RNG), ("Loader", transfuse.Loader))
    yield from ((made.__name__, made) for made in MADE)
    yield "ray.register", ray.register


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


def test_all_that_users_construct_is_among_them() -> None:
    made = {name for name in dcp.__all__ if inspect.isclass(getattr(dcp, name))}
    assert made == {each.__name__ for each in MADE}


@pytest.mark.parametrize("framework", ["lightning", "transformers"])
def test_a_callback_takes_what_keep_takes(framework: str) -> None:
    """It has no signature of its own that could differ. The file is read, because importing a framework takes long."""
    path = Path(integrations.__file__).with_name(f"{framework}.py")
    (callback,) = (
        node
        for node in ast.parse(path.read_text()).body
        if isinstance(node, ast.ClassDef) and node.name == "KeepCallback"
    )
    (init,) = (node for node in callback.body if isinstance(node, ast.FunctionDef) and node.name == "__init__")
    assert ast.unparse(init.args) == "self, *given: object, **options: Any"
    assert ast.unparse(init.body[0]) == "check_options(given, options)"


#: The class that holds the arguments of a call, checked.
SETTINGS: dict[str, type[Any]] = {
    "fetch": FetchSettings,
    "hub": HubSettings,
    "keep": KeepSettings,
    "ray.register": ray.Settings,
    "serve": ServeSettings,
}


@pytest.mark.parametrize("name", SETTINGS)
def test_a_call_and_the_class_of_its_arguments_list_the_same(name: str) -> None:
    parameters = inspect.signature(CALLS[name]).parameters
    fields = {item.name: item.default for item in dataclasses.fields(SETTINGS[name])}
    assert list(fields) == list(parameters)
    for each, default in fields.items():
        if default is not dataclasses.MISSING and parameters[each].default is not inspect.Parameter.empty:
            assert default == parameters[each].default, each


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


@pytest.mark.parametrize("name", ["KeeperWriter", "KeeperReader"])
def test_of_what_takes_a_keep_they_say_that_keep_takes_the_new_one(name: str) -> None:
    for old, new in BEFORE.items():
        with pytest.raises(TypeError) as raised:
            CALLS[name](object(), **{old: None})
        whose = "keep()'s " if new.endswith("= takes it") else ""
        assert str(raised.value) == f"{name}() has no {old}= any more: {whose}{new}"
    with pytest.raises(TypeError, match=rf"{name}\(\) takes keep and checkpoint_id, and everything else by name"):
        CALLS[name](1, 2, 3)


def test_a_callback_s_options_are_checked_by_the_same_names() -> None:
    """Those of Lightning and of Transformers, in their constructors."""
    for old, new in RENAMED.items():
        chosen = new in ("state", "rank_state", "load_rank_state")
        with pytest.raises(TypeError) as raised:
            check_options((), {old: None})
        says = f"it chooses {new} itself" if chosen else BEFORE[old]
        assert str(raised.value) == f"KeepCallback() has no {old}= any more: {says}"
    for wrong in ("evry", "options", "relay"):
        with pytest.raises(TypeError, match=f"got an unexpected keyword argument '{wrong}'; its options are .*every"):
            check_options((), {wrong: 1})
    check_options((), {"every": 10, "on_report": print, "strict": True})


def test_old_attributes_say_the_new_one() -> None:
    for old in (transfuse.Keep.__new__(transfuse.Keep), transfuse.KeptStep(1, {}, 1)):
        with pytest.raises(AttributeError) as raised:
            old.own  # noqa: B018
        assert str(raised.value) == f"{type(old).__name__} has no .own any more: .rank_states has it"
        assert not hasattr(old, "own")
    with pytest.raises(TypeError, match=r"fetch\(\) returns a Fetched: the entry is \.state\['model'\]"):
        transfuse.Fetched({}, None, transfuse.Report("receive", ()))["model"]


def test_what_is_returned_and_raised_has_the_report() -> None:
    assert {"report"} <= set(transfuse.Step.__annotations__)
    assert {"report", "step", "state"} <= set(transfuse.Fetched.__annotations__)
    assert transfuse.TransfuseError("x").report is None
