"""Pin memory that somebody else has allocated: an accelerator copies to it and from it without the host's help.

A copy between a device and ordinary main memory goes through a buffer of the driver's, and the host waits for it. torch
pins only memory of its own, rounded up to a power of two. So memory that is used for long (a keeper's slot) is
registered once. Pin no private mapping of a file: the kernel would copy every page of it.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable

import torch

logger = logging.getLogger("transfuse")


def register(owner: object, address: int, nbytes: int, kind: str) -> bool:
    """Pin this memory for the accelerators of one kind until ``owner``, which holds it, is gone. False: impossible."""
    module = torch.get_device_module(kind)
    try:
        unregister = _register(module, address, nbytes) if nbytes else None
    except (RuntimeError, OSError) as error:
        logger.info("%d bytes of main memory cannot be pinned for %s: %s", nbytes, kind, error)
        return False
    if unregister is None:
        return False
    # At the end of the process the driver lets go by itself, and may be gone already.
    weakref.finalize(owner, _end, unregister, address).atexit = False
    return True


def _register(module: object, address: int, nbytes: int) -> Callable[[int], object] | None:
    """Register memory with an accelerator; return what ends that. None: such an accelerator cannot."""
    if module is torch.cuda:
        runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        portable = 1  # For all devices of the process.
        error = runtime.cudaHostRegister(address, nbytes, portable)
        if int(error) != 0:
            raise RuntimeError(f"cudaHostRegister: {error}")
        end: Callable[[int], object] = runtime.cudaHostUnregister
        return end
    begin = getattr(module, "host_register", None)
    if begin is None:
        return None
    begin(address, nbytes)
    return getattr(module, "host_unregister", None)


def _end(unregister: Callable[[int], object], address: int) -> None:
    try:
        unregister(address)
    except (RuntimeError, OSError) as error:
        logger.info("pinned memory could not be given back: %s", error)
