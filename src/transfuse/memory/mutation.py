"""A mutation watch: finds out whether a source's tensors have changed while they were served.

Most writes raise a tensor's version counter. Writes by a fused optimizer or by another process do not. So the watch
also remembers a few bytes of each tensor.
"""

from __future__ import annotations

import random
from itertools import compress
from operator import attrgetter
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from transfuse.memory import vm
from transfuse.state.leaves import dense
from transfuse.state.manifest import Described, Ints

__all__ = ["MutationWatch"]

#: A sample has this many words of eight bytes. Short or unaligned memory is sampled byte by byte.
WORDS = 8
_WORD, _BYTE = np.dtype(np.uint64), np.dtype(np.uint8)

_version, _pointer = attrgetter("_version"), torch.Tensor.data_ptr


class MutationWatch:
    """Remembers samples of a described state, and later finds the leaves that have changed."""

    def __init__(self, described: Described) -> None:
        self._described = described
        parts = described.manifest.parts
        rows, starts, runs = self._places()
        here = starts > 0
        skip = -starts % 8
        words = (runs - skip) // 8
        # At random positions, because not every step writes everywhere.
        lots = np.frombuffer(random.randbytes(4 * len(rows)), dtype=np.uint32).astype(np.int64)
        wide, narrow = here & (words >= WORDS), here & (words < WORDS)
        #: The tensor that each sample belongs to: samples in words, samples in bytes, samples outside main memory.
        self._parts: list[Ints] = [rows[wide], rows[narrow], rows[~here]]
        first = starts[wide] + skip[wide] + 8 * (lots[wide] % (words[wide] - WORDS + 1))
        self._words: Ints = first[:, None] + 8 * np.arange(WORDS)
        # Short memory is sampled whole, unaligned memory with as many bytes as the other samples have.
        length = np.minimum(runs, 8 * WORDS)[narrow]
        self._ends: Ints = np.cumsum(length)
        self._bytes: Ints = np.repeat(starts[narrow] - self._ends + length, length) + np.arange(length.sum())
        self._elsewhere: list[tuple[int, int, int]] = [
            (int(parts.storage[part]), int(parts.start[part]), min(size, 8 * WORDS))
            for part, size in zip(rows[~here].tolist(), runs[~here].tolist(), strict=True)
        ]
        self._pointers = list(map(_pointer, described.parts))
        self._versions = self._read_versions()
        self._samples = self._sample()

    def _places(self) -> tuple[Ints, Ints, Ints]:
        """Where samples may be taken, as columns: a tensor's number, the address of a run of its memory, its length.

        The address is 0 outside main memory. A tensor that is not one run has several rows: random items of it.
        """
        parts = self._described.manifest.parts
        whole = np.flatnonzero((parts.numel > 0) & parts.contiguous)
        rows, offsets = [whole], [np.zeros(len(whole), dtype=np.int64)]
        runs = [parts.numel[whole] * parts.item[whole]]
        for part in np.flatnonzero((parts.numel > 0) & ~parts.contiguous).tolist():
            lots = np.array([random.randrange(int(parts.numel[part])) for _ in range(WORDS)])
            index = np.unravel_index(lots, parts.shape(part))
            steps = np.array(parts.stride(part), dtype=np.int64)
            rows.append(np.full(WORDS, part, dtype=np.int64))
            offsets.append(np.stack(index, axis=1) @ steps * parts.item[part])
            runs.append(np.full(WORDS, parts.item[part], dtype=np.int64))
        row = np.concatenate(rows)
        base = self._described.addresses[parts.storage[row]]
        return row, np.where(base > 0, base + parts.start[row] + np.concatenate(offsets), 0), np.concatenate(runs)

    def changed(self) -> list[str]:
        """Paths of leaves that have been written to, or whose tensors have moved to other memory."""
        pointers = list(map(_pointer, self._described.parts))
        if pointers != self._pointers:
            # The old memory may belong to something else by now, so no sample of it is read.
            return self._paths(np.flatnonzero(np.array(pointers) != np.array(self._pointers)))
        versions, samples = self._read_versions(), self._sample()
        if versions == self._versions and all(
            np.array_equal(now, then) for now, then in zip(samples, self._samples, strict=True)
        ):
            return []
        single = np.flatnonzero(samples[1] != self._samples[1])
        parts = [
            np.flatnonzero(np.array(versions) != np.array(self._versions)),
            self._parts[0][np.any(samples[0] != self._samples[0], axis=1)],
            self._parts[1][np.unique(np.searchsorted(self._ends, single, side="right"))],
            self._parts[2][np.any(samples[2] != self._samples[2], axis=1)],
        ]
        return self._paths(np.concatenate(parts))

    def _paths(self, parts: Ints) -> list[str]:
        manifest = self._described.manifest
        return [manifest.paths[leaf] for leaf in np.unique(manifest.leaves_of(parts)).tolist()[:100]]

    def _read_versions(self) -> list[int]:
        parts = self._described.parts
        try:
            return list(map(_version, parts))
        except RuntimeError:  # Tensors made in inference mode have no version counter.
            return [-1 if part.is_inference() else part._version for part in parts]

    def _sample(self) -> tuple[npt.NDArray[Any], npt.NDArray[Any], npt.NDArray[Any]]:
        return vm.peek(self._words, _WORD), vm.peek(self._bytes, _BYTE), self._sample_elsewhere()

    def _sample_elsewhere(self) -> npt.NDArray[np.uint8]:
        """Samples from outside main memory, with one transfer for each device."""
        result = np.zeros((len(self._elsewhere), 8 * WORDS), dtype=np.uint8)
        pieces = [self._piece(*where) for where in self._elsewhere]
        for device in {piece.device for piece in pieces}:
            chosen = [piece.device == device for piece in pieces]
            sizes = [piece.numel() for piece in compress(pieces, chosen)]
            data = torch.cat(list(compress(pieces, chosen))).cpu().numpy()
            for row, piece in zip(
                compress(range(len(pieces)), chosen), np.split(data, np.cumsum(sizes)[:-1]), strict=True
            ):
                result[row, : len(piece)] = piece
        return result

    def _piece(self, storage: int, start: int, size: int) -> torch.Tensor:
        memory = self._described.parts[int(self._described.owners[storage])].untyped_storage()
        return dense.over(memory, torch.uint8, int(self._described.windows[storage]) + start, (size,), (1,))
