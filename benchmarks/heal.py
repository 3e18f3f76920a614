"""What heal() costs if nobody is behind, beside an exchange of the same steps by ``all_gather_object``.

python -m benchmarks.heal
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch.distributed as dist

import transfuse
from transfuse.testing.ranks import Fleet

TURNS = 60


def measure(rank: int) -> tuple[float, float]:
    """The median of each, in milliseconds."""
    group: Any = dist.group.WORLD

    def median(call: Callable[[], object]) -> float:
        times = []
        for _ in range(TURNS):
            dist.barrier()
            began = time.perf_counter()
            call()
            times.append(time.perf_counter() - began)
        return 1000 * statistics.median(times)

    steps: list[Any] = [None] * dist.get_world_size()
    return median(lambda: transfuse.heal(dict, step=3, group=group, timeout=60)), median(
        lambda: dist.all_gather_object(steps, 3)
    )


def main() -> None:
    for ranks in (2, 4, 8):
        with Fleet(ranks) as fleet:
            fleet.start(measure)
            heal, gather = (max(times) for times in zip(*(one.get() for one in fleet.outcomes(100)), strict=True))
        print(f"{ranks} ranks: heal {heal:.1f} ms, all_gather_object {gather:.1f} ms", flush=True)


if __name__ == "__main__":
    main()
