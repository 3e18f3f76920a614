"""Where a Hub's weights come from: a live state of this process, or the servers of other processes.

A source writes its state into a buffer, as a layout of safetensors files says. Leaves that are no tensors are left out.
"""

from __future__ import annotations

import ctypes
import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import NamedTuple, Protocol

import numpy as np
import torch

from transfuse._errors import NotCovered, SourcesDiffer, StateError, StepMismatch, UnsupportedLeaf
from transfuse._hub.safetensors_layout import Entry, FileLayout, lay_out, why_not
from transfuse._limits import Limits
from transfuse._memory import vm
from transfuse._memory.mutation import MutationWatch
from transfuse._plan.apply_rules import BlockPair
from transfuse._plan.catalogue import Catalogue
from transfuse._plan.cohorts import Cohort
from transfuse._remote.client import fetch_if, peek
from transfuse._remote.live_state import LiveState, StateView
from transfuse._state import trees
from transfuse._state.leaves import dense
from transfuse._state.leaves.codec import CannotCarry
from transfuse._state.leaves.dtensors import is_dtensor
from transfuse._state.leaves.spec import Spec, is_sharded, of_plain_tensors
from transfuse._state.manifest import describe
from transfuse._tuning import HUB_SOURCE_BELIEVED_SECONDS, HUB_SOURCE_BETWEEN_SECONDS

logger = logging.getLogger("transfuse")

#: What to do about a leaf of which this process holds a part only.
SERVE_ALL = "let every rank call transfuse.serve(), and give all addresses to one hub"
TRIES = 20


class Buffer:
    """Memory for one copy of a state. It grows, and is used again."""

    def __init__(self) -> None:
        self.memory = torch.empty(0, dtype=torch.uint8)

    @property
    def nbytes(self) -> int:
        return self.memory.numel()

    @property
    def address(self) -> int:
        return self.memory.data_ptr()

    def grow(self, nbytes: int) -> None:
        """Have room for ``nbytes``. What was in the buffer is lost."""
        if nbytes > self.nbytes:
            self.memory = torch.empty(0, dtype=torch.uint8)  # Free the old memory first.
            # Zeros: pages that nobody has touched would be made while training waits for the copy.
            self.memory = torch.empty(nbytes, dtype=torch.uint8).zero_()

    def tensor(self, entry: Entry, place: int) -> torch.Tensor:
        """The memory of one tensor."""
        return self.memory[place : place + entry.nbytes].view(entry.dtype).view(entry.shape)

    def bytes(self) -> memoryview:
        return memoryview((ctypes.c_char * self.nbytes).from_address(self.address)).cast("B")


class CopiedState(NamedTuple):
    """What has been written into a buffer."""

    layout: FileLayout
    step: int | None
    #: The source's mark at that moment.
    mark: object
    #: Whether the state may have changed meanwhile.
    is_loose: bool


class NotTold(Exception):
    """Whether a state has moved on is not known yet."""


class Source(Protocol):
    """A state that moves on."""

    def mark(self, seconds: float | None) -> object:
        """Something that differs when the state has moved on. :class:`NotTold` if that takes longer."""

    def take(self, buffer: Buffer, meanwhile: Callable[[], object]) -> CopiedState:
        """Write the state into the buffer. ``meanwhile`` is called now and then while this waits; it may raise."""

    def glance(self, meanwhile: Callable[[], object]) -> tuple[FileLayout, int | None]:
        """The state's files and step, without its bytes."""


class _Layouts:
    """Makes layouts, and uses the last one again if the state looks as it did then."""

    def __init__(self, prefix: str, max_shard_bytes: int) -> None:
        self.prefix = prefix
        self._max_shard_bytes = max_shard_bytes
        self._last: FileLayout | None = None

    def of(self, entries: Sequence[Entry]) -> FileLayout:
        if self._last is None or self._last.entries != tuple(entries):
            if not entries and self.prefix:
                raise StateError(f"the state has no tensors whose names begin with {self.prefix!r}")
            self._last = lay_out(entries, self._max_shard_bytes)
        return self._last


