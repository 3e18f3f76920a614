"""Renaming: rules against what numpy does with real arrays, and every problem that is found before anything moves."""

from __future__ import annotations

import doctest
import re
import time
from collections.abc import Callable, Mapping, Sequence
from math import prod

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from transfuse import _rules
from transfuse._plan.apply_rules import BlockPair, Linked, link
from transfuse._rules import Concat, MapPath, Rename, Rule, Slice, Split, check

Shape = tuple[int, ...]
Leaves = Mapping[str, Shape | None]
Array = npt.NDArray[np.int64]


def run(rules: MapPath | None, sources: Leaves, targets: Leaves) -> Linked:
    return link(rules, list(sources), list(sources.values()), list(targets), list(targets.values()))


def pairs(linked: Linked, sources: Leaves, targets: Leaves) -> dict[str, str]:
    """Target name to source name, for links of whole leaves."""
    assert linked.problems == []
    return {list(targets)[found.target]: list(sources)[found.source] for found in linked.links}


def names(*paths: str) -> dict[str, Shape | None]:
    return dict.fromkeys(paths, (2,))


def only_problem(linked: Linked, *parts: str) -> str:
    """The one problem, which is one line, has all parts, and a remedy after its last semicolon."""
    assert len(linked.problems) == 1, linked.problems
    (problem,) = linked.problems
    for part in parts:
        assert part in problem
    assert "\n" not in problem
    assert re.search(r"; [a-z]", problem)
    return problem


def apply(linked: Linked, sources: Sequence[Array], target_shapes: Sequence[Shape]) -> list[Array]:
    """Do to arrays what the links say; no element may be written twice."""
    result = [np.full(shape, -1, dtype=np.int64) for shape in target_shapes]
    for source, target, source_start, target_start, sizes in linked.links:
        here = tuple(slice(at, at + n) for at, n in zip(target_start, sizes, strict=True))
        there = tuple(slice(at, at + n) for at, n in zip(source_start, sizes, strict=True))
        assert (result[target][here] == -1).all()
        assert sources[source][there].shape == sizes
        result[target][here] = sources[source][there]
    return result


# Names


def test_without_rules_every_leaf_keeps_its_name() -> None:
    linked = run(
        None,
        {"a": (2, 3), "b": None, "c": (), "d": (0, 4), "e": (1,)},
        {"d": (0, 4), "c": (), "b": None, "a": (2, 3), "f": (1,)},
    )
    assert linked.links == [
        BlockPair(3, 0, (0, 0), (0, 0), (0, 4)),
        BlockPair(2, 1, (), (), ()),
        BlockPair(1, 2, (), (), ()),
        BlockPair(0, 3, (0, 0), (0, 0), (2, 3)),
    ]
    assert linked.unused == [4]
    assert linked.untouched == [4]
    assert linked.problems == []


@pytest.mark.parametrize("rules", [None, [], {}, lambda path: path])
def test_empty_trees(rules: MapPath | None) -> None:
    assert run(rules, {}, {}) == Linked([], [], [], [])


def test_a_mapping_is_short_for_renames() -> None:
    sources, targets = names("model.embed.w", "model.0.q", "head"), names("embed.weight", "0.q", "head")
    found = pairs(run({"model.embed.w": "embed.weight", "model.**": "**"}, sources, targets), sources, targets)
    assert found == {"embed.weight": "model.embed.w", "0.q": "model.0.q", "head": "head"}
    assert run([Rename("model.embed.w", "embed.weight"), Rename("model.**", "**")], sources, targets) == run(
        {"model.embed.w": "embed.weight", "model.**": "**"}, sources, targets
    )


@pytest.mark.parametrize(
    ("pattern", "matching", "others"),
    [
        ("a.*.w", ["a.0.w", "a.layer_1.w", "a.\n.w"], ["a.0.1.w", "a..w", "b.a.0.w", "a.0.wx"]),
        ("a.**.w", ["a.0.w", "a.0.1.w", "a...w", "a.x\ny.w"], ["a..w", "a.w", "b.a.0.w"]),
        ("**", ["a", "a.b", "."], [""]),
        ("*", ["a", "a b"], ["", "a.b", "."]),
        ("w*", ["w1", "weight"], ["w", "w.1", "xw"]),
        ("*_proj.*", ["q_proj.weight"], ["_proj.weight", "a.q_proj.weight"]),
        ("a+(b).*", ["a+(b).c"], ["aab.c", "a+(b)xc"]),
    ],
)
def test_what_wildcards_match(pattern: str, matching: list[str], others: list[str]) -> None:
    target = "new." + pattern
    for path in matching:
        assert pairs(run({pattern: target}, names(path), names("new." + path)), names(path), names("new." + path))
    for path in others:
        only_problem(run({pattern: target}, names(path), names("new." + path)), "matches no leaf")


