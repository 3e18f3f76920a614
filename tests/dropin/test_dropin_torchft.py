"""``transfuse.dropin.torchft`` on torchft's own groups, under its own Manager, and in its own published tests."""

from __future__ import annotations

import gc
import importlib.util
import inspect
import os
import pathlib
import re
import subprocess
import sys
import textwrap
import threading
import types
import unittest
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined]
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

import transfuse
from transfuse.testing.exact import assert_exact
from transfuse.testing.ranks import FOREGROUND, Fleet, announce

# What torchft and what it imports warn about is none of ours.
pytestmark = pytest.mark.filterwarnings("ignore")

ROOT = pathlib.Path(__file__).parents[2]
CPU = torch.device("cpu")
TIMEOUT = timedelta(seconds=20)
SHORT = timedelta(seconds=0.3)
KINDS = ("ProcessGroupGloo", "ProcessGroupBabyGloo")
#: With a child process for each rank that imports torch. tests/wire/test_groups.py moves states over these every time.
IN_CHILD = pytest.param(KINDS[1], marks=pytest.mark.soak)
#: How long these may take to start on a busy machine.
START = timedelta(seconds=80)


@pytest.fixture(autouse=True)
def loopback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    monkeypatch.setenv("RUST_LOG", "error")
    pytest.importorskip("torchft", reason="torchft is not installed")


def dropin() -> Any:
    """The module; imported late, because without torchft it cannot be."""
    from transfuse.dropin import torchft

    return torchft


def state() -> dict[str, Any]:
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(300, 200, generator=generator)
    return {
        "user": {
            "default": {
                "weight": weight,
                "tied": weight,
                "view": torch.randn(40, 30, generator=generator).t()[1::2],
                "half": torch.randn(7, generator=generator).to(torch.bfloat16),
                "parameter": torch.nn.Parameter(torch.randn(5, generator=generator)),
                "name": "adam",
            }
        },
        "torchft": {"step": 3, "batches_committed": 6},
    }


def blank() -> dict[str, Any]:
    """What a replica that starts again holds of it."""
    weight = torch.zeros(300, 200)
    mine = {
        "weight": weight,
        "tied": weight,
        "view": torch.zeros(40, 30).t()[1::2],
        "half": torch.zeros(7, dtype=torch.bfloat16),
        "parameter": torch.nn.Parameter(torch.zeros(5)),
        "name": "",
    }
    return {"user": {"default": mine}, "torchft": {"step": 0, "batches_committed": 0}}


def together(*calls: Callable[[], Any]) -> list[Any]:
    """The results of calls made at the same time, with errors in their places."""

    def one(call: Callable[[], Any]) -> Any:
        try:
            return call()
        except Exception as error:
            return error

    with ThreadPoolExecutor(len(calls)) as pool:
        return list(pool.map(one, calls))


class Replicas:
    """torchft's groups for some ranks of this process, which can be configured for one quorum after the other."""

    def __init__(self, kind: str, size: int) -> None:
        import torchft.process_group

        self._store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
        self._quorum = 0
        self.groups = [getattr(torchft.process_group, kind)(timeout=START) for _ in range(size)]

    def configure(self, ranks: Sequence[int]) -> None:
        self._quorum += 1
        address = f"localhost:{self._store.port}/quorum{self._quorum}"

        def one(group: Any, rank: int) -> Callable[[], None]:
            return lambda: group.configure(address, f"replica{rank}", rank, len(ranks))

        configured = together(*(one(group, rank) for group, rank in zip(self.groups, ranks, strict=True)))
        assert configured == [None] * len(ranks)


@contextmanager
def replicas(kind: str = KINDS[0], size: int = 2) -> Iterator[Replicas]:
    made = Replicas(kind, size)
    try:
        made.configure(range(size))
        yield made
    finally:
        for group in made.groups:
            group.shutdown()


def transports(some: Replicas, **options: Any) -> list[Any]:
    return [dropin().PGTransport(group, TIMEOUT, CPU, **options) for group in some.groups]


# ------------------------------------------------------------------------------------------------------ the interface


