"""What one more range costs `process_vm_readv`, and what it costs instead to pick items out of one span.

python -m benchmarks.ranges [--mib N]

The rule in `transfuse/_wire/memory_read.py` (RANGE_COST, ITEM_COST) rests on these numbers. Strided memory is read run
by run, or in one span from its first run to its last, and then the runs are picked out, whichever is cheaper.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence

import numpy as np

from transfuse._limits import MIB
from transfuse._memory import vm

RUNS = 5


def seconds(work: Callable[[], object]) -> float:
    """The median of a few runs after a warm-up."""
    work()
    times = []
    for _ in range(RUNS):
        started = time.perf_counter()
        work()
        times.append(time.perf_counter() - started)
    return statistics.median(times)


def measure(nbytes: int) -> dict[str, float]:
    """Bytes per second in one range; and the cost of a range and of an item, as bytes that could be read meanwhile."""
    source, target = np.ones(nbytes, dtype=np.uint8), np.zeros(nbytes, dtype=np.uint8)
    here, pid = np.array([0]), os.getpid()

    def read(starts: np.ndarray[tuple[int], np.dtype[np.int64]], size: int) -> None:
        sizes = np.full(len(starts), size)
        theirs = vm.ranges(source.ctypes.data + starts, sizes)
        vm.read(pid, theirs, vm.ranges(target.ctypes.data + np.arange(len(starts)) * size, sizes))

    rate = nbytes / seconds(lambda: read(here, nbytes))
    starts = np.arange(0, nbytes, 256)
    a_range = (seconds(lambda: read(starts, 8)) - 8 * len(starts) / rate) / len(starts)
    items, picked = source.view(np.uint32), np.arange(0, nbytes // 4, 2)
    an_item = seconds(lambda: items[picked]) / len(picked)
    return {"bytes a second": rate, "a range": a_range * rate, "an item": an_item * rate}


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="benchmarks.ranges", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--mib", type=int, default=64, help="memory to read (default 64)")
    options = parser.parse_args(argv)
    found = measure(options.mib * MIB)
    print(f"one thread, one range: {found['bytes a second'] / 1e9:.1f} GB/s")
    print(f"one more range: {found['a range']:.0f} bytes read meanwhile")
    print(f"one item picked: {found['an item']:.0f} bytes read meanwhile")
    return 0


if __name__ == "__main__":
    sys.exit(main())
