"""What the callbacks for Lightning and Transformers add to a commit: writing what a rank has beside its tensors.

python -m benchmarks.callbacks
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from typing import Any

import torch

import transfuse
from transfuse.integrations.rank_state import Packer

TURNS = 15
#: How many lines the Trainer has logged.
LINES = (0, 100, 10_000)


def cost(tree: dict[str, Any]) -> tuple[float, int]:
    """Milliseconds of CPU time, the median, and the size of the tensor."""
    packer, times = Packer(), []
    for _ in range(TURNS):
        began = time.process_time()
        packed = packer.pack(tree)
        times.append(time.process_time() - began)
    return 1000 * statistics.median(times), len(packed)


def main() -> None:
    argparse.ArgumentParser("python -m benchmarks.callbacks", description=__doc__).parse_args()
    torch.set_num_threads(1)  # As torchrun has it.
    for lines in LINES:
        history = [
            {"epoch": i / 7, "grad_norm": i / 3, "learning_rate": 1e-4, "loss": i / 9, "step": i} for i in range(lines)
        ]
        tree = {"state": json.dumps({"log_history": history}), "generators": transfuse.RNG().state_dict()}
        began = time.process_time()
        json.dumps({"log_history": history})
        text = 1000 * (time.process_time() - began)
        spent, nbytes = cost(tree)
        print(
            f"{lines:6,} lines of log: {text:5.1f} ms for the text, {spent:5.1f} ms to pack, {nbytes >> 10:,} KiB",
            flush=True,
        )


if __name__ == "__main__":
    main()
