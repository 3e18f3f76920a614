"""A single source falls silent: communicators are aborted only where a late write could change the caller's tensors."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import transfuse
from device.group import DeviceRanks, backend_of
from device.simple_moves import receive, send, state, zeros

pytestmark = [pytest.mark.usefixtures("device", "small_parcels"), pytest.mark.timeout(90)]

SECONDS, LONG, DEADLINE = 1.2, 10.0, 25.0


@pytest.mark.parametrize("how", ["atomic", "fresh", "in place"])
def test_communicators_are_aborted_only_if_targets_could_be_written_late(
    how: str, caplog: pytest.LogCaptureFixture
) -> None:
    def work(rank: int, pg: Any) -> Any:
        if rank == 0:
            send(pg, 1, {"w": torch.ones(5)}, LONG)
        else:
            receive(pg, 0, LONG)

        def freeze(progress: dict[int, transfuse.Progress]) -> None:
            if any(one.bytes for one in progress.values()):
                backend_of(pg).freeze()

        if rank == 0:
            return send(pg, 1, state(), SECONDS, progress=freeze, max_bytes_per_second=12.0 * (1 << 20))
        target = None if how == "fresh" else zeros(state("cpu"))
        return receive(pg, 0, SECONDS, target, atomic=how == "atomic")

    with DeviceRanks(2) as ranks:
        error = ranks.outcomes(work, deadline=DEADLINE)[1].error
        assert isinstance(error, transfuse.PeerError)
        aborted = [message for message in caplog.messages if "communicators were aborted" in message]
        assert bool(aborted) == (how == "in place")
        if not aborted:
            assert error.torn == ()
            # The lost source may still write to the memory that a receive would resume from.
            assert error.partial is None


def test_an_abort_that_blocks_is_not_waited_for(caplog: pytest.LogCaptureFixture) -> None:
    def work(rank: int, pg: Any) -> Any:
        if rank == 0:
            send(pg, 1, {"w": torch.ones(5)}, LONG)
        else:
            receive(pg, 0, LONG)
            backend_of(pg).set_abort_seconds(60)

        def freeze(progress: dict[int, transfuse.Progress]) -> None:
            if any(one.bytes for one in progress.values()):
                backend_of(pg).freeze()

        if rank == 0:
            return send(pg, 1, state(), SECONDS, progress=freeze, max_bytes_per_second=12.0 * (1 << 20))
        return receive(pg, 0, SECONDS, zeros(state("cpu")))

    with DeviceRanks(2) as ranks:
        error = ranks.outcomes(work, deadline=DEADLINE)[1].error
    assert isinstance(error, transfuse.PeerError)
    assert any("it cannot be aborted" in message for message in caplog.messages)
