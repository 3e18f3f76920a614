"""Checks of the arguments that callers pass. Usable values are converted; all others are refused in the call itself.

A wrong type is a TypeError, an impossible value a ValueError. Both name the argument, what it takes and what it got.
This module imports nothing of the package.
"""

from __future__ import annotations

import functools
import importlib.util
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from types import ModuleType
from typing import Annotated, Any, SupportsIndex, get_origin, get_type_hints

import numpy as np
import torch
from torch.distributed import GroupMember
from torch.distributed.device_mesh import DeviceMesh

#: How many characters of a value a message shows.
SHOWN = 60
MAX_PORT = 65535

#: What to run where NIXL is missing. The package ``nixl`` alone pulls builds for two versions of CUDA, and imports the
#: one for torch's version; where torch has no CUDA, any will do.
INSTALL_NIXL = "pip install transfuse[nixl], or, for one build only, pip install --no-deps nixl nixl-cu{}".format(
    "13" if (torch.version.cuda or "").startswith("13.") else "12"
)


def whole(name: str, value: object, takes: str = "an int") -> int:
    """An integer of any library, as an int. Bools are refused."""
    is_truth = isinstance(value, bool) or (isinstance(value, torch.Tensor) and value.dtype is torch.bool)
    if not is_truth:
        try:
            return operator.index(value)  # type: ignore[arg-type]
        except (TypeError, ValueError, RuntimeError):
            pass
    raise _wrong(name, takes, value)


def number(name: str, value: object, takes: str = "a number") -> float:
    """An integer or a float of any library, as a float. An integer that is too large for a float becomes infinity."""
    try:
        return float(value if isinstance(value, float | np.floating) else whole(name, value, takes))
    except OverflowError:
        return float("inf")


def duration(timeout: timedelta | float, name: str = "timeout") -> timedelta:
    """A timeout as a positive timedelta. Numbers are seconds."""
    if not isinstance(timeout, timedelta):
        seconds = number(name, timeout, "a timedelta, or a number of seconds")
        try:
            timeout = timedelta(seconds=seconds)
        except (ValueError, OverflowError):
            raise ValueError(f"{name} must be positive, and a finite number of seconds, got {seconds}") from None
    if timeout <= timedelta(0):
        raise ValueError(f"{name} must be positive, a microsecond at least, got {timeout.total_seconds():g} seconds")
    return timeout


def seconds_of(name: str, value: timedelta | float) -> float:
    """The seconds of a timeout."""
    return duration(value, name).total_seconds()


def check_step(step: SupportsIndex | None, name: str = "step") -> int | None:
    """A step as an int, or None. A step of more than 64 bits is refused here, since no message can carry it."""
    if step is None:
        return None
    found = whole(name, step, "an int or None")
    if not -(1 << 63) <= found < 1 << 63:
        raise ValueError(f"{name} must be a number of 64 bits, got {found}")
    return found


def ranks_of(name: str, ranks: SupportsIndex | Sequence[SupportsIndex]) -> tuple[int, ...]:
    """One rank or several, as a tuple of ints."""
    takes = "a rank, which is an int, or several of them"
    if isinstance(ranks, str | bytes):
        raise _wrong(name, takes, ranks)
    try:
        return (whole(name, ranks, takes),)
    except TypeError as error:
        try:
            several = tuple(ranks)  # type: ignore[arg-type]
        except TypeError:
            raise error from None
    return tuple(whole(name, rank, takes) for rank in several)


def check_group(pg: object) -> None:
    """Refuse what cannot be a process group. Any object with ``send`` and ``recv`` can, and our own streams."""
    if pg is None:
        raise TypeError(
            "pg is None: pass a process group, such as torch.distributed.group.WORLD (which is None until "
            "init_process_group has been called)"
        )
    if type(pg) is type(GroupMember.NON_GROUP_MEMBER) and pg == GroupMember.NON_GROUP_MEMBER:
        raise ValueError(
            "pg is GroupMember.NON_GROUP_MEMBER: this rank is not in the group that new_group made; use it only on the "
            "ranks that are in it"
        )
    calls = callable(getattr(pg, "send", None)) and callable(getattr(pg, "recv", None))
    if isinstance(pg, type | ModuleType) or not (calls or hasattr(pg, "stream_to")):
        instead = "mesh.get_group()" if isinstance(pg, DeviceMesh) else "torch.distributed.group.WORLD"
        raise _wrong("pg", "a process group, or anything with its send and recv", pg, f"pass for instance {instead}")


def device_of(device: object) -> torch.device:
    """A device of this process on which a backend can send tensors."""
    takes = "a torch.device or its name, such as 'cpu' for gloo or 'cuda' for NCCL"
    try:
        found = torch.device(device)  # type: ignore[call-overload]
    except TypeError:
        raise _wrong("device", takes, device) from None
    except RuntimeError as error:
        raise ValueError(f"device takes {takes}, got {_got(device)}: {str(error).splitlines()[0]}") from None
    if found.type == "meta":
        raise ValueError(f"device takes {takes}, got meta, on which tensors have no values")
    available = getattr(getattr(torch, found.type, None), "is_available", None)
    if callable(available) and not available():
        raise ValueError(f"device takes {takes}, got {found}, and this process has no such device")
    return torch.device(found)


