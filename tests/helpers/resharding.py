"""Resharding: states whose leaves lie one way on the sources and another on the receivers, and a judge of moving them.

``Case.draw(seed)`` draws two sets of ranks and some leaves, each with a global shape and dtype, a :class:`Layout` on
the sources and one on the receivers, all derived from one number. :func:`judge` runs in every rank of a pool, lets
moves carry each case, and says in complaints whatever is not as it must be:

- every local tensor of a receiver is, bit for bit, what it must be of the global tensor, in its own memory; what lies
  between and around its elements is as before, and so is everything at the sources;
- the receive moved exactly the bytes that its local tensors have, and says which source brought how many.

What a local tensor must be is cut from the global tensor by indices, in numpy, without any of torch's geometry. A move
is transfuse on either route, or the oracle (:func:`dcp`: save on the sources, load on the receivers), or a reference
(:func:`naive`): what the judge passes for two moves is bit for bit the same.

``python -m resharding --seed N`` in this folder replays one, ``--count K`` goes on with the next ones.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import dataclasses
import itertools
import math
import os
import pathlib
import random
import shutil
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any, Literal, cast

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from torch.distributed._shard.metadata import ShardMetadata
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed._shard.sharded_tensor.metadata import ShardedTensorMetadata, TensorProperties
from torch.distributed._shard.sharded_tensor.shard import Shard as LocalShard
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

import transfuse
from transfuse.testing.ranks import ProcessPool

__all__ = [
    "CAMPAIGNS",
    "WORLD",
    "Case",
    "Held",
    "Layout",
    "Leaf",
    "Move",
    "Moved",
    "Piece",
    "Verdict",
    "dcp",
    "from_memory",
    "judge",
    "naive",
    "over_group",
    "run",
]

WORLD = 4
CPU = torch.device("cpu")
TIMEOUT = timedelta(seconds=10)
STEP = 3

DTYPES = (
    torch.float32,
    torch.bfloat16,
    torch.float64,
    torch.int64,
    torch.bool,
    torch.uint8,
    torch.complex64,
    torch.float8_e4m3fn,
)
SIZES = (0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 11, 12, 13, 16, 17, 24, 31, 40)
MAX_ELEMENTS = 20_000

Path = tuple[str, ...]
#: Of each dimension of the global tensor, which indices a local tensor has, in this order.
Indices = tuple[tuple[int, ...], ...]
#: A tensor as bytes: its shape, and a last dimension of the size of an item.
Bytes = npt.NDArray[np.uint8]
Memory = Literal["contiguous", "transposed", "offset", "gaps"]


# ----------------------------------------------------------------------------------------------------------- geometry


def chunk(indices: tuple[int, ...], parts: int, which: int) -> tuple[int, ...]:
    """As torch.chunk: parts of equal size, rounded up, the last ones shorter or empty."""
    size = -(-len(indices) // parts)
    return indices[which * size : (which + 1) * size]


def strided(indices: tuple[int, ...], parts: int, which: int, factor: int) -> tuple[int, ...]:
    """This part of each of `factor` chunks, one after the other."""
    return tuple(i for piece in range(factor) for i in chunk(chunk(indices, factor, piece), parts, which))


def is_region(indices: Indices) -> bool:
    return all(i == tuple(range(i[0], i[-1] + 1)) for i in indices if i)


def whole(shape: Sequence[int]) -> Indices:
    return tuple(tuple(range(n)) for n in shape)


@dataclasses.dataclass(frozen=True)
class Layout:
    """How one leaf lies on the ranks of one side, and in the memory of each."""

    kind: Literal["plain", "dtensor", "sharded"]
    memory: Memory
    #: DTensor: the mesh's shape, its ranks row by row, and a placement for each of its dimensions.
    mesh: tuple[int, ...] = ()
    order: tuple[int, ...] = ()
    placements: tuple[Placement, ...] = ()
    #: ShardedTensor: who has which boxes.
    chunks: tuple[tuple[int, tuple[range, ...]], ...] = ()

    def __str__(self) -> str:
        if self.kind == "plain":
            return f"plain, {self.memory}"
        if self.kind == "sharded":
            regions = (f"{rank}[{', '.join(f'{r.start}:{r.stop}' for r in region)}]" for rank, region in self.chunks)
            return f"ShardedTensor {' '.join(regions)}, {self.memory}"
        return f"DTensor {self.mesh} of {self.order} {''.join(map(str, self.placements))}, {self.memory}"

    def local(self, shape: tuple[int, ...], rank: int) -> list[Indices]:
        """What the local tensors of this rank hold."""
        if self.kind == "plain":
            return [whole(shape)]
        if self.kind == "sharded":
            return [tuple(map(tuple, region)) for owner, region in self.chunks if owner == rank]
        mine = list(whole(shape))
        coordinate = np.unravel_index(self.order.index(rank), self.mesh)
        for size, at, placement in zip(self.mesh, coordinate, self.placements, strict=True):
            if isinstance(placement, _StridedShard):
                mine[placement.dim] = strided(mine[placement.dim], size, int(at), int(placement.split_factor))
            elif isinstance(placement, Shard):
                mine[placement.dim] = chunk(mine[placement.dim], size, int(at))
        return [tuple(mine)]


# --------------------------------------------------------------------------------------------------------------- case


@dataclasses.dataclass(frozen=True)
class Leaf:
    path: Path
    shape: tuple[int, ...]
    dtype: torch.dtype
    source: Layout
    receiver: Layout

    def __str__(self) -> str:
        name = str(self.dtype).removeprefix("torch.")
        return f"{'.'.join(self.path)}: {name}{list(self.shape)} from {self.source} to {self.receiver}"

    def values(self, seed: int) -> Bytes:
        """The global tensor: random bits."""
        shape = (*self.shape, self.dtype.itemsize)
        random_bytes = np.random.default_rng([seed, *map(ord, ".".join(self.path))]).bytes(math.prod(shape))
        values = np.frombuffer(random_bytes, np.uint8).reshape(shape)
        return values & np.uint8(1) if self.dtype is torch.bool else values

    def beyond_dcp(self, case: Case) -> str | None:
        """Why DCP cannot move this leaf, if so."""
        sides = ((self.source, case.sources), (self.receiver, case.receivers))
        for layout, ranks in sides:
            if not all(is_region(indices) for rank in ranks for indices in layout.local(self.shape, rank)):
                return "a shard that is no box"
        starts = [tuple(r.start for r in region) for _, region in self.source.chunks]
        if len(set(starts)) < len(starts):
            # It takes them for one and the same, and keeps only one.
            return "an empty shard where another begins"
        return None


@dataclasses.dataclass(frozen=True)
class Case:
    seed: int
    sources: tuple[int, ...]
    receivers: tuple[int, ...]
    leaves: tuple[Leaf, ...]

    def __str__(self) -> str:
        lines = (f"  {leaf}" for leaf in self.leaves)
        return "\n".join((f"case {self.seed}: {list(self.sources)} to {list(self.receivers)}", *lines))

    @classmethod
    def draw(cls, seed: int, overlapping: bool | None = None, scattered: bool = False, leaves: int = 8) -> Case:
        """`overlapping`: whether a rank may be both source and receiver. `scattered`: shards that are no boxes."""
        rng = random.Random(seed)
        ranks = rng.sample(range(WORLD), WORLD)
        if rng.random() < 0.4 if overlapping is None else overlapping:
            # At least one rank is both.
            sources, receivers = ({ranks[0], *rng.sample(range(WORLD), rng.randint(0, WORLD))} for _ in range(2))
        else:
            # A single rank has all there is, and nothing to scatter.
            single = [] if scattered else [(1, 2)]
            middle, end = rng.choice([*single, (1, 3), (1, 4), (2, 3), (2, 4), (2, 4), (3, 4)])
            sources, receivers = set(ranks[:middle]), set(ranks[middle:end])
        painter = _Painter(rng, scattered)
        drawn = [painter.leaf(number, sorted(sources), sorted(receivers)) for number in range(leaves)]
        return cls(seed, tuple(sorted(sources)), tuple(sorted(receivers)), tuple(drawn))


class _Painter:
    """Draws leaves and layouts."""

    def __init__(self, rng: random.Random, scattered: bool) -> None:
        self.rng, self.scattered = rng, scattered

    def leaf(self, number: int, sources: list[int], receivers: list[int]) -> Leaf:
        top = ("model",) if number % 2 else ("optim", "state", f"layer{number}")
        while True:
            shape = self.shape()
            source, receiver = self.layout(shape, sources), self.layout(shape, receivers)
            sides = ((source, sources), (receiver, receivers))
            regions = all(is_region(i) for layout, ranks in sides for rank in ranks for i in layout.local(shape, rank))
            if regions != self.scattered:
                return Leaf((*top, f"weight{number}"), shape, self.rng.choice(DTYPES), source, receiver)

    def shape(self) -> tuple[int, ...]:
        while True:
            dims = self.rng.choices(range(5), (1, 4, 6, 3, 2))[0]
            shape = tuple(self.rng.choices(SIZES, (1, *[3] * (len(SIZES) - 1)), k=dims))
            if math.prod(shape) <= MAX_ELEMENTS:
                return shape

    def layout(self, shape: tuple[int, ...], ranks: list[int]) -> Layout:
        kind = self.rng.choices(("plain", "dtensor", "sharded"), (1, 6, 2 if shape else 0))[0]
        # ShardedTensor rejects local tensors that are not contiguous.
        free: list[Memory] = [] if kind == "sharded" else ["transposed", "gaps"]
        memory = self.rng.choice(["contiguous", "contiguous", "contiguous", "offset", *free])
        if kind == "plain":
            return Layout("plain", memory)
        if kind == "sharded":
            return Layout("sharded", memory, chunks=self.chunks(shape, ranks))
        meshes = [m for n in (1, 2, 3) for m in itertools.product(range(1, 5), repeat=n) if math.prod(m) == len(ranks)]
        mesh = self.rng.choice(sorted(meshes, key=len)[:3] if self.rng.random() < 0.5 else meshes)
        order = tuple(self.rng.sample(ranks, len(ranks)))
        return Layout("dtensor", memory, mesh, order, self.placements(shape, mesh))

    def placements(self, shape: tuple[int, ...], mesh: tuple[int, ...]) -> tuple[Placement, ...]:
        if not shape:
            return tuple(Replicate() for _ in mesh)
        drawn: list[Placement] = [
            Shard(self.rng.randrange(len(shape))) if self.rng.random() < 0.7 else Replicate() for _ in mesh
        ]
        if self.scattered:
            drawn[0] = _StridedShard(self.rng.randrange(len(shape)), split_factor=self.rng.choice((2, 3)))
        elif len(mesh) > 1 and self.rng.random() < 0.5:
            # FSDP2 over TP; in three dimensions often HSDP over TP.
            dim = 0 if self.rng.random() < 0.7 else self.rng.randrange(len(shape))
            drawn[-2:] = _StridedShard(dim, split_factor=mesh[-1]), Shard(dim)
            if self.rng.random() < 0.5:
                drawn[:-2] = [Replicate()] * len(drawn[:-2])
        elif len(mesh) > 1 and self.rng.random() < 0.3:
            drawn = [Replicate(), *(Shard(0) for _ in mesh[1:])]  # HSDP
        return tuple(drawn)

    def chunks(self, shape: tuple[int, ...], ranks: list[int]) -> tuple[tuple[int, tuple[range, ...]], ...]:
        """A grid of uneven chunks, dealt out at random; a rank may get none, or several."""
        cuts = [[0, n] for n in shape]
        for dim in self.rng.sample(range(len(shape)), min(len(shape), self.rng.choice((1, 1, 2)))):
            # Now and then the same cut twice, or at the edge: an empty chunk.
            places = range(shape[dim] + 1) if self.rng.random() < 0.2 else range(1, shape[dim])
            inner = self.rng.choices(places, k=self.rng.randint(0, len(ranks))) if places else []
            inner = inner if places.start == 0 else [*set(inner)]
            cuts[dim] = sorted([0, *inner, shape[dim]])
        grid = itertools.product(*([range(*run) for run in itertools.pairwise(cut)] for cut in cuts))
        return tuple((self.rng.choice(ranks), region) for region in grid)


#: How a case is drawn from a seed, by name.
CAMPAIGNS: dict[str, Callable[[int], Case]] = {
    "anything": Case.draw,
    "disjoint": lambda seed: Case.draw(seed, overlapping=False),
    "overlapping": lambda seed: Case.draw(seed, overlapping=True),
    # One leaf a case, because a leaf that is refused spoils the others' chance.
    "scattered": lambda seed: Case.draw(seed, overlapping=False, scattered=True, leaves=1),
}


# ------------------------------------------------------------------------------------------------- a case on one rank


def to_bytes(tensor: torch.Tensor) -> Bytes:
    # Not contiguous(), which leaves one element with a stride of 2 as it is.
    packed = tensor.detach().clone(memory_format=torch.contiguous_format).reshape(-1)
    return cast(Bytes, packed.view(torch.uint8).numpy().reshape(*tensor.shape, tensor.dtype.itemsize))


def from_bytes(values: Bytes, dtype: torch.dtype) -> torch.Tensor:
    return torch.from_numpy(values.copy().reshape(-1)).view(dtype).reshape(values.shape[:-1])


@dataclasses.dataclass(frozen=True)
class Piece:
    """One local tensor: a view of `base`, which has other elements around it and perhaps between."""

    indices: Indices
    tensor: torch.Tensor
    base: torch.Tensor

    @classmethod
    def make(cls, indices: Indices, values: Bytes, dtype: torch.dtype, memory: Memory) -> Piece:
        """`values` are those of the global tensor."""
        mine = values[np.ix_(*indices)] if indices else values
        shape, count = mine.shape[:-1], math.prod(mine.shape[:-1])
        step = 2 if memory == "gaps" else 1
        before = 3 if memory == "offset" else 0
        sizes = shape if memory == "transposed" else shape[::-1]
        strides = [step * math.prod(sizes[:i]) for i in range(len(shape))]
        if memory != "transposed":
            strides.reverse()
        around = np.full((before + step * count + before, dtype.itemsize), 1 if dtype is torch.bool else 0xA5, np.uint8)
        base = from_bytes(around, dtype)
        tensor = base.as_strided(shape, strides, before if count else 0)
        tensor.copy_(from_bytes(mine, dtype))
        return cls(indices, tensor, base)

    @property
    def nbytes(self) -> int:
        return self.tensor.numel() * self.tensor.itemsize


@dataclasses.dataclass
class Held:
    """What one rank holds of a case on one side: its state, and the local tensors of its leaves."""

    state: dict[str, Any]
    leaves: dict[Path, Any]
    pieces: dict[Path, list[Piece]]

    @classmethod
    def make(cls, case: Case, rank: int, side: Literal["source", "receiver"], poisoned: bool = False) -> Held:
        """With every bit wrong, if poisoned."""
        held = cls({"step": 0 if poisoned else STEP}, {}, {})
        for leaf in case.leaves:
            values, layout = leaf.values(case.seed), getattr(leaf, side)
            if poisoned:
                values = values ^ np.uint8(1 if leaf.dtype is torch.bool else 0xFF)
            pieces = [Piece.make(i, values, leaf.dtype, layout.memory) for i in layout.local(leaf.shape, rank)]
            held.pieces[leaf.path] = pieces
            held.leaves[leaf.path] = _assemble(leaf, layout, rank, pieces)
        held.state |= nested(held.leaves)
        return held

    @property
    def nbytes(self) -> int:
        return sum(piece.nbytes for pieces in self.pieces.values() for piece in pieces)


def nested(leaves: dict[Path, Any]) -> dict[str, Any]:
    tree: dict[str, Any] = {}
    for path, leaf in leaves.items():
        node = tree
        for key in path[:-1]:
            node = node.setdefault(key, {})
        node[path[-1]] = leaf
    return tree


def flat(tree: dict[str, Any], path: Path = ()) -> Iterator[tuple[Path, Any]]:
    for key, value in tree.items():
        if isinstance(value, dict):
            yield from flat(value, (*path, key))
        else:
            yield (*path, key), value


def _assemble(leaf: Leaf, layout: Layout, rank: int, pieces: list[Piece]) -> Any:
    if layout.kind == "plain":
        return pieces[0].tensor
    if layout.kind == "dtensor":
        # Without backends: nothing is communicated, and no process groups are made.
        ranks = torch.tensor(layout.order).reshape(layout.mesh)
        mesh = DeviceMesh("cpu", ranks, _init_backend=False, _rank=rank)
        stride = torch.empty(leaf.shape, device="meta").stride()
        return DTensor.from_local(
            pieces[0].tensor, mesh, layout.placements, run_check=False, shape=torch.Size(leaf.shape), stride=stride
        )
    metadata = [
        ShardMetadata([r.start for r in region], [len(r) for r in region], f"rank:{owner}/cpu")
        for owner, region in layout.chunks
    ]
    mine = [m for m, (owner, _) in zip(metadata, layout.chunks, strict=True) if owner == rank]
    return ShardedTensor._init_from_local_shards_and_global_metadata(
        [LocalShard(piece.tensor, m) for piece, m in zip(pieces, mine, strict=True)],
        ShardedTensorMetadata(metadata, torch.Size(leaf.shape), TensorProperties(dtype=leaf.dtype)),
    )


# -------------------------------------------------------------------------------------------------------------- moves


@dataclasses.dataclass
class Moved:
    """What a move says at a receiver."""

    arrived: dict[str, Any]
    #: None: it does not count.
    nbytes: int | None = None
    by_source: dict[int, int] = dataclasses.field(default_factory=dict)
    #: Leaves that it could not move and has not touched, and why.
    left_out: dict[Path, str] = dataclasses.field(default_factory=dict)


#: Called on every rank of the pool with what it holds as a source and as a receiver, if it is one.
Move = Callable[[Case, int, Held | None, Held | None], Moved | None]


def over_group(case: Case, rank: int, source: Held | None, target: Held | None) -> Moved | None:
    return _transfuse(case, source, target, same_host=False)


def from_memory(case: Case, rank: int, source: Held | None, target: Held | None) -> Moved | None:
    return _transfuse(case, source, target, same_host=True)


def _transfuse(case: Case, source: Held | None, target: Held | None, same_host: bool) -> Moved | None:
    world = cast(Any, dist.group.WORLD)
    with ThreadPoolExecutor(1) as thread:
        sending = None
        if source is not None:
            sender = transfuse.PGTransport(world, TIMEOUT, CPU, same_host=same_host)
            sending = thread.submit(sender.send_checkpoint, list(case.receivers), source.state)
        moved = None
        if target is not None:
            state = target.state
            receiver = transfuse.PGTransport(world, TIMEOUT, CPU, lambda: state, same_host=same_host)
            arrived = receiver.recv_checkpoint(list(case.sources))
            report = receiver.report
            assert report is not None
            moved = Moved(arrived, report.bytes, report.by_source)
        if sending is not None:
            sending.result()
    return moved


def dcp(case: Case, rank: int, source: Held | None, target: Held | None) -> Moved | None:
    """The oracle: torch.distributed.checkpoint, saved by all sources together, loaded by all receivers together."""
    reasons = {leaf.path: leaf.beyond_dcp(case) for leaf in case.leaves}
    left_out = {path: reason for path, reason in reasons.items() if reason is not None}
    # The pool's workers have one parent.
    directory = pathlib.Path("/dev/shm", f"resharding-{os.getppid()}-{case.seed}")

    def able(held: Held) -> dict[str, Any]:
        leaves = {path: leaf for path, leaf in held.leaves.items() if path not in left_out}
        return {"step": held.state["step"], **nested(leaves)}

    try:
        with together():
            if source is not None:
                save(able(source), checkpoint_id=directory, process_group=group(case.sources))
        with together():
            if target is None:
                return None
            state = able(target)
            load(state, checkpoint_id=directory, process_group=group(case.receivers))
            untouched = {path: target.leaves[path] for path in left_out}
            return Moved({**state, **nested(dict([*flat(state), *untouched.items()]))}, left_out=left_out)
    finally:
        shutil.rmtree(directory, ignore_errors=True)


def naive(case: Case, rank: int, source: Held | None, target: Held | None) -> Moved | None:
    """The reference: everybody gets everything, puts whole tensors together, and cuts out its own."""
    mine = source and {p: [(x.indices, to_bytes(x.tensor)) for x in pieces] for p, pieces in source.pieces.items()}
    gathered: list[dict[Path, list[tuple[Indices, Bytes]]] | None] = [None] * WORLD
    dist.all_gather_object(gathered, mine)
    if target is None:
        return None
    for leaf in case.leaves:
        values = np.zeros((*leaf.shape, leaf.dtype.itemsize), np.uint8)
        for theirs in gathered:
            for indices, part in theirs[leaf.path] if theirs else []:
                values[np.ix_(*indices) if indices else ...] = part
        for piece in target.pieces[leaf.path]:
            cut = values[np.ix_(*piece.indices)] if piece.indices else values
            piece.tensor.copy_(from_bytes(cut, leaf.dtype))
    return Moved({**target.state, "step": STEP}, target.nbytes, {case.sources[0]: target.nbytes})


MOVES: dict[str, Move] = {"dcp": dcp, "group": over_group, "memory": from_memory, "naive": naive}


# -------------------------------------------------------------------------------------------------------------- groups


_groups: tuple[Any, dict[tuple[int, ...], Any]] | None = None


def group(ranks: Iterable[int]) -> Any:
    """The group of these ranks. All there can be are made at once, by everybody, and again for a new default group."""
    global _groups
    if _groups is None or _groups[0] is not dist.group.WORLD:
        subsets = [s for n in range(1, WORLD + 1) for s in itertools.combinations(range(WORLD), n)]
        _groups = dist.group.WORLD, {subset: dist.new_group(list(subset)) for subset in subsets}
    return _groups[1][tuple(sorted(ranks))]


@contextlib.contextmanager
def together() -> Iterator[None]:
    """Everybody comes to the end of this, or nobody: an error of one rank is an error of all."""
    # Not the group that the moves use, which may be damaged by what went wrong.
    everybody = group(range(WORLD))
    failed = torch.zeros(1)
    try:
        yield
    except BaseException:
        failed += 1
        raise
    finally:
        dist.all_reduce(failed, group=everybody)
        if failed and sys.exc_info()[1] is None:
            raise OtherRankFailed


class OtherRankFailed(Exception):
    """What went wrong is said by another rank."""


# -------------------------------------------------------------------------------------------------------------- judge


@dataclasses.dataclass
class Verdict:
    counts: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)
    complaints: list[str] = dataclasses.field(default_factory=list)


def judge(rank: int, campaign: str, seeds: Sequence[int], moves: Sequence[Move]) -> Verdict:
    """On every rank of a pool: what this rank finds. If anything raises on one rank, it ends on all."""
    verdict = Verdict()
    for seed in seeds:
        case = CAMPAIGNS[campaign](seed)
        for move in moves:
            name = getattr(move, "__name__", str(move))
            try:
                with together():
                    source = Held.make(case, rank, "source") if rank in case.sources else None
                    target = Held.make(case, rank, "receiver", poisoned=True) if rank in case.receivers else None
                with together():
                    moved = move(case, rank, source, target)
                with together():
                    found = [*_judge_source(case, rank, source), *_judge_receiver(case, rank, target, moved)]
            except Exception as error:
                error.add_note("\n".join([f"{name}, rank {rank}, {case}", *verdict.complaints]))
                raise
            verdict.complaints += [f"{name}, case {seed}, rank {rank}: {line}" for line in found]
            if moved is not None and rank == case.receivers[0]:
                verdict.counts[f"{name}: pairs"] += len(case.leaves) - len(moved.left_out)
                verdict.counts.update(f"{name}: left out, {reason}" for reason in moved.left_out.values())
    return verdict


def _judge_source(case: Case, rank: int, source: Held | None) -> Iterator[str]:
    if source is None:
        return
    before = Held.make(case, rank, "source")
    for leaf in case.leaves:
        for piece, expected in zip(source.pieces[leaf.path], before.pieces[leaf.path], strict=True):
            if line := _difference(piece, expected):
                yield f"the source has changed, {line} of {leaf}"


def _judge_receiver(case: Case, rank: int, target: Held | None, moved: Moved | None) -> Iterator[str]:
    if target is None:
        return
    if moved is None:
        yield "a receiver without a result"
        return
    arrived = dict(flat(moved.arrived))
    if arrived.keys() != {*target.leaves, ("step",)}:
        yield f"other leaves than expected: {sorted(arrived)}"
    if ("step",) in arrived and arrived["step",] != STEP and not moved.left_out:
        yield f"step is {arrived['step',]!r}"
    right, poisoned = Held.make(case, rank, "receiver"), Held.make(case, rank, "receiver", poisoned=True)
    for leaf in case.leaves:
        if arrived.get(leaf.path) is not target.leaves[leaf.path]:
            yield f"not the receiver's own object: {leaf}"
        expected = (poisoned if leaf.path in moved.left_out else right).pieces[leaf.path]
        for piece, wanted in zip(target.pieces[leaf.path], expected, strict=True):
            if line := _difference(piece, wanted):
                yield f"{line} of {leaf}"
    if moved.nbytes is not None:
        if moved.nbytes != target.nbytes:
            yield f"moved {moved.nbytes} bytes, where {target.nbytes} are needed"
        if sum(moved.by_source.values()) != moved.nbytes:
            yield f"by source {moved.by_source}, which is not {moved.nbytes} in all"
        if not moved.by_source.keys() <= set(case.sources):
            yield f"by source {moved.by_source}, some of which are no sources"


def _difference(piece: Piece, expected: Piece) -> str:
    """What is wrong with a local tensor and its surroundings; empty if nothing is."""
    got, wanted = to_bytes(piece.tensor), to_bytes(expected.tensor)
    if got.shape != wanted.shape:
        return f"shape {got.shape} instead of {wanted.shape}"
    wrong = (got != wanted).any(-1)
    if wrong.any():
        first = tuple(int(i) for i in np.argwhere(wrong)[0])
        at = tuple(indices[i] for indices, i in zip(piece.indices, first, strict=True))
        return f"{wrong.sum()} of {wrong.size} elements are wrong, the first at {first}, globally {at},"
    if not np.array_equal(to_bytes(piece.base), to_bytes(expected.base)):
        return "elements around the local tensor were written,"
    return ""


def run(
    pool: ProcessPool, campaign: str, seeds: Sequence[int], moves: Sequence[Move], deadline: float = 110
) -> Verdict:
    """In the parent: what all ranks find together."""
    __tracebackhide__ = True
    total = Verdict()
    for outcome in pool.run(judge, campaign, list(seeds), list(moves), deadline=deadline):
        if outcome.error is None:
            total.counts += outcome.get().counts
            total.complaints += outcome.get().complaints
        elif not isinstance(outcome.error, OtherRankFailed):
            # Its last note is the worker's traceback, with everything again.
            total.complaints.append("\n".join([repr(outcome.error), *getattr(outcome.error, "__notes__", [])[:1]]))
    return total


# ------------------------------------------------------------------------------------------------------------- replay


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m resharding", description="Replay cases of resharding.")
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--count", type=int, default=1, help="how many seeds, from this one on")
    parser.add_argument("--campaign", choices=list(CAMPAIGNS), default="anything", help="how cases are drawn")
    parser.add_argument("--move", choices=list(MOVES), nargs="+", default=["dcp", "group", "memory"])
    parser.add_argument("--quiet", action="store_true", help="show only those with complaints")
    options = parser.parse_args(arguments)
    failed: list[int] = []
    counts: collections.Counter[str] = collections.Counter()
    with ProcessPool(WORLD) as pool:
        for seed in range(options.seed, options.seed + options.count):
            verdict = run(pool, options.campaign, [seed], [MOVES[name] for name in options.move])
            counts += verdict.counts
            if verdict.complaints:
                failed.append(seed)
            if verdict.complaints or not options.quiet:
                print(CAMPAIGNS[options.campaign](seed), *(verdict.complaints or ["  exact"]), sep="\n", flush=True)
    print(f"{dict(counts)}; failed: {failed}")
    return 1 if failed else 0


if __name__ == "__main__":
    import resharding  # So that workers find what is sent to them under this name.

    with contextlib.suppress(KeyboardInterrupt):
        sys.exit(resharding.main())
