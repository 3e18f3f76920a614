"""The pause of ``install()``: how long a receiver stands still to get what was fetched ahead, beside a plain copy.

python -m benchmarks.pending [--mib N] [--runs N] [--json FILE]

States of one size, into all kinds of targets. A server in this process serves, a fetch with ``wait=False`` brings, and
``install()`` is measured. Turn by turn with it, memory of as many bytes as the target has is copied with as many
threads as ``install()`` has. Medians; every result is compared with what was sent.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

import transfuse
from benchmarks.compare import machine
from transfuse import Concat
from transfuse._limits import MIB
from transfuse._memory import blocks

#: Of the blocks of 128 KiB, one of this number has changed, with delta.
OF = 100
BLOCK_BYTES = 128 << 10


class Case:
    """A state, a target for it, and options of the fetch."""

    def __init__(self, title: str, state: dict[str, Any], target: dict[str, Any], **options: Any) -> None:
        self.title, self.state, self.target, self.options = title, state, target, options

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.target.values())

    def blank(self) -> None:
        """Give the target values that the source does not have; with delta in a few blocks only."""
        for name, tensor in self.target.items():
            if self.options.get("delta"):
                tensor.copy_(self.state[name]).view(-1)[:: OF * BLOCK_BYTES // tensor.element_size()] += 1
            else:
                tensor.zero_()

    def is_right(self) -> bool:
        if "fused" in self.target:
            return torch.equal(self.target["fused"], torch.cat(list(self.state.values())))
        return all(torch.equal(mine, self.state[name].to(mine.dtype)) for name, mine in self.target.items())


def cases(nbytes: int) -> Sequence[Callable[[], Case]]:
    wide, rows = 4096, nbytes // 4096 // 4

    def like(state: dict[str, Any], make: Callable[[torch.Tensor], torch.Tensor]) -> dict[str, Any]:
        return {name: make(tensor) for name, tensor in state.items()}

    def some(count: int, dtype: torch.dtype = torch.float32, width: int = wide) -> dict[str, torch.Tensor]:
        each = nbytes // dtype.itemsize // width // count
        return {f"w{i}": torch.randn(each, width).to(dtype) for i in range(count)}

    def in_place(title: str, count: int, width: int = wide, **options: Any) -> Case:
        state = some(count, width=width)
        return Case(title, state, like(state, torch.zeros_like), **options)

    def cast(title: str, source: torch.dtype, target: torch.dtype) -> Case:
        state = some(16, source)
        return Case(title, state, like(state, lambda one: torch.zeros_like(one, dtype=target)), cast=True)

    def fused() -> Case:
        state = {name: torch.randn(rows // 3, wide) for name in "qkv"}
        target = {"fused": torch.zeros(rows // 3 * 3, wide)}
        return Case("three into one fused tensor", state, target, map_path=[Concat(list("qkv"), "fused")])

    def transposed() -> Case:
        state = some(16)
        return Case("tensors, transposed", state, like(state, lambda one: torch.zeros(*one.t().shape).t()))

    def halves() -> Case:
        state = some(16)
        return Case("every other row of memory", state, like(state, lambda one: torch.zeros(2 * len(one), wide)[::2]))

    return [
        lambda: in_place("16 large tensors", 16),
        lambda: in_place("small tensors of 4 KiB", nbytes // 4096, 1024),
        fused,
        lambda: cast("float32 into bfloat16", torch.float32, torch.bfloat16),
        lambda: cast("bfloat16 into float32", torch.bfloat16, torch.float32),
        halves,
        transposed,
        lambda: in_place("16 large tensors, 1 % changed, delta", 16, delta=True),
    ]


def copy_seconds(source: torch.Tensor, target: torch.Tensor) -> float:
    """How long all threads take to copy this memory."""
    began = time.perf_counter()
    blocks.run(list(blocks.copied(source.data_ptr(), target.data_ptr(), source.numel(), None)))
    return time.perf_counter() - began


def measure(case: Case, runs: int) -> dict[str, Any]:
    """The medians of ``install()`` and of the plain copy, in seconds, and how much was held."""
    installs: list[float] = []
    copies: list[float] = []
    source = torch.empty(case.nbytes, dtype=torch.uint8)
    ctypes.memset(source.data_ptr(), 1, source.numel())
    target = source.clone()
    held = 0
    with transfuse.serve(case.state) as server:
        for run in range(runs + 1):
            case.blank()
            pending = transfuse.fetch(server.address, case.target, wait=False, **case.options)
            while not pending.done():
                time.sleep(0.001)
            if pending.error is not None:
                raise pending.error
            began = time.perf_counter()
            report = pending.install().report
            installed = time.perf_counter() - began
            held = report.held_bytes
            if not case.is_right():
                raise AssertionError(f"{case.title}: wrong bytes")
            copied = copy_seconds(source, target)
            if run:  # The first one warms up.
                installs.append(installed)
                copies.append(copied)
    install, copy = statistics.median(installs), statistics.median(copies)
    return {"nbytes": case.nbytes, "held_bytes": held, "install": install, "copy": copy, "ratio": copy / install}


def main(argv: Sequence[str] | None = None) -> int:
    argv = sys.argv[1:] if argv is None else argv
    parser = argparse.ArgumentParser(prog="benchmarks.pending", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--mib", type=int, default=1024, help="how large a state is (default 1024)")
    parser.add_argument("--runs", type=int, default=5, help="installs of each kind that count (default 5)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write everything to this file")
    given = parser.parse_args(argv)
    written: dict[str, Any] = {**machine.about("benchmarks.pending", argv), "cases": {}}
    for make in cases(given.mib * MIB):
        case = make()
        found = written["cases"][case.title] = measure(case, given.runs)
        print(
            f"{case.title}: {found['held_bytes'] / MIB:.0f} of {found['nbytes'] / MIB:.0f} MiB held, installed in "
            f"{found['install'] * 1000:.0f} ms; a copy of all of it takes {found['copy'] * 1000:.0f} ms "
            f"({found['ratio']:.2f} of its speed)",
            flush=True,
        )
    if given.json is not None:
        given.json.write_text(json.dumps(written, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
