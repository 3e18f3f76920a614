"""Give a program the signal handling of a foreground program, however it was started.

A program inherits ignored signals: ``nohup`` ignores SIGHUP, and a shell ignores SIGINT for background programs; Python
then raises no KeyboardInterrupt. A test that interrupts a program it has started needs the handling of a foreground
program.
"""

from __future__ import annotations

import os
import signal
import sys

__all__ = ["FOREGROUND", "come_to_foreground"]

#: Put before a command's words: runs the command with default signals, in the same process.
FOREGROUND = [sys.executable, "-I", "-S", __file__]

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def come_to_foreground() -> None:
    """The same within a process that runs Python already."""
    for number in _SIGNALS:
        signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)


if __name__ == "__main__":
    for ignored in _SIGNALS:
        signal.signal(ignored, signal.SIG_DFL)
    os.execvp(sys.argv[1], sys.argv[1:])
