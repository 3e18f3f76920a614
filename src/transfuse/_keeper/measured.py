"""What a keeper counts, and what its metrics say at a moment. :mod:`transfuse._metrics.names` has the names."""

from __future__ import annotations

import platform
import time
from collections.abc import Mapping
from contextlib import suppress
from importlib import metadata
from typing import TYPE_CHECKING, Any

from transfuse._keeper import frames
from transfuse._keeper.slot_file import Label
from transfuse._memory.available import free_memory
from transfuse._metrics import names
from transfuse._metrics.names import Family
from transfuse._metrics.samples import Samples
from transfuse._tuning import METRICS_HEALTH_SECONDS

if TYPE_CHECKING:
    from transfuse._keeper.process import Keeper

#: What begins with 0 in every keeper. Saves are not among these: most runs have none.
COUNTED = (
    names.COMMITS,
    names.SKIPPED,
    names.COMMIT_TIMES,
    names.STALLED,
    names.COPIED,
    names.SHARED,
    names.RESTORES,
    names.RESTORE_TIMES,
    names.PULLS,
    names.PULL_TIMES,
    names.PULLED,
)


def counters() -> Samples:
    """What a keeper that has just begun has counted."""
    made = Samples(names.KEEPER)
    made.begin(*COUNTED)
    return made


def count(counted: Samples, told: frames.Numbers) -> None:
    """Count what a worker has told. Words that this keeper does not know count as others."""
    for commit in told.commits:
        counted.add(names.COMMITS, outcome=_known(names.COMMITS, "outcome", commit.outcome))
        if commit.cause:
            counted.add(names.SKIPPED, cause=_known(names.SKIPPED, "cause", commit.cause))
        for cause, seconds in commit.stalled.items():
            counted.observe(names.COMMIT_TIMES, seconds, phase=names.phase_of(cause))
        if commit.background:
            counted.observe(names.COMMIT_TIMES, commit.background, phase=names.BACKGROUND)
        counted.observe(names.STALLED, sum(commit.stalled.values()))
        counted.add(names.COPIED, commit.copied_bytes)
        counted.add(names.SHARED, commit.shared_bytes)
    for restore in told.restores:
        outcome = _known(names.RESTORES, "outcome", restore.outcome)
        source = _known(names.RESTORES, "source", restore.source)
        counted.add(names.RESTORES, outcome=outcome, source=source)
        counted.observe(names.RESTORE_TIMES, restore.seconds, outcome=outcome)
        if restore.step is not None:
            counted.set(names.RESTORED_STEP, restore.step)


def _known(family: Family, label: str, value: str) -> str:
    values = family.labels[label]
    assert values is not None
    return value if value in values else values[-1]


