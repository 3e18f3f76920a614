"""torchrun whose workers are forks: they start without importing torch and a framework again.

``forking_torchrun.py <modules> <what torchrun takes>`` imports the modules once. Agent, rendezvous, environment and
restarts are torchrun's own.
"""

from __future__ import annotations

import importlib
import runpy
import sys
from collections.abc import Callable
from typing import Any

import torch.distributed.run
from torch.distributed.launcher.api import LaunchConfig, elastic_launch


def work(script: str, *words: str) -> None:
    sys.argv = [script, *words]
    runpy.run_path(script, run_name="__main__")


def launch(config: LaunchConfig, entrypoint: str) -> Callable[..., Any]:
    """Instead of ``<python> -u <script> <words>``."""
    config.start_method = "fork"
    return lambda unbuffered, *words: elastic_launch(config, work)(*words)


if __name__ == "__main__":
    for module in sys.argv[1].split(","):
        importlib.import_module(module)
    setattr(torch.distributed.run, "elastic_launch", launch)  # noqa: B010 - hidden from mypy
    torch.distributed.run.main(sys.argv[2:])
