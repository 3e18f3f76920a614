"""The parts of a visit to an accelerator (:mod:`benchmarks.gpu`), each in a process of its own, or one for each rank.

python -m benchmarks.gpu_parts PART FOLDER

What a part finds goes to ``FOLDER/PART.json``; what it prints is its log. ``FOLDER/visit.json`` says what to visit.
"""

from __future__ import annotations

import faulthandler
import http.client
import importlib.metadata
import importlib.util
import json
import mmap
import os
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint import _pg_transport

import transfuse
from benchmarks.compare import machine
from transfuse._memory import pinning

__all__ = ["PARTS", "Skip", "Visit"]

KIB, MIB = 1 << 10, 1 << 20
#: How long anything waits for anybody.
TIMEOUT = timedelta(seconds=60)
RUNS = 3
STEPS = 4
BESIDE = f"{STEPS} steps with wait=False"
LOOSE = "a stream that waits for nobody"
#: What the imitation counts and the page shows.
COUNTS = ("host_syncs", "async_copies", "pageable_bytes", "pinned_bytes", "inner_bytes")

State = dict[str, torch.Tensor]


class Skip(Exception):
    """Says why a part cannot be run here."""


@dataclass(frozen=True)
class Visit:
    """What is visited, and how much is moved there."""

    kind: str
    mib: int
    folder: str

    @property
    def imitation(self) -> bool:
        return self.kind == "phantom"

    @property
    def module(self) -> Any:
        return torch.get_device_module(self.kind)

    def begin(self, devices: int = 1) -> None:
        """Make the devices usable, the one of this rank the current one. Raises :class:`Skip` if there are too few."""
        torch.manual_seed(2026)
        if self.imitation:
            from device import build, group, phantom

            try:
                phantom.load()
            except build.Unavailable as reason:
                raise Skip(str(reason)) from None
            phantom.set_available(True)
            group.register()
        found = self.module.device_count() if self.module.is_available() else 0
        if found < devices:
            raise Skip(f"needs {devices} of the devices {self.kind}, and torch finds {found}")
        self.module.set_device(int(os.environ.get("RANK", 0)) % found)

    def join(self) -> tuple[int, Any]:
        """The group of the two ranks of a part."""
        self.begin(2)
        rank, backend = int(os.environ["RANK"]), "pccl" if self.imitation else "nccl"
        where = Path(self.folder, "meeting-" + os.environ["VISIT_PART"])
        backends = f"cpu:gloo,{self.kind}:{backend}"
        dist.init_process_group(backends, init_method=where.as_uri(), rank=rank, world_size=2, timeout=TIMEOUT)
        return rank, dist.group.WORLD

    def large(self, share: float = 1.0) -> State:
        """Tensors of 16 MiB, or one smaller one, on the current device."""
        total = int(self.mib * share * MIB)
        each = min(total, 16 * MIB)
        return self.state(max(1, total // each), each)

    def small(self) -> State:
        # On the imitation each tensor costs milliseconds here and there: 8,192 would miss the deadlines.
        most = 1024 if self.imitation else 8192
        return self.state(min(most, max(64, self.mib * MIB // (8 * KIB))), 4 * KIB)

    def state(self, count: int, nbytes: int) -> State:
        made = {f"w{i}": torch.randint(0, 255, (nbytes,), dtype=torch.uint8).to(self.kind) for i in range(count)}
        torch.accelerator.synchronize()
        return made

    def measured(self, call: Callable[[], object], nbytes: int) -> dict[str, Any]:
        """Seconds until the call has returned and the device is idle; on the imitation also what it has counted."""
        torch.accelerator.synchronize()
        if self.imitation:
            self.module.reset_counters()
        began = time.perf_counter()
        call()
        returned = time.perf_counter() - began
        counted = {name: self.module.counters()[name] for name in COUNTS} if self.imitation else {}
        torch.accelerator.synchronize()
        seconds = time.perf_counter() - began
        return {"seconds": seconds, "returned_after": returned, "bytes": nbytes, **counted}


def nbytes_of(state: State) -> int:
    return sum(tensor.nbytes for tensor in state.values())


def in_main_memory(state: State) -> State:
    return {name: tensor.cpu() for name, tensor in state.items()}


def exact(state: State, expected: State) -> None:
    wrong = [name for name, tensor in expected.items() if not torch.equal(state[name].cpu(), tensor)]
    if wrong:
        raise AssertionError(f"{len(wrong)} of {len(expected)} tensors differ: {', '.join(wrong[:5])}")


def together() -> None:
    """Both ranks have come to here. In main memory, without the device's backend."""
    dist.all_reduce(torch.zeros(1))


def median(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """The last run, with the medians of the seconds of all."""
    medians = {key: statistics.median(run[key] for run in runs) for key in ("seconds", "returned_after")}
    return {**runs[-1], **medians, "runs": len(runs)}


# ------------------------------------------------------------------------------------------------------------ the parts


def about_machine(visit: Visit) -> dict[str, Any]:
    """Names and versions, and how the devices are connected. No host name and no path."""
    visit.begin()
    found: dict[str, Any] = {**machine.describe(), "torch": torch.__version__, "transfuse": transfuse.__version__}
    found["python"] = sys.version.split()[0]
    for package in ("nixl", "torchft", "ray"):
        if importlib.util.find_spec(package) is not None:
            found[package] = importlib.metadata.version(package)
    if visit.kind != "cuda":
        return {**found, "devices": [visit.kind] * visit.module.device_count()}
    cuda = torch.cuda
    count = cuda.device_count()
    properties = [cuda.get_device_properties(number) for number in range(count)]
    found["devices"] = [
        f"{one.name}, {one.total_memory / MIB:.0f} MiB, sm_{one.major}{one.minor}" for one in properties
    ]
    found["cuda"] = torch.version.cuda
    found["nccl"] = ".".join(map(str, cuda.nccl.version()))  # type: ignore[no-untyped-call]
    pairs = [(a, b) for a in range(count) for b in range(count) if a != b]
    found["peer access"] = f"{sum(cuda.can_device_access_peer(*pair) for pair in pairs)} of {len(pairs)} pairs"
    for name, question in (
        ("driver", ["--query-gpu=driver_version", "--format=csv,noheader"]),
        ("topology", ["topo", "-m"]),
    ):
        if (smi := shutil.which("nvidia-smi")) is not None:
            found[name] = subprocess.run([smi, *question], capture_output=True, text=True, timeout=20).stdout.strip()
    return found


def registration(visit: Visit) -> dict[str, Any]:
    """Pin memory that is mapped as a keeper's slots are, then launch; pin it twice, which must fail, then launch.

    An error of the driver's that nobody has taken stays, and the next launch would report it.
    """
    visit.begin()
    nbytes = 8 * MIB
    file = os.memfd_create("visit")
    os.ftruncate(file, nbytes)
    memory = mmap.mmap(file, nbytes, mmap.MAP_SHARED)
    target = torch.frombuffer(memory, dtype=torch.uint8)
    source = torch.full((nbytes,), 3, dtype=torch.uint8, device=visit.kind)

    def launch() -> None:
        assert int((source.float() + 1).max().item()) == 4
        torch.accelerator.synchronize()

    registered = pinning.register(target, target.data_ptr(), nbytes, visit.kind)
    launch()
    copied = visit.measured(lambda: target.copy_(source, non_blocking=True), nbytes)
    assert int(target.min()) == 3
    twice = pinning.register(target, target.data_ptr(), nbytes, visit.kind)
    launch()
    return {"registered": registered, "registered twice": twice, "copied into it": copied}


def commit(visit: Visit) -> dict[str, Any]:
    """The first commit, later ones, steps of training with and without ``wait=False``, and a restore."""
    visit.begin()
    return kept(visit, "large", visit.large()) | kept(visit, "small", visit.small())


def kept(visit: Visit, name: str, state: State) -> dict[str, Any]:
    nbytes, outcomes = nbytes_of(state), list[str]()

    def note(report: transfuse.CommitReport) -> None:
        outcomes.append(report.outcome)

    run = f"visit-{name}-{os.getpid()}"
    with transfuse.keep(transfuse.State(state), run=run, timeout=TIMEOUT, linger=5, on_report=note) as keep:

        def committed(step: int) -> None:
            report = keep.commit(step)
            assert report is not None
            assert report.outcome == "committed", report.line()

        first = visit.measured(partial(committed, 1), nbytes)
        later = median([visit.measured(partial(committed, step), nbytes) for step in range(2, 2 + RUNS)])
        before = len(outcomes)
        rows = {"first commit": first, "later commit": later, **beside_steps(visit, keep, state, later["seconds"])}
        expected = in_main_memory(state)
        committed(100)
        rows[BESIDE]["commits"] = outcomes[before:-1].count("committed")
        with keep.mutating():
            torch._foreach_zero_(list(state.values()))
        rows["restore"] = visit.measured(keep.restore, nbytes)
        exact(state, expected)
        rows |= changed_at_once(visit, keep, state)
    return {f"{name}: {what}": row for what, row in rows.items()}


def changed_at_once(visit: Visit, keep: transfuse.Keep, state: State) -> dict[str, Any]:
    """Commits that are not waited for, a change right after each, and what is restored then: the step, whole.

    A stream that waits for nobody may be quicker than the copies. Then the step before is there, whole.
    """
    other = torch.Stream(device=visit.kind)
    expected = {100: in_main_memory(state)}

    def change(how: str) -> None:
        if how == "another stream":
            other.wait_stream(torch.accelerator.current_stream())
        with nullcontext() if how == "the same stream" else other:
            torch._foreach_add_(list(state.values()), 1)

    def once(step: int, how: str) -> None:
        keep.commit(step, wait=False)
        with keep.mutating():
            change(how)
        torch.accelerator.current_stream().wait_stream(other)

    rows = {}
    for step, how in enumerate(("the same stream", "another stream", LOOSE), 101):
        with keep.mutating():
            torch._foreach_add_(list(state.values()), 1)
        expected[step] = in_main_memory(state)
        row = visit.measured(partial(once, step, how), nbytes_of(state))
        restored = int(keep.restore() or 0)
        if restored != step and how != LOOSE:
            raise AssertionError(f"step {step} was changed on {how}, and step {restored} is restored")
        exact(state, expected[restored])
        rows[f"changed at once, on {how}"] = {**row, "commits": int(restored == step)}
    return rows


def beside_steps(visit: Visit, keep: transfuse.Keep, state: State, commit_seconds: float) -> dict[str, Any]:
    """Steps that take about twice as long as a commit: alone, and with a commit in each that is not waited for."""
    work = busy(visit, min(2.0, max(0.05, 2 * commit_seconds)))
    first = 10

    def steps(commits: bool) -> None:
        for step in range(first, first + STEPS):
            work()
            with keep.mutating():
                torch._foreach_add_(list(state.values()), 1)
            if commits:
                keep.commit(step, wait=False)

    nbytes = STEPS * nbytes_of(state)
    bare = visit.measured(lambda: steps(False), 0)
    beside = visit.measured(lambda: steps(True), nbytes)
    added = (beside["seconds"] - bare["seconds"]) / STEPS
    share = added * STEPS / bare["seconds"]
    return {f"{STEPS} bare steps": bare, BESIDE: {**beside, "added to a step": added, "of a bare step": share}}


def busy(visit: Visit, seconds: float) -> Callable[[], None]:
    """Work on the current stream that takes about this time."""
    if visit.imitation:
        return lambda: visit.module.sleep(seconds)
    one, two = (torch.randn(4096, 4096, device=visit.kind, dtype=torch.bfloat16) for _ in range(2))
    out = torch.empty_like(one)

    def multiply(count: int) -> None:
        for _ in range(count):
            torch.mm(one, two, out=out)

    multiply(10)
    each = visit.measured(lambda: multiply(50), 0)["seconds"] / 50
    return lambda: multiply(max(1, round(seconds / each)))


def hub(visit: Visit) -> dict[str, Any]:
    """The Hub's copy of a state, the copy of the next step, and a download of it on loopback."""
    visit.begin()
    return served(visit, "large", visit.large(0.5)) | served(visit, "small", visit.small())


def served(visit: Visit, name: str, state: State) -> dict[str, Any]:
    nbytes, found, got = nbytes_of(state), dict[str, Any](), list[bytes]()
    with transfuse.hub(state, timeout=TIMEOUT) as hub:
        address = hub.endpoint.removeprefix("http://")
        found[f"{name}: first answer"] = visit.measured(lambda: asked(address, "HEAD"), nbytes)
        with hub.mutating():
            torch._foreach_add_(list(state.values()), 1)
        expected = in_main_memory(state)
        time.sleep(1.2)  # The first commit is free then.
        found[f"{name}: answer after a step"] = visit.measured(lambda: asked(address, "HEAD"), nbytes)
        found[f"{name}: download"] = visit.measured(lambda: got.append(asked(address, "GET")), nbytes)
    at = 8 + int.from_bytes(got[0][:8], "little")
    places = json.loads(got[0][8:at])
    for key, tensor in expected.items():
        low, high = places[key]["data_offsets"]
        assert got[0][at + low : at + high] == tensor.numpy().tobytes(), f"{key} differs"
    return found


def asked(address: str, method: str) -> bytes:
    connection = http.client.HTTPConnection(address, timeout=TIMEOUT.total_seconds())
    connection.request(method, "/live/model/resolve/main/model.safetensors")
    response = connection.getresponse()
    assert response.status == 200, response.status
    body = response.read()
    connection.close()
    return body


def transports(visit: Visit) -> dict[str, Any]:
    """Two ranks with a device each: torch's own transport and ours, over the device's backend and over main memory."""
    rank, pg = visit.join()
    device = torch.device(visit.kind, visit.module.current_device())
    host = torch.device("cpu")
    ours, theirs = transfuse.PGTransport, _pg_transport.PGTransport
    found: dict[str, Any] = {}
    for name, state in (("large", visit.large()), ("small", visit.small())):
        ways: dict[str, Callable[[Any], Any]] = {
            "torch's PGTransport": lambda give: theirs(pg, TIMEOUT, device, give),
            "transfuse": lambda give: ours(pg, TIMEOUT, device, give),
            "transfuse, verify=True": lambda give: ours(pg, TIMEOUT, device, give, verify=True),
            "transfuse over main memory": lambda give: ours(pg, TIMEOUT, host, give),
        }
        for way, make in ways.items():
            found[f"{name}: {way}"] = median([moved(visit, rank, make, state) for _ in range(RUNS + 1)][1:])
    return found


def delta(visit: Visit) -> dict[str, Any]:
    """The same with ``delta``: nothing, one tensor of a hundred, or everything has changed."""
    rank, pg = visit.join()
    device = torch.device(visit.kind, visit.module.current_device())
    found: dict[str, Any] = {}
    state = visit.state(max(16, visit.mib // 2), MIB // 2)
    for what, every in (("nothing has changed", 0), ("1 % has changed", 100), ("all has changed", 1)):
        for wire in (device, torch.device("cpu")):
            runs = []
            for _ in range(2):
                target = {name: tensor.clone() for name, tensor in state.items()}
                for number, tensor in enumerate(target.values()):
                    if every and number % every == 0:
                        tensor.add_(1)

                def make(give: Any, wire: torch.device = wire) -> Any:
                    return transfuse.PGTransport(pg, TIMEOUT, wire, give, delta=give is not None)

                runs.append(moved(visit, rank, make, state, target))
            found[f"{what}, over {'main memory' if wire.type == 'cpu' else 'the device'}"] = runs[-1]
    return found


def moved(
    visit: Visit, rank: int, make: Callable[[Any], Any], state: State, target: State | None = None
) -> dict[str, Any]:
    """One transfer from rank 0 to rank 1, in place, from a barrier until both have returned. The figures of rank 1."""
    if target is None:
        target = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
    transport = make(None if rank == 0 else lambda: target)
    together()
    call = (lambda: transport.send_checkpoint([1], state)) if rank == 0 else (lambda: transport.recv_checkpoint(0))
    row = visit.measured(call, nbytes_of(state))
    longest = torch.tensor(row["seconds"], dtype=torch.float64)
    dist.all_reduce(longest, dist.ReduceOp.MAX)
    if rank == 1:
        # Both ranks have made the same state.
        exact(target, in_main_memory(state))
    if (report := getattr(transport, "report", None)) is not None:
        row |= {"route": report.route, "moved_bytes": report.bytes}
    return {**row, "seconds": longest.item()}


def mapped(visit: Visit) -> dict[str, Any]:
    """The second rank maps the memory of the first one's device, and copies it. The route says whether it could."""
    rank, pg = visit.join()
    device = torch.device(visit.kind, visit.module.current_device())

    def make(give: Any) -> Any:
        return transfuse.PGTransport(pg, TIMEOUT, device, give, device_memory=True)

    found: dict[str, Any] = {}
    for name, state in (("large", visit.large()), ("small", visit.small())):
        row = median([moved(visit, rank, make, state) for _ in range(RUNS + 1)][1:])
        assert rank == 0 or not visit.imitation or row["route"] == "device_memory", f"the route was {row['route']}"
        found[f"{name}: mapped"] = row
    return found


def nixl(visit: Visit) -> dict[str, Any]:
    """A state in main memory, read through NIXL by the second rank."""
    if importlib.util.find_spec("nixl") is None:
        raise Skip("nixl is not installed")
    rank, pg = visit.join()
    state = in_main_memory(visit.large(0.5))

    def make(give: Any) -> Any:
        return transfuse.PGTransport(pg, TIMEOUT, torch.device("cpu"), give, nixl=True, same_host=False)

    row = median([moved(visit, rank, make, state) for _ in range(RUNS + 1)][1:])
    assert rank == 0 or row["route"] == "nixl", f"the route was {row['route']}"
    return {"main memory, through NIXL": row}


@dataclass(frozen=True)
class Part:
    run: Callable[[Visit], dict[str, Any]]
    title: str
    #: Its share of the visit's time.
    share: float
    ranks: int = 1


#: In the order of the visit. The device tests are a part, too, but a program of their own.
PARTS = {
    "machine": Part(about_machine, "machine and versions", 0.04),
    "register": Part(registration, "register host memory, then launch", 0.04),
    "transports": Part(transports, "torch's transport and ours", 0.12, ranks=2),
    "delta": Part(delta, "delta", 0.08, ranks=2),
    "mapped": Part(mapped, "device memory of another process", 0.05, ranks=2),
    "commit": Part(commit, "commit and restore", 0.14),
    "hub": Part(hub, "Hub", 0.08),
    "nixl": Part(nixl, "NIXL", 0.05, ranks=2),
}


def main() -> None:
    name, folder = sys.argv[1:]
    faulthandler.enable()
    visit = Visit(**json.loads(Path(folder, "visit.json").read_text()))
    try:
        found = PARTS[name].run(visit)
    except Skip as reason:
        found = {"skipped": str(reason)}
    # The last rank is the one that receives.
    if int(os.environ.get("RANK", 0)) == PARTS[name].ranks - 1:
        Path(folder, f"{name}.json").write_text(json.dumps(found))
    if dist.is_initialized():
        together()
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
