"""``Loader``: a rank's batches, from a loader that goes on where it was."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator, Sequence, Sized
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import BatchSampler, DataLoader, Dataset, DistributedSampler, IterableDataset

#: What of ``DataLoader``'s options follows from this loader's own.
CHOSEN = ("sampler", "batch_sampler", "drop_last", "generator")


class Loader:
    """A rank's batches, epoch after epoch, without end. Its state says which batch is next.

    Args:
        dataset: what ``torch.utils.data.DataLoader`` takes, with a length.
        batch_size: how many samples each rank gets at a time.
        rank: which part of the data is this rank's. None: the default group's rank, or 0.
        ranks: how many parts there are. None: the default group's size, or 1.
        shuffle: in an order that follows from ``seed`` and the epoch, and is the same on all ranks.
        seed: of the order.
        **options: further options of ``DataLoader``: ``num_workers``, ``collate_fn``, …

    The rest of an epoch that does not fill a batch on every rank is left out. What is drawn at random while a sample is
    made has to follow from the sample and the epoch: what the loader's own processes draw is not part of the state.
    """

    def __init__(
        self,
        dataset: Dataset[Any],
        batch_size: int,
        *,
        rank: int | None = None,
        ranks: int | None = None,
        shuffle: bool = True,
        seed: int = 0,
        **options: Any,
    ) -> None:
        _check_dataset(dataset)
        _check_names(options)
        has_group = dist.is_available() and dist.is_initialized()
        ranks = ranks if ranks is not None else dist.get_world_size() if has_group else 1
        rank = rank if rank is not None else dist.get_rank() if has_group else 0
        self._dataset, self._options = dataset, options
        self._sampler: DistributedSampler[Any] = DistributedSampler(
            dataset, ranks, rank, shuffle=shuffle, seed=seed, drop_last=True
        )
        self._batches = BatchSampler(self._sampler, batch_size, drop_last=True)
        if not len(self._batches):
            raise ValueError(
                f"{len(self._sampler)} samples for each of {ranks} ranks do not fill a batch of {batch_size}"
            )
        self._epoch, self._next = 0, 0
        self._read([])  # Refuses wrong values of options here, and not when the training begins.

    def __iter__(self) -> Iterator[Any]:
        while True:
            self._sampler.set_epoch(self._epoch)
            # What has been seen is left out before anything is read.
            for batch in self._read(list(self._batches)[self._next :]):
                self._next += 1  # Counted when it is handed out, however far the loader's processes are ahead.
                yield batch
            self._epoch, self._next = self._epoch + 1, 0

    def _read(self, batches: Sequence[list[int]]) -> DataLoader[Any]:
        # A generator of its own: otherwise each new iterator would draw a number from torch's, and a restarted job
        # would draw one more.
        own = torch.Generator().manual_seed(0)
        return DataLoader(self._dataset, batch_sampler=batches, generator=own, **self._options)

    def state_dict(self) -> dict[str, int]:
        return {"epoch": self._epoch, "next": self._next}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Go on with the batch after the last one that was handed out. An iterator that exists already does not."""
        self._epoch, self._next = state["epoch"], state["next"]


def _check_dataset(dataset: object) -> None:
    by_number = hasattr(dataset, "__getitem__") and not isinstance(dataset, IterableDataset)
    if not by_number or not isinstance(dataset, Sized):
        raise TypeError(
            f"Loader() needs a dataset with a length and items by number, got a {type(dataset).__name__}: a stream's "
            "place is known only to who reads it, so give keep() a loader of your own with state_dict() and "
            "load_state_dict()"
        )


def _check_names(options: Iterable[str]) -> None:
    own = inspect.signature(Loader).parameters
    known = [name for name in inspect.signature(DataLoader).parameters if name not in (*own, *CHOSEN)]
    for name in options:
        if name in CHOSEN:
            raise TypeError(f"Loader() chooses {name} itself")
        if name not in known:
            raise TypeError(f"Loader() got an unexpected keyword argument {name!r}; its options are {', '.join(known)}")
