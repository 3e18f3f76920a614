"""One way to name a state: what travels, what lands, who takes the rest, and who is told of changes."""

from __future__ import annotations

import copy
import io
import pickle
import random
from collections import OrderedDict
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import nn

import transfuse
from keeping import Home, home  # noqa: F401
from serving import DEADLINE, Halt
from transfuse._job.state import State
from transfuse.testing.ranks import Ranks


class Counter:
    """An object with a state of its own, which says how often it was given one."""

    def __init__(self, value: int) -> None:
        self.value, self.loaded = value, list[Any]()

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.loaded.append(state)
        self.value = state["value"]


class Watched(nn.Linear):
    """A module that counts what it is asked to load."""

    loads = 0

    def load_state_dict(self, *given: Any, **named: Any) -> Any:
        self.loads += 1
        return super().load_state_dict(*given, **named)


def trained(seed: int, steps: int, lr: float = 0.1) -> tuple[Watched, torch.optim.AdamW, Any]:
    torch.manual_seed(seed)
    model = Watched(3, 3)
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.ones(2, 3)).square().sum().backward()
        optimizer.step()
        scheduler.step()
    return model, optimizer, scheduler


def heal(*states: Any, **options: Any) -> list[Any]:
    """Rank 0 has something, the others have nothing."""
    with Ranks(len(states)) as ranks:
        return ranks.outcomes(
            lambda rank, pg: transfuse.heal(states[rank], step=None if rank else 7, group=pg, timeout=20, **options)
        )


def same(one: Any, other: Any) -> bool:
    """Whether two optimizers have the same moments."""
    moments = [[value for state in each.state.values() for value in state.values()] for each in (one, other)]
    return bool(moments[0]) and all(torch.equal(a, b) for a, b in zip(*moments, strict=True))


@pytest.fixture
def executor() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor() as executor:
        yield executor


# ------------------------------------------------------------------------------------------------------ what arrives


def test_objects_take_what_cannot_land_and_others_are_not_called() -> None:
    (model, optimizer, scheduler), (target, new, plan) = trained(0, 3), trained(1, 0)
    weights = dict(target.named_parameters())
    states = [
        {"model": m, "optimizer": o, "more": {"scheduler": s, "counter": c}, "epoch": e, "seen": seen}
        for m, o, s, c, e, seen in (
            (model, optimizer, scheduler, Counter(5), 2, [1, 2, 3]),
            (target, new, plan, Counter(5), 0, []),
        )
    ]
    seen: Any = states[1]["seen"]
    assert [outcome.get() for outcome in heal(*states)] == [7, 7]
    assert torch.equal(target.weight, model.weight)
    assert dict(target.named_parameters())["weight"] is weights["weight"], "in place"
    assert target.loads == 0, "everything of it landed in place"
    assert same(optimizer, new)
    assert new.param_groups[0]["lr"] == optimizer.param_groups[0]["lr"]
    assert plan.last_epoch == scheduler.last_epoch
    more: Any = states[1]["more"]
    assert more["counter"].loaded == [], "it had the same value"
    assert states[1]["epoch"] == 2
    assert states[1]["seen"] is seen
    assert seen == [1, 2, 3]


def test_each_object_is_given_what_arrived_once() -> None:
    outcomes = heal({"a": Counter(1), "b": [Counter(2)]}, state := {"a": Counter(0), "b": [Counter(2)]})
    assert [outcome.get() for outcome in outcomes] == [7, 7]
    counters: Any = state
    assert counters["a"].loaded == [{"value": 1}]
    assert counters["b"][0].loaded == []


def test_one_object_and_its_method() -> None:
    for name in ("object", "method"):
        model, target = trained(0, 1)[0], trained(1, 0)[0]
        states = (model, target) if name == "object" else (model.state_dict, target.state_dict)
        assert [outcome.get() for outcome in heal(*states)] == [7, 7]
        assert torch.equal(target.weight, model.weight)


