"""What is remembered never stands for what only looks the same: keys and context arrive as they are today.

Between two transfers of a remembered structure everything that is no tensor may change: keys, ``_metadata``, the
context of registered nodes and of wrapper tensors, factories, lengths, values. Often the new one is equal to the old
one for Python (1, True, 1.0; 0.0, -0.0), or is the same object with other contents.
"""

from __future__ import annotations

import math
from collections import OrderedDict, defaultdict, deque
from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.utils import _pytree as pytree

import transfuse
from keeping import Home, Job, home, same, threaded  # noqa: F401
from moves import CPU, TIMEOUT
from states import Pair
from transfuse._state import trees
from transfuse.testing.exact import assert_exact, differences
from transfuse.testing.ranks import Ranks

#: Many of these are equal for Python, and one is not equal to itself.
scalars = st.sampled_from([0, False, 0.0, -0.0, 1, True, 1.0, math.nan, 1 + 0j])
hashables = scalars | st.tuples(scalars) | st.tuples(st.tuples(scalars))
about = st.fixed_dictionaries({"version": scalars | st.lists(scalars, max_size=1)})


class Box:
    """A registered node. Its context is one object for as long as it lives, and may change."""

    def __init__(self, inside: list[Any], context: dict[str, Any]) -> None:
        self.inside, self.context = inside, context


pytree.register_pytree_node(
    Box,
    lambda box: (box.inside, box.context),
    lambda children, context: Box(list(children), context),
    serialized_type_name="test_context_of_today.Box",
)


class Filling(NamedTuple):
    """Everything in the state that is no tensor. ``into`` puts it into a state, in place wherever that is possible."""

    key: Any
    value: Any
    metadata: dict[str, Any]
    context: dict[str, Any]
    wrapped: dict[str, Any]
    factory: Any
    maxlen: int | None

    def into(self, state: dict[str, Any]) -> dict[str, Any]:
        state["keyed"] = {self.key: state["w"]}
        state["value"] = self.value
        for kept, new in (
            (state["ordered"]._metadata, self.metadata),
            (state["box"].context, self.context),
            (state["pair"].context, {"dtype": torch.float32, **self.wrapped}),
        ):
            kept.clear()
            kept.update(new)
        state["default"].default_factory = self.factory
        state["deque"] = deque(state["deque"], self.maxlen)
        return state


def empty_state(value: float) -> dict[str, Any]:
    def tensor() -> torch.Tensor:
        return torch.full((3,), value)

    ordered = OrderedDict(a=tensor())
    ordered._metadata = {}  # type: ignore[attr-defined]
    pair = Pair(tensor(), tensor(), {"dtype": torch.float32})
    return {
        "w": tensor(),
        "ordered": ordered,
        "box": Box([tensor()], {}),
        "pair": pair,
        "default": defaultdict(list, a=tensor()),
        "deque": deque([tensor()]),
    }


EVERY: dict[str, st.SearchStrategy[Any]] = {
    "key": hashables,
    "value": scalars,
    "metadata": about,
    "context": about,
    "wrapped": about,
    "factory": st.sampled_from([list, int, float]),
    "maxlen": st.sampled_from([1, 2, None]),
}


@st.composite
def fillings(draw: Any) -> list[Filling]:
    """Several, each of which differs from the one before in one thing, or in none."""
    result = [Filling(**{name: draw(strategy) for name, strategy in EVERY.items()})]
    for name in draw(st.lists(st.sampled_from(Filling._fields), min_size=2, max_size=5)):
        result.append(result[-1]._replace(**{name: draw(EVERY[name])}))
    return result


EXAMPLES = settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    with Ranks(2) as two:
        yield two


@pytest.mark.parametrize("in_place", [False, True], ids=["fresh", "in place"])
@EXAMPLES
@given(given=fillings())
def test_sent_again(ranks: Ranks, in_place: bool, given: list[Filling]) -> None:
    state, target = empty_state(1.0), empty_state(-1.0)
    source = transfuse.PGTransport(ranks.pgs[0], TIMEOUT, CPU)
    receiver = transfuse.PGTransport(ranks.pgs[1], TIMEOUT, CPU, (lambda: target) if in_place else None)
    for filling in given:
        filling.into(state)
        filling.into(target)
        received: Any = ranks.run(
            lambda rank, _: source.send_checkpoint(1, state) if rank == 0 else receiver.recv_checkpoint(0)
        )[1]
        assert_exact(filling.into(empty_state(1.0)), received, in_place=in_place)
        assert not in_place or received["w"] is target["w"]


@EXAMPLES
@given(given=fillings())
def test_fetched_again(given: list[Filling]) -> None:
    state = empty_state(1.0)
    with transfuse.serve(state) as server:
        for filling in given:
            with server.mutating():
                filling.into(state)
            assert_exact(filling.into(empty_state(1.0)), transfuse.fetch(server.address).state)


