"""Not a peer but the limit of all peers on one host: the kernel reads the same bytes, and nothing else happens."""

from __future__ import annotations

import mmap
import os
from itertools import accumulate
from typing import Any

import torch

from benchmarks.compare.peers.peer import Peer
from benchmarks.compare.readv import Reader, cpus, permit

__all__ = ["BareRead"]


class BareRead(Peer):
    key, name = "readv", "limit: bare process_vm_readv"
    whole = False
    note = "all threads, addresses known beforehand, nothing described or checked"

    def prepare(self) -> None:
        own = self.scene.tensors
        layout = [(name, t.data_ptr(), t.nbytes, t.dtype, t.shape) for name, t in own.items()]
        self.pid, self.layout = self.scene.tell((os.getpid(), layout))
        self.remote = [(start, size) for _, start, size, *_ in self.layout]
        if self.scene.mode == "in place" and not self.scene.sending:
            self.reader = Reader(self.pid, self.remote, [(t.data_ptr(), t.nbytes) for t in own.values()])

    def ready(self) -> None:
        if self.scene.sending:
            permit(True)

    def send(self) -> None:
        return

    def receive(self) -> Any:
        if self.scene.mode == "in place":
            self.reader.read(cpus())
            return self.scene.state
        *starts, total = accumulate((size for _, size in self.remote), initial=0)
        pages = mmap.mmap(-1, total, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        pages.madvise(mmap.MADV_HUGEPAGE)
        memory = torch.frombuffer(pages, dtype=torch.uint8)
        local = [(memory.data_ptr() + at, size) for at, (_, size) in zip(starts, self.remote, strict=True)]
        Reader(self.pid, self.remote, local).read(cpus())
        return memory

    def arrived(self, got: Any) -> Any:
        if self.scene.mode == "in place":
            return got
        pieces = got.split([size for _, size in self.remote])
        return {
            name: piece.clone().view(dtype).view(shape)
            for piece, (name, _, _, dtype, shape) in zip(pieces, self.layout, strict=True)
        }

    def tidy(self) -> None:
        if self.scene.sending:
            permit(False)
