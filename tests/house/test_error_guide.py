"""docs/guides/errors.md: each error is provoked here, and its message is the one that the guide quotes."""

from __future__ import annotations

import pathlib
import re
import warnings
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import numpy as np
import pytest
import torch
from torch.distributed.checkpoint._pg_transport import PGTransport as TorchPGTransport
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

import certificates
import transfuse
from descriptor_limits import leaving
from tampering import Tampering
from transfuse import PGTransport, TransfuseError, _errors
from transfuse._wire import messages
from transfuse.testing.ranks import Fleet, Outcome, Ranks

GUIDE = pathlib.Path(__file__).parents[2] / "docs" / "guides" / "errors.md"

CPU, TIMEOUT = torch.device("cpu"), timedelta(seconds=20)
MIB = 1 << 20


def section(name: str) -> str:
    found = re.search(rf"^### `?{name}`?\n(.*?)(?=^##|\Z)", GUIDE.read_text(), re.M | re.S)
    assert found, f"no section {name}"
    return found[1]


def told(error: BaseException | None, name: str) -> None:
    """The error is of this class, and its section quotes what it says. Numbers that vary are … in the guide."""
    assert type(error) is getattr(transfuse, name), repr(error)
    quotes = [quote.strip() for quote in re.findall(r"```text\n(.*?)```", section(name), re.S)]
    assert quotes, f"{name}: no message in the guide"
    patterns = [re.escape(quote).replace("…", ".*") for quote in quotes]
    assert any(re.fullmatch(pattern, str(error), re.S) for pattern in patterns), str(error)


def meet(
    send: Callable[[Any], object] | None, receive: Callable[[Any], object], other: Callable[[Any], object] | None = None
) -> list[Outcome[Any]]:
    """Ranks 0 (and 1) send, the last receives; what became of each."""
    ends = [send, receive] if other is None else [send, other, receive]

    def work(rank: int, pg: Any) -> object:
        end = ends[rank]
        return None if end is None else end(pg)

    with Ranks(len(ends)) as ranks:
        return ranks.outcomes(work)


def sends(state: object, to: int = 1, **options: Any) -> Callable[[Any], object]:
    step = options.pop("step", None)
    return lambda pg: PGTransport(pg, TIMEOUT, CPU, **options).send_checkpoint([to], state, step=step)


def receives(target: object = None, sources: Any = 0, **options: Any) -> Callable[[Any], object]:
    step = options.pop("step", None)
    callback = None if target is None else lambda: target
    return lambda pg: PGTransport(pg, TIMEOUT, CPU, callback, **options).recv_checkpoint(sources, step=step)


def rows(rank: int) -> DTensor:
    """Rank's half of a matrix on a mesh of two."""
    mesh = DeviceMesh("cpu", torch.arange(2), _init_backend=False, _rank=rank)
    whole = torch.arange(40.0).reshape(8, 5)
    local = whole[4 * rank : 4 * rank + 4]
    return DTensor.from_local(local, mesh, [Shard(0)], run_check=False, shape=whole.shape, stride=whole.stride())


