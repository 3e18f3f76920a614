"""Every kind of leaf arrives exactly as it was sent: fresh, and into a target."""

from __future__ import annotations

import copy
import datetime
import enum
import io
import pathlib
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

import transfuse
from moves import Pair, pair
from transfuse._state.leaves import dense
from transfuse._state.leaves.blobs import ObjectCodec
from transfuse._state.leaves.codec import BuildContext, CannotCarry
from transfuse.testing.exact import assert_exact

pytestmark = pytest.mark.usefixtures("either_route")

DTYPES = sorted(
    {
        dtype
        for dtype in vars(torch).values()
        if isinstance(dtype, torch.dtype) and not str(dtype).startswith(("torch.q",))
    },
    key=str,
)
QUANTIZED = [torch.qint8, torch.quint8, torch.qint32]


@pytest.fixture(scope="module")
def two() -> Iterator[Pair]:
    with pair() as ranks:
        yield ranks


def bits(dtype: torch.dtype, *shape: int, seed: int = 0) -> torch.Tensor:
    """A tensor of random bits: NaNs with payload, denormals and all."""
    generator = torch.Generator().manual_seed(seed)
    count = int(np.prod(shape)) * dtype.itemsize
    if dtype is torch.bool:
        return torch.randint(0, 2, shape, generator=generator).bool()
    raw = torch.randint(0, 256, (count,), dtype=torch.uint8, generator=generator)
    return dense.over(raw.untyped_storage(), dtype, 0, shape, torch.empty(shape, device="meta").stride())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype(two: Pair, dtype: torch.dtype) -> None:
    state = {"a": bits(dtype, 5, 3), "0-dim": bits(dtype), "empty": bits(dtype, 0, 2), "t": bits(dtype, 3, 4).t()}
    assert_exact(state, two.move(state))
    target = {name: bits(dtype, *t.shape, seed=1) for name, t in state.items()}
    arrived = two.move(state, target)
    assert_exact(state, arrived, in_place=True)
    assert all(arrived[name] is target[name] for name in state)


@pytest.mark.skipif(not hasattr(torch, "bcomplex32"), reason="this torch has no bcomplex32: 2.14 has")
def test_signs_of_a_dtype_for_which_torch_has_no_conjugation(two: Pair) -> None:
    """torch cannot turn a conjugate view of it into a plain tensor, but it lands in a plain target."""
    dtype: torch.dtype = torch.bcomplex32  # type: ignore[attr-defined]
    parts = torch.tensor([[1.0, 2.0], [-3.0, -0.0], [float("inf"), float("nan")]], dtype=torch.bfloat16)
    sign = torch.iinfo(torch.int16).min
    flipped = {"conj": torch.tensor([0, sign], dtype=torch.int16), "neg": torch.tensor([sign, sign], dtype=torch.int16)}
    z = parts.view(dtype).reshape(3)
    state = {"conj": z.clone().conj(), "neg": torch._neg_view(z.clone())}
    arrived = two.move(state, {name: torch.zeros(3, dtype=dtype) for name in state})
    for name, bits_of_signs in flipped.items():
        assert (arrived[name].is_conj(), arrived[name].is_neg()) == (False, False)
        got = torch.view_as_real(arrived[name]).view(torch.int16)
        assert torch.equal(got, parts.view(torch.int16) ^ bits_of_signs)
    assert_exact(state, arrived, in_place=True)
    assert_exact(state, two.move(state))


@pytest.mark.parametrize("dtype", QUANTIZED, ids=str)
def test_quantized_tensors_are_refused_by_name(two: Pair, dtype: torch.dtype) -> None:
    state = {"fine": torch.ones(2), "q": torch._empty_affine_quantized([3], scale=0.5, zero_point=0, dtype=dtype)}
    sent, received = two.errors(state)
    assert isinstance(sent, transfuse.UnsupportedLeaf)
    assert "['q']" in str(sent)
    assert "int_repr" in str(sent)
    assert isinstance(received, transfuse.PeerRefused)
    assert "['q']" in str(received)


