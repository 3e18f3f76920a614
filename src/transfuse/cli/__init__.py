"""The command line: ``transfuse``. It needs the extra ``cli``; without it, the command says so."""

from __future__ import annotations

import io
import sys

__all__ = ["main"]


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

    from transfuse.cli.app import app

    for stream in (sys.stdout, sys.stderr):
        # Where the terminal's encoding lacks a sign, something else stands for it.
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    app(prog_name="transfuse")
