"""How a command fails: one line on stderr and an exit code. Tracebacks are for bugs, and for ``--debug``."""

from __future__ import annotations

import enum
import errno
import logging
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import typer
from typer.core import TyperCommand, TyperGroup

from transfuse._errors import TransfuseError
from transfuse._log import SPEAKER
from transfuse.cli.tables import printable

__all__ = ["DEBUG_VARIABLE", "Command", "Commands", "Exit", "Failed", "reading", "warnings_shown"]

DEBUG_VARIABLE = "TRANSFUSE_DEBUG"


class Exit(enum.IntEnum):
    """The exit codes of all commands."""

    FAILED = 1
    USAGE = 2
    INTERRUPTED = 130
    #: The code that a shell reports for SIGPIPE.
    PIPE_CLOSED = 141


class Failed(Exception):
    """The command cannot do what the user asked for. The message says why."""


#: What to do about a file that cannot be read. For other errors the system's own text has to do.
_REMEDIES = {
    errno.ENOENT: "is the name right?",
    errno.EACCES: "read it as a user who may, or change its mode",
    errno.EIO: "its disk may be failing: use a copy on another",
}


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """Turn errors of this block into errors about this file: the system's text seldom names the file."""
    try:
        yield
    except IsADirectoryError as error:
        raise Failed(f"{path} is a directory; {_in_directory(path)}") from error
    except OSError as error:
        remedy = _REMEDIES.get(error.errno or 0)
        text = f"{path} cannot be read: {error.strerror or error}"
        raise Failed(text + (f"; {remedy}" if remedy else "")) from error


def _in_directory(path: Path) -> str:
    if not (path / ".metadata").is_file():
        return "no step is saved in it: name a file in it, or look again when one is"
    return (
        "it looks like a checkpoint of torch.distributed.checkpoint: make a file of it with "
        f"`python -m torch.distributed.checkpoint.format_utils dcp_to_torch {path} FILE.pt`"
    )


class Commands(TyperGroup):
    """Runs a command, and turns expected errors into a line and an exit code."""

    def invoke(self, ctx: Any) -> Any:
        run = partial(super().invoke, ctx)
        return _answering(
            run, lambda: f"transfuse {ctx.invoked_subcommand}", lambda: ctx.obj is not None and ctx.obj.get("debug")
        )


class Command(TyperCommand):
    """The same for a program that is a single command: the demo, the comparison."""

    def invoke(self, ctx: Any) -> Any:
        debug = os.environ.get(DEBUG_VARIABLE, "0") not in ("", "0")
        return _answering(partial(super().invoke, ctx), lambda: str(self.name), lambda: debug)


def _answering(run: Callable[[], Any], name: Callable[[], str], debug: Callable[[], bool]) -> Any:
    """Run a command. Its name, and whether to show tracebacks, are known only once it runs."""

    def end(text: str, code: Exit) -> NoReturn:
        if debug():
            raise
        print(f"{name()}: {text}", file=sys.stderr)
        raise typer.Exit(code) from None

    try:
        with _interruptible():
            result = run()
        # Flush here, so that a pipe that was closed meanwhile raises where it is handled.
        sys.stdout.flush()
        return result
    except KeyboardInterrupt:
        end("interrupted", Exit.INTERRUPTED)
    except BrokenPipeError:
        # The reader has closed the pipe (`| head`). Python must not write to it at exit, either.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise typer.Exit(Exit.PIPE_CLOSED) from None
    except (Failed, TransfuseError, OSError, MemoryError) as error:
        end(_text(error), Exit.FAILED)


def _text(error: BaseException) -> str:
    """The text of an error. It may contain a peer's words, so it is escaped for terminals."""
    text = str(error) or type(error).__name__
    if isinstance(error, OSError) and not isinstance(error, TransfuseError) and error.strerror:
        text = f"{error.filename}: {error.strerror}" if error.filename is not None else error.strerror
    notes = getattr(error, "__notes__", []) if isinstance(error, TransfuseError) else []
    return "\n".join(_clean(part) for part in [text, *notes])


def _clean(text: str) -> str:
    return "\n".join(printable(line) for line in text.split("\n"))


@contextmanager
def _interruptible() -> Iterator[None]:
    """Let SIGTERM and a closed terminal end the command as Ctrl-C does: with everything cleaned up."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    # A signal that is ignored, by nohup for example, stays ignored.
    ours = [number for number in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(number) is signal.SIG_DFL]
    for number in ours:
        signal.signal(number, signal.default_int_handler)
    try:
        yield
    finally:
        for number in ours:
            signal.signal(number, signal.SIG_DFL)


@contextmanager
def warnings_shown(command: str) -> Iterator[None]:
    """Print each warning that the library logs as a line on stderr."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setLevel(logging.WARNING)
    handler.setFormatter(_Line(command))
    logger = logging.getLogger("transfuse")
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)


class _Line(logging.Formatter):
    def __init__(self, command: str) -> None:
        super().__init__()
        self._command = command

    def format(self, record: logging.LogRecord) -> str:
        return f"transfuse {self._command}: {_clean(record.getMessage().removeprefix(SPEAKER))}"
