"""The arguments of ``keep()``, checked."""

from __future__ import annotations

import fnmatch
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

from transfuse._arguments import Given, alone, at_least, check_callable, check_choices, seconds_of
from transfuse._job.state import State
from transfuse._keeper import runs
from transfuse._keeper.bundles import IsShared
from transfuse._keeper.commits import CommitReport
from transfuse._keeper.frames import Saves
from transfuse._options import FetchKeywords


@dataclass(frozen=True, kw_only=True)
class KeepSettings(Given):
    """The arguments of ``keep()``."""

    state: State | None
    rank_state: RankState
    load: Callable[[Any], object] | None
    load_rank_state: Annotated[Callable[[Any], object] | None, check_callable]
    shared: Annotated[IsShared, alone(is_shared)]
    run: Annotated[runs.Run, alone(runs.find_run)]
    group: Any
    every: Annotated[int, at_least(1)]
    slots: Annotated[int | None, at_least(2, or_none=True)]
    replicas: Annotated[int, at_least(0)]
    max_bytes: Annotated[int | None, at_least(1, or_none=True)]
    reserve: Annotated[int | None, at_least(1, or_none=True)]
    max_bytes_per_second: float | None
    directory: Annotated[str | None, directory_of]
    save_every: Annotated[int | None, at_least(1, or_none=True)]
    keep_saved: Annotated[int, at_least(1)]
    linger: Annotated[float, seconds_of]
    timeout: Annotated[float, seconds_of]
    on_report: Annotated[Callable[[CommitReport], object] | None, check_callable]
    options: FetchKeywords

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choices(verify=self.options.get("verify"))
        if self.save_every is not None and self.directory is None:
            raise ValueError("save_every= says which steps are saved, and directory= where: give that, too")
        if self.save_every is not None and self.slots is not None and self.slots < 3:
            why = "one of them stays until it is saved"
            raise ValueError(f"slots= must be at least 3 with save_every=, got {self.slots}: {why}")
        state = None if self.state is None else State.of(self.state, self.load)
        vars(self).update(state=state, rank_state=RankState(self.rank_state, self.load_rank_state, state))

    @property
    def saves(self) -> Saves | None:
        """Where steps are on storage."""
        if self.directory is None:
            return None
        return Saves(self.directory, self.save_every, self.keep_saved, self.timeout)

    @property
    def digests(self) -> bool:
        """Whether each commit is hashed."""
        return self.options.get("verify") is not False


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


def directory_of(name: str, value: object) -> str | None:
    """A path from the root, since the keeper has another working directory; or a URL."""
    if value is None:
        return None
    if not isinstance(value, str | os.PathLike) or not isinstance(path := os.fspath(value), str):
        raise TypeError(f"{name} takes a path, or a URL of fsspec, got a {type(value).__name__}")
    if not path:
        raise ValueError(f"{name} is empty: give a path, or leave it out")
    return path if "://" in path else os.path.abspath(path)


def is_shared(shared: object) -> IsShared:
    if isinstance(shared, bool):
        return lambda path: shared
    if callable(shared):
        return lambda path: bool(shared(path))
    patterns = [shared] if isinstance(shared, str) else shared
    if isinstance(patterns, Sequence) and all(isinstance(pattern, str) for pattern in patterns):
        return lambda path: any(fnmatch.fnmatchcase(path, pattern) for pattern in patterns)
    raise TypeError(f"shared= takes a bool, patterns, or a callable that gets a path, got {type(shared).__name__}")
