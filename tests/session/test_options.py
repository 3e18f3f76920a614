"""Options are listed once, in ``transfuse._options``: every other place that spells them out is compared with that."""

from __future__ import annotations

import dataclasses
import inspect
import re
import typing
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh

import transfuse
from transfuse import PGTransport, _heal
from transfuse._limits import Limits
from transfuse._options import FetchKeywords, OptionKeywords, Options, ServeKeywords, slowest_rate
from transfuse._remote import client, server
from transfuse.cli.fetch import fetch as fetch_command
from transfuse.cli.serve import serve as serve_command
from transfuse.testing.ranks import Ranks

ROOT = Path(__file__).parents[2]
CPU = torch.device("cpu")
TIMEOUT = timedelta(seconds=10)

DEFAULTS: dict[str, Any] = {item.name: item.default for item in dataclasses.fields(Options)}

#: Of each option a value that is not the default.
OTHERS: dict[str, Any] = {
    "same_host": False,
    "device_memory": True,
    "nixl": False,  # True needs NIXL: tests/wire/test_nixl_route.py.
    "verify": True,
    "delta": True,
    "cast": True,
    "map_path": {"a": "b"},
    "atomic": True,
    "strict": True,
    "mesh": DeviceMesh("cpu", torch.arange(1), _init_backend=False, _rank=0),
    "weights_only_objects": True,
    "relay": False,
    "streams": False,
    "lanes": 3,
    "max_bytes_per_second": 1e9,
    "history": 1,
    "max_receive_bytes": 1 << 20,
    "tls": False,  # With certificates: tests/remote/test_encrypted.py.
    "progress": True,
}

#: Options that ``fetch`` has no use for: a reader has one server or several, no other readers, and no group.
NOT_OF_FETCH = {"relay", "streams", "max_bytes_per_second", "history"}
#: Options of the commands, under their names there; and those that the commands decide by themselves or leave alone.
FETCH_COMMAND = {"same_host": "same_host", "verify": "verify", "max_receive_bytes": "max_size"}
NOT_OF_FETCH_COMMAND = {
    *("delta", "cast", "map_path", "atomic", "strict"),  # Of targets, and everything arrives fresh.
    *("mesh", "weights_only_objects"),  # Python objects, of which a file gets none.
    "progress",  # A bar if there is a terminal.
    "lanes",  # As many as pay.
    "nixl",  # The environment says it.
    "device_memory",  # Everything arrives in main memory.
    "tls",  # Files, each with an option of its own.
}
SERVE_COMMAND = {"same_host": "same_host", "max_bytes_per_second": "max_rate"}
#: The readers decide, or the environment, or there is no memory of a device.
NOT_OF_SERVE_COMMAND = {"verify", "lanes", "nixl", "device_memory", "tls", "history"}


@pytest.fixture(autouse=True)
def any_wire(monkeypatch: pytest.MonkeyPatch) -> None:
    """The environment forbids nothing."""
    monkeypatch.delenv("TRANSFUSE_STREAMS", raising=False)


class Nowhere:
    """A group in which nobody is."""

    def send(self, tensors: list[torch.Tensor], rank: int, tag: int) -> Any:
        raise AssertionError("nothing is sent")

    recv = send


def torchft() -> Any:
    return pytest.importorskip("transfuse.dropin.torchft", exc_type=ImportError)


def keywords_of(call: Callable[..., object]) -> object:
    """The TypedDict of a call's ``**options``."""
    hint = typing.get_type_hints(call)["options"]
    assert typing.get_origin(hint) is typing.Unpack
    (keywords,) = typing.get_args(hint)
    return keywords


# -------------------------------------------------------------------------------------------------- names and defaults


def test_the_keywords_are_the_options() -> None:
    assert typing.get_type_hints(OptionKeywords) == typing.get_type_hints(Options)
    assert not OptionKeywords.__required_keys__


def test_the_transport_spells_them_out() -> None:
    parameters = inspect.signature(PGTransport).parameters.values()
    spelled = [p for p in parameters if p.kind is p.KEYWORD_ONLY]
    assert {p.name: p.default for p in spelled} == DEFAULTS
    assert [p.name for p in spelled] == list(DEFAULTS)
    hints = typing.get_type_hints(PGTransport.__init__)
    assert {p.name: hints[p.name] for p in spelled} == typing.get_type_hints(Options)
    documented = re.findall(r"^ {4,8}(\w+): ", inspect.cleandoc(PGTransport.__doc__ or ""), re.M)
    assert set(documented) == {"pg", "timeout", "device", "state_dict", *DEFAULTS}


