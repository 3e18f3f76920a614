"""The make-believe NCCL behaves as the real one does where programs go wrong."""

from __future__ import annotations

import os
import pathlib
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.distributed as dist

from device.group import DeviceRanks, backend_of
from device.processes import fork

pytestmark = pytest.mark.usefixtures("device")

_TESTS = pathlib.Path(__file__).parents[1]
SHORT = timedelta(seconds=0.3)
LONG = timedelta(seconds=20)


def filled(value: float, size: int = 1000) -> torch.Tensor:
    return torch.full((size,), value, device="phantom")


def would_end(pg: dist.ProcessGroup) -> bool:
    return bool(backend_of(pg).process_would_end)


def swap(rank: int, pg: dist.ProcessGroup, mine: torch.Tensor, theirs: torch.Tensor) -> list[Any]:
    """Post a send and a receive in the order that both ranks agree on."""
    sends, receives = lambda: pg.send([mine], 1 - rank, 0), lambda: pg.recv([theirs], 1 - rank, 0)
    order: list[Callable[[], Any]] = [sends, receives] if rank == 0 else [receives, sends]
    return [post() for post in order]


def meet(rank: int, pg: dist.ProcessGroup) -> None:
    """Make the communicator of both ranks."""
    for work in swap(rank, pg, filled(0.0, 1), filled(0.0, 1)):
        work.wait(LONG)


@pytest.mark.parametrize("eager", [False, True])
@pytest.mark.parametrize("cpu", [False, True])
class TestMoves:
    def test_it_moves_what_the_stream_has_written_by_then(self, cpu: bool, eager: bool, device: ModuleType) -> None:
        def run(rank: int, pg: dist.ProcessGroup) -> list[float]:
            mine, theirs = device.slow_fill_(filled(0.0), rank + 5.0, 0.1), filled(0.0)
            for work in swap(rank, pg, mine, theirs):
                assert work.wait()
            mine.fill_(0.0)
            return [theirs.min().item(), theirs.max().item()]

        with DeviceRanks(2, cpu=cpu, eager=eager) as ranks:
            assert ranks.run(run) == [[6.0, 6.0], [5.0, 5.0]]

    def test_the_cpu_has_gloo_or_nothing(self, cpu: bool, eager: bool) -> None:
        def run(rank: int, pg: dist.ProcessGroup) -> list[float]:
            value = torch.full((3,), float(rank))
            (pg.send([value], 0, 7) if rank else pg.recv([value], 1, 7)).wait(LONG)
            return value.tolist()

        with DeviceRanks(2, cpu=cpu, eager=eager) as ranks:
            assert [backend_of(pg).name() for pg in ranks.pgs] == ["pccl", "pccl"]
            if cpu:
                assert ranks.run(run)[0] == [1.0] * 3
            else:
                with pytest.raises(RuntimeError, match="No backend type associated with device type cpu"):
                    ranks.run(run)

    def test_nothing_is_a_message_too(self, cpu: bool, eager: bool) -> None:
        def run(rank: int, pg: dist.ProcessGroup) -> None:
            for work in swap(rank, pg, torch.empty(0, device="phantom"), torch.empty(0, device="phantom")):
                work.wait(LONG)
                assert work.is_completed()

        with DeviceRanks(2, cpu=cpu, eager=eager) as ranks:
            ranks.run(run)


