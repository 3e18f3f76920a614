"""What an error holds: each frame of its traceback keeps what its function worked on."""

from __future__ import annotations

import inspect
from contextlib import suppress
from traceback import walk_tb
from types import FrameType

__all__ = ["let_go"]


def let_go(error: BaseException) -> None:
    """Empty the frames of this package in an error's traceback, and in those of the errors behind it.

    They hold tensors, sockets and the keeper's memory, and often a name for the error itself: a cycle, which only the
    garbage collector would end. Frames of the caller and of its callbacks stay as they are, for debuggers.
    """
    errors: list[BaseException | None] = [error]
    seen: set[int] = set()
    while errors:
        one = errors.pop()
        if one is None or id(one) in seen:
            continue
        seen.add(id(one))
        errors += [one.__cause__, one.__context__]
        for passed, _ in walk_tb(one.__traceback__):
            frame: FrameType | None = passed
            # A frame keeps the one that called it, and the error may have come another way since.
            while frame is not None and id(frame) not in seen:
                seen.add(id(frame))
                if _is_ours(frame):
                    with suppress(RuntimeError):  # It still runs.
                        frame.clear()
                frame = frame.f_back


def _is_ours(frame: FrameType) -> bool:
    # A generator that caught the error may wait for its next turn: to clear its frame would end it.
    is_generator = frame.f_code.co_flags & inspect.CO_GENERATOR
    return not is_generator and str(frame.f_globals.get("__name__", "")).startswith("transfuse.")
