"""All that a keeper needs torch for: to serve what lies in slots, and to fetch into slots.

Torch takes 1.5 s and 200 MiB, and a keeper that only takes commits needs none. So its process imports this module when
somebody first reads from it, or when it first replicates: only within functions, never at the top of a module.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from transfuse._keeper.restored import describe_slots
from transfuse._keeper.slots import PAGE, SlotView
from transfuse._limits import Limits
from transfuse._options import slowest_rate
from transfuse._progress import Progress
from transfuse._remote.client import fetch
from transfuse._remote.live_state import AskedState
from transfuse._remote.server import Server, serve
from transfuse._report import Report
from transfuse._tuning import REPLICA_PULL_SECONDS
from transfuse._wire.listener import Listener

__all__ = ["describe_slots", "fetch_slots", "serve", "serve_newest", "serve_slots"]

#: How many readers read at once from a keeper; others wait for their turn.
MAX_READERS = 4


def serve_newest(
    listener: Listener, token: str, state: Callable[[], object], step: Callable[[], int | None], seconds: float
) -> Server:
    """Answer the readers that come to this listener. Each gets what ``state`` returns when it comes."""
    return Server(
        AskedState(state, step, seconds),
        listener=listener,
        host="127.0.0.1",
        port=0,
        token=token,
        timeout=seconds,
        step=None,
        max_readers=MAX_READERS,
        on_report=None,
        same_host=True,
    )


def serve_slots(views: Mapping[int, SlotView], host: str, token: str, step: int, rate: float | None) -> Server:
    """Serve slots as they are, by rank, to a keeper that replicates them."""
    return serve(
        _bytes_of(views),
        host=host,
        token=token,
        step=step,
        timeout=_patience(rate),
        max_bytes_per_second=rate,
        same_host=False,
        verify=True,
    )


def fetch_slots(
    address: str,
    views: Mapping[int, SlotView],
    *,
    token: str,
    step: int,
    rate: float | None,
    compares: bool,
    look: Callable[[Mapping[int, Progress]], None],
) -> Report:
    """Fetch into slots what :func:`serve_slots` serves. ``look`` is called now and then, and may raise."""
    fetched = fetch(
        address,
        _bytes_of(views),
        token=token,
        step=step,
        timeout=_patience(rate),
        delta=compares,
        same_host=False,
        verify=True,
        strict=True,
        progress=look,
    )
    return fetched.report


def _bytes_of(views: Mapping[int, SlotView]) -> dict[str, torch.Tensor]:
    """The slots as a state: all their bytes but the headers."""
    return {
        f"slot {rank}": torch.frombuffer(view.memory, dtype=torch.uint8, offset=PAGE) for rank, view in views.items()
    }


def _patience(rate: float | None) -> float:
    """How long a pull may go without progress: several parcels' time at this rate."""
    if rate is None:
        return REPLICA_PULL_SECONDS
    return max(REPLICA_PULL_SECONDS, 2 * slowest_rate(Limits.from_environment(), 1.0) / rate)