class TestOrder:
    @pytest.mark.parametrize("first", ["send", "recv"])
    def test_two_that_begin_alike_block_for_ever(self, first: str) -> None:
        def run(rank: int, pg: dist.ProcessGroup) -> None:
            works = [getattr(pg, first)([filled(1.0)], 1 - rank, 0)]
            works.append((pg.recv if first == "send" else pg.send)([filled(1.0)], 1 - rank, 0))
            time.sleep(0.3)
            assert not any(work.is_completed() for work in works)

        with DeviceRanks(2) as ranks:
            ranks.run(run)

    def test_tags_are_ignored(self) -> None:
        def run(rank: int, pg: dist.ProcessGroup) -> list[float]:
            first, second = filled(1.0), filled(2.0)
            post = pg.send if rank == 0 else pg.recv
            works = [post([one], 1 - rank, tag) for one, tag in ((first, 5 + rank), (second, 6 - rank))]
            for work in works:
                work.wait()
            return [first[0].item(), second[0].item()]

        with DeviceRanks(2) as ranks:
            assert ranks.run(run)[1] == [1.0, 2.0]

    def test_the_first_operation_of_a_pair_waits_for_the_peers_first(self) -> None:
        def run(rank: int, pg: dist.ProcessGroup) -> float:
            time.sleep(0.3 * rank)
            started = time.monotonic()
            (pg.recv if rank else pg.send)([filled(1.0)], 1 - rank, 0)
            return time.monotonic() - started

        with DeviceRanks(2) as ranks:
            assert ranks.run(run)[0] >= 0.2

    def test_a_peer_that_never_comes_is_given_up_by_the_posting_itself(self) -> None:
        with DeviceRanks(2, init_timeout=0.2) as ranks:
            ends = ranks.outcomes(lambda rank, pg: rank or pg.send([filled(1.0)], 1, 0))
        assert isinstance(ends[0].error, dist.DistBackendError)

    def test_an_eager_group_runs_all_peers_in_one_order(self) -> None:
        def run(rank: int, pg: dist.ProcessGroup) -> list[bool]:
            if rank == 0:
                works = [pg.recv([filled(0.0)], 1, 0), pg.recv([filled(0.0)], 2, 0)]
                time.sleep(0.3)
            else:
                works = [pg.send([filled(1.0)], 0, 0)] if rank == 2 else []
            return [work.is_completed() for work in works]

        with DeviceRanks(3, eager=True) as ranks:
            assert ranks.run(run)[0] == [False, False]


class TestWaits:
    def test_a_wait_without_timeout_blocks_only_the_stream(self, device: ModuleType) -> None:
        def run(rank: int, pg: dist.ProcessGroup) -> None:
            meet(rank, pg)
            if rank == 1:
                time.sleep(0.3)
            tensor = filled(1.0)
            started = time.monotonic()
            work = (pg.recv if rank == 0 else pg.send)([tensor], 1 - rank, 0)
            work.wait()
            if rank == 0:
                assert time.monotonic() - started < 0.2
                assert not torch.accelerator.current_stream().query()
            torch.accelerator.current_stream().synchronize()
            assert work.is_completed()

        with DeviceRanks(2) as ranks:
            ranks.run(run)

    def test_a_receive_is_poison_until_the_bytes_come(self) -> None:
        def run(rank: int, pg: dist.ProcessGroup) -> None:
            meet(rank, pg)
            if rank == 0:
                target = torch.zeros(8, dtype=torch.uint8, device="phantom")
                pg.recv([target], 1, 0)
                time.sleep(0.2)
                assert target.tolist() == [0xAB] * 8

        with DeviceRanks(2) as ranks:
            ranks.run(run)

    @pytest.mark.parametrize("waits", ["nccl", "host"])
    def test_the_timeout_counts_from_posting_and_ends_the_communicator(self, waits: Any) -> None:
        def run(rank: int, pg: dist.ProcessGroup) -> bool:
            meet(rank, pg)
            if rank == 1:
                return would_end(pg)
            first, second = (pg.send([filled(1.0)], 1, 0) for _ in range(2))
            time.sleep(0.4)
            assert not would_end(pg)
            started = time.monotonic()
            with pytest.raises(dist.DistBackendError, match="before timing out"):
                first.wait(SHORT)
            assert time.monotonic() - started < 0.2
            with pytest.raises(dist.DistBackendError, match="aborted"):
                second.wait(LONG)
            assert second.is_completed()
            with pytest.raises(dist.DistBackendError, match="aborted"):
                pg.send([filled(1.0)], 1, 0)
            return would_end(pg)

        with DeviceRanks(2, waits=waits) as ranks:
            assert ranks.run(run) == [True, False]

    def test_streams_only(self) -> None:
        def run(rank: int, pg: dist.ProcessGroup) -> None:
            meet(rank, pg)
            if rank == 0:
                work = pg.send([filled(1.0)], 1, 0)
                assert work.wait(SHORT)
                assert not work.is_completed()

        with DeviceRanks(2, waits="stream") as ranks:
            ranks.run(run)

    def test_the_watchdog_ends_the_process_without_any_wait(self) -> None:
        def run(rank: int, pg: dist.ProcessGroup) -> bool:
            work = (pg.recv if rank == 0 else pg.send)([filled(1.0)], 1 - rank, 0)
            work.wait()
            if rank == 0:
                pg.send([filled(1.0)], 1, 0)
                time.sleep(0.6)
            return would_end(pg)

        with DeviceRanks(2, timeout=0.4, cpu=False) as ranks:
            assert ranks.run(run) == [True, False]

    def test_a_frozen_rank_posts_but_does_nothing(self) -> None:
        looked = threading.Barrier(2)

        def run(rank: int, pg: dist.ProcessGroup) -> None:
            meet(rank, pg)
            if rank == 1:
                backend_of(pg).freeze()
            works = swap(rank, pg, filled(1.0), filled(0.0))
            time.sleep(0.2)
            assert not any(work.is_completed() for work in works)
            looked.wait(30)
            backend_of(pg).thaw()
            for work in works:
                work.wait(LONG)

        with DeviceRanks(2) as ranks:
            ranks.run(run)


