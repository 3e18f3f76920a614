"""Keepers as storage of ``torch.distributed.checkpoint``: what a rank writes is the state that it commits.

DCP's planner has decided which rank writes what: tensors that ranks share are written by one of them. So a rank commits
exactly its own part, under names that say where each piece belongs:

    {"format": "transfuse.dcp 1",
     "whole":  {name: tensor},                      # whole tensors
     "shards": {"name@0,64/128,128": tensor},       # blocks: where the block begins, and the size of the whole tensor
     "values": {name: value},                       # everything else, as plain data
     "names":  JSON}                                # the keys down to each leaf, from the planner

All ranks' parts together are the checkpoint. DCP's metadata is made of them at a load, so nothing else is stored.
"""

from __future__ import annotations

import io
import json
import math
import os
import re
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import PurePath
from types import TracebackType
from typing import Any, NamedTuple, Self

import msgspec
import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadItemType,
    LoadPlan,
    LoadPlanner,
    ReadItem,
    SavePlan,
    SavePlanner,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter, WriteResult
from torch.futures import Future

from transfuse._errors import StateError, TransfuseError, UnsupportedLeaf
from transfuse._job.face import one_manner
from transfuse._job.state import State
from transfuse._keeper import restoring
from transfuse._keeper.client import Keep, access_of
from transfuse._keeper.restored import RestoredState
from transfuse._keeper.unrestorable import objects_in
from transfuse._limits import Limits
from transfuse._memory.building import build_over
from transfuse._remote.client import fetch
from transfuse._state import trees
from transfuse._state.leaves import values
from transfuse._state.manifest import Described, Manifest, Wire, describe
from transfuse._wire.roll_call import Failure

FORMAT = "transfuse.dcp 1"
#: The outcomes of a commit whose state the keeper has. "pending": other ranks come later, and DCP waits for them.
TAKEN = ("committed", "pending")

CheckpointId = str | os.PathLike[str] | int


def step_of(checkpoint_id: CheckpointId | None) -> int | None:
    """The step that a checkpoint id means: the last number in the last part of the path."""
    if checkpoint_id is None or isinstance(checkpoint_id, int):
        return checkpoint_id
    found = re.findall(r"\d+", PurePath(checkpoint_id).name)
    if not found:
        raise ValueError(
            f"checkpoint_id {os.fspath(checkpoint_id)!r} has no number, and keepers know checkpoints by step: use "
            "an id such as 'step-100'"
        )
    return int(found[-1])


def _done(result: Any) -> Future[Any]:
    future: Future[Any] = Future()
    future.set_result(result)
    return future


# ----------------------------------------------------------------------------------------------------------- saving


