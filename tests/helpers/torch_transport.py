"""Groups, transfers and a recorded wire for tests of the drop-in for PyTorch's transport."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore, PrefixStore
from torch.distributed import ProcessGroup
from torch.utils._pytree import tree_flatten_with_path

import transfuse.dropin.torch as ours
from transfuse._errors import TargetMismatch, TransfuseError

# What PyTorch's own ends warn about: the sender views immutable bytes as a tensor, the receiver unpickles a class that
# is deprecated. Only tests with one of them let this pass.
torch_warns = [
    pytest.mark.filterwarnings("ignore:The given buffer is not writable:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning"),
]

CPU = torch.device("cpu")


LONG = timedelta(seconds=20)


SHORT = timedelta(seconds=0.5)

NAMES = (
    "PGTransport",
    "_prepare_state_dict",
    "_prepare_tensor",
    "_cast_tensor",
    "_timeit",
    "_TensorMeta",
    "_DTensorMeta",
    "_ShardedTensorMeta",
    "_StateDictMeta",
)


def groups(size: int = 2) -> list[ProcessGroup]:
    """One gloo group per rank, all in this process."""
    store = HashStore()

    def make(rank: int) -> ProcessGroup:
        return cast(ProcessGroup, dist.ProcessGroupGloo(PrefixStore("x", store), rank, size, LONG))

    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(make, range(size)))


def together(*calls: Callable[[], object]) -> list[Any]:
    """Run the calls at the same time. Results, with errors of this library in the place of one."""

    def attempt(call: Callable[[], object]) -> object:
        try:
            return call()
        except TransfuseError as error:
            return error

    with ThreadPoolExecutor(len(calls)) as pool:
        futures: list[Future[object]] = [pool.submit(attempt, call) for call in calls]
        return [future.result(timeout=60) for future in futures]


def transfer(
    source: object, target: object = None, *, sender: Any = ours, receiver: Any = ours, timeout: timedelta = LONG
) -> Any:
    """Send over gloo from one thread to another. The received state."""
    first, second = groups()
    make_target = None if target is None else lambda: target
    sent, received = together(
        lambda: sender.PGTransport(first, timeout, CPU).send_checkpoint([1], source),
        lambda: receiver.PGTransport(second, timeout, CPU, make_target).recv_checkpoint(0),
    )
    assert sent is None
    return received


class Tape:
    """A group that keeps what is sent and plays it back, for looking at one end alone."""

    def __init__(self) -> None:
        self.messages: dict[int, torch.Tensor] = {}
        self.received: list[int] = []

    def size(self) -> int:
        return 2

    def rank(self) -> int:
        return -1

    def send(self, tensors: list[torch.Tensor], rank: int, tag: int) -> Tape:
        self.messages[tag] = tensors[0].clone()
        return self

    def recv(self, tensors: list[torch.Tensor], rank: int, tag: int) -> Tape:
        tensors[0].copy_(self.messages[tag])
        self.received.append(tag)
        return self

    def wait(self, timeout: timedelta) -> bool:
        return True

    def group(self) -> ProcessGroup:
        return cast(ProcessGroup, self)


def on_tape(source: object) -> Tape:
    tape = Tape()
    ours.PGTransport(tape.group(), LONG, CPU).send_checkpoint([1], source)
    return tape


def play(tape: Tape, target: object = None) -> Any:
    return ours.PGTransport(tape.group(), LONG, CPU, None if target is None else lambda: target).recv_checkpoint(0)


def refusal(source: object, target: object) -> str:
    """The text of a refusal, after which no tensor was received."""
    tape = on_tape(source)
    with pytest.raises(TargetMismatch) as caught:
        play(tape, target)
    assert tape.received == [1, 2]
    return str(caught.value)


def assert_same(got: object, want: object) -> None:
    got_leaves, got_spec = tree_flatten_with_path(got)
    want_leaves, want_spec = tree_flatten_with_path(want)
    assert got_spec == want_spec
    for (path, one), (_, other) in zip(got_leaves, want_leaves, strict=True):
        if isinstance(other, torch.Tensor):
            assert isinstance(one, torch.Tensor), path
            assert (one.dtype, one.shape) == (other.dtype, other.shape), path
            assert torch.equal(one, other), path
        else:
            assert type(one) is type(other), path
            assert one == other, path


def rich_state(seed: int) -> dict[str, object]:
    torch.manual_seed(seed)
    model = torch.nn.Linear(4, 3)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(2, 4)).sum().backward()
    optimizer.step()
    return {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "scalar": torch.tensor(float(seed)),
        "empty": torch.empty(0, 3),
        "bool": torch.rand(7) > 0.5,
        "bf16": torch.randn(5, dtype=torch.bfloat16),
        "complex": torch.randn(3, dtype=torch.complex64),
        "transposed": torch.randn(2, 3).t(),
        "every second": torch.arange(20)[3:17:2] * seed,
        "inside": torch.randn(10)[3:7],
        "channels last": torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
        "epoch": seed,
        "name": f"run {seed}",
        "nothing": None,
        "nested": [1.5, ("x", {"deep": torch.full((2,), seed)})],
    }


def forged(state: object, *leaves: object) -> Tape:
    flat, spec = tree_flatten_with_path(state)
    return raw_tape(pickle.dumps(ours._StateDictMeta(spec, [path for path, _ in flat], list(leaves))))


def raw_tape(head: bytes, length: int | None = None) -> Tape:
    tape = Tape()
    tape.messages[1] = torch.tensor([len(head) if length is None else length])
    tape.messages[2] = torch.frombuffer(bytearray(head), dtype=torch.uint8)
    return tape
