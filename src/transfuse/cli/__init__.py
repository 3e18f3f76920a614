"""The command line: ``transfuse``. It needs the extra ``cli``; without it, the command says so."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated

import transfuse

if TYPE_CHECKING:
    import typer

__all__ = ["main", "make_app"]


def main() -> None:
    """What the command ``transfuse`` runs."""
    try:
        import rich  # noqa: F401
        import typer  # noqa: F401
    except ModuleNotFoundError as error:
        if error.name not in ("rich", "typer"):
            raise
        print(f"transfuse: {error.name} is not installed; run: pip install 'transfuse[cli]'", file=sys.stderr)
        raise SystemExit(2) from None
    make_app()()


def make_app() -> typer.Typer:
    """All commands."""
    import typer

    from transfuse.cli.demo import demo

    app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)
    app.command()(demo)

    def show_version(wanted: bool) -> None:
        if wanted:
            print(f"transfuse {transfuse.__version__}")
            raise typer.Exit

    @app.callback()
    def root(
        version: Annotated[
            bool, typer.Option("--version", callback=show_version, is_eager=True, help="Show the version and exit.")
        ] = False,
    ) -> None:
        """Move a running PyTorch job's live state from one process to others, exactly, from memory to memory."""

    return app