class KeeperWriter(StorageWriter):
    """Saves into the keepers' memory: ``dcp.save(state, storage_writer=KeeperWriter(keep), checkpoint_id="step-100")``.

    All ranks of ``keep``'s group save together. Steps rise. A save has succeeded when it returns; replicas on other
    hosts follow in the background.

    Args:
        keep: what :func:`transfuse.keep` returned. Its ``state_dict`` is not called.
        checkpoint_id: the step, or a text whose last number is the step. ``checkpoint_id`` of ``dcp.save`` replaces it.
        strict: raise if the keeper could not take the state: it is lost, or all its memory holds steps that other hosts
            have not replicated yet. False: a warning, and training goes on.
    """

    @one_manner
    def __init__(self, keep: Keep, checkpoint_id: CheckpointId | None = None, *, strict: bool = True) -> None:
        super().__init__()
        if not isinstance(keep, Keep):
            raise TypeError(f"KeeperWriter takes what transfuse.keep() returns, got a {type(keep).__name__}")
        if (every := access_of(keep).settings.every) != 1:
            raise ValueError(f"keep(every={every}) would leave out saves: use every=1")
        self._keep, self._strict = keep, strict
        self._step = step_of(checkpoint_id)

    def reset(self, checkpoint_id: CheckpointId | None = None) -> None:
        self._step = step_of(checkpoint_id)

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        if not kwargs.get("use_collectives", True):
            raise ValueError("use_collectives=False: the ranks would not divide the state among themselves")
        rank = kwargs.get("rank", self._keep.rank)
        if rank != self._keep.rank:
            raise ValueError(
                f"this process is rank {rank} of DCP's group and rank {self._keep.rank} of keep()'s: give both the same"
            )
        step, last = self._step, self._keep.report
        if step is None:
            raise ValueError("which step? Pass checkpoint_id='step-100' to dcp.save, or a step to KeeperWriter")
        if last is not None and step <= last.step and last.outcome in TAKEN:
            raise ValueError(f"step {step} was to be saved after step {last.step}: steps must rise")

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        if len(plans) != self._keep.world_size:
            raise ValueError(
                f"{len(plans)} ranks save, but keep() was called by {self._keep.world_size}: give both the same group"
            )
        return plans

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Copy what the plan gives to this rank into the memory of this host's keeper."""
        assert self._step is not None
        report = self._keep.commit(self._step, state=_part_of(plan, planner))
        if report is not None and report.outcome not in TAKEN and self._strict:
            raise TransfuseError(f"step {self._step} was not saved: {report.why}")
        return _done([WriteResult(item.index, _bytes_in(item), self._keep.rank) for item in plan.items])

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Nothing: a step counts when all ranks have committed it."""

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: CheckpointId) -> bool:
        """False: no checkpoint id leads to keepers. Pass the writer itself."""
        return False


def _bytes_in(item: WriteItem) -> int:
    if item.tensor_data is None:
        return 0 if item.bytes_io_data is None else item.bytes_io_data.nbytes
    return math.prod(item.tensor_data.chunk.sizes) * item.tensor_data.properties.dtype.itemsize


def _part_of(plan: SavePlan, planner: SavePlanner) -> dict[str, Any]:
    """What a rank commits."""
    whole: dict[str, torch.Tensor] = {}
    shards: dict[str, torch.Tensor] = {}
    others: dict[str, Any] = {}
    for item in plan.items:
        name = item.index.fqn
        if item.type == WriteItemType.BYTE_IO:
            others[name] = _plain_value(item, planner)
            continue
        assert item.tensor_data is not None
        tensor = _plain_tensor(name, planner.resolve_data(item))
        chunk, size = item.tensor_data.chunk, item.tensor_data.size
        if tuple(chunk.sizes) == tuple(size):
            whole[name] = tensor
        else:
            shards[f"{name}@{_numbers(chunk.offsets)}/{_numbers(size)}"] = tensor
    _refuse_objects(others)
    return {"format": FORMAT, "whole": whole, "shards": shards, "values": others, "names": _names(plan.planner_data)}


def _plain_tensor(name: str, data: object) -> torch.Tensor:
    if not isinstance(data, torch.Tensor):
        raise UnsupportedLeaf(name, f"the planner gives a {type(data).__name__} where it has announced a tensor")
    tensor = data.detach()
    if type(tensor) is not torch.Tensor or tensor.layout is not torch.strided:
        raise UnsupportedLeaf(name, f"a {type(tensor).__name__} of layout {tensor.layout}; only plain tensors are kept")
    return tensor.resolve_conj().resolve_neg()


def _plain_value(item: WriteItem, planner: SavePlanner) -> object:
    """A value of the state, or the one that the planner gives in its place. The planner has pickled it just now."""
    name = item.index.fqn
    if isinstance(planner, DefaultSavePlanner) and _pickles_as_they_are(type(planner)):
        return planner.lookup_object(item.index)
    data = planner.resolve_data(item)
    if not isinstance(data, io.BytesIO):
        raise UnsupportedLeaf(name, f"the planner gives a {type(data).__name__} where it has announced bytes")
    data.seek(0)
    try:
        return torch.load(data, weights_only=False)
    except Exception as error:
        raise UnsupportedLeaf(name, f"the planner writes what torch.load does not read: {error}") from error


def _pickles_as_they_are(kind: type[DefaultSavePlanner]) -> bool:
    """Whether a planner pickles values as they are in the state: then nobody needs to unpickle them."""
    default = DefaultSavePlanner
    return kind.resolve_data is default.resolve_data and kind.transform_object is default.transform_object


def _refuse_objects(others: Mapping[str, Any]) -> None:
    """Refuse values that a reader could have only by unpickling what another process has pickled."""
    try:
        if not _has_objects(others):
            return
    except UnsupportedLeaf:
        pass
    # Find the first one: DCP's name for it is what the user knows.
    for name, value in others.items():
        try:
            refused = _has_objects(value)
        except UnsupportedLeaf as error:
            raise UnsupportedLeaf(name, f"{error.reason}; keepers hold plain data only") from error
        if refused:
            raise UnsupportedLeaf(name, "an object that only pickle can carry; keepers hold plain data only")


def _has_objects(value: object) -> bool:
    return any(objects_in(describe(value, Limits()).manifest))


def _names(planner_data: object) -> str:
    """DCP's own planners say here how to nest the flat names again. Data of other planners is not kept."""
    if not isinstance(planner_data, Mapping):
        return ""
    for name, keys in planner_data.items():
        if not isinstance(name, str) or not isinstance(keys, tuple) or not all(type(key) in (str, int) for key in keys):
            return ""
    return json.dumps(dict(planner_data))


