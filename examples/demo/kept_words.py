"""What the second act is about, for the job and for the parent: which step does what, and what a worker says."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["FATAL_STEPS", "FILE_STEP", "RANKS", "STEPS", "VICTIM", "Said"]

#: Two workers: three times all of them start, on few cores.
RANKS, STEPS, VICTIM = 2, 16, 1
#: The steps in which the victim is killed, in its first life and in its second.
FATAL_STEPS = (5, 12)
#: In the second life, the step before which files are saved: as far back as a kill is on average, with files every 8.
FILE_STEP = 8


@dataclass(frozen=True)
class Said:
    """A line of a worker."""

    life: int
    rank: int
    pid: int
    #: "started", "ready", "formed", "restored", "loaded", "done", "killed"; in the end "equal" or "different".
    what: str
    step: int
    #: As ``time.monotonic()`` counts, which all processes of a machine share.
    when: float
