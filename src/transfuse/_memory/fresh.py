"""Fresh memory: all memory that one receive allocates, for leaves without a target, and for what is held."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from functools import cache
from math import prod
from typing import NamedTuple

import numpy as np
import torch

from transfuse._errors import LimitExceeded
from transfuse._limits import Limits
from transfuse._memory.arena import Arena
from transfuse._state.leaves import dense
from transfuse._state.manifest import Manifest
from transfuse._state.tensors import Bools, device_type, on_cpu

logger = logging.getLogger("transfuse")


class HeldMemory(NamedTuple):
    """What is held aside until it is installed: in main memory, and on the wire's device."""

    here: torch.Tensor
    there: torch.Tensor


class FreshMemory(NamedTuple):
    """All memory that one receive has allocated. A later receive of the same state may use it again."""

    #: For each tensor of the manifest, whether it is built over the arena.
    tensors: Bools
    arena: Arena
    #: For each leaf that is a fresh DTensor, its local tensor.
    local_tensors: Mapping[int, torch.Tensor]
    #: The parcels that are held aside, if any are.
    held: HeldMemory | None = None

    @property
    def nbytes(self) -> int:
        """How many bytes arrive fresh."""
        return self.arena.nbytes + sum(tensor.nbytes for tensor in self.local_tensors.values())

    def fits(self, tensors: Bools, local_shapes: Mapping[int, tuple[int, ...]]) -> bool:
        """Whether this memory serves these tensors and local tensors of the same manifest."""
        mine = {leaf: tuple(tensor.shape) for leaf, tensor in self.local_tensors.items()}
        return bool(np.array_equal(self.tensors, tensors)) and mine == dict(local_shapes)


class MemorySupply(NamedTuple):
    """Where fresh memory comes from: a device, within limits, or the memory that an earlier receive has left."""

    device: torch.device
    limits: Limits
    kept: FreshMemory | None = None


def allocate(manifest: Manifest, fresh: Bools, supply: MemorySupply, extra_bytes: int = 0) -> Arena:
    """Allocate each storage that has a fresh tensor. The caller allocates ``extra_bytes`` more, which count too."""
    tensors, storages = manifest.tensors, manifest.storages
    device, limits, _ = supply
    needed = np.zeros(len(storages), dtype=bool)
    needed[tensors.storage[fresh]] = True
    # An empty fresh tensor needs a storage, but no bytes in it.
    filled = np.zeros(len(storages), dtype=bool)
    filled[tensors.storage[fresh & (tensors.numel > 0)]] = True
    total = int(storages.nbytes[filled].astype(float).sum()) + extra_bytes
    if total > limits.max_receive_bytes:
        raise LimitExceeded(
            f"the source offers {total} bytes of fresh tensors, more than max_receive_bytes="
            f"{limits.max_receive_bytes}; raise it, or receive in place"
        )
    homes = [_home_of(name, device) for name in storages.devices]
    try:
        return Arena(np.where(filled, storages.nbytes, 0), needed, homes, storages.device)
    except RuntimeError as error:
        raise LimitExceeded(f"no memory for {total} bytes of fresh tensors; receive in place: {error}") from error


class FreshTensors:
    """The fresh tensors of a state that is assembled. The plan says which; see ``plan.needed_blocks.Allocator``."""

    def __init__(self, manifest: Manifest, supply: MemorySupply) -> None:
        self._manifest = manifest
        self._supply = supply
        self._memory: FreshMemory | None = None

    @property
    def memory(self) -> FreshMemory:
        """All that has been allocated. :meth:`allocate` comes first."""
        assert self._memory is not None
        return self._memory

    def allocate(self, wanted: Bools, local_shapes: Mapping[int, tuple[int, ...]]) -> None:
        """Allocate the ``wanted`` tensors of the manifest, and for these leaves local tensors of these shapes."""
        kept = self._supply.kept
        if kept is not None and kept.fits(wanted, local_shapes):
            self._memory = kept
            return
        sizes = (prod(shape) * self._dtype(leaf).itemsize for leaf, shape in local_shapes.items())
        say_where(self._manifest, wanted, self._supply.device)
        arena = allocate(self._manifest, wanted, self._supply, sum(sizes))
        local_tensors = {leaf: self._empty(leaf, shape) for leaf, shape in local_shapes.items()}
        self._memory = FreshMemory(wanted, arena, local_tensors)

    def tensor(self, row: int) -> torch.Tensor:
        """Tensor ``row`` of the manifest, which was wanted, without its flags."""
        described = self._manifest.tensors
        storage = self.memory.arena.storage(int(described.storage[row]))
        offset = int(described.offset[row]) if described.numel[row] else 0
        return dense.over(storage, self._manifest.dtype_of(row), offset, described.shape(row), described.stride(row))

    def local_tensor(self, leaf: int) -> torch.Tensor:
        """The local tensor of a fresh DTensor."""
        return self.memory.local_tensors[leaf]

    def _dtype(self, leaf: int) -> torch.dtype:
        return self._manifest.dtype_of(int(self._manifest.first_tensors[leaf]))

    def _empty(self, leaf: int, shape: tuple[int, ...]) -> torch.Tensor:
        storages = self._manifest.storages
        storage = int(self._manifest.tensors.storage[int(self._manifest.first_tensors[leaf])])
        device = _home_of(storages.devices[int(storages.device[storage])], self._supply.device)
        return torch.empty(shape, dtype=self._dtype(leaf), device=device)


def _home_of(name: str, wire: torch.device) -> torch.device:
    """Where a fresh tensor goes that the source has on this device: to the wire's device if it is of the same type."""
    return wire if device_type(name) == wire.type else torch.device("cpu")


def say_where(manifest: Manifest, fresh: Bools, wire: torch.device) -> None:
    """Warn, once for each type of device, if these tensors of an accelerator arrive in main memory."""
    storages = manifest.storages
    if on_cpu(storages.devices).all():
        return
    for device in set(storages.device[manifest.tensors.storage[fresh]].tolist()):
        found = device_type(storages.devices[device])
        if found not in ("cpu", wire.type):
            _say_once(found, wire.type)


@cache
def _say_once(source: str, wire: str) -> None:
    logger.warning(
        "the source has tensors on %s: fresh ones arrive in main memory, because the transfer runs over %s; to have "
        "them elsewhere, receive into targets that are there",
        source,
        wire,
    )
