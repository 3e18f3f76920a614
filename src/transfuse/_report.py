"""The report of a transfer: what moved, by which route, how long it took, and what failed; and a step that has one."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict, dataclass, field
from typing import Any, Self

import torch
from torch.autograd import profiler

from transfuse._errors import as_utf8
from transfuse._phases import CARRYING, Direction, Phase, trace_name
from transfuse._sizes import human_bytes

#: The most characters of an error in a log line or a table. The whole text is in ``error`` and ``failed``.
MOST_LETTERS = 200
#: With more peers than this, the title gives their number instead of their ranks.
MOST_PEERS = 8

#: Guards the numbers of a report: the conversations with several peers update one report. Reentrant, because a phase
#: that an interrupt has cut off is left when its memory is freed, which may be while the numbers are counted.
_counting = threading.RLock()


class _Clock:
    """Splits the time of a call among its phases. Each moment counts once, in equal parts for threads in a phase."""

    def __init__(self, phases: dict[str, float]) -> None:
        self._phases = phases
        #: For each thread that is in a phase: that phase, and those around it.
        self._inside: dict[int, list[Phase]] = {}
        self._counted = time.perf_counter()
        #: Seconds in which some thread moved bytes.
        self.moving = 0.0

    def enter(self, phase: Phase) -> int:
        """Enter a phase. Returns this thread's number, for ``leave``."""
        thread = threading.get_ident()
        with _counting:
            self._count()
            self._phases.setdefault(phase.label, 0.0)
            self._inside.setdefault(thread, []).append(phase)
        return thread

    def leave(self, thread: int) -> None:
        """Leave the thread's present phase. If an interrupt has cut the phase off, another thread may do that."""
        with _counting:
            self._count()
            inside = self._inside[thread]
            inside.pop()
            if not inside:
                del self._inside[thread]

    def _count(self) -> None:
        now = time.perf_counter()
        passed, self._counted = now - self._counted, now
        current = [phases[-1] for phases in self._inside.values()]
        for phase in current:
            self._phases[phase.label] += passed / len(current)
        if not CARRYING.isdisjoint(current):
            self.moving += passed


def trace_range(name: str) -> AbstractContextManager[object]:
    """A range in a profiler's trace; nothing if no profiler runs in this process."""
    return profiler.record_function(name) if profiler._is_profiler_enabled else nullcontext()


@dataclass(frozen=True)
class Version:
    """Which state that is: its step, and the digest of its content. ``str()`` is short: ``step 7 (3f2a91c0…)``.

    Equal content has the same digest at the source, at every receiver and after a restart. The digest is XXH3-128 of
    names, shapes, dtypes, shards, values and bytes: it finds mistakes and damage, not forgery.
    """

    step: int | None
    #: 32 hexadecimal digits; None if nobody has asked for it since the state was changed.
    digest: str | None = None

    def __str__(self) -> str:
        step = "no step" if self.step is None else f"step {self.step}"
        return step if self.digest is None else f"{step} ({self.digest[:8]}…)"


