"""Everything that is needed to judge the numbers later, as plain data."""

from __future__ import annotations

import datetime
import platform
from collections.abc import Sequence
from typing import Any

import torch

import transfuse
from benchmarks.compare import machine
from benchmarks.compare.peers import LIMIT, PEERS, Peer
from benchmarks.compare.results import Limit, Outcome, Result

__all__ = ["record"]


def record(
    command: str,
    settings: dict[str, Any],
    load: float,
    limits: dict[str, Limit],
    absent: dict[type[Peer], str],
    outcomes: Sequence[Outcome],
) -> dict[str, Any]:
    peers = {
        peer.key: {
            "name": peer.name,
            "package": peer.package,
            "version": peer.version(),
            "absent": absent.get(peer),
            "carries": "whole states" if peer.whole else "tensors only",
            "note": peer.note,
        }
        for peer in (*PEERS, LIMIT)
    }
    versions = {peer.package: peer.version() for peer in PEERS if peer.package and peer not in absent}
    return {
        "date": datetime.date.today().isoformat(),
        "command": command,
        "machine": machine.describe(),
        # The load shows other work on the machine.
        "load_average": load,
        "versions": {
            **versions,
            "python": platform.python_version(),
            "torch": torch.__version__,
            "transfuse": transfuse.__version__,
        },
        "seconds": "from a barrier until the last rank has returned; medians of the runs after one warm-up, in turns",
        "cpu_seconds": "of all ranks together in that time, with the processes that they have started",
        "memory": "what is received into was touched and warm; fresh memory was not",
        **settings,
        "limits": {
            key: {"name": limit.name, "bytes_per_second": limit.bytes_per_second, "bytes": limit.bytes}
            | {"seconds": limit.seconds}
            for key, limit in limits.items()
        },
        "peers": peers,
        "cases": [
            {
                "key": outcome.case.key,
                "title": outcome.case.full_title,
                "mode": outcome.case.mode,
                "receivers": outcome.case.receivers,
                "bytes": outcome.bytes,
                "tensors": outcome.tensors,
                "results": [_result(outcome, result, limits) for result in outcome.results],
            }
            for outcome in outcomes
        ],
    }


def _result(outcome: Outcome, result: Result, limits: dict[str, Limit]) -> dict[str, Any]:
    return {
        "peer": result.peer.key,
        "name": result.peer.name,
        "median_seconds": result.median,
        "seconds": result.seconds,
        "median_cpu_seconds": result.cpu_median,
        "cpu_seconds": result.cpu_seconds,
        "times_torch_pgtransport": outcome.speed(result),
        "of_its_limit": outcome.of_limit(result, limits),
        "verified": not result.wrong and not result.failed,
        "routes": sorted(result.routes),
        "failed": result.failed,
        "wrong": result.wrong,
    }
