"""What the tests of framework callbacks share: torchrun jobs that are killed, their notes, and how these are compared.

``framework_runs.py kept_lightning <cases>`` plays many cases in one process that has imported the framework once: it
starts the ranks of each job as forks, and does what torchrun does when one dies. The cases are JSON: a list of
``[plan without its directory, the step that the last restart goes on from]``.
"""

from __future__ import annotations

import dataclasses
import importlib
import json
import os
import pathlib
import signal
import socket
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Sequence
from typing import Any

import torch

from commands import Running
from example_outputs import EXAMPLES

__all__ = ["compare", "note", "notes", "play_all", "run", "run_example"]

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


def run_example(name: str, forked: Sequence[str]) -> list[str]:
    """An example that torchrun restarts once. Returns the lines that it prints.

    If modules are given, they are imported once, and the workers are forks.
    """
    launcher = [str(pathlib.Path(__file__).with_name("forking_torchrun.py")), ",".join(forked)]
    command = [sys.executable, *(launcher if forked else ["-m", "torch.distributed.run"])]
    words = ["--nproc-per-node=2", "--max-restarts=3", "--monitor-interval=0.05", str(EXAMPLES / name)]
    with Running(*words, command=command, environ=ENVIRON) as job:
        out, err, code = job.end()
    assert code == 0, (out, err)
    return out.splitlines()


def compare(killed: list[list[dict[str, Any]]], plain: list[list[dict[str, Any]]], restored: int) -> None:
    """Both have seen the same, step by step, and have ended the same; the last restart went on after this step."""
    for rank, (mine, other) in enumerate(zip(killed, plain, strict=True)):
        end, undisturbed = mine[-1], other[-1]
        assert {**end, "restored": None} == {**undisturbed, "restored": None}, (rank, end, undisturbed)
        # What a step that was cut off has noted is noted again.
        assert _by_key(mine) == _by_key(other), rank
        assert undisturbed["restored"] is None
        assert end["restored"] == restored, (rank, end["restored"])


def _by_key(some: list[dict[str, Any]]) -> dict[Any, Any]:
    """The newest note of each kind and number; nothing may have been noted twice with different values."""
    found: dict[Any, Any] = {}
    for one in some:
        kind, number = next(iter(one.items()))
        if kind in ("start", "end"):
            continue
        assert found.setdefault((kind, json.dumps(number)), one) == one
    return found


# ------------------------------------------------------------------------------------- many jobs in one process


def play_all(program: str, cases: Sequence[tuple[dict[str, Any], int]]) -> None:
    """Play these cases in a process of their own: one that runs tests has threads, and is not to be forked."""
    words = [sys.executable, "-W", "ignore", __file__, program, json.dumps(cases)]
    ended = subprocess.run(words, capture_output=True, text=True, timeout=120 * len(cases), check=False)
    assert ended.returncode == 0, (ended.stdout[-6000:], ended.stderr[-3000:])


def play(main: Any, plan: Any, name: str) -> list[list[dict[str, Any]]]:
    """What torchrun does: start all ranks, and if one dies, end the others and start all again."""
    pathlib.Path(plan.directory).mkdir()
    for restarts in range(len(plan.deaths) + 2):
        with socket.create_server(("127.0.0.1", 0)) as listener:
            port = listener.getsockname()[1]
        children = {_fork(main, plan, name, port, rank, restarts): rank for rank in range(plan.ranks)}
        failed = False
        while children:
            pid, status = os.wait()
            rank = children.pop(pid)
            if status:
                failed = True
                for other in children:
                    os.kill(other, signal.SIGKILL)
        if not failed:
            return notes(plan.directory, plan.ranks)
        assert len(list(pathlib.Path(plan.directory).glob("death*"))) == restarts + 1, f"rank {rank} failed by itself"
    raise AssertionError("more deaths than planned")


def _fork(main: Any, plan: Any, name: str, port: int, rank: int, restarts: int) -> int:
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        settings = {
            "RANK": rank,
            "LOCAL_RANK": rank,
            "GROUP_RANK": 0,
            "WORLD_SIZE": plan.ranks,
            "LOCAL_WORLD_SIZE": plan.ranks,
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": port,
            "TORCHELASTIC_RUN_ID": name,
            "TORCHELASTIC_RESTART_COUNT": restarts,
            "TRANSFUSE_RUN": name,
        }
        os.environ.update({key: str(value) for key, value in settings.items()})
        main(plan)
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _play_all(module: Any, cases: list[tuple[dict[str, Any], int]]) -> int:
    """Play each case undisturbed and with its deaths. Returns how many have ended differently."""
    failures = 0
    undisturbed: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as directory:
        for number, (words, restored) in enumerate(cases):
            try:
                key = json.dumps({**words, "deaths": None, "keep": None})
                plan = module.Plan(f"{directory}/plain{number}", **{**words, "deaths": []})
                if key not in undisturbed:
                    undisturbed[key] = play(module.main, plan, f"plain-{os.getpid()}-{number}")
                plan = module.Plan(f"{directory}/killed{number}", **words)
                killed = play(module.main, plan, f"killed-{os.getpid()}-{number}")
                compare(killed, undisturbed[key], restored)
                print(f"equal: {words}", flush=True)
            except Exception:
                failures += 1
                print(f"NOT EQUAL: {words}\n{traceback.format_exc()}", flush=True)
    return failures


if __name__ == "__main__":
    os.environ.update(ENVIRON)
    torch.set_num_threads(1)
    program = importlib.import_module(sys.argv[1])
    program.preload()
    sys.exit(1 if _play_all(program, json.loads(sys.argv[2])) else 0)
