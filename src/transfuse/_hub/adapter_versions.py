"""Versions of an adapter: for each step a copy under a name of its own, whose bytes never change.

An engine keys its caches by the name, so a name is given once. The newest versions are held, and older ones that
somebody is reading, at most as many again. A state of this process is copied at the end of each change, in the thread
that made it, before anybody can change it again. Servers are asked when a client wants a version that is not held.
"""

from __future__ import annotations

import hashlib
import logging
import re
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, cast

from transfuse._hub.adapters import CONFIG_NAME
from transfuse._hub.commits import MAIN, Commit, Unavailable, Visitor, etags_of
from transfuse._hub.sources import Buffer, CopiedState, NotTold, Source
from transfuse._remote.live_state import LiveState
from transfuse._tuning import HUB_COMMIT_WAIT_SECONDS

logger = logging.getLogger("transfuse")

#: What follows the adapter's name: no other spelling of a number is one.
_SUFFIX = re.compile(r"-v(0|[1-9]\d{0,18})")


@dataclass(eq=False)
class AdapterVersion:
    """A copy of an adapter at one step."""

    name: str
    number: int
    taken: CopiedState
    buffer: Buffer
    config: bytes
    made_at: float = field(default_factory=time.time)
    asked_at: float = float("-inf")
    readers: set[Visitor] = field(default_factory=set)
    is_held: bool = True
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _commit: Commit | None = None

    def commit(self) -> Commit:
        """Its one commit. Nobody waits for digests before somebody asks for the version."""
        with self._lock:
            if self._commit is None:
                texts = {CONFIG_NAME: self.config}
                etags = etags_of(self.taken.layout, self.buffer, texts)
                told = f"{self.name} {sorted(etags.items())}"
                self._commit = Commit(
                    id=hashlib.sha1(told.encode(), usedforsecurity=False).hexdigest(),
                    number=self.number,
                    step=self.taken.step,
                    mark=self.taken.mark,
                    is_loose=self.taken.is_loose,
                    layout=self.taken.layout,
                    buffer=self.buffer,
                    texts=texts,
                    etags=etags,
                    made_at=self.made_at,
                )
            return self._commit

    def cut_off(self) -> None:
        """End the answers that are being sent."""
        if self._commit is not None:
            self._commit.revoked = True
        for visitor in self.readers:
            visitor.cut()

    def sizes(self) -> dict[str, int]:
        return self.taken.layout.sizes() | {CONFIG_NAME: len(self.config)}


