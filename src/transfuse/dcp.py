"""A storage reader for ``torch.distributed.checkpoint`` whose storage is the memory of live ranks.

``dcp.load(state_dict, storage_reader=PeerReader(transport, src_ranks))`` loads with DCP's own planner what the sources
send with ``transport.send_checkpoint(dst_ranks, state_dict)``. DCP makes two calls: first for the metadata, then for
all data that it wants. A receive is one conversation. So the receive runs in a thread of its own and waits between
the two calls.

:class:`KeeperWriter` and :class:`KeeperReader` save to, and load from, the keepers of a run (:func:`transfuse.keep`).
:class:`DirectoryReader` loads from the steps that keepers have saved to a directory, without a keeper.
"""

from __future__ import annotations

import io
import os
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from types import TracebackType
from typing import Any, NamedTuple, Self, SupportsIndex, Unpack

import torch
from torch.distributed.checkpoint._nested_dict import flatten_state_dict
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from transfuse._arguments import check_step, duration, ranks_of
from transfuse._errors import StateError, TransfuseError, UnsupportedLeaf
from transfuse._keeper import saved
from transfuse._keeper.dcp_storage import CheckpointId, KeeperReader, KeeperWriter, WrittenParts, is_part, step_of
from transfuse._keeper.saved import StepsAddress
from transfuse._limits import Limits
from transfuse._memory import streams
from transfuse._options import FetchKeywords, check_names
from transfuse._plan.apply_rules import BlockPair
from transfuse._plan.catalogue import Catalogue, Late
from transfuse._plan.cohorts import Cohort
from transfuse._remote.client import FetchSettings, fetch_if, is_directory
from transfuse._state import trees
from transfuse._state.leaves import values
from transfuse._state.leaves.registry import Registry
from transfuse._state.leaves.spec import Spec, is_sharded, of_plain_tensors
from transfuse._state.manifest import Leaf
from transfuse._transport import PGTransport, settings_of

__all__ = ["DirectoryReader", "KeeperReader", "KeeperWriter", "PeerReader"]


class _LateReader(StorageReader):
    """Reads by one receive, which begins when DCP asks for the metadata and goes on when it asks for the data."""

    def __init__(self) -> None:
        super().__init__()
        #: Begins a receive. It must not refer to the reader: a reader that nobody has any more ends its receive.
        self._begin: Callable[[], _Load]
        self._load: _Load | None = None
        self._contents: _SourceContents | None = None
        self._watch: weakref.finalize[[str], _LateReader] | None = None
        self._failure: BaseException | None = None

    @property
    def failure(self) -> BaseException | None:
        """The error that this reader raised in the last load: DCP passes on a copy of it, or only its text."""
        return self._failure

    def close(self) -> None:
        """End what a failed load has left, and tell the sources. After a successful load there is nothing to do."""
        load = self._load
        if load is not None:
            load.give_up("the load has ended before any data was read")
            load.join()
            self._forget()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    # ------------------------------------------------------------------------------------- what DCP calls, in order

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Begin a new load. Live ranks have one state, whatever the checkpoint id; ``step`` tells states apart."""
        self.close()
        self._failure = None

    # The parameter must not be named kwargs: torch would ask again after a failure, for the metadata of single ranks.
    def read_metadata(self, *args: Any, **options: Any) -> Metadata:
        """Wait for the sources and return what they have. Each tensor is one chunk, whichever ranks hold its shards."""
        self.reset()
        load = self._load = self._begin()
        self._watch = weakref.finalize(self, load.give_up, "the load has ended before any data was read")
        self._watch.atexit = False
        try:
            self._contents = _SourceContents(load.catalogue())
        except BaseException as error:
            self._fail(load, error)
            raise
        return self._contents.metadata

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        pass

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Refuse what cannot be loaded, before any rank has written anything."""
        load, contents = self._load, self._contents
        if load is not None and contents is not None:
            try:
                for item in plan.items:
                    contents.check(item)
            except StateError as error:
                self._fail(load, error)
                raise
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Receive what the plan wants straight into the planner's tensors, and verify it."""
        load, contents = self._load, self._contents
        if load is None or contents is None:
            raise RuntimeError("read_data was called without read_metadata: call read_metadata first, for every load")
        try:
            for item in plan.items:
                contents.check(item)
            wanted = [_Wanted.of(item, planner) for item in plan.items if item.type != LoadItemType.BYTE_IO]
            load.finish(lambda catalogue: _lay_out(contents.of(catalogue), wanted), [one.tensor for one in wanted])
            for one in wanted:
                planner.commit_tensor(one.item, one.tensor)
            for item in plan.items:
                if item.type == LoadItemType.BYTE_IO:
                    planner.load_bytes(item, contents.saved(item.storage_index.fqn))
        except BaseException as error:
            self._fail(load, error)
            raise
        self._forget()
        return _done()

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """False: no checkpoint id leads to live ranks. Pass the reader itself."""
        return False

    def _fail(self, load: _Load, error: BaseException) -> None:
        self._failure = error
        load.give_up(f"the load has failed: {type(error).__name__}: {error}")
        if isinstance(error, Exception):
            load.join()
            self._forget()

    def _forget(self) -> None:
        self._load = self._contents = None
        if self._watch is not None:
            self._watch.detach()
            self._watch = None