def test_it_is_torchfts_class_with_torchfts_calls() -> None:
    from torchft.checkpointing.pg_transport import PGTransport as Theirs
    from torchft.checkpointing.transport import CheckpointTransport

    ours = dropin().PGTransport
    assert issubclass(ours, CheckpointTransport)
    assert not ours.__abstractmethods__
    assert ours[dict].__origin__ is ours
    for name in ("__init__", "metadata", "send_checkpoint", "disallow_checkpoint", "recv_checkpoint", "shutdown"):
        theirs = list(inspect.signature(getattr(Theirs, name)).parameters)
        assert list(inspect.signature(getattr(ours, name)).parameters)[: len(theirs)] == theirs


def test_options_that_do_not_go_together_are_told_at_once() -> None:
    from torchft.process_group import ProcessGroupGloo

    with pytest.raises(ValueError, match="needs state_dict="):
        dropin().PGTransport(ProcessGroupGloo(), TIMEOUT, CPU, map_path={"a": "b"})


def test_without_torchft_the_error_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    dropin()
    monkeypatch.delitem(sys.modules, "transfuse.dropin.torchft")
    monkeypatch.setitem(sys.modules, "torchft.checkpointing.transport", None)
    with pytest.raises(ImportError, match=r"pip install 'transfuse\[torchft\]'"):
        importlib.import_module("transfuse.dropin.torchft")


# ------------------------------------------------------------------------------------------------------- healing


@pytest.mark.parametrize("in_place", [False, True], ids=["fresh", "in place"])
@pytest.mark.parametrize("kind", [KINDS[0], IN_CHILD])
@pytest.mark.usefixtures("either_route")
def test_all_that_are_behind_heal_then_one_then_nobody_sends(kind: str, in_place: bool) -> None:
    """The scenario that torchft tests its transports with, on a state that is harder to carry."""
    sent = state()
    with replicas(kind, 3) as some:
        mine = [blank() for _ in range(3)]
        made = [
            dropin().PGTransport(group, TIMEOUT, "cpu", (lambda own=own: own) if in_place else None)
            for group, own in zip(some.groups, mine, strict=True)
        ]
        metadata = made[0].metadata()
        assert isinstance(metadata, str)

        def send(step: int, behind: list[int]) -> None:
            made[0].send_checkpoint(dst_ranks=behind, step=step, state_dict=sent, timeout=TIMEOUT)

        def receive(step: int, rank: int) -> Any:
            return made[rank].recv_checkpoint(src_rank=0, metadata=metadata, step=step, timeout=TIMEOUT)

        for step, behind in ((1, [1, 2]), (2, [2])):
            outcome, *arrived = together(
                partial(send, step, behind),
                *(partial(receive, step, rank) for rank in behind),
            )
            assert outcome is None
            for rank, tree in zip(behind, arrived, strict=True):
                assert_exact(sent, tree, in_place=in_place)
                if in_place:
                    assert tree["user"]["default"]["weight"] is mine[rank]["user"]["default"]["weight"]
            for transport in made:
                transport.disallow_checkpoint()

        with pytest.raises(transfuse.PeerTimeout, match="rank 0 timed out"):
            made[2].recv_checkpoint(src_rank=0, metadata=metadata, step=3, timeout=timedelta(milliseconds=10))
        # Whatever is left of the group then, a send ends too: here nobody receives.
        with pytest.raises(transfuse.SendFailed, match=r"(?i)time(d )?out"):
            made[2].send_checkpoint(dst_ranks=[0], step=4, state_dict=sent, timeout=timedelta(seconds=1))
        for transport in made:
            transport.shutdown()


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=[pytest.mark.soak] if "Baby" in kind else []) for kind in KINDS]
)
def test_a_new_quorum_is_a_new_group(kind: str) -> None:
    """Also after a timeout, which is the end of a gloo group; and with the ranks the other way round."""
    sent = state()
    with replicas(kind) as some:
        one, other = transports(some)
        (error,) = together(lambda: one.recv_checkpoint(1, other.metadata(), 1, SHORT))
        assert isinstance(error, transfuse.PeerTimeout)
        some.configure([1, 0])
        # Somebody may keep the error, with all that its traceback refers to, until now.
        del error
        gc.collect()
        outcome, arrived = together(
            lambda: other.send_checkpoint([1], 1, sent, TIMEOUT),
            lambda: one.recv_checkpoint(0, other.metadata(), 1, TIMEOUT),
        )
        assert outcome is None
        assert_exact(sent, arrived)


