"""Linking: which block of a source's leaf becomes which block of a target's leaf. Pure: names and shapes only.

:func:`link` applies the rules of ``map_path=`` before anything moves, and lists what does not fit, one line each.
"""

from __future__ import annotations

import operator
import re
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache
from typing import NamedTuple, TypeAlias

from transfuse._rules import AnyRule, Concat, MapPath, Rename, Slice, Split, listed, path_of

Shape: TypeAlias = tuple[int, ...]


class BlockPair(NamedTuple):
    """A block of a source leaf that becomes a block of a target leaf. For plain values and 0-d tensors all tuples are
    empty.
    """

    source: int
    target: int
    source_start: tuple[int, ...]
    target_start: tuple[int, ...]
    sizes: tuple[int, ...]


class Linked(NamedTuple):
    """The result of :func:`link`. If a target has links, they cover each of its elements once, even with problems."""

    #: Sorted by target, then by ``target_start``. Leaves and blocks without elements have links, too.
    links: list[BlockPair]
    #: Source leaves that no link reads, and target leaves that no link writes, also because of a problem.
    unused: list[int]
    untouched: list[int]
    #: One line each: the rule and the leaf, expected and got, and the remedy.
    problems: list[str]
    #: Those of ``unused`` that the caller's function left out on purpose: it returned None.
    left_out: frozenset[int] = frozenset()


def link(
    rules: MapPath | None,
    sources: Sequence[str],
    source_shapes: Sequence[tuple[int, ...] | None],
    targets: Sequence[str],
    target_shapes: Sequence[tuple[int, ...] | None],
) -> Linked:
    """Find the blocks of source leaves that make up each target leaf.

    A leaf that no rule matches keeps its name, if the target has a leaf of that name and no rule writes to it. Any
    number of concats, splits and slices may use a leaf, and one rename besides. A rename with wildcards skips a leaf
    that such rules use, if the target has no leaf of the new name. Shapes are global; None stands for a plain value.
    """
    linking = _Linking(_Tree("source", sources, source_shapes), _Tree("target", targets, target_shapes))
    if rules is None:
        linking.keep_names(set())
    elif callable(rules) and not isinstance(rules, Mapping):
        linking.follow(rules)
    else:
        linking.keep_names(linking.apply(listed(rules)))
    links = sorted(linking.links, key=lambda found: (found.target, found.target_start, found.sizes, found.source))
    used, touched = {found.source for found in links}, {found.target for found in links}
    return Linked(
        links,
        [leaf for leaf in range(len(sources)) if leaf not in used],
        [leaf for leaf in range(len(targets)) if leaf not in touched],
        linking.problems,
        frozenset(linking.left_out),
    )


class _Tree:
    """The leaves of one side, by name."""

    def __init__(self, side: str, names: Sequence[str], shapes: Sequence[tuple[int, ...] | None]) -> None:
        if len(names) != len(shapes):
            raise ValueError(f"{side}: {len(names)} names, but {len(shapes)} shapes")
        self.side = side
        self.shapes: list[Shape | None] = [None if shape is None else tuple(shape) for shape in shapes]
        self.index = {name: leaf for leaf, name in enumerate(names)}
        self.shared: set[str] = set()
        if len(self.index) < len(names):
            self.shared = {name for name, count in Counter(names).items() if count > 1}
        self._sorted: list[str] = []

    def match(self, pattern: str) -> list[tuple[str, ...]]:
        """The text that the wildcards of a pattern stand for, once for each name that the pattern matches."""
        if "*" not in pattern:
            return [()] if pattern in self.index else []
        if not self._sorted:
            self._sorted = sorted(self.index)
        # Prefix, suffix and the longest literal between rule out most names for much less than a regex costs.
        pieces = re.split(r"(\*+)", pattern)
        prefix, middle, suffix = pieces[0], max(pieces[2:-1:2], key=len, default=""), pieces[-1]
        low = bisect_left(self._sorted, prefix)
        high = bisect_right(self._sorted, prefix, key=lambda name: name[: len(prefix)])
        expression = "".join({"*": "([^.]+)", "**": "(.+)"}.get(piece) or re.escape(piece) for piece in pieces)
        fullmatch = re.compile(expression, re.DOTALL).fullmatch
        candidates = (name for name in self._sorted[low:high] if name.endswith(suffix) and middle in name)
        return [found.groups() for name in candidates if (found := fullmatch(name))]


