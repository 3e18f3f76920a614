"""All commands."""

from __future__ import annotations

from typing import Annotated

import typer

import transfuse
from transfuse.cli.bench import bench
from transfuse.cli.demo import demo

__all__ = ["app"]

app = typer.Typer(
    no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False, rich_markup_mode="markdown"
)


def _show_version(wanted: bool) -> None:
    if wanted:
        print(f"transfuse {transfuse.__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """Move a running PyTorch job's live state from one process to others, exactly, from memory to memory."""


app.command()(demo)
app.command()(bench)
