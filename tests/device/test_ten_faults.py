"""Ten faults that version 0.5.0 had on accelerators, and on groups like theirs. Each test fails there."""

from __future__ import annotations

import time
from datetime import timedelta
from functools import partial
from types import ModuleType
from typing import Any, cast

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

import transfuse
from device.group import DeviceRanks, backend_of
from device.in_processes import move_in_a_fork, move_in_main_memory, move_without_the_device
from device.simple_moves import MIB, at_once, bits, causes_of, receive, send, state, zeros
from transfuse.testing.ranks import Fleet, Ranks

pytestmark = [pytest.mark.usefixtures("device"), pytest.mark.timeout(90)]

LONG = 10.0
#: When a test that hangs is ended.
DEADLINE = 25.0


# ------------------------------------------------------------------------------- 1: several sources, several receivers


def shard_of(whole: torch.Tensor, ranks: list[int], rank: int) -> DTensor:
    """A rank's rows of a tensor, on its device."""
    mesh = DeviceMesh("phantom", torch.tensor(ranks), _init_backend=False, _rank=rank)
    mine = whole.tensor_split(len(ranks))[ranks.index(rank)].to("phantom")
    return DTensor.from_local(mine, mesh, [Shard(0)], run_check=False, shape=whole.shape, stride=whole.stride())


@pytest.mark.parametrize("waits", ["stream", "host"])
@pytest.mark.parametrize("cpu", [True, False])
def test_two_sources_reshard_to_three_receivers(cpu: bool, waits: Any) -> None:
    whole = torch.arange(600_000.0).view(600, 1000)
    sources, receivers = [0, 1], [2, 3, 4]

    def work(rank: int, pg: Any) -> Any:
        if rank in sources:
            return send(pg, receivers, {"w": shard_of(whole, sources, rank)}, LONG)
        target = {"w": shard_of(torch.zeros_like(whole), receivers, rank)}
        return receive(pg, sources, LONG, target)["w"].to_local().cpu()

    with DeviceRanks(5, cpu=cpu, waits=waits) as ranks:
        parts = ranks.run(work, deadline=DEADLINE)[2:]
        assert torch.equal(torch.cat(parts), whole)
        assert not any(backend_of(pg).process_would_end for pg in ranks.pgs)


# ------------------------------------------------------------------------------------------ 2: one receiver of three


@pytest.mark.parametrize("fault", ["absent", "frozen"])
def test_a_lost_receiver_does_not_take_the_others_down(fault: str) -> None:
    def work(rank: int, pg: Any) -> Any:
        tensors = state()
        if rank == 0:
            return send(pg, [1, 2, 3], tensors, 1.5)
        if rank == 3 and fault == "absent":
            return None
        if rank == 3:
            backend_of(pg).freeze()
        return bits(receive(pg, 0, 1.5))

    with DeviceRanks(4) as ranks:
        sent, one, two, lost = ranks.outcomes(work, deadline=DEADLINE)
        assert isinstance(sent.error, transfuse.SendFailed)
        assert set(sent.error.causes) == {3}
        assert one.get() == two.get() == bits(state("cpu"))
        assert fault == "absent" or lost.error is not None


# --------------------------------------------------------------------------------------------------------- 3: digests


@pytest.mark.usefixtures("small_parcels")
@pytest.mark.parametrize("in_place", [True, False])
def test_digests_of_tensors_on_a_device(in_place: bool) -> None:
    def work(rank: int, pg: Any) -> None:
        expected = bits(state("cpu"))
        for _ in range(3):
            if rank == 0:
                send(pg, 1, state(), LONG, verify=True)
            else:
                give = partial(zeros, state("cpu")) if in_place else None
                transport = transfuse.PGTransport(pg, timedelta(seconds=LONG), "phantom:1", give, verify=True)
                assert bits(transport.recv_checkpoint(0)) == expected
                assert transport.report is not None
                assert transport.report.verified
                assert transport.report.repaired == 0

    with DeviceRanks(2) as ranks:
        ranks.run(work, deadline=DEADLINE)