class _Linking:
    """Collects links and problems while rules are applied."""

    def __init__(self, sources: _Tree, targets: _Tree) -> None:
        self.sources = sources
        self.targets = targets
        self.links: list[BlockPair] = []
        self.problems: list[str] = []
        self.left_out: list[int] = []
        #: For each target: the rule that writes it, even if the rule fails, and a leaf that the rule reads.
        self._writers: dict[str, tuple[AnyRule | str, str]] = {}

    def keep_names(self, matched: set[str]) -> None:
        """Link every leaf that is not in ``matched`` to the target of the same name."""
        for name in self.sources.index:
            if name in self.targets.index and name not in matched and name not in self._writers:
                self._rename("no rule, the name is kept", name, name, name)

    def _advice(self, rule: AnyRule) -> str:
        """What to do about a rule that matches nothing."""
        for pattern in _patterns(rule):
            if self.sources.match(f"{pattern}.**"):
                return f"write {pattern}.** for all leaves of the container {pattern}, and .** in the target too"
        return "correct the path, or remove the rule"

    def follow(self, function: Callable[[str], str | None]) -> None:
        rule = f"map_path function {getattr(function, '__qualname__', type(function).__name__)}"
        for name, leaf in self.sources.index.items():
            try:
                target = function(name)
            except Exception as error:
                reason = " ".join(f"{type(error).__name__}: {error}".split())
                self._problem(rule, name, f"it raised {reason}; return None to leave a leaf out")
                continue
            if isinstance(target, str):
                self._rename(rule, name, name, target)
            elif target is None:
                self.left_out.append(leaf)
            else:
                self._problem(rule, name, f"expected a path or None, got {type(target).__name__}; return a str")

    def apply(self, rules: Sequence[AnyRule]) -> set[str]:
        """Link leaves according to the rules, and return the names that the rules match."""
        found = [[self.sources.match(pattern) for pattern in _patterns(rule)] for rule in rules]
        parted = {
            _fill(pattern, captures)
            for rule, matches in zip(rules, found, strict=True)
            if not _is_whole(rule)
            for pattern, each in zip(_patterns(rule), matches, strict=True)
            for captures in each
        }
        renamed: set[str] = set()
        for rule, matches in zip(rules, found, strict=True):
            # One key for each application of the rule. Several sources of a concat may give the same key.
            keys = dict.fromkeys(captures for each in matches for captures in each)
            if not keys:
                self.problems.append(f"{rule!r}: matches no leaf of the source; {self._advice(rule)}")
            elif isinstance(rule, Concat):
                for captures in keys:
                    self._concat(rule, captures)
            elif isinstance(rule, Split):
                for captures in keys:
                    self._split(rule, captures)
            else:
                self._rename_all(rule, keys, parted, renamed)
        return parted | renamed

    def _rename_all(self, rule: Rename, keys: Iterable[tuple[str, ...]], parted: set[str], renamed: set[str]) -> None:
        pattern, whole, idle = path_of(rule.source), _is_whole(rule), True
        for captures in keys:
            name, target = _fill(pattern, captures), _fill(rule.target, captures)
            if whole:
                if name in renamed:
                    continue
                renamed.add(name)
                idle = False
                if captures and name in parted and target not in self.targets.index:
                    continue
            self._rename(rule, rule.source, name, target)
        if whole and idle:
            self.problems.append(
                f"{rule!r}: earlier rules rename every leaf that it matches; put it first, or remove it"
            )

    def _rename(self, rule: AnyRule | str, source: str | Slice, name: str, target: str) -> None:
        leaf, target_leaf = self._source(rule, name), self._target(rule, name, target)
        if leaf is None or target_leaf is None:
            return
        shape, into = self.sources.shapes[leaf], self.targets.shapes[target_leaf]
        if shape is None and not isinstance(source, Slice):
            if into is None:
                self.links.append(BlockPair(leaf, target_leaf, (), (), ()))
            else:
                self._problem(
                    rule, name, f"a plain value cannot become the tensor {target!r}; map it to a value, or leave it out"
                )
            return
        block = self._block(rule, source, name, leaf)
        if block is None:
            return
        start, sizes = block
        if into is None:
            self._problem(
                rule, name, f"a tensor cannot become the plain value {target!r}; map it to a tensor, or leave it out"
            )
        elif sizes != into:
            cut = "" if sizes == shape else f" (a slice of {shape})"
            self._problem(
                rule,
                name,
                f"shape: source {sizes}{cut}, target {into}; map it to a leaf of its own shape, or make {target!r} "
                "with Slice, Split or Concat",
            )
        else:
            self.links.append(BlockPair(leaf, target_leaf, start, (0,) * len(into), sizes))

    def _concat(self, rule: Concat, captures: tuple[str, ...]) -> None:
        target, names = _fill(rule.target, captures), [_fill(path_of(source), captures) for source in rule.sources]
        present = next(name for name in names if name in self.sources.index)
        target_leaf = self._target(rule, present, target)
        blocks: list[tuple[str, int, Shape, Shape]] = []
        for source, name in zip(rule.sources, names, strict=True):
            if name not in self.sources.index:
                self._problem(
                    rule,
                    name,
                    f"missing in the source, though {present!r} is there, to make {target!r}; correct the path, "
                    "or narrow the pattern",
                )
                continue
            leaf = self._source(rule, name)
            block = None if leaf is None else self._block(rule, source, name, leaf)
            if leaf is not None and block is not None:
                blocks.append((name, leaf, *block))
        if target_leaf is None or len(blocks) < len(names):
            return
        into = self.targets.shapes[target_leaf]
        if into is None:
            self._problem(rule, target, "a plain value cannot be made of tensors; expected a tensor in the target")
            return
        axis = self._axis(rule, target, rule.dim, into)
        if axis is None:
            return
        fits, links, at = True, [], 0
        for name, leaf, start, sizes in blocks:
            if not _alike(sizes, into, axis):
                fits = False
                self._problem(
                    rule,
                    name,
                    f"shape: source {sizes}, target {into} of {target!r}, expected the same in all dims but {axis}; "
                    "correct dim, or the sources",
                )
                continue
            links.append(BlockPair(leaf, target_leaf, start, (*[0] * axis, at, *[0] * (len(into) - axis - 1)), sizes))
            at += sizes[axis]
        if fits and at != into[axis]:
            partly = "which is only partly covered" if at < into[axis] else "which is too small"
            self._problem(
                rule,
                target,
                f"size along dim {axis}: expected {into[axis]} for the target, {partly}: got {_sum(links, axis)} "
                "from the sources; correct the sources, or their slices",
            )
        elif fits:
            self.links += links

    def _split(self, rule: Split, captures: tuple[str, ...]) -> None:
        name, targets = _fill(rule.source, captures), [_fill(target, captures) for target in rule.targets]
        leaf, target_leaves = self._source(rule, name), [self._target(rule, name, target) for target in targets]
        if leaf is None:
            return
        shape = self.sources.shapes[leaf]
        if shape is None:
            self._problem(rule, name, "a plain value cannot be split, only renamed; use a Rename")
            return
        axis = self._axis(rule, name, rule.dim, shape)
        if axis is None:
            return
        fits, links, at = True, [], 0
        for number, (target, target_leaf) in enumerate(zip(targets, target_leaves, strict=True)):
            if target_leaf is None:
                fits = False
                continue
            into = self.targets.shapes[target_leaf]
            if into is None:
                fits = False
                self._problem(
                    rule, name, f"a part of a tensor cannot become the plain value {target!r}; correct the target"
                )
                continue
            if not _alike(into, shape, axis):
                fits = False
                self._problem(
                    rule,
                    name,
                    f"shape: source {shape}, target {into} of {target!r}, expected the same in all dims but {axis}; "
                    "correct dim, or the targets",
                )
                continue
            if rule.sizes is not None and rule.sizes[number] != into[axis]:
                fits = False
                self._problem(
                    rule,
                    name,
                    f"size along dim {axis}: expected {into[axis]} for the target {target!r}, got "
                    f"{rule.sizes[number]} from sizes; correct sizes, or leave them out",
                )
                continue
            start = (*[0] * axis, at, *[0] * (len(into) - axis - 1))
            links.append(BlockPair(leaf, target_leaf, start, (0,) * len(into), into))
            at += into[axis]
        if fits and at != shape[axis]:
            self._problem(
                rule,
                name,
                f"size along dim {axis}: expected {shape[axis]} of the source, got {_sum(links, axis)} for the "
                "targets; correct the targets, or rename a Slice to take only some",
            )
        elif fits:
            self.links += links

    def _source(self, rule: AnyRule | str, name: str) -> int | None:
        if name in self.sources.shared:
            self._ambiguous(rule, name, self.sources)
            return None
        return self.sources.index[name]

    def _target(self, rule: AnyRule | str, source: str, target: str) -> int | None:
        """The number of the target leaf that this rule writes whole; no other rule may write it."""
        if target in self._writers:
            other, leaf = self._writers[target]
            by = "the same" if other is rule else _label(other)
            self._problem(
                rule, source, f"{target!r} is already written by {by} from {leaf!r}, blocks overlap; write it only once"
            )
            return None
        self._writers[target] = (rule, source)
        if target not in self.targets.index:
            self._problem(
                rule, source, f"the target has no leaf {target!r}; correct the path, or leave the source's leaf out"
            )
            return None
        if target in self.targets.shared:
            self._ambiguous(rule, target, self.targets)
            return None
        return self.targets.index[target]

    def _block(self, rule: AnyRule | str, source: str | Slice, name: str, leaf: int) -> tuple[Shape, Shape] | None:
        """Start and sizes of a whole leaf, or of a slice of it."""
        shape = self.sources.shapes[leaf]
        if shape is None:
            what = "sliced" if isinstance(source, Slice) else "concatenated"
            self._problem(rule, name, f"a plain value cannot be {what}, only renamed; use a Rename of the whole")
            return None
        if not isinstance(source, Slice):
            return (0,) * len(shape), shape
        inner = self._block(rule, source.path, name, leaf)
        if inner is None:
            return None
        start, sizes = map(list, inner)
        axis = self._axis(rule, name, source.dim, shape)
        if axis is None:
            return None
        stop = sizes[axis] if source.stop is None else source.stop
        if not source.start <= stop <= sizes[axis]:
            given = f"{source.start}:{'' if source.stop is None else stop}"
            self._problem(
                rule,
                name,
                f"slice {given} is out of range: expected at most {sizes[axis]}, the size along dim {axis} of "
                f"{inner[1]}; correct start and stop",
            )
            return None
        start[axis], sizes[axis] = start[axis] + source.start, stop - source.start
        return tuple(start), tuple(sizes)

    def _axis(self, rule: AnyRule | str, name: str, dim: int, shape: Shape) -> int | None:
        if -len(shape) <= dim < len(shape):
            return dim % len(shape)
        dims = f"{-len(shape)} to {len(shape) - 1}" if shape else "none, it is 0-d"
        remedy = "correct dim" if shape else "use a Rename of the whole"
        self._problem(rule, name, f"dim {dim} is out of range: expected {dims}, the shape is {shape}; {remedy}")
        return None

    def _ambiguous(self, rule: AnyRule | str, name: str, tree: _Tree) -> None:
        self._problem(
            rule, name, f"ambiguous, several leaves of the {tree.side} have this dotted path; give one another key"
        )

    def _problem(self, rule: AnyRule | str, leaf: str, text: str) -> None:
        self.problems.append(f"{_label(rule)}: leaf {leaf!r}: {text}")