def test_a_fresh_shard_keeps_the_mesh_that_replicas_have_in_common() -> None:
    mesh = DeviceMesh("cpu", torch.arange(2), mesh_dim_names=("shard",), _init_backend=False, _rank=0)
    local = torch.arange(12.0).reshape(4, 3)
    shard = DTensor.from_local(local, mesh, [Shard(0)], run_check=False, shape=torch.Size([7, 3]), stride=(3, 1))
    with replicas() as some:
        one, other = transports(some)
        outcome, arrived = together(
            lambda: one.send_checkpoint([1], 1, {"w": shard}, TIMEOUT),
            lambda: other.recv_checkpoint(0, one.metadata(), 1, TIMEOUT),
        )
    assert outcome is None
    assert arrived["w"]._spec == shard._spec
    assert torch.equal(arrived["w"].to_local(), local)


# -------------------------------------------------------------------------------------------------------- errors


def test_the_timeout_of_the_call_counts() -> None:
    with replicas() as some:
        patient, other = transports(some)
        error = together(lambda: patient.recv_checkpoint(1, other.metadata(), 1, SHORT))[0]
        assert isinstance(error, transfuse.PeerTimeout)
        assert error.seconds < TIMEOUT.total_seconds() / 2
    with replicas() as some:
        hasty, other = (dropin().PGTransport(group, SHORT, CPU) for group in some.groups)
        late = threading.Event()
        threading.Timer(4 * SHORT.total_seconds(), late.set).start()
        outcome, arrived = together(
            lambda: late.wait() and hasty.send_checkpoint([1], 1, state(), TIMEOUT),
            lambda: other.recv_checkpoint(0, hasty.metadata(), 1, TIMEOUT),
        )
        assert outcome is None
        assert_exact(state(), arrived)
        with pytest.raises(transfuse.PeerTimeout):
            other.recv_checkpoint(0, hasty.metadata(), 2)  # Nothing said: the constructor's.


def test_another_step_is_an_error_at_both_ends() -> None:
    with replicas() as some:
        one, other = transports(some)
        sent, received = together(
            lambda: one.send_checkpoint([1], 4, state(), TIMEOUT),
            lambda: other.recv_checkpoint(0, one.metadata(), 5, TIMEOUT),
        )
    assert isinstance(received, transfuse.StepMismatch)
    assert isinstance(sent, transfuse.SendFailed)
    assert isinstance(sent.causes[1], transfuse.StepMismatch)


def test_what_does_not_fit_is_told_to_both_ends_and_the_group_goes_on() -> None:
    own = blank()
    own["user"]["default"]["weight"] = own["user"]["default"]["tied"] = torch.zeros(300, 201)
    with replicas() as some:
        one, other = transports(some, state_dict=lambda: own)
        sent, received = together(
            lambda: one.send_checkpoint([1], 1, state(), TIMEOUT),
            lambda: other.recv_checkpoint(0, one.metadata(), 1, TIMEOUT),
        )
        assert isinstance(received, transfuse.TargetMismatch)
        assert "['user']['default']['weight']" in str(received)
        assert not own["user"]["default"]["view"].any()
        assert isinstance(sent, transfuse.SendFailed)
        assert isinstance(sent.causes[1], transfuse.PeerRefused)
        own.update(blank())
        sent, received = together(
            lambda: one.send_checkpoint([1], 2, state(), TIMEOUT),
            lambda: other.recv_checkpoint(0, one.metadata(), 2, TIMEOUT),
        )
        assert sent is None
        assert_exact(state(), received, in_place=True)


def test_a_source_with_torchfts_own_transport_is_named_at_once() -> None:
    from torchft.checkpointing.pg_transport import PGTransport as Theirs

    with replicas() as some:
        one, _ = transports(some)
        theirs = Theirs(some.groups[1], TIMEOUT, CPU)
        with pytest.raises(transfuse.ProtocolError, match=r"all replicas need transfuse\.dropin\.torchft"):
            one.recv_checkpoint(1, theirs.metadata(), 1, TIMEOUT)


def test_a_group_that_is_not_configured() -> None:
    from torchft.process_group import ErrorSwallowingProcessGroupWrapper, ProcessGroupGloo

    group = ErrorSwallowingProcessGroupWrapper(ProcessGroupGloo())
    with pytest.raises(transfuse.TransfuseError, match="not configured"):
        dropin().PGTransport(group, TIMEOUT, CPU).send_checkpoint([1], 1, state(), TIMEOUT)


