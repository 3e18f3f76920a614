"""The rules that ``map_path=`` takes: they translate a source's names into a target's.

Two programs rarely name the same weights alike. The caller declares the difference as data: :class:`Rename`,
:class:`Concat`, :class:`Split` and :class:`Slice`. ``_plan.apply_rules`` works out from these rules which block goes
where.

Leaves are named by *dotted paths*: all keys down to a leaf, joined by dots. In a pattern ``*`` stands for one or more
characters other than a dot, and ``**`` for one or more characters of any kind, as many as possible. The text that each
wildcard matches in the source's path replaces, in order, the same wildcard in the target's path. A key that itself
contains a star can be translated only by a function.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias, TypeVar

T = TypeVar("T")


class Rule:
    """The base of :class:`Rename`, :class:`Concat` and :class:`Split`, the items of a list for ``map_path``.

    A base class rather than a union, so that type checkers accept a list that mixes the three as a list of rules.
    """

    __slots__ = ()


@dataclass(frozen=True)
class Slice:
    """Part of a leaf along one dim, from ``start`` up to ``stop``, or to the end. Use it in place of a source path.

    In place of a path it takes another slice: a box of a leaf is a slice of a slice.

    A negative ``dim`` counts from the end; ``start`` and ``stop`` do not. This takes the queries, the first 64 rows,
    out of a fused weight:

    >>> Rename(Slice("layers.*.qkv", dim=0, start=0, stop=64), "layers.*.q")
    Rename(source=Slice(path='layers.*.qkv', dim=0, start=0, stop=64), target='layers.*.q')
    """

    path: str | Slice
    dim: int
    start: int
    stop: int | None = None

    def __post_init__(self) -> None:
        _expect_paths(self, [self.path], slices=True)
        _expect_ints(self, [self.dim, self.start, *([] if self.stop is None else [self.stop])])
        if self.start < 0 or (self.stop is not None and self.stop < self.start):
            raise ValueError(f"{self!r}: expected 0 <= start <= stop, got {self.start} and {self.stop}")
        _wildcards(self, path_of(self))


@dataclass(frozen=True)
class Rename(Rule):
    """A leaf, or a :class:`Slice` of one, becomes a leaf of another name and the same shape.

    If several renames match a whole leaf, the first is used. Renames of slices do not count here: one leaf may have
    many of those.

    >>> rules = [Rename("model.**", "**")]
    >>> link(rules, ["model.head.w"], [(4, 8)], ["head.w"], [(4, 6)]).problems[0]  # doctest: +ELLIPSIS
    "Rename(source='model.**', target='**'): leaf 'model.head.w': shape: source (4, 8), target (4, 6); ..."
    """

    source: str | Slice
    target: str

    def __post_init__(self) -> None:
        _expect_paths(self, [self.source], slices=True)
        _expect_paths(self, [self.target])
        _expect_wildcards(self, [path_of(self.source), self.target])


@dataclass(frozen=True)
class Concat(Rule):
    """Leaves, or slices of leaves, joined along ``dim`` in this order, become one target. All have the same dims.

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
        _expect_wildcards(self, [self.target, *map(path_of, self.sources)])


@dataclass(frozen=True)
class Split(Rule):
    """A leaf, cut along ``dim``, becomes several targets. Without ``sizes``, each part is as large as its target.

    The parts must make up the whole leaf. To take only some of a leaf, rename a :class:`Slice`.

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


#: All kinds of rules.
AnyRule: TypeAlias = Rename | Concat | Split

#: The types that ``map_path`` takes: a mapping from pattern to pattern, a list of rules, or a function from the
#: source's dotted path to the target's, or to None to leave the leaf out.
MapPath: TypeAlias = Mapping[str, str] | Sequence[Rule] | Callable[[str], str | None]


def check(rules: object) -> None:
    """Raise TypeError or ValueError for anything that ``_plan.apply_rules.link`` does not take as rules."""
    if rules is not None and (isinstance(rules, Mapping) or not callable(rules)):
        listed(rules)


def listed(rules: object) -> list[AnyRule]:
    """The rules of a mapping or of a sequence, as a list."""
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


def path_of(source: str | Slice) -> str:
    """The pattern of a source, which may be a :class:`Slice`."""
    return path_of(source.path) if isinstance(source, Slice) else source


def _wildcards(rule: Rule | Slice, pattern: str) -> list[str]:
    found = re.findall(r"\*+", pattern) if "*" in pattern else []
    if any(len(stars) > 2 for stars in found):
        raise ValueError(f"{rule!r}: {pattern!r} has more than two stars in a row; expected * or **")
    return found


def _expect_wildcards(rule: AnyRule, patterns: Sequence[str]) -> None:
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


def _tuple(rule: AnyRule, field: str, items: Sequence[T]) -> tuple[T, ...]:
    """A sequence as a tuple, so that the rule cannot change and stays hashable."""
    if isinstance(items, str) or not isinstance(items, Sequence):
        raise TypeError(f"{rule!r}: expected a list or tuple of {field}, got {type(items).__name__}")
    if not items:
        raise ValueError(f"{rule!r}: expected one or more {field}, got none")
    return tuple(items)
