"""A keeper's job whose group torch reconfigures in place: nothing is kept for the wrong rank."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

import transfuse
from keeping import SECONDS, Home, home  # noqa: F401
from transfuse.testing.ranks import ProcessPool, store

pytestmark = pytest.mark.skipif(
    not hasattr(dist, "_reconfigure"), reason="this torch cannot reconfigure a group: 2.14 can"
)


def change_places(rank: int) -> tuple[str, int | None, float]:
    """Rank 0 becomes rank 1, and rank 1 becomes rank 0."""
    state = {"w": torch.full((1000,), float(rank))}
    first = transfuse.keep(lambda: state, run="job", timeout=SECONDS)
    first.commit(1)
    reconfigure: Any = dist
    handles = store()
    handles.set(f"handle{rank}", reconfigure._get_reconfigure_handle())
    order = [handles.get(f"handle{one}").decode() for one in (1, 0)]
    reconfigure._reconfigure(uuid=7, handles=order, timeout=timedelta(seconds=SECONDS)).wait()
    assert dist.get_rank() == 1 - rank
    with pytest.raises(transfuse.TransfuseError) as error:
        first.commit(2)
    first.detach()
    keep = transfuse.keep(lambda: state, run="job", timeout=SECONDS)
    assert keep.rank == 1 - rank
    step = keep.restore()
    keep.close()
    return str(error.value), step, float(state["w"][0])


def test_a_keep_of_other_ranks_commits_nothing_and_a_new_one_goes_on(home: Home) -> None:  # noqa: F811
    with ProcessPool(2, method="forkserver") as pool:
        outcomes = [one.get() for one in pool.run(change_places, deadline=2 * SECONDS)]
        for rank, (said, step, value) in enumerate(outcomes):
            assert said == (
                f"the group was reconfigured: this was rank {rank} of 2, and is rank {1 - rank} of 2; detach() from "
                "the keeper, and call keep() again on all ranks"
            )
            assert step == 1
            # What rank 0 had committed is rank 0's, whichever worker that is now.
            assert value == 1 - rank
