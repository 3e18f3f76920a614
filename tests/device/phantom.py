"""The make-believe accelerator ``phantom``: what ``torch.phantom`` offers, and what only tests use.

It behaves as a GPU does: the host cannot touch its memory, its work is asynchronous, its streams are not ordered with
each other unless events say so, and it must not be used in a fork of a process that has used it.
"""

from __future__ import annotations

import atexit
import sys
from types import ModuleType
from typing import Any

import torch
from torch import Event, Stream
from torch.utils.backend_registration import generate_methods_for_privateuse1_backend, rename_privateuse1_backend

from device import build

__all__ = [
    "Event",
    "Stream",
    "counters",
    "current_device",
    "current_stream",
    "default_stream",
    "device_count",
    "get_rng_state",
    "is_available",
    "is_initialized",
    "launch",
    "load",
    "manual_seed",
    "manual_seed_all",
    "memory_allocated",
    "read",
    "reset_counters",
    "set_available",
    "set_device",
    "set_device_count",
    "set_rng_state",
    "set_stream",
    "sleep",
    "slow_fill_",
    "stream",
    "synchronize",
]

_extension: Any = None


def load() -> ModuleType:
    """Build the device if necessary and register it with torch. Raises ``build.Unavailable`` where that cannot be.

    Backward passes on the device work only if the process has run none before: torch counts the devices at the first.
    """
    global _extension
    this = sys.modules[__name__]
    if _extension is None:
        extension = build.load()
        rename_privateuse1_backend("phantom")
        torch._register_device_module("phantom", this)  # type: ignore[no-untyped-call]
        generate_methods_for_privateuse1_backend(for_storage=True)
        # The first search for the shape of a result imports much: that must not fall into a test.
        _ = torch.empty(1, device="meta") * 2
        # Streams that still work when the interpreter ends would use what is being taken apart.
        atexit.register(extension.stop)
        _extension = extension
    return this


# --------------------------------------------------------------------------------------------- what torch asks for


def is_available() -> bool:
    return _extension is not None and bool(_extension.available())


def device_count() -> int:
    return int(_extension.device_count()) if is_available() else 0


def is_initialized() -> bool:
    """Whether this process has used a stream, a device or its memory."""
    return _extension is not None and bool(_extension.initialised())


def init() -> None:
    _extension.initialise()


def _lazy_init() -> None:
    _extension.initialise()


def _is_in_bad_fork() -> bool:
    return _extension is not None and bool(_extension.in_bad_fork())


def current_device() -> int:
    _extension.initialise()
    return int(_extension.current_device())


def set_device(device: torch.device | str | int) -> None:
    _extension.set_device(_index(device))


class device:  # noqa: N801 - as in torch's own modules
    """The current device, for the duration of a block."""

    def __init__(self, device: torch.device | str | int) -> None:
        self.idx = _index(device)
        self.prev_idx = -1

    def __enter__(self) -> None:
        self.prev_idx = _extension.current_device()
        _extension.set_device(self.idx)

    def __exit__(self, *_: object) -> None:
        _extension.set_device(self.prev_idx)


def current_stream(device: torch.device | str | int | None = None) -> torch.Stream:
    return torch.accelerator.current_stream(_index(device))


def default_stream(device: torch.device | str | int | None = None) -> torch.Stream:
    return torch.Stream(stream_id=0, device_index=_index(device), device_type=_kind())


def set_stream(stream: torch.Stream) -> None:
    torch.accelerator.set_stream(stream)


def stream(stream: torch.Stream) -> torch.Stream:
    """A stream is its own context."""
    return stream


def synchronize(device: torch.device | str | int | None = None) -> None:
    torch.accelerator.synchronize(_index(device))


def manual_seed(seed: int) -> None:
    _generator(None).manual_seed(seed)


def manual_seed_all(seed: int) -> None:
    for index in range(device_count()):
        _generator(index).manual_seed(seed)


def get_rng_state(device: torch.device | str | int | None = None) -> torch.Tensor:
    return _generator(device).get_state()


def set_rng_state(new_state: torch.Tensor, device: torch.device | str | int | None = None) -> None:
    _generator(device).set_state(new_state)


def memory_allocated(device: torch.device | str | int | None = None) -> int:
    return int(_extension.allocated_bytes(_index(device)))


def get_amp_supported_dtype() -> list[torch.dtype]:
    return [torch.float16, torch.bfloat16]


# ------------------------------------------------------------------------------------------------ what only tests use


def set_available(value: bool) -> None:
    """Whether torch finds the accelerator. It cannot be taken out of a process again, but it can be hidden."""
    _extension.set_available(value)


def set_device_count(count: int) -> None:
    """There are two devices, unless ranks that are threads of this process need one each: 16 at most."""
    _extension.set_device_count(count)


def counters() -> dict[str, int]:
    """``host_syncs``, ``async_copies``, ``bytes_to_host``, ``bytes_to_device``, ``kernels`` and ``fallbacks``.

    A fallback is an operator without a kernel here: it synchronises, and its copies count like others.
    """
    return dict(_extension.counters())


def reset_counters() -> None:
    _extension.reset_counters()


def sleep(seconds: float) -> None:
    """Keep the current stream busy."""
    _extension.sleep(seconds)


def slow_fill_(tensor: torch.Tensor, value: float, seconds: float) -> torch.Tensor:
    """A kernel on the current stream that fills only after so long."""
    _extension.slow_fill_(tensor, value, seconds)
    return tensor


def launch(stream: torch.Stream, function: Any) -> None:
    """Call the function in the thread of the stream, in order. What it raises is raised by the next synchronisation."""
    _extension.launch(stream, function)


def read(tensor: torch.Tensor, timeout: float = 10.0) -> bytes:
    """What the tensor holds once all devices are idle. It counts nowhere."""
    return bytes(_extension.read(tensor, timeout))


def _index(device: torch.device | str | int | None) -> int:
    if isinstance(device, str):
        device = torch.device(device)
    if isinstance(device, torch.device):
        device = device.index
    return int(_extension.current_device()) if device is None else device


def _kind() -> int:
    return int(torch._C._autograd.DeviceType.PrivateUse1.value)


def _generator(device: torch.device | str | int | None) -> torch.Generator:
    generator = _extension.default_generator(_index(device))
    assert isinstance(generator, torch.Generator)
    return generator
