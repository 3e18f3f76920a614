"""Spots: the tensors here in which blocks land, and what is needed to fill them."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

import torch

from transfuse.state.leaves import dense
from transfuse.state.leaves.codec import Coordinate
from transfuse.state.leaves.dense import Signs
from transfuse.state.leaves.layout import Block

__all__ = ["Global", "Need", "Spot"]


@dataclass(eq=False)
class Spot:
    """A tensor that blocks land in: a target's, or a fresh one."""

    tensor: torch.Tensor
    #: Whose it is: the number of a target leaf, or, if ``fresh``, of a leaf of the first cohort that has no target.
    leaf: int
    fresh: bool = False
    signs: Signs | None = None
    #: As what items arrive, if they are converted here.
    wire: torch.dtype | None = None
    #: With ``atomic``, what is written in the end.
    final: torch.Tensor | None = None
    item: int = field(init=False)
    strides: tuple[int, ...] = field(init=False)
    offset: int = field(init=False)

    def __post_init__(self) -> None:
        self.item, self.strides = self.tensor.element_size(), self.tensor.stride()
        self.offset = dense.offset_of(self.tensor)

    @cached_property
    def address(self) -> int:
        """Of its storage, in main memory; otherwise 0."""
        return self.tensor.untyped_storage().data_ptr() if self.tensor.device.type == "cpu" else 0

    @property
    def own(self) -> torch.Tensor:
        """What is written in the end."""
        return self.tensor if self.final is None else self.final

    def is_same(self, other: Spot) -> bool:
        """Whether another spot is the same memory, and gets the same bytes for the same block."""
        a, b = self.own, other.own
        return (
            a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr() != 0
            and (a.storage_offset(), a.stride(), a.dtype) == (b.storage_offset(), b.stride(), b.dtype)
            and (self.signs, self.wire) == (other.signs, other.wire)
        )


class Global(NamedTuple):
    """A tensor of the sources' state: its leaf in each cohort that has it, and which of the leaf's tensors it is."""

    leaves: tuple[tuple[int, int], ...]
    number: int


class Need(NamedTuple):
    """A block of a tensor that is needed here, as what it travels, and where it lands."""

    tensor: Global
    block: Block
    #: None: as the source has it.
    wire: torch.dtype | None
    item: int
    #: Only sources in this place of the mesh have the right values (of a Partial DTensor).
    place: Coordinate
    #: Spots, and where in each the block begins.
    spots: list[tuple[Spot, tuple[int, ...]]]
    #: Further spots that are the same memory as one of these (tied targets): nothing more is written for them.
    tied: list[Spot]
