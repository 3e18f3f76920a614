"""``transfuse keep``: run the keeper of a run in the foreground, list the keepers of this host, or end one."""

from __future__ import annotations

import json
import logging
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer

from transfuse._errors import TransfuseError
from transfuse._keeper import attach, runs
from transfuse._keeper.files import read_past
from transfuse._keeper.frames import KeeperLink
from transfuse._keeper.runs import Run
from transfuse._sizes import human_bytes
from transfuse.cli.errors import Failed
from transfuse.cli.keepers import ALIVE, DEAD, FoundRun, find, list_keepers, stop
from transfuse.cli.options import LONGEST_SECONDS, AsJson, Seconds, check_settings
from transfuse.cli.tables import Column, printable, say, show

__all__ = ["keep"]

RUN_VARIABLE, DIRECTORY_VARIABLE = "TRANSFUSE_RUN", "TRANSFUSE_KEEPER_DIR"

COLUMNS = (
    Column("run", wraps=True),
    Column("keeper"),
    Column("pid", right=True),
    Column("attached"),
    Column("step", right=True),
    Column("states", right=True),
    Column("memory", right=True),
    Column("replicas", right=True),
    Column("address"),
    Column("token", wraps=True),
)


def keep(
    run: Annotated[
        str | None, typer.Option("--run", metavar="NAME", help=f"The run's name. Without it: {RUN_VARIABLE}.")
    ] = None,
    directory: Annotated[
        Path | None,
        typer.Option("--dir", metavar="DIR", help=f"Where keepers are found. Without it: {DIRECTORY_VARIABLE}."),
    ] = None,
    linger: Annotated[
        float | None,
        typer.Option(
            min=0.0,
            max=LONGEST_SECONDS,
            metavar="SECONDS",
            help="End when no worker has come for this time after all have ended. Without it: stay.",
        ),
    ] = None,
    status: Annotated[bool, typer.Option("--status", help="List the keepers of this user on this host.")] = False,
    end: Annotated[
        str | None, typer.Option("--stop", metavar="NAME|PID", help="Ask the keeper of a run to end, and wait for it.")
    ] = None,
    timeout: Seconds = 10,
    as_json: AsJson = False,
) -> None:
    """Run the keeper of a run in the foreground, until its job is done, Ctrl-C or SIGTERM.

    Usually a worker starts the keeper (`transfuse.keep`), and nobody else has to. Run it here where processes that
    workers start do not outlive them: as a step of a SLURM job, or in a container beside that of the workers, with
    which it shares the keepers' directory. Workers with the same run's name find it there.

    --status lists the keepers of this user, and directories of dead ones. --stop ends a keeper; what it holds is gone.
    """
    check_settings()
    if directory is not None:
        os.environ[DIRECTORY_VARIABLE] = str(directory)
    if status and end is not None:
        raise typer.BadParameter("--status and --stop are two commands: give one of them")
    if status:
        _show(list_keepers(timeout), as_json)
    elif end is not None:
        _stop(end, timeout, as_json)
    else:
        _run(_named(run), linger, timeout, as_json)


# ---------------------------------------------------------------------------------------------- in the foreground


def _named(name: str | None) -> Run:
    name = os.environ.get(RUN_VARIABLE) if name is None else name
    if name is None:
        raise typer.BadParameter(
            f"which run? Give --run NAME or set {RUN_VARIABLE}; workers need the same name (run=, or {RUN_VARIABLE})"
        )
    try:
        return Run(runs.find_run(name).name, True, None)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--run") from None


def _run(run: Run, linger: float | None, timeout: float, as_json: bool) -> None:
    from transfuse._keeper.process import Keeper, go_before_training

    found = attach.find(run, time.monotonic() + timeout)
    if isinstance(found, KeeperLink):
        pid = found.peer_pid()
        found.close()
        raise Failed(f"run {run.name} has a keeper already, process {pid}: end it with transfuse keep --stop {pid}")
    directory = found.directory
    try:
        keeper = Keeper(found, in_foreground=True, linger=linger)
    except OSError as error:
        raise TransfuseError(attach.cannot_write(directory, error)) from error
    go_before_training()
    try:
        with _told():
            if as_json:
                print(json.dumps(FoundRun(run, ALIVE, keeper.status()).to_dict()), flush=True)
            else:
                print(keeper.address, flush=True)
                print(f"transfuse keep: run {run.name}, in {directory}; Ctrl-C ends it", file=sys.stderr)
            keeper.run()
    except KeyboardInterrupt:
        print("transfuse keep: ending", file=sys.stderr)
    finally:
        keeper.close()