def layouts() -> dict[str, torch.Tensor]:
    base = torch.arange(240, dtype=torch.float32)
    odd = torch.arange(41, dtype=torch.uint8)
    z = torch.randn(4, 3, dtype=torch.complex64)
    return {
        "contiguous": torch.randn(4, 5),
        "transposed": torch.randn(4, 5).t(),
        "permuted": torch.randn(2, 3, 4).permute(2, 0, 1),
        "stepped": base.clone()[::3],
        "two steps": base.clone().view(12, 20)[::2, 3::4],
        "offset": base.clone()[7:19],
        "expanded": torch.randn(3, 1).expand(3, 6),
        "expanded 0-dim": torch.tensor(2.5).expand(4, 4),
        "channels last": torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
        "overlapping": base.clone().as_strided((10, 4), (2, 1)),
        "unfold": base.clone().unfold(0, 5, 2),
        "size one": torch.randn(1, 5, 1),
        "odd strides of size one": torch.empty_strided((1, 4), (77, 1)).fill_(3),
        "conj": z.conj(),
        "neg": torch._neg_view(torch.randn(5)),
        "conj and neg": torch._neg_view(torch.randn(3, dtype=torch.complex64).conj()),
        "imag of conj": torch.randn(4, dtype=torch.complex64).conj().imag,
        "odd storage": odd[1:41].view(torch.uint8)[3:],
        "odd storage, wider": odd[:40].view(torch.float32),
        "empty of a storage": base.clone()[5:5],
        "grad": torch.randn(3, requires_grad=True),
        "result": torch.randn(3, requires_grad=True) * 2,
        "parameter": nn.Parameter(torch.randn(2, 2)),
        "frozen parameter": nn.Parameter(torch.randn(2, 2), requires_grad=False),
        "transposed parameter": nn.Parameter(torch.randn(2, 3).t()),
        "buffer": nn.Buffer(torch.randn(3)),
        "fleeting buffer": nn.Buffer(torch.randn(3), persistent=False),
    }


@pytest.mark.parametrize("name", layouts())
def test_every_layout(two: Pair, name: str) -> None:
    state = {name: layouts()[name]}
    assert_exact(state, two.move(state))
    target = {name: torch.zeros(state[name].shape, dtype=state[name].dtype)}
    assert_exact(state, two.move(state, target), in_place=True)
    spread = torch.zeros(*state[name].shape, 3, dtype=state[name].dtype)[..., 1]
    assert_exact(state, two.move(state, {name: spread}), in_place=True)


def test_all_layouts_together(two: Pair) -> None:
    state = layouts()
    assert_exact(state, two.move(state))


def test_tied_and_overlapping_tensors_share_storage_again(two: Pair) -> None:
    weight = nn.Parameter(torch.randn(6, 4))
    base = torch.arange(50, dtype=torch.float32)
    state = {
        "embed": weight,
        "head": weight.data,
        "head.t": weight.data.t(),
        "low": base[:30],
        "high": base[20:],
        "as int": base[10:20].view(torch.int32),
        "apart": base[40:41],
        "alone": torch.randn(3),
    }
    arrived = two.move(state)
    assert_exact(state, arrived)
    arrived["low"][25] = -1.0
    assert arrived["high"][5] == -1.0
    with torch.no_grad():
        arrived["embed"][0, 0] = 7.0
    assert arrived["head"][0, 0] == 7.0
    assert arrived["alone"].untyped_storage()._cdata != arrived["low"].untyped_storage()._cdata


def test_a_view_sends_what_it_shows(two: Pair) -> None:
    base = torch.arange(1_000_000, dtype=torch.float32)
    state = {"one": base[500_000:500_001], "few": base[10:20:2]}
    sent, received = two.outcomes(state)
    assert_exact(state, received.get())
    assert sent.get().report.bytes == 4 + 5 * 4
    alone = two.move({"one": base[500_000:500_001]})["one"]
    assert alone.untyped_storage().nbytes() == 4


