"""Where a Hub's weights come from: a live state of this process, or the servers of other processes.

A source writes its state into a buffer, as a layout of safetensors files says. Leaves that are no tensors are left out.
"""

from __future__ import annotations

import ctypes
import logging
import mmap
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import NamedTuple, Protocol

import numpy as np
import torch

from transfuse._errors import NotCovered, SourcesDiffer, StateError, StepMismatch, TransfuseError, UnsupportedLeaf
from transfuse._hub.safetensors_layout import Entry, FileLayout, lay_out, why_not, why_not_dtype
from transfuse._limits import Limits
from transfuse._memory import device_copies, packing, pinning, streams, vm
from transfuse._memory.mutation import MutationWatch
from transfuse._memory.streams import OwnStreams
from transfuse._options import FetchKeywords
from transfuse._plan.apply_rules import BlockPair
from transfuse._plan.catalogue import Catalogue
from transfuse._plan.cohorts import Cohort
from transfuse._remote.client import FetchSettings, fetch_if, peek
from transfuse._remote.live_state import LiveState, StateView
from transfuse._state import trees
from transfuse._state.leaves import dense
from transfuse._state.leaves.block import Block, is_tensor
from transfuse._state.leaves.codec import CannotCarry
from transfuse._state.leaves.dtensors import is_dtensor
from transfuse._state.manifest import describe
from transfuse._tls import Encryption
from transfuse._tuning import DEVICE_STAGING_BYTES, HUB_SOURCE_BELIEVED_SECONDS, HUB_SOURCE_BETWEEN_SECONDS

logger = logging.getLogger("transfuse")

#: What to do about a leaf of which this process holds a part only.
SERVE_ALL = "let every rank call transfuse.serve(), and give all addresses to one hub"
TRIES = 20


class _Pinned:
    """Holds memory that is pinned for one kind of accelerator: it is let go before it is freed."""

    def __init__(self, memory: torch.Tensor) -> None:
        self.memory = memory


class Buffer:
    """Memory for one copy of a state. It grows, and is used again."""

    def __init__(self) -> None:
        self.memory = torch.empty(0, dtype=torch.uint8)
        #: By the kind of accelerator: who holds the memory pinned; None if it cannot be.
        self._pinned: dict[str, _Pinned | None] = {}

    @property
    def nbytes(self) -> int:
        return self.memory.numel()

    @property
    def address(self) -> int:
        return self.memory.data_ptr()

    def grow(self, nbytes: int) -> None:
        """Have room for ``nbytes``. What was in the buffer is lost."""
        if nbytes > self.nbytes:
            self.free()
            room = torch.empty(nbytes + mmap.PAGESIZE, dtype=torch.uint8)
            whole = room[-room.data_ptr() % mmap.PAGESIZE :][:nbytes]
            # Zeros: pages that nobody has touched would be made while training waits for the copy.
            self.memory = whole.zero_()

    def free(self) -> None:
        """Pinned memory is let go: call this where nobody can be capturing a graph."""
        self._pinned.clear()
        self.memory = torch.empty(0, dtype=torch.uint8)

    def pin(self, kind: str) -> bool:
        """Whether accelerators of this kind can copy to this memory by themselves. Call it where nobody captures."""
        if kind not in self._pinned:
            holder = _Pinned(self.memory)
            is_pinned = pinning.register(holder, self.address, self.nbytes, kind)
            self._pinned[kind] = holder if is_pinned else None
        return self._pinned[kind] is not None

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

    def free(self, buffers: Sequence[Buffer]) -> None:
        """Free the memory of buffers that nobody uses any more. This may wait."""


class Layouts:
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


# ---------------------------------------------------------------------------------------------- of this process


class _LateCopies(NamedTuple):
    """Copies that an accelerator has not ended yet: both ends stay until it has."""

    buffer: Buffer
    runs: Sequence[device_copies.Run]
    devices: list[torch.device]
    #: None: an exception came while they were queued.
    events: list[torch.Event] | None