def _numbers(sizes: Sequence[int]) -> str:
    return ",".join(map(str, sizes))


# ---------------------------------------------------------------------------------------------- what a rank has written


class _TensorPiece(msgspec.Struct, array_like=True, frozen=True):
    """A tensor of a rank's part, and which block of which global tensor it is."""

    kind: str
    key: str
    name: str
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    whole: tuple[int, ...]
    dtype: str


class _Part(msgspec.Struct, array_like=True, frozen=True):
    """All of a rank's part but the tensors, as it travels between the ranks of several hosts."""

    pieces: list[_TensorPiece]
    names: str
    values: Wire
    #: The bytes of the tensors, arrays and long texts within the values.
    memory: list[bytes]


def _summary(state: Any) -> _Part:
    """A rank's part without its tensors. ``state`` is what it has committed."""
    if not isinstance(state, Mapping) or state.get("format") != FORMAT:
        raise TransfuseError("what the keeper holds was not saved by a KeeperWriter: keep.restore() restores it")
    pieces = []
    for kind in ("whole", "shards"):
        for key, tensor in state[kind].items():
            name, shape = key, tuple(tensor.shape)
            offsets, whole = (0,) * len(shape), shape
            if kind == "shards":
                name, _, where = key.rpartition("@")
                offsets, whole = (tuple(map(int, filter(None, one.split(",")))) for one in where.split("/"))
            pieces.append(_TensorPiece(kind, key, name, offsets, shape, whole, values.dtype_name(tensor.dtype)))
    described = describe(state["values"], Limits())
    return _Part(pieces, state["names"], described.manifest.encode(), list(_memory(described)))


def _memory(described: Described) -> Iterator[bytes]:
    for number, nbytes in enumerate(described.manifest.storages.nbytes.tolist()):
        data = torch.empty(0, dtype=torch.uint8)
        data.set_(described.storages[number], int(described.windows[number]), (nbytes,), (1,))
        yield data.numpy().tobytes()


def _values_of(part: _Part) -> Mapping[str, Any]:
    manifest = Manifest.decode(part.values, Limits())
    memory = [torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else _NOTHING for data in part.memory]
    built = build_over(manifest, [memory[number] for number in manifest.tensors.storage.tolist()])
    assert isinstance(built, Mapping)
    return built


_NOTHING = torch.empty(0, dtype=torch.uint8)


# ---------------------------------------------------------------------------------------------------------- loading


