"""Renaming: which block of a source's leaf becomes which block of a receiver's. Pure, names and shapes only.

Two programs rarely name the same weights alike. Here the difference is declared as data, :class:`Rename`,
:class:`Concat`, :class:`Split` and :class:`Slice`, and :func:`link` works out before anything moves what goes where,
or says in one line each what does not fit.

Leaves are named by *dotted paths*: all keys down to a leaf, joined by dots. In a pattern ``*`` stands for one or more
characters other than a dot, and ``**`` for one or more characters of any kind, as many as possible. What they stand
for in a source's path is put, in order, into the target's, which has the same wildcards. A key that itself contains a
star can be translated by a function only.
"""

from __future__ import annotations

import operator
import re
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple, TypeAlias, TypeVar

__all__ = ["Concat", "Link", "Linked", "MapPath", "Rename", "Rule", "Slice", "Split", "check", "link"]

Shape: TypeAlias = tuple[int, ...]
T = TypeVar("T")


class Rule:
    """What a list given as ``map_path`` holds: a :class:`Rename`, :class:`Concat` or :class:`Split`.

    A class rather than a union of the three, so that type checkers see a list that mixes them as a list of rules.
    """

    __slots__ = ()


@dataclass(frozen=True)
class Slice:
    """Part of a leaf along one dim, from ``start`` up to ``stop``, or to the end. It stands in place of a source path.

    A negative ``dim`` counts from the end; ``start`` and ``stop`` do not. This takes the queries, the first 64 rows,
    out of a fused weight:

    >>> Rename(Slice("layers.*.qkv", dim=0, start=0, stop=64), "layers.*.q")
    Rename(source=Slice(path='layers.*.qkv', dim=0, start=0, stop=64), target='layers.*.q')
    """

    path: str
    dim: int
    start: int
    stop: int | None = None

    def __post_init__(self) -> None:
        _expect_paths(self, [self.path])
        _expect_ints(self, [self.dim, self.start, *([] if self.stop is None else [self.stop])])
        if self.start < 0 or (self.stop is not None and self.stop < self.start):
            raise ValueError(f"{self!r}: expected 0 <= start <= stop, got {self.start} and {self.stop}")
        _wildcards(self, self.path)


@dataclass(frozen=True)
class Rename(Rule):
    """A leaf, or a :class:`Slice` of one, that becomes a leaf of another name and the same shape.

    Of several renames that match a whole leaf, the first is used. A rename of a slice does not count: one leaf may
    have many of those.

    >>> rules = [Rename("model.**", "**")]
    >>> link(rules, ["model.head.w"], [(4, 8)], ["head.w"], [(4, 6)]).problems[0]  # doctest: +ELLIPSIS
    "Rename(source='model.**', target='**'): leaf 'model.head.w': shape: source (4, 8), target (4, 6); ..."
    """

    source: str | Slice
    target: str

    def __post_init__(self) -> None:
        _expect_paths(self, [self.source], slices=True)
        _expect_paths(self, [self.target])
        _expect_wildcards(self, [_path(self.source), self.target])


@dataclass(frozen=True)
class Concat(Rule):
    """Leaves, or slices of them, that one after another along ``dim`` make up a target. Each has all its dims.

    >>> rules = [Concat(["*.gate", "*.up"], "*.gate_up")]
    >>> for block in link(rules, ["0.gate", "0.up"], [(4, 8), (4, 8)], ["0.gate_up"], [(8, 8)]).links:
    ...     print(block.source, block.target_start, block.sizes)
    0 (0, 0) (4, 8)
    1 (4, 0) (4, 8)
    """

    sources: Sequence[str | Slice]
    target: str
    dim: int = 0

    def __post_init__(self) -> None:
        object.__setattr__(self, "sources", _tuple(self, "sources", self.sources))
        _expect_paths(self, self.sources, slices=True)
        _expect_paths(self, [self.target])
        _expect_ints(self, [self.dim])
        _expect_wildcards(self, [self.target, *map(_path, self.sources)])


@dataclass(frozen=True)
class Split(Rule):
    """A leaf that is cut along ``dim`` into targets. Without ``sizes``, each part is as large as its target.

    The parts make up the whole leaf; to take only some of it, rename a :class:`Slice`.

    >>> rules = [Split("*.qkv", ["*.q", "*.k", "*.v"], sizes=[4, 2, 2])]
    >>> shapes = [(4, 16), (2, 16), (2, 16)]
    >>> for block in link(rules, ["0.qkv"], [(8, 16)], ["0.q", "0.k", "0.v"], shapes).links:
    ...     print(block.target, block.source_start, block.sizes)
    0 (0, 0) (4, 16)
    1 (4, 0) (2, 16)
    2 (6, 0) (2, 16)
    """

    source: str
    targets: Sequence[str]
    dim: int = 0
    sizes: Sequence[int] | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "targets", _tuple(self, "targets", self.targets))
        _expect_paths(self, [self.source, *self.targets])
        _expect_ints(self, [self.dim])
        if self.sizes is not None:
            object.__setattr__(self, "sizes", sizes := _tuple(self, "sizes", self.sizes))
            _expect_ints(self, sizes)
            if len(sizes) != len(self.targets) or min(sizes) < 0:
                raise ValueError(f"{self!r}: expected {len(self.targets)} sizes, one for each target and none negative")
        _expect_wildcards(self, [self.source, *self.targets])


