"""The command with all its subcommands."""

from __future__ import annotations

from typing import Annotated

import typer

import transfuse
from transfuse.cli.doctor import doctor
from transfuse.cli.errors import DEBUG_VARIABLE, Commands
from transfuse.cli.fetch import fetch
from transfuse.cli.hub import hub
from transfuse.cli.inspect import inspect
from transfuse.cli.keep import keep
from transfuse.cli.serve import serve

__all__ = ["app"]

app = typer.Typer(
    cls=Commands,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
)


def _show_version(wanted: bool) -> None:
    if wanted:
        print(f"transfuse {transfuse.__version__}")
        raise typer.Exit


@app.callback()
def _root(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version and exit.")
    ] = False,
    debug: Annotated[
        bool, typer.Option("--debug", envvar=DEBUG_VARIABLE, help="Show tracebacks of errors that are expected, too.")
    ] = False,
) -> None:
    """Move a running PyTorch job's live state from one process to others, exactly, from memory to memory.

    Exit codes: 0 done; 1 failed, and stderr says why; 2 wrong usage; 130 interrupted; 141 nobody reads the output any
    more.
    """
    context.obj = {"debug": debug}


for command in (inspect, serve, fetch, keep, hub, doctor):
    app.command()(command)