def test_captures_are_put_in_order() -> None:
    sources, targets = names("m.3.x.y.w"), names("3/x.y/w")
    assert pairs(run({"m.*.**.w": "*/**/w"}, sources, targets), sources, targets) == {"3/x.y/w": "m.3.x.y.w"}
    sources, targets = names("a.q.b.q.c"), names("a.q.b|c")
    assert pairs(run({"**.q.**": "**|**"}, sources, targets), sources, targets) == {"a.q.b|c": "a.q.b.q.c"}


def test_what_is_captured_is_not_a_pattern() -> None:
    sources, targets = names(r"m.\1*"), names(r"n.\1*")
    assert pairs(run({"m.*": "n.*"}, sources, targets), sources, targets) == {r"n.\1*": r"m.\1*"}


def test_the_first_rename_wins() -> None:
    sources, targets = names("a.x", "a.y"), names("b.x", "b.y", "c.x", "c.y")
    linked = run([Rename("a.x", "c.x"), Rename("a.*", "b.*")], sources, targets)
    assert pairs(linked, sources, targets) == {"c.x": "a.x", "b.y": "a.y"}
    assert [list(targets)[place] for place in linked.untouched] == ["b.x", "c.y"]


def test_a_rename_that_never_wins_is_a_problem() -> None:
    linked = run([Rename("a.*", "b.*"), Rename("a.x", "c.x")], names("a.x"), names("b.x", "c.x"))
    only_problem(linked, "Rename(source='a.x', target='c.x')", "earlier rule")


def test_names_can_be_swapped() -> None:
    sources = names("a", "b")
    assert pairs(run({"a": "b", "b": "a"}, sources, sources), sources, sources) == {"a": "b", "b": "a"}


def test_no_name_is_kept_where_a_rule_writes() -> None:
    linked = run({"a": "b"}, names("a", "b"), names("a", "b"))
    assert [(found.source, found.target) for found in linked.links] == [(0, 1)]
    assert (linked.unused, linked.untouched, linked.problems) == ([1], [0], [])
    # Not even if the rule fails.
    linked = run({"a": "b"}, {"a": (3,), "b": (2,)}, {"b": (2,)})
    assert linked.links == []
    only_problem(linked, "shape: source (3,), target (2,)")


def test_a_matched_leaf_does_not_also_keep_its_name() -> None:
    linked = run([Concat(["q", "k"], "qk")], names("q", "k"), {"qk": (4,), "q": (2,)})
    assert (linked.unused, linked.untouched, linked.problems) == ([], [1], [])


def test_a_leaf_may_go_to_many_places() -> None:
    sources: Leaves = {"q": (2, 4), "k": (2, 4)}
    targets: Leaves = {"qk": (4, 4), "kq": (2, 8), "q0": (1, 4), "q1": (1, 4), "q": (2, 4), "head": (2, 3)}
    rules = [
        Concat(["q", "k"], "qk"),
        Concat(["k", "q"], "kq", dim=-1),
        Split("q", ["q0", "q1"]),
        Rename("q", "q"),
        Rename(Slice("q", -1, 1), "head"),
    ]
    linked = run(rules, sources, targets)
    assert (linked.unused, linked.untouched, linked.problems) == ([], [], [])
    q, k = np.arange(8).reshape(2, 4), 100 + np.arange(8).reshape(2, 4)
    wanted = [np.concatenate([q, k]), np.concatenate([k, q], 1), q[:1], q[1:], q, q[:, 1:]]
    for got, expected in zip(
        apply(linked, [q, k], [(4, 4), (2, 8), (1, 4), (1, 4), (2, 4), (2, 3)]), wanted, strict=True
    ):
        np.testing.assert_array_equal(got, expected)


def test_a_catch_all_passes_over_leaves_that_other_rules_use() -> None:
    rules = [Rename("**", "model.**"), Concat(["q", "k"], "model.qk")]
    linked = run(rules, names("q", "k", "o"), {"model.qk": (4,), "model.o": (2,), "model.k": (2,)})
    assert linked.problems == []
    # It is still a rename: where the new name exists, the leaf goes there too.
    assert [(found.source, found.target) for found in linked.links] == [(0, 0), (1, 0), (2, 1), (1, 2)]
    # Without wildcards, the name was meant.
    only_problem(run([Rename("q", "x"), rules[1]], names("q", "k"), {"model.qk": (4,)}), "no leaf 'x'")


# Functions


def test_a_function_translates_or_leaves_out() -> None:
    sources, targets = names("model.a", "model.b", "step"), names("a", "b", "step")
    linked = run(lambda path: path.removeprefix("model.") if path.startswith("model.") else None, sources, targets)
    assert pairs(linked, sources, targets) == {"a": "model.a", "b": "model.b"}
    assert (linked.unused, linked.untouched) == ([2], [2])


def test_a_function_takes_names_as_they_are() -> None:
    assert pairs(run(lambda path: "b.*", names("a.*"), names("b.*")), names("a.*"), names("b.*")) == {"b.*": "a.*"}


