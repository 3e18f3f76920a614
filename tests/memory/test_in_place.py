"""Receiving into the receiver's own tensors: the right values, nothing else touched, or nothing at all."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

import transfuse
from moves import CPU, TIMEOUT, Pair, pair
from transfuse._plan import match as matching
from transfuse.testing.exact import assert_exact, differences

pytestmark = pytest.mark.usefixtures("either_route")


@pytest.fixture(scope="module")
def two() -> Iterator[Pair]:
    with pair() as ranks:
        yield ranks


def test_other_strides_and_offset_get_the_right_values_and_no_neighbour_changes(two: Pair) -> None:
    state = {"w": torch.randn(6, 5), "big": torch.randn(700, 3000)}
    guard = torch.full((40, 40), -7.0)
    wide = torch.full((3001, 1500), -7.0)
    target = {"w": guard[3:13:2, 5:11].t(), "big": wide[:3000, 1:1401:2].t()}
    before = {"w": guard.clone(), "big": wide.clone()}
    arrived = two.move(state, target)
    assert_exact(state, arrived, in_place=True)
    before["w"][3:13:2, 5:11] = state["w"].t()
    before["big"][:3000, 1:1401:2] = state["big"].t()
    assert torch.equal(guard, before["w"])
    assert torch.equal(wide, before["big"])


def test_all_mismatches_in_one_error_before_a_byte_is_written(two: Pair) -> None:
    state: dict[str, Any] = {
        "fine": torch.ones(3),
        "shape": torch.ones(3),
        "dtype": torch.ones(3),
        "kind": torch.ones(3),
        "value": 5,
        "tree": {"a": torch.ones(1)},
        "sparse": torch.eye(2).to_sparse(),
    }
    target: dict[str, Any] = {
        "fine": torch.zeros(3),
        "shape": torch.zeros(4),
        "dtype": torch.zeros(3, dtype=torch.int32),
        "kind": 3,
        "value": torch.zeros(1),
        "tree": [torch.zeros(1)],
        "sparse": torch.eye(2),
    }
    sent, received = two.errors(state, target)
    assert isinstance(received, transfuse.TargetMismatch)
    for name in ("shape", "dtype", "kind", "value", "tree", "sparse"):
        assert any(line.startswith(f"['{name}']") for line in received.mismatches), received
    assert len(received.mismatches) == 6
    assert "source (3,), target (4,)" in str(received)
    assert torch.equal(target["fine"], torch.zeros(3))
    assert received.torn == ()
    assert isinstance(sent, transfuse.SendFailed)
    assert "['shape']" in str(sent.causes[1])


def test_missing_leaves_arrive_fresh_and_extra_leaves_stay(two: Pair) -> None:
    state: dict[str, Any] = {
        "a": torch.ones(2),
        "new": torch.full((2,), 3.0),
        "list": [torch.ones(1), torch.ones(1)],
        "n": 1,
    }
    extra = torch.full((2,), 9.0)
    target: Any = OrderedDict(list=[torch.zeros(1)], a=torch.zeros(2), extra=extra, n=0, deep={"x": extra})
    arrived = two.move(state, target, strict=False)
    assert arrived["a"] is target["a"]
    assert torch.equal(target["a"], torch.ones(2))
    assert torch.equal(arrived["new"], state["new"])
    assert arrived["extra"] is extra
    assert arrived["deep"]["x"] is extra
    assert torch.equal(extra, torch.full((2,), 9.0))
    assert arrived["n"] == 1
    assert target["n"] == 0, "the callback's containers are not mutated"
    assert "new" not in target
    assert len(arrived["list"]) == 2
    assert arrived["list"][0] is target["list"][0]
    assert type(arrived) is dict
    longer: dict[str, Any] = {
        "a": torch.zeros(2),
        "list": [torch.zeros(1), torch.zeros(1), torch.zeros(1)],
        "new": torch.zeros(2),
    }
    assert len(two.move(state, longer, strict=False)["list"]) == 2, "the result is the source's, not a mix of both"
    assert [tensor.item() for tensor in longer["list"]] == [1, 1, 0]


def test_extra_leaves_are_an_error_unless_the_caller_says_otherwise(two: Pair) -> None:
    state: dict[str, Any] = {"a": torch.ones(2), "new": torch.ones(2), "losses": [1.0]}
    target: dict[str, Any] = {"a": torch.zeros(2), "deep": {"x": torch.zeros(2), "n": 1}, "losses": [1.0, 2.0]}
    _, received = two.errors(state, target)
    assert isinstance(received, transfuse.TargetMismatch)
    assert received.mismatches == ("['deep']['x']: only in the target", "['deep']['n']: only in the target")
    assert "strict=False" in str(received)
    assert not target["a"].any()
    del target["deep"]
    assert two.move(state, target)["losses"] == [1.0]


def test_strict_makes_either_an_error(two: Pair) -> None:
    state = {"a": torch.ones(2), "new": torch.ones(2)}
    target = {"a": torch.zeros(2), "extra": torch.zeros(2)}
    _, received = two.errors(state, target, strict=True)
    assert isinstance(received, transfuse.TargetMismatch)
    assert received.mismatches == ("['new']: missing in the target", "['extra']: only in the target")
    assert torch.equal(target["a"], torch.zeros(2))


@pytest.mark.parametrize("prefix", ["module.", "_orig_mod.", "module._orig_mod.", "model.decoder."])
@pytest.mark.parametrize("side", ["target", "source"])
def test_no_match_at_all_names_the_likely_prefix(two: Pair, prefix: str, side: str) -> None:
    plain = {"fc.weight": torch.ones(2), "fc.bias": torch.ones(1)}
    prefixed = {prefix + name: torch.zeros_like(tensor) for name, tensor in plain.items()}
    state, target = (plain, prefixed) if side == "target" else (prefixed, plain)
    _, received = two.errors(state, target)
    assert isinstance(received, transfuse.TargetMismatch)
    assert repr(prefix) in str(received)
    assert f"the {side}'s names" in str(received)


def _nan() -> float:
    """One that is the same object as no other."""
    return float("nan")


@pytest.mark.parametrize(
    "key",
    [_nan, lambda: complex(1, _nan()), lambda: ("a", _nan()), lambda: ("a", (1, _nan()))],
    ids=["float", "complex", "tuple", "deep"],
)
def test_nan_is_matched_by_nan(two: Pair, key: Callable[[], Any]) -> None:
    """It equals nothing, not even itself. Of two in one dict the first meets the first."""
    first, second = torch.randn(3), torch.randn(4)
    target = {"x": {key(): torch.zeros(3), 1.0: torch.zeros(2), key(): torch.zeros(4)}}
    state = {"x": {key(): first, key(): second, 1.0: torch.ones(2)}}
    arrived = two.move(state, target, strict=True)
    one, plain, other = target["x"].values()
    assert torch.equal(one, first)
    assert torch.equal(other, second)
    assert torch.equal(plain, torch.ones(2))
    assert {id(leaf) for leaf in arrived["x"].values()} == {id(one), id(plain), id(other)}
    fresh = two.move(state)["x"]
    assert [leaf.tolist() for leaf in fresh.values()] == [leaf.tolist() for leaf in state["x"].values()]
    # One that only the target has stays.
    longer = {"x": {key(): torch.zeros(3), key(): torch.full((1,), 7.0)}}
    kept = two.move({"x": {key(): first}}, longer, strict=False)["x"]
    assert [leaf.tolist() for leaf in kept.values()] == [first.tolist(), [7.0]]
    _, received = two.errors({"x": {key(): first}}, {"x": {key(): torch.zeros(3), key(): torch.ones(1)}}, strict=True)
    assert "only in the target" in str(received)


@pytest.mark.parametrize("lazy", [nn.UninitializedParameter, nn.UninitializedBuffer])
def test_a_lazy_target_wants_a_forward_pass(two: Pair, lazy: type[Any]) -> None:
    _, received = two.errors({"w": torch.ones(3), "v": torch.ones(3)}, {"w": torch.zeros(3), "v": lazy()})
    expected = (
        f"['v']: the target cannot be filled: an {lazy.__name__} of a lazy module has no shape yet; run a forward"
    )
    assert expected in str(received)


def test_a_meta_target_is_told_what_to_do(two: Pair) -> None:
    _, received = two.errors({"w": torch.ones(3)}, {"w": torch.empty(3, device="meta")})
    assert (
        "['w']: the target cannot be filled: a meta tensor has no data; materialize it first, for example with "
        'to_empty(device="cpu")'
    ) in str(received)


def test_an_empty_target_is_an_error(two: Pair) -> None:
    _, received = two.errors({"w": torch.ones(1)}, {})
    assert "no tensors" in str(received)


def test_aliased_targets_are_handled_once(two: Pair) -> None:
    weight = torch.randn(300, 40)
    state = {"embed": weight, "head": weight, "bias": torch.randn(4)}
    own = torch.zeros(300, 40)
    target = {"embed": own, "head": own, "bias": torch.zeros(4)}
    arrived = two.move(state, target)
    assert arrived["embed"] is arrived["head"] is own
    assert torch.equal(own, weight)
    sent, _ = two.outcomes(state, target)
    assert sent.get().report.bytes == weight.nbytes + 16


def test_a_tied_source_fills_untied_targets(two: Pair) -> None:
    weight = torch.randn(30, 4)
    target = {"embed": torch.zeros(30, 4), "head": torch.zeros(30, 4), "t": torch.zeros(4, 30)}
    arrived = two.move({"embed": weight, "head": weight, "t": weight.t()}, target)
    assert torch.equal(arrived["embed"], weight)
    assert torch.equal(arrived["head"], weight)
    assert torch.equal(arrived["t"], weight.t())


def test_overlapping_views_into_any_targets(two: Pair) -> None:
    base = torch.arange(100.0)
    state = {"all": base, "low": base[:60], "high": base[40:], "every": base[::3], "pairs": base.view(50, 2).t()}
    own = torch.zeros(100)
    alike = {"all": own, "low": own[:60], "high": own[40:], "every": own[::3], "pairs": own.view(50, 2).t()}
    assert_exact(state, two.move(state, alike), in_place=True)
    sent, _ = two.outcomes(state, alike)
    assert sent.get().report.bytes == 400, "targets that alias as the source does get every byte once"
    apart = {name: torch.zeros(t.shape) for name, t in state.items()}
    assert_exact(state, two.move(state, apart), in_place=True)


def test_a_tied_leaf_that_the_target_lacks_is_tied_to_the_target(two: Pair) -> None:
    weight = torch.randn(5, 4)
    own = torch.zeros(5, 4)
    arrived = two.move({"embed": weight, "head": weight}, {"embed": own})
    assert torch.equal(own, weight)
    assert arrived["head"].data_ptr() == own.data_ptr()
    _, received = two.errors({"embed": weight, "head": weight[1:3]}, {"embed": torch.zeros(4, 5).t()})
    assert "['head']" in str(received)
    assert "give it a target too" in str(received)
    bucket = torch.arange(10.0)
    arrived = two.move({"a": bucket[:4], "b": bucket[4:]}, {"a": torch.zeros(4)})
    assert torch.equal(arrived["b"], bucket[4:])


@pytest.mark.parametrize("case", ["tied", "overlapping", "expanded", "self-overlapping", "same tensor"])
def test_a_target_element_that_two_source_elements_would_hit_is_refused(two: Pair, case: str) -> None:
    state = {"a": torch.randn(4, 4), "b": torch.randn(4, 4)}
    own = torch.zeros(60)
    target = {
        "tied": {"a": own[:16].view(4, 4), "b": own[:16].view(4, 4)},
        "same tensor": {"a": (same := torch.zeros(4, 4)), "b": same},
        "overlapping": {"a": own[:16].view(4, 4), "b": own[10:26].view(4, 4)},
        "expanded": {"a": torch.zeros(4, 1).expand(4, 4), "b": torch.zeros(4, 4)},
        "self-overlapping": {"a": own.as_strided((4, 4), (2, 1)), "b": own[40:56].view(4, 4)},
    }[case]
    sent, received = two.errors(state, target)
    assert isinstance(received, transfuse.TargetMismatch)
    assert "['a']" in str(received)
    assert not own.any()
    assert isinstance(sent, transfuse.SendFailed)


def test_interleaved_targets_are_fine(two: Pair) -> None:
    state = {"q": torch.randn(8, 3), "k": torch.randn(8, 5)}
    fused = torch.zeros(8, 8)
    assert_exact(state, two.move(state, {"q": fused[:, :3], "k": fused[:, 3:]}), in_place=True)
    assert torch.equal(fused, torch.cat([state["q"], state["k"]], 1))


def test_versions_of_written_targets_are_bumped(two: Pair) -> None:
    target = {"w": nn.Parameter(torch.zeros(3)), "spread": torch.zeros(6)[::2], "other": torch.zeros(2)}
    before = {name: t._version for name, t in target.items()}
    x: Any = (target["w"] * target["w"]).sum()
    two.move({"w": torch.ones(3), "spread": torch.ones(3)}, target, strict=False)
    assert target["w"]._version > before["w"]
    assert target["spread"]._version > before["spread"]
    assert target["other"]._version == before["other"]
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        x.backward()


def test_the_target_keeps_its_own_flags(two: Pair) -> None:
    target = {"p": nn.Parameter(torch.zeros(3)), "t": torch.zeros(3)}
    arrived = two.move({"p": torch.ones(3), "t": nn.Parameter(torch.ones(3))}, target)
    assert type(arrived["p"]) is nn.Parameter
    assert arrived["p"].requires_grad
    assert not arrived["t"].requires_grad


def test_conj_and_neg_bits_of_source_and_target_may_differ(two: Pair) -> None:
    z = torch.randn(40, 3, dtype=torch.complex64)
    plain, flipped = (lambda t: t), (lambda t: t.conj())
    for mine in (plain, flipped, torch._neg_view):
        for theirs in (plain, flipped, torch._neg_view):
            state = {"z": mine(z)}
            own = theirs(torch.zeros(3, 40, dtype=torch.complex64).t())
            arrived = two.move(state, {"z": own})
            assert (
                differences(
                    state["z"].resolve_conj().resolve_neg(), arrived["z"].resolve_conj().resolve_neg(), in_place=True
                )
                == []
            )


def test_atomic_lands_aside_and_applies(two: Pair) -> None:
    weight = torch.randn(50, 40)
    state = {"w": weight, "t": weight.t(), "s": torch.eye(3).to_sparse(), "new": torch.ones(2), "n": 3}
    target: dict[str, Any] = {
        "w": torch.zeros(40, 50).t(),
        "t": torch.zeros(40, 50),
        "s": torch.eye(3).to_sparse() * 2,
        "n": 0,
    }
    target["s"] = target["s"].coalesce()
    arrived = two.move(state, target, atomic=True)
    assert_exact(state, arrived, in_place=True)
    assert arrived["w"] is target["w"]
    assert target["w"]._version > 0


def module() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))


@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated")
def test_the_state_of_a_compiled_module(two: Pair) -> None:
    source: Any = torch.compile(module())
    target: Any = torch.compile(module())
    with torch.no_grad():
        for parameter in target.parameters():
            parameter.zero_()
    assert all(name.startswith("_orig_mod.") for name in source.state_dict())
    two.move(source.state_dict(), target.state_dict())
    for one, other in zip(source.parameters(), target.parameters(), strict=True):
        assert torch.equal(one, other)
    _, received = two.errors(module().state_dict(), target.state_dict())
    assert "'_orig_mod.'" in str(received)


def test_a_failing_callback_is_refused_at_both_ends(two: Pair) -> None:
    def fail() -> object:
        raise RuntimeError("model not built yet")

    sent, received = two.errors({"w": torch.ones(1)}, callback=fail)
    assert isinstance(received, RuntimeError)
    assert "model not built yet" in str(sent)


def test_inference_tensors_as_targets_and_sources(two: Pair) -> None:
    with torch.inference_mode():
        state, target = {"w": torch.randn(5)}, {"w": torch.zeros(5)}
    two.move(state, target)
    assert torch.equal(target["w"], state["w"])


def test_calls_under_inference_mode(two: Pair) -> None:
    def work(rank: int, pg: Any) -> Any:
        with torch.inference_mode():
            transport = transfuse.PGTransport(pg, TIMEOUT, CPU)
            return transport.send_checkpoint([1], {"w": torch.ones(3)}) if rank == 0 else transport.recv_checkpoint(0)

    _, arrived = two.ranks.run(work)
    assert torch.equal(arrived["w"], torch.ones(3))


def test_targets_without_an_address_are_never_taken_for_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory of an accelerator has no address here: tied weights still reach every target that is not tied."""
    add = matching._Targets.add

    def hidden(self: Any, *args: Any) -> None:
        add(self, *args)
        self.address[:] = 0

    monkeypatch.setattr(matching._Targets, "add", hidden)
    weight = torch.arange(8.0)
    own = {"a": torch.zeros(8), "b": torch.zeros(8)}
    with pair() as two:
        two.move({"a": weight, "b": weight}, own)
    assert torch.equal(own["a"], weight)
    assert torch.equal(own["b"], weight)
