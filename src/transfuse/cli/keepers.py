"""The keepers of this user on this host, for the commands that name them."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from transfuse._errors import TransfuseError
from transfuse._keeper import frames, runs
from transfuse._keeper.attach import SOCKET_NAME, Lock
from transfuse._keeper.files import HELD_NAME, TOKEN_NAME, remove_files
from transfuse._keeper.frames import KeeperLink, KeeperLost
from transfuse._keeper.runs import Run
from transfuse._tuning import DRAIN_LOOK_SECONDS, KEEPER_LEAST_SECONDS, OVERVIEW_ASK_SECONDS
from transfuse.cli.errors import Failed
from transfuse.cli.options import token_of

__all__ = ["PREFIX", "FoundRun", "find", "list_keepers", "served", "stop"]

#: ``keeper:NAME`` is the keeper of this run.
PREFIX = "keeper:"
LOOPBACK = "127.0.0.1"
ALIVE, SILENT, DEAD = "alive", "silent", "dead"
#: How long the keepers of other hosts may take, beside this one: two waits for each, and some room.
LOOK = 3 * OVERVIEW_ASK_SECONDS


@dataclass(frozen=True)
class FoundRun:
    """A run that has a directory on this host, and what its keeper says."""

    run: Run
    #: ``ALIVE``; ``SILENT``: it is there, but does not answer; ``DEAD``.
    state: str
    status: dict[str, Any]
    #: What the keepers of the other hosts say, if they were asked.
    hosts: list[dict[str, Any]] = field(default_factory=list)

    @property
    def directory(self) -> Path:
        return self.run.directory

    @property
    def token_file(self) -> Path:
        return self.directory / TOKEN_NAME

    @property
    def pid(self) -> int | None:
        return self.status.get("pid")

    def to_dict(self) -> dict[str, Any]:
        about: dict[str, Any] = {"run": self.run.name, "is_named": self.run.is_named, "keeper": self.state}
        where = {"directory": str(self.directory), "token_file": str(self.token_file)}
        hosts = {"hosts": self.hosts} if self.state == ALIVE else {}
        return about | self.status | hosts | (where if self.state != DEAD else {"directory": str(self.directory)})


def list_keepers(seconds: float, *, name: str | None = None, with_hosts: bool = False) -> list[FoundRun]:
    """All runs of this user that have a directory here, or those of this name. Each keeper has ``seconds`` to answer.

    ``with_hosts``: also what the keepers of the other hosts say.
    """
    known = [run for run in runs.list_runs() if name in (None, run.name)]
    return [_look(run, seconds, with_hosts=with_hosts) for run in known]


def _look(run: Run, seconds: float, *, with_hosts: bool = False) -> FoundRun:
    try:
        link = KeeperLink.to(str(run.directory / SOCKET_NAME), seconds)
    except KeeperLost:
        return FoundRun(run, DEAD, {})
    try:
        pid = link.peer_pid()
        told = link.ask(frames.Status(), frames.StatusReply, seconds)
        status = json.loads(told.text)
        is_alone = not with_hosts or status["replicas"]["hosts"] == 1
        return FoundRun(run, ALIVE, status, [] if is_alone else _hosts(link, seconds + LOOK))
    except TransfuseError:
        return FoundRun(run, SILENT, {"pid": pid})
    finally:
        link.close()


def _hosts(link: KeeperLink, seconds: float) -> list[dict[str, Any]]:
    """What the keepers of the other hosts say; nothing, if this one is of a version that does not ask them."""
    with suppress(TransfuseError):
        told: list[dict[str, Any]] = json.loads(link.ask(frames.Hosts(), frames.StatusReply, seconds).text)
        return told
    return []


def find(name: str, seconds: float) -> FoundRun:
    """The keeper of the run of this name, or the keeper with this pid."""
    keepers = list_keepers(seconds)
    # A name comes first: it may consist of digits.
    for one in [*(one for one in keepers if one.run.is_named and one.run.name == name), *keepers]:
        if name in (one.run.name, str(one.pid)):
            return one
    known = ", ".join(_short_name(one) for one in keepers)
    there = f"there are keepers of {known}" if known else "there is none"
    raise Failed(f"no keeper of a run {name} in {runs.base_directory()}: {there}; see transfuse keep --status")


def _short_name(found: FoundRun) -> str:
    return found.run.name if found.run.is_named else f"pid {found.pid}" if found.pid else found.directory.name


def stop(found: FoundRun, seconds: float) -> str:
    """Ask a keeper to end, wait for it, and say what has happened."""
    if found.state == DEAD:
        _remove(found)
        return f"the keeper of {_short_name(found)} was dead; its directory is removed"
    try:
        link = KeeperLink.to(str(found.directory / SOCKET_NAME), seconds)
    except KeeperLost:
        return f"the keeper of {_short_name(found)} has ended by itself"
    try:
        # The process at the other end of this connection, whatever its version and whatever a file says.
        pid = link.peer_pid()
        if not pid:
            raise Failed(f"the keeper of {_short_name(found)} runs in another namespace of pids: end it there")
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGTERM)
        until = time.monotonic() + seconds
        while not link.gone():
            if time.monotonic() > until:
                raise Failed(
                    f"keeper {pid} has not ended within {seconds:g} s. It has been asked to, and waits for what is "
                    f"under way; asked again, it ends at once. If it is stopped, kill -9 {pid} ends it"
                )
            time.sleep(DRAIN_LOOK_SECONDS)
    finally:
        link.close()
    attached = found.status.get("attached", [])
    more = f"; {len(attached)} workers were attached, who start another one" if attached else ""
    if (found.directory / HELD_NAME).exists():
        more += (
            ". Its job has kept steps and runs on: if it is restarted before it commits again, restore() raises. To "
            "forget the run, end the job, and stop its keeper once more"
        )
    return f"keeper {pid} of {_short_name(found)} has ended{more}"


def _remove(found: FoundRun) -> None:
    """Remove what a dead keeper has left, unless a worker is starting another one."""
    lock = Lock.take(found.directory)
    if lock is None:
        raise Failed(f"a worker is starting a keeper in {found.directory} at this moment")
    with lock:
        with suppress(KeeperLost):
            KeeperLink.to(str(found.directory / SOCKET_NAME), KEEPER_LEAST_SECONDS).close()
            raise Failed(f"a worker has started a keeper in {found.directory} at this moment")
        remove_files(found.directory)


# ----------------------------------------------------------------------------------------------- as an address


@contextmanager
def served(where: str, token_file: Path | None, seconds: float) -> Iterator[tuple[list[str], bytes | None]]:
    """The addresses behind an address, and the token for them.

    ``keeper:NAME`` becomes one address for each rank whose newest complete step the keeper holds. The keeper serves
    these while the block runs.
    """
    if not where.startswith(PREFIX):
        yield [where], token_of(token_file)
        return
    found = find(where.removeprefix(PREFIX), seconds)
    if found.state != ALIVE:
        raise Failed(f"the keeper of {_short_name(found)} is {found.state}: see transfuse keep --status")
    newest = found.status["complete"]
    if newest is None:
        raise Failed(f"the keeper of {_short_name(found)} holds no complete step yet")
    token = found.token_file.read_text()
    link = KeeperLink.to(str(found.directory / SOCKET_NAME), seconds)
    try:
        question = frames.Serve(newest["generation"], newest["step"], LOOPBACK, token)
        serving = link.ask(question, frames.Serving, seconds)
        yield [one.address for one in sorted(serving.addresses, key=lambda one: one.rank)], token.encode()
    finally:
        link.close()