def test_problems_of_functions() -> None:
    def bad(path: str) -> str | None:
        if path == "a":
            raise KeyError("no such\nlayer")
        return 3 if path == "b" else "nowhere"  # type: ignore[return-value]

    linked = run(bad, names("a", "b", "c"), names("a", "b", "c"))
    assert linked.links == []
    assert (linked.unused, linked.untouched) == ([0, 1, 2], [0, 1, 2])
    raised, odd, lost = linked.problems
    assert "bad" in raised
    assert "'a'" in raised
    assert "KeyError" in raised
    assert "\n" not in raised
    assert "'b'" in odd
    assert "expected a path or None, got int" in odd
    assert "'c'" in lost
    assert "no leaf 'nowhere'" in lost


def test_interrupts_of_a_function_are_not_problems() -> None:
    def stop(path: str) -> str:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(stop, names("a"), names("a"))


# Blocks


def test_fused_weights() -> None:
    layers = 3
    sources: dict[str, Shape | None] = {}
    targets: dict[str, Shape | None] = {}
    for n in range(layers):
        sources |= {f"model.{n}.q.w": (8, 6), f"model.{n}.k.w": (2, 6), f"model.{n}.v.w": (2, 6)}
        sources |= {f"model.{n}.gate_up.w": (10, 6)}
        targets |= {f"{n}.qkv.weight": (12, 6), f"{n}.gate.weight": (5, 6), f"{n}.up.weight": (5, 6)}
    linked = run(
        [
            Concat(["model.*.q.w", "model.*.k.w", "model.*.v.w"], "*.qkv.weight"),
            Split("model.*.gate_up.w", ["*.gate.weight", "*.up.weight"]),
        ],
        sources,
        targets,
    )
    assert (linked.unused, linked.untouched, linked.problems) == ([], [], [])
    assert linked.links[:5] == [
        BlockPair(0, 0, (0, 0), (0, 0), (8, 6)),
        BlockPair(1, 0, (0, 0), (8, 0), (2, 6)),
        BlockPair(2, 0, (0, 0), (10, 0), (2, 6)),
        BlockPair(3, 1, (0, 0), (0, 0), (5, 6)),
        BlockPair(3, 2, (5, 0), (0, 0), (5, 6)),
    ]


def test_slices() -> None:
    # Interleaved halves come apart, and a slice without stop goes to the end.
    rules = [
        Concat([Slice("w", 0, 0, 1), Slice("w", 0, 2, 3)], "even"),
        Concat([Slice("w", -2, 1, 2), Slice("w", -2, 3)], "odd"),
        Rename(Slice("w", 1, 3, 3), "empty"),
    ]
    linked = run(rules, {"w": (4, 3)}, {"even": (2, 3), "odd": (2, 3), "empty": (4, 0)})
    assert linked.problems == []
    w = np.arange(12).reshape(4, 3)
    even, odd, empty = apply(linked, [w], [(2, 3), (2, 3), (4, 0)])
    np.testing.assert_array_equal(even, w[::2])
    np.testing.assert_array_equal(odd, w[1::2])
    assert empty.size == 0


def test_links_are_in_the_order_of_targets() -> None:
    rules = [Split("s", ["z", "y"]), Concat(["b", "e", "a"], "t")]
    linked = run(rules, {"a": (1,), "b": (2,), "s": (3,), "e": (0,)}, {"t": (3,), "y": (1,), "z": (2,)})
    assert linked.problems == []
    assert [(found.target, found.target_start, found.source) for found in linked.links] == [
        (0, (0,), 1),
        (0, (2,), 3),
        (0, (2,), 0),
        (1, (0,), 2),
        (2, (0,), 2),
    ]


def test_leaves_without_elements_and_dims() -> None:
    rules = [
        Rename("scalar", "x.scalar"),
        Rename("none", "x.none"),
        Concat(["none", "some"], "both"),
        Split("none", ["n0", "n1"], dim=1, sizes=[2, 2]),
        Rename("value", "x.value"),
    ]
    linked = run(
        rules,
        {"scalar": (), "none": (0, 4), "some": (2, 4), "value": None},
        {"x.scalar": (), "x.none": (0, 4), "both": (2, 4), "n0": (0, 2), "n1": (0, 2), "x.value": None},
    )
    assert (linked.unused, linked.untouched, linked.problems) == ([], [], [])
    assert linked.links == [
        BlockPair(0, 0, (), (), ()),
        BlockPair(1, 1, (0, 0), (0, 0), (0, 4)),
        BlockPair(1, 2, (0, 0), (0, 0), (0, 4)),
        BlockPair(2, 2, (0, 0), (0, 0), (2, 4)),
        BlockPair(1, 3, (0, 0), (0, 0), (0, 2)),
        BlockPair(1, 4, (0, 2), (0, 0), (0, 2)),
        BlockPair(3, 5, (), (), ()),
    ]


