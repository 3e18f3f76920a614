"""The second act: torchrun restarts all workers, which go on from the keeper's memory, and once from files."""

from __future__ import annotations

import ctypes
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from examples.demo.kept_words import FATAL_STEPS, RANKS, STEPS, VICTIM, Said
from examples.demo.outcome import Recovery, parts_between
from examples.demo.screen import Screen

from transfuse.testing.ranks import RanksFailed

__all__ = ["Kept", "perform", "recoveries"]

ROOT = Path(__file__).parents[2]
#: In seconds: far longer than the act takes.
PATIENCE = 300.0
#: How long torchrun has to end its workers, and the keeper to notice that torchrun is gone.
END_SECONDS = 40.0
#: A longer path leaves no room for the path of a unix socket.
MOST_DIRECTORY_BYTES = 50


@dataclass(frozen=True)
class Kept:
    """What the act has shown."""

    is_equal: bool
    from_memory: Recovery
    from_file: Recovery

    def to_dict(self) -> dict[str, Any]:
        return {
            "equal": self.is_equal,
            "workers": RANKS,
            "steps": STEPS,
            "from_memory": self.from_memory.to_dict(),
            "from_file": self.from_file.to_dict(),
        }


def perform(width: int, seed: int, screen: Screen) -> Kept:
    """Run the job under torchrun, tell what happens, and measure both recoveries."""
    said: list[Said] = []
    with _folders() as (files, keeper), tempfile.TemporaryFile("w+") as errors:
        words = ["--standalone", f"--nproc-per-node={RANKS}", f"--max-restarts={len(FATAL_STEPS)}"]
        words += ["-m", "examples.demo.kept_job", str(files), str(width), str(seed)]
        environment = os.environ | {
            "OMP_NUM_THREADS": "1",
            "GLOO_SOCKET_IFNAME": "lo",
            "TRANSFUSE_KEEPER_DIR": str(keeper),
            "TMPDIR": str(files),  # torchrun leaves a folder for logs there.
        }
        # A name in the environment would give the keeper's run a name too.
        environment.pop("TRANSFUSE_RUN", None)
        with _torchrun(words, environment, errors, keeper) as process:
            assert process.stdout is not None
            for line in process.stdout:
                said.append(Said(**json.loads(line)))
                _tell(said[-1], screen)
            code = process.wait()
        errors.seek(0)
        text = errors.read()
    verdicts = [one.what for one in said if one.what in ("equal", "different")]
    if code or len(verdicts) != RANKS:
        raise RanksFailed({VICTIM: f"and the others ended with code {code} under torchrun:\n{text[-4000:]}"})
    from_memory, from_file = recoveries(said)
    return Kept(verdicts == ["equal"] * RANKS, from_memory, from_file)


def recoveries(said: Sequence[Said]) -> list[Recovery]:
    """For each kill: the time until all ranks have done the step that it cut off."""
    found = []
    for life, fatal in enumerate(FATAL_STEPS):
        (killed,) = [one.when for one in said if (one.life, one.what) == (life, "killed")]
        after = [one for one in said if one.life == life + 1]
        begun = [one.step for one in after if one.what in ("restored", "loaded")]
        if len(begun) != RANKS or any(step > fatal for step in begun):
            raise RanksFailed({VICTIM: f"and the others went on from steps {begun} after the kill in step {fatal}"})
        whens = {
            "ending the others": [one.when for one in after if one.what == "started"],
            "starting": [one.when for one in after if one.what == "ready"],
            "forming the group": [one.when for one in after if one.what == "formed"],
            "loading": [one.when for one in after if one.what in ("restored", "loaded")],
            "steps": [one.when for one in after if (one.what, one.step) == ("done", fatal)],
        }
        found.append(Recovery(VICTIM, fatal, parts_between(killed, whens), fatal + 1 - begun[0]))
    return found


def _tell(one: Said, screen: Screen) -> None:
    name = f"worker {one.rank}"
    match one.what:
        case "killed":
            screen.line(
                one.when, f"{name} (process {one.pid}) gets SIGKILL in the middle of step {one.step}", "bold red"
            )
        case "started" if one.life:
            screen.line(one.when, f"torchrun starts {name} again as process {one.pid}")
        case "restored":
            screen.line(one.when, f"{name} goes on with step {one.step}, from the keeper's memory", "bold green")
        case "loaded":
            screen.line(one.when, f"{name} goes on with step {one.step}, from a file", "yellow")


# ------------------------------------------------------------------------------------------ nothing is left behind


@contextmanager
def _folders() -> Iterator[tuple[Path, Path]]:
    """Where the job saves its files, and where its keeper is found."""
    with tempfile.TemporaryDirectory(prefix="transfuse-demo-", ignore_cleanup_errors=True) as files:
        is_short = len(os.fsencode(files)) <= MOST_DIRECTORY_BYTES
        keeper = Path(tempfile.mkdtemp(prefix="transfuse-demo-", dir=None if is_short else "/tmp"))
        try:
            yield Path(files), keeper
        finally:
            shutil.rmtree(keeper, ignore_errors=True)


@contextmanager
def _torchrun(
    words: Sequence[str], environment: dict[str, str], errors: Any, keeper: Path
) -> Iterator[subprocess.Popen[str]]:
    """torchrun, until it and the keeper have ended, however this block ends."""
    command = [sys.executable, "-m", "torch.distributed.run", *words]
    process = subprocess.Popen(
        command,
        cwd=ROOT,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=errors,
        text=True,
        start_new_session=True,  # Ctrl-C is for the demo, which then ends torchrun in order.
        preexec_fn=_end_with_parent,
    )
    watch = threading.Timer(PATIENCE, process.terminate)
    watch.daemon = True
    watch.start()
    try:
        yield process
    finally:
        watch.cancel()
        process.terminate()
        try:
            process.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        if process.stdout is not None:
            process.stdout.close()
        until = time.monotonic() + END_SECONDS
        while list(keeper.glob("*/socket")) and time.monotonic() < until:
            time.sleep(0.05)


def _end_with_parent() -> None:
    """In torchrun's process: get SIGTERM when the demo's process dies, and end the workers then."""
    ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG
