"""Signals as a program in the foreground of a terminal finds them, whoever started it.

A program inherits that signals are ignored: ``nohup`` ignores SIGHUP, a shell SIGINT for what it starts in the
background, and Python then makes no KeyboardInterrupt of it. Who interrupts what it starts takes care of it here.
"""

from __future__ import annotations

import os
import signal
import sys

__all__ = ["FOREGROUND", "come_to_foreground"]

#: Before the words of a command: runs it so, as the same process.
FOREGROUND = [sys.executable, "-I", "-S", __file__]

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def come_to_foreground() -> None:
    """In a process that runs Python already."""
    for number in _SIGNALS:
        signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)


if __name__ == "__main__":
    for ignored in _SIGNALS:
        signal.signal(ignored, signal.SIG_DFL)
    os.execvp(sys.argv[1], sys.argv[1:])
