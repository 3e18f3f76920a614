"""The arguments of ``keep()``, checked."""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from transfuse import _arguments
from transfuse._job.state import State
from transfuse._keeper import runs
from transfuse._keeper.bundles import IsShared
from transfuse._keeper.commits import CommitReport
from transfuse._options import FetchKeywords


@dataclass(frozen=True, kw_only=True)
class KeepSettings:
    """What a worker has given to ``keep()``."""

    state: State | None
    rank_state: RankState
    is_shared: IsShared
    run: runs.Run
    group: Any
    every: int
    slots: int | None
    replicas: int
    max_bytes: int | None
    reserve: int | None
    rate: float | None
    linger: float
    #: Whether each commit is hashed.
    digests: bool
    timeout: timedelta
    on_report: Callable[[CommitReport], object] | None
    options: FetchKeywords


def at_least(name: str, value: object, least: int) -> int:
    number = _arguments.whole(name, value)
    if number < least:
        raise ValueError(f"{name} must be at least {least}, got {number}")
    return number


class RankState:
    """What belongs to a rank alone: what ``rank_state=`` gives, and the objects of the state itself that say so."""

    #: The two parts, if there are both.
    GIVEN, IN_STATE = "rank_state", "in the state"

    def __init__(self, given: object, load: Callable[[Any], object] | None, state: State | None) -> None:
        self._given = None if given is None else State.of(given)
        self._load, self._state = load, state

    def tree(self) -> Any:
        """What to commit; None if there is nothing."""
        given = None if self._given is None else self._given.whole_tree()
        found = {} if self._state is None else self._state.rank_tree()
        return {self.GIVEN: given, self.IN_STATE: found} if found else given

    def load(self, arrived: Any) -> None:
        """Give what has been restored to the objects."""
        if isinstance(arrived, dict) and arrived.keys() == {self.GIVEN, self.IN_STATE}:
            if self._state is not None:
                self._state.load_rank_tree(arrived[self.IN_STATE])
            arrived = arrived[self.GIVEN]
        if self._load is not None:
            self._load(arrived)
        elif self._given is not None and arrived is not None:
            self._given.load_all(arrived)


def is_shared(shared: object) -> IsShared:
    if isinstance(shared, bool):
        return lambda path: shared
    if callable(shared):
        return lambda path: bool(shared(path))
    patterns = [shared] if isinstance(shared, str) else shared
    if isinstance(patterns, Sequence) and all(isinstance(pattern, str) for pattern in patterns):
        return lambda path: any(fnmatch.fnmatchcase(path, pattern) for pattern in patterns)
    raise TypeError(f"shared= takes a bool, patterns, or a callable that gets a path, got {type(shared).__name__}")
