"""``transfuse.dropin.torch`` with silent, slow and lost peers, with tensors of groups, and in PyTorch's own test."""

from __future__ import annotations

import gc
import importlib.util
import os
import subprocess
import sys
import threading
import time
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint._pg_transport as theirs
from torch.multiprocessing.spawn import start_processes

import transfuse.dropin.torch as ours
from torch_transport import CPU, LONG, SHORT, assert_same, forged, groups, on_tape, play, together, transfer
from transfuse._errors import PeerLost, PeerTimeout, SendFailed, TargetMismatch, UnsupportedLeaf

# --------------------------------------------------------------------------------------------- peers


def test_a_silent_sender_times_out() -> None:
    first, second = groups()
    start = time.monotonic()
    with pytest.raises(PeerTimeout, match=r"rank 0 timed out: no progress for 0\.\d s while rec") as caught:
        ours.PGTransport(second, SHORT, CPU).recv_checkpoint(0)
    assert time.monotonic() - start < 5
    assert caught.value.rank == 0
    assert caught.value.torn == ()
    # Gloo has closed the connection. The next attempt says so at once.
    with pytest.raises(PeerLost, match="connection lost"):
        ours.PGTransport(second, LONG, CPU).recv_checkpoint(0)
    assert time.monotonic() - start < 5
    del first


def test_a_silent_receiver_times_out() -> None:
    first, second = groups()
    with pytest.raises(SendFailed, match="rank 1 timed out: no progress for") as caught:
        ours.PGTransport(first, SHORT, CPU).send_checkpoint([1], {"x": torch.zeros(2)})
    assert list(caught.value.causes) == [1]
    assert isinstance(caught.value.causes[1], PeerTimeout)
    assert caught.value.completed == ()
    del second


def test_a_sender_that_stops_halfway_leaves_torn_targets_named() -> None:
    first, second = groups()
    source = {"a": torch.ones(4), "b": torch.ones(4), "c": torch.ones(4)}
    target = {"a": torch.zeros(4), "b": torch.zeros(4), "c": torch.zeros(8)[::2]}
    tape = on_tape(source)

    def stop_after_a() -> None:
        for tag in (1, 2, 3):
            first.send([tape.messages[tag]], 1, tag).wait()

    _, error = together(stop_after_a, lambda: ours.PGTransport(second, SHORT, CPU, lambda: target).recv_checkpoint(0))
    assert isinstance(error, PeerTimeout)
    assert "receiving ['b']" in str(error)
    assert error.torn == ("['a']", "['b']")
    assert target["a"].tolist() == [1, 1, 1, 1]
    assert target["c"].tolist() == [0, 0, 0, 0]


def test_a_dead_peer_is_lost_at_once() -> None:
    first, second = groups()
    del first
    gc.collect()
    start = time.monotonic()
    with pytest.raises(PeerLost, match="rank 0: connection lost while receiving the metadata's length"):
        ours.PGTransport(second, LONG, CPU).recv_checkpoint(0)
    with pytest.raises(SendFailed) as caught:
        ours.PGTransport(second, LONG, CPU).send_checkpoint([0], {"x": torch.zeros(2)})
    assert isinstance(caught.value.causes[0], PeerLost)
    assert time.monotonic() - start < 5


@pytest.mark.parametrize(
    ("error", "elapsed", "kind"),
    [
        (RuntimeError("Timed out waiting 1000ms for recv operation to complete"), 1.0, PeerTimeout),
        (RuntimeError("Timed out waiting 500ms for recv operation to complete"), 0.5, PeerTimeout),
        (RuntimeError("Connection closed by peer [127.0.0.1]:1"), 0.0, PeerLost),
        (RuntimeError("Connection closed by peer [127.0.0.1]:1"), 1.0, PeerLost),
        (RuntimeError("Application timeout caused pair closure"), 0.0, PeerLost),
        (RuntimeError("Application timeout caused pair closure"), 1.0, PeerTimeout),
        (RuntimeError("something else"), 0.0, PeerLost),
        (RuntimeError("something else"), 1.0, PeerTimeout),
        (TimeoutError(), 0.3, PeerTimeout),
        (ConnectionResetError("reset"), 0.3, PeerLost),
    ],
)
def test_errors_are_told_apart_by_text_and_clock(error: Exception, elapsed: float, kind: type[Exception]) -> None:
    assert type(ours._peer_error(error, 3, "testing", elapsed, timedelta(seconds=1))) is kind


def test_an_aborted_operation_is_a_lost_peer() -> None:
    group = MagicMock()
    group.recv.return_value.wait.return_value = False
    with pytest.raises(PeerLost, match="aborted"):
        ours.PGTransport(group, LONG, CPU).recv_checkpoint(1)