def test_a_fresh_optimizer_runs_no_step_and_the_weights_stay_as_they_were() -> None:
    """``get_state_dict`` would run one, to have moments to load into."""
    model, optimizer, _ = trained(0, 0)
    before = model.weight.detach().clone()
    State({"model": model, "optimizer": optimizer}).tree()
    with transfuse.serve({"model": model, "optimizer": optimizer}) as server:
        target, new, _ = trained(1, 0)
        transfuse.fetch(server.address, {"model": target, "optimizer": new})
    assert torch.equal(model.weight, before)
    assert torch.equal(target.weight, before)
    assert not optimizer.state
    assert not new.state


class Copying(nn.Linear):
    """Its ``state_dict`` returns copies."""

    def state_dict(self, *given: Any, **named: Any) -> Any:
        return {name: tensor.clone() for name, tensor in super().state_dict(*given, **named).items()}


class Deaf(Copying):
    def load_state_dict(self, *_: Any, **__: Any) -> Any:
        return None


def test_an_object_that_returns_copies_is_given_what_landed_in_them() -> None:
    one, other = Copying(2, 2), Copying(2, 2)
    assert [outcome.get() for outcome in heal({"model": one}, {"model": other})] == [7, 7]
    assert torch.equal(one.weight, other.weight)


def test_an_object_that_does_not_take_its_copies_is_named() -> None:
    error = heal({"model": Copying(2, 2)}, {"model": Deaf(2, 2)})[1].error
    assert isinstance(error, transfuse.StateError)
    assert "2 leaves were not taken by load= or load_state_dict(): ['model']['weight'], ['model']['bias']" in str(error)


@pytest.mark.parametrize("extra", [{"ema": torch.ones(3)}, {"ema": 1}])
def test_what_nobody_takes_is_an_error_before_anything_is_written(extra: dict[str, Any]) -> None:
    target = {"w": torch.zeros(3)}
    outcomes = heal({"w": torch.ones(3), **extra}, target)
    assert not target["w"].any()
    for outcome in outcomes:
        assert isinstance(outcome.error, transfuse.StateError)
        assert "1 leaves cannot land in the state that was given, and no object in it takes them: ['ema']" in str(
            outcome.error
        )


def test_an_optimizer_s_state_dict_in_place_of_the_optimizer_is_an_error_that_says_so() -> None:
    """Its moments would land in a dict that nobody has."""
    jobs = [trained(rank, 1 - rank) for rank in range(2)]
    states = [{"model": model, "optimizer": optimizer.state_dict()} for model, optimizer, _ in jobs]
    error = heal(*states)[1].error
    assert "Give the objects themselves (the optimizer, not optimizer.state_dict())" in str(error)


def test_values_in_tuples_cannot_be_replaced() -> None:
    error = heal({"pair": (torch.ones(1), 1)}, {"pair": (torch.zeros(1), 0)})[1].error
    assert "cannot land in the state that was given, and no object in it takes them: ['pair'][1]" in str(error)


def test_an_object_that_is_there_twice_is_given_its_state_once() -> None:
    source, target = Counter(1), Counter(0)
    assert heal({"a": source, "b": [source]}, {"a": target, "b": [target]})[1].get() == 7
    assert target.loaded == [{"value": 1}]


def test_objects_whose_long_keys_begin_alike_are_told_apart() -> None:
    """A path shows only the beginning of a key."""
    keys = ["x" * 300 + end for end in "abc"]
    target = {key: Counter(value) for key, value in zip(keys, (0, 0, 1), strict=True)}
    assert heal({key: Counter(1) for key in keys}, target)[1].get() == 7
    assert [counter.value for counter in target.values()] == [1, 1, 1]
    models = [{key: Watched(2, 2) for key in keys} for _ in range(2)]
    assert heal(*models)[1].get() == 7
    assert all(torch.equal(models[0][key].weight, models[1][key].weight) for key in keys)
    assert [model.loads for model in models[1].values()] == [0, 0, 0], "no copies"