def test_shapes_may_be_sizes_of_torch() -> None:
    tensor = torch.empty(4, 8)
    linked = link([Rename("a", "b")], ["a"], [tensor.shape], ["b"], [tensor.shape])
    assert linked.links == [BlockPair(0, 0, (0, 0), (0, 0), (4, 8))]
    assert type(linked.links[0].sizes) is tuple
    only_problem(link(None, ["a"], [tensor.shape], ["a"], [(4, 6)]), "shape: source (4, 8), target (4, 6)")


# Problems


@pytest.mark.parametrize(
    ("rule", "sources", "targets", "parts"),
    [
        (Rename("a", "b"), {"x": (2,)}, {"b": (2,)}, ["matches no leaf of the source", "(the source has 'x')"]),
        (Rename("a", "b"), dict.fromkeys("vwxyz", (2,)), {"b": (2,)}, ["(the source has 'v', 'w', 'x', …)"]),
        (
            Rename("a.*", "b.*"),
            {"a.1.2": (2,)},
            {"b.1.2": (2,)},
            ["matches no leaf of the source", "write a.*.** for all leaves of the container a.*"],
        ),
        (
            Rename("a", "b"),
            {"a.x": (2,)},
            {"b.x": (2,)},
            ["write a.** for all leaves of the container a"],
        ),
        (Concat(["a", "b"], "c"), {"x": (2,)}, {"c": (2,)}, ["matches no leaf of the source"]),
        (Split("a", ["b", "c"]), {"x": (2,)}, {"b": (2,), "c": (2,)}, ["matches no leaf of the source"]),
        (Rename("a.*", "b.*"), {"a.1": (2,)}, {"c": (2,)}, ["leaf 'a.1'", "no leaf 'b.1'"]),
        (Concat(["a", "b"], "c"), {"a": (2,), "b": (2,)}, {"x": (4,)}, ["leaf 'a'", "no leaf 'c'"]),
        (Split("a", ["b", "c"]), {"a": (4,)}, {"b": (4,)}, ["leaf 'a'", "no leaf 'c'"]),
        (Concat(["*.a", "*.b"], "*.c"), {"0.b": (2,)}, {"0.c": (4,)}, ["leaf '0.a': missing", "'0.b'", "'0.c'"]),
        (Rename("a", "b"), {"a": (4, 8)}, {"b": (4, 6)}, ["leaf 'a'", "shape: source (4, 8), target (4, 6)", "'b'"]),
        (Rename("a", "b"), {"a": (1,)}, {"b": ()}, ["shape: source (1,), target ()"]),
        (
            Rename(Slice("a", 1, 2), "b"),
            {"a": (4, 8)},
            {"b": (4, 5)},
            ["leaf 'a'", "shape: source (4, 6) (a slice of (4, 8)), target (4, 5)"],
        ),
        (
            Concat(["a", "b"], "c"),
            {"a": (2, 3), "b": (3, 3)},
            {"c": (6, 3)},
            ["leaf 'c'", "size along dim 0", "expected 6", "only partly covered", "got 5 (2 + 3)"],
        ),
        (
            Concat(["a", "b"], "c", dim=-1),
            {"a": (2, 3), "b": (2, 4)},
            {"c": (2, 6)},
            ["leaf 'c'", "size along dim 1", "expected 6", "too small", "got 7 (3 + 4)"],
        ),
        (
            Concat(["a", "b"], "c"),
            {"a": (2, 3), "b": (2, 4)},
            {"c": (4, 3)},
            ["leaf 'b'", "source (2, 4), target (4, 3)", "all dims but 0"],
        ),
        (Concat(["a", "b"], "c"), {"a": (2,), "b": (2, 1)}, {"c": (4,)}, ["leaf 'b'", "source (2, 1), target (4,)"]),
        (
            Split("a", ["b", "c"]),
            {"a": (6, 3)},
            {"b": (2, 3), "c": (3, 3)},
            ["leaf 'a'", "size along dim 0", "expected 6", "got 5 (2 + 3)"],
        ),
        (
            Split("a", ["b", "c"], sizes=[2, 4]),
            {"a": (6, 3)},
            {"b": (2, 3), "c": (3, 3)},
            ["leaf 'a'", "expected 3", "'c'", "got 4 from sizes"],
        ),
        (
            Split("a", ["b", "c"], sizes=[2, 3]),
            {"a": (6, 3)},
            {"b": (2, 3), "c": (3, 3)},
            ["leaf 'a'", "expected 6", "got 5 (2 + 3)"],
        ),
        (Split("a", ["b", "c"]), {"a": (6, 3)}, {"b": (3, 3), "c": (3, 4)}, ["leaf 'a'", "'c'", "target (3, 4)"]),
        (Split("a", ["b", "c"]), {"a": (6,)}, {"b": (3,), "c": (3, 1)}, ["leaf 'a'", "'c'", "target (3, 1)"]),
        (Concat(["a", "b"], "c", 2), {"a": (2, 3), "b": (2, 3)}, {"c": (4, 3)}, ["dim 2", "expected -2 to 1"]),
        (Concat(["a", "b"], "c", -3), {"a": (2, 3), "b": (2, 3)}, {"c": (4, 3)}, ["dim -3", "expected -2 to 1"]),
        (Split("a", ["b", "c"], 1), {"a": (2,)}, {"b": (1,), "c": (1,)}, ["leaf 'a'", "dim 1", "expected -1 to 0"]),
        (Rename(Slice("a", 1, 0), "b"), {"a": (2,)}, {"b": (2,)}, ["leaf 'a'", "dim 1", "expected -1 to 0"]),
        (Rename(Slice("a", 0, 0, 3), "b"), {"a": (2,)}, {"b": (3,)}, ["leaf 'a'", "slice 0:3", "at most 2"]),
        (Rename(Slice("a", 0, 3), "b"), {"a": (2,)}, {"b": (0,)}, ["leaf 'a'", "slice 3: ", "at most 2"]),
        (Rename(Slice("a", 0, 0), "b"), {"a": ()}, {"b": ()}, ["leaf 'a'", "0-d"]),
        (Concat(["a", "b"], "c"), {"a": (), "b": ()}, {"c": ()}, ["leaf 'c'", "0-d"]),
        (Split("a", ["b", "c"]), {"a": ()}, {"b": (), "c": ()}, ["leaf 'a'", "0-d"]),
        (Rename("a", "b"), {"a": None}, {"b": ()}, ["leaf 'a'", "plain value cannot become the tensor 'b'"]),
        (Rename("a", "b"), {"a": ()}, {"b": None}, ["leaf 'a'", "tensor cannot become the plain value 'b'"]),
        (Rename(Slice("a", 0, 0), "b"), {"a": None}, {"b": None}, ["leaf 'a'", "plain value cannot be sliced"]),
        (Rename(Slice("a", 0, 0), "b"), {"a": (2,)}, {"b": None}, ["leaf 'a'", "cannot become the plain value 'b'"]),
        (Concat(["a", "b"], "c"), {"a": (2,), "b": None}, {"c": (2,)}, ["leaf 'b'", "cannot be concatenated"]),
        (Concat(["a", "b"], "c"), {"a": (1,), "b": (1,)}, {"c": None}, ["leaf 'c'", "plain value"]),
        (Split("a", ["b", "c"]), {"a": None}, {"b": None, "c": None}, ["leaf 'a'", "plain value cannot be split"]),
        (Split("a", ["b", "c"]), {"a": (2,)}, {"b": (2,), "c": None}, ["leaf 'a'", "the plain value 'c'"]),
        (Split("a", ["b", "b"]), {"a": (4,)}, {"b": (2,)}, ["leaf 'a'", "'b' is already written", "overlap"]),
    ],
)
def test_problems(rule: Rule, sources: Leaves, targets: Leaves, parts: list[str]) -> None:
    linked = run([rule], sources, targets)
    assert only_problem(linked, *parts).startswith(repr(rule))
    assert linked.links == []
    assert linked.unused == list(range(len(sources)))
    assert linked.untouched == list(range(len(targets)))