def test_every_receiving_wait_gets_the_timeout() -> None:
    tape = on_tape({"x": torch.zeros(2), "y": torch.zeros(2)})
    waits: list[timedelta] = []
    tape.wait = lambda timeout: not waits.append(timeout)  # type: ignore[method-assign, func-returns-value]
    ours.PGTransport(tape.group(), timedelta(seconds=7), CPU).recv_checkpoint(0)
    assert waits == [timedelta(seconds=7)] * 4
    waits.clear()
    ours.PGTransport(tape.group(), timedelta(microseconds=1), CPU).recv_checkpoint(0)
    assert waits == [timedelta(milliseconds=1)] * 4  # fewer would be none at all
    with pytest.raises(ValueError, match="positive"):
        ours.PGTransport(tape.group(), timedelta(0), CPU)


@pytest.mark.parametrize("rank", [0, 2, -1])
def test_ranks_outside_the_group_are_refused(rank: int) -> None:
    first, second = groups()
    with pytest.raises(ValueError, match=f"rank {rank} is not another rank"):
        ours.PGTransport(first, SHORT, CPU).send_checkpoint([rank], {})
    with pytest.raises(ValueError, match=f"rank {rank} is not another rank"):
        ours.PGTransport(first, SHORT, CPU).recv_checkpoint(rank)
    del second


@pytest.mark.parametrize("pause", [0.0, 0.08], ids=["quick", "slow"])
def test_a_silent_receiver_does_not_hold_up_the_others(pause: float) -> None:
    """Neither one that never answers nor one that stops halfway, also when the others take longer than the timeout."""
    first, _silent, halfway, third = groups(4)
    state = {f"t{i}": torch.full((1000,), float(i)) for i in range(20)}
    timeout = timedelta(seconds=1)

    def take_a_little() -> None:
        halfway.recv([torch.zeros(1, dtype=torch.int64)], 0, 1).wait()

    def receive() -> tuple[list[float], float]:
        start = time.monotonic()
        length = torch.zeros(1, dtype=torch.int64)
        third.recv([length], 0, 1).wait()
        third.recv([torch.zeros(int(length), dtype=torch.uint8)], 0, 2).wait()
        got = []
        for i in range(20):
            data = torch.zeros(1000)
            third.recv([data], 0, 3 + i).wait()
            got.append(float(data[-1]))
            time.sleep(pause)
        return got, time.monotonic() - start

    start = time.monotonic()
    failed, (got, took), _ = together(
        lambda: ours.PGTransport(first, timeout, CPU).send_checkpoint([1, 2, 3], state), receive, take_a_little
    )
    assert got == list(range(20))
    assert took < 0.9 if pause == 0 else took > 1.5
    assert isinstance(failed, SendFailed)
    assert failed.completed == (3,)
    assert "sending the metadata's length" in str(failed.causes[1])
    assert "sending the metadata" in str(failed.causes[2])
    assert all(isinstance(cause, PeerTimeout) for cause in failed.causes.values())
    assert time.monotonic() - start < max(took, 1) + 0.8  # silent receivers are waited for all at once
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("sending to rank")]


def test_an_interrupted_send_lets_go(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(self: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(ours._Outbox, "drain", interrupt)
    first, second = groups()
    with pytest.raises(KeyboardInterrupt):
        ours.PGTransport(first, LONG, CPU).send_checkpoint([1], {"x": torch.zeros(2)})
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("sending to rank")]
    with pytest.raises(PeerLost):
        ours.PGTransport(second, LONG, CPU).recv_checkpoint(0)


def test_a_dead_receiver_does_not_stop_the_others() -> None:
    first, second, third = groups(3)
    del second
    gc.collect()
    state = {"a": torch.randn(5), "b": torch.randn(5)}
    failed, received = together(
        lambda: ours.PGTransport(first, LONG, CPU).send_checkpoint([1, 2], state),
        lambda: ours.PGTransport(third, LONG, CPU).recv_checkpoint(0),
    )
    assert_same(received, state)
    assert isinstance(failed, SendFailed)
    assert failed.completed == (2,)
    assert isinstance(failed.causes[1], PeerLost)
    assert failed.__cause__ is failed.causes[1]


def test_a_group_that_refuses_to_send_counts_as_lost() -> None:
    group = MagicMock()
    group.send.side_effect = RuntimeError("Pair is not connected")
    with pytest.raises(SendFailed) as caught:
        ours.PGTransport(group, LONG, CPU).send_checkpoint([1], {"x": torch.zeros(2)})
    assert isinstance(caught.value.causes[1], PeerLost)
    assert group.send.call_count == 1


def test_copies_on_the_way_out_are_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    """At most three of 40 bytes are under way, counting the one that is too much."""
    monkeypatch.setattr(ours, "DROPIN_WINDOW_BYTES", 100)
    sent = expected = 0
    under_way: list[int] = []

    def wait(timeout: timedelta) -> None:
        # A message is taken when as many are under way as may be; a moment later, in case it becomes more.
        until = time.monotonic() + 30
        while sent - len(under_way) < expected and sent < 12 and time.monotonic() < until:
            time.sleep(0.001)
        time.sleep(0.01)
        under_way.append(sent - len(under_way))

    def send(tensors: object, rank: int, tag: int) -> MagicMock:
        nonlocal sent
        sent += 1
        work = MagicMock()
        work.wait.side_effect = wait
        return work

    group = MagicMock()
    group.send.side_effect = send
    state = {f"t{i}": torch.zeros(10) for i in range(10)}
    expected = 3
    ours.PGTransport(group, LONG, torch.device("meta")).send_checkpoint([1], state)  # there, every tensor is a copy
    assert len(under_way) == 12
    assert max(under_way[3:]) == 3
    assert sent == 12

    sent, expected = 0, 12
    under_way.clear()
    ours.PGTransport(group, LONG, CPU).send_checkpoint([1], state)
    assert under_way == list(range(12, 0, -1))


def test_copies_on_the_way_in_are_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ours, "DROPIN_WINDOW_BYTES", 100)
    source = {f"t{i}": torch.randn(10) for i in range(8)}
    target = {f"t{i}": torch.zeros(20)[::2] for i in range(8)}
    transfer(source, target)
    assert_same(target, source)


