"""The command ``transfuse``. It needs the extra ``cli``; without it, the command says what to install."""

from __future__ import annotations

import importlib
import io
import sys

__all__ = ["main", "run"]


def main() -> None:
    """Entry point of the command ``transfuse``."""
    run("transfuse.cli.app", "transfuse")


def run(module: str, name: str) -> None:
    """Run the ``app`` of this module as a command called ``name``."""
    try:
        import rich  # noqa: F401
        import typer  # noqa: F401
    except ModuleNotFoundError as error:
        if error.name not in ("rich", "typer"):
            raise
        print(f"{name}: {error.name} is not installed; run: pip install 'transfuse[cli]'", file=sys.stderr)
        raise SystemExit(2) from None

    app = importlib.import_module(module).app
    for stream in (sys.stdout, sys.stderr):
        # Print a substitute for characters that the terminal's encoding lacks.
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    app(prog_name=name)
