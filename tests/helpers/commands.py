"""The command ``transfuse`` as a process, with everything that it starts."""

from __future__ import annotations

import contextlib
import os
import pathlib
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from typing import Self

from transfuse.testing.ranks import FOREGROUND

__all__ = ["COMMAND", "DEMO", "Running"]

COMMAND = [sys.executable, "-c", "from transfuse.cli import main; main()"]
#: Beside the package, where it is found from the root of the repository.
DEMO = [sys.executable, "-m", "examples.demo"]
ROOT = pathlib.Path(__file__).parents[2]


class Running:
    """A command whose processes, down to the last grandchild, are known by a variable in their environment."""

    def __init__(
        self,
        *arguments: str,
        environ: Mapping[str, str] | None = None,
        under: Sequence[str] = (),
        cwd: pathlib.Path | None = None,
        command: Sequence[str] = COMMAND,
        feeds: bool = False,
    ) -> None:
        """``feeds``: it reads lines of ours (`ask`); otherwise its input is ours."""
        self.mark = f"MARK_OF_TEST={uuid.uuid4()}"
        name, value = self.mark.split("=")
        self.process = subprocess.Popen(
            [*FOREGROUND, *under, *command, *arguments],
            env=os.environ | dict(environ or {}) | {name: value},
            cwd=ROOT if command is DEMO else cwd,
            stdin=subprocess.PIPE if feeds else None,
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

    def alive(self) -> dict[int, str]:
        """The command lines of all that is left of it."""
        found = {}
        for entry in pathlib.Path("/proc").iterdir():
            try:
                if entry.name.isdigit() and self.mark.encode() in (entry / "environ").read_bytes().split(b"\0"):
                    found[int(entry.name)] = (entry / "cmdline").read_text().replace("\0", " ")
            except OSError:
                continue
        return found

    def until(self, done: Callable[[], bool], seconds: float = 120) -> None:
        deadline = time.monotonic() + seconds
        while not done():
            assert time.monotonic() < deadline, self.alive()
            time.sleep(0.05)

    def line(self) -> str:
        """The next line that it prints; it has to print one."""
        assert self.process.stdout is not None
        said = self.process.stdout.readline()
        assert said, self.end()
        return said.rstrip("\n")

    def ask(self, line: str) -> str:
        """Let it read a line, and return what it says to that."""
        assert self.process.stdin is not None
        print(line, file=self.process.stdin, flush=True)
        return self.line()

    def workers(self) -> list[int]:
        return [pid for pid, line in self.alive().items() if "spawn_main" in line]

    def read_until(self, word: str) -> list[str]:
        """The lines that it prints, up to the first one with this word."""
        lines = [self.line()]
        while word not in lines[-1]:
            lines.append(self.line())
        return lines

    def end(self) -> tuple[str, str, int]:
        """What it still prints, and its exit code; nothing of it may be left."""
        out, err = self.process.communicate(timeout=280)
        # The helper that multiprocessing starts along with workers ends a moment after its owner.
        self.until(lambda: not self.alive(), 20)
        return out, err, self.process.returncode
