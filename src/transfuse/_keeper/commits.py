"""One commit: a state as it was taken, the layout that the keeper has agreed to, and the copy into a slot."""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Protocol

import msgspec
import numpy as np

from transfuse._errors import TransfuseError, as_utf8
from transfuse._keeper import copying, frames
from transfuse._keeper.bundle_table import PRIVATE, ROW_BYTES, Bundles, StoragePlaces
from transfuse._keeper.copying import StateMemory
from transfuse._keeper.device_commit import DeviceCopy, Quiet, check_no_capture
from transfuse._keeper.restored import Text
from transfuse._keeper.slot_file import PAGE, Brief, Label, SlotView
from transfuse._memory import vm
from transfuse._memory.mutation import MutationWatch, versions_of
from transfuse._memory.streams import OwnStreams
from transfuse._metrics import names
from transfuse._metrics.names import phase_of
from transfuse._sizes import human_bytes
from transfuse._state.manifest import Described
from transfuse._state.region import Ints
from transfuse._state.tensors import Bools
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
    #: Why steps are not saved on storage, in the same way.
    unsaved: str = ""
    #: Seconds for which training stood still, by cause.
    stalled: dict[str, float] = field(default_factory=dict)
    #: Seconds for which the copy went on while training did (``wait=False``).
    background_seconds: float = 0.0
    #: One word for ``why``, if the outcome is "skipped" or "dropped": "no_free_slot", "no_room", "keeper_lost",
    #: "other_rank", "not_newer", "device_busy", "changed_early" or "other".
    cause: str = ""

    @property
    def seconds(self) -> float:
        """Seconds for which training stood still, in all."""
        return sum(self.stalled.values())

    def leave_out(self, outcome: str, cause: str, why: str) -> None:
        """The commit does not count: "skipped" or "dropped"."""
        self.outcome, self.cause, self.why = outcome, cause, why

    def event(self) -> tuple[str, dict[str, int | float | str]]:
        """The name and the data of an event for ``torch.monitor``."""
        return "transfuse.commit", {
            "step": self.step,
            "outcome": self.outcome,
            "cause": self.cause,
            "why": as_utf8(self.why),
            "copied_bytes": self.copied_bytes,
            "shared_bytes": self.shared_bytes,
            "unreplicated": as_utf8(self.unreplicated),
            "stalled_seconds": self.seconds,
            "background_seconds": self.background_seconds,
            **{f"{phase_of(cause)}_seconds": seconds for cause, seconds in self.stalled.items()},
        }

    def numbers(self) -> frames.CommitNumbers:
        """What the keeper counts for its metrics."""
        return frames.CommitNumbers(
            outcome=self.outcome,
            cause=self.cause,
            stalled=self.stalled,
            background=self.background_seconds,
            copied_bytes=self.copied_bytes,
            shared_bytes=self.shared_bytes,
        )

    def line(self) -> str:
        causes = ", ".join(f"{name} {1000 * seconds:.0f} ms" for name, seconds in self.stalled.items())
        why = f": {self.why}" if self.why else ""
        return (
            f"step {self.step} {self.outcome}{why}; copied {human_bytes(self.copied_bytes)}, "
            f"shared {human_bytes(self.shared_bytes)}; training stood still for {1000 * self.seconds:.0f} ms ({causes})"
            + (f"; {self.unreplicated}" if self.unreplicated else "")
            + (f"; {self.unsaved}" if self.unsaved else "")
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

    @cached_property
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
        return versions_of(self.described.tensors)


class Footprint:
    """What is remembered of a state that was committed: enough to see which tensors change. It holds none of them."""

    def __init__(self, taken: Snapshot) -> None:
        self.structure, self.devices = taken.structure, taken.memory.devices
        #: The storage of each tensor.
        self.storages = taken.described.manifest.tensors.storage
        self._tensors = list(map(weakref.ref, taken.described.tensors))
        #: The versions when the job had last said that it changes nothing any more.
        self.calm = taken.versions()

    def versions(self) -> list[int]:
        """The version of each tensor. One that is gone has not changed."""
        found = [tensor() for tensor in self._tensors]
        versions = iter(versions_of([tensor for tensor in found if tensor is not None]))
        return [calm if tensor is None else next(versions) for tensor, calm in zip(found, self.calm, strict=True)]

    def changed(self) -> set[int]:
        """The storages that have changed since the job was last calm."""
        return set(self.storages[np.array(self.versions()) != np.array(self.calm)].tolist())


class Ask(Protocol):
    """Asks the keeper of this host, and returns its answer."""

    def __call__(self, question: Any, expected: Any, seconds: float | None = None) -> Any: ...


@dataclass(frozen=True, eq=False)
class Committer:
    """The rank that commits, and how."""

    rank: int
    world_size: int
    digests: bool
    ask: Ask
    #: How long a device may take for what was queued before a commit, and for the copies.
    seconds: float
    streams: OwnStreams = field(default_factory=OwnStreams)
    quiet: Quiet = field(default_factory=Quiet)


class ChangedTooEarly(TransfuseError):
    """The state changed before a device had copied it, on a stream that did not wait."""

    def __init__(self) -> None:
        super().__init__(
            "the state was changed before it was copied, inside mutating(), on a stream that did not wait for the one "
            "that was current at its beginning. Let other streams wait for that one first. From now on mutating() "
            "waits on the host"
        )


class CommitCopy:
    """One commit, from the first byte to the marker."""

    def __init__(
        self,
        committer: Committer,
        taken: Snapshot,
        layout: AgreedLayout,
        number: int,
        label: Label,
        report: CommitReport,
    ) -> None:
        self._committer, self._taken, self._layout = committer, taken, layout
        self._slot, self._number, self._label, self._report = layout.views[number], number, label, report
        self._digests: list[bytes] = []
        #: The bundles that could not wait, if devices are involved, and those that are copied later.
        self._first: Bools = np.empty(0, dtype=bool)
        self._later: Ints = np.empty(0, dtype=np.int64)
        self._watch: MutationWatch | None = None
        self._calm = np.empty(0, dtype=bool)
        #: What lies on devices, if anything does. It lands while training goes on, and nobody waits for it.
        self._device: DeviceCopy | None = None
        #: Set when everything else has been copied: from then on only devices have to wait.
        self.is_read = threading.Event()
        #: The tensors that had changed when the job said that it changes its state. None: it has not said so.
        self._changed_by_then: Ints | None = None
        self._freezing = threading.Lock()

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
        if len(memory.elsewhere):
            self._queue(chosen, wait=at_once is None)
            self._first = chosen
        now = chosen if self._device is None or at_once is None else chosen & ~self._device.landing
        self._later = np.flatnonzero(~now)
        self._digests = self._copy(np.flatnonzero(now))
        if len(self._later):
            manifest = self._taken.described.manifest
            # What could not wait may change as soon as this returns: on a device, when the caller's streams go on.
            self._calm = ~chosen[of_storage[: len(manifest.storages)]][manifest.tensors.storage]
            self._versions = np.array(self._taken.versions())
            self._watch = MutationWatch(self._taken.described, devices=False)
        return not len(self._later)

    def _queue(self, first: Bools, *, wait: bool) -> None:
        """Queue the copies from devices. What cannot wait, or everything, has landed before the caller changes it."""
        committer, layout, memory = self._committer, self._layout, self._taken.memory
        check_no_capture(memory.devices)
        device = DeviceCopy(committer.streams, committer.quiet, memory, layout.bundles, layout.storages, self._slot)
        committer.streams.follow(memory.devices)
        if not device.devices:
            return
        self._device = device
        device.begin(first)
        if wait:
            device.queue(~first, fingerprinted=False)
            with committer.quiet.broken():  # The caller is not capturing, and waits here.
                device.land(committer.seconds)
        else:
            device.hold_back(for_all=False)

    def hold_back(self) -> bool:
        """The job is about to change its state: its devices wait for the copies, and the host for all other copies.

        It waits for fingerprints, too. Returns whether that is enough: without them it has to wait for everything.
        """
        if self._device is None:
            return False
        self.is_read.wait()
        with self._committer.quiet.broken():
            if not self._device.are_fingerprinted(self._committer.seconds):
                return False
        with self._freezing:
            if self._changed_by_then is None:
                self._changed_by_then = self._changed_versions()
        self._device.hold_back(for_all=True)
        return True

    def _changed_versions(self) -> Ints:
        return np.flatnonzero(np.array(self._taken.versions()) != self._versions)

    def go_on(self) -> bool:
        """Copy the rest. Returns whether the commit counts: not if leaves changed while they were copied."""
        # Half of the cores: the others are training's.
        workers = max(1, vm.threads() // 2)
        assert self._watch is not None
        later, device = self._later, self._device
        try:
            if device is not None:
                device.queue(~self._first, fingerprinted=True)
            by_hand = later if device is None else later[~device.landing[later]]
            self._digests = self._copy(by_hand, workers)
            changed = self._watch.changed_rows()
        finally:
            self.is_read.set()
        if device is not None:
            device.land(self._committer.seconds)
            with self._freezing:
                then = self._changed_versions() if self._changed_by_then is None else self._changed_by_then
            changed = np.union1d(changed, then)
        changed = changed[self._calm[changed]]
        if len(changed):
            return self._leave_out(changed)
        if device is not None:
            if device.differs(workers):
                raise ChangedTooEarly
            self._digests = self._copy(later[device.landing[later]], workers)
        self.finish()
        return True

    def _leave_out(self, changed: Ints) -> bool:
        """These tensors have changed while they were copied: the commit does not count."""
        manifest, report = self._taken.described.manifest, self._report
        self._layout.volatile |= set(manifest.tensors.storage[changed].tolist())
        paths = [manifest.paths[leaf] for leaf in np.unique(manifest.leaves_of(changed)).tolist()[:3]]
        report.leave_out(
            "dropped",
            names.CHANGED,
            f"{', '.join(paths)} changed outside mutating() while they were copied; from now on they are copied before "
            "commit() returns",
        )
        self._committer.ask(frames.Drop(self._number), frames.Ack, COMMIT_ANSWER_SECONDS)
        return False

    def has_landed(self, *, ask: bool = True) -> bool:
        """Whether no device writes to the slot any more. ``ask``: the devices, if that is not known."""
        return self._device is None or self._device.is_known_to_have_landed or (ask and self._device.has_landed())

    def _copy(self, chosen: Ints, workers: int | None = None) -> list[bytes]:
        layout, memory = self._layout, self._taken.memory
        with self._committer.streams.entered(memory.devices):
            return copying.copy(
                memory,
                layout.bundles,
                layout.storages,
                self._slot,
                digests=self._committer.digests,
                only=chosen,
                known=self._digests,
                landed=None if self._device is None else self._device.landing,
                workers=workers,
                seconds=self._committer.seconds,
            )

    def finish(self) -> None:
        """Write the marker, and tell the keeper."""
        brief = Brief(self._committer.rank, self._committer.world_size, self._layout.bundles.hashed(self._digests))
        self._slot.commit(self._label, msgspec.msgpack.encode(brief), self._taken.text(self._layout.storages))
        self._committer.ask(frames.Committed(self._number, *self._label), frames.Ack, COMMIT_ANSWER_SECONDS)

    def drop(self) -> None:
        """What was copied does not count, and the slot is free again."""
        with suppress(TransfuseError):
            self._committer.ask(frames.Drop(self._number), frames.Ack, COMMIT_ANSWER_SECONDS)


@contextmanager
def timed(report: CommitReport, cause: str) -> Iterator[None]:
    started = time.perf_counter()
    try:
        yield
    finally:
        took = time.perf_counter() - started
        report.stalled[cause] = report.stalled.get(cause, 0.0) + took