class KeeperReader(StorageReader):
    """Loads from the keepers' memory: ``dcp.load(state, storage_reader=KeeperReader(keep))``.

    All ranks of ``keep``'s group load together. They may be other ranks than those that saved, with other meshes.

    Args:
        keep: what :func:`transfuse.keep` returned.
        checkpoint_id: the step to load, or a text whose last number is the step. ``checkpoint_id`` of ``dcp.load``
            replaces it. None: the newest.
    """

    @one_manner
    def __init__(self, keep: Keep, checkpoint_id: CheckpointId | None = None) -> None:
        super().__init__()
        if not isinstance(keep, Keep):
            raise TypeError(f"KeeperReader takes what transfuse.keep() returns, got a {type(keep).__name__}")
        self._keep = keep
        self._wanted = step_of(checkpoint_id)
        self._step: int | None = None
        self._checkpoint: _Checkpoint | None = None
        self._watch: weakref.finalize[[_Checkpoint], KeeperReader] | None = None
        self._failure: BaseException | None = None

    @property
    def step(self) -> int | None:
        """The step that the last load read."""
        return self._step

    @property
    def failure(self) -> BaseException | None:
        """The error that this reader raised in the last load: DCP passes on a copy of it, or only its text."""
        return self._failure

    def newest_step(self) -> int | None:
        """The newest step that can be loaded. Every rank calls this.

        None if the run has never saved one. Raises if it has, or may have, and none of them can be loaded now.
        """
        found = _CommonSteps(self._keep)
        if found.candidates:
            return found.candidates[0].label.step
        if found.has_held:
            raise StateError(f"this run has saved steps, and none of them can be loaded now{found.why()}")
        if found.silent:
            raise StateError(restoring.not_known(found.silent, access_of(self._keep).seconds))
        return None

    def close(self) -> None:
        """Let the keeper go on with what a load has used. Only after a load that failed is there something to do."""
        checkpoint, self._checkpoint = self._checkpoint, None
        if self._watch is not None:
            self._watch.detach()
            self._watch = None
        if checkpoint is not None:
            checkpoint.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    # ------------------------------------------------------------------------------------- what DCP calls, in order

    def reset(self, checkpoint_id: CheckpointId | None = None) -> None:
        self.close()
        self._wanted = step_of(checkpoint_id)

    # The parameter must not be named kwargs: torch would ask again after a failure, for the metadata of single ranks.
    def read_metadata(self, *args: Any, **options: Any) -> Metadata:
        """Find the step on all hosts, and make DCP's metadata from what the ranks have written."""
        self.close()
        self._failure = None
        try:
            checkpoint = self._checkpoint = _open(self._keep, self._wanted)
        except BaseException as error:
            self._failure = error
            raise
        self._watch = weakref.finalize(self, _close_aside, checkpoint)
        self._watch.atexit = False
        return checkpoint.contents.metadata

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        pass

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Copy what the plan wants into the planner's tensors."""
        checkpoint = self._checkpoint
        if checkpoint is None:
            raise RuntimeError("read_data was called without read_metadata: call read_metadata first, for every load")
        try:
            checkpoint.contents.read(plan, planner)
        except BaseException as error:
            self._failure = error
            raise
        finally:
            try:
                checkpoint.end()
            finally:
                self.close()
        self._step = checkpoint.step
        return _done(None)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: CheckpointId) -> bool:
        """False: no checkpoint id leads to keepers. Pass the reader itself."""
        return False


class _CommonSteps:
    """The steps that all keepers hold together, newest first. Every rank makes one at the same time."""

    def __init__(self, keep: Keep) -> None:
        rows = restoring.gather_holdings(access_of(keep))
        self.has_held = any(one.has_held for one in rows)
        candidates = restoring.candidates_in(keep.members, rows)
        #: Only steps of which no rank's part is missing: each rank holds what no other has.
        self.candidates = [one for one in candidates if not one.missing]
        #: Of hosts whose keepers have not answered.
        self.silent = [why for one in rows for why in (one.failure, one.trouble) if why]
        self.reasons = self.silent + [
            f"step {one.label.step}: the parts of ranks {one.missing} of {one.world_size} are missing"
            for one in candidates
            if one.missing
        ]

    def why(self) -> str:
        return "".join(f"\n  {reason}" for reason in self.reasons)


