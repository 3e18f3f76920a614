"""What all public calls have in common: the group and device they take by default, and the step they return."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import ParamSpec, Self, TypeVar

import torch
import torch.distributed as dist

from transfuse import _arguments
from transfuse._report import Report
from transfuse._wire.group import ProcessGroupLike, devices_of

Given = ParamSpec("Given")
Returned = TypeVar("Returned")


class Step(int):
    """A step that a state is at, with the report of the transfer that brought it: None if nothing had to move."""

    report: Report | None

    def __new__(cls, step: int, report: Report | None = None) -> Self:
        made = super().__new__(cls, step)
        made.report = report
        return made


#: What options were called in earlier versions, and what a caller writes now.
BEFORE = {
    "state_dict": "state= takes it",
    "pg": "group= takes it",
    "own": "rank_state= takes it",
    "load_own": "load_rank_state= takes it",
    "digests": "verify= takes it",
    "on_report": "the report is .report of what is returned, and of the error that is raised",
}


def one_manner(call: Callable[Given, Returned]) -> Callable[Given, Returned]:
    """For all public calls: refuse names and positions of earlier versions, with one sentence that says what is new."""
    parameters = inspect.signature(call).parameters
    places = [name for name, one in parameters.items() if one.kind is one.POSITIONAL_OR_KEYWORD]
    named = ", ".join(f"{name}=" for name, one in parameters.items() if one.kind is one.KEYWORD_ONLY)

    @functools.wraps(call)
    def checked(*args: Given.args, **kwargs: Given.kwargs) -> Returned:
        for name in kwargs:
            if name in BEFORE and name not in parameters:
                raise TypeError(f"{call.__name__}() has no {name}= any more: {BEFORE[name]}")
        if len(args) > len(places):
            raise TypeError(
                f"{call.__name__}() takes {' and '.join(places)}, and everything else by name ({named}), got "
                f"{len(args)} arguments without a name"
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
