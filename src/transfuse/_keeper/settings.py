"""The arguments of ``keep()``, checked."""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from transfuse import _arguments
from transfuse._keeper import runs
from transfuse._keeper.bundles import IsShared
from transfuse._keeper.commits import CommitReport
from transfuse._options import FetchKeywords


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What a worker has given to ``keep()``."""

    state_dict: Callable[[], object] | None
    load: Callable[[Any], object] | None
    own: Callable[[], object] | None
    load_own: Callable[[Any], object] | None
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
    digests: bool
    timeout: timedelta
    on_report: Callable[[CommitReport], object] | None
    options: FetchKeywords


def at_least(name: str, value: object, least: int) -> int:
    number = _arguments.whole(name, value)
    if number < least:
        raise ValueError(f"{name} must be at least {least}, got {number}")
    return number


def own_of(own: Any) -> Callable[[], object] | None:
    if own is None or callable(own):
        return own  # type: ignore[no-any-return]
    if callable(getattr(own, "state_dict", None)):
        return own.state_dict  # type: ignore[no-any-return]
    raise TypeError(f"own= takes a callable, or an object with state_dict(), got {type(own).__name__}")


def is_shared(shared: object) -> IsShared:
    if isinstance(shared, bool):
        return lambda path: shared
    if callable(shared):
        return lambda path: bool(shared(path))
    patterns = [shared] if isinstance(shared, str) else shared
    if isinstance(patterns, Sequence) and all(isinstance(pattern, str) for pattern in patterns):
        return lambda path: any(fnmatch.fnmatchcase(path, pattern) for pattern in patterns)
    raise TypeError(f"shared= takes a bool, patterns, or a callable that gets a path, got {type(shared).__name__}")
