"""What delta keeps of bf16 weights after a step of the fp32 weights that they are rounded from.

python -m benchmarks.bf16 [--values N] [--step S] [--width W] [--json FILE]

A server holds fp32 weights, drawn from a normal distribution. A reader fetches them into bf16 tensors. Then each weight
moves by up to ``--step``, as Adam moves it with that learning rate, and the reader fetches again with ``delta=True``.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

import transfuse
from benchmarks.compare import machine
from transfuse._limits import Limits


def measure(values: int, step: float, width: float) -> dict[str, int]:
    """Numbers of values and blocks, of those that have changed, and of the bytes that moved."""
    generator = torch.Generator().manual_seed(0)
    weights = torch.randn(values, generator=generator) * width
    held = {"weights": torch.zeros(values, dtype=torch.bfloat16)}
    with transfuse.serve({"weights": weights}, token="benchmark") as server:
        transfuse.fetch(server.address, held, token="benchmark", cast=True)
        before = held["weights"].clone()
        with server.mutating():
            weights += step * (2 * torch.rand(values, generator=generator) - 1)
        fetched = transfuse.fetch(server.address, held, token="benchmark", cast=True, delta=True, same_host=False)
    if not torch.equal(held["weights"], weights.to(torch.bfloat16)):
        raise AssertionError("wrong values have arrived")
    changed = held["weights"] != before
    blocks = torch.split(changed, Limits.from_environment().block_bytes // before.itemsize)
    return {
        "values": values,
        "changed_values": int(changed.sum()),
        "blocks": len(blocks),
        "changed_blocks": sum(bool(block.any()) for block in blocks),
        "bytes": before.nbytes,
        "moved_bytes": fetched.report.bytes,
    }


def main(argv: Sequence[str] | None = None) -> int:
    argv = sys.argv[1:] if argv is None else argv
    parser = argparse.ArgumentParser(prog="benchmarks.bf16", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--values", type=int, default=1 << 24, help="how many weights (default 16 Mi)")
    parser.add_argument("--step", type=float, default=1e-6, help="how far a weight moves at most (default 1e-6)")
    parser.add_argument("--width", type=float, default=0.02, help="standard deviation of the weights (default 0.02)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write everything to this file")
    given = parser.parse_args(argv)
    found = measure(given.values, given.step, given.width)
    print(
        f"{found['changed_values'] / found['values']:.2%} of {found['values']:,} bf16 values changed, in "
        f"{found['changed_blocks']} of {found['blocks']} blocks; {found['moved_bytes']:,} of {found['bytes']:,} bytes "
        "moved"
    )
    if given.json is not None:
        written = {
            **machine.about("benchmarks.bf16", argv),
            "found": found,
        }
        given.json.write_text(json.dumps(written, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
