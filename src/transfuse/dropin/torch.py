"""PyTorch's ``torch.distributed.checkpoint._pg_transport``, under its own names and on its own wire.

**This wire carries pickle and is for trusted peers only**: a peer that can send to a receiver can run code in it. This
module exists so that one end of a job can be upgraded before the other. If you can change both ends, use
``transfuse.PGTransport``.

PyTorch chose what is on the wire: on tag 1 the length of a pickle as one int64, on tag 2 the pickle of a
``_StateDictMeta``, then from tag 3 on the whole storage of every tensor, in the order of the leaves. Nothing flows
back. So a receiver that refuses, which it does before it writes a byte, cannot tell the sender: the sender learns of it
by its own timeout. After a timeout a gloo group is unusable, because gloo closes all connections of the rank that gave
up. And progress is seen message by message: ``timeout`` must allow for the largest single tensor.

What differs from PyTorch's module:

- ``timeout`` is honoured. A peer without progress raises ``PeerTimeout``, a broken connection ``PeerLost``.
- A sender with several receivers serves each on its own. If one fails, the others go on, and ``SendFailed`` names the
  failed ones at the end. A failed send always raises ``SendFailed``, also with one receiver.
- Parameters, conjugated and negated views, and unfinished collectives are sent by value. A leaf that this wire cannot
  carry raises ``UnsupportedLeaf`` before anything is sent.
- A receiver in place checks everything against the metadata first and raises ``TargetMismatch`` with nothing written.
  Targets of another memory layout or device, and views into larger storages, are updated by copy, and nothing beside
  them is touched. The receiver returns its own target tensors: parameters stay parameters, and DTensors and
  ShardedTensors stay the receiver's own.

As in PyTorch's module, a source leaf whose path has no tensor in the target is returned as a new CPU tensor, non-tensor
leaves are returned and not written anywhere, and target leaves that the source does not have stay as they are.
"""

from __future__ import annotations

import logging
import pickle
import threading
import time
import warnings
from collections import deque
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from torch.distributed import ProcessGroup, Work, get_rank, is_initialized
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed._shard.metadata import ShardMetadata
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed._shard.sharded_tensor.shard import Shard

# The peer unpickles these by name, so they have to be PyTorch's own classes.
from torch.distributed.checkpoint._pg_transport import _DTensorMeta, _ShardedTensorMeta, _StateDictMeta, _TensorMeta
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec
from torch.utils._pytree import KeyPath, keystr, tree_flatten_with_path, tree_unflatten

from transfuse._errors import (
    PeerError,
    PeerLost,
    PeerTimeout,
    ProtocolError,
    SendFailed,
    TargetMismatch,
    TransfuseError,
    UnsupportedLeaf,
)
from transfuse._state import live_tensors
from transfuse._state.memory_maps import Mappings
from transfuse._tuning import (
    DROPIN_END_SECONDS,
    DROPIN_LEAST_SECONDS,
    DROPIN_MAX_META_BYTES,
    DROPIN_PATIENCE_SECONDS,
    DROPIN_WINDOW_BYTES,
)

__all__ = [
    "PGTransport",
    "_DTensorMeta",
    "_ShardedTensorMeta",
    "_StateDictMeta",
    "_TensorMeta",
    "_cast_tensor",
    "_prepare_state_dict",
    "_prepare_tensor",
    "_timeit",
]

logger: logging.Logger = logging.getLogger(__name__)

_LENGTH_TAG, _META_TAG, _FIRST_TENSOR_TAG = 1, 2, 3

_LEAST_TIMEOUT = timedelta(seconds=DROPIN_LEAST_SECONDS)


@contextmanager
def _timeit(name: str) -> Generator[None, None, None]:
    """Log how long the body took, also when it raised."""
    start = time.perf_counter()
    try:
        yield
    finally:
        logger.info("%s took %.6fs", name, time.perf_counter() - start)


class _NoPlainMemoryError(Exception):
    """A tensor that is more than elements of one storage. The message completes "it is ..."."""


