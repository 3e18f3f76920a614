"""Handles: by them another process of this host opens memory of an accelerator, and copies it on its own device.

A handle names an allocation, in which several storages may lie. How handles are made and opened depends on the
accelerator: CUDA has its own way, and has never been tried here; elsewhere it is ``export_memory(tensor)`` and
``import_memory(device, file, offset, nbytes)`` of the accelerator's module, where it has these. There a handle is a
file of the process that has the memory.

Nothing keeps the memory for a process that has opened it. That it is still what it was has to be proven otherwise.
"""

from __future__ import annotations

import os
import stat
import threading
from contextlib import suppress
from typing import Any, NamedTuple, Protocol

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from transfuse._state.leaves import dense
from transfuse._tuning import DEVICE_HANDLE_BYTES

#: Where an opened range begins is a multiple of this. It divides the alignment of every allocation.
ALIGNMENT = 256

#: A reference that tells when a storage is gone, which the lifetimes of its Python objects do not.
_weak_reference: Any = StorageWeakRef
_storage: Any = torch.UntypedStorage


class DeviceHandle(NamedTuple):
    """What names the allocation of a storage, and where in it the storage begins, in bytes."""

    name: bytes
    offset: int


class _Sharing(Protocol):
    def export(self, storage: torch.UntypedStorage) -> DeviceHandle: ...

    def open(self, device: torch.device, pid: int, name: bytes, low: int, nbytes: int) -> torch.UntypedStorage: ...


class _OfCuda:
    """CUDA's IPC by torch's own functions, read in its source. **No line of this class has ever run.**

    torch counts who has opened what it shares, in shared memory: it frees a storage only when its one receiver has said
    so. A receiver that is killed never says it, and the place of the counter that an entry names would be written to
    unchecked. So the source takes its count back at once, and a receiver names a counter that cannot exist: torch then
    leaves it alone. Nor are events exported: the source waits for its work before it shares anything.
    """

    #: No shared memory has a slash in its name.
    _NO_COUNTER = b"/transfuse/none"

    def __init__(self) -> None:
        self._lock = threading.Lock()
        #: Each storage is shared once: every time costs an event, and a wrapper that stays around its memory.
        self._shared: dict[int, tuple[Any, int, DeviceHandle]] = {}

    def export(self, storage: torch.UntypedStorage) -> DeviceHandle:
        with self._lock:
            _, address, handle = self._shared.get(storage._cdata, (None, 0, None))
            if handle is None or address != storage.data_ptr():
                shared: Any = storage
                _, name, _, offset, counter, number, _, _ = shared._share_cuda_()
                _storage._release_ipc_counter_cuda(counter, number)
                handle = DeviceHandle(name, offset)
                for key in [key for key, (weak, _, _) in self._shared.items() if weak.expired()]:
                    del self._shared[key]
                self._shared[storage._cdata] = _weak_reference(storage), storage.data_ptr(), handle
            return handle

    def open(self, device: torch.device, pid: int, name: bytes, low: int, nbytes: int) -> torch.UntypedStorage:
        opened = _storage._new_shared_cuda(device.index, name, nbytes, low, self._NO_COUNTER, 0, b"", False)
        assert isinstance(opened, torch.UntypedStorage)
        return opened


class _OfModule:
    """The functions of an accelerator's module."""

    def __init__(self, module: Any) -> None:
        self._module = module

    def export(self, storage: torch.UntypedStorage) -> DeviceHandle:
        whole = dense.over(storage, torch.uint8, 0, (storage.nbytes(),), (1,))
        file, offset, _ = self._module.export_memory(whole)
        return DeviceHandle(b"%d" % file, offset)

    def open(self, device: torch.device, pid: int, name: bytes, low: int, nbytes: int) -> torch.UntypedStorage:
        if not name.isdigit():
            raise ValueError("its handle is not the number of a file")
        path = f"/proc/{pid}/fd/{int(name)}"
        if not stat.S_ISREG(os.stat(path).st_mode):  # To open anything else may have consequences.
            raise ValueError(f"{path} is not memory")
        file = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        try:
            opened: torch.Tensor = self._module.import_memory(device, file, low, nbytes)
        finally:
            os.close(file)
        return opened.untyped_storage()


_cuda = _OfCuda()


def _sharing(kind: str) -> _Sharing | None:
    """How an accelerator of this type does it; None: not at all."""
    if kind == "cuda":
        return _cuda
    module = None
    with suppress(RuntimeError):
        module = torch.get_device_module(kind)
    return _OfModule(module) if hasattr(module, "export_memory") and hasattr(module, "import_memory") else None


def are_known(kind: str) -> bool:
    """Whether memory of this type of accelerator has handles here at all."""
    return _sharing(kind) is not None


def exported(storage: torch.UntypedStorage) -> DeviceHandle | None:
    """The handle of a storage on an accelerator; None: nobody else can open it."""
    sharing = _sharing(storage.device.type)
    if sharing is None:
        return None
    try:
        handle = sharing.export(storage)
    except (RuntimeError, OSError):  # It may be another process's memory, or of an allocator that cannot share.
        return None
    return handle if len(handle.name) <= DEVICE_HANDLE_BYTES else None


def opened(device: torch.device, pid: int, name: bytes, low: int, nbytes: int) -> torch.UntypedStorage:
    """A range of the allocation of another process, as memory of ``device``. ``OSError`` and others if it cannot be.

    Do not trust the name: a peer wrote it. What is in it is the driver's to judge.
    """
    sharing = _sharing(device.type)
    if sharing is None:
        raise OSError(f"no memory of other processes can be opened on {device.type}")
    return sharing.open(device, pid, name, low, nbytes)