def test_after_shutdown_nothing_begins_and_what_was_under_way_has_ended() -> None:
    with replicas() as some:
        one, _ = transports(some)
        begun = threading.Event()

        def target() -> Any:
            begun.set()
            return blank()

        watched = dropin().PGTransport(some.groups[1], TIMEOUT, CPU, target)
        receiving = threading.Thread(target=lambda: watched.recv_checkpoint(0, one.metadata(), 1, TIMEOUT))
        receiving.start()
        begun.wait()
        watched.shutdown(wait=False)
        with pytest.raises(transfuse.TransfuseError, match="shut down"):
            watched.recv_checkpoint(0, one.metadata(), 2, TIMEOUT)
        one.send_checkpoint([1], 1, state(), TIMEOUT)
        watched.shutdown(wait=True)
        assert watched.report is not None
        assert watched.report.bytes > 0
        receiving.join()


PIECES = 40


def heal_slowly(rank: int, port: int) -> Any:
    """Rank 0 sends at a rate at which it can be killed meanwhile. Rank 1 then is offered as a source itself."""
    from torchft.process_group import ProcessGroupGloo

    os.environ["TRANSFUSE_SAME_HOST"] = "0"
    group = ProcessGroupGloo(timeout=TIMEOUT)
    group.configure(f"localhost:{port}/quorum1", f"replica{rank}", rank, 3)
    tensors = {f"t{i}": torch.full((100_000,), float(i + 1) * (rank == 0)) for i in range(PIECES)}
    if rank == 0:
        source = dropin().PGTransport(group, TIMEOUT, CPU, max_bytes_per_second=4e6)
        return source.send_checkpoint([1], 1, tensors, TIMEOUT)
    if rank == 2:
        with pytest.raises(transfuse.PeerRefused) as refused:
            dropin().PGTransport(group, TIMEOUT, CPU).recv_checkpoint(1, dropin().METADATA, 2, TIMEOUT)
        return refused.value.kind

    def show(progress: dict[int, transfuse.Progress]) -> None:
        if tensors["t0"].any():
            announce("moving")

    taker = dropin().PGTransport(group, TIMEOUT, CPU, lambda: tensors, progress=show)
    with pytest.raises(transfuse.PeerError) as lost:
        taker.recv_checkpoint(0, taker.metadata(), 1, TIMEOUT)
    with pytest.raises(transfuse.TornState) as torn:
        taker.send_checkpoint([2], 2, tensors, TIMEOUT)
    return lost.value.rank, len(lost.value.torn), torn.value.leaves == lost.value.torn


def test_a_source_that_is_killed_while_it_heals_and_what_it_tore_is_not_sent_on() -> None:
    store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    with Fleet(3) as fleet:
        fleet.start(heal_slowly, store.port)
        fleet.wait_for(1, "moving")
        fleet.kill(0)
        died, healed, third = fleet.outcomes(deadline=60)
    assert died.error is not None
    rank, torn, same = healed.get()
    assert rank == 0
    assert 0 < torn < PIECES
    assert same
    assert third.get() == "TornState"


# --------------------------------------------------------------------------------------------------- the Manager


