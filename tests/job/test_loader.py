"""A data loader that goes on where it was."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import IterableDataset

import transfuse


def loader(**options: Any) -> transfuse.Loader:
    return transfuse.Loader(list(range(23)), 3, rank=1, ranks=2, **options)  # type: ignore[arg-type]


# Processes that read ahead come from a fork server: a fork of pytest's own process may find a lock held for ever.
@pytest.mark.parametrize("workers", [0, pytest.param(2, marks=pytest.mark.soak)])
def test_the_loader_goes_on_with_the_next_batch(workers: int) -> None:
    """Wherever it is left, also between two epochs, and however far its processes have read ahead."""
    undisturbed = [batch.tolist() for batch, _ in zip(loader(), range(8), strict=False)]
    assert len({tuple(batch) for batch in undisturbed}) == 8, "a new order each epoch"
    assert all(len({*itertools.chain(*undisturbed[at : at + 3])}) == 9 for at in (0, 3)), "nothing twice in an epoch"
    for left_after in (0, 1, 3, 4) if workers else range(8):
        how: dict[str, Any] = {"multiprocessing_context": "forkserver"} if workers else {}
        first, second = (loader(num_workers=workers, **how) for _ in range(2))
        seen = [batch.tolist() for _, batch in zip(range(left_after), first, strict=False)]
        second.load_state_dict(first.state_dict())
        seen += [batch.tolist() for _, batch in zip(range(8 - left_after), second, strict=False)]
        assert seen == undisturbed


def test_the_loader_draws_nothing_from_torchs_random_numbers() -> None:
    before = torch.get_rng_state()
    next(iter(loader()))
    assert torch.equal(torch.get_rng_state(), before)


def test_ranks_share_the_data_and_a_batch_that_no_rank_fills_is_refused() -> None:
    parts = [transfuse.Loader(list(range(8)), 2, rank=rank, ranks=2) for rank in range(2)]  # type: ignore[arg-type]
    seen = [sorted(int(value) for batch, _ in zip(part, range(2), strict=False) for value in batch) for part in parts]
    assert sorted(seen[0] + seen[1]) == list(range(8))
    with pytest.raises(ValueError, match="4 samples for each of 2 ranks do not fill a batch of 5"):
        transfuse.Loader(list(range(8)), 5, rank=0, ranks=2)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("wrong", "kind", "says"),
    [
        (
            {"num_worker": 2},
            TypeError,
            r"Loader\(\) got an unexpected keyword argument 'num_worker'; its options are .*num_workers",
        ),
        ({"sampler": [1]}, TypeError, r"Loader\(\) chooses sampler itself"),
        ({"generator": None}, TypeError, r"Loader\(\) chooses generator itself"),
        ({"drop_last": False}, TypeError, r"Loader\(\) chooses drop_last itself"),
        ({"num_workers": -1}, ValueError, "num_workers option should be non-negative"),
        ({"prefetch_factor": 2}, ValueError, "prefetch_factor option could only be specified in multiprocessing"),
        ({"persistent_workers": True}, ValueError, "persistent_workers option needs num_workers > 0"),
    ],
)
def test_a_wrong_option_is_refused_before_the_first_batch(
    wrong: dict[str, Any], kind: type[Exception], says: str
) -> None:
    with pytest.raises(kind, match=says):
        loader(**wrong)


class Stream(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(8))


class LongStream(Stream):
    def __len__(self) -> int:
        return 8


@pytest.mark.parametrize("dataset", [Stream(), LongStream(), iter(range(8))])
def test_a_dataset_without_length_or_numbers_is_refused_with_one_sentence(dataset: Any) -> None:
    with pytest.raises(
        TypeError, match=r"Loader\(\) needs a dataset with a length and items by number, got a \w+: "
    ) as why:
        transfuse.Loader(dataset, 2)
    assert "\n" not in str(why.value)