class Copies:
    """Something whose bytes in main memory are a copy that nothing else refers to."""

    def __init__(self, data: torch.Tensor) -> None:
        self._data = data

    def cpu(self) -> torch.Tensor:
        return self._data.clone()


def test_digests_of_a_copy_that_is_freed_at_once() -> None:
    """A large block is unmapped when it is freed."""
    # Imported here: version 0.5.0 has it elsewhere, in transfuse.digest.
    from transfuse._memory.digest import digest_of, wide_digest_of

    data = torch.arange(32 * MIB, dtype=torch.uint8)
    assert digest_of(cast(Any, Copies(data))) == digest_of(data)
    assert wide_digest_of(cast(Any, Copies(data))) == wide_digest_of(data)


# --------------------------------------------------------------------------------------------------- 4: both directions


class Untagged:
    """A group in main memory that matches messages by their order alone."""

    def __init__(self, pg: Any) -> None:
        self._pg = pg

    def name(self) -> str:
        return "untagged"

    def rank(self) -> int:
        return int(self._pg.rank())

    def size(self) -> int:
        return int(self._pg.size())

    def send(self, tensors: list[torch.Tensor], rank: int, tag: int) -> Any:
        return self._pg.send(tensors, rank, 0)

    def recv(self, tensors: list[torch.Tensor], rank: int, tag: int) -> Any:
        return self._pg.recv(tensors, rank, 0)


@pytest.mark.parametrize("second", ["send", "recv"])
@pytest.mark.parametrize("first", ["send", "recv"])
@pytest.mark.parametrize("where", ["cpu", "phantom"])
def test_both_directions_at_once(where: str, first: str, second: str) -> None:
    """``first`` and ``second``: what rank 0 and rank 1 call first."""

    def work(rank: int, pg: Any) -> dict[str, bytes]:
        group = pg if where == "phantom" else Untagged(pg)
        tensors = state(where, seed=rank + 1.0)
        wire = None if where == "phantom" else where
        jobs = {
            "send": lambda: send(group, 1 - rank, tensors, LONG, wire, same_host=False),
            "recv": lambda: receive(group, 1 - rank, LONG, None, wire, same_host=False),
        }
        begin = first if rank == 0 else second
        order = sorted(jobs, key=lambda name: name != begin)
        ended = at_once(rank if where == "phantom" else None, *(jobs[name] for name in order), pause=0.2)
        return bits(ended[order.index("recv")])

    kind: Any = Ranks(2) if where == "cpu" else DeviceRanks(2, cpu=False)
    with kind as ranks:
        ended = ranks.run(work, deadline=DEADLINE)
        assert ended == [bits(state("cpu", seed=2.0)), bits(state("cpu", seed=1.0))]


# -------------------------------------------------------------------------------------------------------- 5: timeouts


@pytest.mark.parametrize("who", ["source", "receiver"])
@pytest.mark.parametrize("cpu", [True, False])
@pytest.mark.parametrize(("eager", "waits"), [(False, "nccl"), (True, "stream")])
def test_a_peer_that_never_comes_is_given_up_in_time(eager: bool, waits: Any, cpu: bool, who: str) -> None:
    """Without a communicator the posting itself would block; with one, and such waits, the stream would."""

    def work(rank: int, pg: Any) -> Any:
        if rank == 1:
            return None
        return send(pg, 1, state(), 1.0) if who == "receiver" else receive(pg, 1, 1.0)

    with DeviceRanks(2, cpu=cpu, eager=eager, waits=waits, init_timeout=15.0) as ranks:
        end = ranks.outcomes(work, deadline=DEADLINE)[0]
        assert isinstance(causes_of(end.error)[1], transfuse.PeerTimeout)
        assert end.seconds < 3.0
        assert not backend_of(ranks.pgs[0]).process_would_end


