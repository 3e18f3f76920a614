"""A keeper's part in saving a step: it holds the slots, and writes its ranks' files, as the leader orders.

    keeper                                             leader (:mod:`.save_leader`)
      | <- SaveBegin: a step ------------------------- |  the slots are pinned as long as the connection lasts
      | -- SaveProgress: what is in them ------------> |  decides who writes what
      | <- SaveWrite: your part of it ---------------- |  asks from time to time how it is going (SaveLook)
      | -- SaveProgress: the files and their digests > |  until all have written theirs
      | <- SaveRecord -------------------------------- |  from now on the step counts
      | <- SavePrune --------------------------------- |  older ones may go

Every order is carried out in a thread of its own, one after the other: a mount that never answers costs that thread.
The leader's own keeper gets the same orders, without a connection. No torch is needed for any of this.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial

import numpy as np

from transfuse._errors import TransfuseError
from transfuse._keeper.questions import (
    RankTable,
    SaveBegin,
    SaveLook,
    SaveProgress,
    SavePrune,
    SaveRecord,
    SaveWrite,
)
from transfuse._keeper.save_decisions import to_remove
from transfuse._keeper.saved_steps import SavedSteps
from transfuse._keeper.slot_file import Brief, Label, SlotView
from transfuse._keeper.slot_policy import Books, Kept
from transfuse._keeper.storage import SavedFile, Storage
from transfuse._keeper.writing_mark import WritingMark
from transfuse._tuning import RATE_SLICE_SECONDS, SAVE_AT_ONCE_SECONDS, WRITER_SIGHT_SECONDS
from transfuse._wire.rate_limit import RateLimit

logger = logging.getLogger("transfuse.keeper")

#: Training's threads come first.
NICE = 10
SaveOrder = SaveBegin | SaveWrite | SaveRecord | SavePrune


class SaveStopped(TransfuseError):
    """This save has been given up."""


class SavingHost:
    """What all saves of one generation have in common, on one host."""

    def __init__(
        self,
        changed: threading.Condition,
        books: Books,
        steps: SavedSteps,
        rate: float | None,
        *,
        leads: bool,
        all_closed: Callable[[], bool],
    ) -> None:
        """``changed``: the keeper's lock. ``rate``: bytes a second that may be written. ``leads``: for all hosts.

        ``all_closed``: whether all ranks of this host have closed; called under the lock.
        """
        self.changed, self.books, self.steps, self.leads, self.all_closed = changed, books, steps, leads, all_closed
        self.rate = RateLimit(rate)
        self.stopped = threading.Event()
        #: The thread that carries out orders; one that hangs is not joined by a second one.
        self.thread: threading.Thread | None = None
        #: Whether this host sees the leader's directory; None: not known yet.
        self.sees: bool | None = True if leads else None
        #: This keeper's mark in its directory, if it is a directory of its own.
        self.mark: WritingMark | None = None
        #: The step that all ranks have restored. Newer ones of earlier generations could not be.
        self.restored: Label | None = None
        #: The steps that were on storage when somebody last looked.
        self.saved: list[Label] = []

    def stop(self) -> None:
        self.stopped.set()
        if self.mark is not None:
            self.mark.stop()

    def join(self, until: float) -> None:
        if self.thread is not None:
            self.thread.join(max(0.0, until - time.monotonic()))
        if self.mark is not None:
            self.mark.join(until)

    def claim(self, name: str) -> None:
        """See to it that this host may write. ``name``: of the leader's mark; empty: this is the leader."""
        storage = self.steps.storage()
        if self.sees is None:
            self.sees = self._looks_for(storage, name)
        if self.sees and not self.leads:
            return
        if self.mark is None:
            self.mark = WritingMark(storage, name and f"{name} on a disk of its own, {os.getpid()}")
        self.mark.claim()

    def _looks_for(self, storage: Storage, name: str) -> bool:
        """Whether the leader's mark is in this host's directory. A network file system may show it a little later."""
        until = time.monotonic() + WRITER_SIGHT_SECONDS
        while True:
            found = storage.writer()
            if found is not None and found.id == name:
                return True
            if time.monotonic() > until or self.stopped.wait(RATE_SLICE_SECONDS):
                return False

    def check(self) -> None:
        """Raise if somebody else writes to this host's directory."""
        if self.mark is not None:
            self.mark.check()