@pytest.mark.parametrize(
    "sparse",
    [
        lambda: torch.sparse_coo_tensor(torch.tensor([[0, 1, 0], [2, 0, 2]]), torch.tensor([1.0, 2.0, 3.0]), (2, 3)),
        lambda: torch.sparse_coo_tensor(torch.tensor([[0, 1], [2, 0]]), torch.randn(2, 4), (2, 3, 4)).coalesce(),
        lambda: torch.sparse_coo_tensor(torch.empty(2, 0, dtype=torch.long), torch.empty(0), (5, 5)),
        lambda: torch.eye(4).to_sparse_csr(),
        lambda: torch.eye(4).to_sparse_csc(),
        lambda: torch.eye(4).to_sparse_bsr((2, 2)),
        lambda: torch.eye(4).to_sparse_bsc((2, 2)),
        lambda: nn.Parameter(torch.eye(3).to_sparse()),
        lambda: torch.eye(3).to_sparse_csr().requires_grad_(),
    ],
    ids=["coo", "coo hybrid", "coo empty", "csr", "csc", "bsr", "bsc", "coo parameter", "csr with grad"],
)
def test_sparse(two: Pair, sparse: Callable[[], torch.Tensor]) -> None:
    state = {"s": sparse()}
    assert_exact(state, two.move(state))
    target = {"s": state["s"].detach().clone()}
    target["s"].values().zero_() if target["s"].layout is not torch.sparse_coo else target["s"]._values().zero_()
    arrived = two.move(state, target)
    assert_exact(state, arrived, in_place=True)
    assert arrived["s"] is target["s"]


def test_sparse_of_another_count_is_refused_by_name(two: Pair) -> None:
    state = {"s": torch.eye(4).to_sparse()}
    _, received = two.errors(state, {"s": torch.eye(4)[:2].to_sparse().sparse_resize_((4, 4), 2, 0)})
    assert isinstance(received, transfuse.TargetMismatch)
    assert "['s']" in str(received)


def jagged(*lengths: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.nested.nested_tensor([torch.randn(n, 4, generator=generator) for n in lengths], layout=torch.jagged)


def test_jagged_nested(two: Pair) -> None:
    state = {"n": jagged(3, 1, 2), "g": jagged(2, 2).requires_grad_()}
    assert_exact(state, two.move(state))
    target = {"n": jagged(2, 2, 2, seed=1), "g": jagged(3, 1, seed=1)}
    arrived = two.move(state, target)
    assert_exact(state, arrived, in_place=True)
    assert arrived["n"] is target["n"]
    assert [len(t) for t in arrived["n"].unbind()] == [3, 1, 2]


def test_strided_nested_is_refused_with_the_remedy(two: Pair) -> None:
    state = {"n": torch.nested.nested_tensor([torch.randn(2), torch.randn(3)])}
    sent, _ = two.errors(state)
    assert "layout=torch.jagged" in str(sent)


class Point(NamedTuple):
    x: Any
    y: Any


@dataclass
class Registered:
    weight: Any
    name: Any


torch.utils._pytree.register_dataclass(Registered)


class Colour(enum.Enum):
    RED = 1
    BLUE = "b"


def test_trees(two: Pair) -> None:
    t = torch.randn(3)
    module = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))
    state: dict[Any, Any] = {
        "dict": {"a": t, 1: 2, (1, "x"): 3, torch.float32: 4, None: 5, Colour.RED: 6, b"k": 7, 2.5: 8, False: 9},
        "ordered": OrderedDict(z=1, a=t.clone()),
        "default": defaultdict(list, {"a": [1, 2]}),
        "nothing": defaultdict(None, {"a": 1}),
        "list": [1, [2, [t.clone()]], []],
        "tuple": (1, (), (t.clone(),)),
        "point": Point(t.clone(), Point(1, 2)),
        "deque": deque([1, t.clone()], maxlen=5),
        "dataclass": Registered(t.clone(), "n"),
        "size": torch.Size([1, 2]),
        "model": module.state_dict(),
        "empty": {},
    }
    arrived = two.move(state)
    assert_exact(state, arrived)
    assert type(arrived["size"]) is torch.Size
    assert arrived["model"]._metadata == module.state_dict()._metadata  # type: ignore[attr-defined]
    module.load_state_dict(arrived["model"])
    target = copy.deepcopy(state)
    assert_exact(state, two.move(state, target), in_place=True)


@pytest.mark.parametrize("state", [torch.arange(3.0), 5, [], {}, None, (torch.ones(1),)], ids=str)
def test_any_root(two: Pair, state: object) -> None:
    assert_exact(state, two.move(state))


