"""``transfuse.dropin.torch`` against PyTorch's own module, on real gloo groups and on a recorded wire."""

from __future__ import annotations

import copy
import gc
import importlib.util
import logging
import os
import pickle
import subprocess
import sys
import threading
import time
from collections import namedtuple
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any, cast
from unittest.mock import MagicMock

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint._pg_transport as theirs
from torch._C._distributed_c10d import HashStore, PrefixStore
from torch.distributed import ProcessGroup
from torch.multiprocessing.spawn import spawn
from torch.utils._pytree import tree_flatten_with_path

import transfuse.dropin.torch as ours
from transfuse.errors import (
    PeerLost,
    PeerTimeout,
    ProtocolError,
    SendFailed,
    TargetMismatch,
    TransfuseError,
    UnsupportedLeaf,
)

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


# ---------------------------------------------------------------------------------------------- wire


def test_has_the_names_of_torch_and_its_metadata_classes() -> None:
    assert set(NAMES) <= set(dir(ours)) & set(dir(theirs))
    assert set(NAMES) == set(ours.__all__)
    for name in NAMES:
        if name.endswith("Meta"):
            assert getattr(ours, name) is getattr(theirs, name)


@pytest.mark.parametrize("in_place", [False, True], ids=["fresh", "in place"])
@pytest.mark.parametrize(
    ("sender", "receiver"),
    [
        pytest.param(ours, theirs, marks=torch_warns, id="ours to torch"),
        pytest.param(theirs, ours, marks=torch_warns, id="torch to ours"),
        pytest.param(ours, ours, id="ours to ours"),
    ],
)
def test_interoperates(sender: object, receiver: object, in_place: bool) -> None:
    source = rich_state(1)
    want = copy.deepcopy(source)
    target = rich_state(2) if in_place else None
    before = {path: leaf for path, leaf in tree_flatten_with_path(target)[0] if isinstance(leaf, torch.Tensor)}

    received = transfer(source, target, sender=sender, receiver=receiver)

    assert_same(received, want)
    assert_same(source, want)
    for path, leaf in tree_flatten_with_path(received)[0]:
        if path in before:
            assert leaf.data_ptr() == before[path].data_ptr()
            assert torch.equal(leaf, before[path])


def test_describes_and_sends_the_same_bytes_as_torch() -> None:
    source = rich_state(3)
    meta, tensors = ours._prepare_state_dict(source, CPU)
    their_meta, their_tensors = theirs._prepare_state_dict(source, CPU)
    assert meta == their_meta
    assert all(torch.equal(one, other) for one, other in zip(tensors, their_tensors, strict=True))
    assert on_tape(source).messages[1].item() == len(pickle.dumps(their_meta))


@pytest.mark.parametrize("state", [torch.arange(3), 5, {}, [torch.zeros(2), {}]], ids=["tensor", "int", "dict", "list"])
def test_any_root(state: object) -> None:
    assert_same(play(on_tape(state)), state)


def test_cast_views_the_whole_storage() -> None:
    base = torch.arange(6, dtype=torch.float32)
    data = ours._cast_tensor(torch.nn.Parameter(base[2:4]), torch.uint8)
    assert data.shape == (24,)
    assert data.data_ptr() == base.data_ptr()
    assert ours._cast_tensor(base, torch.int32).shape == (6,)
    with pytest.raises(UnsupportedLeaf):
        ours._cast_tensor(torch.eye(2).to_sparse(), torch.uint8)


def test_timeit_logs_also_on_errors(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger=ours.logger.name):
        with ours._timeit("first"):
            pass
        with pytest.raises(KeyError), ours._timeit("second"):
            raise KeyError
        play(on_tape({"a": torch.zeros(1)}))
    first, second, *rest = [record.getMessage() for record in caplog.records]
    assert first.startswith("first took ")
    assert second.startswith("second took ")
    assert [line.split(" took ")[0] for line in rest] == [
        "preparing state_dict",
        "send meta",
        "send tensors",
        "recv meta",
        "recv tensors",
    ]


# -------------------------------------------------------------------------------------------- values


class Tagged(torch.Tensor):
    """A subclass in Python only."""


class Wrapper(torch.Tensor):
    """A subclass whose values are in another tensor."""

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> Wrapper:
        made: Wrapper = torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        raise NotImplementedError