def _names(root: trees.Node | None) -> list[str]:
    """The name of every leaf: all keys down to it, joined by dots. Unlike paths for messages, never cut short."""

    def walk(node: trees.Node | None, keys: tuple[str, ...]) -> Iterator[str]:
        if node is None:
            yield ".".join(keys)
            return
        for i, child in enumerate(node.children):
            key = str(node.keys[i]) if node.kind in trees.MAPPINGS else node.label(i).strip(".[]'\"")
            yield from walk(child, (*keys, key))

    return list(walk(root, ()))


# ---------------------------------------------------------------------------------------------- of this process


class LiveSource:
    """A state of this process, which is copied while training waits at its next :meth:`LiveState.changing`."""

    def __init__(self, live: LiveState, *, prefix: str, max_shard_bytes: int) -> None:
        self._live = live
        self._layouts = _Layouts(prefix, max_shard_bytes)
        self._has_warned = False
        with live.reading(lambda: None) as seen:  # Refuse now what could never be copied.
            found = _tensors(seen.state, prefix)
            self._layouts.of([entry for entry, _ in found])
            seen.watch = _watch(found)

    def mark(self, seconds: float | None) -> object:
        """How often the state was changed, and whether it has changed otherwise: a job may forget ``mutating()``."""
        seen = self._live.seen
        return self._live.changes, isinstance(seen, StateView) and bool(_changed(seen))

    def take(self, buffer: Buffer, meanwhile: Callable[[], object]) -> CopiedState:
        while True:
            with self._live.reading(meanwhile) as seen:
                found = _tensors(seen.state, self._layouts.prefix)
                layout = self._layouts.of([entry for entry, _ in found])
                if buffer.nbytes >= layout.nbytes:
                    is_loose = self._was_forgotten(seen)
                    seen.watch = _watch(found)
                    _copy({entry.name: tensor for entry, tensor in found}, layout, buffer)
                    return CopiedState(layout, seen.step, (seen.changes, False), self._was_forgotten(seen) or is_loose)
            buffer.grow(layout.nbytes)  # Here, where training goes on: it takes as long as the copy.

    def glance(self, meanwhile: Callable[[], object]) -> tuple[FileLayout, int | None]:
        with self._live.reading(meanwhile) as seen:
            return self._layouts.of([entry for entry, _ in _tensors(seen.state, self._layouts.prefix)]), seen.step

    def _was_forgotten(self, seen: StateView) -> bool:
        """Whether tensors have changed, and nobody was in ``mutating()`` since the last look. One warning."""
        changed = _changed(seen)
        if changed and not self._has_warned:
            self._has_warned = True
            logger.warning(
                "the hub's state has changed outside of mutating() (%s): a commit may hold half of a step, and bears "
                "the step of the last mutating(). Change both within: with hub.mutating(): optimizer.step(); step += 1",
                ", ".join(changed[:3]) + (", …" if changed[3:] else ""),
            )
        return bool(changed)


def _watch(found: list[tuple[Entry, torch.Tensor]]) -> MutationWatch:
    return MutationWatch(describe({entry.name: tensor for entry, tensor in found}, Limits()))


def _changed(seen: StateView) -> list[str]:
    """The names of tensors that have changed since somebody looked last, outside of all blocks."""
    return [] if seen.watch is None else seen.watch.changed()


def _tensors(state: object, prefix: str) -> list[tuple[Entry, torch.Tensor]]:
    root, leaves = trees.flatten(state, max_depth=Limits().max_depth)
    paths = trees.paths(root)
    first: dict[object, str] = {}
    found = []
    for number, (name, leaf) in enumerate(zip(_names(root), leaves, strict=True)):
        if not isinstance(leaf, torch.Tensor) or not name.startswith(prefix):
            continue
        try:
            tensor = _whole(leaf)
        except CannotCarry as error:
            raise UnsupportedLeaf(paths[number], str(error)) from None
        shape, key = tuple(tensor.shape), None
        if tensor.numel():
            key = (tensor.device, tensor.data_ptr(), tensor.dtype, shape, tensor.stride())
        short = name.removeprefix(prefix)
        alias_of = first.setdefault(key, short) if key is not None else short
        entry = Entry(short, paths[number], tensor.dtype, shape, None if alias_of == short else alias_of)
        found.append((entry, tensor))
    return found


