"""The same tree on another device: every storage is copied byte by byte, and every tensor is the same view of it.

This shares no code with the library. So a state in main memory can be sent from a device, and what arrived there can be
compared in main memory, with the usual oracle.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils import _pytree

from states import Pair

__all__ = ["Mirror", "devices_of", "to_cpu"]


class Mirror:
    """Trees of main memory, mirrored on a device.

    >>> mirror = Mirror(device)
    >>> target = mirror.there(own)
    >>> result = mirror.back(receive_into(target))

    After ``back``, ``own`` holds what was written to ``target``, also around the tensors, and ``result`` has tensors
    of ``own`` where it had those of ``target``.
    """

    def __init__(self, device: torch.device | str) -> None:
        self.device = torch.device(device)
        #: Tensors that cannot be on the device, and stay where they are.
        self.left: list[Tensor] = []
        #: By the storage's address in C++: the storage here and the one there.
        self._storages: dict[int, tuple[torch.UntypedStorage, torch.UntypedStorage]] = {}
        #: By id: the tensor here and the one there.
        self._tensors: dict[int, tuple[Tensor, Tensor]] = {}
        self._versions: dict[int, int] = {}

    def there(self, tree: Any) -> Any:
        """The same tree with its tensors on the device."""
        memo: dict[int, Any] = {}
        for leaf in _pytree.tree_iter(tree):
            if isinstance(leaf, Tensor):
                memo[id(leaf)] = self._tensor(leaf)
        return copy.deepcopy(tree, memo)

    def back(self, tree: Any) -> Any:
        """Copy the bytes of all mirrored storages back; return a tree from the device as one in main memory."""
        for bytes_here, bytes_there in self._storages.values():
            _bytes_of(bytes_here).copy_(_bytes_of(bytes_there))
        for here, there in self._tensors.values():
            if here is not there and there._version > self._versions[id(here)]:
                torch.autograd.graph.increment_version(here)
        home = Mirror("cpu")
        home._storages = {theirs._cdata: (theirs, ours) for ours, theirs in self._storages.values()}
        home._tensors = {id(there): (there, here) for here, there in self._tensors.values()}
        return home.there(tree)

    def _tensor(self, tensor: Tensor) -> Tensor:
        known = self._tensors.get(id(tensor))
        if known is not None:
            return known[1]
        before = dict(self._storages)
        try:
            with torch.no_grad():
                made = self._made(tensor)
        except (NotImplementedError, RuntimeError):
            if self.device.type == "cpu":
                raise
            # torch cannot make this kind of tensor there: what was mirrored of its parts does not count.
            made, self._storages = tensor, before
        if made is tensor:
            self.left.append(tensor)
        elif isinstance(tensor, nn.Parameter):
            made = nn.Parameter(made, requires_grad=tensor.requires_grad)
        elif isinstance(tensor, nn.Buffer):
            made = nn.Buffer(made, persistent=tensor.persistent)
        elif tensor.requires_grad:
            made.requires_grad_()
        self._tensors[id(tensor)] = tensor, made
        self._versions[id(tensor)] = made._version
        return made

    def _made(self, any_tensor: Tensor) -> Tensor:
        t: Any = any_tensor
        made: Any
        if isinstance(t, DTensor):
            mesh, placements = t.device_mesh, t.placements
            local = self._tensor(t._local_tensor)
            return DTensor.from_local(local, mesh, placements, run_check=False, shape=t.shape, stride=t.stride())
        if isinstance(t, Pair):
            return Pair(self._tensor(t.data_), self._tensor(t.scale), t.context)
        if type(t) not in (Tensor, nn.Parameter, nn.Buffer) and t.layout is not torch.jagged:
            return any_tensor
        if t.is_meta or t.is_quantized:
            return any_tensor
        if t.layout is torch.strided:
            return self._strided(t)
        if t.layout is torch.jagged:
            lengths = None if t._lengths is None else self._tensor(t._lengths)
            made = torch.nested.nested_tensor_from_jagged(
                self._tensor(t._values), self._tensor(t._offsets), lengths, jagged_dim=t._ragged_idx
            )
        elif t.layout is torch.sparse_coo:
            made = torch.sparse_coo_tensor(
                self._strided(t._indices()),
                self._strided(t._values()),
                t.shape,
                is_coalesced=t.is_coalesced(),
                check_invariants=False,
            )
        else:
            rows = t.layout in (torch.sparse_csr, torch.sparse_bsr)
            parts = (t.crow_indices(), t.col_indices()) if rows else (t.ccol_indices(), t.row_indices())
            made = torch.sparse_compressed_tensor(
                self._strided(parts[0]),
                self._strided(parts[1]),
                self._strided(t.values()),
                t.shape,
                layout=t.layout,
                check_invariants=False,
            )
            # Some devices can make such a tensor but have no operator to look into it.
            made.crow_indices() if rows else made.ccol_indices()
        result: Tensor = made
        return result

    def _strided(self, t: Tensor) -> Tensor:
        if t.device.type == self.device.type:
            return t
        storage = self._storage(t.untyped_storage())
        made = torch.empty(0, dtype=t.dtype, device=self.device)
        made = made.set_(storage, t.storage_offset(), tuple(t.shape), t.stride())
        if t.is_conj():
            made = made.conj()
        return torch._neg_view(made) if t.is_neg() else made

    def _storage(self, storage: torch.UntypedStorage) -> torch.UntypedStorage:
        known = self._storages.get(storage._cdata)
        if known is None:
            there = torch.empty(storage.nbytes(), dtype=torch.uint8, device=self.device)
            known = self._storages[storage._cdata] = storage, there.untyped_storage()
            there.copy_(_bytes_of(storage))
        return known[1]


def to_cpu(tree: Any) -> Any:
    """The same tree in main memory."""
    return Mirror("cpu").there(tree)


def devices_of(tree: Any) -> set[str]:
    """The devices on which tensors of a tree lie."""
    return {str(leaf.device) for leaf in _pytree.tree_iter(tree) if isinstance(leaf, Tensor)}


def _bytes_of(storage: torch.UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage, 0, (storage.nbytes(),), (1,))