@pytest.mark.parametrize(
    "receiver", [pytest.param(ours, id="ours"), pytest.param(theirs, marks=torch_warns, id="torch")]
)
def test_sends_values_of_every_plain_tensor(receiver: object) -> None:
    z = torch.randn(4, dtype=torch.complex64)
    odd = torch.empty(0).set_(torch.arange(18, dtype=torch.uint8).untyped_storage(), 1, (3,), (1,))
    source = {
        "parameter": torch.nn.Parameter(torch.randn(3)),
        "buffer": torch.nn.Buffer(torch.randn(3)),
        "subclass": torch.randn(3).as_subclass(Tagged),
        "graph": torch.nn.Parameter(torch.randn(3)) * 2,
        "conj": z.conj(),
        "neg": z.conj().imag,
        "zero": torch._efficientzerotensor((3,)),
        "expanded": torch.randn(1, 3).expand(5, 3),
        "odd storage": odd,
    }
    received = transfer(source, receiver=receiver)
    for name, tensor in source.items():
        assert type(received[name]) is torch.Tensor
        assert torch.equal(received[name], tensor.detach().as_subclass(torch.Tensor)), name


def test_parameters_are_received_into_and_stay_parameters() -> None:
    model = torch.nn.Linear(3, 2)
    frozen = torch.nn.Parameter(torch.zeros(2), requires_grad=False)
    target = {"w": model.weight, "b": model.bias, "f": frozen, "t": torch.zeros(2).as_subclass(Tagged)}
    source = {name: torch.randn_like(tensor.detach()) for name, tensor in target.items()}
    received = transfer({**source, "w": torch.nn.Parameter(source["w"])}, target)
    for name, tensor in target.items():
        assert received[name] is tensor
        assert torch.equal(tensor, source[name])
    assert model.weight.requires_grad
    assert model.weight.is_leaf
    assert not frozen.requires_grad