def _whole(leaf: torch.Tensor) -> torch.Tensor:
    """A leaf as a plain tensor that this process holds all of."""
    if is_dtensor(leaf):
        if leaf.device_mesh.size() > 1 and not all(placement.is_replicate() for placement in leaf.placements):
            raise CannotCarry(f"a DTensor with placements {list(leaf.placements)}: this rank has a part; {SERVE_ALL}")
        leaf = leaf.to_local()
    if not dense.is_plain(leaf):
        instead = f"; {SERVE_ALL}" if type(leaf).__name__ == "ShardedTensor" else ""
        raise CannotCarry(f"a {type(leaf).__name__} of layout {leaf.layout}, not a plain tensor{instead}")
    dense.check_initialized(leaf)
    dense.check(leaf)
    if leaf.numel() and not dense.has_memory(leaf):
        raise CannotCarry(f"{dense.FREED.format('its')}; gather it first")
    why = why_not(leaf.dtype, signed_view=leaf.is_conj() or leaf.is_neg())
    if why is not None:
        raise CannotCarry(f"{why} (safetensors)")
    return leaf.detach()


def _copy(tensors: dict[str, torch.Tensor], layout: FileLayout, buffer: Buffer) -> None:
    theirs, mine = [], []
    for file in layout.files:
        for entry, place in zip(file.entries, file.places, strict=True):
            tensor = tensors[entry.name]
            if tensor.device.type != "cpu" or not tensor.is_contiguous():
                buffer.tensor(entry, place).copy_(tensor)
            elif entry.nbytes:
                theirs.append((tensor.data_ptr(), entry.nbytes))
                mine.append((buffer.address + place, entry.nbytes))
    sides = (np.array(side, dtype=np.uint64).reshape(-1, 2) for side in (theirs, mine))
    vm.copy(*sides, workers=vm.threads(), is_mapped=True)


# ---------------------------------------------------------------------------------------------- of other processes


class Reached(NamedTuple):
    """Servers that can be asked now, and the secret for them."""

    addresses: Sequence[str]
    token: str | bytes | None


