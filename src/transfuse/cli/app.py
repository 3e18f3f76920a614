"""The command with all its subcommands. Each is a function of that name in a module of that name.

The module is imported when its command is called: most import torch, which a list of commands, or of keepers, does not
need.
"""

from __future__ import annotations

import importlib
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

import transfuse
from transfuse.cli.errors import DEBUG_VARIABLE, Commands

__all__ = ["app"]

#: The commands, and what the list of them says of each: what it says itself first.
COMMANDS = {
    "inspect": (
        "Show what a state holds: names, kinds, dtypes, shapes, sizes, what shares memory, and how it is sharded."
    ),
    "serve": "Serve the state in a file to `transfuse fetch` and `transfuse.fetch`, until Ctrl-C.",
    "fetch": "Fetch a state and write it to a file, whole or not at all.",
    "save": "Write the newest step of a running job to a directory, as keepers write steps there.",
    "keep": "Run the keeper of a run in the foreground, until its job is done, Ctrl-C or SIGTERM.",
    "hub": "Be a Hugging Face Hub whose one repository holds the weights of a running job, until Ctrl-C.",
    "doctor": (
        "Say which routes work on this machine and why not, which network interface gloo takes, and what is installed."
    ),
}

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


class _Deferred(TyperCommand):
    """Stands for a command until it is called."""

    def make_context(self, info_name: Any, args: list[str], parent: Any = None, **extra: Any) -> Any:
        return self.real().make_context(info_name, args, parent, **extra)

    def real(self) -> Any:
        function = getattr(importlib.import_module(f"transfuse.cli.{self.name}"), str(self.name))
        alone = typer.Typer(add_completion=False, rich_markup_mode="markdown")
        alone.command(self.name)(function)
        return typer.main.get_command(alone)


def _stand_in() -> None:
    """A deferred command is never run itself."""


for name, summary in COMMANDS.items():
    app.command(name, cls=_Deferred, help=summary)(_stand_in)
