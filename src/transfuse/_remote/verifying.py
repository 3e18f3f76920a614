"""``verify``: whether what lies in this process's tensors is what servers have, without moving it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Unpack, cast

from transfuse import _arguments
from transfuse._job.face import one_manner
from transfuse._job.state import State
from transfuse._options import FetchKeywords, VerifyKeywords, check_names
from transfuse._plan.compared_blocks import ComparedLeaves
from transfuse._remote.client import FetchSettings, fetch_if
from transfuse._report import Report, Version
from transfuse._sizes import human_bytes

#: The most leaves that a printed table lists of each kind.
MOST_LISTED = 10


@dataclass(frozen=True)
class Verified:
    """What :func:`verify` has found. It is true if everything was compared and is the same.

    ``print(verified)`` shows a short table.
    """

    #: Which state the servers have.
    version: Version
    #: What the caller expected them to have; None for anything.
    expected: Version | None
    #: How many leaves both sides have.
    leaves: int
    #: The leaves that both sides have and that are not the same: a map from path to what differs.
    differing: Mapping[str, str]
    #: The leaves that could not be compared, since a fetch would round them here: a map from path to why.
    not_compared: Mapping[str, str]
    #: The leaves that only this process has, and those that only the servers have.
    only_here: tuple[str, ...]
    only_there: tuple[str, ...]
    report: Report

    @property
    def step(self) -> int | None:
        """The servers' step."""
        return self.version.step

    @property
    def is_expected(self) -> bool:
        """Whether the servers have the version that was expected."""
        expected, there = self.expected, self.version
        if expected is None:
            return True
        return expected.step == there.step and expected.digest in (None, there.digest)

    def __bool__(self) -> bool:
        return self.is_expected and not (self.differing or self.not_compared or self.only_here or self.only_there)

    def rows(self) -> list[tuple[str, str]]:
        """The result as rows of a table."""
        same = self.leaves - len(self.differing.keys() | self.not_compared.keys())
        return [
            ("servers have", str(self.version)),
            *((("expected", str(self.expected)),) if self.expected is not None else ()),
            ("the same", f"{max(same, 0):,} of {self.leaves:,} leaves, {human_bytes(self.report.kept_bytes)}"),
            *_listed("differs", self.differing),
            *_listed("not compared", self.not_compared),
            *_listed("only here", dict.fromkeys(self.only_here, "")),
            *_listed("only there", dict.fromkeys(self.only_there, "")),
        ]

    def __str__(self) -> str:
        rows = self.rows()
        width = max(len(name) for name, _ in rows)
        return "\n".join(f"{name:<{width}}  {value}" for name, value in rows)


def _listed(what: str, leaves: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    for path, why in list(leaves.items())[:MOST_LISTED]:
        yield what, f"{path}: {why}" if why else path
    if len(leaves) > MOST_LISTED:
        yield what, f"and {len(leaves) - MOST_LISTED:,} more leaves"


@one_manner
def verify(
    address: str | Sequence[str],
    state: object,
    *,
    expected: Version | int | None = None,
    entry: str | None = None,
    token: str | bytes | None = None,
    timeout: timedelta | float = 60,
    **options: Unpack[VerifyKeywords],
) -> Verified:
    """Say whether a state is bit for bit what servers have, leaf by leaf. Only digests travel, and nothing is written.

    Args:
        address: ``host:port`` of a server, or several, or the URL of a directory of steps, as for :func:`fetch`. Each
            parcel is compared with one of the servers that hold it.
        state: what is compared (:class:`State` says what it can be).
        expected: the version that the servers should have, for example ``fetched.version`` of the fetch that brought
            ``state``, or its step alone. If they have another, the result is false and says both.
        entry: compare with this entry alone of a state that is a mapping.
        token: the secret that the servers were started with.
        timeout: how long it may go without progress, as a timedelta or in seconds.
        **options: those of :func:`fetch` that say what a fetch into ``state`` would bring: ``cast``, ``map_path`` and
            ``strict`` (None: leaves that only one side has count; with ``map_path`` those that only the servers have
            do not. True: both count. False: neither does); and ``tls`` and ``progress``.

    Tensors are compared by digests of 128 bits of their bytes: a NaN with another payload and a zero with another sign
    are different. Leaves that a fetch would round here (``cast=True``, another type of the same size) are not compared.
    """
    check_names(verify, options, VerifyKeywords)
    wanted = _version_in(expected)
    # Nothing is read from a source's memory: that would move it.
    receiving = cast("FetchKeywords", {**options, "same_host": False, "device_memory": False, "nixl": False})
    request = FetchSettings(
        address=address,
        state=State.of(state),
        entry=entry,
        version=True,
        token=token,
        timeout=_arguments.seconds_of("timeout", timeout),
        options=receiving,
    )
    fetched = fetch_if(None, request, only_compares=True)
    found: ComparedLeaves = fetched.state
    return Verified(
        fetched.version,
        wanted,
        found.leaves,
        found.differing,
        found.not_compared,
        found.only_here,
        found.only_there,
        fetched.report,
    )


def _version_in(expected: Version | int | None) -> Version | None:
    if expected is None or isinstance(expected, Version):
        return expected
    return Version(_arguments.whole("expected", expected, "a Version, a step, or None"))