class ServerSource:
    """The state of one server, or of several that hold replicas, shards or stages of it.

    ``reach`` gives the servers for the time of one conversation.
    """

    def __init__(
        self,
        reach: Callable[[], AbstractContextManager[Reached]],
        *,
        prefix: str,
        max_shard_bytes: int,
        seconds: float,
    ) -> None:
        self._reach = reach
        self._layouts = _Layouts(prefix, max_shard_bytes)
        self._seconds = seconds
        #: A thread asks for the step, and all that want to know wait for it: a server may not answer for a long time.
        self._told = threading.Condition()
        self._is_asking = False
        self._mark: int | None = None
        self._failure: BaseException | None = None
        self._told_at = float("-inf")

    @classmethod
    def at(
        cls, addresses: Sequence[str], token: str | bytes | None, *, prefix: str, max_shard_bytes: int, seconds: float
    ) -> ServerSource:
        @contextmanager
        def reach() -> Iterator[Reached]:
            yield Reached(addresses, token)

        return cls(reach, prefix=prefix, max_shard_bytes=max_shard_bytes, seconds=seconds)

    def mark(self, seconds: float | None) -> object:
        """The step that the first server is at."""
        with self._told:
            if not self._is_asking and time.monotonic() - self._told_at > HUB_SOURCE_BELIEVED_SECONDS:
                threading.Thread(target=self._ask, name="transfuse-hub-asking", daemon=True).start()
                self._is_asking = True
            if not self._told.wait_for(lambda: not self._is_asking, seconds):
                raise NotTold
            if self._failure is not None:
                raise self._failure.with_traceback(None)
            return self._mark

    def _ask(self) -> None:
        mark, failure = None, None
        try:
            with self._reach() as reached:
                mark = self._peek(reached, None)
        except BaseException as error:
            failure = error
        with self._told:
            self._mark, self._failure, self._told_at, self._is_asking = mark, failure, time.monotonic(), False
            self._told.notify_all()

    def _peek(self, reached: Reached, buffer: Buffer | None) -> int:
        seen = peek(reached.addresses[0], token=reached.token, timeout=self._seconds)
        if seen.step is None:
            raise StateError(
                f"the server at {reached.addresses[0]} does not say at which step it is, so nobody could tell when its "
                "state moves on: give it step="
            )
        if buffer is not None:
            # Get the memory now: it would take time while the servers hold still.
            catalogue = Catalogue([Cohort(seen.manifest, {0: seen.manifest.coordinates})])
            buffer.grow(self._layouts.of([entry for _, entry in self._entries(catalogue)]).nbytes)
        return seen.step

    def take(self, buffer: Buffer, meanwhile: Callable[[], object]) -> CopiedState:
        with self._reach() as reached:
            self._peek(reached, buffer)
            return self._fetch_one_step(reached, buffer, meanwhile)

    def glance(self, meanwhile: Callable[[], object]) -> tuple[FileLayout, int | None]:
        with self._reach() as reached:
            taken = self._fetch_one_step(reached, None, meanwhile)
        return taken.layout, taken.step

    def _fetch_one_step(self, reached: Reached, buffer: Buffer | None, meanwhile: Callable[[], object]) -> CopiedState:
        for left in reversed(range(TRIES)):
            meanwhile()
            try:
                return self._fetch(reached, buffer)
            except (SourcesDiffer, NotCovered, StepMismatch) as error:
                # Some servers' ranks had done the next step, others had not.
                if not left or len(reached.addresses) == 1:
                    raise
                logger.debug("the hub asks its servers again: %s", str(error))
                time.sleep(HUB_SOURCE_BETWEEN_SECONDS)
        raise AssertionError("unreachable")

    def _fetch(self, reached: Reached, buffer: Buffer | None) -> CopiedState:
        """Everything into the buffer. Without one: what there is, and no bytes of it."""
        chosen: list[FileLayout] = []

        def late(catalogue: Catalogue) -> tuple[object, list[BlockPair]]:
            numbers = {entry.name: number for number, entry in self._entries(catalogue)}
            layout = self._layouts.of([entry for _, entry in self._entries(catalogue)])
            chosen.append(layout)
            if buffer is None:
                return {}, []
            buffer.grow(layout.nbytes)
            target: dict[str, torch.Tensor] = {}
            links = []
            for file in layout.files:
                for entry, place in zip(file.entries, file.places, strict=True):
                    nowhere = (0,) * len(entry.shape)
                    links.append(BlockPair(numbers[entry.name], len(target), nowhere, nowhere, entry.shape))
                    target[entry.name] = buffer.tensor(entry, place)
            return target, links

        step = fetch_if(None, reached.addresses, token=reached.token, timeout=self._seconds, late=late).step
        return CopiedState(chosen[-1], step, step, is_loose=False)

    def _entries(self, catalogue: Catalogue) -> list[tuple[int, Entry]]:
        """The tensors of all servers, each with its number in the catalogue."""
        prefix, found = self._layouts.prefix, []
        names = [_names(cohort.manifest.root) for cohort in catalogue.cohorts]
        first: dict[object, str] = {}
        for number, (at, leaf) in enumerate(catalogue.leaves):
            cohort, name = catalogue.cohorts[at], names[at][leaf]
            if cohort.is_value(leaf) or cohort.is_blob(leaf) or not name.startswith(prefix):
                continue
            manifest, shape = cohort.manifest, cohort.shape(leaf)
            path, detail = manifest.paths[leaf], manifest.detail(leaf)
            if shape is None or (is_sharded(detail) and not of_plain_tensors(detail)):
                raise UnsupportedLeaf(path, f"of kind {Spec(*detail).codec!r}, not a plain tensor")
            dtype = cohort.dtype(leaf, 0)
            why = why_not(dtype, signed_view=bool(cohort.signs(leaf, 0)))
            if why is not None:
                raise UnsupportedLeaf(path, f"{why} (safetensors)")
            short, key = name.removeprefix(prefix), None
            row, tensors = int(manifest.first_tensors[leaf]), manifest.tensors
            if row < int(manifest.first_tensors[leaf + 1]) and tensors.numel[row]:
                at_byte = int(tensors.storage[row]), int(tensors.start[row])
                key = (at, dtype, shape, *at_byte, tensors.shape(row), tensors.stride(row))
            alias_of = first.setdefault(key, short) if key is not None else short
            found.append((number, Entry(short, path, dtype, shape, None if alias_of == short else alias_of)))
        return found