class Measured:
    """Looks at a keeper when somebody asks for its metrics."""

    def __init__(self, keeper: Keeper) -> None:
        self._keeper = keeper
        self._began = time.monotonic()
        #: The newest steps that a rank, and all ranks, of this host have committed.
        self._committed: Label | None = None
        self._complete: Label | None = None
        #: The newest step whose replicas have come here, whatever generation pulls now.
        self._replicated: Label | None = None
        self._committed_at = 0.0
        self._confirmed: tuple[Label, float] | None = None
        self._versions: dict[str, str] = {}

    # -- what happens; called under the keeper's lock

    def committed(self, label: Label, *, is_complete: bool) -> None:
        """A rank has committed a step. ``is_complete``: as the last one of this host."""
        self._committed_at = time.time()
        if self._committed is None or label > self._committed:
            self._committed = label
        if is_complete and (self._complete is None or label > self._complete):
            self._complete = label

    def look_at_steps(self) -> None:
        """Note when the confirmed step changes, and what was replicated."""
        puller = self._keeper.ring.puller
        if puller is not None and puller.replicated is not None and not puller.without_room:
            self._replicated = puller.replicated
        label = self._keeper.books.confirmed
        if label is not None and (self._confirmed is None or self._confirmed[0] != label):
            self._confirmed = label, time.time()

    # -- what somebody asks

    def health(self) -> tuple[bool, str]:
        """Whether the keeper answers workers, and one line."""
        keeper = self._keeper
        if keeper.is_draining:
            return False, "draining: the keeper ends"
        if not keeper.changed.acquire(timeout=METRICS_HEALTH_SECONDS):
            return False, f"stuck: the keeper's lock was not free for {METRICS_HEALTH_SECONDS:g} s"
        keeper.changed.release()
        return True, "ok"

    def text(self) -> str:
        """All metrics, for Prometheus."""
        samples = Samples(names.KEEPER)
        samples.take(self._keeper.counted)
        free = free_memory()
        with self._keeper.changed:
            self._set_steps(samples)
            self._set_memory(samples, free)
        self._set_job(samples)
        return samples.text()

    def _set_job(self, samples: Samples) -> None:
        keeper = self._keeper
        generation = keeper.books.current()
        others, up = keeper.ring.neighbours()
        puller = keeper.ring.puller
        for family, value in (
            (names.UPTIME, time.monotonic() - self._began),
            (names.DRAINING, keeper.is_draining),
            (names.GENERATION, keeper.books.generation),
            (names.WORKERS, len(keeper.workers)),
            (names.WORKERS_EXPECTED, 0 if generation is None else len(generation.ranks)),
            (names.NEIGHBOURS, others),
            (names.NEIGHBOURS_UP, up),
            (names.REPLICATED_HOSTS, keeper.ring.replicas),
            (names.WITHOUT_ROOM, puller is not None and puller.without_room),
        ):
            samples.set(family, float(value))
        samples.set(names.INFO, 1, run=keeper.run_name, **self._find_versions())
        self._set_saves(samples, keeper.saver.status() or {})

    def _set_saves(self, samples: Samples, status: Mapping[str, Any]) -> None:
        """``status``: what is saved to storage, as ``transfuse keep --status --json`` shows it."""
        if status.get("saved"):
            samples.set(names.SAVED_STEP, max(status["saved"]))
        if status.get("last"):
            samples.set(names.SAVE_TIME, status["last"]["seconds"])
        if "failed" in status:
            samples.set(names.SAVE_FAILURES, status["failed"])

    def _set_steps(self, samples: Samples) -> None:
        self.look_at_steps()
        for family, label in (
            (names.COMMITTED_STEP, self._committed),
            (names.COMPLETE_STEP, self._complete),
            (names.REPLICATED_STEP, self._replicated),
            (names.CONFIRMED_STEP, None if self._confirmed is None else self._confirmed[0]),
        ):
            if label is not None:
                samples.set(family, label.step)
        if self._committed is not None:
            samples.set(names.COMMITTED_AT, self._committed_at)
        if self._confirmed is not None:
            samples.set(names.CONFIRMED_AT, self._confirmed[1])

    def _set_memory(self, samples: Samples, free: int) -> None:
        keeper = self._keeper
        held, most = keeper.allotment.nbytes, keeper.max_bytes
        samples.set(names.HELD, held)
        samples.set(names.LIMIT, held + free if most is None else min(held + free, most))
        counts: dict[tuple[int, str], int] = {}
        for kept in keeper.books.all():
            kind = names.REPLICA if kept.is_replica else names.OWN
            number = counts[kept.rank, kind] = counts.get((kept.rank, kind), -1) + 1
            samples.set(names.SLOT_SIZE, kept.nbytes, rank=kept.rank, slot=number, kind=kind)

    def _find_versions(self) -> Mapping[str, str]:
        if not self._versions:
            from transfuse import __version__  # Of the top: not before this module is there.

            # torch's number is in a file: nobody imports torch for it.
            torch = ""
            with suppress(metadata.PackageNotFoundError):
                torch = metadata.version("torch")
            self._versions = {
                "version": __version__,
                "protocol": str(frames.VERSION),
                "python": platform.python_version(),
                "torch": torch,
            }
        return self._versions