class AdapterVersions:
    """All versions of one adapter, which are called ``name``, ``-v`` and the step."""

    def __init__(
        self,
        name: str,
        source: Source,
        *,
        count: int,
        hold: float,
        live: LiveState | None = None,
        config: bytes = b"",
    ) -> None:
        """``count``: how many are held. ``config``: of an adapter that servers have, which do not say it."""
        self.name, self._parts = name, name.split("/")
        self._source, self._live, self._config = source, live, config
        self._count, self._hold = count, hold
        self._changed = threading.Condition()
        #: By their numbers, oldest first.
        self._held: dict[int, AdapterVersion] = {}
        #: The commits of all names that somebody has asked for: such a name never stands for other bytes.
        self._told: dict[int, str] = {}
        self._spare: list[Buffer] = []
        self._is_making = self._closed = self._has_warned = False
        self._failure: BaseException | None = None
        self._changes = 0
        if live is not None:
            self._make()

    # --------------------------------------------------------------------------------------------------- reading

    def name_of(self, number: int) -> str:
        return f"{self.name}-v{number}"

    def number_in(self, where: Sequence[str]) -> int | None:
        """The number of the version whose name a path begins with."""
        count = len(self._parts)
        if list(where[: count - 1]) != self._parts[:-1] or len(where) < count:
            return None
        last = where[count - 1]
        found = _SUFFIX.fullmatch(last.removeprefix(self._parts[-1])) if last.startswith(self._parts[-1]) else None
        return None if found is None else int(found[1])

    def sizes(self) -> dict[str, int]:
        """The names of all versions with the bytes of their files, newest first."""
        self._ask(None)
        with self._changed:
            return {one.name: sum(one.sizes().values()) for one in reversed(self._held.values())}

    def names(self) -> list[str]:
        """The names of all versions that are held, newest first."""
        with self._changed:
            return [one.name for one in reversed(self._held.values())]

    def has(self, number: int) -> bool:
        """Whether there is a version of this number. It stays for a while then: a client asks for its files next."""
        self._ask(number)
        with self._changed:
            found = self._held.get(number)
            if found is not None:
                found.asked_at = time.monotonic()
            return found is not None

    @contextmanager
    def reading(self, number: int, revision: str, visitor: Visitor) -> Iterator[Commit | None]:
        """The commit of a version, which stays as it is within this block. None if there is no such commit."""
        with self._changed:
            found = self._held.get(number)
            if found is not None:
                found.readers.add(visitor)
        if found is None:
            yield None
            return
        try:
            commit = found.commit()
            with self._changed:
                self._told[number] = commit.id
            yield commit if revision in (MAIN, commit.id) else None
        finally:
            with self._changed:
                found.readers.discard(visitor)
                found.asked_at = time.monotonic()
                if not found.is_held and not found.readers:
                    self._spare.append(found.buffer)

    def glance(self, number: int) -> tuple[dict[str, int], int | None]:
        with self._changed:
            found = self._held.get(number)
            if found is None:
                raise Unavailable(f"{self.name_of(number)} is not held any more")
            return found.sizes(), found.taken.step

    # ---------------------------------------------------------------------------------------------------- making

    @contextmanager
    def changing(self) -> Iterator[None]:
        """Change the state within this block. At its end, unless it raises, there is a version of the new step."""
        assert self._live is not None
        with self._live.changing():
            yield
        if self._live.changes == self._changes or self._closed:
            return  # A block within another one.
        self._changes = self._live.changes
        try:
            self._make()
        except Exception as error:
            said = f"{type(error).__name__}: {error}"
            logger.warning("the hub has no version of %s for this step: %s", self.name, said)

    def _ask(self, number: int | None) -> None:
        """Have servers' newest step as a version, unless the number is held already."""
        with self._changed:
            if self._live is not None or number in self._held:
                return
        until = time.monotonic() + HUB_COMMIT_WAIT_SECONDS
        try:
            mark = self._source.mark(HUB_COMMIT_WAIT_SECONDS)
        except NotTold:
            return  # What is held has to do.
        except Exception as error:
            raise Unavailable(f"{type(error).__name__}: {error}") from error
        with self._changed:
            self._check_open()
            if mark in self._held:
                return
            if not self._is_making:
                self._failure, self._is_making = None, True
                try:
                    threading.Thread(target=self._make_aside, name="transfuse-hub", daemon=True).start()
                except RuntimeError as error:  # The process may have no more threads.
                    self._is_making = False
                    raise Unavailable(f"the adapter cannot be copied: {error}") from error
            if not self._changed.wait_for(lambda: not self._is_making, until - time.monotonic()):
                raise Unavailable(f"the copy of {self.name} is being made: ask again")
            if self._failure is not None:
                raise Unavailable(f"{type(self._failure).__name__}: {self._failure}")

    def _make_aside(self) -> None:
        failure: BaseException | None = None
        try:
            self._make()
        except BaseException as error:
            failure = error.with_traceback(None)
            logger.warning("the hub could not copy %s: %s: %s", self.name, type(error).__name__, str(error))
        with self._changed:
            self._failure, self._is_making = failure, False
            self._changed.notify_all()

    def _make(self) -> None:
        """Copy the adapter as it is now, and hold that, unless its name has been given to other bytes."""
        with self._changed:
            buffer = self._spare.pop() if self._spare else Buffer()
        kept = False
        try:
            taken = self._source.take(buffer, self._check_open)
            config = self._config
            number = taken.step
            if self._live is not None:
                config = cast("dict[str, Any]", taken.state)[CONFIG_NAME]
                number = cast("tuple[int, bool]", taken.mark)[0] if number is None else number
            assert number is not None
            made = AdapterVersion(self.name_of(number), number, taken._replace(state=None), buffer, config)
            kept = self._may_hold(made)
        finally:
            with self._changed:
                if kept:
                    self._held[made.number] = made
                    self._trim()
                else:
                    self._spare.append(buffer)
                surplus = self._spare[1:]
                del self._spare[1:]
        for one in surplus:
            one.free()

    def _may_hold(self, made: AdapterVersion) -> bool:
        """Whether a version's name is new, or was given to the same bytes and is not held any more."""
        with self._changed:
            held, told = self._held.get(made.number), self._told.get(made.number)
        if held is None and told is None:
            return True
        if made.commit().id == (held.commit().id if held is not None else told):
            return held is None
        if not self._has_warned:
            self._has_warned = True
            logger.warning(
                "%s stands for other values already, and these have no name of their own: change the step together "
                "with the adapter, within mutating(), and give a run that repeats steps another name=",
                made.name,
            )
        return False

    def _trim(self) -> None:
        """Let go of old versions. Those in use stay, at most as many again; readers of others are cut off."""
        now = time.monotonic()
        old = list(self._held.values())[: -self._count]
        in_use = [one for one in old if one.readers or now - one.asked_at < self._hold]
        for one in old:
            if one in in_use[-self._count :]:
                continue
            del self._held[one.number]
            one.is_held = False
            one.cut_off()
            if not one.readers:
                self._spare.append(one.buffer)

    def _check_open(self) -> None:
        if self._closed:
            raise Unavailable("the hub was closed")

    def close(self) -> None:
        """Make no more versions."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def free(self, seconds: float) -> None:
        """After :meth:`close`, when nobody reads: wait ``seconds`` for a copy that is being made; free the memory."""
        with self._changed:
            self._changed.wait_for(lambda: not self._is_making, seconds)
            self._held.clear()
            self._spare.clear()
