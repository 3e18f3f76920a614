"""Ranks that are killed or frozen in the middle of ``keep()`` and ``restore()``: all others raise one error."""

from __future__ import annotations

import time
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist

import transfuse
from keeping import Home, home  # noqa: F401
from transfuse._wire.roll_call import Agreement
from transfuse.testing.ranks import Fleet, announce

pytestmark = [pytest.mark.timeout(200), pytest.mark.usefixtures("home")]

RANKS, VICTIM = 4, 2
#: A frozen rank is lost after this long; a dead one at once, long before this.
PATIENCE = {"kill": 100.0, "freeze": 2.0}


class Heard(NamedTuple):
    """How a call ended on a rank, and the values that its weights have then."""

    kind: str
    rank: int | None
    text: str
    values: list[float]
    seconds: float


def stand_still(call: str, moment: int | str) -> None:
    announce(f"{call} {moment}")
    time.sleep(1000)


def work(rank: int, call: str, moment: int | str, seconds: float) -> Heard:
    """Keep, commit, restore. The victim stands still, for somebody to come and end it, in the midst of one of these."""
    weights, gathered, calls = torch.zeros(3), 0, {"now": "keep"}
    gather = Agreement.gather

    def gather_or_stand(agreement: Agreement, data: bytes, what: str) -> list[bytes]:
        nonlocal gathered
        if rank == VICTIM and calls["now"] == call:
            if gathered == moment:
                stand_still(call, moment)
            gathered += 1
        return gather(agreement, data, what)

    def state_dict() -> dict[str, torch.Tensor]:
        if rank == VICTIM and (calls["now"], moment) == (call, "state_dict"):
            stand_still(call, moment)
        return {"w": weights}

    def load(state: Any) -> None:
        if rank == VICTIM and moment == "load":
            stand_still(call, moment)

    Agreement.gather = gather_or_stand  # type: ignore[method-assign, assignment]
    dist.barrier()
    began = time.monotonic()
    kind, lost, text = "", None, ""
    try:
        keep = transfuse.keep(state_dict, load=load, run="job", timeout=seconds)
        weights.fill_(7)
        keep.commit(1)
        weights.zero_()
        dist.barrier()
        calls["now"], began = "restore", time.monotonic()
        keep.restore()
    except transfuse.TransfuseError as error:
        kind, lost, text = type(error).__name__, getattr(error, "rank", None), str(error)
    return Heard(kind, lost, text, weights.tolist(), time.monotonic() - began)


@pytest.mark.processes
@pytest.mark.parametrize(
    ("how", "call", "moment"),
    [
        ("kill", "keep", 0),
        ("kill", "keep", 2),
        ("kill", "restore", 0),
        ("kill", "restore", "state_dict"),
        ("kill", "restore", "load"),
        ("freeze", "keep", 1),
        ("freeze", "restore", 1),
        ("freeze", "restore", "state_dict"),
    ],
)
def test_one_that_is_lost_is_named_by_all_others(home: Home, how: str, call: str, moment: int | str) -> None:  # noqa: F811
    home.start("job")
    with Fleet(RANKS) as fleet:
        fleet.start(work, call, moment, PATIENCE[how])
        fleet.wait_for(VICTIM, f"{call} {moment}")
        (fleet.kill if how == "kill" else fleet.freeze)(VICTIM)
        outcomes = fleet.outcomes(60, [rank for rank in range(RANKS) if rank != VICTIM])
        heard = [outcome.get() for outcome in outcomes]
    assert len({(one.kind, one.rank, one.text) for one in heard}) == 1, heard
    assert (heard[0].kind, heard[0].rank) == ("PeerLost", VICTIM), heard
    doing = "restoring" if call == "restore" else "joining the keepers"
    assert f"rank {VICTIM} is lost: rank {VICTIM}" in heard[0].text
    assert f"while {doing}" in heard[0].text
    for one in heard:
        assert how == "freeze" or one.seconds < PATIENCE["kill"] / 2
        # Before the vote nobody is touched. A rank that dies in load() has voted.
        assert one.values == ([7.0] * 3 if moment == "load" else [0.0] * 3)
