"""Conformance cases for round trips: a state arrives as it was sent, fresh and in place, once and again."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from transfuse.testing._group import CountingGroup
from transfuse.testing._stage import Cases, Stage, expect, expect_failed, expect_name
from transfuse.testing._states import (
    DTYPES,
    LAYOUTS,
    ROLES,
    SPARSE,
    TREES,
    VALUES,
    bits,
    jagged,
    numbers,
    training,
)
from transfuse.testing.exact import assert_exact, differences

ROUND_TRIPS = Cases()
_case = ROUND_TRIPS.case

# Fresh


def _fresh(name: str, about: str, make: Callable[[], Any]) -> None:
    _case(f"fresh/{name}", about)(lambda stage: stage.fresh(make))


def _of(dtypes: tuple[torch.dtype, ...], seed: int = 0) -> list[dict[str, Tensor]]:
    return [{"a": bits(dtype, 5, 3, seed=seed), "0-dim": bits(dtype, seed=seed)} for dtype in dtypes]


for _name, _dtypes in DTYPES.items():
    _fresh(f"dtype/{_name}", "Every bit arrives as it was.", functools.partial(_of, _dtypes))
for _name, _make in LAYOUTS.items():
    _fresh(f"layout/{_name}", "Values, strides and flags of the view arrive.", _make)
for _name, _make in ROLES.items():
    _fresh(f"role/{_name}", "requires_grad, Parameter and Buffer are kept.", _make)
for _name, _make in SPARSE.items():
    _fresh(f"sparse/{_name}", "Sparse tensors arrive with their indices.", _make)
_fresh("jagged", "Nested tensors of jagged layout arrive.", lambda: {"n": jagged(3, 1, 2), "g": jagged(2, 2)})
for _name, _make in TREES.items():
    _fresh(f"tree/{_name}", "The tree arrives with its types, keys and order.", _make)
for _name, _make in VALUES.items():
    _fresh(f"value/{_name}", "Values arrive with their types.", _make)
_fresh("training-state", "The state of model, optimizers, schedulers and generator arrives.", training)


def _large(seed: int = 0) -> dict[str, Tensor]:
    return {"a": numbers(9 << 20, seed=seed), "b": numbers(1024, 1000, seed=seed).t(), "c": numbers(3, seed=seed)}


def _small(seed: int = 0) -> dict[str, Tensor]:
    base = numbers(310_000, seed=seed)
    return {f"layer.{i}.weight": base[100 * i : 101 * i].clone() for i in range(3000)}


_fresh("large", "40 MiB arrive, more than is under way at one time.", _large)
_fresh("many-small", "Thousands of small tensors arrive.", _small)


@_case("fresh/tied", "Leaves that share a storage share one again.")
def _tied(stage: Stage) -> None:
    weight = numbers(6, 4)
    stage.fresh(lambda: {"embed": weight, "head": weight, "t": weight.t(), "alone": numbers(3)})


@_case("fresh/overlapping-views", "Views that overlap overlap again.")
def _overlapping(stage: Stage) -> None:
    base = numbers(50)
    stage.fresh(lambda: {"low": base[:30], "high": base[20:], "int": base[10:20].view(torch.int32)})


def _bytes_sent(stage: Stage, state: Any) -> int:
    with stage.ranks(2) as ranks:
        arrived = stage.all_well(ranks, {0: stage.source(state), 1: stage.receiver()})[1]
        # Compare only the values: other cases compare the rest.
        assert_exact(state, arrived, in_place=True)
        return ranks.groups[0].sent


@_case("fresh/view-sends-what-it-shows", "A view costs what it shows, not the storage behind it.")
def _view_bytes(stage: Stage) -> None:
    base = numbers(1 << 20)
    sent = _bytes_sent(stage, {"one": base[500_000:500_001], "few": base[10:20:2]})
    expect(sent < 64 << 10, f"{sent} bytes were sent for 24 bytes of two views")


@_case("fresh/tied-sent-once", "A storage that several leaves share is sent once.")
def _tied_bytes(stage: Stage) -> None:
    weight = numbers(1 << 18)
    sent = _bytes_sent(stage, {"embed": weight, "head": weight})
    expect(sent < 1.5 * weight.nbytes, f"{sent} bytes were sent for one storage of {weight.nbytes}")


@_case("fresh/source-untouched", "To send a state does not change it.")
def _source_untouched(stage: Stage) -> None:
    state = training()
    before = copy.deepcopy(state)
    versions = [parameter._version for parameter in state["model"].values()]
    stage.move(state)
    assert_exact(before, state)
    expect(versions == [p._version for p in state["model"].values()], "the source's version counters moved")


# In place


def _into_alike(stage: Stage, dtypes: tuple[torch.dtype, ...]) -> None:
    stage.land(_of(dtypes), _of(dtypes, seed=1))


def _into_zeros(stage: Stage, make: Callable[[], Tensor]) -> None:
    source = make()
    stage.land({"w": source}, {"w": torch.zeros(source.shape, dtype=source.dtype)})


def _into_layout(stage: Stage, make: Callable[[], Tensor]) -> None:
    target = make().zero_()
    stage.land({"w": numbers(*target.shape, seed=1).to(target.dtype)}, {"w": target})


for _name, _dtypes in DTYPES.items():
    _body = functools.partial(_into_alike, dtypes=_dtypes)
    _case(f"in-place/dtype/{_name}", "Every bit arrives in the target.")(_body)
for _name, _make in LAYOUTS.items():
    _body = functools.partial(_into_zeros, make=_make)
    _case(f"in-place/from/{_name}", "A view of any layout lands in a plain target.")(_body)
for _name, _make in LAYOUTS.items():
    # Targets whose elements share memory have a case of their own.
    if _name not in ("contiguous", "expanded", "overlapping"):
        _body = functools.partial(_into_layout, make=_make)
        _case(f"in-place/into/{_name}", "A plain source lands in a target of any layout.")(_body)


@_case("in-place/strides", "Source and target may each have strides of their own.")
def _strides(stage: Stage) -> None:
    stage.land({"w": numbers(6, 5).t()}, {"w": torch.zeros(10, 12)[::2, 1::2]})


@_case("in-place/guard", "Memory beside a target's own elements is not touched.")
def _guard(stage: Stage) -> None:
    whole, around = numbers(12, 10), torch.full((12, 10), -7.0)
    source, target, expected = (tensor[2:10:2, 5:8] for tensor in (whole, around, around.clone()))
    expected.copy_(source)
    stage.move({"w": source}, {"w": target})
    assert_exact(expected._base, around)


@_case("in-place/source-parameter", "A Parameter's values land in a plain tensor, which stays one.")
def _source_parameter(stage: Stage) -> None:
    target = {"w": torch.zeros(3)}
    arrived = stage.land({"w": nn.Parameter(numbers(3))}, target)
    expect(type(target["w"]) is Tensor and not arrived["w"].requires_grad, "the plain target did not stay plain")


@_case("in-place/target-parameter", "A Parameter takes values and stays the receiver's own Parameter.")
def _target_parameter(stage: Stage) -> None:
    arrived = stage.land({"w": numbers(3)}, {"w": nn.Parameter(torch.zeros(3))})
    expect(type(arrived["w"]) is nn.Parameter and arrived["w"].requires_grad, "the Parameter did not stay one")


@_case("in-place/returns-own-tensors", "What is returned holds the receiver's own tensors, not others like them.")
def _own_tensors(stage: Stage) -> None:
    own = torch.zeros(3), torch.zeros(2, 2)
    arrived = stage.land({"a": numbers(3), "b": [numbers(2, 2)]}, {"a": own[0], "b": [own[1]]})
    expect(arrived["a"] is own[0] and arrived["b"][0] is own[1], "other tensor objects came back")


def _mismatch(stage: Stage, source: Any, target: Tensor) -> None:
    own = {"fine": torch.zeros(3), "culprit": target}
    before = copy.deepcopy(own)
    with stage.ranks(2) as ranks:
        jobs = {0: stage.source({"fine": numbers(3), "culprit": source}), 1: stage.receiver(own)}
        error = expect_failed(ranks.run(jobs, stage.limit, only=1)[1])
    expect(not differences(before, own), "the targets were written all the same")
    expect_name(error, "culprit")


@_case("in-place/dtype-mismatch", "A target of another dtype is refused by name, with nothing written.")
def _dtype_mismatch(stage: Stage) -> None:
    _mismatch(stage, numbers(4), torch.zeros(4, dtype=torch.int32))


@_case("in-place/shape-mismatch", "A target of another shape is refused by name, with nothing written.")
def _shape_mismatch(stage: Stage) -> None:
    _mismatch(stage, numbers(2, 3), torch.zeros(3, 2))


@_case("in-place/size-mismatch", "A target of another size is refused by name, with nothing written.")
def _size_mismatch(stage: Stage) -> None:
    _mismatch(stage, numbers(5), torch.zeros(4))


@_case("in-place/shared-element", "A target element that would get two values is refused by name.")
def _shared_element(stage: Stage) -> None:
    _mismatch(stage, numbers(4, 4), torch.zeros(4, 1).expand(4, 4))


@_case("in-place/missing-leaf", "A leaf that the target lacks arrives fresh.")
def _missing(stage: Stage) -> None:
    state = {"a": numbers(3), "new": [numbers(2), 7]}
    target = {"a": torch.zeros(3)}
    assert_exact(state, stage.move(state, target), in_place=True)
    assert_exact(state["a"], target["a"], in_place=True)


@_case(
    "in-place/extra-leaf", "A leaf that the source lacks keeps its values, or an error names it and nothing is written."
)
def _extra(stage: Stage) -> None:
    target = {"extra": numbers(4, seed=5), "a": torch.zeros(3)}
    arrived = numbers(3)
    try:
        stage.move({"a": numbers(3)}, target)
    except Exception as error:
        expect_name(error, "extra")
        arrived = torch.zeros(3)
    assert_exact({"extra": numbers(4, seed=5), "a": arrived}, target, in_place=True)


@_case("in-place/order", "Leaves find their targets by name, in whatever order either end has them.")
def _order(stage: Stage) -> None:
    target = {"c": torch.zeros(3), "a": torch.zeros(3), "b": torch.zeros(3)}
    state = {name: numbers(3, seed=seed) for seed, name in enumerate("abc")}
    stage.move(state, target)
    for name, tensor in state.items():
        assert_exact(tensor, target[name], in_place=True)


@_case("in-place/tied-into-tied", "Tied leaves land in tied targets.")
def _tied_into_tied(stage: Stage) -> None:
    weight, own = numbers(5, 4), torch.zeros(5, 4)
    stage.land({"embed": weight, "head": weight}, {"embed": own, "head": own})


@_case("in-place/tied-into-untied", "Tied leaves land in targets that are not tied, in each of them.")
def _tied_into_untied(stage: Stage) -> None:
    weight = numbers(5, 4)
    stage.land({"embed": weight, "head": weight}, {"embed": torch.zeros(5, 4), "head": torch.zeros(5, 4)})


@_case("in-place/untied-into-tied", "Different values for tied targets are refused: one of them would be lost.")
def _untied_into_tied(stage: Stage) -> None:
    own = torch.zeros(4)
    with stage.ranks(2) as ranks:
        jobs = {0: stage.source({"a": numbers(4), "b": numbers(4, seed=1)}), 1: stage.receiver({"a": own, "b": own})}
        expect_failed(ranks.run(jobs, stage.limit, only=1)[1])
    expect(not own.any(), "the target was written all the same")


@_case("in-place/containers", "The callback's containers are not mutated; values are in what is returned.")
def _containers(stage: Stage) -> None:
    own, items = torch.zeros(3), [torch.zeros(2)]
    target = {"a": own, "step": 0, "list": items}
    arrived = stage.move({"a": numbers(3), "step": 7, "list": [numbers(2), 8], "new": 1}, target)
    came = arrived["step"] == 7 and arrived["new"] == 1 and arrived["list"][1] == 8
    expect(came, f"the source's values did not come back: {arrived}")
    same = list(target) == ["a", "step", "list"] and target["step"] == 0 and target["a"] is own and len(items) == 1
    expect(same, f"the callback's containers were mutated: {target}")


@_case("in-place/versions", "Autograd notices that a target was written: its version counter moves.")
def _versions(stage: Stage) -> None:
    target = {"a": torch.zeros(3), "b": torch.zeros(4)}
    before = {name: tensor._version for name, tensor in target.items()}
    stage.move({"a": numbers(3), "b": numbers(4)}, target)
    still = [name for name, tensor in target.items() if tensor._version == before[name]]
    expect(not still, f"version counters of {still} did not move")


@_case("in-place/sparse", "A sparse target takes values and indices.")
def _sparse(stage: Stage) -> None:
    source, target = SPARSE["coo"](), SPARSE["coo"]()
    target._values().zero_()
    stage.land({"s": source}, {"s": target})


@_case("in-place/training-state", "The state of a training run lands in that of another.")
def _training(stage: Stage) -> None:
    state, target = training(), training(seed=10)
    assert_exact(state, stage.move(state, target), in_place=True)
    assert_exact(state["model"], target["model"], in_place=True)
    assert_exact(state["AdamW"]["optimizer"]["state"], target["AdamW"]["optimizer"]["state"], in_place=True)


@_case("in-place/large", "40 MiB land in their targets.")
def _large_in_place(stage: Stage) -> None:
    stage.land(_large(), _large(seed=1))


@_case("in-place/many-small", "Thousands of small tensors land in their targets.")
def _small_in_place(stage: Stage) -> None:
    stage.land(_small(), _small(seed=1))


# One transfer after another


@_case("reuse/in-sequence", "The same transports serve one transfer after another.")
def _in_sequence(stage: Stage) -> None:
    states = [{"w": numbers(1000, seed=i), "i": i} for i in range(4)]

    def send(group: CountingGroup) -> None:
        transport = stage.transport(group)
        for state in states:
            transport.send_checkpoint([1], state)

    def receive(group: CountingGroup) -> list[Any]:
        transport = stage.transport(group)
        return [transport.recv_checkpoint(0) for _ in states]

    with stage.ranks(2) as ranks:
        assert_exact(states, stage.all_well(ranks, {0: send, 1: receive})[1])


@_case("reuse/both-directions", "Two ranks may send to each other in turn.")
def _both_directions(stage: Stage) -> None:
    states = [{"w": numbers(1000, seed=i), "i": i} for i in range(2)]

    def talk(group: CountingGroup) -> Any:
        transport, rank = stage.transport(group), group.rank()
        for source in range(2):
            if source == rank:
                transport.send_checkpoint([1 - rank], states[rank])
            else:
                arrived = transport.recv_checkpoint(source)
        return arrived

    with stage.ranks(2) as ranks:
        arrived = stage.all_well(ranks, {0: talk, 1: talk})
    assert_exact(states, [arrived[1], arrived[0]])


@_case("reuse/write-after-return", "The source may change its tensors as soon as the send returns.")
def _write_after_return(stage: Stage) -> None:
    state = {f"w{i}": numbers(1 << 18, seed=i) for i in range(8)}
    expected = copy.deepcopy(state)

    def send(group: CountingGroup) -> None:
        stage.source(state)(group)
        for tensor in state.values():
            tensor.zero_()

    with stage.ranks(2) as ranks:
        assert_exact(expected, stage.all_well(ranks, {0: send, 1: stage.receiver()})[1])


@_case("reuse/after-refusal", "After a transfer that was refused the same transports still serve.")
def _after_refusal(stage: Stage) -> None:
    state = {"w": numbers(1000)}

    def twice(action: Callable[[int], Any]) -> Any:
        try:
            action(0)
        except Exception:
            return action(1)
        raise AssertionError("the first transfer was not refused")

    def send(group: CountingGroup) -> None:
        transport = stage.transport(group)
        twice(lambda turn: transport.send_checkpoint([1], state if turn else {"culprit": lambda: 3}))

    def receive(group: CountingGroup) -> Any:
        transport = stage.transport(group)
        return twice(lambda _: transport.recv_checkpoint(0))

    with stage.ranks(2) as ranks:
        assert_exact(state, stage.all_well(ranks, {0: send, 1: receive})[1])
