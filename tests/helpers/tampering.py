"""Process groups that see or change what leaves them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

__all__ = ["Passing", "Tampering"]


class Passing:
    """A gloo group that passes everything on as it is. Subclasses do not."""

    def __init__(self, pg: Any) -> None:
        self._pg = pg

    def rank(self) -> int:
        return int(self._pg.rank())

    def size(self) -> int:
        return int(self._pg.size())

    def name(self) -> str:
        return "gloo"

    def send(self, tensors: list[torch.Tensor], rank: int, tag: int) -> Any:
        return self._pg.send(tensors, rank, tag)

    def recv(self, tensors: list[torch.Tensor], rank: int, tag: int) -> Any:
        return self._pg.recv(tensors, rank, tag)


class Tampering(Passing):
    """A group whose ``send`` lets :meth:`tamper` change a copy of the bytes that leave for a rank."""

    def __init__(self, pg: Any, tamper: Callable[[torch.Tensor], torch.Tensor] | None = None) -> None:
        super().__init__(pg)
        self._tamper = tamper

    def tamper(self, tensor: torch.Tensor, rank: int) -> torch.Tensor:
        return tensor if self._tamper is None else self._tamper(tensor)

    def send(self, tensors: list[torch.Tensor], rank: int, tag: int) -> Any:
        return super().send([self.tamper(tensors[0].clone(), rank)], rank, tag)
