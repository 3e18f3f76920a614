"""What all public calls have in common: names that stay, and the group and device that they take by default."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Container, Iterable
from typing import ParamSpec, TypeVar

import torch
import torch.distributed as dist

from transfuse import _arguments
from transfuse._wire.group import ProcessGroupLike, devices_of

Given = ParamSpec("Given")
Returned = TypeVar("Returned")


#: What options were called in earlier versions, and what they are called now.
RENAMED = {
    "state_dict": "state",
    "pg": "group",
    "own": "rank_state",
    "load_own": "load_rank_state",
    "digests": "verify",
}
#: What a caller of an earlier version is told.
BEFORE = {old: f"{new}= takes it" for old, new in RENAMED.items()} | {
    "on_report": "the report is .report of what is returned, and of the error that is raised",
}


def refuse_before(call: str, given: Iterable[str], known: Container[str]) -> None:
    """Refuse options of earlier versions, with one sentence that says what is new."""
    for name in given:
        if name in BEFORE and name not in known:
            # What takes a Keep has its options from there.
            whose = "keep()'s " if name in RENAMED and "keep" in known else ""
            raise TypeError(f"{call}() has no {name}= any more: {whose}{BEFORE[name]}")


def attribute_before(owner: object, name: str, now: str) -> AttributeError:
    """The error of an attribute that is called otherwise now."""
    return AttributeError(f"{type(owner).__name__} has no .{name} any more: .{now} has it")


def one_manner(call: Callable[Given, Returned]) -> Callable[Given, Returned]:
    """For public calls, and for the ``__init__`` of public classes: refuse names and positions of earlier versions."""
    parameters = inspect.signature(call).parameters
    called = call.__qualname__.removesuffix(".__init__")
    is_method = called != call.__qualname__
    places = [name for name, one in parameters.items() if one.kind is one.POSITIONAL_OR_KEYWORD][is_method:]
    named = ", ".join(f"{name}=" for name, one in parameters.items() if one.kind is one.KEYWORD_ONLY)

    @functools.wraps(call)
    def checked(*args: Given.args, **kwargs: Given.kwargs) -> Returned:
        refuse_before(called, kwargs, parameters)
        if len(args) - is_method > len(places):
            raise TypeError(
                f"{called}() takes {' and '.join(places)}, and everything else by name ({named}), got "
                f"{len(args) - is_method} arguments without a name"
            )
        return call(*args, **kwargs)

    return checked


def group_or_default(group: ProcessGroupLike | None, call: str) -> ProcessGroupLike:
    """The group that a call was given, or the default group."""
    if group is not None:
        return group
    if not dist.is_initialized():
        raise TypeError(
            f"{call}() needs a process group: call torch.distributed.init_process_group() first, or pass group="
        )
    return dist.distributed_c10d._get_default_group()


def device_for(group: ProcessGroupLike, device: torch.device | str | None) -> torch.device:
    """The device that a call was given; or the CPU, or what the group's backend needs if it has none for the CPU."""
    if device is not None:
        return _arguments.device_of(device)
    types = devices_of(group)
    return torch.device("cpu" if "cpu" in types or not types else types[0])