class PeerReader(_LateReader):
    """Reads a checkpoint from the memory of live ranks.

    One load is one receive: every rank that calls ``dcp.load`` makes a reader with a transport over a group that also
    includes the sources, and each source calls ``send_checkpoint`` once, for all of these ranks. Names are DCP's: the
    keys down to a leaf, joined by dots. A reader serves any number of loads, one after the other.

    If a load fails before DCP reads data (a missing key, here or on another rank), DCP does not tell the reader. The
    sources hear of it when the next load begins, at :meth:`close`, at the end of a ``with`` block, when the reader is
    garbage-collected, or after the transport's timeout.

    Args:
        transport: its options say how to receive (``cast``, ``verify``, ``delta``, ``atomic``, ``same_host``). Its
            ``state_dict`` is not called.
        src_ranks: the sources, as ranks within the transport's group.
        step: if given, a source that sends another step, or does not say which, is refused.
    """

    def __init__(
        self,
        transport: PGTransport,
        src_ranks: SupportsIndex | Sequence[SupportsIndex],
        *,
        step: SupportsIndex | None = None,
    ) -> None:
        super().__init__()
        if not isinstance(transport, PGTransport):
            raise TypeError(f"transport takes a transfuse.PGTransport, got a {type(transport).__name__}")
        options, seconds = settings_of(transport)
        if options.map_path is not None:
            raise ValueError("PeerReader takes a transport without map_path: the planner chooses the names to load")
        self._transport = transport
        self._src_ranks = ranks_of("src_ranks", src_ranks)
        if not self._src_ranks:
            raise ValueError("src_ranks is empty: a load needs a source")
        self._step = check_step(step)
        chosen = self._src_ranks, self._step

        def receive(late: Late) -> None:
            transport.receive(chosen[0], step=chosen[1], late=late)

        self._begin = lambda: _Load(receive, seconds)


