"""The phases of a transfer, at either end: one list for reports, progress, errors and traces."""

from __future__ import annotations

import enum
from typing import Literal

__all__ = ["DONE", "FAILED", "MOVING", "READS", "RELAYING", "WAITING", "Direction", "Phase", "trace_name"]

Direction = Literal["send", "receive"]


class Phase(enum.Enum):
    """Its label is its name in reports and traces; ``doing`` is what progress and errors say of it."""

    # At the source
    DESCRIBE = "describe", "describing the state"
    OFFER = "offer", "sending the offer"
    WAIT_FOR_WANT = "wait for want", "waiting for the want"
    ANSWER = "answer", "answering the receiver"
    SEND = "send", "sending parcels"
    WAIT_FOR_VERDICT = "wait for verdict", "waiting for the verdict"
    # At the receiver
    STATE_DICT = "state_dict callback", "calling state_dict"
    PREPARE = "prepare", "taking the target apart"
    WAIT_FOR_OFFER = "wait for offer", "waiting for the offer"
    PLAN = "plan", "planning"
    READ = "read", "reading the source's memory"
    WANT = "want", "sending the want"
    RECEIVE = "receive", "receiving parcels"
    COMPARE = "compare", "comparing what is here already"
    PASS_ON = "pass on", "passing parcels on"
    CONFIRM = "confirm", "asking whether the source has changed"
    FINISH = "finish", "building the state"
    VERDICT = "verdict", "sending the verdict"

    def __init__(self, label: str, doing: str) -> None:
        self.label = label
        self.doing = doing


#: What progress says of a conversation that is over.
DONE, FAILED = "done", "failed"
#: What it says within a phase: of a receiver that is given its parcels by another; of a source that has nothing to do
#: as long as others have; of a receiver that has been heard to read by itself.
RELAYING = "receiving relayed parcels"
WAITING = "waiting for the other sources"
READS = "waiting while the receiver reads"
#: What it says while bytes move.
MOVING = frozenset({Phase.SEND.doing, Phase.READ.doing, Phase.RECEIVE.doing, RELAYING, READS})


def trace_name(direction: Direction, phase: Phase | None = None) -> str:
    """The name of the range that a call, or a phase of it, is in a profiler's trace."""
    return f"transfuse::{direction}" + (f"/{phase.label}" if phase is not None else "")