class LiveSource:
    """A state of this process, which is copied while training waits at its next :meth:`LiveState.changing`.

    What lies on accelerators is copied on streams of the source's own, behind the last change. All that asks a device
    for anything holds the lock: inside of ``mutating()`` a job may capture a graph, and nobody may ask then.
    """

    def __init__(self, live: LiveState, layouts: Layouts) -> None:
        self._live = live
        self._layouts = layouts
        self._has_warned = False
        self._own = OwnStreams()
        self._devices: list[torch.device] = []
        self._late: _LateCopies | None = None
        with live.reading(lambda: None) as seen:  # Refuse now what could never be copied.
            found = _tensors(seen.state, layouts.prefix)
            self._layouts.of([entry for entry, _ in found])
            with self._on_own_streams(found):
                seen.watch = _watch(found)

    def _on_own_streams(self, found: list[tuple[Entry, torch.Tensor]]) -> AbstractContextManager[None]:
        self._devices = sorted({tensor.device for _, tensor in found if not tensor.is_cpu}, key=str)
        return self._own.entered(self._devices)

    def mark(self, seconds: float | None) -> object:
        """How often the state was changed, and whether it has changed otherwise: a job may forget ``mutating()``."""
        with self._live.glimpsing() as seen, self._own.entered(self._devices):
            # Samples would wait behind copies that are late.
            return self._live.changes, seen is not None and self._late is None and bool(self._changed(seen))

    def take(self, buffer: Buffer, meanwhile: Callable[[], object]) -> CopiedState:
        while True:
            with self._live.reading(meanwhile) as seen:
                found = _tensors(seen.state, self._layouts.prefix)
                layout = self._layouts.of([entry for entry, _ in found])
                if buffer.nbytes >= layout.nbytes:
                    self._check_landed()
                    with self._on_own_streams(found):
                        is_loose = self._was_forgotten(seen)
                        seen.watch = _watch(found)
                        self._copy({entry.name: tensor for entry, tensor in found}, layout, buffer)
                        is_loose |= self._was_forgotten(seen)
                    return CopiedState(layout, seen.step, (seen.changes, False), is_loose)
                buffer.free()
            buffer.grow(layout.nbytes)  # Here, where training goes on: it takes as long as the copy.

    def free(self, buffers: Sequence[Buffer]) -> None:
        with self._live.reading(lambda: None):
            for buffer in buffers:
                buffer.free()

    def _copy(self, tensors: dict[str, torch.Tensor], layout: FileLayout, buffer: Buffer) -> None:
        elsewhere: list[tuple[torch.Tensor, int]] = []
        theirs, mine = [], []
        for file in layout.files:
            for entry, place in zip(file.entries, file.places, strict=True):
                tensor = tensors[entry.name]
                if not tensor.is_cpu:
                    elsewhere.append((tensor, place))
                elif not tensor.is_contiguous():
                    buffer.tensor(entry, place).copy_(tensor)
                elif entry.nbytes:
                    theirs.append((tensor.data_ptr(), entry.nbytes))
                    mine.append((buffer.address + place, entry.nbytes))
        events = self._queue(elsewhere, buffer) if elsewhere else []
        sides = (np.array(side, dtype=np.uint64).reshape(-1, 2) for side in (theirs, mine))
        vm.copy(*sides, workers=vm.threads(), is_mapped=True)
        streams.reach(events, self._live.seconds)
        self._late = None

    def _check_landed(self) -> None:
        late = self._late
        if late is None:
            return
        if late.events is None:
            late = self._late = late._replace(events=list(self._own.events(late.devices).values()))
        if not all(event.query() for event in late.events or ()):
            raise TransfuseError(
                "the accelerator has not ended the copies of an earlier commit, which failed: ask later"
            )

    def _queue(self, elsewhere: Sequence[tuple[torch.Tensor, int]], buffer: Buffer) -> list[torch.Event]:
        """Copy what lies on accelerators. Return the moments after which the copies have landed."""
        runs = [(_bytes(one), buffer.memory[place:][: one.nbytes]) for one, place in elsewhere if one.is_contiguous()]
        strided = [(one, buffer.memory[place:][: one.nbytes]) for one, place in elsewhere if not one.is_contiguous()]
        if not all(buffer.pin(kind) for kind in {device.type for device in self._devices}):
            device_copies.to_ordinary(runs, self._live.seconds)
            self._bring_to_ordinary(strided)
            return []
        self._late = _LateCopies(buffer, [*runs, *strided], self._devices, None)
        # Nothing but the next tensor may follow: what lies between two of them may be a third one, of main memory.
        device_copies.to_host(runs, padding=1)
        for tensor, here in strided:
            packing.bring(tensor, 0, tensor.nbytes, here)
        events = list(self._own.events(self._devices).values())
        self._late = self._late._replace(events=events)
        return events

    def _bring_to_ordinary(self, strided: Sequence[device_copies.Run]) -> None:
        """Copy tensors that are no runs of memory into memory that could not be pinned."""
        if not strided:
            return
        step = DEVICE_STAGING_BYTES
        pieces = [
            (tensor, low, here[low : low + step]) for tensor, here in strided for low in range(0, tensor.nbytes, step)
        ]

        def bring(piece: tuple[torch.Tensor, int, torch.Tensor], buffer: torch.Tensor) -> None:
            tensor, low, here = piece
            packing.bring(tensor, low, low + here.numel(), buffer)

        pair = device_copies.PinnedPair(max(here.numel() for *_, here in pieces), self._devices, self._live.seconds)
        for (_, _, here), buffer in pair.ahead(pieces, bring):
            here.copy_(buffer[: here.numel()])

    def glance(self, meanwhile: Callable[[], object]) -> tuple[FileLayout, int | None]:
        with self._live.reading(meanwhile) as seen:
            return self._layouts.of([entry for entry, _ in _tensors(seen.state, self._layouts.prefix)]), seen.step

    def _was_forgotten(self, seen: StateView) -> bool:
        """Whether tensors have changed, and nobody was in ``mutating()`` since the last look. One warning."""
        changed = self._changed(seen)
        if changed and not self._has_warned:
            self._has_warned = True
            logger.warning(
                "the hub's state has changed outside of mutating() (%s): a commit may hold half of a step, and bears "
                "the step of the last mutating(). Change both within: with hub.mutating(): optimizer.step(); step += 1",
                ", ".join(changed[:3]) + (", …" if changed[3:] else ""),
            )
        return bool(changed)

    def _changed(self, seen: StateView) -> list[str]:
        """The names of tensors that have changed since somebody looked last, outside of all blocks."""
        return [] if seen.watch is None else seen.watch.changed(self._live.seconds)


