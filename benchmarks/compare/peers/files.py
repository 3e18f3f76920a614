"""Files in shared memory: what a job without a transport would use."""

from __future__ import annotations

import shutil
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from benchmarks.compare.peers.peer import Peer

__all__ = ["DistributedCheckpoint", "Safetensors", "TorchSave"]


class _File(Peer):
    """The source writes, all ranks meet at a barrier, the receivers read."""

    def prepare(self) -> None:
        self.path = self.scene.folder / self.key

    def tidy(self) -> None:
        if self.scene.sending:
            shutil.rmtree(self.path) if self.path.is_dir() else self.path.unlink()


class TorchSave(_File):
    key, name, package = "torch-save", "torch.save and load, /dev/shm", "torch"
    note = "in place it is mapped and copied in, fresh it is read"

    def send(self) -> None:
        torch.save(self.scene.state, self.path)
        self.scene.meet()

    def receive(self) -> Any:
        self.scene.meet()
        if self.scene.mode == "fresh":
            return torch.load(self.path, weights_only=True)
        loaded, target = torch.load(self.path, mmap=True, weights_only=True), self.scene.state
        torch._foreach_copy_(_tensors(target), _tensors(loaded))
        return target


def _tensors(state: object) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(state) if isinstance(leaf, torch.Tensor)]


class Safetensors(_File):
    key, name, package, module = "safetensors", "safetensors, /dev/shm", "safetensors", "safetensors.torch"
    whole = False
    note = "fresh it maps the file, and bytes are read on first use"

    def send(self) -> None:
        from safetensors.torch import save_file

        save_file(self.scene.tensors, self.path)
        self.scene.meet()

    def receive(self) -> Any:
        from safetensors.torch import load_file

        self.scene.meet()
        loaded = load_file(self.path)
        if self.scene.mode == "fresh":
            return loaded
        own = self.scene.tensors
        torch._foreach_copy_(list(own.values()), [loaded[name] for name in own])
        return own


class DistributedCheckpoint(_File):
    key, name, package = "dcp", "DCP, /dev/shm", "torch"
    modes = frozenset({"in place"})

    def send(self) -> None:
        from torch.distributed.checkpoint.state_dict_saver import save

        save(self.scene.state, checkpoint_id=self.path, no_dist=True)
        self.scene.meet()

    def receive(self) -> Any:
        from torch.distributed.checkpoint.state_dict_loader import load

        self.scene.meet()
        load(self.scene.state, checkpoint_id=self.path, no_dist=True)
        return self.scene.state
