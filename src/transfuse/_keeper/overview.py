"""What a keeper says to somebody who looks at the whole job: how it is, and how the keepers of the other hosts are.

It asks the others itself, each at its door, and only when somebody looks. So what there is can be seen when the leader,
or any other host, is gone.
"""

from __future__ import annotations

import json
import time
from collections import deque
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from transfuse._errors import TransfuseError, as_utf8
from transfuse._keeper import door, frames
from transfuse._keeper.questions import Look, Looked
from transfuse._keeper.slot_file import Label
from transfuse._tls import TLS
from transfuse._tuning import OVERVIEW_ASK_SECONDS, RATE_SHOWN_SECONDS
from transfuse._wire.handshake import key_of

#: How many keepers are asked at the same time.
MOST_AT_ONCE = 32
UNREACHABLE = "unreachable"


class CommitPace:
    """When the newest steps were committed. Called under the keeper's lock."""

    def __init__(self) -> None:
        self._newest: Label | None = None
        self._at: deque[float] = deque(maxlen=256)

    def note(self, label: Label) -> None:
        """A rank of this host has committed a step."""
        if self._newest is None or label > self._newest:
            self._newest = label
            self._at.append(time.monotonic())

    def status(self) -> dict[str, Any]:
        now = time.monotonic()
        ago = [now - at for at in self._at if now - at <= RATE_SHOWN_SECONDS]
        return {
            "step": None if self._newest is None else self._newest.step,
            "seconds_ago": round(now - self._at[-1], 2) if self._at else None,
            # The steps since the oldest of these, in the time since then.
            "per_second": round((len(ago) - 1) / ago[0], 3) if len(ago) > 1 else 0.0,
        }


def others(peers: frames.Peers, tls: TLS | None, seconds: float = OVERVIEW_ASK_SECONDS) -> list[dict[str, Any]]:
    """What the keepers of the other hosts say of themselves, and which of them do not answer."""
    hosts = [host for host in range(len(peers.keepers)) if host != peers.index]
    with ThreadPoolExecutor(min(len(hosts), MOST_AT_ONCE) or 1, "transfuse-overview") as pool:
        return list(pool.map(lambda host: _ask(peers, host, tls, seconds), hosts))


def _ask(peers: frames.Peers, host: int, tls: TLS | None, seconds: float) -> dict[str, Any]:
    address, ranks = peers.keepers[host], peers.ranks[host]
    try:
        control = door.connect(address, key_of(peers.token), seconds, host, tls)
        try:
            told = door.ask(control, Look(), seconds)
        finally:
            control.close()
        if not isinstance(told, Looked):
            raise TransfuseError(f"it answered with {type(told).__name__}")
        return {"host": host, "keeper": "alive", "door": address, **json.loads(told.text)}
    except (TransfuseError, OSError, ValueError) as error:
        why = as_utf8(str(error)) or type(error).__name__
        return {"host": host, "keeper": UNREACHABLE, "door": address, "ranks": ranks, "why": why}


def short(status: dict[str, Any]) -> bytes:
    """A keeper's status for other hosts: without its files, and with its slots only counted."""
    states: Sequence[dict[str, Any]] = status["states"]
    kept = {key: value for key, value in status.items() if key not in ("states", "directory", "address", "replicas")}
    counts = {"states": len(states), "replicas_held": sum(one["replica"] for one in states)}
    return json.dumps(kept | counts | {"replicas": status["replicas"]}).encode()