_Rule: TypeAlias = Rename | Concat | Split

#: How a source's paths become a receiver's: patterns to patterns, rules, or a function from a dotted path to another,
#: or to None for a leaf that is left out.
MapPath: TypeAlias = Mapping[str, str] | Sequence[Rule] | Callable[[str], str | None]


class Link(NamedTuple):
    """A block of a source leaf that becomes a block of a target leaf. For plain values and 0-d, all tuples are ()."""

    source: int
    target: int
    source_start: tuple[int, ...]
    target_start: tuple[int, ...]
    sizes: tuple[int, ...]


class Linked(NamedTuple):
    """What :func:`link` found. A target that has links is covered by them, each element once, even with problems."""

    #: Rising by target, then by ``target_start``. A leaf or part without elements has a link as well.
    links: list[Link]
    #: Sources that go nowhere, and targets that get nothing, be it because of a problem.
    unused: list[int]
    untouched: list[int]
    #: One line each: the rule and the leaf, expected and got, and the remedy.
    problems: list[str]


def check(rules: object) -> None:
    """Raise TypeError or ValueError for anything that :func:`link` could not take as rules."""
    if rules is not None and (isinstance(rules, Mapping) or not callable(rules)):
        _listed(rules)


def link(
    rules: MapPath | None,
    sources: Sequence[str],
    source_shapes: Sequence[tuple[int, ...] | None],
    targets: Sequence[str],
    target_shapes: Sequence[tuple[int, ...] | None],
) -> Linked:
    """Find for every target leaf the blocks of source leaves that make it up.

    A leaf that no rule matches keeps its name, if the target has that name and no rule writes to it. A leaf may be
    used by any number of concats, splits and slices, and by one rename besides; a rename with wildcards passes over
    a leaf that is so used if the target has no leaf of the new name. Shapes are global; None is a plain value.
    """
    linking = _Linking(_Tree("source", sources, source_shapes), _Tree("target", targets, target_shapes))
    if rules is None:
        linking.keep_names(set())
    elif callable(rules) and not isinstance(rules, Mapping):
        linking.follow(rules)
    else:
        linking.keep_names(linking.apply(_listed(rules)))
    links = sorted(linking.links, key=lambda found: (found.target, found.target_start, found.sizes, found.source))
    used, touched = {found.source for found in links}, {found.target for found in links}
    return Linked(
        links,
        [leaf for leaf in range(len(sources)) if leaf not in used],
        [leaf for leaf in range(len(targets)) if leaf not in touched],
        linking.problems,
    )


def _listed(rules: object) -> list[_Rule]:
    """Rules from a mapping or a sequence of them."""
    if isinstance(rules, Mapping):
        for source, target in rules.items():
            if not isinstance(source, str) or not isinstance(target, str):
                raise TypeError(
                    f"map_path: a mapping goes from pattern to pattern, both str, got {source!r} to {target!r}; "
                    "use rules for slices, and a function that returns None to leave a leaf out"
                )
        return [Rename(source, target) for source, target in rules.items()]
    if isinstance(rules, Rename | Concat | Split | Slice):
        raise TypeError(f"map_path: expected a list of rules, got the single {rules!r}; put it in a list")
    if not isinstance(rules, Sequence) or isinstance(rules, str | bytes | bytearray):
        raise TypeError(
            "map_path: expected a mapping of patterns, a sequence of Rename, Concat and Split, or a function from path "
            f"to path, got {type(rules).__name__}"
        )
    for number, rule in enumerate(rules):
        if not isinstance(rule, Rename | Concat | Split):
            hint = "; a slice goes inside of a Rename or Concat" if isinstance(rule, Slice) else ""
            raise TypeError(f"map_path: rule {number} is {rule!r}, expected a Rename, Concat or Split{hint}")
    return list(rules)


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
        """What the wildcards of a pattern stand for, once for each name that it matches."""
        if "*" not in pattern:
            return [()] if pattern in self.index else []
        if not self._sorted:
            self._sorted = sorted(self.index)
        # Most names are ruled out by what they lack, for much less than a regex takes.
        pieces = re.split(r"(\*+)", pattern)
        prefix, middle, suffix = pieces[0], max(pieces[2:-1:2], key=len, default=""), pieces[-1]
        low = bisect_left(self._sorted, prefix)
        high = bisect_right(self._sorted, prefix, key=lambda name: name[: len(prefix)])
        expression = "".join({"*": "([^.]+)", "**": "(.+)"}.get(piece) or re.escape(piece) for piece in pieces)
        fullmatch = re.compile(expression, re.DOTALL).fullmatch
        candidates = (name for name in self._sorted[low:high] if name.endswith(suffix) and middle in name)
        return [found.groups() for name in candidates if (found := fullmatch(name))]


