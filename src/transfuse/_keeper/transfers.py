"""All that a keeper needs torch for: to serve what lies in slots, and to fetch into slots.

Torch takes 1.5 s and 200 MiB, and a keeper that only takes commits needs none. So its process imports this module when
somebody first reads from it, or when it first replicates: only within functions, never at the top of a module.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence

import torch

from transfuse._errors import TransfuseError
from transfuse._keeper.restored import RestoredState, damage, describe_slots
from transfuse._keeper.saved_steps import SavedSteps
from transfuse._keeper.slot_file import PAGE, Label, SlotView
from transfuse._limits import Limits
from transfuse._options import ServeKeywords, slowest_rate
from transfuse._progress import Progress
from transfuse._remote.client import fetch
from transfuse._remote.live_state import AskedState
from transfuse._remote.server import Server, ServeSettings, serve
from transfuse._report import Report
from transfuse._tls import TLS
from transfuse._tuning import REPLICA_PULL_SECONDS
from transfuse._wire.listener import Listener

__all__ = ["describe_slots", "fetch_slots", "read_files", "serve", "serve_newest", "serve_slots"]

#: How many readers read at once from a keeper; others wait for their turn.
MAX_READERS = 4


def serve_newest(
    listener: Listener,
    token: str,
    state: Callable[[], object],
    step: Callable[[], int | None],
    seconds: float,
    tls: TLS | None,
) -> Server:
    """Answer the readers that come to this listener. Each gets what ``state`` returns when it comes."""
    served = AskedState(state, step, seconds)
    options: ServeKeywords = {"tls": tls or False}
    given = ServeSettings(state=served, token=token, timeout=seconds, max_readers=MAX_READERS, options=options)
    return Server(given, listener)


def serve_slots(
    views: Mapping[int, SlotView], host: str, token: str, step: int, rate: float | None, tls: TLS | None
) -> Server:
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
        tls=tls or False,
    )


def fetch_slots(
    address: str,
    views: Mapping[int, SlotView],
    *,
    token: str,
    step: int,
    rate: float | None,
    compares: bool,
    tls: TLS | None,
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
        tls=tls or False,
        progress=look,
    )
    return fetched.report


def read_files(steps: SavedSteps, label: Label, ranks: Sequence[int]) -> dict[int, RestoredState]:
    """The states of these ranks as they lie on storage. Every byte of them is compared with its digest."""
    files = steps.open(label, ranks)
    try:
        views = {rank: SlotView(fd, writable=False) for rank, fd in files.items()}
    finally:
        for fd in files.values():
            os.close(fd)
    found = {rank: describe_slots(rank, views) for rank in ranks}
    if wrong := damage(list(found.values()), steps.folder(label)):
        raise TransfuseError(wrong)
    return found


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
