"""Every error that this library raises, as one tree. The branches follow what a caller does next.

    TransfuseError
    ├── StateError            the state itself: change it or the target, then try again
    │   ├── UnsupportedLeaf       a leaf that cannot be carried exactly
    │   ├── TargetMismatch        source and target do not fit
    │   ├── StepMismatch          not the step that the receiver named
    │   ├── SourcesDiffer         several sources do not offer the same state
    │   ├── NotCovered            the sources together do not hold everything that the receiver needs
    │   ├── TornState             a send was asked for after a receive that left targets half-written
    │   └── LimitExceeded         a limit would be exceeded: one of transfuse's, or one of the process
    ├── PeerError             the other end or the way to it: repair the group, choose another source
    │   ├── PeerTimeout           no progress within the timeout (also a TimeoutError)
    │   ├── PeerLost              the connection broke (also a ConnectionError)
    │   ├── PeerRefused           the peer declined, and said why
    │   ├── PeerNotTrusted        with tls=: one end does not accept the other's certificate, or does not encrypt
    │   ├── ProtocolError         bytes that no honest peer of this version sends
    │   ├── CorruptData           digests were still wrong after every repair
    │   └── SourceMutated         the source's tensors changed while it sent them
    ├── SendFailed            a send to some receivers failed: a map from rank to cause
    └── ReceiveFailed         a receive from several sources failed: a map from rank to cause

An error of a receive names the ``received`` and the ``missing`` leaves and the ``torn`` targets. Its ``partial`` holds
what has arrived, for a later receive to resume from.
This module imports nothing of the package.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from contextlib import suppress
from traceback import walk_tb
from types import FrameType
from typing import Any

__all__ = [
    "CorruptData",
    "LimitExceeded",
    "NotCovered",
    "PeerError",
    "PeerLost",
    "PeerNotTrusted",
    "PeerRefused",
    "PeerTimeout",
    "ProtocolError",
    "ReceiveFailed",
    "SendFailed",
    "SourceMutated",
    "SourcesDiffer",
    "StateError",
    "StepMismatch",
    "TargetMismatch",
    "TornState",
    "TransfuseError",
    "UnsupportedLeaf",
]


class TransfuseError(Exception):
    """Root of the tree."""

    #: Paths of the target leaves that a failed in-place receive may have written to. Empty: no target was written to.
    torn: tuple[str, ...] = ()
    #: After a failed receive: paths of the leaves that have arrived whole and verified, and of those that have not.
    received: Sequence[str] = ()
    missing: Sequence[str] = ()
    #: What has arrived, for ``recv_checkpoint(…, resume=…)``. Not included when the error is pickled.
    partial: Any = None
    #: The :class:`Report` of the transfer that failed; None if none had begun. Not included when the error is pickled.
    report: Any = None

    def __str__(self) -> str:
        text = super().__str__()
        if self.received:
            text += f"\nreceived: {len(self.received)} leaves; missing: {some_of(self.missing)}"
        if self.torn:
            text += f"\ntorn: {len(self.torn)} target leaves may hold a mix of old and new values: {some_of(self.torn)}"
        return text

    def __reduce__(self) -> tuple[object, ...]:
        # Launchers and pools pickle errors. The default would call the constructor with the message alone, and fail.
        return _restore, (type(self), self.args, {**self.__dict__, "partial": None, "report": None})


def some_of(leaves: Sequence[str]) -> str:
    """The first ten paths, for an error message."""
    return f"{', '.join(leaves[:10])}{', …' if len(leaves) > 10 else ''}"


def _restore(cls: type[TransfuseError], args: tuple[object, ...], attributes: dict[str, object]) -> TransfuseError:
    error = cls.__new__(cls, *args)
    error.args = args
    error.__dict__.update(attributes)
    return error


class StateError(TransfuseError):
    """The state, or the target it should land in, cannot be used as it is."""


class UnsupportedLeaf(StateError):
    """A leaf that cannot be carried exactly. ``path`` names the leaf, the message says what to do."""

    def __init__(self, path: str, reason: str) -> None:
        self.path = path
        self.reason = reason
        shown = path if len(path) <= 400 else f"{path[:200]}…{path[-100:]}"
        super().__init__(f"leaf {shown or '<root>'}: {reason}")


class TargetMismatch(StateError):
    """What the source offers does not fit the target. Nothing has been written."""

    def __init__(
        self, mismatches: Sequence[str], *, intro: str = "source and target do not fit", advice: str = ""
    ) -> None:
        self.mismatches = tuple(mismatches)
        lines = "".join(f"\n  {line}" for line in self.mismatches[:100])
        more = f"\n  … and {len(self.mismatches) - 100} more" if len(self.mismatches) > 100 else ""
        remedy = f"\n{advice}" if advice else ""
        super().__init__(f"{intro} ({len(self.mismatches)} found, nothing was written):{lines}{more}{remedy}")


class StepMismatch(StateError):
    """The receiver asked for a step, and the source sends another step or does not say which."""


class SourcesDiffer(StateError):
    """Several sources offer different states. The message names the first difference."""


class NotCovered(StateError):
    """The sources together do not hold everything that the receiver needs. ``blocks`` lists what nobody holds."""

    def __init__(self, blocks: Sequence[str]) -> None:
        self.blocks = tuple(blocks)
        lines = "".join(f"\n  {line}" for line in self.blocks[:20])
        more = f"\n  … and {len(self.blocks) - 20} more" if len(self.blocks) > 20 else ""
        super().__init__(
            f"the sources do not hold everything that is needed here ({len(self.blocks)} blocks missing, nothing was "
            f"written); receive from the ranks that hold these too:{lines}{more}"
        )


class TornState(StateError):
    """The last receive of this transport failed and left ``leaves`` half-written, so this transport does not send."""

    def __init__(self, leaves: Sequence[str]) -> None:
        self.leaves = tuple(leaves)
        super().__init__(
            f"the last receive of this transport failed and left {len(self.leaves)} leaves half-written "
            f"({some_of(self.leaves)}): receive successfully before sending, or make a new PGTransport for another "
            "state"
        )


class LimitExceeded(StateError):
    """A configured limit, or a limit of the process, would be exceeded. The message names the limit."""


class PeerError(TransfuseError):
    """A problem with one peer. ``rank`` is the peer's rank within the process group."""

    def __init__(self, rank: int, message: str) -> None:
        self.rank = rank
        super().__init__(message)