class _Linking:
    """Links and problems as they are found."""

    def __init__(self, sources: _Tree, targets: _Tree) -> None:
        self.sources = sources
        self.targets = targets
        self.links: list[Link] = []
        self.problems: list[str] = []
        #: The rule that writes each target, in vain or not, and a leaf it reads.
        self._writers: dict[str, tuple[_Rule | str, str]] = {}

    def keep_names(self, matched: set[str]) -> None:
        """Link every other leaf to the target of the same name."""
        for name in self.sources.index:
            if name in self.targets.index and name not in matched and name not in self._writers:
                self._rename("no rule, the name is kept", name, name, name)

    def follow(self, function: Callable[[str], str | None]) -> None:
        rule = f"map_path function {getattr(function, '__qualname__', type(function).__name__)}"
        for name in self.sources.index:
            try:
                target = function(name)
            except Exception as error:
                reason = " ".join(f"{type(error).__name__}: {error}".split())
                self._problem(rule, name, f"it raised {reason}; return None to leave a leaf out")
                continue
            if isinstance(target, str):
                self._rename(rule, name, name, target)
            elif target is not None:
                self._problem(rule, name, f"expected a path or None, got {type(target).__name__}; return a str")

    def apply(self, rules: Sequence[_Rule]) -> set[str]:
        """Link what the rules say, and return the names that they match."""
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
            # One key for each application of the rule; a concat has several sources that may give it.
            keys = dict.fromkeys(captures for each in matches for captures in each)
            if not keys:
                self.problems.append(f"{rule!r}: matches no leaf of the source; correct the path, or remove the rule")
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
        pattern, whole, idle = _path(rule.source), _is_whole(rule), True
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
                f"{rule!r}: every leaf that it matches is renamed by an earlier rule; put it first, or remove it"
            )

    def _rename(self, rule: _Rule | str, source: str | Slice, name: str, target: str) -> None:
        leaf, place = self._source(rule, name), self._target(rule, name, target)
        if leaf is None or place is None:
            return
        shape, into = self.sources.shapes[leaf], self.targets.shapes[place]
        if shape is None and not isinstance(source, Slice):
            if into is None:
                self.links.append(Link(leaf, place, (), (), ()))
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
            self.links.append(Link(leaf, place, start, (0,) * len(into), sizes))

    def _concat(self, rule: Concat, captures: tuple[str, ...]) -> None:
        target, names = _fill(rule.target, captures), [_fill(_path(source), captures) for source in rule.sources]
        present = next(name for name in names if name in self.sources.index)
        place = self._target(rule, present, target)
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
        if place is None or len(blocks) < len(names):
            return
        into = self.targets.shapes[place]
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
            links.append(Link(leaf, place, start, (*[0] * axis, at, *[0] * (len(into) - axis - 1)), sizes))
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
        leaf, places = self._source(rule, name), [self._target(rule, name, target) for target in targets]
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
        for number, (target, place) in enumerate(zip(targets, places, strict=True)):
            if place is None:
                fits = False
                continue
            into = self.targets.shapes[place]
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
            links.append(Link(leaf, place, start, (0,) * len(into), into))
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

    def _source(self, rule: _Rule | str, name: str) -> int | None:
        if name in self.sources.shared:
            self._ambiguous(rule, name, self.sources)
            return None
        return self.sources.index[name]

    def _target(self, rule: _Rule | str, source: str, target: str) -> int | None:
        """The number of a target leaf that is to be written whole, by this rule only."""
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

    def _block(self, rule: _Rule | str, source: str | Slice, name: str, leaf: int) -> tuple[Shape, Shape] | None:
        """Start and sizes of a leaf or slice."""
        shape = self.sources.shapes[leaf]
        if shape is None:
            what = "sliced" if isinstance(source, Slice) else "concatenated"
            self._problem(rule, name, f"a plain value cannot be {what}, only renamed; use a Rename of the whole")
            return None
        if not isinstance(source, Slice):
            return (0,) * len(shape), shape
        axis = self._axis(rule, name, source.dim, shape)
        if axis is None:
            return None
        stop = shape[axis] if source.stop is None else source.stop
        if not source.start <= stop <= shape[axis]:
            given = f"{source.start}:{'' if source.stop is None else stop}"
            self._problem(
                rule,
                name,
                f"slice {given} is out of range: expected at most {shape[axis]}, the size along dim {axis} of {shape}; "
                "correct start and stop",
            )
            return None
        start, sizes = [0] * len(shape), list(shape)
        start[axis], sizes[axis] = source.start, stop - source.start
        return tuple(start), tuple(sizes)

    def _axis(self, rule: _Rule | str, name: str, dim: int, shape: Shape) -> int | None:
        if -len(shape) <= dim < len(shape):
            return dim % len(shape)
        dims = f"{-len(shape)} to {len(shape) - 1}" if shape else "none, it is 0-d"
        remedy = "correct dim" if shape else "use a Rename of the whole"
        self._problem(rule, name, f"dim {dim} is out of range: expected {dims}, the shape is {shape}; {remedy}")
        return None

    def _ambiguous(self, rule: _Rule | str, name: str, tree: _Tree) -> None:
        self._problem(
            rule, name, f"ambiguous, several leaves of the {tree.side} have this dotted path; give one another key"
        )

    def _problem(self, rule: _Rule | str, leaf: str, text: str) -> None:
        self.problems.append(f"{_label(rule)}: leaf {leaf!r}: {text}")