class TestLimits:
    def test_an_abort_may_block(self) -> None:
        def run(rank: int, pg: dist.ProcessGroup) -> None:
            meet(rank, pg)
            if rank == 1:
                return
            backend = backend_of(pg)
            work = pg.send([filled(1.0)], 1, 0)
            backend.set_abort_seconds(60)
            aborts = threading.Thread(target=backend.abort)
            aborts.start()
            aborts.join(0.2)
            assert aborts.is_alive()
            assert not work.is_completed()
            backend.set_abort_seconds(0)
            aborts.join()
            with pytest.raises(dist.DistBackendError, match="aborted"):
                work.wait(LONG)

        with DeviceRanks(2) as ranks:
            ranks.run(run)

    @pytest.mark.parametrize("beside", [True, False])
    def test_what_is_posted_beside_the_first_of_a_pair_is_a_race(self, beside: bool, device: ModuleType) -> None:
        """Ranks 0 and 1 know each other; rank 2 comes late to its first operation with rank 0."""
        posted = threading.Event()

        def run(rank: int, pg: dist.ProcessGroup) -> None:
            if rank < 2:
                meet(rank, pg)
            if rank == 2:
                posted.wait(30)
                pg.recv([filled(0.0)], 0, 0).wait(LONG)
            elif rank == 1:
                pg.recv([filled(0.0)], 0, 0).wait(LONG)
            else:
                first = threading.Thread(target=lambda: pg.send([filled(1.0)], 2, 0))
                if beside:
                    first.start()
                    time.sleep(0.1)
                pg.send([filled(1.0)], 1, 0).wait(LONG)
                posted.set()
                if not beside:
                    first.start()
                first.join()

        with DeviceRanks(3) as ranks:
            ranks.run(run)
            assert device.counters()["racing_posts"] == int(beside)

    @pytest.mark.parametrize("eager", [False, True])
    def test_communicators_take_memory(self, eager: bool, device: ModuleType) -> None:
        def run(rank: int, pg: dist.ProcessGroup) -> tuple[int, int]:
            for peer in {0: (1, 2), 1: (0,), 2: (0,)}[rank]:
                (pg.recv if rank else pg.send)([filled(1.0)], peer, 0).wait(LONG)
            return backend_of(pg).communicators, device.memory_allocated(rank) >> 20

        device.set_communicator_bytes(32 << 20)
        with DeviceRanks(3, eager=eager) as ranks:
            made = ranks.run(run)
        assert [count for count, _ in made] == ([1, 1, 1] if eager else [2, 1, 1])
        assert all(count * 32 <= taken < (count + 1) * 32 for count, taken in made)

    def test_a_communicator_needs_room(self, device: ModuleType) -> None:
        def run(rank: int, pg: dist.ProcessGroup) -> None:
            tensor = filled(1.0)
            device.set_most_bytes(rank, device.memory_allocated(rank) + (1 << 20))
            with pytest.raises(dist.DistBackendError, match="out of memory"):
                pg.send([tensor], 1 - rank, 0)

        device.set_communicator_bytes(2 << 20)
        with DeviceRanks(2) as ranks:
            ranks.run(run)

    def test_asking_is_a_query_and_forbidden_during_a_capture(self, device: ModuleType) -> None:
        met = threading.Barrier(2)

        def run(rank: int, pg: dist.ProcessGroup) -> None:
            meet(rank, pg)
            met.wait(30)
            if rank == 1:
                return
            work = pg.send([filled(1.0)], 1, 0)
            device.reset_counters()
            assert not work.is_completed()
            assert device.counters()["queries"] == 1
            device.capturing(True)
            with pytest.raises(RuntimeError, match="capturing: a query"):
                work.is_completed()
            with pytest.raises(RuntimeError, match="capturing: a wait"):
                work.wait(SHORT)
            device.capturing(False)

        with DeviceRanks(2) as ranks:
            ranks.run(run)