#: What the other rank may not have called, if nothing is heard of it in one of these phases.
_EXPECTED_CALLS = {
    "waiting for the offer": "send_checkpoint() for this rank, or serve",
    "waiting for its offer": "send_checkpoint() for this rank, or serve",
    "waiting for the receiver": "recv_checkpoint() from this rank, or fetch",
    "sending the offer": "recv_checkpoint() from this rank, or fetch",
    "waiting for the want": "recv_checkpoint() from this rank, or fetch",
    "healing": "heal()",
    "joining the keepers": "keep()",
    "restoring": "restore()",
    "looking at what is kept": "look()",
}


class PeerTimeout(PeerError, TimeoutError):
    """The peer made no progress within the timeout."""

    def __init__(self, rank: int, phase: str, seconds: float) -> None:
        self.phase = phase
        self.seconds = seconds
        call = _EXPECTED_CALLS.get(phase)
        advice = ("" if call is None else f"does rank {rank} call {call}? ") + "is timeout= long enough?"
        super().__init__(rank, f"rank {rank} timed out: no progress for {seconds:.1f} s while {phase}; {advice}")


class PeerLost(PeerError, ConnectionError):
    """The connection to the peer broke."""


class PeerRefused(PeerError):
    """The peer declined or cancelled the transfer. ``kind`` is its error's class name, ``cause`` its message."""

    def __init__(self, rank: int, kind: str, cause: str, *, name: str | None = None) -> None:
        self.kind = kind
        self.cause = cause
        super().__init__(rank, f"{name or f'rank {rank}'} refused: {kind}: {cause}")


class PeerNotTrusted(PeerError):
    """With ``tls=``: one of the two ends does not accept the other's certificate, or only one of them encrypts."""


class ProtocolError(PeerError):
    """The peer sent bytes that no honest peer of this version sends."""


class CorruptData(PeerError):
    """Parcels arrived with wrong digests, also after every repair. ``leaves`` names the leaves they belong to."""

    def __init__(self, rank: int, leaves: Sequence[str], message: str) -> None:
        self.leaves = tuple(leaves)
        super().__init__(rank, message)


class SourceMutated(PeerError):
    """The source's tensors were changed before ``send_checkpoint`` returned. ``leaves`` names the changed leaves."""

    def __init__(self, rank: int, leaves: Sequence[str], message: str) -> None:
        self.leaves = tuple(leaves)
        super().__init__(rank, message)


class SendFailed(TransfuseError):
    """A send failed for some receivers; all other receivers have everything. ``causes`` maps rank to error."""

    def __init__(self, causes: Mapping[int, BaseException], completed: Sequence[int]) -> None:
        self.causes = dict(causes)
        self.completed = tuple(completed)
        lines = "".join(f"\n  rank {rank}: {type(e).__name__}: {e}" for rank, e in sorted(self.causes.items()))
        done = f"; complete for {list(self.completed)}" if self.completed else ""
        super().__init__(f"send failed for {len(self.causes)} receiver(s){done}:{lines}")


class ReceiveFailed(TransfuseError):
    """A receive from several sources failed: nobody left holds what is missing. ``causes`` maps ranks to errors."""

    def __init__(self, causes: Mapping[int, BaseException], *, alone: bool = False) -> None:
        self.causes = dict(causes)
        lines = "".join(f"\n  rank {rank}: {type(e).__name__}: {e}" for rank, e in sorted(self.causes.items()))
        lost = f"only {sorted(self.causes)} held some of what is missing" if alone else "no source is left"
        super().__init__(f"{lost}:{lines}" if alone else f"{lost} of {sorted(self.causes)}:{lines}")


def as_utf8(text: str) -> str:
    """Text with a backslash escape for what UTF-8 cannot hold: an error may quote a file name or a hostile peer."""
    return text.encode("utf-8", "backslashreplace").decode()


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