@pytest.mark.parametrize("who", ["source", "receiver"])
@pytest.mark.parametrize("cpu", [True, False])
def test_a_peer_that_freezes_is_given_up_in_time_although_waits_block_only_streams(cpu: bool, who: str) -> None:
    def work(rank: int, pg: Any) -> Any:
        frozen = 0 if who == "source" else 1
        send(pg, 1, {"w": torch.ones(5)}, LONG) if rank == 0 else receive(pg, 0, LONG)
        if rank == frozen:
            backend_of(pg).freeze()
        return send(pg, 1, state(), 1.0) if rank == 0 else receive(pg, 0, 1.0)

    with DeviceRanks(2, cpu=cpu, waits="stream") as ranks:
        for rank, end in enumerate(ranks.outcomes(work, deadline=DEADLINE)):
            assert 1 - rank in causes_of(end.error)
            assert end.seconds < 6.0
            assert not backend_of(ranks.pgs[rank]).process_would_end


@pytest.mark.parametrize("waits", ["host", "nccl"])
def test_a_busy_stream_does_not_make_a_healthy_peer_late(waits: Any, device: ModuleType) -> None:
    """The receiver's first operation is older than the timeout before it ends, but nothing took that long."""

    def work(rank: int, pg: Any) -> Any:
        if rank == 1:
            return bits(receive(pg, 0, 2.0))
        tensors = state()
        time.sleep(1.0)
        device.sleep(1.5)
        return send(pg, 1, tensors, 2.0)

    with DeviceRanks(2, waits=waits, eager=True) as ranks:
        assert ranks.run(work, deadline=DEADLINE)[1] == bits(state("cpu"))
        assert not any(backend_of(pg).process_would_end for pg in ranks.pgs)


class TimingOut(Untagged):
    """A group whose receives run out of time as NCCL's do: the time counts from an earlier moment."""

    def recv(self, tensors: list[torch.Tensor], rank: int, tag: int) -> Any:
        return self

    def wait(self, timeout: timedelta) -> None:
        raise RuntimeError("Watchdog caught collective operation timeout: it ran for 9 ms before timing out.")


def test_a_backend_that_says_timing_out_has_timed_out() -> None:
    def work(rank: int, pg: Any) -> Any:
        return receive(TimingOut(pg), 1, LONG, device="cpu") if rank == 0 else None

    with Ranks(2) as ranks:
        end = ranks.outcomes(work, deadline=DEADLINE)[0]
    assert isinstance(end.error, transfuse.PeerTimeout)


# -------------------------------------------------------------------------------------------- 6: delta on a side stream


@pytest.mark.usefixtures("small_parcels")
def test_delta_compares_what_the_callers_stream_will_have_written(device: ModuleType) -> None:
    count = 20  # Enough that several threads hash them.

    def work(rank: int, pg: Any) -> Any:
        tensors = state(count=count)
        # The first transfer of a process takes longer.
        send(pg, 1, tensors, LONG, "cpu") if rank == 0 else receive(pg, 0, LONG, tensors, "cpu", delta=True)
        torch.accelerator.synchronize()
        if rank == 0:
            return send(pg, 1, tensors, LONG, "cpu")
        with torch.Stream(device="phantom"):
            # Until this ends, the targets hold what the source sends.
            for number in range(count):
                device.slow_fill_(tensors[f"w{number}"], 0.0, 0.04)
            receive(pg, 0, LONG, tensors, "cpu", delta=True)
            return bits(tensors)

    with DeviceRanks(2) as ranks:
        assert ranks.run(work, deadline=DEADLINE)[1] == bits(state("cpu", count=count))


# ---------------------------------------------------------------------------------------- 7: a device without an index