def test_values(two: Pair) -> None:
    state: dict[str, Any] = {
        "none": None,
        "bools": [True, False],
        "ints": [0, -1, 2**63, 2**64, -(2**200)],
        "floats": [float("nan"), float("inf"), -float("inf"), -0.0, 1e-310],
        "complex": complex(-0.0, float("nan")),
        "str": ["", "ä∂", "\ud800", "x" * 10_000],
        "bytes": [b"", b"\0", bytes(range(256)) * 1000],
        "sets": [{1, 2}, frozenset({"a", (1, 2)}), set()],
        "torch": [torch.float8_e4m3fn, torch.device("cuda:3"), torch.Size([2]), torch.sparse_coo, torch.channels_last],
        "numpy": [np.float32(1.5), np.int8(-3), np.bool_(True), np.complex64(1j), np.datetime64("2026-01-01")],
        "arrays": [
            np.arange(6).reshape(2, 3),
            np.asfortranarray(np.random.default_rng(0).random((3, 4))),
            np.arange(10)[::2],
            np.array(3.5),
            np.empty((0, 3)),
            np.array(["a", "bc"]),
            np.zeros(2, dtype=[("a", "<i4"), ("b", "<f8", (2,))]),
        ],
        "time": [datetime.datetime(2026, 1, 2, tzinfo=datetime.UTC), datetime.timedelta(3), datetime.date(2026, 1, 1)],
        "path": pathlib.Path("/tmp/x"),
        "enum": Colour.BLUE,
    }
    frozen = np.arange(3)
    frozen.flags.writeable = False
    state["frozen"] = frozen
    assert_exact(state, two.move(state))


def test_optimizers_schedulers_and_rng(two: Pair) -> None:
    model = nn.Linear(4, 4)
    for make in (torch.optim.AdamW, torch.optim.SGD, torch.optim.Adagrad, torch.optim.RMSprop):
        options: dict[str, Any] = {"momentum": 0.9} if make is torch.optim.SGD else {}
        optimizer = make(model.parameters(), lr=0.1, **options)
        model(torch.randn(2, 4)).sum().backward()
        optimizer.step()
        sched = torch.optim.lr_scheduler
        schedulers = [
            sched.StepLR(optimizer, 2),
            sched.CosineAnnealingLR(optimizer, 5),
            sched.LambdaLR(optimizer, lambda epoch: 0.9**epoch),
            sched.OneCycleLR(optimizer, 0.1, total_steps=10, cycle_momentum=False),
            sched.ReduceLROnPlateau(optimizer),
            sched.SequentialLR(optimizer, [sched.ConstantLR(optimizer), sched.ExponentialLR(optimizer, 0.9)], [2]),
        ]
        state = {
            "optimizer": optimizer.state_dict(),
            "schedulers": [s.state_dict() for s in schedulers],
            "rng": torch.get_rng_state(),
            "numpy rng": np.random.default_rng(0).bit_generator.state,
        }
        arrived = two.move(state)
        assert_exact(state, arrived)
        optimizer.load_state_dict(arrived["optimizer"])
        for scheduler, loaded in zip(schedulers, arrived["schedulers"], strict=True):
            scheduler.load_state_dict(loaded)
        torch.set_rng_state(arrived["rng"])


class Hiding(dict[str, Any]):
    pass


class Custom:
    def __init__(self) -> None:
        self.a = 1


@pytest.mark.parametrize(
    ("leaf", "says"),
    [
        (Hiding(w=torch.ones(2)), "test_leaves.Hiding is a dict"),
        (lambda: 3, "cannot be carried"),
        (object(), "builtins.object"),
        (Custom(), "test_leaves.Custom is refused"),
        ({torch.ones(1)}, "set"),
        (np.array([None, 1]), "Python objects"),
        (torch.empty(3, device="meta"), "meta tensor"),
        (defaultdict(lambda: 3), "factory"),
        (
            nn.LazyLinear(2).weight,
            "an UninitializedParameter of a lazy module has no shape yet; run a forward pass first",
        ),
        (nn.LazyBatchNorm1d().running_mean, "an UninitializedBuffer of a lazy module has no shape yet"),
    ],
    ids=[
        "dict subclass",
        "function",
        "object",
        "instance",
        "set of tensors",
        "object array",
        "meta",
        "factory",
        "lazy",
        "lazy buffer",
    ],
)
def test_what_cannot_be_carried_is_refused_by_name_at_both_ends(two: Pair, leaf: object, says: str) -> None:
    for error in two.errors({"fine": torch.ones(2), "nested": [0, leaf]}):
        assert says in str(error)
        assert "['nested'][1]" in str(error)


