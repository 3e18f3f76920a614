"""Runs a program whose `spawn`ed processes are forked instead: each starts without importing torch again.

For programs that are single-threaded, and have no group yet, when they start processes.
"""

from __future__ import annotations

import multiprocessing
import runpy
import sys

if __name__ == "__main__":
    context = multiprocessing.get_context
    multiprocessing.get_context = lambda method=None: context("fork" if method == "spawn" else method)  # type: ignore[assignment]
    del sys.argv[0]
    runpy.run_path(sys.argv[0], run_name="__main__")