def test_a_kept_name_must_fit_as_well() -> None:
    only_problem(run(None, {"a": (4, 8)}, {"a": (4, 6)}), "no rule", "leaf 'a'", "shape: source (4, 8), target (4, 6)")
    only_problem(run(None, {"a": None}, {"a": (4, 6)}), "no rule", "leaf 'a'", "plain value")


def test_a_missing_source_is_told_for_each_capture() -> None:
    rule = Concat(["*.q", "*.k", "*.v"], "*.qkv")
    sources = names("0.q", "0.k", "0.v", "1.q", "2.k", "2.q", "1.v")
    linked = run([rule], sources, {f"{n}.qkv": (6,) for n in range(3)})
    assert [re.findall("leaf '(.*?)'", problem)[0] for problem in linked.problems] == ["1.k", "2.v"]
    assert {found.target for found in linked.links} == {0}
    assert linked.untouched == [1, 2]


@pytest.mark.parametrize("shape", [(2,), (0,), (), None])
def test_two_writers_of_one_target(shape: Shape | None) -> None:
    linked = run({"a": "c", "b": "c"}, {"a": shape, "b": shape}, {"c": shape})
    only_problem(linked, "Rename(source='b', target='c'): leaf 'b'", "Rename(source='a', target='c')", "from 'a'")
    # What is left is a whole target, each element once.
    assert [found.source for found in linked.links] == [0]
    linked = run(lambda path: "c", {"a": shape, "b": shape}, {"c": shape})
    only_problem(linked, "leaf 'b'", "'c' is already written", "from 'a'")


def test_rules_of_two_kinds_that_overlap() -> None:
    linked = run([Concat(["a", "b"], "c"), Rename("d", "c")], names("a", "b") | {"d": (4,)}, {"c": (4,)})
    only_problem(linked, "leaf 'd'", "Concat(sources=('a', 'b'), target='c', dim=0)", "overlap")


