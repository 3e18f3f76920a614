"""The interface that every peer implements, and what a peer finds on its rank."""

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
    """The tensors by path. Memory with several names appears under the first."""
    leaves, _ = tree_flatten_with_path(state)
    found, seen = {}, set()
    for path, leaf in leaves:
        if isinstance(leaf, torch.Tensor) and leaf.data_ptr() not in seen:
            seen.add(leaf.data_ptr())
            found[keystr(path)] = leaf
    return found


@dataclass(frozen=True)
class Scene:
    """One rank's side of a case. Rank 0 is the source, all others are receivers."""

    mode: Mode
    rank: int
    receivers: tuple[int, ...]
    #: At the source, the state to send. At a receiver, the target if in place, else None.
    state: Any
    #: The same, flat: tensors by path. Memory with several names appears under the first.
    tensors: dict[str, torch.Tensor]
    #: A directory in shared memory, for peers that use files.
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
        """Return on every rank what the source passes here."""
        region = [what]
        dist.broadcast_object_list(region, src=SOURCE)
        return region[0]


class Peer(ABC):
    """One way to move a state. Every rank makes its own peer, and all ranks make the same calls in the same order.

    ``prepare`` once. Then for each move: ``ready``; ``send`` at the source and ``receive`` at the receivers, and only
    these two are timed; ``arrived``, ``tidy``. ``close`` at the end. A peer that raises or hangs is out of this case.
    """

    #: Its name for ``--only``, and for tables.
    key: ClassVar[str]
    name: ClassVar[str]
    #: The module to import, and the distribution that provides it. None: always there.
    module: ClassVar[str | None] = None
    package: ClassVar[str | None] = None
    modes: ClassVar[frozenset[Mode]] = frozenset({"in place", "fresh"})
    most_receivers: ClassVar[int] = 16
    #: Whether it carries a whole state, or only tensors.
    whole: ClassVar[bool] = True
    #: What limits it: the machine's memory, or one TCP stream.
    bound: ClassVar[Literal["memory", "tcp"]] = "memory"
    #: What a reader should know about how it is measured.
    note: ClassVar[str] = ""

    def __init__(self, scene: Scene) -> None:
        self.scene = scene

    @classmethod
    def absent(cls) -> str | None:
        """Why the peer cannot take part here, or None if it can. Tries a real import, in a process of its own."""
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
        """Called right before a move."""
        return

    @abstractmethod
    def send(self) -> None: ...

    @abstractmethod
    def receive(self) -> Any:
        """Receive, and return the result, complete and usable."""

    def arrived(self, got: Any) -> Any:
        """The received state, or tensors by path if the peer carries only tensors."""
        return got

    def route(self) -> str | None:
        """The route that the last move took, if there are several."""
        return None

    def tidy(self) -> None:
        """Remove what a move leaves behind."""
        return

    def close(self) -> None:
        """Release what ``prepare`` took."""
        return
