"""The files of a keeper: for workers that look for it, and for a keeper of the same run that comes after it.

A process that writes or removes them holds the lock of the run's directory (:mod:`transfuse._keeper.attach`).
"""

from __future__ import annotations

import json
import pathlib
import time
from collections.abc import Iterable
from contextlib import suppress

import msgspec

from transfuse._keeper.attach import LOCK_NAME, LOG_NAME, SOCKET_NAME
from transfuse._keeper.runs import RUN_FILE, Run, boot_id
from transfuse._state.whole_file import write_whole

TOKEN_NAME, ADDRESS_NAME, PORT_NAME, HELD_NAME, CLOSED_NAME = "token", "address", "port", "held", "closed"


def write(directory: pathlib.Path, name: str, text: str) -> None:
    """Write a file that readers see whole, or not at all."""
    write_whole(directory / name, text)


def remove_files(directory: pathlib.Path, *, with_note: bool = True) -> None:
    """Remove what a keeper has left. The caller holds the lock of the directory.

    ``with_note``: also that the run has kept steps, the log, what the next keeper of the job needs, and the directory.
    """
    names = [SOCKET_NAME, TOKEN_NAME, ADDRESS_NAME]
    if with_note:
        # The lock last: a process that waits for it sees that it is gone, and begins again.
        names += [LOG_NAME, PORT_NAME, CLOSED_NAME, HELD_NAME]
        names += [*(path.name for path in directory.glob(f"{RUN_FILE}*")), LOCK_NAME]
    for name in names:
        with suppress(OSError):
            (directory / name).unlink()
    if with_note:
        with suppress(OSError):
            directory.rmdir()


# ------------------------------------------------------------------------------------------------ for the next keeper


class Past(msgspec.Struct):
    """That a keeper of this run has held steps. It counts until the host is booted again."""

    boot: str
    #: The newest step, when this was noted; None if only keepers of other hosts know.
    step: int | None
    at: float
    #: Why that keeper has ended; empty: it lives, or was killed.
    why: str = ""

    def tell(self, run: Run | None) -> str:
        """For somebody who cannot restore them."""
        step = "" if self.step is None else f" up to step {self.step}"
        name = run.name if run is not None and run.is_named else ""
        which = f" of run {name}" if name else ""
        forget = f"; once no job of this run is there, transfuse keep --stop '{name}' forgets them" if name else ""
        return (
            f"this host's keeper{which} had kept steps{step}, as it noted at {local_time(self.at)}, and is gone: "
            f"{self.why or 'it was killed'}{forget}"
        )


def local_time(seconds: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds))


def note_past(directory: pathlib.Path, step: int | None, why: str = "") -> None:
    """Note that this run has held steps: if this process ends, the run must not begin anew without a word."""
    write(directory, HELD_NAME, msgspec.json.encode(Past(boot_id(), step, time.time(), why)).decode())


def read_past(directory: pathlib.Path) -> Past | None:
    """What a keeper of this run has noted on this host, since it was booted."""
    with suppress(OSError, msgspec.MsgspecError):
        past = msgspec.json.decode((directory / HELD_NAME).read_bytes(), type=Past)
        return past if past.boot == boot_id() else None
    return None


def note_closed(directory: pathlib.Path, generation: int, ranks: Iterable[int]) -> None:
    with suppress(OSError):
        write(directory, CLOSED_NAME, json.dumps([generation, sorted(ranks)]))


def closed_before(directory: pathlib.Path, generation: int) -> set[int]:
    """The ranks that had closed when a keeper of this generation was killed here. They do not come again."""
    with suppress(OSError, ValueError, TypeError):
        of, ranks = json.loads((directory / CLOSED_NAME).read_text())
        return set(ranks) if of == generation else set()
    return set()
