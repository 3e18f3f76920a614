"""``transfuse.dropin.torch`` against PyTorch's own module, on real gloo groups and on a recorded wire."""

from __future__ import annotations

import copy
import logging
import pickle
import threading
from collections import namedtuple
from collections.abc import Callable
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
import torch.distributed.checkpoint._pg_transport as theirs
from torch.utils._pytree import tree_flatten_with_path

import transfuse.dropin.torch as ours
from torch_transport import (
    CPU,
    LONG,
    NAMES,
    SHORT,
    Tape,
    assert_same,
    forged,
    groups,
    on_tape,
    play,
    raw_tape,
    refusal,
    rich_state,
    together,
    torch_warns,
    transfer,
)
from transfuse._errors import PeerTimeout, ProtocolError, SendFailed, TargetMismatch, UnsupportedLeaf

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
