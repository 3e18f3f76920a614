"""One state to many hosts, against PyTorch's own PGTransport: network namespaces, links of limited rate, gloo.

python -m benchmarks.network [--mib N] [--mbit N] [--runs N] [--topology NAME] [--chains] [--json FILE]

Times are multiples of the wire time of one copy: the time of a bare TCP stream of as many bytes between two of the
hosts, in the same run. All moves are in place, in turns over the same group, and every receiver compares every move
bit for bit. The hosts share a kernel, so transfuse's memory route is off. Needs Linux, root and iproute2.

The *bare socket chain* is the least that a chain can cost: over plain sockets, receivers pass on parcels of the same
size as transfuse's, out of the memory in which they arrived. Nothing is planned, checked, copied or answered. CPU time
is also given per GiB and hop, a hop being one receiver's copy.
"""

from __future__ import annotations

import argparse
import datetime
import faulthandler
import json
import os
import re
import resource
import socket
import statistics
import sys
import threading
import time
import warnings
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.checkpoint import _pg_transport

import transfuse
from benchmarks.compare import machine
from benchmarks.hosts import Hosts, Traffic, Unavailable, traffic
from transfuse._limits import MIB
from transfuse.testing.exact import differences
from transfuse.testing.ranks import RanksFailed, say

#: The host of each rank. Rank 0 is the source, all others receive.
TOPOLOGIES = {
    "one-to-one": (0, 1),
    "one-to-four": (0, 1, 2, 3, 4),
    "one-to-eight": (0, 1, 2, 3, 4, 5, 6, 7, 8),
    "two-by-two": (0, 1, 1, 2, 2),
    # The same hosts, but ranks next to each other are on different hosts. Only on request.
    "two-by-two-mixed": (0, 1, 2, 1, 2),
}
DEFAULT = tuple(TOPOLOGIES)[:4]

STREAM, RELAY, NO_DIGESTS, BARE, NO_RELAY, TORCH = NAMES = (
    "bare TCP stream",
    "transfuse",
    "transfuse, verify=False",
    "bare socket chain",
    "transfuse, relay=False",
    "torch PGTransport",
)
#: With ``--chains``: only these.
CHAINS = NAMES[:4]
SOURCE = 0
#: The rank that alone receives the stream.
NEXT = 1
#: Number of tensors in a state.
PARTS = 16
#: A warm-up moves this fraction of the state: it warms connections and code; memory is touched before every move.
WARM_UP = 1 / 16


@dataclass(frozen=True)
class Move:
    """One move, as one rank saw it. All ranks use the machine's clock."""

    rank: int
    turn: int
    name: str
    started: float
    ended: float
    #: CPU time of this rank's process, all threads: in its own code, and in the kernel.
    user_seconds: float
    system_seconds: float
    #: Traffic on its host's link until all ranks had ended.
    traffic: Traffic
    #: The errors that were found, one line each.
    wrong: list[str]


@dataclass
class Result:
    """All counted moves of one kind, over all ranks."""

    name: str
    #: From a barrier until the last rank has returned.
    seconds: list[float] = field(default_factory=list)
    #: CPU time of all ranks together. If it nears seconds × cores, the run measures the machine's cores.
    cpu_seconds: list[float] = field(default_factory=list)
    #: Bytes that left the source's host, as copies of the state.
    source_sent: list[float] = field(default_factory=list)
    #: Bytes over the busiest link in one direction, as copies of the state.
    busiest_link: list[float] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    #: For each move: CPU time of each rank, in its own code and in the kernel.
    ranks_cpu_seconds: list[list[tuple[float, float]]] = field(default_factory=list)

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)