def _watch(found: list[tuple[Entry, torch.Tensor]]) -> MutationWatch:
    return MutationWatch(describe({entry.name: tensor for entry, tensor in found}, Limits()))


def _tensors(state: object, prefix: str) -> list[tuple[Entry, torch.Tensor]]:
    root, leaves = trees.flatten(state, max_depth=Limits().max_depth)
    paths = trees.paths(root)
    first: dict[object, str] = {}
    found = []
    for number, (name, leaf) in enumerate(zip(trees.dotted(root, longest=None), leaves, strict=True)):
        if not is_tensor(leaf) or not name.startswith(prefix):
            continue
        try:
            tensor = _whole(leaf)
        except CannotCarry as error:
            raise UnsupportedLeaf(paths[number], str(error)) from None
        memory = (tensor.device, tensor.data_ptr(), tensor.stride()) if tensor.numel() else None
        short, shape = name.removeprefix(prefix), tuple(tensor.shape)
        found.append((_entry(short, paths[number], tensor.dtype, shape, memory, first), tensor))
    return found


def _entry(
    name: str, path: str, dtype: torch.dtype, shape: tuple[int, ...], memory: object, first: dict[object, str]
) -> Entry:
    """The entry of a tensor. ``first``: names of those before it. ``memory``: where its bytes are, if it has any."""
    alias_of = name if memory is None else first.setdefault((memory, dtype, shape), name)
    return Entry(name, path, dtype, shape, None if alias_of == name else alias_of)


