"""Shared by the conformance cases: the transport under test, how long to wait for it, and common steps."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

from transfuse.testing._group import CPU, CountingGroup, Factory, GroupRanks, Job, Transport
from transfuse.testing._states import quiet
from transfuse.testing.exact import assert_exact
from transfuse.testing.ranks import Late, Outcome

PATIENCE = 5.0


class Stage:
    """All lengths of time, derived from ``patience``, which is the groups' own timeout.

    A transport whose peer never comes has a timeout of a quarter of ``patience`` and must raise within half of it, long
    before the group would. All other transports have ``patience`` as timeout, and must hear of a refusal within half.
    """

    def __init__(self, factory: Factory, patience: float) -> None:
        self.factory, self.patience = factory, patience
        self.short = patience / 4
        self.limit = patience / 2

    def ranks(self, size: int) -> GroupRanks:
        return GroupRanks(size, self.patience)

    def transport(
        self, group: CountingGroup, callback: Callable[[], Any] | None = None, timeout: float | None = None
    ) -> Transport:
        return self.factory(group, timedelta(seconds=timeout or self.patience), CPU, callback)

    def source(self, state: Any, to: Sequence[int] = (1,), timeout: float | None = None) -> Job:
        return lambda group: self.transport(group, None, timeout).send_checkpoint(list(to), state)

    def receiver(
        self, target: Any = None, timeout: float | None = None, callback: Callable[[], Any] | None = None
    ) -> Job:
        give = callback if target is None else lambda: target
        return lambda group: self.transport(group, give, timeout).recv_checkpoint(0)

    def move(self, state: Any, target: Any = None) -> Any:
        """Send from one rank to another; return what arrived."""
        with self.ranks(2) as ranks:
            return self.all_well(ranks, {0: self.source(state), 1: self.receiver(target)})[1]

    def all_well(self, ranks: GroupRanks, jobs: Mapping[int, Job]) -> dict[int, Any]:
        """Run jobs that must not fail; return their values."""
        ended = ranks.run(jobs, 2 * self.patience, all_well=True)
        # A job that was cut off by another rank's error has no error of its own.
        for end in sorted(ended.values(), key=lambda end: isinstance(end.error, Late)):
            value(end)
        return {rank: end.value for rank, end in ended.items()}

    def fresh(self, make: Callable[[], Any]) -> None:
        """Check that the state that ``make`` returns arrives exactly."""
        state = make()
        assert_exact(state, self.move(state))

    def land(self, state: Any, target: Any) -> Any:
        """Check that the state arrives in the target; return what the receive returned."""
        arrived = self.move(state, target)
        assert_exact(state, arrived, in_place=True)
        assert_exact(state, target, in_place=True)
        return arrived

    def refused(self, state: Any, callback: Callable[[], Any] | None = None) -> tuple[Exception, Exception]:
        """Send something that must fail at both ends at once; return the errors of source and receiver."""
        with self.ranks(2) as ranks:
            jobs = {0: self.source(state), 1: self.receiver(callback=callback)}
            ended = ranks.run(jobs, self.limit)
        return expect_failed(ended[0]), expect_failed(ended[1])


Body = Callable[[Stage], None]


@dataclass(frozen=True)
class Case:
    """One case: a name that never changes, the promise that it tests, and the test."""

    name: str
    about: str
    body: Body = field(repr=False, compare=False)

    def run(self, factory: Factory, *, patience: float = PATIENCE) -> None:
        """Return if the transport passes; otherwise raise AssertionError, or the transport's error. Never hangs."""
        quiet()
        self.body(Stage(factory, patience))

    def __str__(self) -> str:
        return self.name


class Cases(list[Case]):
    def case(self, name: str, about: str) -> Callable[[Body], Body]:
        """Decorator that adds the function as a case."""

        def add(body: Body) -> Body:
            self.append(Case(name, about, body))
            return body

        return add


def value(end: Outcome[Any]) -> Any:
    """Return the rank's value, or raise its error."""
    if isinstance(end.error, Exception):
        raise end.error
    if end.error is not None:
        raise AssertionError(f"the transport raised {type(end.error).__name__}, which is no Exception") from end.error
    return end.value


def expect(condition: bool, otherwise: str) -> None:
    __tracebackhide__ = True
    if not condition:
        raise AssertionError(otherwise)


def expect_failed(end: Outcome[Any]) -> Exception:
    """Check that the rank raised in time; return its error."""
    if end.error is None:
        raise AssertionError(f"it raised nothing; it returned a {type(end.value).__name__}")
    if isinstance(end.error, Late) or not isinstance(end.error, Exception):
        value(end)
    assert isinstance(end.error, Exception)
    return end.error


def expect_name(error: Exception, name: str) -> None:
    """Check that the error's text has this name as a word."""
    _expect_text(error, rf"(?<!\w){re.escape(name)}(?!\w)", repr(name))


def expect_rank(error: Exception, rank: int) -> None:
    """Check that the error's text says "rank 2", "ranks: [2]" or the like."""
    _expect_text(error, rf"rank\w*\W{{0,3}}{rank}\b", f"rank {rank}")


def _expect_text(error: Exception, pattern: str, what: str) -> None:
    found = re.search(pattern, str(error), re.IGNORECASE) is not None
    expect(found, f"the error does not name {what}: {type(error).__name__}: {error}")
