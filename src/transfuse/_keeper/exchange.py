"""All ranks of a group tell each other a few bytes: in tensors, without pickle, bounded by a timeout."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from transfuse._errors import TransfuseError

#: The calls in which the ranks of a job meet.
CALLS = "keep(), restore(), look(): every rank, in the same order"
#: The most that one rank may tell the others.
MAX_BYTES = 64 << 20


class Exchange:
    """Gathers bytes of all ranks of a group. Every rank calls it as often as the others, in the same order.

    Without a group it is that of a job of one process.
    """

    def __init__(self, group: Any, timeout: timedelta) -> None:
        self._group = group
        self._timeout = timeout
        if group is None and not dist.is_initialized():
            self.rank, self.size, self._device = 0, 1, torch.device("cpu")
            return
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        self._device = _device_of(group)

    def check_same_ranks(self) -> None:
        """Refuse to go on in a group that torch has reconfigured in place, with another rank or size."""
        try:
            rank, size = dist.get_rank(self._group), dist.get_world_size(self._group)
        except (RuntimeError, ValueError):
            return  # The group is gone. Whoever needs it will say so.
        if (rank, size) != (self.rank, self.size):
            raise TransfuseError(
                f"the group was reconfigured: this was rank {self.rank} of {self.size}, and is rank {rank} of {size}; "
                "detach() from the keeper, and call keep() again on all ranks"
            )

    def gather(self, data: bytes, what: str) -> list[bytes]:
        """What every rank has given, in the order of ranks."""
        self.check_same_ranks()
        if self.size == 1:
            return [data]
        lengths = self._all_gather(torch.tensor([len(data)], dtype=torch.int64), what)
        sizes = [int(one) for one in lengths]
        longest = max(sizes)
        if min(sizes) < 0 or longest > MAX_BYTES:
            raise TransfuseError(f"{what}: a rank announced {longest} bytes, at most {MAX_BYTES} are expected")
        mine = torch.zeros(max(longest, 1), dtype=torch.uint8)
        if data:
            mine[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        rows = self._all_gather(mine, what)
        return [row[:size].numpy().tobytes() for row, size in zip(rows, sizes, strict=True)]

    def _all_gather(self, mine: torch.Tensor, what: str) -> list[torch.Tensor]:
        mine = mine.to(self._device)
        rows = [torch.empty_like(mine) for _ in range(self.size)]
        try:
            work = dist.all_gather(rows, mine, group=self._group, async_op=True)
            assert work is not None
            work.wait(self._timeout)
        except RuntimeError as error:
            text = str(error).split("\n")[0]
            others = f"does rank {1 - self.rank}" if self.size == 2 else "do all other ranks"
            raise TransfuseError(
                f"{what}: the ranks could not agree within {self._timeout.total_seconds():g} s, or one was lost: "
                f"{others} call this too ({CALLS})? is timeout= long enough? ({text})"
            ) from error
        return [row.cpu() for row in rows]


def _device_of(group: Any) -> torch.device:
    """Main memory, unless the group's only backend is an accelerator's."""
    pg: Any = group if group is not None else dist.group.WORLD
    try:
        pg._get_backend(torch.device("cpu"))
    except (RuntimeError, AttributeError):
        kinds = [torch.device(kind) for kind in getattr(pg, "_device_types", ())]
        return kinds[0] if kinds else torch.device("cpu")
    return torch.device("cpu")