class Trainee:
    """A replica under a Manager, in a thread of this process. Steps are taken by hand, with every weight plus one."""

    def __init__(self, number: int, lighthouse: str, *, in_place: bool, managed: bool = False) -> None:
        from torchft import Manager, ProcessGroupGloo
        from torchft.process_group import ManagedProcessGroup

        self.weight = torch.full((1000,), float(number + 1))
        self.flaw: Exception | None = None
        self._store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
        self.pg = ProcessGroupGloo(timeout=TIMEOUT)
        self.transport = dropin().PGTransport(self.pg, TIMEOUT, CPU, self._target if in_place else None)
        self.manager = Manager(
            pg=self.pg,
            load_state_dict=lambda tree: self.weight.copy_(tree["weight"]),
            state_dict=lambda: {"weight": self.weight},
            min_replica_size=1,
            use_async_quorum=False,
            checkpoint_transport=self.transport,
            timeout=TIMEOUT,
            quorum_timeout=TIMEOUT,
            replica_id=f"replica{number}",
            lighthouse_addr=lighthouse,
            rank=0,
            world_size=1,
            store_addr="localhost",
            store_port=self._store.port,
            hostname="localhost",
        )
        if managed:
            self.transport = dropin().PGTransport(ManagedProcessGroup(self.manager), TIMEOUT, CPU)
            self.manager._checkpoint_transport = self.transport

    def _target(self) -> Any:
        if self.flaw is not None:
            raise self.flaw
        return {"user": {"default": {"weight": self.weight}}}

    def step(self) -> tuple[bool, Exception | None]:
        """Whether it was committed, and what went wrong."""
        self.manager.start_quorum()
        wrong = self.manager.errored()
        committed = self.manager.should_commit()
        if committed:
            self.weight += 1
        return committed, None if wrong is None else wrong.original_exception

    def end(self) -> None:
        self.manager.shutdown()
        self.pg.shutdown()


@contextmanager
def trainees(**options: Any) -> Iterator[list[Trainee]]:
    from torchft.coordination import LighthouseServer

    # Both are in every quorum: neither goes ahead while the other is late on a busy machine.
    lighthouse = LighthouseServer(bind="[::]:0", min_replicas=2, join_timeout_ms=1000, heartbeat_timeout_ms=5000)
    made: list[Trainee] = []
    try:
        made += [Trainee(number, lighthouse.address(), **options) for number in range(2)]
        yield made
    finally:
        for trainee in made:
            trainee.end()
        lighthouse.shutdown()


@pytest.mark.parametrize("options", [{"in_place": True}, {"in_place": False}, {"in_place": False, "managed": True}])
def test_the_manager_heals_through_it(options: dict[str, bool]) -> None:
    with trainees(**options) as both:
        assert together(*(trainee.step for trainee in both)) == [(True, None)] * 2
        # In step 0 one of the two is the source for the other, so that both begin alike.
        assert torch.equal(both[0].weight, both[1].weight)
        assert {trainee.transport.report.direction for trainee in both} == {"send", "receive"}
        own = both[1].weight
        # Behind by some steps, as one that has started again.
        both[1].manager._step = 0
        own.zero_()
        assert together(*(trainee.step for trainee in both)) == [(True, None)] * 2
        assert torch.equal(both[0].weight, own)
        assert own is both[1].weight
        assert [trainee.manager.current_step() for trainee in both] == [2, 2]


def test_the_manager_gets_the_error_discards_the_step_and_heals_in_the_next() -> None:
    with trainees(in_place=True) as both:
        both[0].manager._step = 7
        both[1].flaw = RuntimeError("no weights today")
        (ahead, sent), (behind, received) = together(*(trainee.step for trainee in both))
        assert (ahead, behind) == (False, False)
        assert received is both[1].flaw
        assert isinstance(sent, transfuse.SendFailed)
        assert "no weights today" in str(sent)
        assert both[1].manager.current_step() == 0
        both[1].flaw = None
        assert together(*(trainee.step for trainee in both)) == [(True, None)] * 2
        assert torch.equal(both[0].weight, both[1].weight)
        assert [trainee.manager.current_step() for trainee in both] == [8, 8]


# --------------------------------------------------------------------------------------- torchft's published tests


@pytest.fixture
def world() -> Iterator[None]:
    """torchft's scenario makes a default group for its DTensors, and leaves it if it fails."""
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


@pytest.mark.usefixtures("world")
def test_torchfts_own_module_with_only_the_import_changed() -> None:
    found = importlib.util.find_spec("torchft.checkpointing.pg_transport_test")
    if found is None or found.origin is None:
        pytest.skip("this torchft comes without its tests")
    theirs = "from torchft.checkpointing.pg_transport import PGTransport\n"
    text = pathlib.Path(found.origin).read_text()
    assert text.count(theirs) == 1
    module = types.ModuleType("pg_transport_test")
    changed = text.replace(theirs, "from transfuse.dropin.torchft import PGTransport\n")
    exec(compile(changed, found.origin, "exec"), module.__dict__)
    result = unittest.TestResult()
    unittest.defaultTestLoader.loadTestsFromModule(module).run(result)
    assert not result.errors + result.failures, "\n".join(text for _, text in result.errors + result.failures)
    assert result.testsRun - len(result.skipped) >= 1
    assert all("CUDA" in reason for _, reason in result.skipped)


