"""What tests start can be interrupted, also when the tests themselves were started with signals ignored."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from commands import Running
from transfuse.testing.ranks import FOREGROUND, Fleet, announce

SIGNALS = [signal.SIGINT, signal.SIGTERM, signal.SIGHUP]


@pytest.fixture(autouse=True)
def in_background() -> Iterator[None]:
    """As ``nohup make test &`` starts them."""
    before = {number: signal.signal(number, signal.SIG_IGN) for number in SIGNALS}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def test_a_program_is_told_nothing_of_it() -> None:
    script = "import signal; print(*(int(signal.getsignal(number) is signal.SIG_IGN) for number in (2, 15, 1)))"
    told = [
        subprocess.run([*under, sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout
        for under in ([], FOREGROUND)
    ]
    assert told == ["1 1 1\n", "0 0 0\n"]


def wait_for_an_interrupt(rank: int) -> str:
    try:
        announce("here")
        threading.Event().wait()
    except KeyboardInterrupt:
        return "interrupted"
    return "not interrupted"


def test_a_rank_is_interrupted() -> None:
    # Spawned: the fork server may have been started before.
    with Fleet(1, method="spawn") as fleet:
        fleet.start(wait_for_an_interrupt)
        fleet.wait_for(0, "here")
        fleet.signal(0, signal.SIGINT)
        assert [outcome.get() for outcome in fleet.outcomes()] == ["interrupted"]


def test_a_command_is_interrupted(tmp_path: Path) -> None:
    save_file({"a": torch.arange(3.0)}, tmp_path / "a.safetensors")
    with Running("serve", str(tmp_path / "a.safetensors"), "--json") as running:
        assert "address" in running.line()
        running.process.send_signal(signal.SIGINT)
        assert running.end()[1:] == ("transfuse serve: ending\n", 0)