def _whole(leaf: torch.Tensor | Block) -> torch.Tensor:
    """A leaf as a plain tensor that this process holds all of."""
    if isinstance(leaf, Block):
        if leaf.tensor.shape != leaf.shape:
            raise CannotCarry(f"a {leaf!r}: this rank has a part; {SERVE_ALL}")
        leaf = leaf.tensor
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
    why = why_not_dtype(leaf.dtype, signed_view=leaf.is_conj() or leaf.is_neg())
    if why is not None:
        raise CannotCarry(why)
    return leaf.detach()


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.reshape(-1).view(torch.uint8)


# ---------------------------------------------------------------------------------------------- of other processes


class Reached(NamedTuple):
    """Servers that can be asked now, and the secret for them."""

    addresses: Sequence[str]
    token: str | bytes | None
    tls: Encryption = None


class ServerSource:
    """The state of one server, or of several that hold replicas, shards or stages of it.

    ``reach`` gives the servers for the time of one conversation.
    """

    def __init__(self, reach: Callable[[], AbstractContextManager[Reached]], layouts: Layouts, seconds: float) -> None:
        self._reach = reach
        self._layouts = layouts
        self._seconds = seconds
        #: A thread asks for the step, and all that want to know wait for it: a server may not answer for a long time.
        self._told = threading.Condition()
        self._is_asking = False
        self._mark: int | None = None
        self._failure: BaseException | None = None
        self._told_at = float("-inf")

    @classmethod
    def at(cls, reached: Reached, layouts: Layouts, seconds: float) -> ServerSource:
        @contextmanager
        def reach() -> Iterator[Reached]:
            yield reached

        return cls(reach, layouts, seconds)

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
        seen = peek(reached.addresses[0], token=reached.token, timeout=self._seconds, tls=reached.tls)
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

    def free(self, buffers: Sequence[Buffer]) -> None:
        for buffer in buffers:
            buffer.free()

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

        options: FetchKeywords = {"tls": reached.tls}
        asked = FetchSettings(address=reached.addresses, token=reached.token, timeout=self._seconds, options=options)
        step = fetch_if(None, asked, late).step
        return CopiedState(chosen[-1], step, step, is_loose=False)

    def _entries(self, catalogue: Catalogue) -> list[tuple[int, Entry]]:
        """The tensors of all servers, each with its number in the catalogue."""
        prefix, found = self._layouts.prefix, []
        names = [trees.dotted(cohort.manifest.root, longest=None) for cohort in catalogue.cohorts]
        first: dict[object, str] = {}
        for number, (at, leaf) in enumerate(catalogue.leaves):
            cohort, name = catalogue.cohorts[at], names[at][leaf]
            if cohort.is_value(leaf) or cohort.is_blob(leaf) or not name.startswith(prefix):
                continue
            manifest, why = cohort.manifest, why_not(cohort, leaf)
            path = manifest.paths[leaf]
            if why is not None:
                raise UnsupportedLeaf(path, why)
            dtype, shape = cohort.dtype(leaf, 0), cohort.shape(leaf)
            assert shape is not None
            memory, row, tensors = None, int(manifest.first_tensors[leaf]), manifest.tensors
            if row < int(manifest.first_tensors[leaf + 1]) and tensors.numel[row]:
                at_byte = int(tensors.storage[row]), int(tensors.start[row])
                memory = (at, *at_byte, tensors.shape(row), tensors.stride(row))
            found.append((number, _entry(name.removeprefix(prefix), path, dtype, shape, memory, first)))
        return found
