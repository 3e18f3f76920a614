"""Commits: immutable copies of a state, made when somebody asks for ``main``. At most two, and no byte ever changes.

A visitor that asks for ``main`` gets a copy of the newest state, unless both copies are in use: then the newer one. A
commit is in use

- while an answer is being sent from it;
- for ``hold`` seconds after the last request of a visitor (a connection) that got it as ``main``, until this visitor
  closes or asks for ``main`` again: clients ask once for ``main``, and then for files of that commit, one by one;
- for a short time after any other request, and after a visitor that used it has closed.

A commit that is not the newest is given up after ``hold`` × :data:`PATIENCE` even if it is read, if its memory is
needed: its readers are cut off. A commit that has been given up is unknown from then on.
"""

from __future__ import annotations

import hashlib
import logging
import secrets
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np
import xxhash

from transfuse._errors import TransfuseError
from transfuse._hub.safetensors_layout import INDEX_NAME, File, FileLayout
from transfuse._hub.sources import Buffer, NotTold, Source
from transfuse._memory.blocks import digests_at
from transfuse._report import Version
from transfuse._tuning import (
    HUB_COMMIT_FREE_SECONDS,
    HUB_COMMIT_PAST_SECONDS,
    HUB_COMMIT_SHORT_SECONDS,
    HUB_COMMIT_WAIT_SECONDS,
)

logger = logging.getLogger("transfuse")

#: The name of the revision that moves on.
MAIN = "main"
#: A superseded commit is given up after this multiple of ``hold``, if its memory is needed.
PATIENCE = 10


class Unavailable(TransfuseError):
    """There is no commit to answer with, now."""


@dataclass(eq=False)
class Commit:
    """A copy of the state at one step."""

    id: str
    number: int
    step: int | None
    mark: object
    #: Whether the state may have changed during the copy.
    is_loose: bool
    layout: FileLayout
    buffer: Buffer
    #: The files that are no tensors.
    texts: Mapping[str, bytes]
    etags: Mapping[str, str]
    made_at: float
    #: When a newer commit was made.
    superseded_at: float = float("inf")
    #: Answers must end: the memory is needed.
    revoked: bool = False
    readers: set[Visitor] = field(default_factory=set)
    holders: set[Visitor] = field(default_factory=set)
    busy_until: float = 0.0

    def free_at(self, now: float) -> float:
        """When nobody uses this commit any more, as far as is known now."""
        if self.readers:
            return float("inf")
        return max([self.busy_until, *(visitor.until for visitor in self.holders)], default=now)

    def file(self, name: str) -> File | None:
        return next((file for file in self.layout.files if file.name == name), None)

    def sizes(self) -> dict[str, int]:
        """The names and sizes of all files."""
        return self.layout.sizes() | {name: len(text) for name, text in self.texts.items()}

    def bytes(self, name: str) -> memoryview | None:
        """The bytes of a file. They are valid as long as a visitor reads this commit."""
        if name in self.texts:
            return memoryview(self.texts[name])
        file = self.file(name)
        return None if file is None else self.buffer.bytes()[file.start : file.start + file.nbytes]


def etags_of(layout: FileLayout, buffer: Buffer, texts: Mapping[str, bytes]) -> dict[str, str]:
    """The digest of each file. This writes the headers in front of the tensors, which are in the buffer."""
    etags = {}
    for file in layout.files:
        places = np.array(file.places, dtype=np.int64)
        nbytes = np.array([entry.nbytes for entry in file.entries], dtype=np.int64)
        digests = digests_at(buffer.address + places, nbytes)
        etags[file.name] = xxhash.xxh3_128_hexdigest(file.header + b"".join(digests))
        buffer.bytes()[file.start : file.start + len(file.header)] = file.header
    return etags | {name: xxhash.xxh3_128_hexdigest(text) for name, text in texts.items()}


class Visitor:
    """One connection. ``cut`` ends it."""

    def __init__(self, cut: Callable[[], object]) -> None:
        self.cut = cut
        #: The commit that this visitor got as ``main``, and until when that counts.
        self.holds: Commit | None = None
        self.until = 0.0


