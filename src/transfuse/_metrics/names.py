"""Every metric, once: its name, kind, labels and meaning. A test compares page, dashboard and alerts with this table.

A label has a closed list of values, but for those that name something of the job (a rank, a slot, the run): so nothing
that a job does makes the number of series grow, and no text of an error becomes one.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import combinations
from typing import Literal, NamedTuple

from transfuse._tuning import METRICS_BUCKET_SECONDS

Kind = Literal["counter", "gauge", "histogram", "summary"]


class Family(NamedTuple):
    """A metric with all its labels. A summary has a sum and a count, and no quantiles."""

    name: str
    kind: Kind
    help: str
    #: By label: all values that it may have; None: any.
    labels: Mapping[str, tuple[str, ...] | None] = {}
    #: Of a histogram: the upper ends of its buckets, without infinity.
    buckets: tuple[float, ...] = ()


# ------------------------------------------------------------------------------------------------- values of labels

#: What a commit does while training waits, by the cause in ``CommitReport.stalled``; and what goes on beside training.
COMMIT_PHASES = {
    "the copy before": "copy_before",
    "state_dict": "state_dict",
    "describe": "describe",
    "keeper": "keeper",
    "copy": "copy",
    "the copy": "mutating",
}
BACKGROUND = "background"
COMMIT_OUTCOMES = ("committed", "pending", "skipped", "dropped")
#: Why a commit does not count.
OTHER = "other"
NO_SLOT, NO_ROOM, KEEPER_LOST, PARTNER, NOT_NEWER, DEVICE, CHANGED = (
    "no_free_slot", "no_room", "keeper_lost", "other_rank", "not_newer", "device_busy", "changed_early",
)  # fmt: skip
SKIP_CAUSES = (NO_SLOT, NO_ROOM, KEEPER_LOST, PARTNER, NOT_NEWER, DEVICE, CHANGED, OTHER)
RESTORED, NOTHING, FAILED = "restored", "nothing", "failed"
RESTORE_OUTCOMES = (RESTORED, NOTHING, FAILED)
LOCAL, REMOTE, MIXED, NOWHERE = "local", "remote", "mixed", "none"
STORAGE, MEMORY_AND_STORAGE = "storage", "memory_and_storage"
RESTORE_SOURCES = (LOCAL, REMOTE, MIXED, STORAGE, MEMORY_AND_STORAGE, NOWHERE)
DIRECTIONS = ("send", "receive")
TRANSFER_OUTCOMES = COMPLETE, WITHOUT, _ = "complete", "without_some", FAILED
#: As in ``Report.route``, and "none" if nothing moved.
ROUTES = (
    *("+".join(some) for n in (1, 2, 3, 4) for some in combinations(("nixl", "memory", "group", "device_memory"), n)),
    NOWHERE,
)
OWN, REPLICA = "own", "replica"


def phase_of(cause: str) -> str:
    """The phase that a cause in ``CommitReport.stalled`` is."""
    return COMMIT_PHASES.get(cause, OTHER)


# ------------------------------------------------------------------------------------------------------- the keeper


def _keeper(kind: Kind, name: str, help: str, /, **labels: tuple[str, ...] | None) -> Family:
    buckets = METRICS_BUCKET_SECONDS if kind == "histogram" else ()
    return Family(f"transfuse_keeper_{name}", kind, help, labels, buckets)


INFO = _keeper(
    "gauge",
    "info",
    "Always 1: the run and the versions of this keeper.",
    run=None, version=None, protocol=None, python=None, torch=None,
)  # fmt: skip
UPTIME = _keeper("gauge", "uptime_seconds", "Since the keeper began.")
DRAINING = _keeper("gauge", "draining", "1 while the keeper ends, else 0.")
GENERATION = _keeper("gauge", "generation", "How often the processes of the job have begun.")
WORKERS = _keeper("gauge", "workers", "Ranks of this host that are attached.")
WORKERS_EXPECTED = _keeper("gauge", "workers_expected", "Ranks that this host has in this generation.")
NEIGHBOURS = _keeper("gauge", "neighbours", "Keepers of the job's other hosts.")
NEIGHBOURS_UP = _keeper("gauge", "neighbours_up", "Those of them that answer, as far as this keeper knows.")
REPLICATED_HOSTS = _keeper("gauge", "replicated_hosts", "Hosts whose states this keeper replicates.")
WITHOUT_ROOM = _keeper("gauge", "without_room", "1 if replicas do not fit into this host's memory, else 0.")

COMMITTED_STEP = _keeper("gauge", "committed_step", "The newest step that a rank of this host has committed.")
COMPLETE_STEP = _keeper("gauge", "complete_step", "The newest step that all ranks of this host have committed.")
REPLICATED_STEP = _keeper("gauge", "replicated_step", "The newest step whose replicas of other hosts are here.")
CONFIRMED_STEP = _keeper(
    "gauge", "confirmed_step", "The newest step that is complete, and replicated, on all hosts: no loss can undo it."
)
RESTORED_STEP = _keeper("gauge", "restored_step", "The step that the ranks of this host have restored last.")
SAVED_STEP = _keeper("gauge", "saved_step", "The newest step that is whole on storage.")
COMMITTED_AT = _keeper("gauge", "committed_timestamp_seconds", "When the last commit of a rank of this host ended.")
CONFIRMED_AT = _keeper("gauge", "confirmed_timestamp_seconds", "When the confirmed step has last changed.")

HELD = _keeper("gauge", "bytes", "Memory of all slots and replicas here.")
LIMIT = _keeper("gauge", "limit_bytes", "The most that it may become: max_bytes=, or what is free.")
SLOT_SIZE = _keeper(
    "gauge",
    "slot_bytes",
    "Memory of each slot. Those of a rank are counted from 0.",
    rank=None,
    slot=None,
    kind=(OWN, REPLICA),
)

COMMITS = _keeper("counter", "commits_total", "Commits of this host's ranks.", outcome=COMMIT_OUTCOMES)
SKIPPED = _keeper("counter", "commits_skipped_total", "Commits that do not count, and why.", cause=SKIP_CAUSES)
COMMIT_TIMES = _keeper(
    "summary",
    "commit_seconds",
    "What a commit spends its time with. Training waits for every phase but the background.",
    phase=(*COMMIT_PHASES.values(), BACKGROUND, OTHER),
)
STALLED = _keeper("histogram", "commit_stalled_seconds", "For how long a commit kept training waiting, in all.")
COPIED = _keeper("counter", "copied_bytes_total", "Bytes that ranks have copied into slots.")
SHARED = _keeper("counter", "shared_bytes_total", "Bytes that another rank of the host has copied for them.")

RESTORES = _keeper(
    "counter",
    "restores_total",
    "Calls of restore() by this host's ranks, and where the step came from.",
    outcome=RESTORE_OUTCOMES,
    source=RESTORE_SOURCES,
)
RESTORE_TIMES = _keeper("summary", "restore_seconds", "How long restore() took.", outcome=RESTORE_OUTCOMES)

PULLS = _keeper("counter", "pulls_total", "Pulls of another host's step into replicas.", outcome=(COMPLETE, FAILED))
PULL_TIMES = _keeper("summary", "pull_seconds", "How long a pull that ended well took.")
PULLED = _keeper("counter", "pulled_bytes_total", "Bytes that pulls have brought from other hosts.")

SAVE_TIME = _keeper("gauge", "save_seconds", "How long the last save took.")
SAVE_FAILURES = _keeper("counter", "save_failures_total", "Saves that have failed.")

KEEPER = (
    INFO, UPTIME, DRAINING, GENERATION, WORKERS, WORKERS_EXPECTED,
    NEIGHBOURS, NEIGHBOURS_UP, REPLICATED_HOSTS, WITHOUT_ROOM,
    COMMITTED_STEP, COMPLETE_STEP, REPLICATED_STEP, CONFIRMED_STEP, RESTORED_STEP, SAVED_STEP,
    COMMITTED_AT, CONFIRMED_AT, HELD, LIMIT, SLOT_SIZE,
    COMMITS, SKIPPED, COMMIT_TIMES, STALLED, COPIED, SHARED,
    RESTORES, RESTORE_TIMES, PULLS, PULL_TIMES, PULLED, SAVE_TIME, SAVE_FAILURES,
)  # fmt: skip


# ------------------------------------------------------------------------------------------------------ the workers


def _transfer(kind: Kind, name: str, help: str, /, **labels: tuple[str, ...] | None) -> Family:
    buckets = METRICS_BUCKET_SECONDS if kind == "histogram" else ()
    return Family(f"transfuse_{name}", kind, help, labels, buckets)


TRANSFERS = _transfer(
    "counter",
    "transfers_total",
    "Transfers at this end, by route.",
    direction=DIRECTIONS,
    route=ROUTES,
    outcome=TRANSFER_OUTCOMES,
)
TRANSFER_TIMES = _transfer("histogram", "transfer_seconds", "How long transfers took.", direction=DIRECTIONS)
MOVING_TIME = _transfer(
    "counter", "transfer_moving_seconds_total", "How much of that some thread moved bytes.", direction=DIRECTIONS
)
TRANSFERRED = _transfer(
    "counter", "transfer_bytes_total", "Payload that has moved.", direction=DIRECTIONS, route=ROUTES
)
KEPT = _transfer("counter", "transfer_kept_bytes_total", "Bytes that a receiver had already, by comparison.")
REPAIRED = _transfer(
    "counter", "transfer_repaired_parcels_total", "Parcels that arrived damaged and were sent again.",
    direction=DIRECTIONS,
)  # fmt: skip
LOST_SOURCES = _transfer("counter", "transfer_lost_sources_total", "Sources that receivers have lost or did not use.")
LOST_RECEIVERS = _transfer(
    "counter", "transfer_lost_receivers_total", "Receivers that did not get the state from a source."
)

WORKERS_OWN = (
    TRANSFERS, TRANSFER_TIMES, MOVING_TIME, TRANSFERRED, KEPT, REPAIRED, LOST_SOURCES, LOST_RECEIVERS,
)  # fmt: skip
