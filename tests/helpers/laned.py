"""Transfers over several connections between ranks that are threads; and what happens before each round of them."""

from __future__ import annotations

import collections
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

import transfuse
from transfuse._limits import MIB
from transfuse._session.rounds import RoundsIn, RoundsOut
from transfuse._wire.stream import Stream
from transfuse.testing.exact import assert_exact
from transfuse.testing.ranks import Outcome, Ranks

__all__ = ["NBYTES", "TIMEOUT", "Made", "before_each_round", "hold_back_the_group", "move", "reports", "state"]

TIMEOUT = 20.0
NBYTES = 6 * MIB


def state(seed: int = 1, zeros: bool = False) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(seed)
    large = torch.randn(NBYTES // 4, generator=generator)
    tree = {"large": large, "small": [torch.randn(41, generator=generator) for _ in range(100)], "step": seed}
    return tree if not zeros else {**tree, "large": torch.zeros_like(large)}


Made = list[transfuse.PGTransport]


def move(
    sources: int = 1,
    times: int = 1,
    *,
    between: Callable[[int, transfuse.PGTransport], object] = lambda rank, transport: None,
    source_options: dict[str, Any] | None = None,
    target: Callable[[], Any] | None = lambda: state(7, zeros=True),
    arrives: Callable[[int], Any] = state,
    **options: Any,
) -> tuple[list[Outcome[Any]], Made]:
    """The last rank receives from all others, several times. Returns the outcomes, with reports, and the transports.

    Without ``target`` the state arrives fresh. ``arrives``: what must be there after each time.
    """
    made: Made = [None] * (sources + 1)  # type: ignore[list-item]

    def work(rank: int, pg: Any) -> Any:
        receives = rank == sources
        mine = options if receives else (options if source_options is None else source_options)
        mine = {name: value for name, value in mine.items() if receives or name in ("lanes", "max_bytes_per_second")}
        own = target() if receives and target is not None else None
        made[rank] = transport = transfuse.PGTransport(pg, TIMEOUT, "cpu", None if own is None else lambda: own, **mine)
        for number in range(times):
            if receives:
                assert_exact(arrives(number), transport.recv_checkpoint(list(range(sources))))
            else:
                transport.send_checkpoint([sources], state(number))
            between(rank, transport)
        return transport.report

    with Ranks(sources + 1, 60) as ranks:
        return ranks.outcomes(work), made


def reports(outcomes: list[Outcome[Any]]) -> list[Any]:
    return [outcome.get() for outcome in outcomes]


def before_each_round(
    monkeypatch: pytest.MonkeyPatch,
    end: type[RoundsIn | RoundsOut],
    hook: Callable[[Any, Stream | None], object],
) -> None:
    """Call ``hook`` before each round that an end moves, with its lane, if it is on one."""
    name = "_read" if issubclass(end, RoundsIn) else "_write"
    original = getattr(end, name)

    def move(self: Any, *args: Any) -> Any:
        channel = self._channel
        # The conversation of a lane does not belong to the group: it has begun on its stream.
        is_lane = isinstance(channel.home.pg, Stream)
        hook(self, channel.stream if is_lane else None)
        return original(self, *args)

    monkeypatch.setattr(end, name, move)


def hold_back_the_group(monkeypatch: pytest.MonkeyPatch) -> None:
    """The conversation's own stream brings nothing before a lane does. So lanes are used on busy machines too."""
    moved: dict[Any, threading.Event] = collections.defaultdict(threading.Event)

    def hold(outgoing: Any, lane: Stream | None) -> None:
        event = moved[outgoing._channel.peer]
        event.wait(TIMEOUT / 2) if lane is None else event.set()

    before_each_round(monkeypatch, RoundsOut, hold)