class DirectoryReader(_LateReader):
    """Reads a step that keepers have saved to a directory (``keep(directory=DIR)``), without a keeper.

    ``dcp.load(state_dict, storage_reader=DirectoryReader("DIR"))`` loads it on any number of ranks, each of which opens
    the directory itself. Every byte that is read has been compared with its digest before anything is written. What a
    :class:`KeeperWriter` has saved is read too.

    Args:
        directory: the directory, or its URL, as for :func:`transfuse.fetch`.
        checkpoint_id: the step, or a text whose last number is the step. ``checkpoint_id`` of ``dcp.load`` replaces it.
            None: the newest one that is whole. While a job writes to the directory, several ranks may find different
            ones: name the step.
        timeout: as for :func:`transfuse.fetch`.
        **options: the options of :func:`transfuse.fetch`, but ``map_path``.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        checkpoint_id: CheckpointId | None = None,
        *,
        timeout: timedelta | float = 60,
        **options: Unpack[FetchKeywords],
    ) -> None:
        super().__init__()
        check_names(type(self), options, FetchKeywords)
        if options.get("map_path") is not None:
            raise ValueError("DirectoryReader takes no map_path: the planner chooses the names to load")
        where = os.fspath(directory)
        self._address = where if is_directory(where) else f"file://{where}"
        self._wanted = step_of(checkpoint_id)
        self._seconds, self._options = duration(timeout).total_seconds(), options
        self._parts: WrittenParts | None = None
        self._steps: list[int | None] = []

    @property
    def step(self) -> int | None:
        """The step that the last load has read."""
        return self._steps[-1] if self._steps else None

    def reset(self, checkpoint_id: CheckpointId | None = None) -> None:
        """Begin a new load."""
        super().reset()
        if checkpoint_id is not None:
            self._wanted = step_of(checkpoint_id)

    def read_metadata(self, *args: Any, **options: Any) -> Metadata:
        """Find the step, and say what it holds."""
        self.close()
        self._failure = None
        try:
            _, manifest = saved.look(self._address, self._wanted)
            if is_part(manifest.root):
                step, self._parts = saved.find(StepsAddress.of(self._address), _parts_of, self._wanted)
                self._steps.append(step)
                return self._parts.metadata
        except BaseException as error:
            self._failure = error
            raise
        asked = FetchSettings(address=[self._address], step=self._wanted, timeout=self._seconds, options=self._options)
        steps = self._steps
        self._begin = lambda: _Load(lambda late: steps.append(fetch_if(None, asked, late).step), asked.timeout)
        return super().read_metadata()

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read what the plan wants into the planner's tensors."""
        parts, self._parts = self._parts, None
        if parts is None:
            return super().read_data(plan, planner)
        try:
            parts.read(plan, planner)
        except BaseException as error:
            self._failure = error
            raise
        return _done()

    def close(self) -> None:
        self._parts = None
        super().close()


def _parts_of(step: saved.SavedStep) -> tuple[int, WrittenParts]:
    states = step.states()
    step.check_bytes(states)
    return step.step, WrittenParts.of(states)


def _done() -> Future[None]:
    done: Future[None] = Future()
    done.set_result(None)
    return done


# ---------------------------------------------------------------------------------------------- what the sources have


class _Elsewhere:
    """Stands for a leaf that is not a tensor and whose bytes are still at the source."""


