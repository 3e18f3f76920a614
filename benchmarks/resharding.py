"""Move a sharded state into other shards, compared with what one would do without transfuse.

python -m benchmarks.resharding [--part NAME] [--quick] [--runs N] [--json FILE]

- links: two hosts hold a state sharded by rows, three hosts want it in other shards. Network namespaces with links of
  limited rate; times are multiples of what the busiest link's bytes need, by a bare TCP stream in the same run. For
  comparison, whole tensors are gathered on the sources and broadcast. Needs Linux, root and iproute2.
- host: the same on one host without limits: from memory, over the group, through DCP in /dev/shm, and by gathering.
- delta: a receiver that already has most of a state, with and without ``delta``, on one host and over a limited link.

All moves are in place, in turns in the same processes, and every receiver compares every move bit for bit.
"""

from __future__ import annotations

import argparse
import datetime
import faulthandler
import json
import math
import os
import shutil
import socket
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

import transfuse
from benchmarks.compare import machine
from benchmarks.hosts import Hosts, Traffic, Unavailable, traffic
from transfuse._limits import MIB
from transfuse.testing.ranks import RanksFailed, listening, say

SOURCES, RECEIVERS = (0, 1), (2, 3, 4)
WORLD = len(SOURCES) + len(RECEIVERS)
CPU = torch.device("cpu")
#: Over limited links a move should take at most this many times what the busiest link's bytes need.
MOST_TIMES = 1.2

STREAM, GROUP, MEMORY, GATHER, DCP = (
    "bare TCP stream",
    "transfuse",
    "transfuse, memory",
    "full_tensor and broadcast",
    "DCP through /dev/shm",
)
MOVES = {"links": (STREAM, GROUP, GATHER), "host": (MEMORY, GROUP, GATHER, DCP)}
PARTS = ("links", "host", "delta")


# -------------------------------------------------------------------------------------------------------------- states


class Weight(NamedTuple):
    """A tensor, and along which dimension tensor parallelism shards it; None: not at all."""

    name: str
    shape: tuple[int, ...]
    dim: int | None


def weights(nbytes: int) -> list[Weight]:
    """Layers of a model with about this number of bytes of float32: matrices of several shapes, and vectors."""
    layers = 4
    side = max(12, round(math.sqrt(nbytes / 4 / layers / 10) / 12) * 12)
    layer = (
        Weight("q", (side, side), 0),
        Weight("o", (side, side), 1),
        Weight("up", (4 * side, side), 0),
        Weight("down", (side, 4 * side), 1),
        Weight("norm", (side,), None),
    )
    return [weight._replace(name=f"layers.{i}.{weight.name}") for i in range(layers) for weight in layer]


#: How the receivers shard the state. The sources have rows, as FSDP does.
LAYOUTS: dict[str, Callable[[Weight], Placement]] = {
    "rows over 3": lambda weight: Shard(0),
    "columns over 3": lambda weight: Shard(len(weight.shape) - 1),
    "TP over 3": lambda weight: Replicate() if weight.dim is None else Shard(weight.dim),
    "whole on all 3": lambda weight: Replicate(),
}


def values(number: int, weight: Weight) -> torch.Tensor:
    """Random values, always the same."""
    return torch.randn(weight.shape, generator=torch.Generator().manual_seed(number))


def cut(whole: torch.Tensor, placement: Placement, parts: int, at: int) -> torch.Tensor:
    """A rank's shard, in whole tensors' memory."""
    return whole.chunk(parts, placement.dim)[at] if isinstance(placement, Shard) else whole