@pytest.mark.usefixtures("small_parcels")
@pytest.mark.parametrize("in_place", [True, False])
def test_a_device_without_an_index_is_the_current_one(in_place: bool, device: ModuleType) -> None:
    tensors: dict[int, dict[str, torch.Tensor]] = {}

    def prepare(rank: int, pg: Any) -> None:
        tensors[rank] = {"w": torch.full((4 * MIB,), float(rank), device="phantom")}

    def work(rank: int, pg: Any) -> Any:
        assert torch.accelerator.current_device_index() == rank
        if rank == 1:
            return send(pg, 2, tensors[1], LONG, "phantom")
        return receive(pg, 1, LONG, tensors[2] if in_place else None, "phantom")["w"] if rank == 2 else None

    with DeviceRanks(3) as ranks:
        ranks.run(prepare, deadline=DEADLINE)
        device.reset_counters()
        found = ranks.run(work, deadline=DEADLINE)[2]
        counted = device.counters()
    assert found.device == torch.device("phantom:2")
    assert torch.equal(found.cpu(), torch.ones(4 * MIB))
    # There are 64 parcels, and each of them would be copied. Only the samples that find mutations are.
    assert counted["kernels"] <= 8
    assert counted["async_copies"] <= 4
    assert counted["bytes_to_host"] + counted["bytes_to_device"] < 1000


# ------------------------------------------------------------------------------------------- 8: main memory alone


def in_process(function: Any, *args: Any, n: int = 1, group: bool = False) -> list[Any]:
    """Run a function in fresh processes."""
    with Fleet(n, group=group) as fleet:
        fleet.start(function, *args)
        return [end.get() for end in fleet.outcomes(DEADLINE)]


def test_main_memory_alone_does_not_initialise_the_accelerator() -> None:
    assert in_process(move_in_main_memory) == [(True, False)]


@pytest.mark.parametrize("used", [False, True])
def test_main_memory_alone_moves_in_a_forked_child(used: bool) -> None:
    """``used``: the parent has used the accelerator, so any use of it raises in the child. If not, it works there."""
    assert in_process(move_in_a_fork, used) == [0]


# -------------------------------------------------------------------------------------------- 9: messages to oneself


@pytest.mark.usefixtures("small_parcels")
def test_a_rank_that_sends_to_itself_keeps_the_order_of_streams(device: ModuleType) -> None:
    def work(rank: int, pg: Any) -> list[Any]:
        tensors, target = state(), zeros(state("cpu"))
        torch.accelerator.synchronize()
        calls: list[int] = []

        def show(progress: dict[int, transfuse.Progress]) -> None:
            # The source's stream falls behind the receiver's.
            calls.append(1)
            if len(calls) < 10:
                device.sleep(0.05)

        def source() -> None:
            with torch.Stream(device="phantom"):
                device.slow_fill_(tensors["w0"], 7.0, 0.2)
                send(pg, 0, tensors, LONG, progress=show, max_bytes_per_second=12.0 * MIB)
                tensors["w1"].fill_(0.0)

        def receiver() -> dict[str, bytes]:
            with torch.Stream(device="phantom"):
                return bits(receive(pg, 0, LONG, target))

        return at_once(rank, source, receiver)

    expected = state("cpu")
    expected["w0"].fill_(7.0)
    with DeviceRanks(1) as ranks:
        assert ranks.run(work, deadline=DEADLINE)[0][1] == bits(expected)


# ------------------------------------------------------------------------------------- 10: backends that do not match


def test_a_receiver_without_the_sources_device_gets_main_memory_and_a_warning() -> None:
    devices, exact, said = in_process(move_without_the_device, n=2, group=True)[1]
    assert devices == {"cpu"}
    assert exact
    assert "fresh ones arrive in main memory" in said


@pytest.mark.parametrize(
    ("cpu", "where", "names"),
    [(False, "cpu", "phantom: pccl"), (None, "phantom", "gloo")],
)
def test_a_device_that_the_group_cannot_send_from_is_refused_at_once(cpu: bool | None, where: str, names: str) -> None:
    kind: Any = Ranks(1) if cpu is None else DeviceRanks(1, cpu=cpu)
    with kind as ranks, pytest.raises(ValueError, match=names):
        transfuse.PGTransport(ranks.pgs[0], timedelta(seconds=LONG), where)
