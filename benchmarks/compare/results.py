"""The measurements."""

from __future__ import annotations

import statistics
from dataclasses import dataclass, field

from benchmarks.compare.cases import Case
from benchmarks.compare.peers import LIMIT, REFERENCE, Peer

__all__ = ["Limit", "Move", "Outcome", "Result"]


@dataclass(frozen=True)
class Move:
    """One move, with the results of all ranks."""

    case: str
    peer: str
    #: The first move of each kind meets cold memory and connections. It is checked, but does not count.
    warm_up: bool
    #: From a barrier until the last rank has returned.
    seconds: float
    #: Of all ranks together, in that time.
    cpu_seconds: float
    #: The errors that were found, one line each.
    wrong: list[str]
    route: str | None


@dataclass
class Result:
    """All moves of one peer in one case."""

    peer: type[Peer]
    seconds: list[float] = field(default_factory=list)
    cpu_seconds: list[float] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    routes: set[str] = field(default_factory=set)
    #: Why some of its moves are missing.
    failed: str | None = None

    def add(self, move: Move) -> None:
        self.wrong += move.wrong
        self.routes |= {move.route} if move.route else set()
        if not move.warm_up:
            self.seconds.append(move.seconds)
            self.cpu_seconds.append(move.cpu_seconds)

    @property
    def median(self) -> float | None:
        """The median of correct and complete runs only."""
        return self._median(self.seconds)

    @property
    def cpu_median(self) -> float | None:
        return self._median(self.cpu_seconds)

    def _median(self, times: list[float]) -> float | None:
        return statistics.median(times) if times and not self.wrong and not self.failed else None


@dataclass(frozen=True)
class Limit:
    """One of this machine's own limits."""

    key: str
    name: str
    bytes: int
    seconds: list[float]

    @property
    def bytes_per_second(self) -> float:
        return self.bytes / statistics.median(self.seconds)


@dataclass
class Outcome:
    """All results of one case."""

    case: Case
    bytes: int
    tensors: int
    results: list[Result]

    def median(self, peer: type[Peer]) -> float | None:
        return next((result.median for result in self.results if result.peer is peer), None)

    def speed(self, result: Result) -> float | None:
        """How many times as fast as PyTorch's transport."""
        reference = self.median(REFERENCE)
        return reference / result.median if reference and result.median else None

    def of_limit(self, result: Result, limits: dict[str, Limit]) -> float | None:
        """Its speed as a fraction of its limit.

        The limit is bare ``process_vm_readv`` of the same tensors, or one TCP stream, which only a single receiver has.
        """
        if result.median is None or result.peer is LIMIT:
            return None
        if result.peer.bound == "memory":
            best = self.median(LIMIT)
            return best / result.median if best else None
        if "tcp" not in limits or self.case.receivers > 1:
            return None
        return self.bytes / limits["tcp"].bytes_per_second / result.median