@pytest.mark.parametrize("in_place", [False, True], ids=["fresh", "in place"])
@pytest.mark.parametrize("kind", [KINDS[0], IN_CHILD])
@pytest.mark.usefixtures("world")
def test_torchfts_own_scenario(kind: str, in_place: bool) -> None:
    """What its module does with three GPUs, on the CPU."""
    published = pytest.importorskip("torchft.checkpointing.transport_test", reason="this torchft has no tests")
    target = (lambda: published.make_state_dict(CPU)) if in_place else None
    # The groups beforehand: the scenario gives all that it does ten seconds.
    with replicas(kind, 3) as some:
        made = transports(some, state_dict=target)
        published.run_multi_recovery_test(unittest.TestCase(), lambda rank, size: made[rank], device=CPU)


# ------------------------------------------------------------------------------------------ the example, the guide


@pytest.mark.soak  # A Manager of this process heals in the ordinary tests.
@pytest.mark.timeout(200)
def test_the_example() -> None:
    command = [*FOREGROUND, sys.executable, str(ROOT / "examples" / "torchft_heal.py")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            out, err = process.communicate(timeout=180)
        except subprocess.TimeoutExpired:
            process.send_signal(2)  # It ends its replicas then.
            out, err = process.communicate()
    assert process.returncode == 0, out + err
    *lines, last = out.splitlines()
    assert re.fullmatch(r"both at step \d+, weights and moments equal bit for bit", last)
    killed = lines.index("replica 1 killed, and started again")
    assert lines[killed - 1].startswith("replica 1 is in the middle of step")
    # Weights, two moments, and a counter of steps for each of four tensors.
    count = 4 * (3 * (16 * 256 + 256 + 256 + 1) + 4)
    pattern = rf"replica 1 received step \d+: {count:,} bytes, memory route"
    assert any(re.fullmatch(pattern, line) for line in lines[killed:]), out


def guides_code() -> list[str]:
    return re.findall(r"```python\n(.*?)\n```", (ROOT / "docs" / "torchft.md").read_text(), re.S)


def test_without_a_manager_the_guides_lines_bring_all_to_the_newest_step() -> None:
    """Three ranks of which one has nothing; then one is lost, and another has to catch up."""
    import torchft.process_group

    (code,) = (block for block in guides_code() if "transfuse.heal(" in block)
    host = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)

    def work(rank: int) -> list[Any]:
        weights: dict[str, Any] = {"w": torch.full((300,), float(rank)), "lr": 0.1}
        loaded: list[Any] = []
        pg = torchft.process_group.ProcessGroupGloo(timeout=START)
        names: dict[str, Any] = {"pg": pg, "rank": rank, "state": lambda: weights}
        names |= {
            "store": f"localhost:{host.port}",
            "load": loaded.append,
            "timedelta": timedelta,
            "transfuse": transfuse,
        }
        found = []
        for generation, ranks, step in ((0, 3, None if rank == 1 else 5), (1, 2, 6 if rank == 1 else 5)):
            if rank < ranks:
                if rank == 1:
                    weights["w"] += 10 * generation
                names |= {"generation": generation, "ranks": ranks, "step": step}
                exec(code, names)
                found.append((names["step"], weights["w"].unique().tolist(), len(loaded)))
        pg.shutdown()
        return found

    first, second, third = together(*(partial(work, rank) for rank in range(3)))
    (step, (value,), loads), *after = second
    assert (step, loads) == (5, 1)
    assert value in (0.0, 2.0)
    assert after == [(6, [value + 10], 1)]
    assert first == [(5, [0.0], 0), (6, [value + 10], 1)]
    assert third == [(5, [2.0], 0)]


def test_the_guides_code_is_the_examples() -> None:
    example = (ROOT / "examples" / "torchft_heal.py").read_text().splitlines()
    blocks = [block for block in guides_code() if "transfuse.heal(" not in block]
    assert len(blocks) >= 2
    for block in blocks:
        length = block.count("\n") + 1
        excerpts = ("\n".join(example[at : at + length]) for at in range(len(example)))
        assert any(textwrap.dedent(excerpt) == block for excerpt in excerpts), block