@contextmanager
def _told() -> Iterator[None]:
    """Print what the keeper and the library log, as lines on stderr."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("transfuse keep: %(message)s"))
    of_all, of_keeper = logging.getLogger("transfuse"), logging.getLogger("transfuse.keeper")
    before = of_keeper.level
    of_keeper.setLevel(logging.INFO)
    handler.addFilter(lambda record: record.levelno >= logging.WARNING or record.name == of_keeper.name)
    of_all.addHandler(handler)
    try:
        yield
    finally:
        of_all.removeHandler(handler)
        of_keeper.setLevel(before)


# ------------------------------------------------------------------------------------------------- status and stop


def _stop(name: str, timeout: float, as_json: bool) -> None:
    found = find(name, timeout)
    done = stop(found, timeout)
    if as_json:
        print(json.dumps({"run": found.run.name, "pid": found.pid, "done": done}))
    else:
        say(printable(done))


def _show(keepers: list[FoundRun], as_json: bool) -> None:
    if as_json:
        print(json.dumps([one.to_dict() for one in keepers], indent=2))
        return
    if not keepers:
        say(f"no keeper in {runs.base_directory()}")
        return
    show(COLUMNS, [_cells(one) for one in keepers])
    for one in keepers:
        if one.state == ALIVE and one.status["states"]:
            say(f"{_cells(one)[0]} holds {_holdings(one.status['states'])}")
        if one.state == DEAD:
            past = read_past(one.directory)
            told = "its keeper is dead; its log may say why" if past is None else past.tell(None)
            say(f"{one.directory}: {told}; --stop removes it")


def _cells(found: FoundRun) -> tuple[str, ...]:
    status: dict[str, Any] = found.status
    name = printable(found.run.name) if found.run.is_named else f"(no name: {found.directory.name})"
    if found.state != ALIVE:
        return name, found.state, str(found.pid or ""), "", "", "", "", "", "", ""
    step, replicas = status["confirmed_step"], status["replicas"]
    return (
        name,
        found.state if status["ended_step"] is None else f"ended at step {status['ended_step']}",
        str(found.pid),
        _ranges(status["attached"]) or "none",
        "none" if step is None else str(step),
        str(len(status["states"])),
        human_bytes(status["bytes"]),
        str(sum(one["replica"] for one in status["states"])) if replicas["hosts"] > 1 else "",
        status["address"],
        str(found.token_file),
    )


def _holdings(states: list[dict[str, Any]]) -> str:
    """What a keeper holds, newest first: ``step 4 (rank 0), step 4 of host 1 (rank 1), step 3 (rank 0, not whole)``."""
    ranks: dict[tuple[int, int, bool, int, bool], list[int]] = {}
    for one in states:
        host = -1 if one["host"] is None else one["host"]
        key = (-one["generation"], -one["step"], one["replica"], host, not one["whole"])
        ranks.setdefault(key, []).append(one["rank"])
    told = []
    for (_, step, is_replica, host, is_torn), some in sorted(ranks.items()):
        whose = "" if not is_replica else f" of host {host}" if host >= 0 else " of a host that is gone"
        plural = "s" if len(some) > 1 else ""
        told.append(f"step {-step}{whose} (rank{plural} {_ranges(some)}{', not whole' if is_torn else ''})")
    return ", ".join(told)


def _ranges(ranks: list[int]) -> str:
    """Ranks in few characters: ``0-3 6``."""
    runs_of: list[list[int]] = []
    for rank in ranks:
        if runs_of and rank == runs_of[-1][-1] + 1:
            runs_of[-1].append(rank)
        else:
            runs_of.append([rank])
    return " ".join(str(some[0]) if len(some) == 1 else f"{some[0]}-{some[-1]}" for some in runs_of)
