"""Bursts of which one answer is for several, as in a chain: wherever an end stops, both ends end and stay usable."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch

from moves import CPU
from transfuse._errors import PeerRefused
from transfuse._limits import KIB, Limits
from transfuse._memory.digest import digest_of
from transfuse._memory.packing import RegionPlace
from transfuse._plan import parcels
from transfuse._plan.parcels import Most, Parcels
from transfuse._plan.regions import lay_out
from transfuse._progress import Progress
from transfuse._session.bursts import BurstsIn, BurstsOut
from transfuse._session.outgoing import ParcelSupply
from transfuse._session.shape import Shape
from transfuse._session.threads import Caller
from transfuse._state.manifest import describe
from transfuse._wire.channel import Channel
from transfuse._wire.group import FIRST_LINK_TAG, Group
from transfuse._wire.messages import Message
from transfuse.testing.ranks import Ranks

PARCEL = 16 * KIB
#: Six under way and one answer for three: the last answer is for two.
PARCELS, AHEAD, ANSWERED = 11, 6, 3


class Flat:
    """One tensor, in the form in which packing reads and writes it."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._bytes = tensor
        self.addresses = np.array([tensor.data_ptr()])
        self.convert = np.zeros(1, dtype=bool)
        self.writes_targets = True

    def run(self, region: int, low: int, high: int) -> torch.Tensor:
        return self._bytes[low:high]

    def places(self, region: int) -> Sequence[RegionPlace]:
        return [RegionPlace(self._bytes)]

    def paths_of(self, regions: Sequence[int]) -> list[str]:
        return ["w"]

    def touch(self, regions: Any) -> None: ...


class Counting(Channel):
    """A channel that counts its answers."""

    answers = 0

    def send(self, kind: Message, *args: Any, **kwargs: Any) -> None:
        self.answers += kind is Message.GOT
        super().send(kind, *args, **kwargs)


def cut_for(tensor: torch.Tensor) -> Parcels:
    return parcels.cut(lay_out(describe({"w": tensor}, Limits()).manifest), PARCEL)


def move(pg: Any, rank: int, tag: int, *, stops: int | None, receiver_stops: int | None, digests: bool) -> Any:
    """One request over a link of its own. The source or the receiver stops with this parcel."""
    shape = Shape(Most(PARCEL, PARCEL), AHEAD, digests, ANSWERED)
    channel = Counting(Group(pg, CPU), 1 - rank, 20.0, Limits())
    channel.tag, channel.transfer = tag, 7
    caller = Caller(watching=False)
    tensor = torch.arange(PARCELS * PARCEL, dtype=torch.int64).to(torch.uint8)
    landed: list[int] = []

    def ready(numbers: Sequence[int]) -> BaseException | None:
        return RuntimeError("the source stops") if stops is not None and numbers[0] >= stops else None

    def land(numbers: Sequence[int], _: Sequence[int], wrong: Sequence[int]) -> None:
        assert not wrong
        landed.extend(numbers)
        if receiver_stops is not None and numbers[-1] >= receiver_stops:
            caller.stop(RuntimeError("the receiver stops"))

    try:
        with channel:
            if rank == 0:
                supply = ParcelSupply(Flat(tensor), lambda _, data: digest_of(data), ready)
                outgoing = BurstsOut(channel, cut_for(tensor), supply, shape, caller, Progress(), always_staged=True)
                outgoing.send(range(PARCELS))
                return None
            target = torch.zeros_like(tensor)
            incoming = BurstsIn(
                channel, cut_for(target), Flat(target), shape, caller, Progress(), landed=land, always_staged=True
            )
            incoming.take(range(PARCELS))
            assert torch.equal(target, tensor)
            return landed, channel.answers
    except (RuntimeError, PeerRefused) as error:
        return str(error), landed


def both(work: Callable[[int, Any], Any]) -> list[Any]:
    with Ranks(2) as ranks:
        return ranks.run(work)


@pytest.mark.parametrize("digests", [True, False])
def test_one_answer_is_for_several_bursts(digests: bool) -> None:
    def work(rank: int, pg: Any) -> Any:
        return move(pg, rank, FIRST_LINK_TAG, stops=None, receiver_stops=None, digests=digests)

    _, (landed, answers) = both(work)
    assert landed == list(range(PARCELS))
    assert answers == 4


def test_a_source_that_stops_at_any_burst_tells_its_cause_and_the_group_stays_usable() -> None:
    def work(rank: int, pg: Any) -> Any:
        stopped = [
            move(pg, rank, FIRST_LINK_TAG + at, stops=at, receiver_stops=None, digests=True) for at in range(PARCELS)
        ]
        return stopped, move(pg, rank, FIRST_LINK_TAG + PARCELS, stops=None, receiver_stops=None, digests=True)

    (sent, _), (received, last) = both(work)
    for at in range(PARCELS):
        assert "the source stops" in sent[at][0]
        assert "the source stops" in received[at][0]
        assert received[at][1] == list(range(at))  # All before it have landed, nothing after.
    assert last[0] == list(range(PARCELS))


def test_a_receiver_that_stops_at_any_burst_tells_its_cause_and_the_group_stays_usable() -> None:
    def work(rank: int, pg: Any) -> Any:
        stopped = [
            move(pg, rank, FIRST_LINK_TAG + at, stops=None, receiver_stops=at, digests=True)
            for at in range(PARCELS - 1)  # After the last one it has everything.
        ]
        return stopped, move(pg, rank, FIRST_LINK_TAG + PARCELS, stops=None, receiver_stops=None, digests=True)

    (sent, _), (received, last) = both(work)
    for at in range(PARCELS - 1):
        assert "the receiver stops" in sent[at][0]
        assert received[at] == ("the receiver stops", list(range(at + 1)))
    assert last[0] == list(range(PARCELS))
