"""Destinations: the receiver's tensors in which blocks land. And the blocks needed to fill them."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

import torch

from transfuse._state.leaves import dense
from transfuse._state.leaves.codec import Coordinate
from transfuse._state.leaves.dense import Signs
from transfuse._state.leaves.layout import Box


@dataclass(eq=False)
class Destination:
    """A tensor that blocks land in, of the target or fresh."""

    tensor: torch.Tensor
    #: The number of the target's leaf, or, if ``fresh``, of the leaf of the first cohort, which then has no target.
    leaf: int
    fresh: bool = False
    signs: Signs | None = None
    #: The dtype in which items arrive, if the receiver converts them.
    wire: torch.dtype | None = None
    item: int = field(init=False)
    strides: tuple[int, ...] = field(init=False)
    offset: int = field(init=False)

    def __post_init__(self) -> None:
        self.item, self.strides = self.tensor.element_size(), self.tensor.stride()
        self.offset = dense.offset_of(self.tensor)

    @cached_property
    def address(self) -> int:
        """The address of the tensor's storage; 0 if the storage is not in main memory."""
        return self.tensor.untyped_storage().data_ptr() if self.tensor.device.type == "cpu" else 0

    def is_same(self, other: Destination) -> bool:
        """Whether another destination is the same memory and gets the same bytes for the same block."""
        a, b = self.tensor, other.tensor
        return (
            a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr() != 0
            and (a.storage_offset(), a.stride(), a.dtype) == (b.storage_offset(), b.stride(), b.dtype)
            and (self.signs, self.wire) == (other.signs, other.wire)
        )


class Global(NamedTuple):
    """A tensor of the sources' state: its leaf in each cohort that has the leaf, and its number within the leaf."""

    leaves: tuple[tuple[int, int], ...]
    number: int


class NeededBlock(NamedTuple):
    """A needed block of a global tensor, the dtype in which it travels, and its destinations."""

    tensor: Global
    block: Box
    #: The dtype on the wire; None for the source's dtype.
    wire: torch.dtype | None
    #: Of a Partial DTensor: only sources at this coordinate of the mesh have the right values. Otherwise None.
    coordinate: Coordinate
    #: How many bytes one item has on the wire.
    item: int
    #: Destinations, and where in each the block begins.
    destinations: list[tuple[Destination, tuple[int, ...]]]
    #: Further destinations in the same memory as one of these (tied targets): nothing more is written for them.
    tied: list[Destination]