def _open(keep: Keep, wanted: int | None) -> _Checkpoint:
    """Open a step, or the newest one that all ranks can open."""
    found = _CommonSteps(keep)
    for candidate in found.candidates:
        if wanted is not None and candidate.label.step != wanted:
            continue
        stack = ExitStack()
        try:
            return _Checkpoint(keep, candidate, stack)
        except restoring.Forbidden as error:
            stack.close()
            found.reasons.append(f"step {candidate.label.step}: {error}")
        except BaseException:
            stack.close()
            raise
    if wanted is None:
        raise StateError(f"the keepers of this run hold no checkpoint that can be loaded{found.why()}")
    held = sorted({candidate.label.step for candidate in found.candidates}) or "none"
    raise StateError(f"the keepers of this run cannot load step {wanted}; steps that they hold: {held}{found.why()}")


def _close_aside(checkpoint: _Checkpoint) -> None:
    """Close it in a thread: the collector may have interrupted another question to the keeper."""
    threading.Thread(target=checkpoint.close, name="transfuse-dcp-close", daemon=True).start()


class _PieceHome(NamedTuple):
    """Where a piece is: in the part of which rank, and under which key."""

    rank: int
    kind: str
    key: str
    sizes: tuple[int, ...]
    dtype: torch.dtype


class WrittenParts:
    """What all ranks' parts hold together."""

    def __init__(
        self,
        parts: Mapping[int, _Part],
        here: Mapping[int, Any],
        fetch: Callable[[int, Sequence[_PieceHome]], Any] | None = None,
    ) -> None:
        """``here``: the parts that lie in this process, by rank. ``fetch``: brings pieces of others."""
        self._here, self._fetch = here, fetch
        self._values: dict[str, Any] = {}
        self._places: dict[MetadataIndex, _PieceHome] = {}
        self.metadata = self._describe(parts)

    @classmethod
    def of(cls, states: Mapping[int, RestoredState]) -> WrittenParts:
        """Of parts that all lie in this process."""
        here = {rank: _state_of(one) for rank, one in states.items()}
        return cls({rank: _summary(state) for rank, state in here.items()}, here)

    def _describe(self, parts: Mapping[int, _Part]) -> Metadata:
        entries: dict[str, TensorStorageMetadata | BytesStorageMetadata] = {}
        names: dict[str, Any] = {}
        for rank, part in sorted(parts.items()):
            for piece in part.pieces:
                dtype = values.dtype_named(piece.dtype)
                size = torch.Size(piece.whole)
                entry = entries.setdefault(piece.name, TensorStorageMetadata(TensorProperties(dtype), size, []))
                assert isinstance(entry, TensorStorageMetadata)
                entry.chunks.append(ChunkStorageMetadata(torch.Size(piece.offsets), torch.Size(piece.sizes)))
                place = _PieceHome(rank, piece.kind, piece.key, piece.sizes, dtype)
                self._places[MetadataIndex(piece.name, piece.offsets)] = place
            own = self._here[rank]["values"] if rank in self._here else _values_of(part)
            for name, value in own.items():
                entries[name], self._values[name] = BytesStorageMetadata(), value
            if part.names:
                names = {name: tuple(keys) for name, keys in json.loads(part.names).items()} | names
        return Metadata(entries, planner_data=names or None)

    def read(self, plan: LoadPlan, planner: LoadPlanner) -> None:
        tensors: dict[int, list[tuple[ReadItem, _PieceHome]]] = {}
        for item in plan.items:
            if item.type == LoadItemType.BYTE_IO:
                planner.load_bytes(item, self._saved(item.storage_index.fqn))
                continue
            place = self._places.get(item.storage_index)
            if place is None:
                raise StateError(f"leaf {item.storage_index.fqn}: the planner wants a block that nobody has written")
            tensors.setdefault(place.rank, []).append((item, place))
        for rank, items in sorted(tensors.items()):
            if rank in self._here:
                state = self._here[rank]
            else:
                assert self._fetch is not None
                state = self._fetch(rank, [place for _, place in items])
            for item, place in items:
                _copy(state[place.kind][place.key], item, planner)

    def _saved(self, name: str) -> io.BytesIO:
        """A value as DCP expects it. Nothing that another process has pickled is ever unpickled."""
        if name not in self._values:
            raise StateError(f"leaf {name}: the planner wants a value, and nobody has written one of this name")
        stream = io.BytesIO()
        torch.save(self._values[name], stream)
        stream.seek(0)
        return stream


