"""What happened in a transfer."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

__all__ = ["Report", "human_bytes"]


def human_bytes(count: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(count) < 1024 or unit == "GiB":
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    raise AssertionError


#: Conversations with several sources count in one report.
_counting = threading.Lock()


@dataclass
class Report:
    """Numbers of one ``send_checkpoint`` or ``recv_checkpoint``. ``print(report)`` shows a small table."""

    direction: Literal["send", "receive"]
    peers: tuple[int, ...]
    step: int | None = None
    #: "memory", "group", or both joined by a plus; empty if nothing moved.
    route: str = ""
    leaves: int = 0
    #: Payload that moved, without description and records; for a send, summed over receivers.
    bytes: int = 0
    #: Of these, read straight from the source's memory.
    read_bytes: int = 0
    #: Of these, passed on by other receivers.
    relayed_bytes: int = 0
    #: For a receive, how much of it each source brought.
    by_source: dict[int, int] = field(default_factory=dict)
    #: What a resumed receive had already.
    kept_bytes: int = 0
    parcels: int = 0
    #: Parcels that were sent again because their digest was wrong.
    repaired: int = 0
    #: After a failed receive, paths of the target leaves that may hold new bytes.
    torn: tuple[str, ...] = ()
    #: Whether digests were compared.
    verified: bool = False
    seconds: float = 0.0
    #: Seconds by phase, in the order in which they happened. For a send, of the slowest receiver; for a receive from
    #: several sources, of all of them together.
    phases: dict[str, float] = field(default_factory=dict)

    @property
    def bytes_per_second(self) -> float:
        return self.bytes / self.seconds if self.seconds else 0.0

    def count(self, source: int, nbytes: int, parcels: int, route: str) -> None:
        """A source has brought parcels."""
        with _counting:
            self.bytes += nbytes
            self.parcels += parcels
            self.by_source[source] = self.by_source.get(source, 0) + nbytes
            self.route = "+".join(sorted({*self.route.split("+"), route} - {""}, reverse=True))

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        started = time.perf_counter()
        try:
            yield
        finally:
            with _counting:
                self.phases[name] = self.phases.get(name, 0.0) + time.perf_counter() - started

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "bytes_per_second": self.bytes_per_second}

    def rows(self) -> list[tuple[str, str]]:
        """The report as rows of a table."""
        verified = "digests compared" if self.verified else "not compared"
        return [
            ("direction", f"{self.direction} {'to' if self.direction == 'send' else 'from'} {list(self.peers)}"),
            ("step", "any" if self.step is None else str(self.step)),
            ("route", self.route or "nothing moved"),
            ("leaves", f"{self.leaves:,}"),
            ("payload", f"{human_bytes(self.bytes)} in {self.parcels:,} parcels"),
            *(
                (f"  from {source}", human_bytes(nbytes))
                for source, nbytes in sorted(self.by_source.items())
                if len(self.peers) > 1
            ),
            *((("kept", human_bytes(self.kept_bytes)),) if self.kept_bytes else ()),
            ("integrity", f"{verified}, {self.repaired} parcels repaired"),
            ("time", f"{self.seconds:.3f} s ({human_bytes(self.bytes_per_second)}/s)"),
            *((f"  {name}", f"{seconds:.3f} s") for name, seconds in self.phases.items()),
        ]

    def __str__(self) -> str:
        rows = self.rows()
        width = max(len(name) for name, _ in rows)
        return "\n".join(f"{name:<{width}}  {value}" for name, value in rows)
