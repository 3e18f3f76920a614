"""The targets of ``fuzz/``: with a few mutations in the ordinary run, guided by coverage (atheris) in ``make soak``.

``TRANSFUSE_FUZZ_SECONDS`` says how long each target is fuzzed there.
"""

from __future__ import annotations

import importlib.util
import os
import pathlib
import random
import re
import subprocess
import sys
from collections import Counter

import pytest
from fuzz.__main__ import NAMES
from fuzz.seeds import seeds_for
from fuzz.targets import TARGETS, Finding, mutate

HERE = pathlib.Path(__file__).resolve().parents[2]
SECONDS = int(os.environ.get("TRANSFUSE_FUZZ_SECONDS", "60"))
#: Inputs that all targets together have to have seen in the end.
INPUTS = 1_000_000

needs_atheris = pytest.mark.skipif(
    importlib.util.find_spec("atheris") is None, reason="atheris is not installed (pip install '.[fuzz]')"
)
counted: Counter[str] = Counter()


def flip(data: bytes, rng: random.Random) -> bytes:
    """What libFuzzer does to bytes, in small."""
    changed = bytearray(data or b"\0")
    for _ in range(rng.choice([1, 1, 2, 8])):
        changed[rng.randrange(len(changed))] = rng.choice([0, 0x7F, 0x90, 0xC0, 0xFF, rng.randrange(256)])
    return bytes(changed[: rng.randrange(len(changed)) + 1] if rng.random() < 0.1 else changed)


@pytest.mark.parametrize("name", NAMES)
def test_targets_take_honest_and_mutated_messages(name: str) -> None:
    rng = random.Random(5)
    seeds = seeds_for(name)
    for seed in seeds:
        TARGETS[name](seed)
    for _ in range(300):
        data = rng.choice(seeds)
        for _ in range(rng.choice([1, 1, 2, 4])):
            data = mutate(name, data, lambda plain: flip(plain, rng), rng.randrange(1 << 32))
        TARGETS[name](data)


def test_the_canary_is_a_finding() -> None:
    with pytest.raises(Finding):
        TARGETS["canary"](b"!")


def fuzz(name: str, directory: pathlib.Path, *options: str) -> tuple[int, str, int]:
    """Exit code, what was said, and how many inputs were tried."""
    path = os.pathsep.join([str(HERE), str(HERE / "src"), *filter(None, [os.environ.get("PYTHONPATH")])])
    done = subprocess.run(
        [sys.executable, "-m", "fuzz", name, f"--findings={directory}", *options],
        cwd=HERE,
        env={**os.environ, "PYTHONPATH": path},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    total = re.search(r"([\d,]+) inputs in all", done.stdout)
    return done.returncode, done.stdout, int(total[1].replace(",", "")) if total else 0


@pytest.mark.soak
@needs_atheris
def test_fuzzing_finds_what_is_there(tmp_path: pathlib.Path) -> None:
    code, said, _ = fuzz("canary", tmp_path, "--seconds=60")
    assert code == 77, said
    assert "the canary" in said
    assert list(tmp_path.glob("canary-crash-*"))


@pytest.mark.soak
@needs_atheris
@pytest.mark.parametrize("name", NAMES)
def test_fuzzing_finds_nothing(name: str, tmp_path: pathlib.Path) -> None:
    code, said, counted[name] = fuzz(name, tmp_path, f"--seconds={SECONDS}")
    assert code == 0, said
    assert counted[name] > 0, said


@pytest.mark.soak
@needs_atheris
def test_a_million_inputs(tmp_path: pathlib.Path) -> None:
    """Whatever the targets above have not tried comes on top, as bodies of messages."""
    missing = INPUTS - counted.total()
    if missing > 0:
        code, said, count = fuzz("body", tmp_path, "--seconds=3000", f"--runs={missing}")
        assert code == 0, said
        assert count >= missing, said