def test_a_function_leaves_leaves_out() -> None:
    linked = run(lambda path: None if path == "a" else path, names("a", "b"), names("b", "c"))
    assert (linked.unused, linked.untouched, linked.problems) == ([0], [1], [])
    assert linked.left_out == {0}
    assert run({"b": "b"}, names("a", "b"), names("b")).left_out == frozenset()


def test_paths_that_two_leaves_share() -> None:
    twice, shapes = ["a.b", "x", "a.b"], [(2,), (2,), (2,)]
    rules: list[MapPath | None] = [None, {"x": "y"}, lambda path: path, {"a.*": "a.*"}, [Concat(["a.b", "x"], "c")]]
    for rule in rules[:4]:
        linked = link(rule, twice, shapes, ["a.b", "x", "y"], shapes)
        only_problem(linked, "leaf 'a.b'", "ambiguous", "of the source")
        linked = link(rule, ["a.b", "x"], shapes[:2], [*twice, "y"], [*shapes, (2,)])
        only_problem(linked, "leaf 'a.b'", "ambiguous", "of the target")
    only_problem(link(rules[4], twice, shapes, ["c"], [(4,)]), "leaf 'a.b'", "ambiguous", "of the source")
    only_problem(link(rules[4], ["a.b", "x"], shapes[:2], ["c", "c"], [(4,), (4,)]), "leaf 'c'", "of the target")
    # Where such a path is not used, it does no harm.
    linked = link({"x": "y"}, twice, shapes, ["y", "z", "z"], shapes)
    assert (linked.unused, linked.untouched, linked.problems) == ([0, 2], [1, 2], [])


def test_all_problems_of_a_rule_are_told() -> None:
    linked = run([Split("a", ["b", "c", "d"])], {"a": (6,)}, {"d": (2, 2)})
    assert len(linked.problems) == 3
    linked = run([Concat(["a", "b"], "c"), Rename("x", "y")], {"a": (2, 3), "b": (2, 2)}, {"c": (4, 5)})
    assert len(linked.problems) == 3


def test_names_and_shapes_go_together() -> None:
    with pytest.raises(ValueError, match="2 names, but 1 shapes"):
        link(None, ["a", "b"], [(1,)], [], [])


# Rules


@pytest.mark.parametrize(
    "make",
    [
        lambda: Rename("a.*", "b"),
        lambda: Rename("a", "b.*"),
        lambda: Rename("a.*.**", "b.**.*"),
        lambda: Rename("a.*", "b.**"),
        lambda: Rename(Slice("a.*", 0, 1), "b"),
        lambda: Concat(["*.a", "b"], "*.c"),
        lambda: Concat(["a", Slice("*.b", 0, 0)], "c"),
        lambda: Split("*.a", ["*.b", "c"]),
        lambda: Rename("a.***", "b.***"),
        lambda: Slice("a.***", 0, 0),
        lambda: Concat([], "a"),
        lambda: Split("a", []),
        lambda: Split("a", ["b", "c"], sizes=[1]),
        lambda: Split("a", ["b"], sizes=[]),
        lambda: Split("a", ["b", "c"], sizes=[3, -1]),
        lambda: Slice("a", 0, -1),
        lambda: Slice("a", 0, 2, 1),
    ],
)
def test_rules_that_cannot_be(make: Callable[[], object]) -> None:
    with pytest.raises(ValueError, match=r"^(Rename|Concat|Split|Slice)\(.*\): "):
        make()


@pytest.mark.parametrize(
    "make",
    [
        lambda: Rename(1, "a"),  # type: ignore[arg-type]
        lambda: Rename("a", None),  # type: ignore[arg-type]
        lambda: Rename("a", Slice("b", 0, 0)),  # type: ignore[arg-type]
        lambda: Concat("ab", "c"),
        lambda: Concat({"a", "b"}, "c"),  # type: ignore[arg-type]
        lambda: Concat(["a", 1], "c"),  # type: ignore[list-item]
        lambda: Concat(["a"], "c", dim="0"),  # type: ignore[arg-type]
        lambda: Concat(["a"], "c", dim=True),
        lambda: Split(Slice("a", 0, 0), ["b"]),  # type: ignore[arg-type]
        lambda: Split("a", "bc"),
        lambda: Split("a", ["b"], sizes=3),  # type: ignore[arg-type]
        lambda: Split("a", ["b"], sizes=[1.0]),  # type: ignore[list-item]
        lambda: Slice(b"a", 0, 0),  # type: ignore[arg-type]
        lambda: Slice("a", 0, None),  # type: ignore[arg-type]
    ],
)
def test_rules_of_wrong_types(make: Callable[[], object]) -> None:
    with pytest.raises(TypeError, match=r"^(Rename|Concat|Split|Slice)\(.*\): expected "):
        make()


