"""Repeated transfers: what is used again, what is not, and that the bytes are always those of today."""

from __future__ import annotations

import ctypes
import gc
import mmap
import random
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Any, cast

import pytest
import torch
from torch import nn

import transfuse
from moves import CPU, TIMEOUT
from transfuse._report import Report
from transfuse._session.remembered import Remembered
from transfuse._wire.channel import Channel
from transfuse.testing.exact import assert_exact
from transfuse.testing.ranks import Ranks

MANY = 6000  # leaves: the description is long, so that it is not sent when it is known


class Sync:
    """Two ranks that move a state again and again, each with one transport."""

    def __init__(self, ranks: Ranks, target: Callable[[], object] | None, **options: Any) -> None:
        self._ranks = ranks
        self._source = transfuse.PGTransport(ranks.pgs[0], TIMEOUT, CPU)
        self._receiver = transfuse.PGTransport(ranks.pgs[1], TIMEOUT, CPU, target, **options)

    def move(self, state: object, step: int = 0) -> Any:
        def work(rank: int, _: Any) -> Any:
            if rank == 0:
                return self._source.send_checkpoint([1], state, step=step)
            return self._receiver.recv_checkpoint(0, step=step)

        sent, received = self._ranks.outcomes(work)
        value = received.get()
        sent.get()
        return value

    @property
    def reports(self) -> tuple[Report, Report]:
        assert self._source.report is not None
        assert self._receiver.report is not None
        return self._source.report, self._receiver.report

    @property
    def reused(self) -> tuple[set[str], set[str]]:
        """By the source, and by the receiver."""
        sent, received = self.reports
        return set(sent.reused), set(received.reused)


@pytest.fixture
def ranks() -> Iterator[Ranks]:
    with Ranks(2) as two:
        yield two


def many(value: float, count: int = MANY) -> dict[str, Any]:
    tensors: dict[str, Any] = {f"w{i}": torch.full((4,), value + i) for i in range(count)}
    return {"model": tensors, "step": int(value), "lr": 0.1 * value}


@pytest.mark.usefixtures("either_route")
def test_the_second_transfer_reuses_description_and_plan_whatever_the_values(ranks: Ranks) -> None:
    own = many(-1.0)
    sync = Sync(ranks, lambda: own)
    for step in range(4):
        received = sync.move(many(float(step)), step)
        assert_exact(many(float(step)), received)
        assert received["step"] == step
        assert received["model"]["w7"] is own["model"]["w7"]
        sent, got = sync.reused
        assert ("description" in sent, {"description", "plan"} <= got) == (step > 0, step > 0)
        assert ("parcels" in sent) == (step > 0 and sync.reports[1].route == "group")


def test_a_known_description_is_not_sent_again(ranks: Ranks, group_route: None) -> None:
    own = many(-1.0)
    sync = Sync(ranks, lambda: own)
    asked = []
    send = Channel.send

    def watched(self: Any, kind: Any, *args: Any, **more: Any) -> Any:
        asked.append(kind.name)
        return send(self, kind, *args, **more)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Channel, "send", watched)
        for step in range(3):
            sync.move(many(float(step)), step)
    # A short offer travels with the meeting.
    assert asked.count("OFFER") + asked.count("MEET") == 4, "the first time twice: brief, and described"
    assert asked.count("DESCRIBE") == 1


def test_fresh_tensors_are_new_each_time(ranks: Ranks) -> None:
    sync = Sync(ranks, None)
    first = sync.move(many(1.0))
    second = sync.move(many(2.0))
    assert "plan" in sync.reused[1]
    assert_exact(many(1.0), first)
    assert_exact(many(2.0), second)


def test_a_receiver_that_does_not_know_the_structure_asks_for_it(ranks: Ranks) -> None:
    own = many(-1.0)
    sync = Sync(ranks, lambda: own)
    sync.move(many(0.0))
    sync._receiver.remembered = Remembered()
    assert_exact(many(1.0), sync.move(many(1.0)))
    assert sync.reused == ({"description"}, set())


# ------------------------------------------------------------------------------------------- memory that moves under us


def swap_data(own: nn.ParameterDict, name: str) -> None:
    own[name].data = torch.zeros_like(own[name])


