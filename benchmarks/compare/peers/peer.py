"""What every contender does, behind one set of calls; and what it finds on its rank."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import subprocess
import sys
from abc import ABC, abstractmethod
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch
import torch.distributed as dist
from torch.utils._pytree import keystr, tree_flatten_with_path

__all__ = ["CPU", "TIMEOUT", "Mode", "Peer", "Scene", "tensors_of", "world"]

Mode = Literal["in place", "fresh"]

CPU = torch.device("cpu")
SOURCE = 0
#: Long, since a rank may wait for another that fills gigabytes with random numbers.
TIMEOUT = timedelta(minutes=5)
#: Importing a large package on a busy machine takes this long at worst.
IMPORT_SECONDS = 120


def world() -> dist.ProcessGroup:
    """The group of all workers."""
    group = dist.group.WORLD
    assert group is not None
    return group


def tensors_of(state: object) -> dict[str, torch.Tensor]:
    """The tensors by path; memory that has several names appears under the first."""
    leaves, _ = tree_flatten_with_path(state)
    found, seen = {}, set()
    for path, leaf in leaves:
        if isinstance(leaf, torch.Tensor) and leaf.data_ptr() not in seen:
            seen.add(leaf.data_ptr())
            found[keystr(path)] = leaf
    return found


@dataclass(frozen=True)
class Scene:
    """One rank's part of a case. Rank 0 is the source, all others are receivers."""

    mode: Mode
    rank: int
    receivers: tuple[int, ...]
    #: At the source, what is sent. At a receiver, what it lands in if in place, else None.
    state: Any
    #: The same, flat: tensors by path, memory that has several names under the first.
    tensors: dict[str, torch.Tensor]
    #: In shared memory, for those who go through files.
    folder: Path

    @property
    def sending(self) -> bool:
        return self.rank == SOURCE

    def target(self) -> Any:
        return self.state

    def meet(self) -> None:
        """Wait for all ranks."""
        dist.barrier()

    def tell(self, what: object = None) -> Any:
        """What the source passes here, on every rank."""
        region = [what]
        dist.broadcast_object_list(region, src=SOURCE)
        return region[0]


class Peer(ABC):
    """One way to move a state. Every rank makes its own, and all make the same calls in the same order.

    ``prepare`` once. Then for each move: ``ready``; ``send`` at the source and ``receive`` at the receivers, which
    alone are timed; ``arrived``, ``tidy``. ``close`` at last. Whoever raises or hangs is out of this case.
    """

    #: For ``--only``, and for people.
    key: ClassVar[str]
    name: ClassVar[str]
    #: What is imported, and the distribution that brings it. None: always there.
    module: ClassVar[str | None] = None
    package: ClassVar[str | None] = None
    modes: ClassVar[frozenset[Mode]] = frozenset({"in place", "fresh"})
    most_receivers: ClassVar[int] = 16
    #: Whether it carries a whole state, or only tensors.
    whole: ClassVar[bool] = True
    #: What bounds it: the machine's memory, or one TCP stream.
    bound: ClassVar[Literal["memory", "tcp"]] = "memory"
    #: What one should know about how it is measured.
    note: ClassVar[str] = ""

    def __init__(self, scene: Scene) -> None:
        self.scene = scene

    @classmethod
    def absent(cls) -> str | None:
        """Why it cannot take part here, or None if it can. A real import, in a process of its own."""
        if cls.module is None:
            return None
        if importlib.util.find_spec(cls.module.partition(".")[0]) is None:
            return "not installed"
        command = [sys.executable, "-W", "ignore", "-c", f"import {cls.module}"]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=IMPORT_SECONDS)
        except subprocess.TimeoutExpired:
            return f"its import did not end within {IMPORT_SECONDS} s"
        lines = done.stderr.strip().splitlines() or [f"its import ended with exit code {done.returncode}"]
        return lines[-1] if done.returncode else None

    @classmethod
    def version(cls) -> str | None:
        try:
            return importlib.metadata.version(cls.package) if cls.package else None
        except importlib.metadata.PackageNotFoundError:
            return None

    @classmethod
    def fits(cls, mode: Mode, receivers: int) -> bool:
        return mode in cls.modes and receivers <= cls.most_receivers

    def prepare(self) -> None:
        """Connect, register, describe."""
        return

    def ready(self) -> None:
        """Everything is about to begin."""
        return

    @abstractmethod
    def send(self) -> None: ...

    @abstractmethod
    def receive(self) -> Any:
        """Return what came, complete and usable."""

    def arrived(self, got: Any) -> Any:
        """What came, as a state, or as tensors by path where only tensors are carried."""
        return got

    def route(self) -> str | None:
        """Which way the last move took, where there are several."""
        return None

    def tidy(self) -> None:
        """Remove what a move leaves behind."""
        return

    def close(self) -> None:
        """Give back what ``prepare`` took."""
        return