@pytest.fixture
def small_bursts(monkeypatch: pytest.MonkeyPatch, group_route: None) -> None:
    """Over the group, with a record after every MiB: so a transfer has a middle."""
    monkeypatch.setenv("TRANSFUSE_PARCEL_BYTES", str(MIB // 4))
    monkeypatch.setenv("TRANSFUSE_BURST_BYTES", str(MIB))


# ------------------------------------------------------------------------------------------ the state itself


def heals(*states: Callable[[], object]) -> list[Outcome[Any]]:
    """Rank 0 has step 7, and rank 1 comes back."""
    with Ranks(2) as ranks:
        return ranks.outcomes(
            lambda rank, pg: transfuse.heal(states[rank], step=7 if rank == 0 else None, group=pg, timeout=20)
        )


def test_a_state_dict_that_returns_copies() -> None:
    model = torch.ones(2)
    for outcome in heals(lambda: {"w": model}, lambda: {"w": model.clone()}):
        told(outcome.error, "StateError")


def test_a_module_in_a_state() -> None:
    sent, received = meet(sends({"model": torch.nn.Linear(2, 2)}), receives())
    told(sent.error, "UnsupportedLeaf")
    assert isinstance(received.error, transfuse.PeerRefused)


def test_a_grown_and_a_shrunk_target() -> None:
    sent, received = meet(sends({"w": torch.ones(2)}), receives({"w": torch.zeros(2), "head": torch.zeros(2)}))
    told(received.error, "TargetMismatch")
    assert isinstance(sent.error, transfuse.SendFailed)
    before = {"model": {"0.weight": torch.ones(2), "1.weight": torch.ones(2)}}
    now = {"model": {"0.weight": torch.zeros(2)}}
    for outcome in heals(lambda: before, lambda: now):
        told(outcome.error, "TargetMismatch")


def test_unsupported_leaf() -> None:
    sent, received = meet(sends({"model": torch.ones(3), "head": torch.empty(3, device="meta")}), receives())
    told(sent.error, "UnsupportedLeaf")
    assert isinstance(received.error, transfuse.PeerRefused)
    sent, received = meet(sends({"hook": print}), receives())
    told(received.error, "UnsupportedLeaf")
    assert isinstance(sent.error, transfuse.SendFailed)


def test_target_mismatch() -> None:
    target = {"weight": torch.zeros(4, 3), "bias": torch.zeros(3)}
    state = {"weight": torch.ones(4, 5), "bias": torch.ones(3, dtype=torch.bfloat16)}
    sent, received = meet(sends(state), receives(target))
    told(received.error, "TargetMismatch")
    assert not any(tensor.any() for tensor in target.values())
    told(sent.error, "SendFailed")


def test_a_read_only_target(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "weights.bin"
    path.write_bytes(bytes(12))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # NumPy's arrays know that they are read-only, and torch warns of it.
        target = {"w": torch.from_numpy(np.memmap(path, dtype=np.float32, mode="r"))}
    sent, received = meet(sends({"w": torch.ones(3)}), receives(target))
    told(received.error, "TargetMismatch")
    assert isinstance(sent.error, transfuse.SendFailed)
    assert path.read_bytes() == bytes(12)


def test_step_mismatch() -> None:
    sent, received = meet(sends({"w": torch.ones(3)}, step=7), receives(step=8))
    told(received.error, "StepMismatch")
    assert isinstance(sent.error, transfuse.SendFailed)
    sent, received = meet(sends({"w": torch.ones(3)}), receives(step=8))
    told(received.error, "StepMismatch")
    assert isinstance(sent.error, transfuse.SendFailed)


def test_sources_differ() -> None:
    state = {"w": torch.ones(3)}
    received = meet(sends(state, 2, step=7), receives({"w": torch.zeros(3)}, [0, 1]), sends(state, 2, step=8))[2]
    told(received.error, "SourcesDiffer")


def test_not_covered() -> None:
    received = meet(sends({"w": rows(0)}), receives({"w": torch.zeros(8, 5)}))[1]
    told(received.error, "NotCovered")


def test_torn_state(small_bursts: None) -> None:
    state, target = {"w": torch.ones(4 * MIB)}, {"w": torch.zeros(4 * MIB)}

    def stop(progress: dict[int, transfuse.Progress]) -> None:
        if progress[0].bytes > MIB:
            raise KeyError("a callback of yours")

    def receive_and_send_on(pg: Any) -> None:
        transport = PGTransport(pg, TIMEOUT, CPU, lambda: target, progress=stop)
        with pytest.raises(KeyError):
            transport.recv_checkpoint(0)
        transport.send_checkpoint([0], target)

    def send_and_receive(pg: Any) -> None:
        with pytest.raises(transfuse.SendFailed):
            sends(state, max_bytes_per_second=16 * MIB)(pg)
        with pytest.raises(transfuse.PeerRefused, match="TornState"):
            receives(sources=1)(pg)

    source, torn = meet(send_and_receive, receive_and_send_on)
    told(torn.error, "TornState")
    source.get()


def test_limit_exceeded() -> None:
    received = meet(sends({"w": torch.ones(MIB)}), receives(max_receive_bytes=MIB))[1]
    told(received.error, "LimitExceeded")


def fetch_without_descriptors(rank: int) -> None:
    with leaving(0):
        transfuse.fetch("127.0.0.1:1")


def test_limit_exceeded_by_descriptors() -> None:
    with Fleet(1) as fleet:
        fleet.start(fetch_without_descriptors)
        (outcome,) = fleet.outcomes()
    told(outcome.error, "LimitExceeded")


# ------------------------------------------------------------------------------------- the other end, or the way to it


def test_peer_timeout() -> None:
    received = meet(None, lambda pg: PGTransport(pg, timedelta(seconds=0.5), CPU).recv_checkpoint(0))[1]
    told(received.error, "PeerTimeout")
    assert isinstance(received.error, TimeoutError)


def test_peer_lost() -> None:
    with Ranks(2) as ranks:
        # Nothing else holds it: with it, its connections are gone.
        del ranks.pgs[0]
        with pytest.raises(transfuse.PeerLost) as lost:
            receives()(ranks.pgs[0])
    told(lost.value, "PeerLost")
    assert isinstance(lost.value, ConnectionError)


def test_peer_refused() -> None:
    def fail() -> object:
        raise RuntimeError("no memory for the model")

    sent, _ = meet(sends({"w": torch.ones(3)}), lambda pg: PGTransport(pg, TIMEOUT, CPU, fail).recv_checkpoint(0))
    assert isinstance(sent.error, transfuse.SendFailed)
    told(sent.error.causes[1], "PeerRefused")


def test_peer_not_trusted() -> None:
    with transfuse.serve({"w": torch.ones(3)}, tls=certificates.tls()) as server:
        with pytest.raises(transfuse.PeerNotTrusted) as refused:
            transfuse.fetch(server.address, tls=False)
        told(refused.value, "PeerNotTrusted")


def test_protocol_error() -> None:
    def flip(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.numel() == messages.BLOCK_BYTES:
            tensor[9] ^= 1
        return tensor

    def send(pg: Any) -> None:
        # It waits for an answer in vain.
        source = PGTransport(Tampering(pg, flip), timedelta(seconds=1), CPU)
        source.send_checkpoint([1], {"w": torch.ones(3)})

    received = meet(send, receives())[1]
    told(received.error, "ProtocolError")


def test_another_transport_at_the_other_end() -> None:
    """PyTorch's own sends on other tags: nobody hears of the other."""
    state, second = {"w": torch.ones(3)}, timedelta(seconds=1)
    received = meet(
        lambda pg: TorchPGTransport(pg, second, CPU).send_checkpoint([1], state),
        lambda pg: PGTransport(pg, second, CPU).recv_checkpoint(0),
    )[1]
    told(received.error, "PeerTimeout")


def test_corrupt_data(group_route: None) -> None:
    def flip(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.numel() == 8192:
            tensor[4000] ^= 1
        return tensor

    state = {"weight": torch.ones(2048)}
    sent, received = meet(lambda pg: sends(state)(Tampering(pg, flip)), receives())
    told(received.error, "CorruptData")
    assert isinstance(sent.error, transfuse.SendFailed)


def test_source_mutated(small_bursts: None) -> None:
    weight = torch.ones(4 * MIB)

    def step(progress: dict[int, transfuse.Progress]) -> None:
        if progress[1].bytes > MIB:
            weight.add_(1)

    sent, received = meet(sends({"weight": weight}, progress=step, max_bytes_per_second=16 * MIB), receives())
    told(received.error, "SourceMutated")
    assert isinstance(sent.error, transfuse.SendFailed)


# ------------------------------------------------------------------------------------------------ of several


def test_receive_failed() -> None:
    def fail(pg: Any) -> None:
        with pytest.raises(transfuse.UnsupportedLeaf):
            sends({"w": torch.empty(3, device="meta")}, 2)(pg)

    received = meet(fail, receives({"w": torch.zeros(3)}, [0, 1]), fail)[2]
    told(received.error, "ReceiveFailed")


def test_every_error_has_its_section() -> None:
    for name in _errors.__all__:
        assert section(name).strip(), name
    assert {name for name in transfuse.__all__ if _is_error(name)} == set(_errors.__all__)


def _is_error(name: str) -> bool:
    thing = getattr(transfuse, name)
    return isinstance(thing, type) and issubclass(thing, TransfuseError)