def test_rules_are_values() -> None:
    sources = ["a", "b"]
    rule = Concat(sources, "c")
    sources.append("d")
    assert rule == Concat(("a", "b"), "c")
    assert len({rule, Concat(("a", "b"), "c"), Split("a", ["b"], sizes=[1])}) == 2
    with pytest.raises(AttributeError):
        rule.dim = 1  # type: ignore[misc]


@pytest.mark.parametrize(
    "rules",
    [None, {}, [], {"a.*": "b.*"}, [Rename("a", "b")], (Concat(["a", "b"], "c"), Split("a", ["b"])), str.lower],
)
def test_check_takes_rules(rules: object) -> None:
    check(rules)


@pytest.mark.parametrize(
    ("rules", "error", "match"),
    [
        ("a", TypeError, "expected a mapping.* got str"),
        (b"a", TypeError, "expected a mapping.* got bytes"),
        (3, TypeError, "expected a mapping.* got int"),
        ({Rename("a", "b")}, TypeError, "expected a mapping.* got set"),
        (iter([Rename("a", "b")]), TypeError, "expected a mapping"),
        (Rename("a", "b"), TypeError, "put it in a list"),
        (Slice("a", 0, 0), TypeError, "put it in a list"),
        ([Rename("a", "b"), ("a", "b")], TypeError, r"rule 1 is \('a', 'b'\)"),
        ([Slice("a", 0, 0)], TypeError, "rule 0 is .*a slice goes inside"),
        ({"a": None}, TypeError, "'a' to None.*returns None"),
        ({1: "a"}, TypeError, "1 to 'a'"),
        ({"a.*": "b"}, ValueError, "same wildcards"),
    ],
)
def test_check_refuses_what_is_no_rule(rules: object, error: type[Exception], match: str) -> None:
    with pytest.raises(error, match=match):
        check(rules)


def test_examples_in_the_docstrings() -> None:
    # Public classes say that they are of the package itself, so they are looked for by name.
    finder, runner = doctest.DocTestFinder(), doctest.DocTestRunner()
    for name in ("Concat", "Rename", "Slice", "Split"):
        for test in finder.find(getattr(_rules, name), name, module=False, globs=vars(_rules) | {"link": link}):
            runner.run(test)
    assert runner.summarize(verbose=False).failed == 0
    assert runner.summarize(verbose=False).attempted >= 6


# Against numpy


shapes = st.lists(st.integers(0, 4), min_size=1, max_size=3).map(tuple)


@st.composite
def worlds(draw: st.DrawFn) -> tuple[list[Rule], dict[str, Array], dict[str, Array]]:
    """Rules, the source's arrays, and what numpy makes of them for the target."""
    rules: list[Rule] = []
    source: dict[str, Array] = {}
    target: dict[str, Array] = {}
    next_value = 0

    def array(shape: Shape) -> Array:
        nonlocal next_value
        next_value += prod(shape)
        return np.arange(next_value - prod(shape), next_value, dtype=np.int64).reshape(shape)

    for kind in range(draw(st.integers(0, 5))):
        shape: Shape = draw(shapes)
        dim = draw(st.integers(-len(shape), len(shape) - 1))
        axis = dim % len(shape)
        layers = draw(st.lists(st.sampled_from(["0", "1", "x_y", "z-9"]), min_size=1, max_size=3, unique=True))
        wildcard = draw(st.sampled_from(["*", "**"]))
        deep = [f"{layer}.{layer}" if wildcard == "**" else layer for layer in layers]
        sizes = draw(st.lists(st.integers(0, 3), min_size=1, max_size=4))
        parts = [(*shape[:axis], size, *shape[axis + 1 :]) for size in sizes]
        ends = np.cumsum(sizes)[:-1].tolist()
        whole = (*shape[:axis], sum(sizes), *shape[axis + 1 :])
        here, there = f"model.{kind}.{wildcard}.", f"{kind}.{wildcard}."
        what = draw(st.sampled_from(["rename", "keep", "concat", "split", "sized split", "slices", "shuffle"]))
        several = [f"p{number}" for number in range(len(sizes))]
        if what == "rename":
            rules.append(Rename(here + "w", there + "weight"))
        elif what == "concat":
            rules.append(Concat([here + name for name in several], there + "weight", dim))
        elif what == "split":
            rules.append(Split(here + "w", [there + name for name in several], dim))
        elif what == "sized split":
            rules.append(Split(here + "w", [there + name for name in several], dim, sizes))
        elif what == "slices":
            for name, start, size in zip(several, [0, *ends], sizes, strict=True):
                stop = None if start + size == sum(sizes) else start + size
                rules.append(Rename(Slice(here + "w", dim, start, stop), there + name))
        elif what == "shuffle":
            cuts = draw(st.permutations(list(zip([0, *ends], sizes, strict=True))))
            slices = [Slice(here + "w", dim, start, start + size) for start, size in cuts]
            rules.append(Concat(slices, there + "weight", dim))
        for layer in deep:
            a, b = here.replace(wildcard, layer), there.replace(wildcard, layer)
            if what == "keep":
                source[a + "w"] = target[a + "w"] = array(whole)
            elif what == "rename":
                source[a + "w"] = target[b + "weight"] = array(whole)
            elif what == "concat":
                arrays = [array(part) for part in parts]
                source |= {a + name: each for name, each in zip(several, arrays, strict=True)}
                target[b + "weight"] = np.concatenate(arrays, dim)
            else:
                source[a + "w"] = array(whole)
                pieces = np.split(source[a + "w"], ends, axis)
                if what == "shuffle":
                    taken = [np.take(source[a + "w"], range(start, start + size), dim) for start, size in cuts]
                    target[b + "weight"] = np.concatenate(taken, dim)
                else:
                    target |= {b + name: each for name, each in zip(several, pieces, strict=True)}
    shuffled = draw(st.permutations(list(target)))
    return rules, source, {name: target[name] for name in shuffled}


