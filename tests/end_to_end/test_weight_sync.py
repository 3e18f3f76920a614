"""Weights from FSDP2 trainers to engines with fused bf16 weights, whatever happens to the engines."""

from __future__ import annotations

import json
import pathlib
import random
import subprocess
import sys
import time
from contextlib import ExitStack
from typing import Any

import pytest

import weight_sync
from transfuse._state.whole_file import write_whole
from transfuse.testing.ranks import Fleet

HELPER = pathlib.Path(weight_sync.__file__)


class Engine:
    """An engine's process."""

    def __init__(self, folder: pathlib.Path) -> None:
        self.process = subprocess.Popen(
            [sys.executable, str(HELPER), str(folder)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=HELPER.parent,
        )
        assert self.heard() == "up"

    def heard(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def tell(self, **told: Any) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(told) + "\n")
        self.process.stdin.flush()

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            assert pipe is not None
            pipe.close()


def kill_all(engines: list[Engine]) -> None:
    for one in engines:
        one.kill()


def rounds(folder: pathlib.Path, count: int, seed: int, kills: float) -> dict[str, int]:
    """``count`` steps of the trainers, and after each of them engines that fetch, or do not. Counts what happens."""
    chosen = random.Random(seed)
    happened = dict.fromkeys(("installed", "patched", "missed", "killed", "ahead", "scribbled"), 0)
    with Fleet(2, timeout=60.0) as fleet, ExitStack() as stack:
        fleet.start(weight_sync.train, folder, seed)
        engines = [Engine(folder) for _ in range(2)]
        stack.callback(kill_all, engines)
        for step in range(1, count + 1):
            write_whole(folder / f"go {step}", "go")
            due = []
            for i, one in enumerate(engines):
                if chosen.random() < 0.15:
                    happened["missed"] += 1
                    continue
                told = {
                    "step": step,
                    "ahead": chosen.random() < 0.3,
                    "atomic": chosen.random() < 0.3,
                    "same_host": chosen.random() < 0.3,
                    "scribbles": chosen.randrange(400) if chosen.random() < 0.15 else 0,
                }
                one.tell(**told)
                happened["ahead"] += told["ahead"]
                happened["scribbled"] += bool(told["scribbles"])
                if chosen.random() < kills:
                    time.sleep(chosen.random() * 0.1)
                    one.kill()
                    engines[i] = Engine(folder)
                    happened["killed"] += 1
                else:
                    due.append(one)
            for one in due:
                said = json.loads(one.heard())
                assert (said["step"], said["wrong"]) == (step, []), (step, said)
                happened["installed"] += 1
                happened["patched"] += said["patched"] > 0
            if step > 1:
                (folder / f"due {step - 1}").unlink()
        write_whole(folder / f"go {count + 1}", "end")
        for outcome in fleet.outcomes(60.0):
            outcome.get()
    return happened


def test_engines_have_what_the_trainers_have(tmp_path: pathlib.Path) -> None:
    happened = rounds(tmp_path, 12, seed=1, kills=0.05)
    assert happened["installed"] > 10
    assert happened["patched"] > 0


@pytest.mark.soak
def test_two_hundred_rounds(tmp_path: pathlib.Path) -> None:
    happened = rounds(tmp_path, 200, seed=2, kills=0.03)
    print(happened)
    assert happened["installed"] > 300
    assert all(count >= 3 for count in happened.values()), happened