def needed(some: Sequence[Weight], layout: str) -> int:
    """Bytes that a receiver holds."""
    parts = [len(RECEIVERS) if isinstance(LAYOUTS[layout](weight), Shard) else 1 for weight in some]
    return sum(4 * math.prod(weight.shape) // n for weight, n in zip(some, parts, strict=True))


def busiest_bytes(some: Sequence[Weight], layout: str) -> int:
    """Bytes over the busiest link in one direction: each source has half of what every receiver needs."""
    each = needed(some, layout)
    return max(each, each * len(RECEIVERS) // len(SOURCES))


# ---------------------------------------------------------------------------------------------------------- in workers


@dataclass(frozen=True)
class Move:
    """One move, as one rank saw it. All ranks use the machine's clock."""

    rank: int
    turn: int
    layout: str
    name: str
    started: float
    ended: float
    cpu_seconds: float
    #: Traffic on its host's link until all ranks had ended; None without limits.
    traffic: Traffic | None
    #: Payload that transfuse reports as received.
    payload: int
    wrong: list[str]


class Rank:
    """Everything that one rank needs for its moves."""

    def __init__(self, size: int, limit: float, directory: str, stream: socket.socket | None) -> None:
        self.rank = dist.get_rank()
        self.weights = weights(size)
        self.limit, self.directory, self.stream = limit, Path(directory), stream
        # All ranks make the groups, in the same order.
        sources, receivers = dist.new_group(list(SOURCES)), dist.new_group(list(RECEIVERS))
        self.group: Any = sources if self.is_source else receivers
        self.broadcast: Any = dist.new_group([SOURCES[0], *RECEIVERS])
        self.mesh = DeviceMesh.from_group(self.group, "cpu")
        self.payload = 0
        self.state: dict[str, DTensor] = {}
        if self.is_source:
            self.state = {
                weight.name: self._dtensor(weight, Shard(0), cut(values(i, weight), Shard(0), len(SOURCES), self.at))
                for i, weight in enumerate(self.weights)
            }

    @property
    def is_source(self) -> bool:
        return self.rank in SOURCES

    @property
    def at(self) -> int:
        """Its index among the sources, or among the receivers."""
        return (SOURCES if self.is_source else RECEIVERS).index(self.rank)

    def _dtensor(self, weight: Weight, placement: Placement, local: torch.Tensor) -> DTensor:
        return DTensor.from_local(
            local.clone(memory_format=torch.contiguous_format), self.mesh, [placement], run_check=False
        )

    def hold(self, layout: str) -> None:
        """At a receiver: set the target of the next moves, and what must be in it afterwards."""
        self.expected: dict[str, torch.Tensor] = {}
        if self.is_source:
            return
        for i, weight in enumerate(self.weights):
            placement = LAYOUTS[layout](weight)
            mine = cut(values(i, weight), placement, len(RECEIVERS), self.at)
            self.expected[weight.name] = mine.clone(memory_format=torch.contiguous_format)
            self.state[weight.name] = self._dtensor(weight, placement, torch.zeros_like(mine))

    def move(self, turn: int, layout: str, name: str) -> Move:
        if not self.is_source:
            for tensor in self.state.values():
                tensor.to_local().fill_(-1)
        self.payload = 0
        moves: dict[str, Callable[[], None]] = {
            STREAM: self._stream,
            GROUP: partial(self._transfuse, same_host=False),
            MEMORY: partial(self._transfuse, same_host=True),
            GATHER: partial(self._gather, layout),
            DCP: self._dcp,
        }
        move = moves[name]
        before = traffic() if _on_link() else None
        dist.barrier()
        cpu, started = time.process_time(), time.perf_counter()
        move()
        ended, cpu = time.perf_counter(), time.process_time() - cpu
        dist.barrier()
        moved = None
        if before is not None:
            after = traffic()
            moved = Traffic(after.received - before.received, after.sent - before.sent)
        wrong = [] if name == STREAM else list(self._differences(name))
        if name == DCP and self.rank == SOURCES[0]:
            shutil.rmtree(self.directory, ignore_errors=True)
        return Move(self.rank, turn, layout, name, started, ended, cpu, moved, self.payload, wrong)

    def _differences(self, name: str) -> Iterator[str]:
        for key, expected in self.expected.items():
            got = self.state[key].to_local()
            if not torch.equal(expected.view(torch.uint8), got.view(torch.uint8)):
                yield f"rank {self.rank}, {name}: {key} differs"

    # -- moves

    def _stream(self) -> None:
        """A bare TCP stream of as many bytes as a source holds, to one receiver."""
        if self.stream is None:
            return
        if self.is_source:
            for tensor in self.state.values():
                self.stream.sendall(tensor.to_local().numpy().data.cast("B"))
            return
        left = sum(4 * math.prod(weight.shape) // len(SOURCES) for weight in self.weights)
        buffer = memoryview(bytearray(MIB))
        while left:
            count = self.stream.recv_into(buffer[: min(left, len(buffer))])
            if count == 0:
                raise ConnectionError("the source ended the stream early")
            left -= count

    def _transfuse(self, same_host: bool) -> None:
        world, timeout = cast(Any, dist.group.WORLD), datetime.timedelta(seconds=self.limit)
        transport = transfuse.PGTransport(world, timeout, CPU, lambda: self.state, same_host=same_host)
        if self.is_source:
            transport.send_checkpoint(list(RECEIVERS), self.state)
            return
        got = transport.recv_checkpoint(list(SOURCES))
        assert transport.report is not None
        self.payload = transport.report.bytes
        if any(got[key] is not tensor for key, tensor in self.state.items()):
            raise AssertionError("tensors did not land in the target's own memory")
        if transport.report.route != ("memory" if same_host else "group"):
            raise AssertionError(f"came by {transport.report.route}")

    def _gather(self, layout: str) -> None:
        """Whole tensors, one after another: gathered on the sources, broadcast by the first, cut by the receivers."""
        for weight in self.weights:
            if self.is_source:
                whole = self.state[weight.name].full_tensor()
                if self.rank != SOURCES[0]:
                    continue
            else:
                whole = torch.empty(weight.shape)
            dist.broadcast(whole, SOURCES[0], group=self.broadcast)
            if not self.is_source:
                mine = cut(whole, LAYOUTS[layout](weight), len(RECEIVERS), self.at)
                self.state[weight.name].to_local().copy_(mine)

    def _dcp(self) -> None:
        if self.is_source:
            save(dict(self.state), checkpoint_id=self.directory, process_group=self.group)
        dist.barrier()
        if not self.is_source:
            load(dict(self.state), checkpoint_id=self.directory, process_group=self.group)


def _on_link() -> bool:
    try:
        traffic()
    except StopIteration:
        return False
    return True


def work(
    rank: int,
    part: str,
    layouts: Sequence[str],
    size: int,
    runs: int,
    limit: float,
    directory: str,
    listen: str,
) -> None:
    """The main function of one rank. Reports every move; moves of the warm-up are turn 0."""
    faulthandler.dump_traceback_later(4 * limit, exit=True)
    with ExitStack() as stack:
        stream = _connect(listen, limit) if STREAM in MOVES[part] else None
        if stream is not None:
            stack.enter_context(closing(stream))
        me = Rank(size, limit, directory, stream)
        for layout in layouts:
            me.hold(layout)
            for turn in range(runs + 1):
                for name in MOVES[part]:
                    # A move that hangs must end: print where it hangs and end the process.
                    faulthandler.dump_traceback_later(4 * limit, exit=True)
                    say(me.move(turn, layout, name))
        faulthandler.cancel_dump_traceback_later()


def _connect(listen: str, limit: float) -> socket.socket | None:
    """A connection from the first source to the first receiver; None on other ranks."""
    rank, port = dist.get_rank(), torch.zeros(1, dtype=torch.int64)
    if rank == RECEIVERS[0]:
        with socket.create_server((listen, 0)) as server:
            server.settimeout(limit)
            port[0] = server.getsockname()[1]
            dist.broadcast(port, RECEIVERS[0])
            stream, _ = server.accept()
            stream.settimeout(limit)
            return stream
    dist.broadcast(port, RECEIVERS[0])
    return socket.create_connection((listen, int(port)), limit) if rank == SOURCES[0] else None


# --------------------------------------------------------------------------------------------------------------- delta


class Change(NamedTuple):
    name: str
    #: The fraction of the state that is wrong at the receiver.
    share: float
    delta: bool


CHANGES = (
    Change("without delta", 1.0, False),
    Change("nothing changed", 0.0, True),
    Change("1 % changed", 0.01, True),
    Change("all changed", 1.0, True),
)
DELTA_TENSORS = 16


@dataclass(frozen=True)
class Kept:
    """One receive with delta, as the receiver saw it."""

    turn: int
    change: str
    route: str
    seconds: float
    cpu_seconds: float
    moved_bytes: int
    kept_bytes: int
    link_bytes: int
    wrong: list[str]


def delta_work(rank: int, routes: Sequence[str], size: int, runs: int, limit: float) -> None:
    """Rank 0 has a state, rank 1 has most of it."""
    world = cast(Any, dist.group.WORLD)
    each = size // DELTA_TENSORS // 4
    generator = torch.Generator().manual_seed(1)
    state = {f"tensor{i}": torch.randn(each, generator=generator) for i in range(DELTA_TENSORS)}
    target = {name: torch.empty_like(tensor) for name, tensor in state.items()}
    timeout = datetime.timedelta(seconds=limit)
    for turn in range(runs + 1):
        for change in CHANGES:
            for route in routes:
                faulthandler.dump_traceback_later(4 * limit, exit=True)
                left = round(change.share * each * DELTA_TENSORS)
                for name, tensor in target.items():
                    # The first elements are wrong, in one run.
                    wrong_here = min(left, each)
                    tensor.copy_(state[name])
                    tensor[:wrong_here] += 1
                    left -= wrong_here
                transport = transfuse.PGTransport(
                    world, timeout, CPU, lambda: target, same_host=route == "memory", delta=change.delta
                )
                before = traffic().received if _on_link() else 0
                dist.barrier()
                cpu, started = time.process_time(), time.perf_counter()
                if rank == 0:
                    transport.send_checkpoint([1], state)
                    seconds = time.perf_counter() - started
                else:
                    transport.recv_checkpoint(0)
                    seconds = time.perf_counter() - started
                used = torch.tensor(time.process_time() - cpu)
                moved = (traffic().received if _on_link() else 0) - before
                dist.all_reduce(used)
                if rank == 1:
                    report = transport.report
                    assert report is not None
                    wrong = [
                        f"{route}, {change.name}: {n} differs" for n in state if not torch.equal(state[n], target[n])
                    ]
                    say(
                        Kept(
                            turn,
                            change.name,
                            route,
                            seconds,
                            float(used),
                            report.bytes,
                            report.kept_bytes,
                            moved,
                            wrong,
                        )
                    )
    faulthandler.cancel_dump_traceback_later()


# ---------------------------------------------------------------------------------------------------------- the parent


@dataclass
class Result:
    """All counted moves of one kind, over all ranks."""

    name: str
    #: From a barrier until the last rank has returned.
    seconds: list[float] = field(default_factory=list)
    #: CPU time of all ranks together.
    cpu_seconds: list[float] = field(default_factory=list)
    #: Bytes over the busiest link in one direction.
    busiest_link: list[int] = field(default_factory=list)
    payload: int = 0
    wrong: list[str] = field(default_factory=list)

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)


@dataclass
class Measured:
    """One layout."""

    state_bytes: int
    #: The least that the busiest link must carry in one direction, and how long that takes.
    busiest_bytes: int
    wire_seconds: float | None
    results: dict[str, Result]

    def to_dict(self) -> dict[str, Any]:
        reference = self.results[GROUP].median
        moves = [
            {
                **asdict(result),
                "median_seconds": result.median,
                "of_transfuse": result.median / reference,
                "wire_times": None if self.wire_seconds is None else result.median / self.wire_seconds,
                "verified": not result.wrong,
            }
            for result in self.results.values()
        ]
        return {
            "state_bytes": self.state_bytes,
            "busiest_bytes": self.busiest_bytes,
            "wire_seconds": self.wire_seconds,
            "moves": moves,
        }


def measure(part: str, layouts: Sequence[str], mib: float, mbit: float, runs: int) -> dict[str, Measured]:
    """Several layouts, with one set of processes."""
    size = round(mib * MIB)
    some = weights(size)
    total = sum(4 * math.prod(weight.shape) for weight in some)
    nominal = total * 8 / (mbit * 1e6) if part == "links" else total / 1e8
    # The limit for one move: several times what it takes to send every receiver everything.
    limit = 20 + 4 * nominal * len(RECEIVERS)
    moves: dict[tuple[str, int, str], list[Move]] = {}
    with ExitStack() as stack:
        directory = stack.enter_context(tempfile.TemporaryDirectory(dir=_shared_memory(), prefix="transfuse-bench-"))
        args: tuple[object, ...] = (part, tuple(layouts), size, runs, limit, str(Path(directory, "dcp")))
        if part == "links":
            hosts = stack.enter_context(Hosts(WORLD, mbit))
            timeout = datetime.timedelta(seconds=limit)
            listen = hosts.address(RECEIVERS[0])
            workers = stack.enter_context(hosts.workers(range(WORLD), work, *args, listen, timeout=timeout))
        else:
            workers = stack.enter_context(listening(WORLD, work, *args, "127.0.0.1"))
        for _, move in workers:
            moves.setdefault((move.layout, move.turn, move.name), []).append(move)
    found: dict[str, Measured] = {}
    for layout in layouts:
        results = {name: Result(name) for name in MOVES[part]}
        for turn in range(runs + 1):
            for name in MOVES[part]:
                ranks, result = moves[layout, turn, name], results[name]
                result.wrong += [line for move in ranks for line in move.wrong]
                if turn > 0:
                    result.seconds.append(max(move.ended for move in ranks) - min(move.started for move in ranks))
                    result.cpu_seconds.append(sum(move.cpu_seconds for move in ranks))
                    result.busiest_link.append(max(max(move.traffic or (0,)) for move in ranks))
                    result.payload = sum(move.payload for move in ranks)
        busiest = busiest_bytes(some, layout)
        wire = results[STREAM].median * busiest / (total / len(SOURCES)) if STREAM in results else None
        for name in (GROUP, MEMORY):
            if name in results and results[name].payload != needed(some, layout) * len(RECEIVERS):
                results[name].wrong.append(f"{name}: moved {results[name].payload} bytes")
        found[layout] = Measured(total, busiest, wire, results)
    return found


def _shared_memory() -> str | None:
    return "/dev/shm" if os.access("/dev/shm", os.W_OK) else None


def measure_delta(limited: bool, mib: float, mbit: float, runs: int) -> dict[str, dict[str, list[Kept]]]:
    """By route and change, all counted runs, and their errors."""
    size = round(mib * MIB) // DELTA_TENSORS // 4 * 4 * DELTA_TENSORS
    limit = 20 + 4 * (size * 8 / (mbit * 1e6) if limited else size / 1e8)
    routes = ("group",) if limited else ("memory", "group")
    found: dict[str, dict[str, list[Kept]]] = {}
    with ExitStack() as stack:
        if limited:
            hosts = stack.enter_context(Hosts(2, mbit))
            timeout = datetime.timedelta(seconds=limit)
            workers = stack.enter_context(hosts.workers((0, 1), delta_work, routes, size, runs, limit, timeout=timeout))
        else:
            workers = stack.enter_context(listening(2, delta_work, routes, size, runs, limit))
        for _, one in workers:
            if one.turn > 0:
                name = f"link of {mbit:g} Mbit/s" if limited else f"one host, {one.route}"
                found.setdefault(name, {}).setdefault(one.change, []).append(one)
    return found


# ------------------------------------------------------------------------------------------------------------- showing


def table(part: str, measured: dict[str, Measured]) -> str:
    last = "x busiest link" if part == "links" else "x memory route"
    lines = [("receivers hold", "", "median", "range", last, "CPU", "checked")]
    for layout, one in measured.items():
        for i, r in enumerate(one.results.values()):
            unit = one.wire_seconds if one.wire_seconds is not None else one.results[MEMORY].median
            lines.append(
                (
                    layout if i == 0 else "",
                    r.name,
                    f"{r.median:.3f} s",
                    f"{min(r.seconds):.3f}-{max(r.seconds):.3f} s",
                    "" if r.name == STREAM else f"{r.median / unit:.2f}",
                    f"{statistics.median(r.cpu_seconds):.2f} s",
                    "" if r.name == STREAM else "DIFFERS" if r.wrong else "bit for bit",
                )
            )
    return _aligned(lines)


def delta_table(found: dict[str, dict[str, list[Kept]]]) -> str:
    lines = [("delta", "", "median", "x without", "moved", "CPU", "checked")]
    for name, changes in found.items():
        whole = statistics.median(one.seconds for one in changes[CHANGES[0].name])
        for i, (change, runs) in enumerate(changes.items()):
            median = statistics.median(one.seconds for one in runs)
            lines.append(
                (
                    name if i == 0 else "",
                    change,
                    f"{median:.3f} s",
                    f"{median / whole:.2f}",
                    f"{runs[-1].moved_bytes / MIB:.2f} MiB",
                    f"{statistics.median(one.cpu_seconds for one in runs):.2f} s",
                    "DIFFERS" if any(one.wrong for one in runs) else "bit for bit",
                )
            )
    return _aligned(lines)


def _aligned(lines: Sequence[Sequence[str]]) -> str:
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join("  ".join(c.ljust(w) for c, w in zip(line, widths, strict=True)).rstrip() for line in lines)


def record(found: dict[str, Any], options: argparse.Namespace, argv: Sequence[str], load: float) -> dict[str, Any]:
    """Everything that is needed to judge the numbers later."""
    return {
        **machine.about("benchmarks.resharding", argv, load),
        "load_average_after": os.getloadavg()[0],
        "mbit": options.mbit,
        "runs": options.runs,
        "seconds": "from a barrier until the last rank has returned; all runs after one warm-up, in turns",
        "wire_seconds": "what the busiest link's bytes need at the speed of a bare TCP stream in the same run",
        "target": f"over limited links within {MOST_TIMES} times that",
        "parts": found,
    }


def _delta_record(found: dict[str, dict[str, list[Kept]]]) -> dict[str, Any]:
    return {
        name: {
            change: {
                "median_seconds": statistics.median(one.seconds for one in runs),
                "seconds": [one.seconds for one in runs],
                "cpu_seconds": [one.cpu_seconds for one in runs],
                "moved_bytes": runs[-1].moved_bytes,
                "kept_bytes": runs[-1].kept_bytes,
                "link_bytes": runs[-1].link_bytes,
                "verified": not any(one.wrong for one in runs),
            }
            for change, runs in changes.items()
        }
        for name, changes in found.items()
    }


def run(part: str, options: argparse.Namespace) -> tuple[dict[str, Any], list[str]]:
    """Measure and show one part. Returns its record and errors. Raises :class:`Unavailable`."""
    if part == "delta":
        mib = 2 if options.quick else options.delta_mib
        found = measure_delta(False, mib, options.mbit, options.runs)
        try:
            found |= measure_delta(True, mib / 4, options.mbit, options.runs)
        except Unavailable as error:
            print(f"no limited link: {error}", file=sys.stderr)
        print(delta_table(found), end="\n\n")
        wrong = [line for changes in found.values() for runs in changes.values() for one in runs for line in one.wrong]
        return {"state_mib": mib, "changes": _delta_record(found)}, wrong
    if part == "links":
        layouts, mib = (["columns over 3"] if options.quick else list(LAYOUTS)), options.links_mib
    else:
        layouts, mib = ["columns over 3"] if options.quick else ["rows over 3", "columns over 3"], options.host_mib
    measured = measure(part, layouts, 1 if options.quick else mib, options.mbit, options.runs)
    print(table(part, measured), end="\n\n")
    wrong = [line for one in measured.values() for result in one.results.values() for line in result.wrong]
    return {layout: one.to_dict() for layout, one in measured.items()}, wrong


def main(argv: Sequence[str] | None = None) -> int:
    argv = sys.argv[1:] if argv is None else argv
    parser = argparse.ArgumentParser(prog="benchmarks.resharding", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--part", choices=PARTS, action="append", help="only this one; may be given again")
    parser.add_argument("--links-mib", type=float, default=64, help="size of the state over links (default 64)")
    parser.add_argument("--host-mib", type=float, default=512, help="size of the state on one host (default 512)")
    parser.add_argument("--delta-mib", type=float, default=256, help="size of the state of the delta (default 256)")
    parser.add_argument("--mbit", type=float, default=400, help="rate of every host's link (default 400)")
    parser.add_argument("--runs", type=int, default=3, help="moves of each kind that count (default 3)")
    parser.add_argument("--quick", action="store_true", help="tiny: to see that it works")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write everything to this file")
    options = parser.parse_args(argv)
    if min(options.runs, options.links_mib, options.host_mib, options.delta_mib, options.mbit) <= 0:
        parser.error("--runs, --mbit and all sizes must be positive")
    load = os.getloadavg()[0]
    found: dict[str, Any] = {}
    wrong: list[str] = []
    unavailable = False
    for part in options.part or PARTS:
        try:
            found[part], lines = run(part, options)
            wrong += lines
        except Unavailable as error:
            unavailable = True
            print(f"{part}: cannot make hosts on this machine: {error}", file=sys.stderr)
        except RanksFailed as error:
            print(f"{part}: {error}", *getattr(error, "__notes__", ()), sep="\n", file=sys.stderr)
            return 1
    after = os.getloadavg()[0]
    print(f"medians of {options.runs} runs after a warm-up, in turns; load {load:.1f} before, {after:.1f} after")
    if options.json is not None and found:
        options.json.write_text(json.dumps(record(found, options, argv, load), indent=2) + "\n")
    for line in wrong[:10]:
        print(line, file=sys.stderr)
    if wrong:
        return 1
    return 2 if unavailable and not found else 0


if __name__ == "__main__":
    sys.exit(main())
