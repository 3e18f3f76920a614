"""How long it takes, and how much memory, to plan a move between a thousand ranks that shard a state differently.

python -m benchmarks.planning [--quick] [--runs N] [--case NAME] [--profile] [--json FILE]

Measures the work of one receiver, phase by phase, from the offers of all its sources until each source knows what to
send; and the work of one source. No process groups and no wire: meshes of 1,024 ranks in two processes, one for each
end, so that each end's memory is measured separately. Tensors have the sizes of a real model's, and are never touched.
"""

from __future__ import annotations

import argparse
import contextlib
import cProfile
import gc
import io
import json
import math
import multiprocessing
import os
import pstats
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from time import perf_counter, thread_time
from typing import Any, NamedTuple, TypeVar

import msgspec
import numpy as np
import torch
import xxhash
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.distributed.tensor.placement_types import _StridedShard

from benchmarks.compare import machine
from transfuse._errors import TargetMismatch
from transfuse._limits import MIB, Limits
from transfuse._memory.assembled import assemble
from transfuse._memory.fresh import MemorySupply
from transfuse._options import Options
from transfuse._plan import parcels
from transfuse._plan.holdings import Holdings
from transfuse._plan.match import Prepared, prepare
from transfuse._plan.wanted_blocks import WantedBlocks, regions_in
from transfuse._session import source_choice
from transfuse._session.context import ReceiveRequest
from transfuse._session.offers import read_description, read_offer
from transfuse._sizes import Sizes
from transfuse._state.leaves.codec import BuildContext
from transfuse._state.leaves.registry import Registry
from transfuse._state.manifest import Described, describe
from transfuse._wire import messages
from transfuse._wire.memory_route import MemoryEntry

T = TypeVar("T")

#: Sizes of a model whose rows a thousand ranks can share.
HIDDEN, WIDE = 4096, 16384
CPU = torch.device("cpu")

SOURCE_PHASES = ("describe", "offer", "answer")
RECEIVER_PHASES = ("prepare", "read offers", "agree", "assemble", "shares", "wants")
#: A plan should stay within these.
MOST_SECONDS, MOST_MIB = 2.0, 500


# -------------------------------------------------------------------------------------------------------------- cases


class Weight(NamedTuple):
    """One matrix or vector of a layer. Tensor parallelism shards ``dim``; None: every rank has it whole."""

    name: str
    shape: tuple[int, ...]
    dim: int | None


LAYER = (
    Weight("attention.q.weight", (HIDDEN, HIDDEN), 0),
    Weight("attention.k.weight", (HIDDEN, HIDDEN), 0),
    Weight("attention.v.weight", (HIDDEN, HIDDEN), 0),
    Weight("attention.o.weight", (HIDDEN, HIDDEN), 1),
    Weight("mlp.gate.weight", (WIDE, HIDDEN), 0),
    Weight("mlp.up.weight", (WIDE, HIDDEN), 0),
    Weight("mlp.down.weight", (HIDDEN, WIDE), 1),
    Weight("attention_norm.weight", (HIDDEN,), None),
    Weight("mlp_norm.weight", (HIDDEN,), None),
)


class Layout(NamedTuple):
    """How all weights are spread over the ranks of one side: what each mesh dimension does."""

    mesh: tuple[int, ...]
    names: tuple[str, ...]

    @property
    def ranks(self) -> int:
        return math.prod(self.mesh)

    def __str__(self) -> str:
        return " x ".join(f"{name} {size:,}" for name, size in zip(self.names, self.mesh, strict=True))

    def placements(self, weight: Weight) -> list[Placement]:
        return [self._placement(name, weight) for name in self.names]

    def _placement(self, name: str, weight: Weight) -> Placement:
        if name == "replica" or (name == "tensor" and weight.dim is None):
            return Replicate()
        if name == "tensor" and weight.dim is not None:
            return Shard(weight.dim)
        if "tensor" in self.names and weight.dim == 0:
            # As FSDP2 does it over tensor parallelism.
            return _StridedShard(0, split_factor=self.mesh[self.names.index("tensor")])
        return Shard(0)


