"""A mutation watch: finds out whether a source's tensors have changed while they were served.

Most writes raise a tensor's version counter. Writes by a fused optimizer or by another process do not. So the watch
also remembers a few bytes of each tensor.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import Any

import numpy as np
import numpy.ma  # np.unique imports it when it is first called: by then no descriptor may be free.
import numpy.typing as npt
import torch

from transfuse._memory import device_copies, vm
from transfuse._state.leaves import dense
from transfuse._state.manifest import Described
from transfuse._state.region import Ints
from transfuse._tuning import DEVICE_SAMPLE_SECONDS

#: A sample has this many words of eight bytes. Short or unaligned memory is sampled byte by byte.
WORDS = 8
#: To look at this number of tensors takes less time than to be asked.
QUICK = 256
_WORD, _BYTE = np.dtype(np.uint64), np.dtype(np.uint8)

_version = attrgetter("_version")
_pointer: Callable[[torch.Tensor], int] = torch._C.TensorBase.data_ptr

#: Not Python's own generator: a job may draw from that, and a restored one would draw other numbers.
_lots = random.Random()


def versions_of(tensors: Sequence[torch.Tensor]) -> list[int]:
    """The version of each tensor: a write raises it. Tensors made in inference mode have no version: -1."""
    try:
        return list(map(_version, tensors))
    except RuntimeError:
        return [-1 if tensor.is_inference() else tensor._version for tensor in tensors]


class MutationWatch:
    """Remembers samples of a described state, and later finds the leaves that have changed."""

    def __init__(self, described: Described, *, devices: bool = True) -> None:
        """``devices``: whether to remember samples of what lies on accelerators, too, and not only its versions."""
        self._described = described
        tensors = described.manifest.tensors
        rows, starts, runs = self._runs()
        here = starts > 0
        skip = -starts % 8
        words = (runs - skip) // 8
        # At random positions, because not every step writes everywhere.
        lots = np.frombuffer(_lots.randbytes(4 * len(rows)), dtype=np.uint32).astype(np.int64)
        wide, narrow = here & (words >= WORDS), here & (words < WORDS)
        #: The tensor that each sample belongs to: samples in words, samples in bytes, samples outside main memory.
        self._rows: list[Ints] = [rows[wide], rows[narrow], rows[~here & devices]]
        first = starts[wide] + skip[wide] + 8 * (lots[wide] % (words[wide] - WORDS + 1))
        self._words: Ints = first[:, None] + 8 * np.arange(WORDS)
        # Short memory is sampled whole, unaligned memory with as many bytes as the other samples have.
        length = np.minimum(runs, 8 * WORDS)[narrow]
        self._ends: Ints = np.cumsum(length)
        self._bytes: Ints = np.repeat(starts[narrow] - self._ends + length, length) + np.arange(length.sum())
        self._elsewhere: list[tuple[int, int, int]] = [
            (int(tensors.storage[row]), int(tensors.start[row]), min(size, 8 * WORDS))
            for row, size in zip(rows[~here & devices].tolist(), runs[~here & devices].tolist(), strict=True)
        ]
        self._versions = versions_of(self._described.tensors)
        self._samples = self._sample()
        #: The samples outside main memory stay on their devices: to read them now would wait for all work queued there.
        self._kept = self._sample_elsewhere()

    def _runs(self) -> tuple[Ints, Ints, Ints]:
        """Where samples may be taken, as columns: a tensor's number, the address of a run of its memory, its length.

        The address is 0 outside main memory. A tensor that is not one run has several rows: random items of it.
        """
        tensors = self._described.manifest.tensors
        whole = np.flatnonzero((tensors.numel > 0) & tensors.contiguous)
        rows, offsets = [whole], [np.zeros(len(whole), dtype=np.int64)]
        runs = [tensors.numel[whole] * tensors.item[whole]]
        for strided in np.flatnonzero((tensors.numel > 0) & ~tensors.contiguous).tolist():
            lots = np.array([_lots.randrange(int(tensors.numel[strided])) for _ in range(WORDS)])
            index = np.unravel_index(lots, tensors.shape(strided))
            steps = np.array(tensors.stride(strided), dtype=np.int64)
            rows.append(np.full(WORDS, strided, dtype=np.int64))
            offsets.append(np.stack(index, axis=1) @ steps * tensors.item[strided])
            runs.append(np.full(WORDS, tensors.item[strided], dtype=np.int64))
        row = np.concatenate(rows)
        base = self._described.addresses[tensors.storage[row]]
        return row, np.where(base > 0, base + tensors.start[row] + np.concatenate(offsets), 0), np.concatenate(runs)

    @property
    def is_quick(self) -> bool:
        """Whether to look takes hardly any time."""
        return len(self._described.tensors) <= QUICK

    def changed(self, seconds: float = DEVICE_SAMPLE_SECONDS) -> list[str]:
        """Paths of leaves that have been written to, or whose tensors have moved to other memory.

        ``seconds``: how long an accelerator may take to bring samples.
        """
        return self._paths(self.changed_rows(seconds))

    def changed_rows(self, seconds: float = DEVICE_SAMPLE_SECONDS) -> Ints:
        """The numbers of tensors that have been written to, or that have moved to other memory."""
        described = self._described
        pointers = np.fromiter(map(_pointer, described.tensors), dtype=np.int64, count=len(described.tensors))
        moved = (pointers != described.pointers) & (described.manifest.tensors.numel > 0)
        versions = versions_of(self._described.tensors)
        if moved.any():
            # The old memory may belong to something else by now, so no sample of it is read.
            return np.flatnonzero(moved | (np.array(versions) != np.array(self._versions)))
        elsewhere = self._read([self._sample_elsewhere(), self._kept], seconds)
        samples, before = [*self._sample(), elsewhere[0]], [*self._samples, elsewhere[1]]
        if versions == self._versions and all(map(np.array_equal, samples, before)):
            return np.empty(0, dtype=np.int64)
        single = np.flatnonzero(samples[1] != before[1])
        rows = [
            np.flatnonzero(np.array(versions) != np.array(self._versions)),
            self._rows[0][np.any(samples[0] != before[0], axis=1)],
            self._rows[1][np.unique(np.searchsorted(self._ends, single, side="right"))],
            self._rows[2][np.any(samples[2] != before[2], axis=1)],
        ]
        return np.unique(np.concatenate(rows))

    def _paths(self, rows: Ints) -> list[str]:
        manifest = self._described.manifest
        return [manifest.paths[leaf] for leaf in np.unique(manifest.leaves_of(rows)).tolist()[:100]]

    def _sample(self) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
        return vm.peek(self._words, _WORD), vm.peek(self._bytes, _BYTE)

    def _sample_elsewhere(self) -> list[tuple[list[int], torch.Tensor]]:
        """For each device: the numbers of its samples, and their bytes in one tensor on that device."""
        found: dict[torch.device, dict[int, torch.Tensor]] = {}
        for number, where in enumerate(self._elsewhere):
            sample = self._bytes_at(*where)
            found.setdefault(sample.device, {})[number] = sample
        return [(list(samples), torch.cat(list(samples.values()))) for samples in found.values()]

    def _read(
        self, kept: Sequence[Sequence[tuple[list[int], torch.Tensor]]], seconds: float
    ) -> list[npt.NDArray[np.uint8]]:
        """Samples from outside main memory as rows, all together."""
        result = [np.zeros((len(self._elsewhere), 8 * WORDS), dtype=np.uint8) for _ in kept]
        found = [
            (rows, numbers, data, torch.empty(data.numel(), dtype=torch.uint8))
            for rows, some in zip(result, kept, strict=True)
            for numbers, data in some
        ]
        if found:
            device_copies.to_ordinary([(data, here) for _, _, data, here in found], seconds)
        for rows, numbers, _, here in found:
            ends = np.cumsum([self._elsewhere[number][2] for number in numbers])
            for number, sample in zip(numbers, np.split(here.numpy(), ends[:-1]), strict=True):
                rows[number, : len(sample)] = sample
        return result

    def _bytes_at(self, storage: int, start: int, size: int) -> torch.Tensor:
        memory = self._described.tensors[int(self._described.owners[storage])].untyped_storage()
        return dense.over(memory, torch.uint8, int(self._described.windows[storage]) + start, (size,), (1,))
