"""How warnings of the package read: who speaks, and which rank.

Without any configuration Python prints warnings as they are, without the logger's name, and workers share a terminal.
So each begins with ``transfuse: rank 1``. This module imports nothing of the package.
"""

from __future__ import annotations

import logging
import os
import sys

#: What every warning begins with.
SPEAKER = "transfuse: "


def sign_warnings() -> None:
    """Let each warning of the logger ``transfuse`` begin with that name and the rank of this process."""
    logging.getLogger("transfuse").addFilter(_sign)


def _sign(record: logging.LogRecord) -> bool:
    if record.levelno >= logging.WARNING:
        text, rank = record.getMessage(), _rank()
        # A message that speaks of this rank itself does not need it twice.
        who = "" if rank is None or text.startswith((f"rank {rank} ", f"rank {rank}: ")) else f"rank {rank}: "
        record.msg, record.args = f"{SPEAKER}{who}{text}", ()
    return True


def _rank() -> str | None:
    """The rank of this process: its group's, or the launcher's. None: it is no worker."""
    dist = sys.modules.get("torch.distributed")  # A process that has not imported it has no group.
    if dist is not None and dist.is_available() and dist.is_initialized():
        return str(dist.get_rank())
    return os.environ.get("RANK")
