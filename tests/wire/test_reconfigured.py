"""A group that torch reconfigures in place (2.14 and later): its transports keep nothing of the old ranks."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

import transfuse
from laned import hold_back_the_group, state
from transfuse.testing.exact import assert_exact
from transfuse.testing.ranks import Ranks
from transfuse.testing.ranks.threads import in_threads

pytestmark = [
    pytest.mark.usefixtures("group_route"),
    pytest.mark.skipif(not hasattr(dist, "_reconfigure"), reason="this torch cannot reconfigure a group: 2.14 can"),
]

TIMEOUT = 20.0
_numbers = itertools.count(1)


def reconfigure(pgs: Sequence[Any]) -> None:
    """Make one group of these, in this order. What else was in their groups is left as it is."""
    number, handles = next(_numbers), [pg.get_reconfigure_handle() for pg in pgs]
    options = torch._C._distributed_c10d.ReconfigureOptions  # type: ignore[attr-defined]

    def one(pg: Any) -> None:
        chosen = options()
        chosen.uuid, chosen.handles, chosen.timeout = number, handles, timedelta(seconds=TIMEOUT)
        pg.reconfigure(chosen).wait()

    together({rank: lambda pg=pg: one(pg) for rank, pg in enumerate(pgs)})
    assert [(pg.rank(), pg.size()) for pg in pgs] == [(rank, len(pgs)) for rank in range(len(pgs))]


def together(work: Any) -> list[Any]:
    outcomes = in_threads(work, 60.0)
    return [outcomes[one].get() for one in work]


def move(source: transfuse.PGTransport, to: int, receiver: transfuse.PGTransport, frm: int, seed: int) -> None:
    sent = state(seed)
    _, got = together({0: lambda: source.send_checkpoint([to], sent), 1: lambda: receiver.recv_checkpoint(frm)})
    assert_exact(sent, got)


@pytest.mark.usefixtures("small_parcels")
def test_a_transport_follows_its_group(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks change places, the group shrinks and grows again. The transports were made before all that."""
    hold_back_the_group(monkeypatch)
    with Ranks(3) as ranks:
        a, b, c = ranks.pgs
        at_a, at_b, at_c = (transfuse.PGTransport(pg, TIMEOUT, "cpu", lanes=2) for pg in ranks.pgs)
        move(at_a, 1, at_b, 0, seed=1)
        reconfigure([c, a, b])
        move(at_a, 2, at_b, 1, seed=2)
        move(at_c, 1, at_a, 0, seed=3)
        reconfigure([b, c])
        move(at_b, 1, at_c, 0, seed=4)
        with pytest.raises(ValueError, match="rank 2 is not in the group of 2"):
            at_b.send_checkpoint([2], {})
        reconfigure([a, c, b])
        move(at_b, 0, at_a, 2, seed=5)
        assert at_a.report is not None
        assert at_a.report.connections == 2


def test_a_receive_that_was_left_behind_is_not_handed_to_another_process() -> None:
    """The receive still waits, on the old connection, for a process that is no longer in the group."""
    with Ranks(3) as ranks:
        a, b, c = ranks.pgs
        at_a, at_c = (transfuse.PGTransport(pg, TIMEOUT, "cpu") for pg in (a, c))
        switchboard, sent = at_a._group.switchboard, state(1)
        hasty = transfuse.PGTransport(a, 4.0, "cpu")
        _, got = together({0: lambda: at_c.send_checkpoint([0], sent), 1: lambda: hasty.recv_checkpoint([1, 2])})
        assert_exact(sent, got)
        assert [word.peer for word in switchboard._parked] == [1], "nothing was left behind: this shows nothing"
        reconfigure([a, c])
        assert not switchboard._parked[0].done.is_set()
        move(at_c, 0, at_a, 1, seed=2)
        # Who has left believes that it is still rank 1, and sends: nobody takes that for what rank 1 of now sends.
        with pytest.raises(transfuse.SendFailed):
            transfuse.PGTransport(b, 1.0, "cpu").send_checkpoint([0], {"w": torch.ones(3)})
        move(at_c, 0, at_a, 1, seed=3)


def test_a_closed_transport_forms_no_connections_in_the_next_configuration() -> None:
    with Ranks(2) as ranks:
        at_a, at_b = (transfuse.PGTransport(pg, TIMEOUT, "cpu", lanes=2) for pg in ranks.pgs)
        at_b.close()
        reconfigure(ranks.pgs[::-1])
        move(at_a, 0, at_b, 1, seed=1)
        assert at_b.report is not None
        assert at_b.report.connections == 1