class SaveTask:
    """One step that this host saves."""

    def __init__(self, host: SavingHost) -> None:
        self._host = host
        self._label = Label(0, 0)
        self._kept: dict[int, Kept] = {}
        self._views: dict[int, tuple[SlotView, Brief]] = {}
        self._lock = threading.Lock()
        self._stopped, self._done = threading.Event(), threading.Event()
        self._failure = ""
        self._sign = time.monotonic()
        self._nbytes = 0
        self._files: list[SavedFile] = []
        #: Whether files may be there, and whether the record may be.
        self._has_begun = self._counts = False

    def order(self, question: SaveOrder | SaveLook) -> SaveProgress:
        """Carry out the leader's order, or say how it is going."""
        if isinstance(question, SaveLook):
            return self._progress()
        self._begin(question)
        self._done.wait(SAVE_AT_ONCE_SECONDS)
        return self._progress(with_tables=isinstance(question, SaveBegin))

    def _begin(self, question: SaveOrder) -> None:
        host = self._host
        if host.thread is not None and host.thread.is_alive():
            raise TransfuseError(
                f"the directory {host.steps.where} has not answered since the save before: look whether its mount, or "
                "its network, is alive"
            )
        if isinstance(question, SaveBegin):
            self._pin(Label(question.generation, question.step))
            work: Callable[[], None] = partial(host.claim, question.writer)
        elif isinstance(question, SaveWrite):
            work = partial(self._write, question)
        elif isinstance(question, SaveRecord):
            work = partial(self._record, question)
        else:
            work = partial(self._prune, question)
        self._done.clear()
        self._sign = time.monotonic()
        host.thread = threading.Thread(target=self._run, args=(work,), name="transfuse-save", daemon=True)
        host.thread.start()

    def _pin(self, label: Label) -> None:
        host = self._host
        with host.changed:
            generation = host.books.current()
            if generation is None or not host.books.is_saveable(label):
                raise TransfuseError(f"step {label.step} is not whole on this host any more")
            found = {rank: host.books.find(rank, label) for rank in generation.ranks}
            for rank, kept in found.items():
                assert kept is not None
                assert kept.brief is not None
                # Mappings of our own: they may outlive the slots.
                self._views[rank] = SlotView(kept.file.fd, writable=False), kept.brief
                kept.pins += 1
                self._kept[rank] = kept
            self._label = label

    def _progress(self, *, with_tables: bool = False) -> SaveProgress:
        is_done = self._done.is_set()
        return SaveProgress(
            is_done=is_done,
            silent=time.monotonic() - self._sign,
            failure=self._failure,
            nbytes=self._nbytes,
            tables=[RankTable(rank, brief.bundles) for rank, (_, brief) in self._views.items()] if with_tables else [],
            sees=bool(self._host.sees),
            files=list(self._files) if is_done else [],
        )

    def _run(self, work: Callable[[], None]) -> None:
        with suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICE)
        try:
            work()
        except (TransfuseError, OSError, ValueError) as error:
            self._failure = str(error) or type(error).__name__
        except Exception as error:
            logger.exception("a step could not be saved")
            self._failure = f"{type(error).__name__}: {error}"
        finally:
            self._done.set()

    # -- orders

    def _write(self, question: SaveWrite) -> None:
        storage, self._has_begun = self._host.steps.storage(), True
        for rank, (view, brief) in sorted(self._views.items()):
            owners = np.frombuffer(question.owners[rank], dtype="<i4").astype(np.int64)
            self._files.append(storage.write_rank(self._label, view, brief, owners, self._pace))
            self._pace(0)

    def _pace(self, nbytes: int) -> None:
        self._nbytes += nbytes
        self._host.rate.take(nbytes, self._is_stopped)
        if self._is_stopped():
            raise SaveStopped("it was given up")

    def _is_stopped(self) -> bool:
        self._sign = time.monotonic()
        return self._stopped.is_set() or self._host.stopped.is_set()

    def _record(self, question: SaveRecord) -> None:
        host, storage = self._host, self._host.steps.storage()
        if host.sees and not host.leads:
            return
        here = storage.present(self._label, question.record)
        wanted = range(question.record.world_size) if question.together else self._kept
        missing = sorted(set(wanted) - set(here))
        if missing:
            raise TransfuseError(
                f"the directory {host.steps.where}: the files of ranks {missing} of step {self._label.step} are not "
                "there, though they were written"
            )
        host.check()
        self._pace(0)
        self._counts = True
        storage.write_record(self._label, question.record)

    def _prune(self, question: SavePrune) -> None:
        host, storage = self._host, self._host.steps.storage()
        if host.sees and not host.leads:
            return
        counted = storage.labels()
        whole: list[Label] = []
        for label in counted:
            if len(whole) == question.keep:
                break
            if host.restored is not None and host.restored < label and label.generation < self._label.generation:
                continue
            with suppress(ValueError):  # Its record is damaged.
                record = storage.record(label)
                here = storage.present(label, record)
                if len(here) == record.world_size or (here and not question.together):
                    whole.append(label)
        gone = to_remove(whole, counted, storage.unfinished(), question.keep)
        for label in gone:
            self._pace(0)
            host.check()
            storage.remove(label)
        host.saved = [label for label in counted if label not in gone]

    def end(self) -> None:
        """Unpin the slots. What was begun and does not count is removed."""
        self._stopped.set()
        with self._lock:
            kept, self._kept = self._kept, {}
        with self._host.changed:
            for one in kept.values():
                one.pins -= 1
        if kept and self._has_begun and not self._counts and (self._host.leads or self._host.sees is False):
            threading.Thread(target=self._clear, name="transfuse-save-end", daemon=True).start()

    def _clear(self) -> None:
        """Remove files that do not count, when the thread that was writing them has ended."""
        thread, storage = self._host.thread, self._host.steps.storage()
        if thread is not None:
            thread.join()
        with suppress(TransfuseError, OSError):
            if self._label in storage.unfinished():
                storage.remove(self._label)