def check_state_dict(state_dict: object) -> None:
    """Refuse anything but None or a function that returns the tree to receive into."""
    is_module = isinstance(state_dict, torch.nn.Module)
    if state_dict is None or (callable(state_dict) and not is_module):
        return
    if is_module:
        instead = "pass `model.state_dict`, not the module"
    elif callable(getattr(state_dict, "state_dict", None)):
        instead = "pass its method `state_dict`"
    else:
        instead = "pass a function that returns it, such as lambda: state"
    raise _wrong("state_dict", "a function that returns the tree to receive into", state_dict, instead)


def check_no_module(state_dict: object, instead: str) -> None:
    """Refuse a module where a state, or a callable that returns one, is expected: modules are callable too."""
    if isinstance(state_dict, torch.nn.Module):
        raise TypeError(f"{type(state_dict).__name__} is a module, not a state: {instead}, not the module")


def check_choices(**choices: object) -> None:
    """Refuse choices that are neither True nor False nor None."""
    for name, value in choices.items():
        if value is not None and not isinstance(value, bool):
            raise _wrong(name, "True, False or None", value)


def check_flags(**flags: object) -> None:
    """Refuse flags that are neither True nor False."""
    for name, value in flags.items():
        if not isinstance(value, bool):
            raise _wrong(name, "True or False", value)


def check_nixl(nixl: object) -> None:
    """Refuse ``nixl`` unless it is True, False or None, and True where NIXL is not installed."""
    check_choices(nixl=nixl)
    if nixl and importlib.util.find_spec("nixl") is None:
        raise ImportError(
            f"nixl=True (or TRANSFUSE_NIXL=1) asks for the NIXL route, but NIXL is not installed: {INSTALL_NIXL}"
        )


def check_mesh(mesh: object) -> None:
    if mesh is not None and not isinstance(mesh, DeviceMesh) and not callable(mesh):
        raise _wrong("mesh", "a DeviceMesh, a function that makes one from a MeshDescription, or None", mesh)


def check_progress(progress: object) -> None:
    if not isinstance(progress, bool) and not callable(progress):
        raise _wrong("progress", "True, False, or a function that gets a dict from rank to Progress", progress)


def check_callable(name: str, value: Callable[..., object] | None) -> Callable[..., object] | None:
    if value is not None and not callable(value):
        raise _wrong(name, "a function or None", value)
    return value


def check_text(name: str, value: object, takes: str) -> str:
    if not isinstance(value, str):
        raise _wrong(name, takes, value)
    return value


def listening_host(name: str, value: object) -> str:
    """The address that a server listens on."""
    if not check_text(name, value, "an address to listen on"):
        raise ValueError(f"{name} is empty, which would mean every interface: if you want that, pass 0.0.0.0")
    return str(value)


def listening_port(name: str, value: object) -> int:
    port = whole(name, value)
    if not 0 <= port <= MAX_PORT:
        raise ValueError(f"{name} must be 0, for a free one, or a number up to {MAX_PORT}, got {port}")
    return port


def at_least(least: int, *, or_none: bool = False) -> Callable[[str, object], int | None]:
    """A check for :class:`Given`: an int that is not smaller."""

    def check(name: str, value: object) -> int | None:
        if value is None and or_none:
            return None
        number = whole(name, value)
        if number < least:
            raise ValueError(f"{name} must be at least {least}, got {number}")
        return number

    return check


def alone(check: Callable[[Any], object]) -> Callable[[str, object], object]:
    """A check for :class:`Given`, of one that needs no name."""
    return lambda name, value: check(value)


@dataclass(frozen=True, kw_only=True)
class Given:
    """The arguments of a public call, each under its own name, with its check: ``Annotated[int, check]``.

    A check gets the name and the value, and refuses the value or returns what is used from there on. (No lambda: as a
    part of an annotation it would not see its module.) A call begins with ``Given(**locals())``. So its arguments stand
    in its signature and in a subclass of this, and nowhere else.
    """

    def __post_init__(self) -> None:
        kind: Any = type(self)
        for name, check in _checks_of(kind):
            object.__setattr__(self, name, check(name, getattr(self, name)))


@functools.cache
def _checks_of(given: type) -> list[tuple[str, Callable[[str, Any], object]]]:
    hints = get_type_hints(given, include_extras=True)
    return [(name, hint.__metadata__[0]) for name, hint in hints.items() if get_origin(hint) is Annotated]


def _wrong(name: str, takes: str, value: object, instead: str = "") -> TypeError:
    return TypeError(f"{name} takes {takes}, got {_got(value)}" + (f": {instead}" if instead else ""))


def _got(value: object) -> str:
    """A short description of a value. Containers are described by their type alone, since they may be long."""
    if value is None:
        return "None"
    if isinstance(value, torch.Tensor):
        return f"a Tensor of {value.dtype} and shape {tuple(value.shape)}"
    kind = value.__name__ if isinstance(value, type | ModuleType) else type(value).__name__
    if isinstance(value, bool | int | float | complex | str | bytes | np.generic):
        text = repr(value)
        return f"{kind} {text if len(text) <= SHOWN else text[:SHOWN] + '…'}"
    if isinstance(value, type):
        return f"the class {kind}"
    return f"the module {kind}" if isinstance(value, ModuleType) else f"a {kind}"