# ------------------------------------------------------------------- tensors that need a default group


def distributed_cases(rank: int, rendezvous: str) -> None:
    """Run in two processes. Rank 0 sends and rank 1 receives."""
    from torch.distributed import _functional_collectives as functional
    from torch.distributed._shard.sharded_tensor import init_from_local_shards
    from torch.distributed._shard.sharded_tensor.api import ShardedTensor
    from torch.distributed._shard.sharded_tensor.shard import Shard
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Replicate
    from torch.distributed.tensor import Shard as Split

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=2, timeout=LONG)
    world = dist.distributed_c10d._get_default_group()

    def run(source: object, target: object = None, sender: Any = ours, receiver: Any = ours) -> Any:
        if rank == 0:
            return sender.PGTransport(world, LONG, CPU).send_checkpoint([1], source)
        return receiver.PGTransport(world, LONG, CPU, (lambda: target) if target else None).recv_checkpoint(0)

    def refused(source: object, target: object) -> str:
        # The sender's timeout closes the connection, so every refusal has a group of its own.
        group = dist.new_group()
        assert group is not None
        dist.barrier()
        if rank == 0:
            # Long enough for a receiver on a busy machine to begin.
            with pytest.raises(SendFailed, match="timed out"):
                ours.PGTransport(group, timedelta(seconds=3), CPU).send_checkpoint([1], source)
            return ""
        with pytest.raises(TargetMismatch) as caught:
            ours.PGTransport(group, LONG, CPU, lambda: target).recv_checkpoint(0)
        return str(caught.value)

    line = init_device_mesh("cpu", (2,))
    grid = init_device_mesh("cpu", (2, 1))
    value = torch.full((4, 3), float(rank))

    def dtensor(local: torch.Tensor, mesh: Any, *placements: Any) -> DTensor:
        return DTensor.from_local(local.clone(), mesh, placements, run_check=False)

    # DTensor, new: the sender's part with the sender's spec, in all directions.
    source = dtensor(value, line, Split(0))
    for sender, receiver in ((ours, theirs), (theirs, ours), (ours, ours)):
        received = run({"d": source}, sender=sender, receiver=receiver)
        if rank == 1:
            assert isinstance(received["d"], DTensor)
            assert received["d"].placements == (Split(0),)
            assert received["d"].shape == (8, 3)
            assert not received["d"]._local_tensor.any()

    # DTensor, in place: the receiver's own, where both hold the same part of the whole.
    for mesh, placements in ((line, (Replicate(),)), (grid, (Replicate(), Split(0)))):
        parameter: Any = torch.nn.Parameter(dtensor(value, mesh, *placements))
        received = run({"d": dtensor(value, mesh, *placements)}, {"d": parameter})
        if rank == 1:
            assert received["d"] is parameter
            assert parameter.requires_grad
            assert parameter._spec.mesh is mesh
            assert not parameter._local_tensor.any()

    # DTensor, in place: another part, although of one shape.
    target = dtensor(value, line, Split(0))
    for other, text in (
        (dtensor(value, line, Split(0)), "['d']: shard: expected ['1 of 2'], got ['0 of 2']"),
        (dtensor(value, line, Split(1)), "['d']: global shape: expected (8, 3), got (4, 6)"),
        (dtensor(value, line, Replicate()), "['d']: placements: expected (Shard(dim=0),), got (Replicate(),)"),
        (dtensor(value[:2], line, Split(0)), "['d']: shape: expected (4, 3), got (2, 3)"),
        (value, "['d']: expected a DTensor, got a tensor"),
    ):
        message = refused({"d": other}, {"d": target})
        if rank == 1:
            assert text in message, message
            assert torch.equal(target._local_tensor, value)

    def sharded(places: list[int], group: Any, size: int, fill: float) -> ShardedTensor:
        shards = [
            Shard.from_tensor_and_offsets(torch.full((2, 3), fill + place), [place, 0], dist.get_rank())
            for place in places
        ]
        return init_from_local_shards(shards, size, 3, process_group=group)

    # ShardedTensor, new.
    split = sharded([2 * rank], world, 4, 1.0)
    for sender, receiver in ((ours, theirs), (theirs, ours), (ours, ours)):
        received = run({"s": split}, sender=sender, receiver=receiver)
        if rank == 1:
            (shard,) = received["s"].local_shards()
            assert shard.metadata.shard_offsets == [0, 0]
            assert shard.metadata.placement.rank() == 1
            assert torch.equal(shard.tensor, torch.full((2, 3), 1.0))

    # ShardedTensor, in place: shards find their places whatever their order.
    alone = [dist.new_group([0]), dist.new_group([1])][rank]
    whole = sharded([0, 2] if rank == 0 else [2, 0], alone, 4, 10.0 if rank == 0 else 50.0)
    memory = [shard.tensor.data_ptr() for shard in whole.local_shards()]
    received = run({"s": whole}, {"s": whole})
    if rank == 1:
        assert received["s"] is whole
        assert [shard.tensor.data_ptr() for shard in whole.local_shards()] == memory
        for shard in whole.local_shards():
            assert torch.equal(shard.tensor, torch.full((2, 3), 10.0 + shard.metadata.shard_offsets[0]))

    message = refused({"s": split}, {"s": split})
    if rank == 1:
        assert "['s']: local shards (offsets, sizes): expected [((2, 0), (2, 3))], got [((0, 0), (2, 3))]" in message
        assert torch.equal(split.local_shards()[0].tensor, torch.full((2, 3), 3.0))

    # A collective that may still be running is waited for.
    summed = functional.all_reduce(torch.full((3,), rank + 1.0), "sum", world)
    assert isinstance(summed, functional.AsyncCollectiveTensor)
    into = functional.all_reduce(torch.zeros(3), "sum", world)
    received = run({"a": summed}, {"a": into})
    if rank == 1:
        assert received["a"] is into
        assert into.tolist() == [3, 3, 3]

    dist.barrier()
    dist.destroy_process_group()


