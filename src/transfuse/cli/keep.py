"""``transfuse keep``: run the keeper of a run in the foreground, list the keepers of this host, or end one."""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer

from transfuse._errors import TransfuseError
from transfuse._keeper import attach, runs
from transfuse._keeper.attach import SOCKET_NAME
from transfuse._keeper.frames import KeeperLink
from transfuse._keeper.runs import Run
from transfuse._metrics.address import VARIABLE, MetricsAddress, address_in, address_in_environment
from transfuse._tuning import CLI_LONGEST_SECONDS, DRAIN_SECONDS
from transfuse.cli.errors import Failed
from transfuse.cli.keeper_table import COLUMNS, holdings, name_of, rows, stored, trouble
from transfuse.cli.keepers import ALIVE, DEAD, FoundRun, find, list_keepers, stop
from transfuse.cli.options import (
    AsJson,
    Seconds,
    TlsCa,
    TlsCert,
    TlsKey,
    TlsNames,
    check_settings,
    encrypt_by,
)
from transfuse.cli.tables import printable, say, show
from transfuse.cli.watching import watch

__all__ = ["keep"]

RUN_VARIABLE, DIRECTORY_VARIABLE = "TRANSFUSE_RUN", "TRANSFUSE_KEEPER_DIR"


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
            max=CLI_LONGEST_SECONDS,
            metavar="SECONDS",
            help="End when no worker has come for this time after all have ended. Without it: stay.",
        ),
    ] = None,
    drain: Annotated[
        float,
        typer.Option(
            min=0.0,
            max=CLI_LONGEST_SECONDS,
            metavar="SECONDS",
            help="At SIGTERM or Ctrl-C: how long to wait for what is under way. The second one ends it at once.",
        ),
    ] = DRAIN_SECONDS,
    metrics: Annotated[
        str | None,
        typer.Option(
            "--metrics",
            metavar="ADDRESS",
            help="Answer /metrics (for Prometheus) and /healthz here, over HTTP: host:port, :port, :first-last for the "
            f"first port that is free, or a path. Without it: {VARIABLE}.",
        ),
    ] = None,
    status: Annotated[
        bool, typer.Option("--status", help="List the keepers of this user on this host, and the hosts of their runs.")
    ] = False,
    watching: Annotated[
        bool, typer.Option("--watch", help="With --status: show it again and again, until Ctrl-C or the run's end.")
    ] = False,
    interval: Annotated[
        float, typer.Option(min=0.1, max=CLI_LONGEST_SECONDS, metavar="SECONDS", help="How often --watch looks.")
    ] = 2.0,
    check: Annotated[
        bool, typer.Option("--check", help="Whether the run's keeper answers and takes commits: exit code 0 or 1.")
    ] = False,
    end: Annotated[
        str | None, typer.Option("--stop", metavar="NAME|PID", help="Ask the keeper of a run to end, and wait for it.")
    ] = None,
    timeout: Seconds = 10,
    tls_cert: TlsCert = None,
    tls_key: TlsKey = None,
    tls_ca: TlsCa = None,
    tls_names: TlsNames = None,
    as_json: AsJson = False,
) -> None:
    """Run the keeper of a run in the foreground, until its job is done, Ctrl-C or SIGTERM.

    Usually a worker starts the keeper (`transfuse.keep`), and nobody else has to. Run it here where processes that
    workers start do not outlive them: as a step of a SLURM job, or in a container beside that of the workers, with
    which it shares the keepers' directory. Workers with the same run's name find it there.

    --status lists the keepers of this user, and directories of dead ones; with --run only those of that run. --stop
    ends a keeper; what it holds is gone.
    """
    encrypt_by(tls_cert, tls_key, tls_ca, tls_names)
    check_settings()
    if directory is not None:
        os.environ[DIRECTORY_VARIABLE] = str(directory)
    if status + check + (end is not None) > 1:
        raise typer.BadParameter("--status, --check and --stop are commands of their own: give one of them")
    if watching and not status:
        raise typer.BadParameter("--watch shows the status again and again: give --status, too")
    if status and watching:
        _watch(run, interval, timeout, as_json)
    elif status:
        _show(list_keepers(timeout, name=run, with_hosts=True), as_json)
    elif check:
        _check(_named(run), timeout, as_json)
    elif end is not None:
        _stop(end, timeout, as_json)
    else:
        _run(_named(run), linger, drain, _measured_at(metrics), timeout, as_json)


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