@dataclass
class Report:
    """Numbers of one ``send_checkpoint`` or ``recv_checkpoint``. ``print(report)`` shows a small table."""

    direction: Direction
    peers: tuple[int, ...]
    step: int | None = None
    #: What the sources said of their state: its step and, if it was known or asked for, the digest of its content.
    version: Version | None = None
    #: "group", or the name of a route such as "memory", or several joined by a plus; empty if nothing moved.
    route: str = ""
    leaves: int = 0
    #: Payload that moved, without descriptions and records. For a send: the sum over all receivers.
    bytes: int = 0
    #: How many of ``bytes`` were read straight from the source's memory.
    read_bytes: int = 0
    #: How many of ``bytes`` other receivers passed on.
    relayed_bytes: int = 0
    #: For a receive: how many of ``bytes`` each source brought.
    by_source: dict[int, int] = field(default_factory=dict)
    #: Bytes that a receive with ``delta`` or ``resume`` had already.
    kept_bytes: int = 0
    #: How many of ``bytes`` were patches: positions and values of what has changed since the source last gave it out.
    patch_bytes: int = 0
    #: For a receive: bytes of the parcels that such patches have brought up to date.
    patched_bytes: int = 0
    #: For a send with ``history``: bytes of the copy of what was given out.
    history_bytes: int = 0
    #: How many bytes lay aside until they were installed: with ``atomic`` or ``wait=False``.
    held_bytes: int = 0
    #: How long ``Pending.install()`` took.
    install_seconds: float = 0.0
    parcels: int = 0
    #: How many connections brought parcels. For a send: the most to one receiver.
    connections: int = 1
    #: What was made for an earlier transfer and used again: "description", "plan", "parcels".
    reused: tuple[str, ...] = ()
    #: Parcels that were sent again because their digest was wrong.
    repaired: int = 0
    #: After a failed receive: paths of the target leaves that may hold new bytes.
    torn: tuple[str, ...] = ()
    #: Whether digests were compared.
    verified: bool = False
    seconds: float = 0.0
    #: How many of ``seconds`` some thread of this end spent with sending, receiving or reading parcels.
    moving_seconds: float = 0.0
    #: Seconds by phase (:class:`transfuse._phases.Phase`), in the order in which the phases began. Each moment counts
    #: once: while the conversations with several peers are in different phases, each phase gets its part.
    phases: dict[str, float] = field(default_factory=dict)
    #: The error that the call raised, as class and message. None: the call succeeded.
    error: str | None = None
    #: The peers with which the transfer failed, and why: receivers that do not have the state, or sources that were
    #: lost or not used. A receive that did not need those sources succeeds all the same.
    failed: dict[int, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._clock = _Clock(self.phases)

    @property
    def bytes_per_second(self) -> float:
        """The rate while bytes moved. 0 if nobody knows it here: receivers that read a source's memory do so alone."""
        is_known = self.moving_seconds and not (self.direction == "send" and self.read_bytes)
        return self.bytes / self.moving_seconds if is_known else 0.0

    @property
    def other_seconds(self) -> float:
        """How many of ``seconds`` belong to no phase."""
        return max(self.seconds - sum(self.phases.values()), 0.0)

    def part(self, rank: int) -> Report:
        """A report of the conversation with one of the peers. Its phases count in this report."""
        part = Report(self.direction, (rank,))
        part.phases, part._clock = self.phases, self._clock
        return part

    def end(self, seconds: float) -> None:
        """Set the time that the call took."""
        self.seconds, self.moving_seconds = seconds, self._clock.moving

    @property
    def duration(self) -> str:
        """The time, and the rate if it is known."""
        rate = self.bytes_per_second
        return f"{self.seconds:.3f} s" + (f" ({human_bytes(rate)}/s while bytes moved)" if rate else "")

    def count(self, source: int, nbytes: int, parcels: int, route: str) -> None:
        """Count parcels that a source has brought."""
        with _counting:
            self.bytes += nbytes
            self.parcels += parcels
            self.by_source[source] = self.by_source.get(source, 0) + nbytes
            if self.route != route:
                self.route = routes_of(self.route, route)

    def patch(self, source: int, nbytes: int, patched_bytes: int, parcels: int) -> None:
        """Count patches that a source has brought, and the bytes of the parcels that they are for."""
        with _counting:
            self.count(source, nbytes, parcels, "group")
            self.patch_bytes += nbytes
            self.patched_bytes += patched_bytes
            self.verified = self.verified or self.bytes == self.patch_bytes

    def reuse(self, what: str) -> None:
        """Record that something made for an earlier transfer was used again."""
        with _counting:
            if what not in self.reused:
                self.reused = (*self.reused, what)

    @property
    def title(self) -> str:
        """The direction and the peers, for example ``send to 1, 2``."""
        peers = ", ".join(map(str, self.peers)) if len(self.peers) <= MOST_PEERS else f"{len(self.peers)} ranks"
        return f"{self.direction} {'to' if self.direction == 'send' else 'from'} {peers}"

    @contextmanager
    def phase(self, phase: Phase) -> Iterator[None]:
        """Add the time of this block to a phase, and show it as a range in a profiler's trace."""
        thread = self._clock.enter(phase)
        try:
            with trace_range(trace_name(self.direction, phase)):
                yield
        finally:
            self._clock.leave(thread)

    @property
    def outcome(self) -> str:
        """ "complete", "failed", or "without_some": a receive that could do without some of its sources."""
        if self.error is not None:
            return "failed"
        return "without_some" if self.failed else "complete"

    def event(self) -> tuple[str, dict[str, int | float | str]]:
        """The name and the data of an event for ``torch.monitor``."""
        return "transfuse.transfer", {
            "direction": self.direction,
            "outcome": self.outcome,
            "error": _brief(self.error or ""),
            "peers": len(self.peers),
            "lost_peers": len(self.failed),
            **({} if self.step is None else {"step": self.step}),
            "route": self.route,
            "leaves": self.leaves,
            "bytes": self.bytes,
            "kept_bytes": self.kept_bytes,
            "parcels": self.parcels,
            "repaired": self.repaired,
            "seconds": self.seconds,
            "moving_seconds": self.moving_seconds,
        }

    def to_dict(self) -> dict[str, Any]:
        """Everything, in types that JSON has. ``json.dumps`` turns the keys that are ranks into strings."""
        return {**asdict(self), "bytes_per_second": self.bytes_per_second}

    def line(self) -> str:
        """The report in one line, for the log."""
        step = "any step" if self.step is None else f"step {self.step}"
        route = f" by {self.route}" if self.route else ""
        text = (
            f"{self.title}, {step}: {human_bytes(self.bytes)}{route} in {self.duration}, {self.leaves} leaves, "
            f"{self.repaired} parcels repaired, {human_bytes(self.kept_bytes)} kept"
        )
        if self.error is not None:
            return f"{text}; failed: {_brief(self.error)}"
        return f"{text}; without {', '.join(map(str, self.failed))}" if self.failed else text

    def rows(self) -> list[tuple[str, str]]:
        """The report as rows of a table."""
        verified = "digests compared" if self.verified else "not compared"
        return [
            ("transfer", self.title),
            *((("failed", _brief(self.error)),) if self.error is not None else ()),
            *((f"  without {rank}", _brief(cause)) for rank, cause in self.failed.items() if len(self.peers) > 1),
            ("step", "any" if self.step is None else str(self.step)),
            *((("content", self.version.digest),) if self.version is not None and self.version.digest else ()),
            ("route", self.route or "nothing moved"),
            ("leaves", f"{self.leaves:,}"),
            ("payload", f"{human_bytes(self.bytes)} in {self.parcels:,} parcels"),
            *(
                (f"  from {source}", human_bytes(nbytes))
                for source, nbytes in sorted(self.by_source.items())
                if len(self.peers) > 1
            ),
            *((("  relayed", human_bytes(self.relayed_bytes)),) if self.relayed_bytes else ()),
            *((("kept", human_bytes(self.kept_bytes)),) if self.kept_bytes else ()),
            *(
                (("sparse", f"{human_bytes(self.patched_bytes)} by {human_bytes(self.patch_bytes)} of patches"),)
                if self.patched_bytes
                else ()
            ),
            *((("history", human_bytes(self.history_bytes)),) if self.history_bytes else ()),
            *((("held", human_bytes(self.held_bytes)),) if self.held_bytes else ()),
            *((("used again", ", ".join(self.reused)),) if self.reused else ()),
            ("integrity", f"{verified}, {self.repaired} parcels repaired"),
            *((("torn", f"{len(self.torn):,} leaves: {_brief(', '.join(self.torn))}"),) if self.torn else ()),
            ("time", self.duration),
            *((f"  {name}", f"{seconds:.3f} s") for name, seconds in self.phases.items()),
            *((("  other", f"{self.other_seconds:.3f} s"),) if self.phases else ()),
        ]

    def __str__(self) -> str:
        rows = self.rows()
        width = max(len(name) for name, _ in rows)
        return "\n".join(f"{name:<{width}}  {value}" for name, value in rows)


class Step(int):
    """A step that a state is at, with the report of the transfer that brought it: None if nothing had to move.

    In a state, and in a pickle, it is the int that it is.
    """

    report: Report | None

    def __new__(cls, step: int, report: Report | None = None) -> Self:
        made = super().__new__(cls, step)
        made.report = report
        return made

    @property
    def version(self) -> Version:
        """Which state that is. The digest is None if nothing had to move, or if the sources did not know it."""
        known = None if self.report is None else self.report.version
        return Version(int(self), None if known is None else known.digest)

    def __reduce__(self) -> tuple[type[int], tuple[int]]:
        return int, (int(self),)


# So ``torch.load`` needs no option for a file that a Step was saved in. Calling int() runs nothing of the file's.
torch.serialization.add_safe_globals([int])


def routes_of(*routes: str) -> str:
    """All of these routes, joined by a plus. Each argument is one route, or several joined already."""
    return "+".join(sorted({name for route in routes for name in route.split("+")} - {""}, reverse=True))


def said(error: BaseException) -> str:
    """An error as a report holds it: class and message, safe for UTF-8 logs and files."""
    text = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
    return as_utf8(text)


def failed_with(failed: Mapping[int, BaseException]) -> dict[int, str]:
    """Errors by rank, as a report holds them."""
    return {rank: said(failed[rank]) for rank in sorted(failed)}


def _brief(text: str) -> str:
    """Text in one line, shortened to ``MOST_LETTERS``."""
    text = " ".join(text.split())
    return text if len(text) <= MOST_LETTERS else f"{text[:MOST_LETTERS]}…"