def test_dtensors_sharded_tensors_and_unfinished_collectives(tmp_path: Path) -> None:
    arguments = (str(tmp_path / "rendezvous"),)
    start_processes(distributed_cases, arguments, nprocs=2, start_method="forkserver")  # type: ignore[no-untyped-call]


def test_a_sharded_tensor_needs_a_default_group() -> None:
    with pytest.raises(UnsupportedLeaf, match="default process group"):
        play(forged({"x": 0}, ours._ShardedTensorMeta([], [], None)))  # type: ignore[arg-type]


# ------------------------------------------------------------------------------ PyTorch's published test


@pytest.mark.timeout(600)
def test_published_test_file(tmp_path: Path) -> None:
    """PyTorch's test/distributed/checkpoint/test_pg_transport.py, with its import pointed here."""
    where = os.environ.get("TRANSFUSE_TORCH_TEST_FILE")
    if not where:
        pytest.skip("TRANSFUSE_TORCH_TEST_FILE does not name a copy of PyTorch's test_pg_transport.py")
    if not importlib.util.find_spec("expecttest"):
        pytest.skip("PyTorch's test helpers need the package expecttest")
    text = Path(where).read_text().replace("torch.distributed.checkpoint._pg_transport", ours.__name__)
    assert f"from {ours.__name__} import" in text
    # The helper's name was misspelt in older releases.
    helpers = Path(torch.__file__).parent / "testing/_internal/common_distributed.py"
    if "class MultiProcContinousTest" not in helpers.read_text():
        text = text.replace("MultiProcContinousTest", "MultiProcContinuousTest")
    (tmp_path / "test_published.py").write_text(text)
    source = Path(ours.__file__).parents[2]
    paths = [str(source), *filter(None, [os.environ.get("PYTHONPATH")])]
    result = subprocess.run(
        [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "-p",
            "no:cacheprovider",
            "--rootdir",
            str(tmp_path),
            "test_published.py",
        ],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )
    assert result.returncode == 0, result.stdout + result.stderr
