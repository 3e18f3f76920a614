"""The transfers of this process that are under way, for a page that looks at the process from outside."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

from transfuse._progress import Progress
from transfuse._report import Report


class _Call(NamedTuple):
    report: Report
    progress: Mapping[int, Progress]
    began: float


_calls: dict[int, _Call] = {}
_numbers = itertools.count()


@contextmanager
def under_way(report: Report, progress: Mapping[int, Progress]) -> Iterator[None]:
    """This transfer is under way within this block."""
    number = next(_numbers)
    _calls[number] = _Call(report, progress, time.perf_counter())
    try:
        yield
    finally:
        del _calls[number]


def transfers_under_way() -> list[dict[str, Any]]:
    """All of them, oldest first, in types that JSON has. Any thread may ask."""
    now = time.perf_counter()
    return [
        {
            "transfer": call.report.title,
            "step": call.report.step,
            "seconds": round(now - call.began, 3),
            "peers": {rank: _plain(one) for rank, one in list(call.progress.items())},
        }
        for call in list(_calls.values())
    ]


def _plain(progress: Progress) -> dict[str, Any]:
    return {"phase": progress.phase, "bytes": progress.bytes, "total_bytes": progress.total_bytes}
