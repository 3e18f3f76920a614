"""What lies on storage, for workers that restore. A mount that is gone never answers: each question has a deadline.

What is asked runs in a thread of its own. One that never comes back costs the keeper a thread, and nobody waits for it.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from transfuse._errors import TransfuseError
from transfuse._keeper.frames import Held, Saves
from transfuse._keeper.slot_file import Label, SlotView
from transfuse._keeper.storage import Record, Storage, StorageTrouble, file_name, folder_of
from transfuse._timeouts import Patience
from transfuse._tuning import STORAGE_LOOK_SECONDS

#: How many steps are told: the newest of those of which some rank's state is here, and of those of which none is. A
#: record that is damaged is named, and does not count.
NEWEST = 8
T = TypeVar("T")


class StorageQuestion(Generic[T]):
    """Something that is asked of storage, in a thread of its own."""

    def __init__(self, work: Callable[[], T]) -> None:
        self._work = work
        self._ended = threading.Event()
        self._found: list[T] = []
        self._error: BaseException | None = None
        threading.Thread(target=self._run, name="transfuse-storage", daemon=True).start()

    def _run(self) -> None:
        try:
            self._found.append(self._work())
        except BaseException as error:
            self._error = error
        finally:
            self._ended.set()

    def wait(self, seconds: float | None) -> bool:
        """Whether the answer is there."""
        return self._ended.wait(seconds)

    def get(self) -> T:
        if self._error is not None:
            raise self._error
        return self._found[0]


def silent(where: str, seconds: float) -> StorageTrouble:
    return StorageTrouble(
        f"the directory {where} has not answered within {seconds:g} s: look whether its mount, or its network, is alive"
    )


@dataclass(frozen=True)
class FoundSteps:
    """The states that lie on storage."""

    states: list[Held] = field(default_factory=list)
    #: Whether there are steps at all, damaged ones too.
    has_held: bool = False
    #: What is damaged, or why nothing could be read.
    trouble: str = ""


class SavedSteps:
    """The steps in a job's directory, read only."""

    def __init__(self, saves: Saves) -> None:
        self.saves = saves
        self._storage: Storage | None = None
        #: What was brought from elsewhere: workers of one host share it.
        self._brought: dict[tuple[Label, int], int] = {}
        self._bringing: dict[tuple[Label, int], threading.Lock] = {}
        self._lock = threading.Lock()
        #: How many files have been opened, by anybody.
        self.opened = 0

    @property
    def where(self) -> str:
        return self.saves.directory

    def storage(self) -> Storage:
        """The storage itself. It is opened within a question: a URL may need the network for that."""
        if self._storage is None:
            self._storage = Storage.at(self.saves.directory)
        return self._storage

    def within(self, seconds: float, work: Callable[[], T]) -> T:
        asked = StorageQuestion(work)
        if not asked.wait(seconds):
            raise silent(self.where, seconds)
        return asked.get()

    def find(self) -> tuple[list[Label], int]:
        """Refuse storage that cannot be used. Returns the steps there, newest first, and the highest generation."""

        def find() -> tuple[list[Label], int]:
            storage = self.storage()
            storage.check(writes=self.saves.every is not None)
            labels = storage.labels()
            # Also of steps that do not count: other hosts may have more of them.
            return labels, max((label.generation for label in labels + storage.unfinished()), default=0)

        return self.within(Patience(self.saves.patience).storage(restores=False), find)

    def look(self) -> FoundSteps:
        """What is there."""
        try:
            return self.within(Patience(self.saves.patience).storage(restores=True), self._look)
        except (TransfuseError, OSError, ValueError) as error:
            return FoundSteps(trouble=str(error))

    def _look(self) -> FoundSteps:
        storage, states, troubles = self.storage(), list[Held](), list[str]()
        labels, told = storage.labels(), {True: 0, False: 0}
        for label in labels:
            if told[True] == NEWEST:
                break
            try:
                record = storage.record(label)
                present = storage.present(label, record)
                whole = present if len(present) == record.world_size else self._whole(label, record, present)
            except (TransfuseError, ValueError) as error:
                troubles.append(str(error))
                continue
            told[bool(whole)] += 1
            if told[bool(whole)] > NEWEST:
                continue
            for rank in range(record.world_size):
                nbytes = record.files[file_name(rank)].nbytes
                mark = record.digest
                states.append(Held(*label, rank, record.world_size, nbytes, rank in whole, saved=True, record=mark))
        return FoundSteps(states, bool(labels), "; ".join(troubles))

    def _whole(self, label: Label, record: Record, present: Sequence[int]) -> list[int]:
        """The ranks of which everything is here. Other hosts may have disks of their own."""
        whole = []
        for rank in present:
            with suppress(ValueError):
                if self._owners(label, record, rank) <= set(present):
                    whole.append(rank)
        return whole

    def _owners(self, label: Label, record: Record, rank: int) -> set[int]:
        """The ranks whose files have a rank's bundles."""
        # On disks of their own hosts have few files; elsewhere only the head is brought.
        fd = self.storage().open(label, record, rank, only_head=True)
        try:
            return set(SlotView(fd, writable=False).brief().bundles.owners.tolist())
        finally:
            os.close(fd)

    def open(self, label: Label, ranks: Sequence[int]) -> dict[int, int]:
        """Descriptors of the files that hold these ranks' states. The caller closes them."""
        storage = self.storage()
        try:
            record = storage.record(label)
            found: dict[int, int] = {}
            try:
                for rank in ranks:
                    found.setdefault(rank, -1)
                    if found[rank] < 0:
                        found[rank] = self._open(label, record, rank)
                    for owner in SlotView(found[rank], writable=False).brief().bundles.owners.tolist():
                        if owner not in found:
                            found[owner] = self._open(label, record, owner)
            except BaseException:
                for fd in found.values():
                    if fd >= 0:
                        os.close(fd)
                raise
        except (ValueError, KeyError) as error:
            raise TransfuseError(str(error)) from error
        return found

    def _open(self, label: Label, record: Record, rank: int) -> int:
        self.opened += 1
        if "://" not in self.where:
            return self.storage().open(label, record, rank)
        key = label, rank
        with self._lock:
            lock = self._bringing.setdefault(key, threading.Lock())
        with lock:
            if key not in self._brought:
                self._brought[key] = self.storage().open(label, record, rank)
            return os.dup(self._brought[key])

    def forget(self) -> None:
        """What was brought is not needed any more."""
        with self._lock:
            brought, self._brought = self._brought, {}
        for fd in brought.values():
            os.close(fd)

    def folder(self, label: Label) -> str:
        """A step's folder, for messages."""
        return f"{self.where}/{folder_of(label)}"


class OpenFiles:
    """Files on storage that a worker wants to map: opened beside its connection, which asks until they are there."""

    def __init__(self, steps: SavedSteps, label: Label, ranks: Sequence[int]) -> None:
        self.label, self.ranks = label, list(ranks)
        self._asked: StorageQuestion[dict[int, int]] = StorageQuestion(lambda: steps.open(label, ranks))

    def get(self) -> Mapping[int, int] | None:
        """The descriptors by rank; None: not yet."""
        return self._asked.get() if self._asked.wait(STORAGE_LOOK_SECONDS) else None

    def close(self) -> None:
        """What was opened, or is about to be, is not needed any more."""

        def close() -> None:
            self._asked.wait(None)
            with suppress(Exception):
                for fd in self._asked.get().values():
                    os.close(fd)

        if self._asked.wait(0):
            close()
        else:
            threading.Thread(target=close, name="transfuse-storage-end", daemon=True).start()