@pytest.mark.parametrize("target_layout", ["contiguous", "transposed", "view"])
@pytest.mark.parametrize("source_layout", ["contiguous", "transposed", "view", "expanded"])
def test_lands_in_any_layout_and_beside_nothing(source_layout: str, target_layout: str) -> None:
    def make(layout: str, fill: Callable[..., torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        views = {
            "contiguous": fill(8, 8),
            "transposed": fill(8, 8).t(),
            "view": fill(10, 20)[1:9, 2:18:2],
            "expanded": fill(8, 1).expand(8, 8),
        }
        view = views[layout]
        return view, torch.empty(0).set_(view.untyped_storage())

    source, _ = make(source_layout, torch.randn)
    target, storage = make(target_layout, torch.zeros)
    received = play(on_tape({"x": source}), {"x": target})
    assert received["x"] is target
    assert torch.equal(target, source)
    assert torch.count_nonzero(storage) == torch.count_nonzero(source)  # what surrounds the target is as it was


def test_views_of_one_layout_leave_their_neighbours_alone() -> None:
    source, target = torch.ones(8), torch.zeros(8)
    transfer({"x": source[2:5]}, {"x": target[2:5]})
    assert target.tolist() == [0, 0, 1, 1, 1, 0, 0, 0]


def test_receives_into_flagged_views() -> None:
    value = torch.randn(4, dtype=torch.complex64)
    held = torch.zeros(4, dtype=torch.complex64)
    plain = torch.zeros(4)
    play(on_tape({"c": value, "n": value.real.clone()}), {"c": held.conj(), "n": plain._neg_view()})
    assert torch.equal(held, value.conj().resolve_conj())
    assert torch.equal(plain, -value.real)


@pytest.mark.parametrize("name", ["uint4", "int2", "bool", "float8_e4m3fn", "uint16"])
def test_copies_every_dtype(name: str) -> None:
    dtype: torch.dtype = getattr(torch, name)
    raw = torch.randint(0, 2, (16,), dtype=torch.uint8)
    target = torch.zeros(32, dtype=torch.uint8).view(dtype)[::2]
    play(on_tape({"x": raw.view(dtype)}), {"x": target})
    assert torch.equal(target.clone().view(torch.uint8) if dtype.itemsize > 1 else target.view(torch.uint8), raw)


def test_expanded_lands_in_expanded_alike() -> None:
    target = torch.zeros(3).expand(4, 3)
    play(on_tape({"x": torch.arange(3.0).expand(4, 3)}), {"x": target})
    assert torch.equal(target, torch.arange(3.0).expand(4, 3))


def test_inference_tensors_are_received_into() -> None:
    with torch.inference_mode():
        direct, copied = torch.zeros(3), torch.zeros(6)[::2]
    play(on_tape({"a": torch.ones(3), "b": torch.ones(3)}), {"a": direct, "b": copied})
    assert direct.tolist() == copied.tolist() == [1, 1, 1]


def test_a_backward_over_replaced_values_is_noticed() -> None:
    weight = torch.nn.Parameter(torch.ones(3))
    loss = (weight * weight).sum()
    transfer({"w": torch.zeros(3)}, {"w": weight})
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        torch.autograd.backward(loss)


def test_a_target_on_another_device_is_updated_by_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    value, target = torch.randn(3), torch.zeros(3)
    assert ours._lands_directly(target, ours._prepare_tensor(value)[1], CPU)
    assert not ours._lands_directly(target, ours._prepare_tensor(value)[1], torch.device("cuda", 0))
    monkeypatch.setattr(ours, "_same_device", lambda one, other: False)
    assert play(on_tape({"x": value}), {"x": target})["x"] is target
    assert torch.equal(target, value)


def test_leaves_that_only_one_side_has() -> None:
    extra, number = torch.zeros(2), 3
    source = {"new": torch.ones(2), "number": torch.ones(1), "tensor": 5}
    target = {"extra": extra, "number": number, "tensor": torch.zeros(1)}
    assert_same(play(on_tape(source), target), source)
    assert extra.tolist() == [0, 0]


# ------------------------------------------------------------------------------------------ refusals


def test_every_mismatch_is_named_and_nothing_is_written() -> None:
    target = {"fits": torch.zeros(2), "shape": torch.zeros(2, 3), "dtype": [torch.zeros(2)]}
    source = {"fits": torch.ones(2), "shape": torch.ones(3, 2), "dtype": [torch.ones(2, dtype=torch.float64)]}
    text = refusal(source, target)
    assert "['shape']: shape: expected (2, 3), got (3, 2)" in text
    assert "['dtype'][0]: dtype: expected torch.float32, got torch.float64" in text
    assert "['fits']" not in text
    assert not any(leaf.any() for _, leaf in tree_flatten_with_path(target)[0])


def test_a_dtype_of_equal_size_is_refused() -> None:
    assert "expected torch.int32, got torch.float32" in refusal({"x": torch.ones(2)}, {"x": torch.zeros(2).int()})


def freed() -> torch.Tensor:
    tensor = torch.zeros(4)
    tensor.untyped_storage().resize_(0)
    return tensor


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: torch.zeros(4).to_sparse(), "layout torch.sparse_coo"),
        (lambda: torch.zeros(4, device="meta"), "a meta tensor"),
        (lambda: Wrapper(torch.zeros(4)), "Wrapper, which wraps other tensors"),
        (freed, "needs 16 bytes"),
        (lambda: torch._efficientzerotensor((4,)), "needs 16 bytes"),
        (lambda: torch.zeros(1).expand(4), "stride: expected (0,), which makes elements share memory, got (1,)"),
    ],
    ids=["sparse", "meta", "wrapper", "freed", "zero", "overlap"],
)
def test_targets_without_memory_of_their_own_are_refused(make: Callable[[], torch.Tensor], text: str) -> None:
    assert text in refusal({"x": torch.ones(4)}, {"x": make()})


def test_overlapping_windows_are_refused_as_target() -> None:
    target = torch.zeros(5).as_strided((3, 3), (1, 1))
    assert "share memory" in refusal({"x": torch.randn(3, 3)}, {"x": target})


def test_a_refusing_receiver_leaves_the_sender_to_its_timeout() -> None:
    first, second = groups()
    target = {"x": torch.zeros(2)}
    sent, received = together(
        lambda: ours.PGTransport(first, SHORT, CPU).send_checkpoint([1], {"x": torch.ones(3)}),
        lambda: ours.PGTransport(second, SHORT, CPU, lambda: target).recv_checkpoint(0),
    )
    assert isinstance(received, TargetMismatch)
    assert isinstance(sent, SendFailed)
    assert isinstance(sent.causes[1], PeerTimeout)
    assert target["x"].tolist() == [0, 0]


Local = namedtuple("Local", "x")
Local.__qualname__ = "Nowhere"


