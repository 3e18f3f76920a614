"""A call that was interrupted anywhere is no longer under way."""

from __future__ import annotations

import sys
from types import FrameType
from typing import Any

import pytest

from transfuse._errors import TransfuseError
from transfuse._keeper.one_call import OneCall


class _Interrupt(Exception):
    pass


def _interrupted(calls: OneCall, at: int) -> BaseException | None:
    """Run a call, and raise in it at the n-th function that begins, as a signal handler can."""
    begun = 0

    def trace(frame: FrameType, event: str, argument: Any) -> None:
        nonlocal begun
        if event == "call":
            begun += 1
            if begun == at:
                raise _Interrupt

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        calls.run("commit", lambda: "done")
    except _Interrupt as interrupt:
        return interrupt
    finally:
        sys.settrace(before)
    return None


def test_an_error_that_is_kept_does_not_keep_the_call_under_way() -> None:
    calls = OneCall()
    kept = []
    for at in range(1, 100):
        error = _interrupted(calls, at)
        if error is None:
            break
        kept.append(error)
        assert calls.run("restore", lambda: "done") == "done"
    assert len(kept) >= 2


def test_one_inside_another_is_refused() -> None:
    calls = OneCall()
    with pytest.raises(TransfuseError, match=r"look\(\) was called while commit\(\) is under way"):
        calls.run("commit", lambda: calls.run("look", lambda: None))
    assert calls.run("look", lambda: 1) == 1