_PROGRAM = """
import os, sys, time
from datetime import timedelta
import torch, torch.distributed as dist
from device import group
rank, store, eager = int(sys.argv[1]), sys.argv[2], sys.argv[3] == "eager"
group.register()
dist.init_process_group("cpu:gloo,phantom:pccl", init_method="file://" + store, rank=rank, world_size=2,
                        timeout=timedelta(seconds=30), device_id=torch.device("phantom:0") if eager else None)
mine, theirs = torch.full((300000,), float(rank), device="phantom"), torch.empty(300000, device="phantom")
for sends in (True, False) if rank == 0 else (False, True):
    (dist.send if sends else dist.recv)(mine if sends else theirs, 1 - rank)
assert theirs.tolist() == [1.0 - rank] * 300000
ones = torch.ones(1)
dist.all_reduce(ones)
assert ones.item() == 2
print("done", flush=True)
"""


class TestProcesses:
    def start(self, store: pathlib.Path, program: str, eager: bool) -> list[subprocess.Popen[str]]:
        environ = {**os.environ, "PYTHONPATH": os.pathsep.join([str(_TESTS), *sys.path])}
        command = [sys.executable, "-W", "ignore", "-c", program]
        mode = "eager" if eager else "lazy"
        return [
            subprocess.Popen([*command, str(rank), str(store), mode], env=environ, stdout=subprocess.PIPE, text=True)
            for rank in range(2)
        ]

    @pytest.mark.parametrize("eager", [False, True])
    def test_ranks_may_be_processes(self, eager: bool, tmp_path: pathlib.Path) -> None:
        program = _PROGRAM.replace("int(sys.argv[1])", 'int(os.environ["RANK"])')
        ended = fork(program, 2, ["", str(tmp_path / "store"), "eager" if eager else "lazy"])
        assert [(one.code, one.out) for one in ended] == [(0, "done\n")] * 2, ended

    def test_a_peer_that_dies_is_not_noticed(self, tmp_path: pathlib.Path) -> None:
        program = _PROGRAM + (
            "if rank == 1: time.sleep(60)\n"
            "work = dist.isend(mine, 1)\n"
            "time.sleep(1)\n"
            "print(work.is_completed(), work.exception(), flush=True)\n"
            "os._exit(0)\n"
        )
        survivor, victim = self.start(tmp_path / "store", program, eager=True)
        assert victim.stdout is not None
        assert victim.stdout.readline() == "done\n"
        victim.send_signal(signal.SIGKILL)
        victim.communicate()
        assert survivor.communicate(timeout=60)[0] == "done\nFalse None\n"