@pytest.mark.filterwarnings("ignore:.*quantized tensor creation:UserWarning")
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
@pytest.mark.parametrize(
    ("make", "path", "text"),
    [
        (lambda: torch.eye(2).to_sparse(), "['a'][0]", "layout torch.sparse_coo"),
        (lambda: torch.nested.nested_tensor([torch.zeros(1), torch.zeros(2)]), "['a'][0]", "nested"),
        (lambda: torch.quantize_per_tensor(torch.zeros(2), 1.0, 0, torch.qint8), "['a'][0]", "quantized"),
        (lambda: torch.zeros(2, device="meta"), "['a'][0]", "meta"),
        (lambda: Wrapper(torch.zeros(2)), "['a'][0]", "Wrapper"),
        (freed, "['a'][0]", "it was freed"),
        (lambda: lambda: None, "['a'][0]", "cannot be pickled"),
        (threading.Lock, "['a'][0]", "cannot be pickled"),
        (lambda: Local(1), "", "the containers cannot be pickled"),
    ],
    ids=["sparse", "nested", "quantized", "meta", "wrapper", "freed", "lambda", "lock", "container"],
)
def test_unsupported_leaves_are_refused_before_anything_is_sent(
    make: Callable[[], object], path: str, text: str
) -> None:
    group = MagicMock()
    with pytest.raises(UnsupportedLeaf, match=text) as caught:
        ours.PGTransport(group, LONG, CPU).send_checkpoint([1], {"a": [make()], "b": torch.zeros(2)})
    assert caught.value.path == path
    group.send.assert_not_called()


def meta_of(shape: Any, stride: Any, offset: Any = 0, nbytes: Any = 16, dtype: Any = torch.float32) -> object:
    return ours._TensorMeta(shape, dtype, offset, stride, nbytes)


@pytest.mark.parametrize(
    "meta",
    [
        meta_of((5,), (1,)),
        meta_of((4,), (1,), offset=1),
        meta_of((2, 2), (3, 1), nbytes=12),
        meta_of((1 << 40,), (1,)),
        meta_of((4,), (1,), nbytes=-16),
        meta_of((4,), (1,), offset=-1),
        meta_of((-4,), (1,)),
        meta_of((4,), (-1,)),
        meta_of((4,), (1, 1)),
        meta_of((4,), (1,), nbytes=16.0),
        meta_of((True,), (1,)),
        meta_of(None, (1,)),
        meta_of((4,), (1,), dtype="float32"),
        ours._DTensorMeta(local=None, spec=None),  # type: ignore[arg-type]
        ours._ShardedTensorMeta([], [None], None),  # type: ignore[list-item, arg-type]
    ],
    ids=str,
)
def test_descriptions_are_checked_before_anything_is_allocated(meta: object) -> None:
    tape = forged({"x": 0}, meta)
    target = {"y": torch.zeros(4)}
    with pytest.raises(ProtocolError):
        play(tape, target)
    assert tape.received == [1, 2]


def forged(state: object, *leaves: object) -> Tape:
    flat, spec = tree_flatten_with_path(state)
    return raw_tape(pickle.dumps(ours._StateDictMeta(spec, [path for path, _ in flat], list(leaves))))


def raw_tape(head: bytes, length: int | None = None) -> Tape:
    tape = Tape()
    tape.messages[1] = torch.tensor([len(head) if length is None else length])
    tape.messages[2] = torch.frombuffer(bytearray(head), dtype=torch.uint8)
    return tape


@pytest.mark.parametrize(
    ("tape", "text"),
    [
        (raw_tape(b"x", -1), "announced metadata of -1 bytes"),
        (raw_tape(b"x", 0), "announced metadata of 0 bytes"),
        (raw_tape(b"x", 1 << 60), "announced metadata of"),
        (raw_tape(b"not a pickle"), "cannot be unpickled"),
        (raw_tape(pickle.dumps([1, 2])), "sent a list in place of metadata"),
        (forged({"x": 0}), "numbers of leaves and paths differ"),
        (forged([0, 0], 1, 2, 3), "numbers of leaves and paths differ"),
    ],
    ids=["negative", "none", "huge", "garbage", "other", "short", "long"],
)
def test_garbled_metadata(tape: Tape, text: str) -> None:
    with pytest.raises(ProtocolError, match=text) as caught:
        play(tape)
    assert caught.value.rank == 0


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
    monkeypatch.setattr(ours, "_WINDOW", 100)
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
    monkeypatch.setattr(ours, "_WINDOW", 100)
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
        if rank == 0:
            with pytest.raises(SendFailed, match="timed out"):
                ours.PGTransport(group, SHORT, CPU).send_checkpoint([1], source)
            return ""
        with pytest.raises(TargetMismatch) as caught:
            ours.PGTransport(group, SHORT, CPU, lambda: target).recv_checkpoint(0)
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
    spawn(distributed_cases, (str(tmp_path / "rendezvous"),), nprocs=2)  # type: ignore[no-untyped-call]


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
