"""Says that nothing is kept, and why: once when a rank does not commit, and again while no step becomes complete."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence

from transfuse._keeper.commits import CommitReport
from transfuse._keeper.slot_file import Label
from transfuse._keeper.slot_policy import ranks_and_have
from transfuse._tuning import UNKEPT_AGAIN_SECONDS, UNKEPT_FIRST_SECONDS, UNKEPT_WHILE_SECONDS

logger = logging.getLogger("transfuse")

AGAIN_COMMITS = 20


class Unkept:
    """What a rank knows about steps that are complete, and what it has said about those that are not."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._complete: Label | None = None
        #: When the last step became complete, the last warning came, or the first commit was made; commits since then.
        self._since: float | None = None
        self._commits = 0
        #: Since when no step has become complete, and whether a warning has said so.
        self._dry_since = 0.0
        self._has_warned = self._has_named = False
        #: What the keeper says that the oldest step which is not complete waits for.
        self._waits_for = ""

    def hear(self, complete: Label | None, waits_for: str) -> None:
        """The keeper has named the newest step that all ranks have committed."""
        self._waits_for = waits_for
        if complete is None or complete == self._complete:
            return
        if self._has_warned:
            logger.warning("rank %d: steps become complete again: step %d is", self._rank, complete.step)
        self._complete, self._since, self._commits, self._has_warned = complete, None, 0, False

    def name(self, step: int, absent: Sequence[int], seconds: float) -> None:
        """Ranks of this host did not come to the first commit, although the others waited for them."""
        if absent and not self._has_named:
            self._has_named = True
            logger.warning(
                "rank %d: %s not called commit(step %d) for %g s; every rank calls commit(). Until they do, nothing is "
                "kept",
                self._rank,
                ranks_and_have(absent),
                step,
                seconds,
            )

    def note(self, report: CommitReport) -> None:
        """A commit has ended. Warn, if no step has become complete for long."""
        now = time.monotonic()
        if self._since is None:
            self._since = self._dry_since = now
        self._commits += 1
        took = now - self._since
        is_first = self._complete is None and not self._has_warned
        if not (
            took >= UNKEPT_AGAIN_SECONDS
            or (self._commits >= AGAIN_COMMITS and took >= UNKEPT_WHILE_SECONDS)
            or (is_first and took >= UNKEPT_FIRST_SECONDS)
        ):
            return
        self._since, self._commits, self._has_warned = now, 0, True
        lost = "has none of these steps" if self._complete is None else f"goes on from step {self._complete.step}"
        logger.warning(
            "rank %d: no step has become complete for %.0f s: step %d was %s: %s. A job that is restarted now %s",
            self._rank,
            now - self._dry_since,
            report.step,
            report.outcome,
            report.why or self._waits_for or "it waits for the other ranks",
            lost,
        )