@pytest.mark.usefixtures("threaded")
def test_committed_again(home: Home) -> None:  # noqa: F811
    """A keeper: what is committed, and as whose context it comes back."""
    home.start()
    state, got = empty_state(1.0), list[Any]()

    @settings(EXAMPLES, max_examples=10)
    @given(given=fillings())
    def commit_and_restore(given: list[Filling]) -> None:
        for filling in given:
            filling.into(state)
            assert job.commit(len(got) + 1) == ["committed"]
            assert job.restore() == len(got)
            assert_exact(filling.into(empty_state(1.0)), got[-1], in_place=True)

    with Job(1, load=got.append) as job:
        job.start(same(state))
        commit_and_restore()


def test_a_plan_keeps_its_own_copy_of_context_that_only_the_target_has() -> None:
    target = {"a": 0, "ordered": OrderedDict(b=0), "box": Box([0], {"version": 1})}
    target["ordered"]._metadata = {"version": 1}  # type: ignore[attr-defined]
    before = {"a": 0, "ordered": OrderedDict(b=0), "box": Box([0], {"version": 1})}
    before["ordered"]._metadata = {"version": 1}  # type: ignore[attr-defined]
    (source, _), (own, leaves) = (trees.flatten(tree, max_depth=9) for tree in ({"a": 0}, target))
    for merged in (trees.merge(source, own), trees.Merged.all_of_target(own, 3)):
        target["ordered"]._metadata["version"] = target["box"].context["version"] = 2  # type: ignore[attr-defined]
        assert not differences(before, trees.unflatten(merged.root, merged.arrange([0], leaves)))
        target["ordered"]._metadata["version"] = target["box"].context["version"] = 1  # type: ignore[attr-defined]


def test_keys_that_python_takes_for_equal_meet_and_the_result_has_the_sources(ranks: Ranks) -> None:
    """They cannot both be in one dict: the bytes land in the target's tensor, and the key is the source's."""
    target = {-0.0: torch.zeros(3), True: torch.zeros(2)}
    own = list(target.values())
    state = {0.0: torch.ones(3), 1: torch.ones(2)}

    def work(rank: int, pg: Any) -> Any:
        if rank == 0:
            return transfuse.PGTransport(pg, TIMEOUT, CPU).send_checkpoint(1, state)
        return transfuse.PGTransport(pg, TIMEOUT, CPU, lambda: target).recv_checkpoint(0)

    received = ranks.run(work)[1]
    assert_exact(state, received)
    assert list(map(id, received.values())) == list(map(id, own))


def test_sources_whose_values_are_nan_agree() -> None:
    """Two sources of one state that lies differently in memory: their values are compared by their bits."""
    lying = torch.ones(3, 2)[:, 0], torch.ones(3)

    def work(rank: int, pg: Any) -> Any:
        if rank < 2:
            state = {"w": lying[rank], "nan": math.nan, "long": (0.0,) * 100 + (float("nan"),)}
            return transfuse.PGTransport(pg, TIMEOUT, CPU).send_checkpoint(2, state)
        return transfuse.PGTransport(pg, TIMEOUT, CPU).recv_checkpoint([0, 1])

    with Ranks(3) as three:
        received = three.run(work)[2]
    assert math.isnan(received["nan"])
    assert math.isnan(received["long"][-1])


def test_sources_whose_sets_were_filled_in_another_order_agree() -> None:
    one, other = {1, 9}, {9, 1}
    assert list(one) != list(other)
    states = [{"w": torch.arange(4.0), "seen": seen, frozenset(seen): 1} for seen in (one, other)]

    def work(rank: int, pg: Any) -> Any:
        transport = transfuse.PGTransport(pg, TIMEOUT, CPU)
        return transport.recv_checkpoint([0, 1]) if rank == 2 else transport.send_checkpoint(2, states[rank])

    with Ranks(3) as three:
        assert_exact(states[0], three.run(work)[2])


@pytest.mark.parametrize("strict", [None, True, False])
def test_containers_without_leaves_that_only_the_target_has(ranks: Ranks, strict: bool | None) -> None:
    target = {"w": torch.zeros(4), "old": {}, "more": {"w": torch.zeros(2), "older": [(), OrderedDict()]}}
    state = {"w": torch.arange(4.0), "more": {"w": torch.ones(2)}}

    def work(rank: int, pg: Any) -> Any:
        if rank == 0:
            return transfuse.PGTransport(pg, TIMEOUT, CPU).send_checkpoint(1, state)
        return transfuse.PGTransport(pg, TIMEOUT, CPU, lambda: target, strict=strict).recv_checkpoint(0)

    received = ranks.run(work)[1]
    if strict is False:  # The target keeps what only it has.
        assert received["old"] == {}
        assert received["more"].pop("older") == [(), OrderedDict()]
        del received["old"]
    assert_exact(state, received, in_place=True)