class Commits:
    """All commits of one source."""

    def __init__(self, source: Source, hold: float) -> None:
        self._source = source
        self._hold = hold
        self._run = secrets.token_hex(16)
        self._changed = threading.Condition()
        #: Oldest first; at most two.
        self._kept: list[Commit] = []
        #: Numbers of the copies that were begun last, ended last, and became a commit last.
        self._begun = self._ended = self._newest = 0
        self._failure: BaseException | None = None
        #: Whether the last copy was so slow that visitors may have been sent away meanwhile.
        self._is_slow = False
        self._closed = False
        self._asked_at = time.monotonic()

    # -------------------------------------------------------------------------------------------------- visitors

    @contextmanager
    def reading(self, revision: str, visitor: Visitor, *, lists: bool = False) -> Iterator[Commit | None]:
        """The commit of a revision, which stays as it is within this block. None if there is no such commit.

        ``lists``: the visitor lists files. If it has got a commit as ``main``, ``main`` is still that one: transformers
        lists ``main`` in between, and goes on with the commit that it had.
        """
        commit = self._held(visitor) if revision == MAIN and lists else None
        if commit is None:
            commit = self._main(visitor) if revision == MAIN else self._get(revision, visitor)
        if commit is None:
            yield None
            return
        try:
            yield commit
        finally:
            with self._changed:
                commit.readers.discard(visitor)
                now = time.monotonic()
                if commit.revoked:
                    pass  # A visitor that has been cut off holds nothing.
                elif visitor.holds is commit:
                    # Listing alone does not hold a commit for ever.
                    visitor.until = min(visitor.until, now + self._hold) if lists else now + self._hold
                else:
                    commit.busy_until = max(commit.busy_until, now + HUB_COMMIT_SHORT_SECONDS)
                self._changed.notify_all()

    def leave(self, visitor: Visitor) -> None:
        """This visitor has closed."""
        with self._changed:
            if visitor.holds is not None:
                visitor.holds.busy_until = max(visitor.holds.busy_until, time.monotonic() + HUB_COMMIT_SHORT_SECONDS)
            self._let_go(visitor)

    def _let_go(self, visitor: Visitor) -> None:
        if visitor.holds is not None:
            visitor.holds.holders.discard(visitor)
            visitor.holds = None
            self._changed.notify_all()

    def _held(self, visitor: Visitor) -> Commit | None:
        with self._changed:
            held = visitor.holds
            if held is None or held.revoked or visitor.until < time.monotonic():
                return None
            held.readers.add(visitor)
            return held

    def _get(self, revision: str, visitor: Visitor) -> Commit | None:
        with self._changed:
            self._asked_at = time.monotonic()
            found = next((one for one in self._kept if one.id == revision and not one.revoked), None)
            if found is not None:
                found.readers.add(visitor)
            return found

    def _main(self, visitor: Visitor) -> Commit:
        until = time.monotonic() + HUB_COMMIT_WAIT_SECONDS
        mark: object = None
        try:
            mark = self._source.mark(HUB_COMMIT_WAIT_SECONDS)
        except NotTold:
            until = 0.0  # The newest that there is has to do.
        with self._changed:
            self._asked_at = time.monotonic()
            self._let_go(visitor)
            asked = self._begun
            while True:
                newest = self._kept[-1] if self._kept else None
                if newest is not None and newest.number != self._newest:
                    newest = None  # The newest one has made room for a copy that is not ready: main does not go back.
                fresh = newest is not None and (newest.mark == mark or newest.number > asked)
                overdue = time.monotonic() >= until
                # A copy that had begun before this visitor asked may be too old, so its end does not count.
                tried = self._ended > asked
                if newest is not None and (fresh or overdue or (tried and self._failure is None)):
                    newest.readers.add(visitor)
                    newest.holders.add(visitor)
                    visitor.holds, visitor.until = newest, float("inf")
                    return newest
                if self._closed:
                    raise Unavailable("the hub was closed")
                if tried and self._failure is not None:
                    raise Unavailable(f"{type(self._failure).__name__}: {self._failure}")
                if overdue:
                    raise Unavailable(
                        f"the copy of the state has not been made in {HUB_COMMIT_WAIT_SECONDS:g} s: ask again"
                    )
                if self._begun == self._ended:
                    number = self._begun + 1
                    self._start(number)
                    self._begun = number
                self._changed.wait(until - time.monotonic())

    @property
    def newest(self) -> Version | None:
        """The newest commit that is held: its step, and its hash. None: there is none."""
        with self._changed:
            return Version(self._kept[-1].step, self._kept[-1].id) if self._kept else None

    def glance(self) -> tuple[dict[str, int], int | None]:
        """The state's files with their sizes, and its step now. Nothing is copied, and no commit is made or held."""
        until = time.monotonic() + HUB_COMMIT_WAIT_SECONDS

        def meanwhile() -> None:
            self._check_open()
            if time.monotonic() > until:
                raise TimeoutError(f"the state has been changing for {HUB_COMMIT_WAIT_SECONDS:g} s")

        try:
            layout, step = self._source.glance(meanwhile)
        except Exception as error:
            raise Unavailable(f"{type(error).__name__}: {error}") from error
        return layout.sizes(), step

    # ---------------------------------------------------------------------------------------------------- making

    def _start(self, number: int) -> None:
        try:
            threading.Thread(target=self._make, args=(number,), name="transfuse-hub", daemon=True).start()
        except RuntimeError as error:  # The process may have no more threads.
            raise Unavailable(f"the state cannot be copied: {error}") from error

    def _make(self, number: int) -> None:
        """Make a commit, if there is room for one."""
        failure: BaseException | None = None
        made: Commit | None = None
        try:
            buffer = self._room()
            if buffer is not None:
                began = time.monotonic()
                made = self._copy(number, buffer)
                self._is_slow = time.monotonic() - began > HUB_COMMIT_WAIT_SECONDS / 2
        except BaseException as error:
            failure = error
            logger.warning("the hub could not copy the state: %s: %s", type(error).__name__, str(error))
        with self._changed:
            if made is not None and not self._closed:
                if self._kept:
                    # Not later than it was: a commit in between may have gone.
                    self._kept[-1].superseded_at = min(self._kept[-1].superseded_at, time.monotonic())
                self._kept.append(made)
                self._newest = number
            self._failure, self._ended = failure, number
            self._changed.notify_all()

    def _room(self) -> Buffer | None:
        """A buffer that nobody uses; None if both are in use."""
        with self._changed:
            until = time.monotonic() + 2 * HUB_COMMIT_SHORT_SECONDS
            while not self._closed:
                now = time.monotonic()
                # If a copy takes long, the newest commit stays until there is a newer one: visitors get it meanwhile.
                usable = self._kept[:-1] if self._is_slow else self._kept
                for commit in usable:
                    if commit.free_at(now) <= now:
                        self._kept.remove(commit)
                        for visitor in commit.holders:
                            visitor.holds = None
                        return commit.buffer
                if len(self._kept) < 2:
                    return Buffer()
                oldest = self._kept[0]
                soonest = min(commit.free_at(now) for commit in usable)
                if now - oldest.superseded_at > self._hold * PATIENCE:
                    # The memory is free when all threads that send from it have noticed.
                    oldest.revoked, oldest.busy_until = True, 0.0
                    for visitor in oldest.readers | oldest.holders:
                        visitor.until = 0.0
                        visitor.cut()
                elif soonest > until:
                    return None
                if now > until:
                    return None
                self._changed.wait(min(soonest, until) - now + HUB_COMMIT_PAST_SECONDS)
            raise Unavailable("the hub was closed")

    def _copy(self, number: int, buffer: Buffer) -> Commit:
        taken = self._source.take(buffer, self._check_open)
        texts = {} if taken.layout.index is None else {INDEX_NAME: taken.layout.index}
        name = hashlib.sha1(f"{self._run} {number} {taken.step}".encode(), usedforsecurity=False).hexdigest()
        return Commit(
            id=name,
            number=number,
            step=taken.step,
            mark=taken.mark,
            is_loose=taken.is_loose,
            layout=taken.layout,
            buffer=buffer,
            texts=texts,
            etags=etags_of(taken.layout, buffer, texts),
            made_at=time.time(),
        )

    def _check_open(self) -> None:
        if self._closed:
            raise Unavailable("the hub was closed")

    # ---------------------------------------------------------------------------------------------------- upkeep

    def tidy(self) -> None:
        """Free the memory if nobody has asked for anything for a long time."""
        with self._changed:
            now = time.monotonic()
            idle = self._begun == self._ended and now - self._asked_at > HUB_COMMIT_FREE_SECONDS
            if idle and self._kept and all(commit.free_at(now) <= now for commit in self._kept):
                buffers, self._kept = [commit.buffer for commit in self._kept], []
                threading.Thread(target=self._source.free, args=(buffers,), name="transfuse-hub", daemon=True).start()

    def close(self) -> None:
        """Make no more commits."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def free(self, seconds: float) -> None:
        """After :meth:`close`, when nobody reads: wait ``seconds`` for a copy that is being made; free the memory."""
        with self._changed:
            self._changed.wait_for(lambda: self._begun == self._ended, seconds)
            self._kept.clear()
