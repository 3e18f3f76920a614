"""A Ctrl-C at a chosen moment: KeyboardInterrupt at the k-th place at which CPython would raise it in this thread.

CPython looks for signals when a function is entered, when a call of C code has returned, and when a loop goes back. All
such places within a ``with`` block are counted, in the code of transfuse and of the modules of the standard library
that it stands on (contexts, threads, queues).
"""

from __future__ import annotations

import contextlib
import dis
import functools
import os
import queue
import sys
import threading
import weakref
from collections.abc import Iterator
from types import CodeType, FrameType
from typing import Any

import transfuse

_ROOMS = os.path.dirname(transfuse.__file__) + os.sep
_STANDARD = {module.__file__ for module in (contextlib, threading, queue)}
#: A call is not guarded before its first line: an interrupt there is one before the call.
TRANSFER = ("transport.py", "send_checkpoint", "send", "recv_checkpoint", "receive")
HEAL = ("_heal.py", "run")
_LOOKS = {dis.opmap["CALL"], dis.opmap["CALL_FUNCTION_EX"], dis.opmap["JUMP_BACKWARD"]}


@functools.cache
def _counts(code: CodeType) -> bool:
    name = code.co_filename
    return name in _STANDARD or (name.startswith(_ROOMS) and not name.startswith(os.path.join(_ROOMS, "testing")))


@functools.cache
def _bytes_of(code: CodeType) -> bytes:
    return code.co_code


@functools.cache
def _handler(code: CodeType, at: int) -> int:
    """Where an exception at this instruction goes on; -1: out of the function."""
    parse: Any = dis._parse_exception_table  # type: ignore[attr-defined]
    return next((entry.target for entry in parse(code) if entry.start <= at < entry.end), -1)


def _is_finalizer(frame: FrameType) -> bool:
    """Whether Python runs this because an object was freed: there an exception ends nothing, and is only printed."""
    return frame.f_back is not None and frame.f_back.f_code.co_filename == weakref.__file__


def _is_a_backends_call(frame: FrameType) -> bool:
    """Whether this posts an operation. An interrupt between the backend's return and the next instruction loses what
    the backend returned, and nothing in Python can guard that moment."""
    return frame.f_code.co_name == "<lambda>" and frame.f_code.co_filename.endswith("operations.py")


class Interrupt:
    """Counts places within a call, and raises at one of them. The call is named by its file and its functions."""

    def __init__(self, at: int | None = None, call: tuple[str, ...] = TRANSFER) -> None:
        self._at = at
        self._file, *self._entrances = call
        self.count = 0
        #: Where the interrupt was raised; empty: it was not.
        self.where = ""
        self._inside = False
        self._last: dict[FrameType, int] = {}

    def _pass(self, frame: FrameType) -> None:
        if self.where:
            return
        self.count += 1
        if self._at is not None and self.count >= self._at and not _is_a_backends_call(frame):
            self.where = f"{frame.f_code.co_filename}:{frame.f_lineno} {frame.f_code.co_name}"
            raise KeyboardInterrupt(f"at place {self._at}")

    def _enter(self, frame: FrameType, event: str, _: Any) -> Any:
        if frame.f_back in self._last:
            self._last[frame.f_back] = -1  # It calls Python: CPython looks at the entry, not at the return.
        code = frame.f_code
        if self.where or not _counts(code) or _is_finalizer(frame):
            return None
        if code.co_name in self._entrances and code.co_filename.endswith(self._file):
            self._inside = True
        elif not self._inside:
            return None
        else:
            self._pass(frame)
        frame.f_trace_lines, frame.f_trace_opcodes = False, True
        self._last[frame] = -1
        return self._step

    def _step(self, frame: FrameType, event: str, _: Any) -> Any:
        if event == "return":
            self._last.pop(frame, None)
        elif event == "opcode":
            before, now, code = self._last.get(frame, -1), frame.f_lasti, frame.f_code
            self._last[frame] = now
            if before >= 0 and _bytes_of(code)[before] in _LOOKS and _handler(code, before) == _handler(code, now):
                self._pass(frame)
        return self._step

    @contextlib.contextmanager
    def armed(self) -> Iterator[None]:
        sys.settrace(self._enter)
        try:
            yield
        finally:
            sys.settrace(None)
            self._last.clear()