class _Checkpoint:
    """A step that is open on all ranks."""

    def __init__(self, keep: Keep, candidate: restoring.Candidate, stack: ExitStack) -> None:
        access, self._stack = access_of(keep), stack
        self.step = candidate.label.step
        members, self._seconds = access.members, access.seconds
        self._members = members
        request = restoring.RestoreRequest(state=State({}), load_rank_state=None, missing_ok=False)
        attempt = restoring.Attempt(access, request, candidate, stack)
        # Whatever their number, each rank may need what others have written.
        attempt.same = False
        local = [rank for rank, hosts in candidate.holders.items() if members.host in hosts]
        failure: Failure | None = None
        parts: dict[int, _Part] = {}
        #: The parts that this host's keeper holds, over its memory.
        self._here: dict[int, Any] = {}
        try:
            self._here = {rank: _state_of(one) for rank, one in attempt.open(sorted(local)).items()}
            parts = {rank: _summary(state) for rank, state in self._here.items()}
        except TransfuseError as error:
            failure = Failure.of(error, str(error))
        self._addresses = attempt.serve(failure)
        if len(members.ranks) > 1:
            mine = {rank: one for rank, one in parts.items() if members.host == candidate.holders[rank][0]}
            mine = mine if members.speaks else {}
            for row in attempt.agree_to("telling what the ranks have written", None, msgspec.msgpack.encode(mine)):
                parts |= msgspec.msgpack.decode(row, type=dict[int, _Part])
        self.contents = WrittenParts(parts, self._here, self._fetch)

    def _fetch(self, rank: int, places: Sequence[_PieceHome]) -> Any:
        """The pieces that another host's keeper holds, in fresh memory."""
        target: dict[str, dict[str, torch.Tensor]] = {"whole": {}, "shards": {}}
        for place in places:
            target[place.kind][place.key] = torch.empty(place.sizes, dtype=place.dtype)
        wanted = {f"{place.kind}.{place.key}" for place in places}
        served = self._addresses.get(rank)
        if served is None:
            raise StateError(f"no keeper that holds the part of rank {rank} can be reached")
        return fetch(
            served.address,
            target,
            token=self._members.token,
            timeout=self._seconds,
            step=self.step,
            tls=self._members.tls or False,
            map_path=lambda path: path if path in wanted else None,
        ).state

    def end(self) -> None:
        """This rank has read what it needs. Keepers serve other hosts until all have."""
        if len(self._members.ranks) > 1:
            self._members.agreement.gather(b"", "ending the load")

    def close(self) -> None:
        self._here.clear()
        self._stack.close()


def is_part(root: trees.Node | None) -> bool:
    """Whether a state of this tree was committed by a :class:`KeeperWriter`."""
    return root is not None and root.keys == ["format", "whole", "shards", "values", "names"]


def _state_of(restored: RestoredState) -> Any:
    return build_over(restored.state.manifest, restored.state.tensors)


def _copy(source: torch.Tensor, item: ReadItem, planner: LoadPlanner) -> None:
    for dim, (start, length) in enumerate(zip(item.storage_offsets, item.lengths, strict=True)):
        source = source.narrow(dim, start, length)
    target = planner.resolve_tensor(item).detach()
    if target.shape != source.shape:
        raise StateError(
            f"leaf {item.storage_index.fqn}: the planner wants a block of shape {tuple(source.shape)}, and resolves it "
            f"to a tensor of shape {tuple(target.shape)}"
        )
    target.copy_(source)
    planner.commit_tensor(item, target)