def _label(rule: AnyRule | str) -> str:
    return rule if isinstance(rule, str) else repr(rule)


def _sum(links: Sequence[BlockPair], axis: int) -> str:
    """The sum of sizes along a dimension, as text."""
    sizes = [found.sizes[axis] for found in links]
    return f"{sum(sizes)} ({' + '.join(map(str, sizes))})"


def _alike(one: Shape, other: Shape, axis: int) -> bool:
    """Whether two shapes are the same in all dims but one."""
    return len(one) == len(other) and one[:axis] == other[:axis] and one[axis + 1 :] == other[axis + 1 :]


def _is_whole(rule: AnyRule) -> bool:
    """Whether a rule renames whole leaves. Such a rule sends each leaf to one target only."""
    return isinstance(rule, Rename) and isinstance(rule.source, str)


def _patterns(rule: AnyRule) -> list[str]:
    """A rule's patterns of source paths."""
    return [path_of(source) for source in (rule.sources if isinstance(rule, Concat) else [rule.source])]


def _fill(pattern: str, captures: tuple[str, ...]) -> str:
    """A pattern with its wildcards replaced, in order."""
    if not captures:
        return pattern
    first, *others = _literals(pattern)
    return first + "".join(map(operator.add, captures, others))


@lru_cache(maxsize=1024)
def _literals(pattern: str) -> tuple[str, ...]:
    """The text before, between and after the wildcards."""
    return tuple(re.split(r"\*+", pattern))
