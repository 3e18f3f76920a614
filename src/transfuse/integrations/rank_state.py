"""What a rank has of its own beside tensors: counters, histories, places and random number generators, in one tensor.

A keeper gives a state whose structure changes new slots. A history that grows would change it at each commit, so all
of this is written into one tensor with room to spare. It is read with ``torch.load(weights_only=True)``, which runs
nothing: what cannot be read so is refused when it is written.
"""

from __future__ import annotations

import io
from typing import Any

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from transfuse import StateError
from transfuse._tuning import RANK_STATE_LEAST_BYTES

__all__ = ["Packer", "is_sync_due", "set_sync_due", "unpack"]


def is_sync_due(model: object) -> bool:
    """Whether the next forward pass of a model that DDP has wrapped begins with a broadcast of rank 0's buffers.

    The first one does. Others do if the pass before computed gradients that DDP added up: not during manual
    optimization with Lightning, and not after a validation.
    """
    return bool(model.require_forward_param_sync) if isinstance(model, DistributedDataParallel) else False


def set_sync_due(model: object, is_due: bool) -> None:
    if isinstance(model, DistributedDataParallel):
        model.require_forward_param_sync = is_due


class Packer:
    """Writes trees into a tensor whose size seldom changes."""

    def __init__(self) -> None:
        self._size = 0

    def pack(self, tree: dict[str, Any]) -> Tensor:
        """The tree as bytes. A value that only pickle could read again is an error that names its key."""
        file = io.BytesIO()
        torch.save(tree, file)
        try:
            # At each commit: a callback may have something new to say long after the first one.
            file.seek(0)
            torch.load(file, weights_only=True)
        except Exception:
            for key, value in tree.items():
                _check(key, value)
            raise
        data = file.getbuffer()
        if len(data) + 8 > self._size:
            self._size = RANK_STATE_LEAST_BYTES
            while self._size < 2 * (len(data) + 8):
                self._size *= 2
        packed = torch.zeros(self._size, dtype=torch.uint8)
        packed[:8] = torch.tensor([len(data)], dtype=torch.int64).view(torch.uint8)
        packed[8 : 8 + len(data)] = torch.frombuffer(data, dtype=torch.uint8)
        return packed


def unpack(packed: Tensor) -> dict[str, Any]:
    length = int(packed[:8].clone().view(torch.int64))
    found: dict[str, Any] = torch.load(io.BytesIO(packed[8 : 8 + length].numpy().tobytes()), weights_only=True)
    return found


def _check(path: str, value: object) -> None:
    """Refuse what a restarted worker could not read, while there is a worker to tell."""
    file = io.BytesIO()
    try:
        torch.save(value, file)
        file.seek(0)
        torch.load(file, weights_only=True)
    except Exception as error:
        if isinstance(value, dict):
            for key, below in value.items():
                _check(f"{path}.{key}", below)
        raise StateError(
            f"{path} cannot be kept: {type(value).__name__} is not made of tensors, numbers, text, lists and dicts. "
            f"Convert it where it is saved ({str(error).splitlines()[0]})"
        ) from error
