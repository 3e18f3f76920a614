"""The phases of a transfer at both ends. Reports, progress, errors and traces all use this list."""

from __future__ import annotations

import enum
from typing import Literal

Direction = Literal["send", "receive"]


class Phase(enum.Enum):
    """One phase. Reports and traces show its ``label``; progress and errors show ``doing``."""

    # At the source
    DESCRIBE = "describe", "describing the state"
    MEET = "meet", "waiting for the receiver"
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


#: ``Progress.phase`` of a conversation that is over.
DONE, FAILED = "done", "failed"
#: ``Progress.phase`` of a receiver that gets its parcels from a neighbour; of a source that has nothing to do while the
#: receiver waits for others; and, at the source, of a receiver that reads the source's memory itself.
RELAYING = "receiving relayed parcels"
WAITING = "waiting for the other sources"
READS = "waiting while the receiver reads"
#: The values of ``Progress.phase`` during which bytes move.
MOVING = frozenset({Phase.SEND.doing, Phase.READ.doing, Phase.RECEIVE.doing, RELAYING, READS})
#: The phases in which this end moves bytes itself.
CARRYING = frozenset({Phase.SEND, Phase.READ, Phase.RECEIVE})


def trace_name(direction: Direction, phase: Phase | None = None) -> str:
    """The name of a call's range, or of one of its phases, in a profiler's trace."""
    return f"transfuse::{direction}" + (f"/{phase.label}" if phase is not None else "")
