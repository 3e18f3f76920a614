"""Watch transfers: a progress bar or your own display, the report, the log, and a profiler's trace.

torchrun --nproc-per-node 2 examples/observe.py
"""

import json
import logging
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.run import main as torchrun

import transfuse
from transfuse import PGTransport

TIMEOUT = timedelta(seconds=60)
CPU = torch.device("cpu")
MIB = 1 << 20


def make_state(seed: int) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(seed)
    return {"weights": [torch.randn(MIB // 4, generator=generator) for _ in range(16)], "step": 10}


def move(transport: PGTransport, state: dict[str, Any]) -> None:
    """From rank 0 to rank 1."""
    if dist.get_rank() == 0:
        transport.send_checkpoint([1], state, step=10)
    else:
        transport.recv_checkpoint(0)


# ------------------------------------------------------------------------------------------------------- progress


def show_a_bar(group: dist.ProcessGroup) -> None:
    state, target = make_state(0), make_state(1)
    transport = PGTransport(group, TIMEOUT, CPU, lambda: target, progress=True)
    move(transport, state)


class Dashboard:
    """Keeps a line for each peer, and lets a user stop the transfer."""

    def __init__(self) -> None:
        self.lines: dict[int, str] = {}
        self.stop = False

    def __call__(self, progress: dict[int, transfuse.Progress]) -> None:
        if self.stop:
            raise InterruptedError("this node is wanted for something else")
        for rank, one in progress.items():
            done = "" if one.fraction is None else f", {one.fraction:.0%} of {one.total_bytes} bytes"
            left = "" if one.seconds_left is None else f", {one.seconds_left:.0f} s left"
            self.lines[rank] = one.phase + done + left


def show_numbers(group: dist.ProcessGroup) -> None:
    dashboard = Dashboard()
    transport = PGTransport(group, TIMEOUT, CPU, progress=dashboard)
    move(transport, make_state(0))
    assert list(dashboard.lines.values()) == [f"done, 100% of {16 * MIB} bytes, 0 s left"]


def stop(group: dist.ProcessGroup) -> str:
    dashboard = Dashboard()
    dashboard.stop = dist.get_rank() == 0
    transport = PGTransport(group, TIMEOUT, CPU, progress=dashboard)
    try:
        move(transport, make_state(0))
    except InterruptedError:
        return "rank 0 has stopped"
    except transfuse.PeerRefused as error:
        return f"rank 1 was told why: {error}"
    raise AssertionError("it was not stopped")


# --------------------------------------------------------------------------------------------------------- report


def print_the_report(group: dist.ProcessGroup) -> None:
    state, target = make_state(0), make_state(1)
    target["weights"][3:] = [tensor.clone() for tensor in state["weights"][3:]]
    transport = PGTransport(group, TIMEOUT, CPU, lambda: target, delta=True)
    move(transport, state)
    report = transport.report
    assert report is not None
    if dist.get_rank() == 1:
        print(report)
        assert json.loads(json.dumps(report.to_dict()))["kept_bytes"] == report.kept_bytes == 13 * MIB


# ------------------------------------------------------------------------------------------------------------ log


class Metrics(logging.Handler):
    """Takes the report of every transfer from its line in the log."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.reports: list[transfuse.Report] = []

    def emit(self, record: logging.LogRecord) -> None:
        if hasattr(record, "transfuse_report"):
            self.reports.append(record.transfuse_report)


@contextmanager
def listening(handler: logging.Handler) -> Iterator[None]:
    logger = logging.getLogger("transfuse")
    logger.setLevel(logging.INFO)
    logger.addHandler(handler)
    yield
    logger.removeHandler(handler)


def read_the_log(group: dist.ProcessGroup) -> None:
    metrics = Metrics()
    with listening(metrics):
        move(PGTransport(group, TIMEOUT, CPU), make_state(0))
    (report,) = metrics.reports
    if dist.get_rank() == 1:
        print(report.line())


# ---------------------------------------------------------------------------------------------------------- trace


def trace(group: dist.ProcessGroup, path: Path) -> str:
    transport = PGTransport(group, TIMEOUT, CPU)
    with torch.profiler.profile() as profiler:
        move(transport, make_state(0))
    profiler.export_chrome_trace(str(path))
    events = json.loads(path.read_text())["traceEvents"]
    ours = [event for event in events if event["name"].startswith("transfuse::")]
    return ", ".join(dict.fromkeys(event["name"] for event in sorted(ours, key=lambda event: event["ts"])))


def main() -> None:
    dist.init_process_group("gloo")
    group, rank = dist.group.WORLD, dist.get_rank()
    assert group is not None
    show_a_bar(group)
    show_numbers(group)
    told = stop(group)
    print_the_report(group)
    read_the_log(group)
    with tempfile.TemporaryDirectory() as directory:
        names = trace(group, Path(directory) / "trace.json")
    both: list[Any] = [None, None]
    dist.all_gather_object(both, (told, names))
    if rank == 1:
        print("\n".join(line for lines in zip(*both, strict=True) for line in lines))
    dist.destroy_process_group()


if __name__ == "__main__":
    if "RANK" in os.environ:
        main()
    else:
        torchrun(["--standalone", "--nproc-per-node=2", __file__])
