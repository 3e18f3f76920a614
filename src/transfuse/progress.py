"""Progress: numbers that conversations keep and the calling thread shows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType
from typing import Any

__all__ = ["Bar", "Progress", "Show", "show_with"]


@dataclass
class Progress:
    """How far one conversation is. Written by its thread, read by the caller's."""

    #: None until the plan is known.
    total_bytes: int | None = None
    bytes: int = 0
    phase: str = "starting"


#: What is called with all conversations' progress, by rank, from the calling thread, at least every 100 ms.
Show = Callable[[dict[int, Progress]], object]


class Bar:
    """A tqdm bar over all conversations."""

    def __init__(self, label: str) -> None:
        from tqdm.auto import tqdm

        self._tqdm: Any = tqdm(total=0, unit="B", unit_scale=True, unit_divisor=1024, desc=label, leave=True)

    def __call__(self, progress: dict[int, Progress]) -> None:
        self._tqdm.total = sum(p.total_bytes or 0 for p in progress.values())
        self._tqdm.update(sum(p.bytes for p in progress.values()) - self._tqdm.n)

    def __enter__(self) -> Bar:
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        self._tqdm.close()


class _Plain:
    """A callable of the user's, or nothing, in the shape of a bar."""

    def __init__(self, show: Show | None) -> None:
        self._show = show

    def __call__(self, progress: dict[int, Progress]) -> None:
        if self._show is not None:
            self._show(progress)

    def __enter__(self) -> _Plain:
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        pass


def show_with(option: bool | Show, label: str) -> Bar | _Plain:
    """What the ``progress=`` option asks for."""
    if option is True:
        return Bar(label)
    return _Plain(None if option is False else option)
