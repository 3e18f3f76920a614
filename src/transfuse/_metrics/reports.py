"""The one place where reports go when a transfer or a commit has ended: the log, torch.monitor, and a host's file.

Every report is an event of ``torch.monitor``, whether anybody listens or not: that takes 10 µs (torch 2.13, 2 cores,
2026-11-18), and nobody can ask torch whether there is a handler.
"""

from __future__ import annotations

import logging
from datetime import datetime
from typing import Protocol

from torch import monitor

from transfuse._metrics import shared_file
from transfuse._report import Report

logger = logging.getLogger("transfuse")

_has_complained = False


class AnyReport(Protocol):
    """Of a transfer or of a commit."""

    def line(self) -> str:
        """For the log."""

    def event(self) -> tuple[str, dict[str, int | float | str]]:
        """The name and the data of an event."""


def tell(report: AnyReport, level: int = logging.INFO) -> None:
    """Tell everybody. What listeners do wrong does not fail what has ended."""
    logger.log(level, "%s", report.line(), extra={"transfuse_report": report})
    try:
        name, data = report.event()
        monitor.log_event(monitor.Event(name, datetime.now(), data))
    except Exception as error:
        _complain(error)
    if isinstance(report, Report):
        shared_file.note(report)


def _complain(error: Exception) -> None:
    global _has_complained
    if not _has_complained:
        _has_complained = True
        logger.warning(
            "a handler of torch.monitor's events has failed, and may fail again without a word: %s: %s",
            type(error).__name__,
            error,
        )
