"""The command line, as a user meets it: output and exit codes. No process is left behind, however it ends."""

from __future__ import annotations

import builtins
import contextlib
import json
import os
import pathlib
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Self

import pytest
import torch
import torch.distributed as dist
from typer.testing import CliRunner

import transfuse
from transfuse import cli
from transfuse.cli import compare, demo
from transfuse.cli.app import app
from transfuse.cli.workers import Workers, WorkersFailed
from transfuse.report import Report
from transfuse.testing.exact import assert_exact

COMMAND = [sys.executable, "-c", "from transfuse.cli import main; main()"]


class Marked:
    """A command whose processes, down to the last grandchild, are known by a variable in their environment."""

    def __init__(self, *arguments: str) -> None:
        self.mark = f"MARK_OF_TEST={uuid.uuid4()}"
        name, value = self.mark.split("=")
        self.process = subprocess.Popen(
            [*COMMAND, *arguments],
            env=os.environ | {name: value},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        with self.process:
            for pid in self.alive():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)

    def workers(self) -> list[int]:
        return [pid for pid, line in self.alive().items() if "spawn_main" in line]

    def alive(self) -> dict[int, str]:
        found = {}
        for entry in pathlib.Path("/proc").iterdir():
            try:
                if entry.name.isdigit() and self.mark.encode() in (entry / "environ").read_bytes().split(b"\0"):
                    found[int(entry.name)] = (entry / "cmdline").read_text().replace("\0", " ")
            except OSError:
                continue
        return found

    def until(self, done: Callable[[], bool], seconds: float = 60) -> None:
        deadline = time.monotonic() + seconds
        while not done():
            assert time.monotonic() < deadline, self.alive()
            time.sleep(0.05)

    def end(self) -> tuple[str, str, int]:
        out, err = self.process.communicate(timeout=90)
        # The helper that multiprocessing starts along with workers ends a moment after its owner.
        self.until(lambda: not self.alive(), 10)
        return out, err, self.process.returncode


def test_demo_json() -> None:
    with Marked("demo", "--parameters", "1", "--runs", "1", "--json") as running:
        out, err, code = running.end()
    assert code == 0, err
    assert not err
    result = json.loads(out)
    assert result["verified"] is True
    assert result["runs"] == 1
    assert [move["name"] for move in result["moves"]] == list(compare.NAMES)
    assert all(move["verified"] and len(move["seconds"]) == 1 for move in result["moves"])
    ours, _, torchs = result["moves"]
    assert ours["wire_bytes"] >= result["state"]["bytes"] == result["first_report"]["bytes"]
    assert torchs["wire_bytes"] > ours["wire_bytes"], "the tied weights travel twice"
    assert result["first_report"]["route"] == "memory"


def test_interrupted_demo_leaves_nothing_behind() -> None:
    with Marked("demo", "--parameters", "20", "--runs", "50") as running:
        running.until(lambda: len(running.workers()) == 2)
        # Workers are started deaf to interrupts, and only then does the parent listen again.
        time.sleep(0.5)
        running.process.send_signal(signal.SIGINT)
        _, err, code = running.end()
    assert code == 130
    assert err == "transfuse demo: interrupted; both workers have ended\n"


def test_killed_demo_leaves_nothing_behind() -> None:
    with Marked("demo", "--parameters", "1", "--runs", "100") as running:
        running.until(lambda: len(running.workers()) == 2)
        running.process.kill()
        # A worker notices once it has imported what it needs.
        running.until(lambda: not running.workers())


def outcome(*, wrong: tuple[str, ...] = (), seconds: tuple[float, float, float] = (1.0, 0.5, 2.0)) -> demo.Outcome:
    facts = demo.Facts(parameters=10**8, leaves=7, bytes=1000, tied_bytes=100)
    results = {
        name: compare.Result(name, 1100 if name == compare.TORCH else 1000, [took])
        for name, took in zip(compare.NAMES, seconds, strict=True)
    }
    results[compare.OURS].wrong.extend(wrong)
    return demo.Outcome(facts, 1, Report("receive", (0,)), results)


def run_with(monkeypatch: pytest.MonkeyPatch, result: demo.Outcome | BaseException, *arguments: str) -> Any:
    def run(*_: object) -> demo.Outcome:
        if isinstance(result, BaseException):
            raise result
        return result

    monkeypatch.setattr(demo, "run", run)
    return CliRunner().invoke(app, ["demo", *arguments])


