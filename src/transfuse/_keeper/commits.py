"""One commit: a state as it was taken, the layout that the keeper has agreed to, and the copy into a slot."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, Protocol

import msgspec
import numpy as np

from transfuse._errors import TransfuseError
from transfuse._keeper import copying, frames
from transfuse._keeper.bundle_table import PRIVATE, ROW_BYTES, Bundles, StoragePlaces
from transfuse._keeper.copying import StateMemory
from transfuse._keeper.restored import Text
from transfuse._keeper.slots import PAGE, Brief, Label, SlotView
from transfuse._memory import vm
from transfuse._memory.mutation import MutationWatch
from transfuse._sizes import human_bytes
from transfuse._state.manifest import Described
from transfuse._state.region import Ints
from transfuse._tuning import BUNDLE_BYTES, COMMIT_ANSWER_SECONDS


@dataclass
class CommitReport:
    """What a commit did, and for how long training stood still."""

    step: int
    #: "committed": the keeper has this rank's state; "pending": the copy goes on (``wait=False``), or the keeper has
    #: it, but a rank of this host has not called commit() at all; "skipped" or "dropped": it has not. And why if it is
    #: not the first.
    outcome: str = "committed"
    why: str = ""
    #: Bytes that this rank copied, and bytes that another rank of this host keeps for it.
    copied_bytes: int = 0
    shared_bytes: int = 0
    #: What is wrong with the replicas on other hosts, as the keeper knew it when the commit began; empty: nothing.
    unreplicated: str = ""
    #: Seconds for which training stood still, by cause.
    stalled: dict[str, float] = field(default_factory=dict)

    @property
    def seconds(self) -> float:
        """Seconds for which training stood still, in all."""
        return sum(self.stalled.values())

    def line(self) -> str:
        causes = ", ".join(f"{name} {1000 * seconds:.0f} ms" for name, seconds in self.stalled.items())
        why = f": {self.why}" if self.why else ""
        return (
            f"step {self.step} {self.outcome}{why}; copied {human_bytes(self.copied_bytes)}, "
            f"shared {human_bytes(self.shared_bytes)}; training stood still for {1000 * self.seconds:.0f} ms ({causes})"
            + (f"; {self.unreplicated}" if self.unreplicated else "")
        )


@dataclass(eq=False)
class AgreedLayout:
    """What the keeper has agreed to, for states of one structure."""

    structure: tuple[Any, ...]
    bundles: Bundles
    storages: StoragePlaces
    views: dict[int, SlotView]
    #: Storages that may change at any time: they are copied before ``commit`` returns.
    volatile: set[int] = field(default_factory=set)
    #: Slots in which the padding between storages is zero. A slot may have been used with another layout before.
    clean: set[int] = field(default_factory=set)

    def fits(self, text: bytes) -> bool:
        """Whether a description fits in before the first bundle: values may have grown since the layout was made."""
        places = self.bundles.places
        held = places[places >= 0]
        end = int(held.min()) if len(held) else min(view.nbytes for view in self.views.values())
        return PAGE + len(text) + ROW_BYTES * (len(self.bundles) + 1) <= end

    def clear(self, number: int) -> None:
        """Make the padding zero: it is hashed with the storages."""
        if number not in self.clean:
            places, sizes = self.bundles.places, self.bundles.nbytes
            small = (places >= 0) & (sizes <= BUNDLE_BYTES)
            for start, nbytes in zip(places[small].tolist(), sizes[small].tolist(), strict=True):
                self.views[number].bytes[start : start + nbytes] = 0
            self.clean.add(number)


@dataclass(eq=False)
class Snapshot:
    """A state as it was when ``commit`` was called."""

    described: Described
    own: Described | None
    _text: tuple[StoragePlaces, bytes] | None = None

    @property
    def memory(self) -> StateMemory:
        return StateMemory([self.described] if self.own is None else [self.described, self.own])

    @property
    def structure(self) -> tuple[Any, ...]:
        manifest = self.described.manifest
        manifest.encode()
        own = b""
        if self.own is not None:
            self.own.manifest.encode()
            own = self.own.manifest.structure
        return manifest.structure, tuple(manifest.coordinates), own

    def text(self, storages: StoragePlaces) -> bytes:
        """The description for a slot whose bundles have these storages."""
        if self._text is None or self._text[0] is not storages:
            manifest = self.described.manifest
            text = Text(
                manifest=manifest.encode(),
                coordinates=list(manifest.coordinates),
                own=None if self.own is None else self.own.manifest.encode(),
                storages=storages,
            )
            self._text = storages, msgspec.msgpack.encode(text)
        return self._text[1]

    def versions(self) -> list[int]:
        """The version of each tensor; a write raises it."""
        return [-1 if tensor.is_inference() else tensor._version for tensor in self.described.tensors]


class Ask(Protocol):
    """Asks the keeper of this host, and returns its answer."""

    def __call__(self, question: Any, expected: Any, seconds: float | None = None) -> Any: ...


@dataclass(frozen=True, eq=False)
class Who:
    """The rank that commits, and how."""

    rank: int
    world_size: int
    digests: bool
    ask: Ask


class CommitCopy:
    """One commit, from the first byte to the marker."""

    def __init__(
        self, who: Who, taken: Snapshot, layout: AgreedLayout, number: int, label: Label, report: CommitReport
    ) -> None:
        self._who, self._taken, self._layout = who, taken, layout
        self._slot, self._number, self._label, self._report = layout.views[number], number, label, report
        self._digests: list[bytes] = []
        self._later: Ints = np.empty(0, dtype=np.int64)
        self._watch: MutationWatch | None = None
        self._calm = np.empty(0, dtype=bool)

    @property
    def report(self) -> CommitReport:
        return self._report

    def begin(self, at_once: Ints | None) -> bool:
        """Copy what cannot wait: everything, or the bundles of these storages and what belongs to the rank.

        Returns whether that was everything.
        """
        layout, memory = self._layout, self._taken.memory
        self._slot.begin(self._label)
        layout.clear(self._number)
        bundles, of_storage = layout.bundles, layout.storages.bundles
        held = bundles.places >= 0
        self._report.copied_bytes = int(bundles.nbytes[held].sum())
        self._report.shared_bytes = int(bundles.nbytes[~held].sum())
        chosen = np.ones(len(bundles), dtype=bool)
        if at_once is not None:
            chosen = bundles.modes == PRIVATE
            chosen[of_storage[at_once]] = True
            elsewhere = np.flatnonzero((memory.addresses == 0) & (memory.nbytes > 0))
            chosen[of_storage[elsewhere]] = True
        self._later = np.flatnonzero(~chosen)
        self._digests = self._copy(np.flatnonzero(chosen))
        if len(self._later):
            manifest = self._taken.described.manifest
            self._calm = ~chosen[of_storage[: len(manifest.storages)]][manifest.tensors.storage]
            self._watch = MutationWatch(self._taken.described)
        return not len(self._later)

    def go_on(self) -> bool:
        """Copy the rest. Returns whether the commit counts: not if leaves changed while they were copied."""
        # Half of the cores: the others are training's.
        self._digests = self._copy(self._later, workers=max(1, vm.threads() // 2))
        assert self._watch is not None
        changed = self._watch.changed_rows()
        changed = changed[self._calm[changed]]
        if not len(changed):
            self.finish()
            return True
        manifest, report = self._taken.described.manifest, self._report
        self._layout.volatile |= set(manifest.tensors.storage[changed].tolist())
        paths = [manifest.paths[leaf] for leaf in np.unique(manifest.leaves_of(changed)).tolist()[:3]]
        report.outcome = "dropped"
        report.why = (
            f"{', '.join(paths)} changed outside mutating() while they were copied; from now on they are copied before "
            "commit() returns"
        )
        self._who.ask(frames.Drop(self._number), frames.Done, COMMIT_ANSWER_SECONDS)
        return False

    def _copy(self, chosen: Ints, workers: int | None = None) -> list[bytes]:
        layout = self._layout
        return copying.copy(
            self._taken.memory,
            layout.bundles,
            layout.storages,
            self._slot,
            digests=self._who.digests,
            only=chosen,
            known=self._digests,
            workers=workers,
        )

    def finish(self) -> None:
        """Write the marker, and tell the keeper."""
        brief = Brief(self._who.rank, self._who.world_size, self._layout.bundles.hashed(self._digests))
        self._slot.commit(self._label, msgspec.msgpack.encode(brief), self._taken.text(self._layout.storages))
        self._who.ask(frames.Committed(self._number, *self._label), frames.Done, COMMIT_ANSWER_SECONDS)

    def drop(self) -> None:
        """What was copied does not count, and the slot is free again."""
        with suppress(TransfuseError):
            self._who.ask(frames.Drop(self._number), frames.Done, COMMIT_ANSWER_SECONDS)


@contextmanager
def timed(report: CommitReport, cause: str) -> Iterator[None]:
    started = time.perf_counter()
    try:
        yield
    finally:
        took = time.perf_counter() - started
        report.stalled[cause] = report.stalled.get(cause, 0.0) + took