def test_fetch_takes_those_of_a_receiver() -> None:
    assert keywords_of(transfuse.fetch) is FetchKeywords
    assert set(FetchKeywords.__annotations__) == DEFAULTS.keys() - NOT_OF_FETCH
    for name in NOT_OF_FETCH:
        assert f"``{name}``" in (transfuse.fetch.__doc__ or "")


def test_serve_takes_those_of_a_source() -> None:
    assert keywords_of(transfuse.serve) is ServeKeywords
    for name in ServeKeywords.__annotations__:
        assert f"``{name}``" in (transfuse.serve.__doc__ or "")


def test_the_torchft_drop_in_takes_all() -> None:
    assert keywords_of(torchft().PGTransport.__init__) is OptionKeywords


def test_heal_takes_all() -> None:
    assert keywords_of(transfuse.heal) is OptionKeywords


def test_the_page_has_a_row_for_each() -> None:
    (table,) = re.findall(
        r"\| option \| what it does \|\n\|---\|---\|\n((?:\|.*\n)+)", (ROOT / "docs" / "transport.md").read_text()
    )
    rows = dict(re.findall(r"^\| `(\w+)` \| (.*) \|$", table, re.M))
    assert rows.keys() == DEFAULTS.keys()
    assert len(rows) == table.count("\n")
    for name, default in DEFAULTS.items():
        # What is off unless it is asked for need not say so.
        shown = re.findall(r"\(`(True|False|None|\d+)`\)", rows[name])
        assert shown == ([] if default in (None, False) else [str(default)]), name


def test_the_guide_on_serving_names_those_of_both_calls() -> None:
    text = (ROOT / "docs" / "serving.md").read_text()
    for call, keywords in (("fetch", FetchKeywords), ("serve", ServeKeywords)):
        (listed,) = re.findall(rf"`{call}` takes the options of a \w+ transport: ([^.]*)\.", text)
        assert re.findall(r"`(\w+)`", listed) == [name for name in DEFAULTS if name in keywords.__annotations__]


@pytest.mark.parametrize(
    ("command", "keywords", "mirrored", "left_out"),
    [
        (fetch_command, FetchKeywords, FETCH_COMMAND, NOT_OF_FETCH_COMMAND),
        (serve_command, ServeKeywords, SERVE_COMMAND, NOT_OF_SERVE_COMMAND),
    ],
    ids=["fetch", "serve"],
)
def test_the_commands_have_the_same_defaults(
    command: Callable[..., None], keywords: type, mirrored: dict[str, str], left_out: set[str]
) -> None:
    assert {*mirrored, *left_out} == keywords.__annotations__.keys(), "decide whether the command has this option too"
    parameters = inspect.signature(command).parameters
    for name, there in mirrored.items():
        assert parameters[there].default == DEFAULTS[name], name
    assert not left_out & parameters.keys()


# --------------------------------------------------------------------------------------- what is given is what is used


def test_there_is_another_value_for_each() -> None:
    assert OTHERS.keys() == DEFAULTS.keys()
    for name, value in OTHERS.items():
        assert value != DEFAULTS[name], name


@pytest.mark.parametrize("name", DEFAULTS)
def test_what_a_transport_is_given_is_in_its_options(name: str) -> None:
    given = PGTransport(Nowhere(), TIMEOUT, CPU, dict, **{name: OTHERS[name]})
    assert given._options == Options(**{name: OTHERS[name]})
    assert PGTransport(Nowhere(), TIMEOUT, CPU, dict, **{name: DEFAULTS[name]})._options == Options()


class Caught(Exception):
    """Instead of a transport."""


def catch(*args: Any, **options: Any) -> Any:
    raise Caught(options)


def test_fetch_passes_them_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "PGTransport", catch)
    options: Any = {name: OTHERS[name] for name in FetchKeywords.__annotations__}
    with pytest.raises(Caught) as caught:
        transfuse.fetch("127.0.0.1:1", {}, **options)
    assert caught.value.args[0] == options


def test_serve_passes_them_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "PGTransport", catch)
    options: Any = {name: OTHERS[name] for name in ServeKeywords.__annotations__}
    with pytest.raises(Caught) as caught:
        transfuse.serve({}, **options)
    assert caught.value.args[0].items() >= options.items()


def test_the_torchft_drop_in_passes_them_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torchft()._transport, "PGTransport", catch)
    with pytest.raises(Caught) as caught:
        torchft().PGTransport(Nowhere(), TIMEOUT, CPU, dict, **OTHERS)
    assert caught.value.args[0].items() >= OTHERS.items()