def _plain(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory as an ordinary tensor outside autograd. Waits for a collective that still fills it."""
    if isinstance(tensor, AsyncCollectiveTensor):
        tensor = tensor.trigger_wait()  # type: ignore[no-untyped-call]
    if tensor.is_nested:
        raise _NoPlainMemoryError("a nested tensor")
    if tensor.layout != torch.strided:
        raise _NoPlainMemoryError(f"a tensor of layout {tensor.layout}")
    if tensor.is_quantized:
        raise _NoPlainMemoryError("a quantized tensor")
    if tensor.is_meta:
        raise _NoPlainMemoryError("a meta tensor, without any values")
    if type(tensor).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__:
        raise _NoPlainMemoryError(f"a {type(tensor).__module__}.{type(tensor).__qualname__}, which wraps other tensors")
    # A subclass without a dispatch of its own (nn.Parameter and the like) is ordinary memory with a Python type.
    with torch._C.DisableTorchFunctionSubclass():
        plain: torch.Tensor = tensor.detach().as_subclass(torch.Tensor)
    return plain


def _cast_tensor(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The tensor's whole storage, including bytes outside the tensor, as a flat tensor of ``dtype``."""
    try:
        plain = _plain(tensor)
    except _NoPlainMemoryError as error:
        raise UnsupportedLeaf("", f"has no storage to view as {dtype}: it is {error}") from None
    return torch.empty(0, dtype=dtype, device=plain.device).set_(plain.untyped_storage())


def _describe(tensor: torch.Tensor) -> _TensorMeta:
    return _TensorMeta(
        shape=tensor.shape,
        dtype=tensor.dtype,
        storage_offset=int(tensor.storage_offset()),
        stride=tensor.stride(),
        nbytes=tensor.untyped_storage().nbytes(),
    )


def _prepare_tensor(tensor: torch.Tensor, *, path: str = "") -> tuple[torch.Tensor, _TensorMeta]:
    """The bytes to send for a tensor, and their description."""
    try:
        plain = _plain(tensor)
        # This wire cannot express these flags, nor a storage that ends within an element: send values instead.
        plain = plain.clone() if plain._is_zerotensor() else plain.resolve_conj().resolve_neg()
        if plain.untyped_storage().nbytes() % plain.itemsize:
            plain = plain.clone(memory_format=torch.contiguous_format)
    except _NoPlainMemoryError as error:
        raise UnsupportedLeaf(path, f"it is {error}; convert it to an ordinary tensor") from None
    except RuntimeError as error:
        raise UnsupportedLeaf(path, f"its memory cannot be read: {error}") from error
    meta = _describe(plain)
    if _needed_nbytes(meta) > meta.nbytes:
        raise UnsupportedLeaf(path, f"its storage holds {meta.nbytes} bytes of {_needed_nbytes(meta)}: it was freed")
    return _cast_tensor(plain, torch.uint8), meta


def _prepare(state_dict: object) -> tuple[_StateDictMeta, list[tuple[str, torch.Tensor]]]:
    """The metadata, and each tensor's bytes with the name to use in errors."""
    leaves, treespec = tree_flatten_with_path(state_dict)
    described: list[object] = []
    named: list[tuple[str, torch.Tensor]] = []

    def prepare(tensor: torch.Tensor, name: str) -> _TensorMeta:
        data, meta = _prepare_tensor(tensor, path=name)
        named.append((name, data))
        return meta

    for path, leaf in leaves:
        name = keystr(path)
        if isinstance(leaf, DTensor):
            described.append(_DTensorMeta(local=prepare(leaf._local_tensor, name), spec=leaf._spec))
        elif isinstance(leaf, ShardedTensor):
            shards = leaf.local_shards()
            described.append(
                _ShardedTensorMeta(
                    local_shards_meta=[prepare(shard.tensor, _shard_name(name, shard.metadata)) for shard in shards],
                    local_shards_shard_metadata=[shard.metadata for shard in shards],
                    sharded_tensor_metadata=leaf.metadata(),
                )
            )
        elif isinstance(leaf, torch.Tensor):
            described.append(prepare(leaf, name))
        else:
            described.append(leaf)
    gone = live_tensors.read_any([data for _, data in named]).faults(np.arange(len(named)), Mappings(), write=False)
    for row, why in gone.items():
        raise UnsupportedLeaf(named[row][0], f"its memory cannot be read: {why}")
    return _StateDictMeta(treespec, [path for path, _ in leaves], described), named


def _prepare_state_dict(state_dict: object, device: torch.device) -> tuple[_StateDictMeta, list[torch.Tensor]]:
    """The metadata and the bytes to send, one flat uint8 tensor per tensor. ``device`` is unused, as in PyTorch."""
    meta, named = _prepare(state_dict)
    return meta, [data for _, data in named]


def _pickle_problem(value: object) -> Exception | None:
    try:
        pickle.dumps(value)
    except Exception as error:  # a leaf's own __reduce__ can raise anything
        return error
    return None


def _dump(meta: _StateDictMeta) -> bytes:
    """Pickle the metadata, or name the leaf that prevents it."""
    try:
        return pickle.dumps(meta)
    except Exception as error:
        for path, leaf in zip(meta.paths, meta.non_tensor_leaves, strict=True):
            problem = _pickle_problem(leaf) or _pickle_problem(path)
            if problem:
                raise UnsupportedLeaf(keystr(path), f"cannot be pickled: {problem}") from error
        raise UnsupportedLeaf("", f"the containers cannot be pickled: {error}") from error


# --------------------------------------------------------------------------------------------- peers


def _peer_error(error: Exception, rank: int, phase: str, elapsed: float, timeout: timedelta) -> PeerError:
    """Tell a silent peer from a broken connection. Backends raise RuntimeError for both, so look at the text."""
    text = str(error).lower()
    timed_out = isinstance(error, TimeoutError) or "timed out" in text or "timeout" in text
    closed = any(word in text for word in ("closed", "closure", "reset", "broken pipe", "refused", "not connected"))
    # Look at the clock too: a wait as long as the timeout was a timeout, unless the text says otherwise. And "timeout"
    # in the text of an immediate error means an earlier timeout, after which gloo closed the connection.
    waited = elapsed >= 0.95 * timeout.total_seconds()
    if (timed_out and waited) if closed else (timed_out or waited):
        return PeerTimeout(rank, phase, elapsed)
    return PeerLost(rank, f"rank {rank}: connection lost while {phase}: {error}")


def _wait(work: Work, timeout: timedelta, rank: int, phase: str) -> None:
    start = time.monotonic()
    try:
        done = work.wait(timeout)
    except (RuntimeError, OSError) as error:
        raise _peer_error(error, rank, phase, time.monotonic() - start, timeout) from error
    if done is False:
        raise PeerLost(rank, f"rank {rank}: the operation was aborted while {phase}")


class _TorchMessage(NamedTuple):
    """A message under way. Keeps its tensor alive, because the backend reads its memory."""

    work: Work
    data: torch.Tensor
    phase: str


class _Receiver:
    """The messages under way to one receiver."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        #: Posted and not yet taken, oldest first.
        self.queue: deque[_TorchMessage] = deque()
        self.taken = 0
        self.since = 0.0  # when the oldest message became the oldest
        self.waiting = False
        self.error: Exception | None = None
        self.thread: threading.Thread | None = None


class _Outbox:
    """Posts messages to several receivers and follows each of them on its own.

    Waiting for all receivers after each message would let a silent receiver starve the others. And a wait must not run
    into its timeout: gloo has no other way to ask whether a message was taken, but when a wait expires, gloo closes the
    connections to *all* ranks. So one thread per receiver waits without a limit, this object watches the clock, and the
    connections are closed at the end, when every receiver has either everything or an error.

    Posted messages cost nothing as long as they are the caller's own memory. ``DROPIN_WINDOW_BYTES`` limits temporary
    copies. So if tensors have to be copied from another device first, a silent receiver holds up the others for one
    timeout.
    """

    def __init__(self, pg: ProcessGroup, timeout: timedelta, ranks: Sequence[int]) -> None:
        self._pg = pg
        self._timeout = timeout
        self._receivers = [_Receiver(rank) for rank in ranks]
        self._changed = threading.Condition()
        self._closed = False
        self._posted = 0
        self._copies: deque[tuple[int, int]] = deque()  # (which message, bytes)
        self._held = 0

    def __enter__(self) -> _Outbox:
        for receiver in self._receivers:
            name = f"sending to rank {receiver.rank}"
            receiver.thread = threading.Thread(target=self._follow, args=(receiver,), name=name, daemon=True)
            receiver.thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify_all()
            # Receivers that timed out; after an interruption, all that were not done.
            stuck = [
                receiver.queue[0].work
                for receiver in self._receivers
                if receiver.queue and (receiver.waiting or not receiver.error)
            ]
        for work in stuck:
            # Expiring closes the connection: nothing half sent is taken later, and the thread's wait ends.
            with suppress(RuntimeError, OSError):
                work.wait(_LEAST_TIMEOUT)
        for receiver in self._receivers:
            if receiver.thread:
                receiver.thread.join(DROPIN_END_SECONDS)

    def causes(self) -> dict[int, Exception]:
        return {receiver.rank: receiver.error for receiver in self._receivers if receiver.error}

    def completed(self) -> list[int]:
        """The ranks that have not failed so far."""
        return [receiver.rank for receiver in self._live()]

    def post(self, data: torch.Tensor, tag: int, phase: str, cost: int = 0) -> None:
        for receiver in self._live():
            start = time.monotonic()
            try:
                work = self._pg.send([data], receiver.rank, tag=tag)
            except (RuntimeError, OSError) as error:
                receiver.error = _peer_error(error, receiver.rank, phase, time.monotonic() - start, self._timeout)
                continue
            with self._changed:
                if not receiver.queue:
                    receiver.since = time.monotonic()
                receiver.queue.append(_TorchMessage(work, data, phase))
                self._changed.notify_all()
        if cost:
            self._copies.append((self._posted, cost))
            self._held += cost
        self._posted += 1
        if self._held > DROPIN_WINDOW_BYTES:
            self._watch_until(lambda: self._still_held() <= DROPIN_WINDOW_BYTES)

    def drain(self) -> None:
        self._watch_until(lambda: not any(receiver.queue for receiver in self._live()))

    def _live(self) -> list[_Receiver]:
        return [receiver for receiver in self._receivers if not receiver.error]

    def _still_held(self) -> int:
        taken = min((receiver.taken for receiver in self._live()), default=self._posted)
        while self._copies and self._copies[0][0] < taken:
            self._held -= self._copies.popleft()[1]
        return self._held

    def _watch_until(self, ready: Callable[[], bool]) -> None:
        seconds = self._timeout.total_seconds()
        with self._changed:
            while not ready():
                now = time.monotonic()
                soonest = seconds
                for receiver in self._live():
                    if not receiver.queue:
                        continue
                    if now - receiver.since >= seconds:
                        receiver.error = PeerTimeout(receiver.rank, receiver.queue[0].phase, now - receiver.since)
                    soonest = min(soonest, receiver.since + seconds - now)
                if soonest > 0:
                    self._changed.wait(soonest)

    def _follow(self, receiver: _Receiver) -> None:
        """Wait for one receiver's messages in order, until an error or the end."""
        while True:
            with self._changed:
                self._changed.wait_for(lambda: receiver.queue or receiver.error or self._closed)
                if receiver.error or self._closed:
                    return
                work, _, phase = receiver.queue[0]
                receiver.waiting = True
            error: Exception | None = None
            try:
                _wait(work, timedelta(seconds=DROPIN_PATIENCE_SECONDS), receiver.rank, phase)
            except Exception as caught:  # no other thread would see it
                error = caught
            with self._changed:
                receiver.waiting = False
                receiver.queue.popleft()
                receiver.taken += 1
                receiver.since = time.monotonic()
                receiver.error = receiver.error or error
                self._changed.notify_all()


# ------------------------------------------------------------------------------------------ receiving


def _needed_nbytes(meta: _TensorMeta) -> int:
    """The storage size that the tensor's furthest element needs."""
    if 0 in meta.shape:
        return 0
    last = sum((size - 1) * stride for size, stride in zip(meta.shape, meta.stride, strict=True))
    return (int(meta.storage_offset) + last + 1) * meta.dtype.itemsize


def _shares_memory(meta: _TensorMeta) -> bool:
    """Whether several elements may have one address. Also true for rare layouts that interleave without sharing."""
    reach = 0
    for stride, size in sorted(zip(meta.stride, meta.shape, strict=True)):
        if size > 1 and stride <= reach:
            return 0 not in meta.shape
        reach += (size - 1) * stride
    return False


def _covers_storage(meta: _TensorMeta) -> bool:
    """Whether every byte of the storage belongs to the tensor."""
    extent = 1
    for stride, size in sorted(zip(meta.stride, meta.shape, strict=True)):
        if size == 1 or stride == 0:  # such a dimension does not reach further
            continue
        if stride != extent:
            return False
        extent *= size
    return meta.storage_offset == 0 and extent * meta.dtype.itemsize == meta.nbytes


def _check_meta(rank: int, name: str, meta: object) -> None:
    """Refuse a description that is not a view within its own bytes, before anything is allocated."""

    def count(value: object) -> bool:
        return isinstance(value, int) and not isinstance(value, bool) and value >= 0

    def counts(values: object) -> bool:
        return isinstance(values, tuple) and all(map(count, values))

    if not isinstance(meta, _TensorMeta):
        raise ProtocolError(rank, f"rank {rank} sent something else than a tensor description for {name}: {meta!r}")
    if not (
        isinstance(meta.dtype, torch.dtype)
        and counts(meta.shape)
        and counts(meta.stride)
        and len(meta.shape) == len(meta.stride)
        and count(meta.storage_offset)
        and count(meta.nbytes)
    ):
        raise ProtocolError(rank, f"rank {rank} sent a malformed description of {name}: {meta!r}")
    if _needed_nbytes(meta) > meta.nbytes:
        raise ProtocolError(
            rank, f"rank {rank} describes {name} as reaching to byte {_needed_nbytes(meta)} of {meta.nbytes}: {meta!r}"
        )


def _view(data: torch.Tensor, meta: _TensorMeta) -> torch.Tensor:
    """The described tensor within its received bytes."""
    whole = data[: data.numel() - data.numel() % meta.dtype.itemsize]
    return whole.view(meta.dtype).as_strided(meta.shape, meta.stride, meta.storage_offset)


def _same_device(one: torch.device, other: torch.device) -> bool:
    return one == other or one.type == other.type == "cpu"


def _lands_directly(target: torch.Tensor, meta: _TensorMeta, device: torch.device) -> bool:
    """Whether the bytes from the wire can be written unchanged over the target's whole storage."""
    return (
        _same_device(target.device, device)
        and not (target.is_conj() or target.is_neg())
        and target.stride() == tuple(meta.stride)
        and target.storage_offset() == meta.storage_offset
        and target.untyped_storage().nbytes() == meta.nbytes
        and _covers_storage(meta)
    )


def _copy_into(target: torch.Tensor, source: torch.Tensor) -> None:
    if target.itemsize == 1 and not target.is_neg():
        # Some one-byte dtypes have no copy kernel; for these the bytes are the values.
        target, source = target.view(torch.uint8), source.view(torch.uint8)
    with torch.inference_mode(target.is_inference()):
        target.copy_(source)


def _shard_name(name: str, metadata: ShardMetadata) -> str:
    return f"{name} shard at {list(metadata.shard_offsets)}"


@dataclass(slots=True, eq=False)
class _Piece:
    """One tensor to receive: into ``target``'s memory, or without a target into new memory that becomes ``value``."""

    name: str
    meta: _TensorMeta
    target: torch.Tensor | None = None
    direct: bool = False  # receive the message straight into the target, without a copy
    value: torch.Tensor | None = None

    def received(self) -> torch.Tensor:
        assert self.value is not None
        return self.value


class _ReceivePlan:
    """What to do with every message. Complete before the first message is received."""

    def __init__(self, rank: int, meta: _StateDictMeta, targets: dict[KeyPath, object], device: torch.device) -> None:
        self._rank = rank
        self._device = device
        self._mismatches: list[str] = []
        self.pieces: list[_Piece] = []
        #: One function per leaf, called after the last message.
        self.leaves: list[Callable[[], object]] = []
        for path, leaf in zip(meta.paths, meta.non_tensor_leaves, strict=True):
            self.leaves.append(self._leaf(keystr(path) or "<root>", leaf, targets.get(path)))
        self._check_writable()
        if self._mismatches:
            raise TargetMismatch(self._mismatches)

    def _leaf(self, name: str, leaf: object, target: object) -> Callable[[], object]:
        if not isinstance(leaf, (_TensorMeta, _DTensorMeta, _ShardedTensorMeta)):
            return lambda: leaf
        in_place = isinstance(target, torch.Tensor)
        if in_place and (kind := _kind(target)) != (got := _kind(leaf)):
            self._mismatches.append(f"{name}: expected a {kind}, got a {got}")
            return lambda: None
        if isinstance(leaf, _TensorMeta):
            piece = self._piece(name, leaf, target)
            return (lambda: target) if in_place else piece.received
        if isinstance(leaf, _DTensorMeta):
            if isinstance(target, DTensor):
                self._compare_specs(name, target._spec, leaf.spec)
                self._piece(name, leaf.local, target._local_tensor)
                return lambda: target
            return partial(_new_dtensor, self._piece(name, leaf.local, None), leaf.spec)
        if len(leaf.local_shards_meta) != len(leaf.local_shards_shard_metadata):
            raise ProtocolError(self._rank, f"rank {self._rank} sent shards of {name} that lie outside of it")
        if isinstance(target, ShardedTensor):
            self._match_shards(name, leaf, target)
            return lambda: target
        if not is_initialized():
            raise UnsupportedLeaf(name, "a ShardedTensor can only be made where there is a default process group")
        shards = zip(leaf.local_shards_meta, leaf.local_shards_shard_metadata, strict=True)
        pieces = [self._piece(_shard_name(name, where), meta, None) for meta, where in shards]
        return partial(_new_sharded_tensor, pieces, leaf)

    def _piece(self, name: str, meta: _TensorMeta, target: object) -> _Piece:
        _check_meta(self._rank, name, meta)
        piece = _Piece(name, meta)
        self.pieces.append(piece)
        if isinstance(target, torch.Tensor):
            try:
                piece.target = _plain(target)
                self._fit(piece, piece.target)
            except (_NoPlainMemoryError, RuntimeError) as error:
                piece.target = None
                self._mismatches.append(f"{name}: expected a target with memory to receive into, got {error}")
        return piece

    def _check_writable(self) -> None:
        """Refuse read-only and unmapped targets: writing there would end the process."""
        placed = [(piece.name, piece.target) for piece in self.pieces if piece.target is not None]
        found = live_tensors.read_any([target for _, target in placed])
        for row, why in found.faults(np.arange(len(placed)), Mappings(), write=True).items():
            self._mismatches.append(f"{placed[row][0]}: expected a target with memory to write to, but {why}")

    def _differ(self, name: str, what: str, expected: object, got: object) -> bool:
        if expected == got:
            return False
        self._mismatches.append(f"{name}: {what}: expected {expected}, got {got}")
        return True

    def _fit(self, piece: _Piece, target: torch.Tensor) -> None:
        """Compare shape and dtype, which have to agree. Any other difference is one of layout: a copy handles it."""
        name, meta = piece.name, piece.meta
        shape = self._differ(name, "shape", tuple(target.shape), tuple(meta.shape))
        if self._differ(name, "dtype", target.dtype, meta.dtype) or shape:
            return
        own = _describe(target)
        piece.direct = _lands_directly(target, meta, self._device)
        if target._is_zerotensor() or _needed_nbytes(own) > own.nbytes:
            raise _NoPlainMemoryError(f"a tensor that needs {_needed_nbytes(own)} bytes and has no such storage")
        if not piece.direct and _shares_memory(own):
            # Elements that share memory cannot hold different values, and a copy does not know that these are equal.
            self._mismatches.append(
                f"{name}: stride: expected {target.stride()}, which makes elements share memory, "
                f"got {tuple(meta.stride)} at offset {meta.storage_offset} of {meta.nbytes} bytes"
            )

    def _compare_specs(self, name: str, own: DTensorSpec, other: DTensorSpec) -> None:
        """Compare placements: two local tensors of one shape may still be different parts of the whole."""
        self._differ(name, "global shape", tuple(own.shape), tuple(other.shape))
        if self._differ(name, "placements", tuple(own.placements), tuple(other.placements)):
            return
        self._differ(name, "shard order", getattr(own, "shard_order", None), getattr(other, "shard_order", None))
        # A pickled mesh keeps its owner's coordinate. Along replicated dimensions every coordinate holds the same.
        here, there = own.mesh.get_coordinate(), other.mesh.get_coordinate()
        if here is not None and there is not None:
            split = [dim for dim, placement in enumerate(own.placements) if not placement.is_replicate()]
            mine = [f"{here[dim]} of {own.mesh.shape[dim]}" for dim in split]
            theirs = [f"{there[dim]} of {other.mesh.shape[dim]}" for dim in split]
            self._differ(name, "shard", mine, theirs)

    def _match_shards(self, name: str, leaf: _ShardedTensorMeta, target: ShardedTensor) -> None:
        self._differ(name, "global shape", tuple(target.metadata().size), tuple(leaf.sharded_tensor_metadata.size))
        own = {_place(shard.metadata): shard.tensor for shard in target.local_shards()}
        places = [_place(metadata) for metadata in leaf.local_shards_shard_metadata]
        if self._differ(name, "local shards (offsets, sizes)", sorted(own), sorted(places)):
            return
        for meta, metadata in zip(leaf.local_shards_meta, leaf.local_shards_shard_metadata, strict=True):
            self._piece(_shard_name(name, metadata), meta, own[_place(metadata)])


def _kind(leaf: object) -> str:
    if isinstance(leaf, (DTensor, _DTensorMeta)):
        return "DTensor"
    return "ShardedTensor" if isinstance(leaf, (ShardedTensor, _ShardedTensorMeta)) else "tensor"


def _place(metadata: ShardMetadata) -> tuple[tuple[int, ...], tuple[int, ...]]:
    return tuple(metadata.shard_offsets), tuple(metadata.shard_sizes)


def _new_dtensor(piece: _Piece, spec: DTensorSpec) -> DTensor:
    return DTensor(piece.received(), spec, requires_grad=False)  # type: ignore[no-untyped-call]


def _new_sharded_tensor(pieces: Iterable[_Piece], leaf: _ShardedTensorMeta) -> ShardedTensor:
    # ShardedTensor requires that its shards have these properties; received memory is never pinned.
    properties = replace(leaf.sharded_tensor_metadata.tensor_properties, pin_memory=False)
    shards = []
    for piece, metadata in zip(pieces, leaf.local_shards_shard_metadata, strict=True):
        tensor = piece.received().contiguous().requires_grad_(properties.requires_grad)
        placement = f"rank:{get_rank()}/{tensor.device.type}"
        offsets, sizes = metadata.shard_offsets, metadata.shard_sizes
        shards.append(
            Shard(tensor=tensor, metadata=ShardMetadata(shard_offsets=offsets, shard_sizes=sizes, placement=placement))
        )
    return ShardedTensor._init_from_local_shards_and_global_metadata(
        local_shards=shards,
        sharded_tensor_metadata=replace(leaf.sharded_tensor_metadata, tensor_properties=properties),
    )


# ------------------------------------------------------------------------------------------ transport


class PGTransport:
    """Send a state to other ranks of a process group, or receive one, compatible with PyTorch's class of this name.

    The wire carries pickle and is for trusted peers only: a peer can run code in the receiver. Use
    ``transfuse.PGTransport`` where the other end can be upgraded too.

    Args:
        pg: the process group; ranks below are ranks within it.
        timeout: how long a peer may go without finishing a message. At least a millisecond is used.
        device: where the group can send from and receive to.
        state_dict: called at the start of every receive; the bytes land in its tensors. A refusal comes before any of
            them is written, but on this wire the sender is not told and runs into its own timeout. A later error lists
            in ``torn`` the targets that may hold new bytes.
    """

    def __init__(
        self,
        pg: ProcessGroup,
        timeout: timedelta,
        device: torch.device,
        state_dict: Callable[[], object] | None = None,
    ) -> None:
        if timeout <= timedelta(0):
            raise ValueError(f"timeout must be positive, not {timeout}")
        self._pg = pg
        self._timeout = max(timeout, _LEAST_TIMEOUT)
        self._device = device
        self._state_dict = state_dict

    def send_checkpoint(self, dst_ranks: list[int], state_dict: object) -> None:
        """Send the state to all ``dst_ranks``.

        Raises:
            UnsupportedLeaf: the wire cannot carry a leaf. Nothing was sent, and the receivers keep waiting.
            SendFailed: some ranks did not take everything; ``completed`` lists those that did.
        """
        self._check_ranks(dst_ranks)
        with _timeit("preparing state_dict"):
            meta, named = _prepare(state_dict)
            head = bytearray(_dump(meta))

        with _Outbox(self._pg, self._timeout, dst_ranks) as outbox:
            with _timeit("send meta"):
                length = torch.tensor([len(head)], dtype=torch.int64, device=self._device)
                outbox.post(length, _LENGTH_TAG, "sending the metadata's length")
                data = torch.frombuffer(head, dtype=torch.uint8).to(self._device)
                outbox.post(data, _META_TAG, "sending the metadata")
            with _timeit("send tensors"):
                for tag, (name, data) in enumerate(named, _FIRST_TENSOR_TAG):
                    if not outbox.completed():
                        break
                    there = data.to(self._device)
                    outbox.post(there, tag, f"sending {name}", cost=0 if there is data else there.nbytes)
                outbox.drain()
            causes, completed = outbox.causes(), outbox.completed()
        if causes:
            raise SendFailed(causes, completed) from next(iter(causes.values()))

    def recv_checkpoint(self, src_rank: int) -> object:
        """Receive a state: in place if the transport's ``state_dict`` has a tensor at a leaf's path, else new tensors.

        Raises:
            TargetMismatch: the source does not fit the target. Nothing was written.
            PeerTimeout, PeerLost: the sender went silent or away.
            ProtocolError: the metadata is invalid. Nothing was written.
        """
        self._check_ranks([src_rank])
        targets: dict[KeyPath, object] = {}
        if self._state_dict:
            targets = dict(tree_flatten_with_path(self._state_dict())[0])

        with _timeit("recv meta"):
            meta, device = self._recv_meta(src_rank)
        plan = _ReceivePlan(src_rank, meta, targets, device)
        with _timeit("recv tensors"):
            self._recv_pieces(src_rank, plan.pieces, device)
        return tree_unflatten([leaf() for leaf in plan.leaves], meta.treespec)

    def _check_ranks(self, ranks: Iterable[int]) -> None:
        # Gloo crashes the process for a rank that the group does not have.
        size, own = self._pg.size(), self._pg.rank()
        for rank in ranks:
            if rank == own or (isinstance(size, int) and not 0 <= rank < size):
                raise ValueError(f"rank {rank} is not another rank of a group of {size}, in which this is rank {own}")

    def _recv(self, data: torch.Tensor, rank: int, tag: int, phase: str) -> Work:
        start = time.monotonic()
        try:
            return self._pg.recv([data], rank, tag=tag)
        except (RuntimeError, OSError) as error:
            raise _peer_error(error, rank, phase, time.monotonic() - start, self._timeout) from error

    def _recv_meta(self, rank: int) -> tuple[_StateDictMeta, torch.device]:
        """The metadata, and the device with its index on which messages arrive."""
        length_t = torch.zeros(1, dtype=torch.int64, device=self._device)
        phase = "receiving the metadata's length"
        _wait(self._recv(length_t, rank, _LENGTH_TAG, phase), self._timeout, rank, phase)
        length = int(length_t.item())
        if not 0 < length <= DROPIN_MAX_META_BYTES:
            raise ProtocolError(rank, f"rank {rank} announced metadata of {length} bytes")
        data = torch.empty(length, dtype=torch.uint8, device=self._device)
        phase = "receiving the metadata"
        _wait(self._recv(data, rank, _META_TAG, phase), self._timeout, rank, phase)
        try:
            with warnings.catch_warnings():
                # PyTorch has deprecated a class that it still uses in its own tree descriptions.
                warnings.filterwarnings("ignore", ".*LeafSpec", FutureWarning)
                meta = pickle.loads(data.cpu().numpy().tobytes())
        except Exception as error:  # unpickling runs code that the peer chose, which may raise anything
            raise ProtocolError(rank, f"rank {rank} sent metadata that cannot be unpickled: {error}") from error
        if not isinstance(meta, _StateDictMeta):
            raise ProtocolError(rank, f"rank {rank} sent a {type(meta).__name__} in place of metadata")
        if not len(meta.paths) == len(meta.non_tensor_leaves) == meta.treespec.num_leaves:
            raise ProtocolError(rank, f"rank {rank} sent metadata whose numbers of leaves and paths differ")
        return meta, length_t.device

    def _recv_pieces(self, rank: int, pieces: Iterable[_Piece], device: torch.device) -> None:
        """Receive every message in order, with as many under way as the window for temporary copies allows."""
        queue: deque[tuple[_Piece, torch.Tensor, Work, int]] = deque()
        held = 0
        touched: list[str] = []

        def settle() -> int:
            piece, data, work, cost = queue.popleft()
            _wait(work, self._timeout, rank, f"receiving {piece.name}")
            if piece.target is None:
                piece.value = _view(data.cpu(), piece.meta)
            elif not piece.direct:
                touched.append(piece.name)
                _copy_into(piece.target, _view(data, piece.meta))
            elif not piece.target.is_inference():
                # The backend wrote without telling autograd. A backward over the old values has to notice.
                torch.autograd.graph.increment_version(piece.target)
            return cost

        try:
            for tag, piece in enumerate(pieces, _FIRST_TENSOR_TAG):
                if piece.target is not None and piece.direct:
                    data, cost = _cast_tensor(piece.target, torch.uint8), 0
                    touched.append(piece.name)
                else:
                    data = torch.empty(piece.meta.nbytes, dtype=torch.uint8, device=device)
                    # New CPU memory is the result itself; other memory is copied from and then freed.
                    cost = 0 if piece.target is None and device.type == "cpu" else piece.meta.nbytes
                queue.append((piece, data, self._recv(data, rank, tag, f"receiving {piece.name}"), cost))
                held += cost
                while held > DROPIN_WINDOW_BYTES:
                    held -= settle()
            while queue:
                settle()
        except TransfuseError as error:
            error.torn = tuple(touched)
            raise