class _SourceContents:
    """The leaves of the sources, under DCP's names."""

    def __init__(self, catalogue: Catalogue) -> None:
        self._catalogue = catalogue
        #: For tensors: their numbers in the catalogue. For other leaves: the value, or why it cannot be loaded.
        self.numbers: dict[str, int] = {}
        self._values: dict[str, Any] = {}
        self._refused: dict[str, str] = {}
        self._entries: dict[str, TensorStorageMetadata | BytesStorageMetadata] = {}
        mappings: dict[str, Any] = {}
        numbers = {leaf: number for number, leaf in enumerate(catalogue.leaves)}
        for i, cohort in enumerate(catalogue.cohorts):
            mappings = self._add(cohort, {leaf: number for (j, leaf), number in numbers.items() if i == j}) | mappings
        self.metadata = Metadata(dict(self._entries), planner_data=mappings)

    def of(self, catalogue: Catalogue) -> _SourceContents:
        """Update from a newer catalogue, which may include more sources."""
        return self if catalogue is self._catalogue else _SourceContents(catalogue)

    def _add(self, cohort: Cohort, numbers: Mapping[int, int]) -> dict[str, Any]:
        """Flatten the state of some sources as DCP would, with a placeholder for each tensor."""
        registry, manifest = Registry(Limits()), cohort.manifest
        leaves: list[Any] = []
        number_of: dict[int, int] = {}
        for leaf in range(len(manifest)):
            if cohort.is_value(leaf):
                leaves.append(values.decode(manifest.detail(leaf)))
                continue
            blob = manifest.kinds[leaf] == Leaf.COMPOSITE and registry.is_blob(manifest.detail(leaf))
            leaves.append(_Elsewhere() if blob else torch.empty(0, device="meta"))
            number_of[id(leaves[-1])] = leaf
        state = trees.unflatten(manifest.root, leaves)
        if not isinstance(state, Mapping):
            raise StateError(f"the sources send a {type(state).__name__}; DCP loads only a dict: send one")
        try:
            flat, mappings = flatten_state_dict(dict(state))
        except ValueError as error:
            raise StateError(
                f"the state of the sources has no unique names for DCP: {error}; give one of the two another key"
            ) from error
        for name, value in flat.items():
            if name in self._entries:
                continue  # Another source has it too.
            leaf = number_of.get(id(value), -1)
            if leaf < 0:
                inside = trees.flatten(value, max_depth=Limits().max_depth)[1]
                if any(id(one) in number_of for one in inside):
                    self._refused[name] = (
                        f"a {type(value).__name__} that holds tensors, arrays or other data, which DCP does not look "
                        "into; put tensors into a dict or a list"
                    )
                self._entries[name], self._values[name] = BytesStorageMetadata(), value
            elif why := _why_not(cohort, leaf):
                self._entries[name], self._refused[name] = BytesStorageMetadata(), why
            elif leaf in numbers:
                self._entries[name], self.numbers[name] = _describe(cohort, leaf), numbers[leaf]
        return mappings

    def check(self, item: ReadItem) -> None:
        """Refuse a request that cannot be read."""
        name = item.storage_index.fqn
        if name in self._refused:
            raise UnsupportedLeaf(name, self._refused[name])
        if name not in (self._values if item.type == LoadItemType.BYTE_IO else self.numbers):
            kind = "value" if item.type == LoadItemType.BYTE_IO else "tensor"
            raise StateError(f"leaf {name}: the planner wants a {kind}, and the sources have none of this name")

    def saved(self, name: str) -> io.BytesIO:
        """A value as DCP expects it. Nothing that a peer has pickled is ever unpickled here."""
        stream = io.BytesIO()
        torch.save(self._values[name], stream)
        stream.seek(0)
        return stream


def _why_not(cohort: Cohort, leaf: int) -> str:
    """Why a leaf that is not a value cannot be loaded; empty if it can."""
    if cohort.manifest.kinds[leaf] == Leaf.TENSOR:
        return ""
    spec = cohort.manifest.detail(leaf)
    name = Spec(*spec).codec
    if not is_sharded(spec):
        return f"of kind {name!r}, which is no tensor that DCP could load; recv_checkpoint() carries it"
    return f"a {name} of other than plain tensors; recv_checkpoint() carries it" if not of_plain_tensors(spec) else ""


def _describe(cohort: Cohort, leaf: int) -> TensorStorageMetadata:
    size = torch.Size(cohort.holdings.of(leaf, 0).shape)
    whole = ChunkStorageMetadata(torch.Size([0] * len(size)), size)
    return TensorStorageMetadata(TensorProperties(dtype=cohort.dtype(leaf, 0)), size, [whole])


# ---------------------------------------------------------------------------------------------------- what goes where


class _Wanted(NamedTuple):
    """A block of a source's tensor, and the tensor that the block is written to."""

    item: ReadItem
    tensor: torch.Tensor
    start: tuple[int, ...]
    sizes: tuple[int, ...]

    @classmethod
    def of(cls, item: ReadItem, planner: LoadPlanner) -> _Wanted:
        name, sizes = item.storage_index.fqn, tuple(item.lengths)
        tensor = planner.resolve_tensor(item).detach()
        if tuple(tensor.shape) != sizes:
            raise StateError(
                f"leaf {name}: the planner wants a block of shape {sizes}, and resolves it to a tensor of shape "
                f"{tuple(tensor.shape)}"
            )
        # Offsets are within the chunk, and a chunk is the whole tensor.
        return cls(item, tensor, tuple(item.storage_offsets), sizes)