def test_a_list_with_fewer_objects_is_an_error_before_anything_is_written() -> None:
    states: list[dict[str, Any]] = [
        {"w": torch.ones(2), "many": [Counter(1)]},
        {"w": torch.zeros(2), "many": [Counter(0), Counter(0)]},
    ]
    error = heal(*states)[1].error
    assert isinstance(error, transfuse.TargetMismatch)
    assert "['many'][1]['value']: only in the target" in str(error)
    assert not states[1]["w"].any()
    assert not states[1]["many"][0].loaded
    with transfuse.serve(states[0]) as server, pytest.raises(transfuse.TargetMismatch, match="only in the target"):
        transfuse.fetch(server.address, states[1])
    assert heal(*states, strict=False)[1].get() == 7
    assert [counter.value for counter in states[1]["many"]] == [1, 0]


def test_an_object_that_refuses_its_state_is_named() -> None:
    jobs = [trained(rank, 1 - rank) for rank in range(2)]
    jobs[1][1].add_param_group({"params": [nn.Parameter(torch.ones(1))]})
    error = heal(*({"model": model, "optimizer": optimizer} for model, optimizer, _ in jobs))[1].error
    assert "['optimizer']: AdamW.load_state_dict() has raised ValueError: loaded state dict has" in str(error)


def test_milestones_of_a_scheduler_arrive_as_the_counter_they_are() -> None:
    plans = [torch.optim.lr_scheduler.MultiStepLR(trained(0, 0)[1], milestones) for milestones in ([1, 1, 5], [2])]
    assert heal({"plan": plans[0]}, {"plan": plans[1]}, strict=False)[1].get() == 7
    assert type(plans[1].milestones) is type(plans[0].milestones)
    assert plans[1].milestones[1] == 2


def test_no_random_number_of_the_job_is_drawn(home: Home) -> None:  # noqa: F811
    """A restored job would go on with other numbers than one that went on."""
    before = random.getstate()
    heal({"w": torch.ones(3, 3).t()}, {"w": torch.zeros(3, 3).t()})
    with transfuse.keep({"w": torch.ones(3, 3).t()}, run="random") as keep:
        keep.commit(1)
        keep.restore()
    assert random.getstate() == before


