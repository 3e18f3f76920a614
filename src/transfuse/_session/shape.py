"""Shape: how the parcels of a conversation are grouped, staged and checked. Both ends derive the same shape."""

from __future__ import annotations

from typing import NamedTuple

import torch

from transfuse._memory.packing import Staging
from transfuse._plan.parcels import Most
from transfuse._sizes import Sizes
from transfuse._wire.group import CPU
from transfuse._wire.messages import Agreed, Offer, Want


class Shape(NamedTuple):
    """How parcels are grouped and checked on a channel. Both ends derive the same shape."""

    most: Most
    ahead: int
    digests: bool
    #: For how many bursts one answer is. The last answer is for those that are left.
    answered: int = 1
    #: How many bursts' staging an end keeps for the next bursts.
    kept: int = 1

    @classmethod
    def of(cls, offer: Offer, want: Want, agreed: Agreed) -> Shape:
        if agreed.upstream is None and agreed.downstream is None:
            most = Most(want.burst_bytes, min(offer.staged_bytes, want.burst_bytes))
            return cls(most, offer.bursts_ahead, want.digests)
        # In a chain each parcel is passed on as soon as it has arrived: bursts of one parcel, more of them under way.
        parcel = want.parcel_bytes
        ahead = Sizes.chain_ahead(parcel)
        return cls(Most(parcel, parcel), ahead, want.digests, Sizes.chain_answered(ahead), kept=ahead)

    @property
    def round(self) -> Most:
        """The largest round on a stream: what one record follows."""
        return Most(min(self.most.nbytes, Sizes.ROUND_BYTES), min(self.most.staged_bytes, Sizes.CALL_BYTES))

    def staging(self, device: torch.device) -> Staging:
        """Staging for one conversation, or for both neighbours of a receiver in a chain."""
        return Staging(self.most.staged_bytes * self.kept, device)


class ToHash:
    """Copies of parcels of an accelerator in main memory, where they are hashed: one copy of each byte."""

    def __init__(self, shape: Shape) -> None:
        self._staging = Staging(shape.most.staged_bytes, CPU)

    def copy(self, data: torch.Tensor) -> torch.Tensor:
        """Queue a copy of these bytes to main memory."""
        buffer = self._staging.take(data.numel())
        buffer[: data.numel()].copy_(data, non_blocking=True)
        return buffer

    def give_back(self, buffer: torch.Tensor | None) -> None:
        if buffer is not None:
            self._staging.give_back(buffer)


def start_of(buffer: torch.Tensor, nbytes: int) -> torch.Tensor:
    return buffer if buffer.numel() == nbytes else buffer[:nbytes]
