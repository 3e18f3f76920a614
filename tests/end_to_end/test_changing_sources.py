"""Damaged parcels, and sources that change while they are read."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import transfuse
from gathering import MIB, Wrapped, gather, state
from moves import CPU, TIMEOUT
from transfuse._limits import Limits
from transfuse._memory.mutation import MutationWatch
from transfuse._state.manifest import describe
from transfuse._wire import messages
from transfuse.testing.exact import assert_exact
from transfuse.testing.ranks import Ranks

pytestmark = pytest.mark.usefixtures("small_parcels")


# ---------------------------------------------------------------------------------------------------------- corruption


@pytest.mark.usefixtures("group_route")
@pytest.mark.parametrize("what", ["parcel", "digests"])
def test_a_damaged_parcel_or_digest_comes_again(what: str) -> None:
    damaged: list[int] = []

    def damage(tensor: torch.Tensor) -> torch.Tensor | None:
        is_parcel = tensor.numel() > 100_000
        is_record = messages.HEADER_BYTES < tensor.numel() < 400 and int(tensor[6]) == messages.Message.SENT
        if len(damaged) > 2 or not (is_parcel if what == "parcel" else is_record):
            return None
        damaged.append(1)
        changed = tensor.clone()
        changed[-9] ^= 4
        return changed

    for sources in (1, 2):
        damaged.clear()
        outcomes, report = gather(sources, wrap=lambda rank, pg: Wrapped(pg, damage) if rank == 0 else pg)
        assert_exact(state(), outcomes[-1].get())
        assert report.repaired >= len(damaged) > 0


@pytest.mark.usefixtures("group_route")
def test_a_source_that_damages_everything_is_dropped_and_the_other_brings_it() -> None:
    def damage(tensor: torch.Tensor) -> torch.Tensor | None:
        if tensor.numel() < 100_000:
            return None
        changed = tensor.clone()
        changed[0] ^= 1
        return changed

    outcomes, report = gather(2, wrap=lambda rank, pg: Wrapped(pg, damage) if rank == 0 else pg)
    assert_exact(state(), outcomes[-1].get())
    assert report.repaired > 0


# ------------------------------------------------------------------------------------------------------ moving sources


def moving(source: dict[str, Any], how: str, after: int) -> Callable[[torch.Tensor], None]:
    """Changes a tensor of the source after this number of large sends."""
    left = [after]

    def step(tensor: torch.Tensor) -> None:
        if tensor.numel() > 100_000:
            left[0] -= 1
            if left[0] == 0:
                if how == "optimizer":
                    source["w09"].add_(1.0)
                else:
                    source["w09"].numpy()[:] += 1.0  # As a fused optimizer does: no version counter notices.

    return step


@pytest.mark.usefixtures("group_route")
@pytest.mark.parametrize("how", ["optimizer", "fused"])
@pytest.mark.parametrize("verify", [None, False])
@pytest.mark.parametrize("after", [2, 30])
def test_a_source_that_is_changed_while_it_sends_is_blamed_by_name(how: str, verify: bool | None, after: int) -> None:
    """Before the changed tensor is sent, and after."""

    def work(rank: int, pg: Any) -> Any:
        if rank == 1:
            return transfuse.PGTransport(pg, TIMEOUT, CPU, verify=verify).recv_checkpoint(0)
        source = state()
        group = Wrapped(pg, moving(source, how, after))
        return transfuse.PGTransport(group, TIMEOUT, CPU, verify=verify).send_checkpoint([1], source)

    with Ranks(2, 40) as ranks:
        sent, received = ranks.outcomes(work)
    assert isinstance(sent.error, transfuse.SendFailed)
    assert isinstance(sent.error.causes[1], transfuse.SourceMutated)
    assert "['w09']" in sent.error.causes[1].leaves
    assert isinstance(received.error, transfuse.SourceMutated)
    assert "['w09']" in str(received.error)
    assert "before send_checkpoint has returned" in str(received.error)
    assert received.error.partial is None, "nothing that it sent is worth keeping"


@pytest.mark.parametrize("how", ["optimizer", "fused"])
def test_a_source_that_is_changed_while_its_memory_is_read_is_blamed_too(how: str) -> None:
    source = state()

    def show(progress: dict[int, transfuse.Progress]) -> None:
        if progress[0].bytes and not moved:
            moved.append(1)
            if how == "optimizer":
                source["w09"].add_(1.0)
            else:
                source["w09"].numpy()[:] += 1.0

    moved: list[int] = []

    def work(rank: int, pg: Any) -> Any:
        if rank == 1:
            return transfuse.PGTransport(pg, TIMEOUT, CPU, progress=show).recv_checkpoint(0)
        return transfuse.PGTransport(pg, TIMEOUT, CPU, max_bytes_per_second=32e6).send_checkpoint([1], source)

    with Ranks(2, 40) as ranks:
        sent, received = ranks.outcomes(work)
    assert isinstance(received.error, transfuse.SourceMutated)
    assert "['w09']" in str(received.error)
    assert isinstance(sent.error, transfuse.SendFailed)


@pytest.mark.usefixtures("group_route")
def test_what_a_changed_source_brought_comes_again_from_the_other() -> None:
    def work(rank: int, pg: Any) -> Any:
        if rank == 2:
            taker = transfuse.PGTransport(pg, TIMEOUT, CPU)
            return taker.recv_checkpoint([0, 1]), taker.report
        source = state()
        if rank == 1:
            # The slower one, so that the other surely brings enough to be changed on the way.
            steady = transfuse.PGTransport(pg, TIMEOUT, CPU, max_bytes_per_second=8e6)
            return steady.send_checkpoint([2], source)
        group = Wrapped(pg, moving(source, "fused", 6))
        return transfuse.PGTransport(group, TIMEOUT, CPU).send_checkpoint([2], source)

    with Ranks(3, 40) as ranks:
        changed, sent, received = ranks.outcomes(work)
    arrived, _ = received.get()
    assert_exact(state(), arrived)
    sent.get()
    assert isinstance(changed.error, transfuse.SendFailed)


def watched() -> dict[str, torch.Tensor]:
    with torch.inference_mode():
        inferred = torch.randn(100)
    return {
        "large": torch.randn(10_000),
        "scalar": torch.tensor(3),
        "strided": torch.randn(100, 100)[:, ::2],
        "askew": torch.arange(200, dtype=torch.uint8)[3:],
        "half": torch.randn(33).half(),
        "inferred": inferred,
        "empty": torch.empty(0),
    }


def write_through_numpy(tensor: torch.Tensor) -> None:
    array = tensor.numpy()
    array += 1


CHANGES: dict[str, Callable[[torch.Tensor], object]] = {
    "in place": lambda tensor: tensor.add_(1),
    "without a version": write_through_numpy,
    "freed": lambda tensor: tensor.untyped_storage().resize_(0),
    "elsewhere": lambda tensor: setattr(tensor, "data", tensor.clone()),
}


def test_the_watch_looks_at_every_view_of_a_storage_and_all_over_it() -> None:
    for _ in range(20):
        base, square = torch.randn(1000), torch.randn(64, 64)
        state = {"head": base[:10], "tail": base[10:], "square": square.t()}
        mutation_watch = MutationWatch(describe(state, Limits()))
        base.numpy()[10:] += 1
        square.numpy()[1:] += 1
        assert mutation_watch.changed() == ["['tail']", "['square']"]


@pytest.mark.parametrize("name", [name for name in watched() if name != "empty"])
@pytest.mark.parametrize("change", CHANGES)
def test_the_watch_notices_whatever_is_done_to_a_tensor(name: str, change: str) -> None:
    state = watched()
    mutation_watch = MutationWatch(describe(state, Limits()))
    assert mutation_watch.changed() == []
    if name == "inferred" and change != "without a version":
        with torch.inference_mode():
            CHANGES[change](state[name])
    else:
        CHANGES[change](state[name])
    assert mutation_watch.changed() == [f"['{name}']"]


def test_a_source_whose_neighbours_in_memory_change_is_not_blamed() -> None:
    """Bytes between the leaves are not its business."""
    whole = torch.randn(4 * MIB)
    source = {"even": whole[::2], "head": whole[:4], "part": torch.randn(MIB)}

    def busy(tensor: torch.Tensor) -> None:
        whole.numpy()[5::2] += 1.0

    def work(rank: int, pg: Any) -> Any:
        if rank == 1:
            return transfuse.PGTransport(pg, TIMEOUT, CPU).recv_checkpoint(0)
        return transfuse.PGTransport(Wrapped(pg, busy), TIMEOUT, CPU, same_host=False).send_checkpoint([1], source)

    with Ranks(2, 40) as ranks:
        sent, received = ranks.outcomes(work)
    assert_exact(source, received.get())
    sent.get()