class Progress:
    """An object whose state has a step that a call has returned."""

    def __init__(self, step: int) -> None:
        self.step = step

    def state_dict(self) -> dict[str, Any]:
        return {"step": self.step, "seen": [{"best": self.step}]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.step = state["step"]


def test_a_step_that_was_returned_may_stand_in_the_state() -> None:
    """In a mapping, in what a callable or an object returns: it travels as the int that it is."""
    step = transfuse.Step(5)
    assert heal({"step": step}, state := {"step": 0})[1].get() == 7
    assert state == {"step": 5}
    assert type(state["step"]) is int
    loaded: list[Any] = []
    outcomes = heal(lambda: {"step": step}, lambda: {"step": 0}, load=loaded.append)
    assert [outcome.get() for outcome in outcomes] == [7, 7]
    assert loaded == [{"step": 5}]
    assert heal({"progress": Progress(step)}, {"progress": (progress := Progress(0))})[1].get() == 7
    assert progress.step == 5
    for served in ({"step": step}, lambda: {"step": step}, Progress(step)):
        with transfuse.serve(served) as server:
            found = transfuse.fetch(server.address).state["step"]
            assert (type(found), found) == (int, 5)


@pytest.mark.parametrize("given", ["callables", "objects"])
def test_a_step_that_was_restored_may_be_kept(home: Home, given: str) -> None:  # noqa: F811
    """As state and as rank state, again and again."""
    home.start("kept")
    for began in (0, 1, 2):
        mine, ranks = Progress(0), Progress(0)
        if given == "objects":
            keep = transfuse.keep({"progress": mine}, rank_state=ranks, run="kept")
        else:
            keep = transfuse.keep(
                mine.state_dict,
                rank_state=ranks.state_dict,
                load=mine.load_state_dict,
                load_rank_state=ranks.load_state_dict,
                run="kept",
            )
        step = keep.restore()
        assert (step or 0, mine.step, ranks.step) == (began, began * 10, began * 100)
        mine.step, ranks.step = transfuse.Step((began + 1) * 10), transfuse.Step((began + 1) * 100)
        report = keep.commit(began + 1)
        assert report is not None
        assert report.outcome == "committed"
        keep.detach()


def test_a_step_is_pickled_as_an_int() -> None:
    """So a file that ``torch.save`` has written needs no transfuse, and ``torch.load`` no option."""
    step = transfuse.Step(5)
    for copied in (pickle.loads(pickle.dumps(step)), copy.deepcopy({"step": step})["step"]):
        assert (type(copied), copied) == (int, 5)
    file = io.BytesIO()
    torch.save({"step": step}, file)
    file.seek(0)
    assert torch.load(file) == {"step": 5}


@pytest.mark.parametrize(
    ("wrong", "name"),
    [
        (None, "NoneType"),
        ("model", "str"),
        (b"model", "bytes"),
        (nn.Linear, "the class Linear"),
        (nn.Linear(1, 1).parameters(), "generator"),
    ],
)
def test_what_is_no_state(wrong: Any, name: str) -> None:
    with pytest.raises(TypeError, match=f"state takes a mapping of objects, tensors and values.* got {name}"):
        transfuse.State(wrong)
    with pytest.raises(TypeError, match="load= belongs to the State"):
        transfuse.heal(transfuse.State({}), step=1, load=print)


def test_a_tree_without_objects_is_sent_as_it_is() -> None:
    tree = OrderedDict(a=torch.ones(1), b=[1, (2, 3)])
    assert State(tree).tree() is tree


def test_fetch_fills_objects_and_says_the_step() -> None:
    model, optimizer, _ = trained(0, 2)
    with transfuse.serve({"model": model, "optimizer": optimizer}, step=2) as server:
        target, new, _ = trained(1, 0)
        fetched = transfuse.fetch(server.address, {"model": target, "optimizer": new})
        assert fetched.step == 2
        assert torch.equal(target.weight, model.weight)
        assert same(optimizer, new)
        alone = trained(2, 0)[0]
        transfuse.fetch(server.address, alone, entry="model")
        assert torch.equal(alone.weight, model.weight)


# ----------------------------------------------------------------------------------------------------- what is a rank's


def test_random_numbers_belong_to_the_rank_unless_told_otherwise() -> None:
    assert State({"rng": transfuse.RNG(), "w": 1}).tree() == {"w": 1}
    assert "rng" in State({"rng": transfuse.RNG(shared=True)}).tree()
    torch.manual_seed(3)
    expected = torch.rand(2)
    torch.manual_seed(3)
    kept = State({"a": {"rng": transfuse.RNG()}})
    states = kept.rank_tree()
    torch.rand(5)
    kept.load_rank_tree(states)
    assert torch.equal(torch.rand(2), expected)


@pytest.mark.parametrize(
    ("kept", "given"),
    [
        ({"epoch": 5, "more": {"seen": [1, 2]}}, {"epoch": 0, "more": {"seen": []}}),
        ({"late": 1}, {}),
        ([1, 2], []),
        ({"w": torch.ones(2), "more": [torch.ones(1)]}, {"w": torch.zeros(2), "more": [torch.zeros(1)]}),
    ],
)
def test_rank_state_of_plain_values_and_tensors_is_restored(home: Home, kept: Any, given: Any) -> None:  # noqa: F811
    with transfuse.keep({}, rank_state=kept, run="plain") as keep:
        keep.commit(1)
        keep.detach()
    with transfuse.keep({}, rank_state=given, run="plain") as keep:
        assert keep.restore() == 1
    assert repr(given) == repr(kept)


def test_objects_in_lists_of_the_rank_state_stay_and_take_what_was_kept(home: Home) -> None:  # noqa: F811
    counters, others = [Counter(0) for _ in range(3)], [Counter(i) for i in range(1, 4)]
    with transfuse.keep({}, rank_state={"list": others[:2], "tuple": (others[2], 4)}, run="lists") as keep:
        keep.commit(1)
        keep.detach()
    given = {"list": counters[:2], "tuple": (counters[2], 4)}
    with transfuse.keep({}, rank_state=given, run="lists") as keep:
        keep.restore()
    assert given == {"list": counters[:2], "tuple": (counters[2], 4)}
    assert [counter.loaded for counter in counters] == [[{"value": i}] for i in range(1, 4)]


def test_rank_state_that_nothing_can_take_is_named() -> None:
    with pytest.raises(transfuse.StateError, match=r"\['w'\] is a tensor of torch.float32 and shape \[2\]"):
        State({"w": torch.zeros(2)}).load_all({"w": torch.ones(1)})
    with pytest.raises(transfuse.StateError, match=r"\['pair'\]\[1\] cannot be replaced by a int where it is"):
        State({"pair": (Counter(0), 0)}).load_all({"pair": ({"value": 1}, 1)})


# ------------------------------------------------------------------------------------------------------------ changes


def test_a_step_of_the_optimizer_waits_for_readers_and_no_hook_stays(executor: ThreadPoolExecutor) -> None:
    w = nn.Parameter(torch.zeros(1000))
    w.grad = torch.ones(1000)
    optimizer = torch.optim.SGD([w], lr=1.0)
    state, halt = transfuse.State({"w": w, "optimizer": optimizer}), Halt()

    def hooks() -> int:
        return len(optimizer._optimizer_step_pre_hooks) + len(optimizer._optimizer_step_post_hooks)

    before = hooks()
    with transfuse.serve(state, step=lambda: 1) as server, transfuse.serve(state):
        assert hooks() == before + 2, "once for both"
        target = {"w": torch.ones(1000)}
        reader = executor.submit(
            transfuse.fetch, server.address, target, map_path=lambda path: halt(path) if path == "w" else None
        )
        assert halt.reached.wait(DEADLINE)
        trainer = executor.submit(optimizer.step)
        with pytest.raises(TimeoutError):
            trainer.result(0.5)
        halt.go_on.set()
        assert torch.equal(reader.result(DEADLINE).state["w"], torch.zeros(1000))
        trainer.result(DEADLINE)
        assert torch.equal(transfuse.fetch(server.address).state["w"], torch.full((1000,), -1.0))
    assert hooks() == before


def test_without_hooks_a_step_is_not_announced() -> None:
    model, optimizer, _ = trained(0, 1)
    with transfuse.serve(transfuse.State({"model": model, "optimizer": optimizer}, hooks=False)):
        assert not optimizer._optimizer_step_pre_hooks


def test_a_step_that_raises_does_not_keep_readers_out_for_good() -> None:
    model, optimizer, _ = trained(0, 1)

    def fail() -> float:
        raise OSError("no data")

    with transfuse.serve({"model": model, "optimizer": optimizer}) as server:
        with pytest.raises(OSError, match="no data"):
            optimizer.step(fail)
        optimizer.step()
        found = transfuse.fetch(server.address, timeout=20).state
        assert torch.equal(found["model"]["weight"], model.weight)


def test_one_mutating_for_all_who_read(home: Home) -> None:  # noqa: F811
    weights = torch.zeros(4)
    state, steps = transfuse.State({"w": weights}), [0]
    with transfuse.serve(state, step=lambda: steps[0]) as server, transfuse.keep(state, run="one mutating") as keep:
        for step in (1, 2):
            with state.mutating():
                weights.fill_(step)
                steps[0] = step
            keep.commit(step, wait=False)
            fetched = transfuse.fetch(server.address)
            assert fetched.step == step
            assert torch.equal(fetched.state["w"], weights)
        with keep.mutating(), server.mutating():
            weights.fill_(9)
        restored = keep.restore()
        assert restored == 2
        assert weights.eq(2).all()
        assert restored is not None
        assert restored.report is not None
