"""A command as a user starts it, all of whose processes can be found, down to the last grandchild."""

from __future__ import annotations

import contextlib
import os
import pathlib
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable
from typing import Self

__all__ = ["Marked"]

COMMAND = [sys.executable, "-c", "from transfuse.cli import main; main()"]


class Marked:
    """Its processes are known by a variable in their environment."""

    def __init__(self, *arguments: str, **environment: str) -> None:
        self.mark = f"MARK_OF_TEST={uuid.uuid4()}"
        name, value = self.mark.split("=")
        self.process = subprocess.Popen(
            [*COMMAND, *arguments],
            env=os.environ | {name: value} | environment,
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

    def until(self, done: Callable[[], bool], seconds: float = 120) -> None:
        deadline = time.monotonic() + seconds
        while not done():
            assert time.monotonic() < deadline, self.alive()
            time.sleep(0.05)

    def read_until(self, word: str) -> list[str]:
        """The lines that it prints, up to the first one with this word."""
        assert self.process.stdout is not None
        lines: list[str] = []
        for line in self.process.stdout:
            lines.append(line)
            if word in line:
                return lines
        raise AssertionError(f"it ended without {word!r}: {lines}")

    def end(self) -> tuple[str, str, int]:
        out, err = self.process.communicate(timeout=280)
        # The helper that multiprocessing starts along with workers ends a moment after its owner.
        self.until(lambda: not self.alive(), 20)
        return out, err, self.process.returncode