@dataclass
class Measured:
    """All results of one topology."""

    placement: tuple[int, ...]
    state_bytes: int
    #: Time of one copy at the link's rate, without headers.
    nominal_seconds: float
    results: dict[str, Result]

    @property
    def wire_seconds(self) -> float:
        """The measured wire time of one copy."""
        return self.results[STREAM].median

    def cost(self, result: Result) -> float:
        """CPU seconds of all ranks for each GiB and receiver."""
        hops = 1 if result.name == STREAM else len(self.placement) - 1
        return statistics.median(result.cpu_seconds) / (self.state_bytes / (1024 * MIB) * hops)

    def to_dict(self) -> dict[str, Any]:
        moves = [
            {
                **asdict(result),
                "median_seconds": result.median,
                "wire_times": result.median / self.wire_seconds,
                "nominal_times": result.median / self.nominal_seconds,
                "cpu_seconds_per_gib_and_hop": self.cost(result),
                "verified": not result.wrong,
            }
            for result in self.results.values()
        ]
        return {
            "host_of_rank": self.placement,
            "state_bytes": self.state_bytes,
            "nominal_seconds": self.nominal_seconds,
            "wire_seconds": self.wire_seconds,
            "moves": moves,
        }


# In the workers


def tensors(count: int, size: int) -> dict[str, torch.Tensor]:
    """Random values, always the same."""
    generator = torch.Generator().manual_seed(1)
    return {f"tensor{i}": torch.randn(size // 4, generator=generator) for i in range(count)}


class Links(NamedTuple):
    """A rank's plain connections to the rank before it and to the one after it."""

    before: socket.socket | None
    after: socket.socket | None


def work(rank: int, addresses: Sequence[str], names: Sequence[str], size: int, runs: int, limit: float) -> None:
    """The main function of one rank. Reports every move; moves of the warm-up are turn 0."""
    # A move that hangs must end: if no timeout has ended it, print where it hangs and end the process.
    faulthandler.dump_traceback_later(2 * limit, exit=True)
    with ExitStack() as stack:
        links = _links(addresses, limit)
        for link in filter(None, links):
            stack.enter_context(link)
        # The state to send; at a receiver, what must be there afterwards.
        states = [tensors(PARTS, max(4, round(size * part) // 4 * 4)) for part in (WARM_UP, 1)]
        targets = [{name: torch.zeros_like(t) for name, t in state.items()} for state in states]
        for turn in range(runs + 1):
            for name in names:
                faulthandler.dump_traceback_later(2 * limit, exit=True)
                say(_move(turn, name, states[turn > 0], targets[turn > 0], links, limit))
        faulthandler.cancel_dump_traceback_later()


def _links(addresses: Sequence[str], limit: float) -> Links:
    rank, ports = dist.get_rank(), torch.zeros(len(addresses), dtype=torch.int64)
    before = after = None
    with socket.create_server((addresses[rank], 0)) as server:
        server.settimeout(limit)
        ports[rank] = server.getsockname()[1]
        dist.all_reduce(ports)
        if rank + 1 < len(addresses):
            after = socket.create_connection((addresses[rank + 1], int(ports[rank + 1])), limit)
        if rank != SOURCE:
            before, _ = server.accept()
            before.settimeout(limit)
    return Links(before, after)


def _move(
    turn: int,
    name: str,
    state: dict[str, torch.Tensor],
    target: dict[str, torch.Tensor],
    links: Links,
    limit: float,
) -> Move:
    rank = dist.get_rank()
    for tensor in target.values():
        tensor.fill_(-1)
    if name == STREAM:
        move = _streaming(state, target, links)
    elif name == BARE:
        move = _passing_on(state if rank == SOURCE else target, links)
    else:
        move = _transporting(name, state, target, limit)
    with warnings.catch_warnings():
        # PyTorch's transport warns about itself.
        warnings.filterwarnings("ignore", module=re.escape(_pg_transport.__name__))
        before = traffic()
        dist.barrier()
        used, started = resource.getrusage(resource.RUSAGE_SELF), time.perf_counter()
        got = move()
        ended, after_all = time.perf_counter(), resource.getrusage(resource.RUSAGE_SELF)
    dist.barrier()
    after = traffic()
    wrong = []
    if rank == NEXT or (rank != SOURCE and name != STREAM):
        wrong = differences(state, got, in_place=True)
        if [t.data_ptr() for t in got.values()] != [t.data_ptr() for t in target.values()]:
            wrong.append("tensors did not land in the target's own memory")
    moved = Traffic(after.received - before.received, after.sent - before.sent)
    user, system = after_all.ru_utime - used.ru_utime, after_all.ru_stime - used.ru_stime
    lines = [f"rank {rank}, {name}: {line}" for line in wrong]
    return Move(rank, turn, name, started, ended, user, system, moved, lines)


def _fill(link: socket.socket, memory: memoryview) -> None:
    while memory:
        count = link.recv_into(memory)
        if count == 0:
            raise ConnectionError("the rank before has ended the stream early")
        memory = memory[count:]


def _streaming(
    state: dict[str, torch.Tensor], target: dict[str, torch.Tensor], links: Links
) -> Callable[[], dict[str, torch.Tensor]]:
    def move() -> dict[str, torch.Tensor]:
        if links.after is not None and dist.get_rank() == SOURCE:
            for tensor in state.values():
                links.after.sendall(tensor.numpy().data.cast("B"))
        elif links.before is not None and dist.get_rank() == NEXT:
            for tensor in target.values():
                _fill(links.before, tensor.numpy().data.cast("B"))
        return target

    return move


def _passing_on(memory: dict[str, torch.Tensor], links: Links) -> Callable[[], dict[str, torch.Tensor]]:
    """The bare socket chain, rank by rank. ``memory``: what the source sends, or where a receiver receives."""
    size = max(1, sum(tensor.nbytes for tensor in memory.values()) // (16 * (dist.get_world_size() - 1)))
    views = [tensor.numpy().data.cast("B") for tensor in memory.values()]
    parcels = [view[at : at + size] for view in views for at in range(0, len(view), size)]
    changed, arrived = threading.Condition(), [len(parcels) if links.before is None else 0]

    def send(link: socket.socket) -> None:
        for i, parcel in enumerate(parcels):
            with changed:
                changed.wait_for(lambda i=i: arrived[0] > i)  # type: ignore[misc]
            link.sendall(parcel)

    def move() -> dict[str, torch.Tensor]:
        sender = None
        if links.after is not None:
            sender = threading.Thread(target=send, args=(links.after,), daemon=True)
            sender.start()
        if links.before is not None:
            for i, parcel in enumerate(parcels):
                _fill(links.before, parcel)
                with changed:
                    arrived[0] = i + 1
                    changed.notify()
        if sender is not None:
            sender.join()
        return memory

    return move


def _transporting(
    name: str, state: dict[str, torch.Tensor], target: dict[str, torch.Tensor], limit: float
) -> Callable[[], dict[str, torch.Tensor]]:
    group = dist.group.WORLD
    assert group is not None
    timeout, device = datetime.timedelta(seconds=limit), torch.device("cpu")
    transport: Any
    if name == TORCH:
        transport = _pg_transport.PGTransport(group, timeout, device, lambda: target)
    else:
        verify = False if name == NO_DIGESTS else None
        transport = transfuse.PGTransport(
            group, timeout, device, lambda: target, same_host=False, relay=name != NO_RELAY, verify=verify
        )

    def move() -> dict[str, torch.Tensor]:
        if dist.get_rank() == SOURCE:
            transport.send_checkpoint(list(range(1, dist.get_world_size())), state)
            return state
        got: dict[str, torch.Tensor] = transport.recv_checkpoint(SOURCE)
        return got

    return move


# In the parent


def measure(placement: tuple[int, ...], mib: float, mbit: float, runs: int, names: Sequence[str] = NAMES) -> Measured:
    """One topology, with one set of processes."""
    size = max(4, round(mib * MIB / PARTS) // 4 * 4)
    nominal = size * PARTS * 8 / (mbit * 1e6)
    # The limit for one move: several times what it takes to send every receiver its own copy.
    limit = 20 + 4 * nominal * (len(placement) - 1)
    timeout = datetime.timedelta(seconds=limit)
    moves: dict[tuple[int, str], list[Move]] = {}
    with (
        Hosts(max(placement) + 1, mbit) as hosts,
        hosts.workers(
            placement, work, list(map(hosts.address, placement)), names, size, runs, limit, timeout=timeout
        ) as workers,
    ):
        for _, move in workers:
            moves.setdefault((move.turn, move.name), []).append(move)
    results = {name: Result(name) for name in names}
    for (turn, name), ranks in moves.items():
        result = results[name]
        result.wrong += [line for move in ranks for line in move.wrong]
        if turn > 0:
            result.seconds.append(max(move.ended for move in ranks) - min(move.started for move in ranks))
            ranks.sort(key=lambda move: move.rank)
            result.ranks_cpu_seconds.append([(move.user_seconds, move.system_seconds) for move in ranks])
            result.cpu_seconds.append(sum(move.user_seconds + move.system_seconds for move in ranks))
            result.busiest_link.append(max(max(move.traffic) for move in ranks) / (size * PARTS))
            (source,) = (move for move in ranks if move.rank == SOURCE)
            result.source_sent.append(source.traffic.sent / (size * PARTS))
    return Measured(placement, size * PARTS, nominal, results)


def table(measured: dict[str, Measured]) -> str:
    heads = ("topology", "", "median", "range", "x wire time", "x nominal", "CPU", "per GiB, hop")
    lines = [(*heads, "source sent", "checked")]
    for topology, one in measured.items():
        for i, r in enumerate(one.results.values()):
            lines.append(
                (
                    topology if i == 0 else "",
                    r.name,
                    f"{r.median:.3f} s",
                    f"{min(r.seconds):.3f}-{max(r.seconds):.3f} s",
                    f"{r.median / one.wire_seconds:.2f}",
                    f"{r.median / one.nominal_seconds:.2f}",
                    f"{statistics.median(r.cpu_seconds):.2f} s",
                    f"{one.cost(r):.2f} s",
                    f"{statistics.median(r.source_sent):.2f} copies",
                    "DIFFERS" if r.wrong else "bit for bit",
                )
            )
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join("  ".join(c.ljust(w) for c, w in zip(line, widths, strict=True)).rstrip() for line in lines)


def record(measured: dict[str, Measured], options: argparse.Namespace, argv: Sequence[str], load: float) -> Any:
    """Everything that is needed to judge the numbers later."""
    return {
        **machine.about("benchmarks.network", argv, load),
        "tcp_congestion_control": Path("/proc/sys/net/ipv4/tcp_congestion_control").read_text().strip(),
        "group": f"gloo, each host a network namespace behind a link of {options.mbit:g} Mbit/s in both directions",
        "mbit": options.mbit,
        "runs": options.runs,
        "seconds": "from a barrier until the last rank has returned; all runs after one smaller warm-up, in turns",
        "wire_seconds": "median of a bare TCP stream of as many bytes between two of the hosts",
        "topologies": {name: one.to_dict() for name, one in measured.items()},
    }


def main(argv: Sequence[str] | None = None) -> int:
    argv = sys.argv[1:] if argv is None else argv
    parser = argparse.ArgumentParser(prog="benchmarks.network", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--mib", type=float, default=64, help="size of the state (default 64)")
    parser.add_argument("--mbit", type=float, default=400, help="rate of every host's link (default 400)")
    parser.add_argument("--runs", type=int, default=3, help="moves of each kind that count (default 3)")
    parser.add_argument("--topology", choices=TOPOLOGIES, action="append", help="only this one; may be given again")
    parser.add_argument("--chains", action="store_true", help="only what chains cost: not relay=False, not PyTorch's")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write everything to this file")
    options = parser.parse_args(argv)
    if options.runs < 1 or options.mib <= 0 or options.mbit <= 0:
        parser.error("--runs, --mib and --mbit must be positive")
    load = os.getloadavg()[0]
    measured: dict[str, Measured] = {}
    try:
        for name in options.topology or DEFAULT:
            names = CHAINS if options.chains else NAMES
            measured[name] = measure(TOPOLOGIES[name], options.mib, options.mbit, options.runs, names)
    except Unavailable as error:
        print(f"cannot make hosts on this machine: {error}", file=sys.stderr)
        return 2
    except RanksFailed as error:
        print(f"{name}: {error}", *getattr(error, "__notes__", ()), sep="\n", file=sys.stderr)
        return 1
    print(table(measured))
    print(
        f"{options.mib:g} MiB over links of {options.mbit:g} Mbit/s; medians of {options.runs} runs after a warm-up, "
        f"in turns; wire time is that of the {STREAM}"
    )
    if options.json is not None:
        options.json.write_text(json.dumps(record(measured, options, argv, load), indent=2) + "\n")
    wrong = [line for one in measured.values() for result in one.results.values() for line in result.wrong]
    for line in wrong[:10]:
        print(line, file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
