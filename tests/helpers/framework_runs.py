"""What the tests of framework callbacks share: torchrun jobs that are killed, their notes, and how these are compared."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import pathlib
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

import torch

__all__ = ["compare", "note", "notes", "run", "state_digest"]

#: How long a job may take.
SECONDS = 240.0
ENVIRON = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "TOKENIZERS_PARALLELISM": "false"}


def note(directory: pathlib.Path, rank: int, **what: Any) -> None:
    with open(directory / f"rank{rank}", "a") as file:
        file.write(json.dumps(what) + "\n")


def notes(directory: str, ranks: int) -> list[list[dict[str, Any]]]:
    return [
        [json.loads(line) for line in pathlib.Path(directory, f"rank{rank}").read_text().splitlines()]
        for rank in range(ranks)
    ]


def state_digest(tree: Any) -> str:
    """All bytes of a state, in order."""
    result = hashlib.sha256()

    def visit(one: Any) -> None:
        if isinstance(one, torch.Tensor):
            whole = one.full_tensor() if hasattr(one, "full_tensor") else one
            result.update(f"{whole.dtype}{tuple(whole.shape)}".encode())
            result.update(whole.detach().contiguous().numpy().tobytes())
        elif isinstance(one, dict):
            for key, value in one.items():
                result.update(repr(key).encode())
                visit(value)
        elif isinstance(one, list | tuple):
            for value in one:
                visit(value)
        else:
            result.update(repr(one).encode())

    visit(tree)
    return result.hexdigest()


def run(program: str, plan: Any, arguments: Sequence[str] = ()) -> list[list[dict[str, Any]]]:
    """A torchrun of this plan, to its end. Returns the notes of each rank."""
    pathlib.Path(plan.directory).mkdir()
    words = [sys.executable, "-m", "torch.distributed.run", *arguments, f"--nproc-per-node={plan.ranks}"]
    words += [f"--max-restarts={3 * len(plan.deaths)}", "--monitor-interval=0.05"]
    words += [program, json.dumps(dataclasses.asdict(plan))]
    path = os.pathsep.join([str(pathlib.Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
    ended = subprocess.run(
        words,
        env={**os.environ, **ENVIRON, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=SECONDS + 60 * len(plan.deaths),
        check=False,
    )
    assert ended.returncode == 0, (ended.stdout[-3000:], ended.stderr[-6000:])
    assert len(list(pathlib.Path(plan.directory).glob("death*"))) == len(plan.deaths)
    return notes(plan.directory, plan.ranks)


def compare(killed: list[list[dict[str, Any]]], plain: list[list[dict[str, Any]]], restored: list[int | None]) -> None:
    """Both have seen the same, step by step, and have ended the same; the restarts went on after these steps."""
    for rank, (mine, other) in enumerate(zip(killed, plain, strict=True)):
        end, undisturbed = mine[-1], other[-1]
        assert {**end, "restored": None} == {**undisturbed, "restored": None}, (rank, end, undisturbed)
        # What a step that was cut off has noted is noted again.
        assert _by_key(mine) == _by_key(other), rank
        assert undisturbed["restored"] is None
        assert end["restored"] == restored[-1], (rank, end["restored"])


def _by_key(some: list[dict[str, Any]]) -> dict[Any, Any]:
    """The newest note of each kind and number; nothing may have been noted twice with different values."""
    found: dict[Any, Any] = {}
    for one in some:
        kind, number = next(iter(one.items()))
        if kind in ("start", "end"):
            continue
        assert found.setdefault((kind, json.dumps(number)), one) == one
    return found