def _lay_out(contents: _SourceContents, wanted: Sequence[_Wanted]) -> tuple[object, list[BlockPair]]:
    """The targets by name for messages, and which block of which leaf goes into each target."""
    shards = Counter(one.item.storage_index.fqn for one in wanted)
    target: dict[str, torch.Tensor] = {}
    links: list[BlockPair] = []
    for one in wanted:
        name = one.item.storage_index.fqn
        if name not in contents.numbers:
            raise StateError(f"leaf {name}: the source that held it is gone")
        label = name if shards[name] == 1 else f"{name}, {len(links)}: from {one.start}"
        links.append(BlockPair(contents.numbers[name], len(links), one.start, (0,) * len(one.sizes), one.sizes))
        target[label] = one.tensor
    if not links:
        # A receive that wants nothing would be taken for one in which no name matched.
        for name, number in contents.numbers.items():
            entry = contents.metadata.state_dict_metadata[name]
            assert isinstance(entry, TensorStorageMetadata)
            nothing = (0,) * len(entry.size)
            target[name] = torch.empty(nothing, dtype=entry.properties.dtype)
            links.append(BlockPair(number, 0, nothing, nothing, nothing))
            break
    return target, links


# --------------------------------------------------------------------------------------------------------- one receive


class _Load:
    """A receive in a thread of its own. It waits until DCP says what goes where."""

    def __init__(self, receive: Callable[[Late], object], seconds: float) -> None:
        self._receive, self._seconds = receive, seconds
        self._changed = threading.Condition()
        self._catalogue: Catalogue | None = None
        self._plan: Callable[[Catalogue], tuple[object, list[BlockPair]]] | None = None
        self._given_up: str | None = None
        self._over = False
        self._error: BaseException | None = None
        #: The caller's streams on the devices of all targets.
        self._callers: list[torch.Stream] = []
        self._thread = threading.Thread(target=self._run, name="transfuse-dcp", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        error: BaseException | None = None
        try:
            self._receive(self._late)
        except BaseException as caught:
            error = caught
        with self._changed:
            self._error, self._over = error, True
            self._changed.notify_all()

    def _late(self, catalogue: Catalogue) -> tuple[object, list[BlockPair]]:
        """Called by the receive, again if what was wanted is not offered yet."""
        with self._changed:
            self._catalogue = self._catalogue or catalogue
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._plan is not None or self._given_up is not None, self._seconds)
            plan, given_up = self._plan, self._given_up
        if given_up is not None:
            raise TransfuseError(given_up)
        if plan is None:
            raise TransfuseError(
                f"no data was read within {self._seconds:g} s after the metadata: the load has failed, here or at "
                "another rank"
            )
        callers, self._callers = self._callers, []
        streams.involve(callers)
        return plan(catalogue)

    def catalogue(self) -> Catalogue:
        """Wait until the sources have said what they have."""
        with self._changed:
            self._changed.wait_for(lambda: self._catalogue is not None or self._over)
            if self._catalogue is None:
                assert self._error is not None
                raise self._error
            return self._catalogue

    def finish(
        self, plan: Callable[[Catalogue], tuple[object, list[BlockPair]]], targets: Sequence[torch.Tensor]
    ) -> None:
        """Say what goes where, and wait until it has arrived."""
        with self._changed:
            self._callers = [torch.accelerator.current_stream(device) for device in streams.devices_of(targets)]
            self._plan = plan
            self._changed.notify_all()
        interrupt: KeyboardInterrupt | None = None
        while not self._over:
            try:
                with self._changed:
                    self._changed.wait_for(lambda: self._over)
            except KeyboardInterrupt as caught:
                interrupt = caught  # The receive writes to the caller's memory: do not raise while it may still do so.
        self.join()
        error = interrupt or self._error
        if error is not None:
            raise error

    def give_up(self, why: str) -> None:
        """End the receive. Without effect once it knows what goes where."""
        with self._changed:
            if self._plan is None and self._given_up is None:
                self._given_up = why
                self._changed.notify_all()

    def join(self) -> None:
        """Wait for the receive to end, which it does within the transport's timeout, whatever the sources do."""
        self._thread.join()