@given(worlds())
@settings(max_examples=100, deadline=None)
def test_links_do_what_numpy_does(world: tuple[list[Rule], dict[str, Array], dict[str, Array]]) -> None:
    rules, source, target = world
    linked = run(
        rules, {name: each.shape for name, each in source.items()}, {n: each.shape for n, each in target.items()}
    )
    assert (linked.unused, linked.untouched, linked.problems) == ([], [], [])
    assert [(found.target, found.target_start) for found in linked.links] == sorted(
        (found.target, found.target_start) for found in linked.links
    )
    made = apply(linked, list(source.values()), [each.shape for each in target.values()])
    for name, got, expected in zip(target, made, target.values(), strict=True):
        np.testing.assert_array_equal(got, expected, err_msg=name)


paths = st.sampled_from(["a", "b", "a.b", "a.c", "b.a", "a.b.c", "c"])
patterns = st.sampled_from(["a", "b", "a.b", "a.*", "*.b", "**", "*", "a.**", "c", "**.c", "*.*"])
sides = st.lists(st.tuples(paths, st.one_of(st.none(), st.lists(st.integers(0, 3), max_size=2).map(tuple))), max_size=6)


@st.composite
def any_rules(draw: st.DrawFn) -> list[Rule]:
    rules: list[Rule] = []
    for _ in range(draw(st.integers(0, 4))):
        pattern = draw(patterns)
        same = patterns.filter(lambda other: re.findall(r"\*+", other) == re.findall(r"\*+", pattern))  # noqa: B023
        cut = st.builds(Slice, same, st.integers(-3, 2), st.integers(0, 2), st.none())
        source, several, dim = draw(same | cut), draw(st.lists(same, min_size=1, max_size=3)), draw(st.integers(-3, 2))
        rules.append(
            draw(
                st.sampled_from(
                    [Rename(source, pattern), Concat([source, *several], pattern, dim), Split(pattern, several, dim)]
                )
            )
        )
    return rules


@given(any_rules(), sides, sides)
@settings(max_examples=150, deadline=None)
def test_whatever_the_rules_links_cover_targets_exactly(
    rules: list[Rule], sources: list[tuple[str, Shape | None]], targets: list[tuple[str, Shape | None]]
) -> None:
    source_shapes, target_shapes = [shape for _, shape in sources], [shape for _, shape in targets]
    linked = link(rules, [name for name, _ in sources], source_shapes, [name for name, _ in targets], target_shapes)
    for found in linked.links:
        assert (source_shapes[found.source] is None) == (target_shapes[found.target] is None)
    arrays = [np.zeros(shape or (), dtype=np.int64) for shape in source_shapes]
    made = apply(linked, arrays, [shape or () for shape in target_shapes])
    for place, got in enumerate(made):
        assert (got == (-1 if place in linked.untouched else 0)).all()
    assert {found.source for found in linked.links} == set(range(len(sources))) - set(linked.unused)
    assert {found.target for found in linked.links} == set(range(len(targets))) - set(linked.untouched)
    assert all("\n" not in problem for problem in linked.problems)


def test_many_leaves_are_linked_in_no_time(record_property: Callable[[str, object], None]) -> None:
    kinds = [f"kind{number}" for number in range(20)]
    sources: Leaves = {
        f"model.layers.{n}.{kind}.{part}.w": (8, 4) for n in range(125) for kind in kinds for part in "abcd"
    }
    targets: Leaves = {f"layers.{n}.{kind}.fused": (32, 4) for n in range(125) for kind in kinds}
    rules = [Concat([f"model.layers.*.{k}.{part}.w" for part in "abcd"], f"layers.*.{k}.fused") for k in kinds]
    begin = time.perf_counter()
    linked = run(rules, sources, targets)
    record_property("seconds", time.perf_counter() - begin)
    assert (len(linked.links), linked.unused, linked.untouched, linked.problems) == (len(sources), [], [], [])
    assert len(sources) == 10_000
