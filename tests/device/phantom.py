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
    "capturing",
    "counters",
    "current_device",
    "current_stream",
    "default_stream",
    "device_count",
    "export_memory",
    "get_rng_state",
    "host_register",
    "host_unregister",
    "import_memory",
    "is_available",
    "is_initialized",
    "launch",
    "load",
    "manual_seed",
    "manual_seed_all",
    "max_memory_allocated",
    "memory_allocated",
    "read",
    "reset_counters",
    "reset_peak_memory_stats",
    "reset_settings",
    "set_available",
    "set_communicator_bytes",
    "set_copy_rate",
    "set_device",
    "set_device_count",
    "set_most_bytes",
    "set_registration",
    "set_rng_state",
    "set_stream",
    "sleep",
    "slow_fill_",
    "stalled",
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


def max_memory_allocated(device: torch.device | str | int | None = None) -> int:
    return int(_extension.most_allocated_bytes(_index(device)))


def reset_peak_memory_stats(device: torch.device | str | int | None = None) -> None:
    _extension.reset_most_allocated_bytes(_index(device))


def host_register(address: int, nbytes: int) -> None:
    """Pin memory of this process where it is, as ``cudaHostRegister`` does. Refused if part of it is pinned already."""
    _extension.register_host(address, nbytes)


def host_unregister(address: int) -> None:
    """The end of a registration that began at this address."""
    _extension.unregister_host(address)


def export_memory(tensor: torch.Tensor) -> tuple[int, int, int]:
    """Where another process finds the tensor's memory: a file of this process, an offset in it, and the bytes.

    The other process opens ``/proc/PID/fd/FILE``. Nothing keeps the memory for it: it sees it freed and overwritten.
    """
    file, offset, nbytes = _extension.export_memory(tensor)
    return int(file), int(offset), int(nbytes)


def import_memory(device: torch.device | str | int | None, file: int, offset: int, nbytes: int) -> torch.Tensor:
    """Memory of another process as bytes on a device of this one. Nothing is copied, and the file may be closed.

    When the tensor goes, the memory goes, in the order of the stream that was current here.
    """
    tensor = _extension.import_memory(_index(device), file, offset, nbytes)
    assert isinstance(tensor, torch.Tensor)
    return tensor


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
    """What has happened in this process since the last ``reset_counters``.

    - ``host_syncs``: how often the host waited for a device.
    - ``queries``: how often it asked whether an event or a stream is done.
    - ``bytes_to_host``, ``bytes_to_device``: what was copied across. The same bytes by the host's memory:
      ``pinned_bytes``, ``pageable_bytes``. ``async_copies``: the copies that did not block.
    - ``inner_bytes``: what was copied inside a device or between two. What kernels like ``cat`` write does not count.
    - ``kernels``, and ``fallbacks``: operators without a kernel here. They synchronise, and their copies count.
    - ``pinned_allocations``, ``pinned_most_bytes``: how often, and how much at a time. ``registrations`` are apart.
    - ``forbidden``: what was tried during a capture and must not be (``capturing``).
    - ``racing_posts``: operations of ``pccl`` that one thread posted while another one made the first of a pair.
    """
    return dict(_extension.counters())


def reset_counters() -> None:
    """All counters and ``stalled`` to 0."""
    _extension.reset_counters()


def stalled(stream: torch.Stream) -> tuple[int, float]:
    """How often the stream came to a wait for an event that was not reached yet, and how many seconds that took."""
    waits, seconds = _extension.stalled(stream)
    return int(waits), float(seconds)


def reset_settings() -> None:
    """What the functions below have set is as in a new process."""
    _extension.reset_settings()


def set_copy_rate(bytes_per_second: float) -> None:
    """How fast copies between host and device are that are queued from now on. 0: as fast as they can be."""
    _extension.set_copy_rate(bytes_per_second)


def set_registration(possible: bool) -> None:
    """Whether ``host_register`` works. On some machines it does not."""
    _extension.set_registration(possible)


def set_most_bytes(device: torch.device | str | int | None, nbytes: int) -> None:
    """The device is full with ``nbytes`` bytes: what would need more raises ``torch.OutOfMemoryError``."""
    _extension.set_most_bytes(_index(device), nbytes)


def set_communicator_bytes(nbytes: int) -> None:
    """How much of its device's memory each communicator takes that is made from now on."""
    _extension.set_communicator_bytes(nbytes)


def capturing(value: bool) -> None:
    """Whether the current stream is being captured, in CUDA's global mode.

    Meanwhile queries, synchronisations, copies that block, and pinning raise in every thread, and count as
    ``forbidden``. A stream that waits for a captured event is captured, too; a captured stream can wait for no other.
    Unlike on CUDA, what is queued on the stream runs at once, and a forbidden call does not end the capture.
    """
    if value:
        _extension.begin_capture()
    else:
        _extension.end_capture()


def sleep(seconds: float) -> None:
    """Keep the current stream busy."""
    _extension.sleep(seconds)


def slow_fill_(tensor: torch.Tensor, value: float, seconds: float) -> torch.Tensor:
    """A kernel on the current stream that fills only after this time."""
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