@pytest.mark.parametrize("kind", ["Linear", "Sequential", "ModuleList", "AdamW", "StepLR"])
def test_an_object_in_the_place_of_its_state_is_told_to_be_one(two: Pair, kind: str) -> None:
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    made = {
        "Linear": model,
        "Sequential": torch.nn.Sequential(model),
        "ModuleList": torch.nn.ModuleList([model]),
        "AdamW": optimizer,
        "StepLR": torch.optim.lr_scheduler.StepLR(optimizer, 1),
    }
    for error in two.errors({"model": made[kind]}):
        assert "leaf ['model']: torch." in str(error)
        assert f".{kind} is an object that has a state, not a state: pass its state_dict() here" in str(error)


def test_objects_travel_to_a_receiver_that_opted_in(two: Pair) -> None:
    state = {"c": Custom(), "w": torch.ones(3)}
    _, received = two.errors(state)
    assert "weights_only_objects=True" in str(received)
    _, received = two.errors(state, weights_only_objects=True)
    assert "add_safe_globals" in str(received)
    with torch.serialization.safe_globals([Custom]):
        arrived = two.move(state, weights_only_objects=True)
    assert type(arrived["c"]) is Custom
    assert arrived["c"].a == 1


def _pickled(item: object) -> bytes:
    torch.save(item, buffer := io.BytesIO())
    return buffer.getvalue()


@pytest.mark.parametrize(
    "data",
    [
        _pickled(Custom())[:-40],
        _pickled(Custom()).replace(b"Custom", b"Cus\xfftom"[:6]),
        _pickled({"a": 1}).replace(b"}", b"\xff", 1),
        b"\x80\x02}\xff\xff",
        b"",
    ],
    ids=["truncated", "other letter", "garbage", "no archive", "empty"],
)
def test_a_damaged_object_is_not_called_unsafe(data: bytes) -> None:
    tensor = torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)
    with pytest.raises(ValueError, match=r"a damaged pickle of test_leaves.Custom: "):
        ObjectCodec(1 << 20).close("test_leaves.Custom", [tensor], BuildContext([], weights_only_objects=True))
    whole = torch.frombuffer(bytearray(_pickled(Custom())), dtype=torch.uint8)
    with pytest.raises(CannotCarry, match=r"refuses test_leaves.Custom, which needs test_leaves.Custom; convert it"):
        ObjectCodec(1 << 20).close("test_leaves.Custom", [whole], BuildContext([], weights_only_objects=True))


def test_a_container_that_holds_itself_is_refused(two: Pair) -> None:
    state: dict[str, Any] = {"a": torch.ones(1)}
    state["self"] = state
    sent, _ = two.errors(state)
    assert "nested deeper" in str(sent)


def test_a_freed_storage_is_refused_by_name(two: Pair) -> None:
    tensor = torch.randn(4)
    tensor.untyped_storage().resize_(0)
    sent, _ = two.errors({"w": tensor})
    assert "['w']" in str(sent)
    assert "freed" in str(sent)


def test_a_dtensor_held_outside_its_mesh_keeps_its_local_tensor(two: Pair) -> None:
    """torch's from_local() would put an empty tensor in its place."""
    mesh = DeviceMesh("cpu", torch.tensor([5]), _init_backend=False, _rank=0)
    local = torch.arange(6.0).reshape(2, 3)
    spec = DTensorSpec(mesh, (Replicate(),), tensor_meta=TensorMeta(local.shape, local.stride(), local.dtype))
    fresh = two.move({"w": DTensor(local, spec, requires_grad=False)}, mesh=mesh)["w"]  # type: ignore[no-untyped-call]
    assert fresh.device_mesh is mesh
    assert torch.equal(fresh.to_local(), local)