def fsdp(ranks: int) -> Layout:
    return Layout((ranks,), ("shard",))


def hsdp(replicas: int, ranks: int) -> Layout:
    return Layout((replicas, ranks), ("replica", "shard"))


def fsdp_tp(ranks: int, tensor: int) -> Layout:
    return Layout((ranks, tensor), ("shard", "tensor"))


def replicated(ranks: int) -> Layout:
    return Layout((ranks,), ("replica",))


class Case(NamedTuple):
    name: str
    source: Layout
    receiver: Layout
    tensors: int


def cases(tensors: int = 10_000, ranks: int = 1024) -> list[Case]:
    part = ranks // 8

    def case(source: Layout, receiver: Layout, count: int = tensors) -> Case:
        return Case(f"{source} to {receiver}, {count:,} tensors", source, receiver, count)

    whole = fsdp(ranks)
    drawn = [
        case(whole, fsdp_tp(part, 8), tensors // 10),
        case(whole, fsdp_tp(part, 8)),
        case(whole, fsdp_tp(part, 8), tensors * 3),
        case(fsdp(8), fsdp_tp(part, 8)),
        case(fsdp(max(8, ranks // 16)), fsdp_tp(part, 8)),
        case(whole, whole),
        case(whole, fsdp(ranks - ranks // 40)),
        case(whole, hsdp(8, part)),
        case(fsdp_tp(part, 8), whole),
        case(fsdp_tp(part, 8), fsdp_tp(ranks // 4, 4)),
        case(hsdp(8, part), whole),
        case(replicated(ranks), whole),
        case(whole, replicated(ranks), tensors // 50),
    ]
    # With few ranks some cases are the same.
    return list(dict.fromkeys(drawn))


def state(layout: Layout, rank: int, tensors: int) -> dict[str, Any]:
    """A rank's weights and two optimizer tensors for each weight. No code writes to them."""
    ranks = torch.arange(layout.ranks).reshape(layout.mesh)
    mesh = DeviceMesh("cpu", ranks, mesh_dim_names=layout.names, _init_backend=False, _rank=rank)
    kinds: dict[str, tuple[list[Placement], tuple[int, ...], tuple[int, ...]]] = {}
    for weight in LAYER:
        placements = layout.placements(weight)
        sizes, _ = compute_local_shape_and_global_offset(weight.shape, mesh, placements)
        kinds[weight.name] = placements, tuple(sizes), torch.empty(weight.shape, device="meta").stride()

    def tensor(weight: Weight) -> DTensor:
        placements, sizes, stride = kinds[weight.name]
        local = torch.empty(sizes)
        return DTensor.from_local(
            local, mesh, placements, run_check=False, shape=torch.Size(weight.shape), stride=stride
        )

    model: dict[str, Any] = {}
    optimizer: dict[str, Any] = {}
    left = tensors
    for number in range(tensors):
        layer, at = divmod(number, len(LAYER))
        name = f"layers.{layer}.{LAYER[at].name}"
        moments = {key: tensor(LAYER[at]) for key, _ in zip(("exp_avg", "exp_avg_sq"), range(left - 1), strict=False)}
        model[name] = tensor(LAYER[at])
        if moments:
            optimizer[name] = {**moments, "step": 100.0}
        left -= 1 + len(moments)
        if not left:
            break
    return {"step": 100, "model": model, "optimizer": {"state": optimizer}}


# ---------------------------------------------------------------------------------------------------------- measuring


class Memory:
    """The peak memory of this process since a moment, beyond what it had then. Linux."""

    def __init__(self) -> None:
        gc.collect()
        with contextlib.suppress(OSError):
            # This resets the peak to the present memory.
            Path("/proc/self/clear_refs").write_text("5")
        self._before = _status("VmRSS")

    def peak(self) -> int:
        return _status("VmHWM") - self._before

    def now(self) -> int:
        return _status("VmRSS") - self._before


def _status(name: str) -> int:
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith(f"{name}:"):
                return int(line.split()[1]) << 10
    return 0


@dataclass
class Clock:
    """By phase: wall seconds, and this thread's CPU seconds. With a profile of all phases, if asked for."""

    profile: cProfile.Profile | None = None
    seconds: dict[str, float] = field(default_factory=dict)
    cpu: dict[str, float] = field(default_factory=dict)

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        if self.profile is not None:
            self.profile.enable()
        started, worked = perf_counter(), thread_time()
        try:
            yield
        finally:
            self.seconds[name], self.cpu[name] = perf_counter() - started, thread_time() - worked
            if self.profile is not None:
                self.profile.disable()


def _most_called(profile: cProfile.Profile | None) -> str:
    if profile is None:
        return ""
    text = io.StringIO()
    pstats.Stats(profile, stream=text).sort_stats("tottime").print_stats(25)
    return text.getvalue()


# --------------------------------------------------------------------------------------------------------- the source


@dataclass
class Offered:
    """What a source says: its offer with a description, and an offer without one for every source."""

    whole: bytes
    briefs: dict[int, bytes]
    seconds: dict[str, float]
    cpu: dict[str, float]
    peak_bytes: int
    leaves: int


@dataclass
class Answered:
    seconds: float
    cpu: float
    regions: int
    peak_bytes: int
    fingerprint: int
    profile: str


def _offer(described: Described) -> tuple[messages.Offer, bytes]:
    """As :class:`PGTransport` does it."""
    manifest = described.manifest.encode()
    sizes = Sizes(Limits()).offered(1)
    entry = MemoryEntry(1, 1, b"t" * 16, described.addresses.astype("<u8").tobytes()).encode()
    offer = messages.Offer(
        100,
        *sizes,
        30.0,
        True,
        {"memory": entry},
        None,
        manifest,
        xxhash.xxh3_128_digest(msgspec.msgpack.encode(manifest.of_any_device())),
        described.manifest.likeness(manifest),
        list(described.manifest.coordinates),
        structure=manifest.structure(),
    )
    return offer, messages.encode(offer)


def _source(say: Connection[Any, Any], case: Case, runs: int, profiled: bool) -> None:
    """A process that describes one rank's state, and then finds what a receiver wants of another rank's state."""
    for _ in range(runs + 1):
        mine = state(case.source, 0, case.tensors)
        clock = Clock()
        memory = Memory()
        with clock.phase("describe"):
            described = describe(mine, Limits())
        with clock.phase("offer"):
            offer, body = _offer(described)
        peak = memory.peak()
        # All other sources say the same, except for their coordinates in the mesh. The mesh comes first.
        mesh = described.manifest.shared[0].shape
        coordinates = [
            tuple(map(int, one)) for one in torch.cartesian_prod(*map(torch.arange, mesh)).reshape(-1, len(mesh))
        ]
        brief = messages.brief(offer)
        briefs = {
            rank: messages.encode(
                msgspec.structs.replace(
                    brief, digest=rank.to_bytes(16, "little") if rank else brief.digest, coordinates=[coordinate]
                )
            )
            for rank, coordinate in enumerate(coordinates)
        }
        say.send(Offered(body, briefs, clock.seconds, clock.cpu, peak, len(described.manifest)))
        del mine, described, offer, body, briefs
        asked = say.recv()
        if asked is None:
            continue
        rank, want = asked
        described = describe(state(case.source, rank, case.tensors), Limits())
        profile = cProfile.Profile() if profiled else None
        clock = Clock(profile)
        memory = Memory()
        with clock.phase("answer"):
            decoded = messages.decode(want, messages.Want)
            assert decoded.wanted_blocks is not None
            regions = regions_in(Holdings(described.manifest), decoded.wanted_blocks)
            cut = parcels.cut(regions, decoded.parcel_bytes, all_staged=True)
            found = parcels.fingerprint(cut, decoded.wanted_blocks.fingerprint())
        say.send(
            Answered(
                clock.seconds["answer"], clock.cpu["answer"], len(regions), memory.peak(), found, _most_called(profile)
            )
        )


# ------------------------------------------------------------------------------------------------------- the receiver


@dataclass
class Planned:
    seconds: dict[str, float]
    cpu: dict[str, float]
    peak_bytes: int
    kept_bytes: int
    #: Why there is no plan.
    refused: str
    pieces: int
    parcels: int
    #: Sources that hold something needed; the request to the source with most of it, and the expected answer.
    needed: int
    busiest: int
    want: bytes
    fingerprint: int
    want_bytes: int
    profile: str


def _plan(case: Case, rank: int, offered: Offered, mine: object, profiled: bool) -> Planned:
    """Everything that a receiver does until all sources know what to send."""
    limits, profile = Limits(), cProfile.Profile() if profiled else None
    clock = Clock(profile)
    planned = Planned(clock.seconds, clock.cpu, 0, 0, "", 0, 0, 0, 0, b"", 0, 0, "")
    memory = Memory()
    with clock.phase("prepare"):
        prepared: Prepared = prepare(mine, limits)
    with clock.phase("read offers"):
        offers = {peer: read_offer(body, limits, peer) for peer, body in offered.briefs.items()}
        described = read_offer(offered.whole, limits, 0)
    with clock.phase("agree"):
        known = {described.likeness: read_description(described, limits, 0)}
        choice = source_choice.choose(list(offers), offers, known, ReceiveRequest(target=prepared))
    try:
        with clock.phase("assemble"):
            manifest = choice.cohorts[0].manifest
            plan = assemble(
                choice.cohorts,
                prepared,
                BuildContext(manifest.shared, manifest.coordinates),
                Registry(limits),
                Options(),
                MemorySupply(CPU, limits),
                parcel_bytes=described.parcel_bytes,
            )
    except TargetMismatch as error:
        planned.refused, planned.peak_bytes = str(error), memory.peak()
        planned.profile = _most_called(profile)
        return planned
    with clock.phase("shares"):
        # Each conversation asks what its source can send.
        shares = {peer: plan.shares.of(peer) for peer in offers}
    most = -1
    with clock.phase("wants"):
        # Each conversation sends its own request and does not keep it.
        for peer, share in shares.items():
            if not share.held.any():
                continue
            want = messages.encode(
                messages.Want(
                    share.fingerprint,
                    described.parcel_bytes,
                    described.burst_bytes,
                    True,
                    [],
                    [],
                    messages.pairs_of(range(int(share.held.sum()))),
                    False,
                    0,
                    share.wanted_blocks,
                )
            )
            planned.needed += 1
            planned.want_bytes += len(want)
            if _count(share.wanted_blocks) > most:
                most, planned.busiest, planned.want = _count(share.wanted_blocks), peer, want
    planned.peak_bytes, planned.kept_bytes = memory.peak(), memory.now()
    cut = plan.cut
    planned.pieces, planned.parcels = len(cut.regions), len(cut)
    planned.fingerprint = shares[planned.busiest].fingerprint
    planned.profile = _most_called(profile)
    # The requests must cover what is needed, counting each byte once for each source that could send it.
    needed = sum(leaf.to_local().nbytes for leaf in prepared.leaves if isinstance(leaf, DTensor))
    regions = np.where(cut.low == 0, cut.count, 0)
    if cut.total_bytes != needed or any(_count(s.wanted_blocks) != regions[s.held].sum() for s in shares.values()):
        raise AssertionError(f"a plan of {cut.total_bytes} bytes, where {needed} are needed")
    return planned


def _count(wanted_blocks: WantedBlocks | None) -> int:
    return 0 if wanted_blocks is None else len(wanted_blocks.leaf) // 4


def _receiver(say: Connection[Any, Any], case: Case, rank: int, runs: int, profiled: bool) -> None:
    for _ in range(runs + 1):
        offered: Offered = say.recv()
        mine = state(case.receiver, rank, case.tensors)
        say.send(_plan(case, rank, offered, mine, profiled))
        del mine


# --------------------------------------------------------------------------------------------------------- the parent


@dataclass
class Result:
    """One case. Seconds are medians; memory is the highest peak of all runs, beyond the state's own."""

    name: str
    sources: int
    receivers: int
    tensors: int
    source_seconds: dict[str, float]
    receiver_seconds: dict[str, float]
    receiver_cpu: dict[str, float]
    receiver_total: float
    receiver_cpu_total: float
    source_cpu_total: float
    totals: list[float]
    source_peak_bytes: int
    receiver_peak_bytes: int
    receiver_kept_bytes: int
    refused: str
    pieces: int
    parcels: int
    sources_needed: int
    description_bytes: int
    brief_bytes: int
    all_wants_bytes: int
    busiest_regions: int
    profiles: list[str] = field(default_factory=list)

    @property
    def within(self) -> bool:
        return not self.refused and self.receiver_total < MOST_SECONDS and self.receiver_peak_bytes < MOST_MIB * MIB

    def to_dict(self) -> dict[str, Any]:
        found = asdict(self)
        del found["profiles"]
        return {**found, "within_target": self.within}


@contextlib.contextmanager
def _process(function: Callable[..., None], *args: object) -> Iterator[Connection[Any, Any]]:
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=function, args=(theirs, *args), daemon=True)
    process.start()
    theirs.close()
    try:
        yield ours
        process.join(60)
    finally:
        process.kill()
        process.join()
        ours.close()


def measure(case: Case, runs: int, profiled: bool = False) -> Result:
    """One case, with a process for each end."""
    rank = case.receiver.ranks // 2
    found: list[tuple[Offered, Planned, Answered | None]] = []
    with (
        _process(_source, case, runs, profiled) as source,
        _process(_receiver, case, rank, runs, profiled) as receiver,
    ):
        for _ in range(runs + 1):
            offered: Offered = source.recv()
            receiver.send(offered)
            planned: Planned = receiver.recv()
            answered: Answered | None = None
            if planned.refused:
                source.send(None)
            else:
                source.send((planned.busiest, planned.want))
                answered = source.recv()
                assert answered is not None
                if answered.fingerprint != planned.fingerprint:
                    raise AssertionError("the two ends do not agree")
            found.append((offered, planned, answered))
    # Leave out the first run's times: its caches were cold. Its memory counts.
    last, planned, answer = found[-1]
    counted = found[1:]
    source_seconds = {
        name: statistics.median(offered.seconds[name] for offered, _, _ in counted) for name in SOURCE_PHASES[:2]
    }
    if answer is not None:
        source_seconds["answer"] = statistics.median(a.seconds for _, _, a in counted if a is not None)
    totals = [sum(p.seconds.values()) for _, p, _ in counted]
    peaks = [max(o.peak_bytes, a.peak_bytes if a is not None else 0) for o, _, a in found]
    return Result(
        case.name,
        case.source.ranks,
        case.receiver.ranks,
        case.tensors,
        source_seconds,
        {name: statistics.median(p.seconds[name] for _, p, _ in counted) for name in planned.seconds},
        {name: statistics.median(p.cpu[name] for _, p, _ in counted) for name in planned.cpu},
        statistics.median(totals),
        statistics.median(sum(p.cpu.values()) for _, p, _ in counted),
        statistics.median(sum(o.cpu.values()) + (0.0 if a is None else a.cpu) for o, _, a in counted),
        totals,
        max(peaks),
        max(p.peak_bytes for _, p, _ in found),
        max(p.kept_bytes for _, p, _ in found),
        planned.refused,
        planned.pieces,
        planned.parcels,
        planned.needed,
        len(last.whole),
        max(map(len, last.briefs.values())),
        planned.want_bytes,
        0 if answer is None else answer.regions,
        [planned.profile, answer.profile if answer is not None else ""] if profiled else [],
    )


def table(results: Sequence[Result]) -> str:
    head = (
        "case",
        *RECEIVER_PHASES,
        "CPU",
        "wall",
        "memory",
        "source CPU",
        "pieces",
        "sources needed",
        "description",
        "offer",
    )
    lines: list[tuple[str, ...]] = [head]
    for r in results:
        phases = [f"{r.receiver_cpu[p] * 1e3:.0f} ms" if p in r.receiver_cpu else "" for p in RECEIVER_PHASES]
        lines.append(
            (
                r.name,
                *phases,
                "refused" if r.refused else f"{r.receiver_cpu_total:.2f} s",
                f"{r.receiver_total:.2f} s",
                f"{r.receiver_peak_bytes / MIB:.0f} MiB",
                f"{r.source_cpu_total:.2f} s",
                f"{r.pieces:,}",
                f"{r.sources_needed:,} of {r.sources:,}",
                f"{r.description_bytes / MIB:.2f} MiB",
                f"{r.brief_bytes} B",
            )
        )
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    rows = [
        (line[0].ljust(widths[0]), *(c.rjust(w) for c, w in zip(line[1:], widths[1:], strict=True))) for line in lines
    ]
    return "\n".join("  ".join(row) for row in rows)


def record(results: Sequence[Result], options: argparse.Namespace, argv: Sequence[str], load: float) -> dict[str, Any]:
    """Everything that is needed to judge the numbers later."""
    return {
        **machine.about("benchmarks.planning", argv, load),
        "runs": options.runs,
        "seconds": "medians of the runs after one warm-up; receiver_total is the median of all phases' sum",
        "memory": "the most of all runs, beyond what the process had with its state built",
        "target": {"seconds": MOST_SECONDS, "mib": MOST_MIB},
        "cases": [result.to_dict() for result in results],
    }


def main(argv: Sequence[str] | None = None) -> int:
    argv = sys.argv[1:] if argv is None else argv
    parser = argparse.ArgumentParser(prog="benchmarks.planning", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--tensors", type=int, help="tensors in the state (default 10,000; 200 with --quick)")
    parser.add_argument("--ranks", type=int, help="ranks on either side (default 1,024; 64 with --quick)")
    parser.add_argument("--runs", type=int, default=3, help="runs that count (default 3)")
    parser.add_argument("--case", action="append", metavar="TEXT", help="only cases with this in their name")
    parser.add_argument("--quick", action="store_true", help="small: to see that it works")
    parser.add_argument("--profile", action="store_true", help="show where the time goes; slower")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write everything to this file")
    options = parser.parse_args(argv)
    tensors = options.tensors or (200 if options.quick else 10_000)
    ranks = options.ranks or (64 if options.quick else 1024)
    if options.runs < 1 or tensors < 50 or ranks < 16 or ranks % 8:
        parser.error("--runs must be positive, --tensors at least 50, --ranks a multiple of 8 and at least 16")
    chosen = [case for case in cases(tensors, ranks) if not options.case or any(t in case.name for t in options.case)]
    if not chosen:
        parser.error("no case is called that")
    load = os.getloadavg()[0]
    results = []
    for case in chosen:
        results.append(measure(case, options.runs, options.profile))
        print(
            case.name,
            f"CPU {results[-1].receiver_cpu_total:.2f} s, wall {results[-1].receiver_total:.2f} s",
            results[-1].refused,
            file=sys.stderr,
        )
        for text in results[-1].profiles:
            print(text)
    print(table(results))
    print(f"medians of {options.runs} runs after a warm-up; memory beyond the state's own, at the receiver")
    if options.json is not None:
        options.json.write_text(json.dumps(record(results, options, argv, load), indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