def _measured_at(metrics: str | None) -> MetricsAddress | None:
    try:
        return address_in_environment() if metrics is None else address_in(metrics, "the address")
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--metrics") from None


def _run(
    run: Run, linger: float | None, drain: float, metrics: MetricsAddress | None, timeout: float, as_json: bool
) -> None:
    from transfuse._keeper.process import Keeper, cannot_be_measured, go_before_training

    found = attach.find(run, time.monotonic() + timeout)
    if isinstance(found, KeeperLink):
        pid = found.peer_pid()
        found.close()
        raise Failed(f"run {run.name} has a keeper already, process {pid}: end it with transfuse keep --stop {pid}")
    directory = found.directory
    try:
        keeper = Keeper(found, in_foreground=True, linger=linger, drain=drain, metrics=metrics)
    except OSError as error:
        raise TransfuseError(attach.cannot_write(directory, error)) from error
    go_before_training()
    # A signal that is ignored, by nohup for example, stays ignored.
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        if signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, lambda *_: keeper.drain())
    try:
        try:
            keeper.be_measured()
        except OSError as error:
            # Somebody is here who can choose another address. A keeper that a worker starts goes on without.
            raise Failed(cannot_be_measured(metrics, error)) from None
        with _told():
            if as_json:
                print(json.dumps(FoundRun(run, ALIVE, keeper.status()).to_dict()), flush=True)
            else:
                print(keeper.address, flush=True)
                where = f"; metrics and health at {keeper.metrics}" if keeper.metrics else ""
                print(f"transfuse keep: run {run.name}, in {directory}{where}; Ctrl-C ends it", file=sys.stderr)
            keeper.run()
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
        say(_none())
        return
    show(COLUMNS, [row for one in keepers for row in rows(one)])
    for one in keepers:
        if one.state == ALIVE:
            held = f", holds {holdings(one.status['states'])}" if one.status["states"] else ""
            say(f"{name_of(one)}: {one.status['address']}, token in {one.token_file}{held}")
            if one.status["storage"]:
                say(f"{name_of(one)} {printable(stored(one.status['storage']))}")
        for line in trouble(one):
            say(line)


def _none() -> str:
    return f"no keeper in {runs.base_directory()}"


def _watch(name: str | None, interval: float, timeout: float, as_json: bool) -> None:
    try:
        if not watch(lambda: list_keepers(timeout, name=name, with_hosts=True), interval, as_json=as_json):
            say(_none() if name is None else f"{_none()} of a run {name}")
    except KeyboardInterrupt:
        pass  # That is how one leaves it.


def _check(run: Run, timeout: float, as_json: bool) -> None:
    """Whether a keeper is there, answers and takes commits."""
    where = run.directory / SOCKET_NAME
    found = next(iter(list_keepers(timeout, name=run.name)), None)
    if found is None or found.state == DEAD:
        raise Failed(f"no keeper of run {run.name} listens at {where}")
    if found.state != ALIVE:
        raise Failed(f"the keeper of run {run.name} does not answer at {where} within {timeout:g} s")
    if found.status["draining"] is not None:
        raise Failed(f"the keeper of run {run.name} was told to end, and takes no new commits")
    if as_json:
        print(json.dumps(found.to_dict()))
    else:
        step = found.status["confirmed_step"]
        kept = "nothing is kept yet" if step is None else f"step {step} is complete"
        say(f"the keeper of run {printable(run.name)} answers at {where}: process {found.pid}, {kept}")