def test_verdict_says_what_was_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    done = run_with(monkeypatch, outcome())
    assert done.exit_code == 0
    assert "transfuse was 2.00 times as fast as PyTorch's PGTransport: 1,000 ms against 2,000 ms" in done.output
    assert "PGTransport moved the 100 B of tied weights twice." in done.output
    slower = run_with(monkeypatch, outcome(seconds=(3.0, 2.0, 2.0)))
    assert "transfuse took 1.50 times as long as PyTorch's PGTransport" in slower.output
    no_bytes_counted = outcome()
    no_bytes_counted.results[compare.TORCH].wire_bytes = 1000
    assert "tied weights" not in run_with(monkeypatch, no_bytes_counted).output


@pytest.mark.parametrize("arguments", [(), ("--json",)])
def test_failed_verification_is_exit_code_1(monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...]) -> None:
    done = run_with(monkeypatch, outcome(wrong=("transfuse: ['w']: values differ",)), *arguments)
    assert done.exit_code == 1
    assert "verification failed, 1 difference(s):\n  transfuse: ['w']: values differ" in done.stderr
    assert "times as" not in done.output


def test_failed_workers_are_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    done = run_with(monkeypatch, WorkersFailed({1: "failed: OSError: no"}))
    assert (done.exit_code, done.stderr) == (1, "transfuse demo: worker 1 failed: OSError: no\n")


def test_too_little_memory_is_said_beforehand(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pathlib.Path, "read_text", lambda _: "MemTotal: 9 kB\nMemAvailable: 1048576 kB\n")
    done = run_with(monkeypatch, outcome())
    assert done.exit_code == 1
    assert "100 million parameters need about 4.4 GiB of memory, 1.0 GiB are available" in done.stderr


def test_state_is_realistic_and_reproducible() -> None:
    state, again, zeros = (demo.make_state(1_000_000, seed) for seed in (1, 1, None))
    assert_exact(state, again)
    model, optimizer = state["model"], state["optimizer"]
    assert model["head.weight"].data_ptr() == model["tokens.weight"].data_ptr()
    assert set(optimizer["state"][0]) == {"step", "exp_avg", "exp_avg_sq"}
    assert len(optimizer["state"]) == len(model) - 1
    facts = demo.facts_of(state)
    assert facts.bytes > 12 * facts.parameters
    assert not any(t.any() for t in zeros["model"].values())
    # What the demo claims to find, it finds.
    for damaged in (model["head.weight"], optimizer["state"][3]["exp_avg_sq"]):
        before = damaged.view(torch.int32)[0].clone()
        damaged.view(torch.int32)[0] ^= 1
        assert compare._wrong(again, state, state)
        damaged.view(torch.int32)[0] = before
    assert not compare._wrong(again, state, state)
    assert compare._wrong(again, state, zeros) == [
        f"{4 * len(optimizer['state']) * 2 + 2} tensors did not land in the target's own memory"
    ]


def test_a_warm_up_does_not_count() -> None:
    warm = compare.Move("a", True, 9.0, 10, [], None)
    result = compare.summarize([warm, replace(warm, warm_up=False, seconds=1.0, wire_bytes=0)])["a"]
    assert (result.seconds, result.wire_bytes, result.verified) == ([1.0], 10, True)
    # But what it got wrong does.
    assert not compare.summarize([replace(warm, wrong=["x"]), replace(warm, warm_up=False)])["a"].verified


def one_raises_and_one_dies(say: Callable[[object], None]) -> None:
    say(dist.get_rank())
    # Everybody is connected.
    dist.barrier()
    if dist.get_rank() == 1:
        raise LookupError("on purpose")
    if dist.get_rank() == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()


def test_workers_that_fail() -> None:
    with Workers(3, one_raises_and_one_dies) as workers, pytest.raises(WorkersFailed) as caught:
        for _ in workers:
            pass
    causes = caught.value.causes
    assert (causes[1], causes[2]) == ("failed: LookupError: on purpose", "died: signal SIGKILL")
    assert any("in one_raises_and_one_dies" in note for note in caught.value.__notes__)


def test_help_and_version() -> None:
    version = CliRunner().invoke(app, ["--version"])
    assert (version.exit_code, version.output) == (0, f"transfuse {transfuse.__version__}\n")
    top = CliRunner().invoke(app, ["--help"])
    assert top.exit_code == 0
    assert "demo" in top.output
    usage = CliRunner().invoke(app, ["demo", "--help"])
    assert usage.exit_code == 0
    assert all(option in usage.output for option in ("--parameters", "--runs", "--json"))
    assert CliRunner().invoke(app, ["demo", "--runs", "0"]).exit_code == 2


def test_without_the_extra(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    real = builtins.__import__

    def no_rich(name: str, *args: Any, **kwargs: Any) -> Any:
        if name == "rich":
            raise ModuleNotFoundError("No module named 'rich'", name="rich")
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", no_rich)
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code == 2
    assert "pip install 'transfuse[cli]'" in capsys.readouterr().err