def _label(rule: _Rule | str) -> str:
    return rule if isinstance(rule, str) else repr(rule)


def _sum(links: Sequence[Link], axis: int) -> str:
    """How sizes add up, as text."""
    sizes = [found.sizes[axis] for found in links]
    return f"{sum(sizes)} ({' + '.join(map(str, sizes))})"


def _alike(one: Shape, other: Shape, axis: int) -> bool:
    """Whether two shapes are the same in all dims but one."""
    return len(one) == len(other) and one[:axis] == other[:axis] and one[axis + 1 :] == other[axis + 1 :]


def _is_whole(rule: _Rule) -> bool:
    """Whether it renames whole leaves, of which each goes to one place only."""
    return isinstance(rule, Rename) and isinstance(rule.source, str)


def _patterns(rule: _Rule) -> list[str]:
    """The patterns of source paths."""
    return [_path(source) for source in (rule.sources if isinstance(rule, Concat) else [rule.source])]


def _path(source: str | Slice) -> str:
    return source.path if isinstance(source, Slice) else source


def _fill(pattern: str, captures: tuple[str, ...]) -> str:
    """A pattern with its wildcards replaced, in order."""
    if not captures:
        return pattern
    first, *others = _literals(pattern)
    return first + "".join(map(operator.add, captures, others))


@lru_cache(maxsize=1024)
def _literals(pattern: str) -> tuple[str, ...]:
    """What stands before, between and after the wildcards."""
    return tuple(re.split(r"\*+", pattern))


def _wildcards(rule: Rule | Slice, pattern: str) -> list[str]:
    found = re.findall(r"\*+", pattern) if "*" in pattern else []
    if any(len(stars) > 2 for stars in found):
        raise ValueError(f"{rule!r}: {pattern!r} has more than two stars in a row; expected * or **")
    return found


def _expect_wildcards(rule: _Rule, patterns: Sequence[str]) -> None:
    expected = _wildcards(rule, patterns[0])
    for pattern in patterns[1:]:
        got = _wildcards(rule, pattern)
        if got != expected:
            raise ValueError(
                f"{rule!r}: expected the same wildcards in the same order on all sides, got "
                f"{' '.join(expected) or 'none'} in {patterns[0]!r} and {' '.join(got) or 'none'} in {pattern!r}"
            )


def _expect_paths(rule: Rule | Slice, paths: Iterable[object], slices: bool = False) -> None:
    for path in paths:
        if not isinstance(path, str) and not (slices and isinstance(path, Slice)):
            kinds = "str or Slice" if slices else "str"
            raise TypeError(f"{rule!r}: expected {kinds} for a path, got {type(path).__name__}")


def _expect_ints(rule: Rule | Slice, numbers: Iterable[object]) -> None:
    for number in numbers:
        if not isinstance(number, int) or isinstance(number, bool):
            raise TypeError(f"{rule!r}: expected int for dims and sizes, got {type(number).__name__}")


def _tuple(rule: _Rule, field: str, items: Sequence[T]) -> tuple[T, ...]:
    """A sequence as a tuple, so that the rule can neither change nor lose its hash."""
    if isinstance(items, str) or not isinstance(items, Sequence):
        raise TypeError(f"{rule!r}: expected a list or tuple of {field}, got {type(items).__name__}")
    if not items:
        raise ValueError(f"{rule!r}: expected one or more {field}, got none")
    return tuple(items)