def test_heal_passes_them_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_heal, "PGTransport", catch)
    options: Any = OTHERS
    with Ranks(2) as ranks:
        source, behind = ranks.outcomes(
            lambda rank, pg: transfuse.heal(dict, step=-rank, group=pg, timeout=TIMEOUT, **options)
        )
    for outcome, given in ((source, OTHERS | {"map_path": None}), (behind, OTHERS)):
        cause = outcome.error and outcome.error.__cause__
        assert isinstance(cause, Caught)
        assert cause.args[0] == given


@pytest.mark.parametrize(
    ("call", "name"),
    [
        (lambda **options: transfuse.fetch("127.0.0.1:1", **options).state, "no_such"),
        (lambda **options: transfuse.fetch("127.0.0.1:1", **options).state, "relay"),
        (lambda **options: transfuse.fetch("127.0.0.1:1", **options).state, "max_bytes_per_second"),
        (lambda **options: transfuse.serve({}, **options), "no_such"),
        (lambda **options: transfuse.serve({}, **options), "relay"),
        (lambda **options: transfuse.serve({}, **options), "delta"),
        (lambda **options: PGTransport(Nowhere(), TIMEOUT, CPU, **options), "no_such"),
        (lambda **options: transfuse.heal(dict, step=1, group=Nowhere(), timeout=TIMEOUT, **options), "no_such"),
        (lambda **options: torchft().PGTransport(Nowhere(), TIMEOUT, CPU, **options), "no_such"),
    ],
    ids=["fetch", "fetch", "fetch", "serve", "serve", "serve", "transport", "heal", "torchft"],
)
def test_an_option_that_a_call_does_not_take_is_refused_by_name(call: Callable[..., object], name: str) -> None:
    with pytest.raises(TypeError, match=rf"\(\) got an unexpected keyword argument '{name}'"):
        call(**{name: True})


# ----------------------------------------------------------------------------------------------------------- the check


def test_what_holds_is_what_was_given_as_plain_numbers_and_what_the_environment_allows(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    given: Any = {"max_receive_bytes": torch.tensor(4096), "max_bytes_per_second": 10**9}
    held = Options(**given).check(TIMEOUT, Limits(), in_place=False)
    assert held == Options(max_receive_bytes=4096, max_bytes_per_second=1e9)
    assert type(held.max_receive_bytes) is int
    assert type(held.max_bytes_per_second) is float
    assert held.apply_to(Limits()) == dataclasses.replace(Limits(), max_receive_bytes=4096)
    assert Options().apply_to(Limits()) == Limits()
    monkeypatch.setenv("TRANSFUSE_SAME_HOST", "0")
    assert Options().check(TIMEOUT, Limits(), in_place=False) == Options(same_host=False)
    monkeypatch.setenv("TRANSFUSE_STREAMS", "0")
    assert Options().check(TIMEOUT, Limits(), in_place=False) == Options(same_host=False, streams=False)


@pytest.mark.parametrize(
    ("name", "value", "says"),
    [
        ("TRANSFUSE_STREAMS", "no", "TRANSFUSE_STREAMS must be 0 or 1, got 'no'"),
        ("TRANSFUSE_PORT", "65536", "TRANSFUSE_PORT must be a port, or the first and the last one .*, got '65536'"),
        ("TRANSFUSE_PORT", "29699-29600", "TRANSFUSE_PORT must be a port"),
        ("TRANSFUSE_PORT", "0-10", "TRANSFUSE_PORT must be a port"),
        ("TRANSFUSE_PORT", "", "TRANSFUSE_PORT must be a port"),
    ],
)
def test_a_wrong_environment_is_refused_before_the_first_transfer(
    name: str, value: str, says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match=says):
        PGTransport(Nowhere(), TIMEOUT, CPU)


def test_the_slowest_rate_is_still_allowed() -> None:
    slowest = slowest_rate(Limits(), TIMEOUT.total_seconds())
    Options(max_bytes_per_second=slowest).check(TIMEOUT, Limits(), in_place=False)
    with pytest.raises(ValueError, match="max_bytes_per_second must be at least"):
        Options(max_bytes_per_second=slowest * 0.99).check(TIMEOUT, Limits(), in_place=False)


@pytest.mark.parametrize(("transport", "allowed"), [("TCP", True), ("TCP_TLS", False)])
def test_nothing_leaves_a_group_that_encrypts(monkeypatch: pytest.MonkeyPatch, transport: str, allowed: bool) -> None:
    monkeypatch.setenv("TRANSFUSE_STREAMS", "1")
    monkeypatch.setenv("GLOO_DEVICE_TRANSPORT", transport)
    assert Options().check(TIMEOUT, Limits(), in_place=False).streams is allowed