def resize_storage(own: nn.ParameterDict, name: str) -> None:
    """The memory is freed and given again: another tensor may have the old address by then."""
    tensor, nbytes = own[name], own[name].untyped_storage().nbytes()
    tensor.untyped_storage().resize_(0)
    thief = torch.full((nbytes // 4,), 7.0)
    tensor.untyped_storage().resize_(nbytes)
    own.register_buffer(f"thief_{name}", thief, persistent=False)


def new_parameter(own: nn.ParameterDict, name: str) -> None:
    own[name] = nn.Parameter(torch.zeros_like(own[name]))


def transpose(own: nn.ParameterDict, name: str) -> None:
    """The same address and the same shape, since it is square: only the strides differ."""
    own[name].data = own[name].data.t()


def tie(own: nn.ParameterDict, name: str) -> None:
    own[name].data = own["w0"].data


@pytest.mark.usefixtures("either_route")
@pytest.mark.parametrize("change", [swap_data, resize_storage, new_parameter, transpose])
@pytest.mark.parametrize("at", ["target", "source"])
def test_memory_that_moved_gets_todays_bytes(
    ranks: Ranks, change: Callable[[nn.ParameterDict, str], None], at: str
) -> None:
    def made(seed: int) -> nn.ParameterDict:
        torch.manual_seed(seed)
        return nn.ParameterDict({f"w{i}": nn.Parameter(torch.randn(64, 64)) for i in range(40)})

    theirs, own = made(1), made(2)
    sync = Sync(ranks, own.state_dict)
    for round_ in range(4):
        with torch.no_grad():
            for parameter in theirs.values():
                parameter.copy_(torch.randn(64, 64))
        sync.move(theirs.state_dict())
        for name, parameter in theirs.items():
            assert torch.equal(own[name], parameter), name
        change(own if at == "target" else theirs, f"w{3 + round_}")


def test_two_targets_that_become_one_are_refused_as_ever(ranks: Ranks) -> None:
    theirs = nn.ParameterDict({f"w{i}": nn.Parameter(torch.full((8, 8), float(i))) for i in range(4)})
    own = nn.ParameterDict({f"w{i}": nn.Parameter(torch.zeros(8, 8)) for i in range(4)})
    sync = Sync(ranks, own.state_dict)
    sync.move(theirs.state_dict())
    tie(own, "w2")
    with pytest.raises(transfuse.TargetMismatch, match="w2"):
        sync.move(theirs.state_dict())


def test_sources_that_get_tied_stay_right(ranks: Ranks) -> None:
    theirs = nn.ParameterDict({f"w{i}": nn.Parameter(torch.full((8, 8), float(i))) for i in range(4)})
    sync = Sync(ranks, None)
    sync.move(theirs.state_dict())
    tie(theirs, "w2")
    received = sync.move(theirs.state_dict())
    assert_exact(theirs.state_dict(), received)
    assert "plan" not in sync.reused[1]


@pytest.mark.parametrize(
    "other",
    [
        {"w": torch.zeros(4, dtype=torch.float64)},
        {"w": torch.zeros(2, 2)},
        {"w": torch.zeros(4), "v": torch.zeros(1)},
        {"w": [torch.zeros(4)]},
        OrderedDict(w=torch.zeros(4)),
        {"w": 4},
        {"w": torch.zeros(4).conj().neg()},
        {"w": torch.zeros(4), 1: torch.zeros(4), "n": {True: torch.zeros(1)}},
    ],
)
def test_another_structure_is_planned_anew(ranks: Ranks, other: Any) -> None:
    sync = Sync(ranks, None)
    for state in ({"w": torch.ones(4)}, other, {"w": torch.full((4,), 2.0)}, other):
        assert_exact(state, sync.move(state))


def test_keys_that_python_takes_for_equal_are_not_the_same_target(ranks: Ranks) -> None:
    """True, 1 and 1.0 are one key of a dict, and three different keys of a state."""
    state = {1: torch.ones(2)}
    own: dict[Any, torch.Tensor] = {1: torch.zeros(2)}
    sync = Sync(ranks, lambda: own)
    sync.move(state)
    before = own[1]
    own = {True: before}
    fresh = Sync(ranks, lambda: own)
    try:
        expected = repr(list(map(type, fresh.move(state))))
    except transfuse.TransfuseError as error:
        with pytest.raises(type(error)):
            sync.move(state)
    else:
        assert repr(list(map(type, sync.move(state)))) == expected


# --------------------------------------------------------------------------------------------------- nothing is kept


@pytest.mark.parametrize("assembled", [False, True])
def test_nothing_of_the_callers_is_kept_in_memory(ranks: Ranks, assembled: bool) -> None:
    dtype = torch.bfloat16 if assembled else torch.float32
    own: dict[str, Any] = {"model": {f"w{i}": torch.zeros(4, dtype=dtype) for i in range(50)}, "step": 0, "lr": 0.0}
    sync = Sync(ranks, lambda: own, cast=assembled)
    for step in range(2):
        state = many(float(step), 50)
        sync.move(state)
    assert "plan" in sync.reused[1]
    watched = [weakref.ref(state["model"]["w3"]), weakref.ref(own["model"]["w3"])]
    own, state = {}, {}
    gc.collect()
    assert [ref() for ref in watched] == [None, None]


@pytest.mark.usefixtures("either_route")
def test_a_plan_with_casts_is_used_again(ranks: Ranks) -> None:
    own: dict[str, Any] = {
        "model": {f"w{i}": torch.zeros(4, dtype=torch.bfloat16) for i in range(50)},
        "step": 0,
        "lr": 0.0,
    }
    sync = Sync(ranks, lambda: own, cast=True)
    for step in range(3):
        state = many(float(step), 50)
        received = sync.move(state)
        assert received["step"] == step
        for name, tensor in state["model"].items():
            assert torch.equal(own["model"][name], tensor.to(torch.bfloat16))
        assert ("plan" in sync.reused[1]) == (step > 0)


def test_a_plan_is_not_used_again_after_a_failure(ranks: Ranks) -> None:
    own = many(-1.0, 50)
    fails = [False]

    def target() -> object:
        if fails[0]:
            raise RuntimeError("not now")
        return own

    sync = Sync(ranks, target)
    sync.move(many(0.0, 50))
    fails[0] = True
    with pytest.raises(RuntimeError, match="not now"):
        sync.move(many(1.0, 50))
    fails[0] = False
    assert_exact(many(2.0, 50), sync.move(many(2.0, 50)))


def test_read_only_memory_is_refused_although_the_plan_is_known(ranks: Ranks) -> None:
    """The same address, shape and size, but the memory can no longer be written."""
    libc = ctypes.CDLL(None, use_errno=True)
    memory = mmap.mmap(-1, mmap.PAGESIZE)
    own = {"w": torch.frombuffer(memory, dtype=torch.float32)}
    sync = Sync(ranks, lambda: own)
    state = {"w": torch.randn(mmap.PAGESIZE // 4)}
    sync.move(state)
    assert torch.equal(own["w"], state["w"])
    address = ctypes.c_void_p(own["w"].data_ptr())
    assert libc.mprotect(address, ctypes.c_size_t(mmap.PAGESIZE), 1) == 0
    try:
        with pytest.raises(transfuse.TargetMismatch, match="cannot be written"):
            sync.move(state)
    finally:
        assert libc.mprotect(address, ctypes.c_size_t(mmap.PAGESIZE), 3) == 0
    sync.move(state)


# ---------------------------------------------------------------------------------------------- anything, in any order


@pytest.mark.parametrize("seed", range(6))
def test_random_changes_between_transfers_give_todays_bytes(ranks: Ranks, seed: int, either_route: None) -> None:
    rng = random.Random(seed)
    torch.manual_seed(seed)

    def leaf() -> Any:
        kind = rng.randrange(6)
        sizes = tuple(rng.randrange(1, 9) for _ in range(rng.randrange(3)))
        if kind == 0:
            return rng.choice([rng.random(), rng.randrange(100), "text", None, b"bytes"])
        if kind == 1:
            return torch.randn(6, 6).t()
        if kind == 2:
            return torch.randint(0, 9, sizes)
        if kind == 3:
            return nn.Parameter(torch.randn(sizes))
        return torch.randn(sizes)

    state: dict[str, Any] = {f"l{i}": leaf() for i in range(30)}
    own: dict[str, Any] | None = None
    sync = Sync(ranks, (lambda: own) if seed % 2 else None)
    for _ in range(12):
        action = rng.randrange(5)
        if action == 0:
            state[f"l{rng.randrange(30)}"] = leaf()
        elif action == 1:
            for value in state.values():
                if isinstance(value, torch.Tensor) and value.is_floating_point():
                    value.data.add_(1.0)
        elif action == 2:
            state = dict(reversed(state.items()))
        elif action == 3:
            name = rng.choice(list(state))
            if isinstance(state[name], torch.Tensor):
                state[name] = state[name].detach().clone()
        if own is None or action in (0, 2) or rng.random() < 0.2:
            own = {
                name: torch.zeros_like(value) if isinstance(value, torch.Tensor) else "old"
                for name, value in state.items()
            }
        received = sync.move(state)
        for name, value in state.items():
            if isinstance(value, torch.Tensor):
                assert torch.equal(received[name], value), name
            else:
                assert received[name] == value, name


def test_a_state_is_freed_without_a_collection_of_garbage(ranks: Ranks) -> None:
    """Reference cycles would keep the memory of a large state until the collector runs."""
    own, state = many(-1.0, 50), many(1.0, 50)
    sync = Sync(ranks, lambda: own)
    gc.collect()
    gc.disable()
    try:
        for _ in range(2):
            sync.move(state)
        watched = [weakref.ref(state["model"]["w3"]), weakref.ref(own["model"]["w3"])]
        own, state = {}, {}
        assert [ref() for ref in watched] == [None, None]
    finally:
        gc.enable()


@pytest.mark.parametrize("in_place", [False, True])
def test_what_is_done_to_one_result_does_not_show_in_the_next(ranks: Ranks, in_place: bool) -> None:
    """``load_state_dict(assign=True)`` writes into ``_metadata``, for example."""

    def made(value: float) -> OrderedDict[str, Any]:
        state = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3)).state_dict()
        for tensor in state.values():
            tensor.fill_(value)
        state["nested"] = {"list": [1, 2], "tensor": torch.full((2,), value)}
        return cast("OrderedDict[str, Any]", state)

    own = made(-1.0)
    sync = Sync(ranks, (lambda: own) if in_place else None)
    for step in range(3):
        received = sync.move(made(float(step)))
        assert_exact(made(float(step)), received)
        received._metadata[""]["assign_to_params_buffers"] = True
        received._metadata.clear()
        received["nested"]["list"].append(3)
        received["nested"]["new"] = 1
    assert "plan" in sync.reused[1]
