"""Trees: a state's containers as plain data, and back.

:func:`flatten` takes a state apart into nodes and leaves, and :func:`unflatten` builds the state again. :func:`encode`
and :func:`decode` carry nodes over the wire. :func:`merge` matches a source's tree with a target's. A container's class
travels by name, and the receiver looks the name up among classes that are already imported and registered there:
nothing that a peer names is imported.
"""

from __future__ import annotations

import abc
import cmath
import copy
import enum
import math
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, islice, repeat
from operator import is_
from typing import Any

import numpy as np
import torch
from torch.utils import _pytree as pytree

from transfuse._errors import UnsupportedLeaf
from transfuse._state import class_names
from transfuse._state.leaves import values


class Kind(enum.IntEnum):
    DICT = 1
    ORDERED_DICT = 2
    DEFAULT_DICT = 3
    LIST = 4
    TUPLE = 5
    NAMED_TUPLE = 6
    DEQUE = 7
    REGISTERED = 8
    COUNTER = 9


MAPPINGS = {Kind.DICT, Kind.ORDERED_DICT, Kind.DEFAULT_DICT, Kind.COUNTER}
_SEQUENCES = {Kind.LIST, Kind.TUPLE, Kind.DEQUE}
_PLAIN = {Kind.DICT, Kind.LIST, Kind.TUPLE}  # These kinds have only keys and children, no extra data.

#: Containers with at most this many children share a node with equal ones. For larger containers the lookup costs more
#: than it saves.
MAX_COMMON = 64

#: The factories that a defaultdict may have. A factory is code, so no other factory travels.
_FACTORIES: dict[str, Callable[[], Any]] = {
    f.__name__: f
    for f in (list, dict, set, int, float, str, tuple, bool, bytes, frozenset, complex, OrderedDict, deque)
}


#: The most characters of one step of a path: a peer chooses how long its keys are.
MAX_LABEL = 200


def _shown(key: Any) -> str:
    try:
        text = repr(key)
    except Exception:  # an int of more digits than Python prints
        return f"<{type(key).__name__}>"
    return text if len(text) <= MAX_LABEL else text[:MAX_LABEL] + "…"


def label(key: Any) -> str:
    """The step of a path that leads to a mapping's entry."""
    return f"[{_shown(key)}]"


@dataclass(slots=True, eq=False)
class Node:
    """One container. ``children`` holds a node for each child that is a container, and ``None`` for each leaf.

    ``keys`` are a mapping's keys or a registered node's labels (for display), and empty for sequences.
    ``extra`` is the ``_metadata`` of an ordered dict, the factory of a default dict, the class of a named tuple, the
    maxlen of a deque, or (class, context) of a registered node. ``leaves`` is the number of leaves at any depth.
    """

    kind: Kind
    children: list[Node | None]
    keys: list[Any] = field(default_factory=list)
    extra: Any = None
    leaves: int = 0

    @property
    def flat(self) -> bool:
        """Whether all children are leaves. Most large containers are flat, and then no child has to be looked at."""
        return self.children.count(None) == len(self.children)

    def label(self, i: int) -> str:
        """The step of a path that leads from this node to child i."""
        if self.kind in MAPPINGS:
            return label(self.keys[i])
        if self.kind is Kind.REGISTERED:
            return str(self.keys[i])[:MAX_LABEL]
        return f".{self.extra._fields[i]}" if self.kind is Kind.NAMED_TUPLE else f"[{i}]"


def leads(root: Node | None, trail: Sequence[Any]) -> bool:
    """Whether a tree has something at the end of these keys."""
    node = root
    for key in trail:
        if node is None:
            return False
        keys: Sequence[Any] = node.keys if node.kind in MAPPINGS else range(len(node.children))
        if key not in keys:
            return False
        node = node.children[keys.index(key)]
    return True


def _path(trail: list[tuple[Node, int]]) -> str:
    return "".join(node.label(i) for node, i in trail)


def flatten(state: object, *, max_depth: int) -> tuple[Node | None, list[Any]]:
    """Take a state apart. Everything that is not a known container is a leaf.

    Small containers of the same number of leaves under the same keys share one node.
    """
    leaves: list[Any] = []
    trail: list[tuple[Node, int]] = []
    alike: dict[tuple[Any, ...], Node] = {}

    def refuse(reason: str) -> UnsupportedLeaf:
        return UnsupportedLeaf(_path(trail), reason)

    def walk(item: Any) -> Node | None:
        cls = type(item)
        kind = _kind_of(cls)
        if kind is None:
            leaves.append(item)
            return None
        if len(trail) >= max_depth:
            raise refuse(f"containers nested deeper than {max_depth} (a container that holds itself?)")
        node = Node(kind, [])
        children: list[Any]
        if kind in MAPPINGS:
            node.keys, children = list(item.keys()), list(item.values())
            if kind is Kind.DEFAULT_DICT:
                node.extra = item.default_factory
            elif kind is Kind.ORDERED_DICT:
                attributes = vars(item)
                if attributes.keys() - {"_metadata"}:
                    raise refuse(
                        f"an OrderedDict with attributes {sorted(attributes)}; only _metadata travels, remove the rest"
                    )
                node.extra = attributes.get("_metadata")
        elif kind is Kind.REGISTERED:
            try:
                children, node.keys, context = _open_registered(item)
            except Exception as error:
                raise refuse(f"its registered flatten function failed: {error!r}") from error
            node.extra = (cls, context)
        else:
            children = list(item)
            if getattr(item, "__dict__", None):
                raise refuse(f"a {cls.__name__} with attributes {sorted(vars(item))}, which do not travel; remove them")
            node.extra = cls if kind is Kind.NAMED_TUPLE else item.maxlen if kind is Kind.DEQUE else None
        before = len(leaves)
        if all(_kind_of(cls) is None for cls in set(map(type, children))):
            leaves.extend(children)
            node.children, node.leaves = [None] * len(children), len(children)
            return alike.setdefault((kind, len(children), *node.keys), node) if _is_common(node) else node
        for i, child in enumerate(children):
            if type(child) is torch.Tensor:  # The most frequent case: save the call.
                leaves.append(child)
                node.children.append(None)
            else:
                trail.append((node, i))
                node.children.append(walk(child))
                trail.pop()
        node.leaves = len(leaves) - before
        return node

    try:
        return walk(state), leaves
    finally:
        walk = None  # type: ignore[assignment]  # It refers to itself: a cycle that would keep all leaves until garbage is collected.


def _is_common(node: Node) -> bool:
    """Whether thousands of containers like this one are likely (an optimizer has one for each parameter)."""
    return node.kind in _PLAIN and len(node.children) <= MAX_COMMON and _all_strings(node.keys)


def _kind_of(cls: type) -> Kind | None:
    if cls is torch.Tensor:  # The most frequent case.
        return None
    simple = _SIMPLE.get(cls)
    if simple is not None:
        return simple
    # Classes that are both a value and registered (enum constants, torch.Size) travel as values.
    if cls in pytree.SUPPORTED_NODES and not issubclass(cls, (enum.Enum, torch.Tensor, torch.Size)):
        return Kind.REGISTERED
    if issubclass(cls, tuple) and hasattr(cls, "_fields") and hasattr(cls, "_make"):
        return Kind.NAMED_TUPLE
    return None


def _is_named_tuple(cls: type) -> bool:
    """Whether a class that a peer has named is a named tuple. Runs no code of the class's metaclass."""
    fields = [_class_dict.__get__(c).get("_fields") for c in _mro.__get__(cls)]
    plain = type(cls) in (type, abc.ABCMeta)
    return plain and issubclass(cls, tuple) and any(fields) and _kind_of(cls) is Kind.NAMED_TUPLE


_class_dict: Any = vars(type)["__dict__"]
_mro: Any = vars(type)["__mro__"]

_SIMPLE: dict[type, Kind] = {
    dict: Kind.DICT,
    OrderedDict: Kind.ORDERED_DICT,
    defaultdict: Kind.DEFAULT_DICT,
    Counter: Kind.COUNTER,
    list: Kind.LIST,
    tuple: Kind.TUPLE,
    deque: Kind.DEQUE,
}


def _open_registered(item: Any) -> tuple[list[Any], list[str], Any]:
    definition = pytree.SUPPORTED_NODES[type(item)]
    children, context = definition.flatten_fn(item)
    children = list(children)
    labels = [f"[{i}]" for i in range(len(children))]
    if definition.flatten_with_keys_fn is not None:
        # Only for the labels: torch's own dataclass nodes return a context here that unflatten_fn does not accept.
        labels = [str(key) for key, _ in definition.flatten_with_keys_fn(item)[0]]
    return children, labels, context


def unflatten(root: Node | None, leaves: list[Any]) -> Any:
    """Build a state from its nodes and leaves. ``ValueError`` if a class refuses the children that a peer sent."""
    supply = iter(leaves)

    def build(node: Node | None) -> Any:
        if node is None:
            return next(supply)
        if node.flat:
            children = list(islice(supply, len(node.children)))
        else:
            children = [next(supply) if child is None else build(child) for child in node.children]
        match node.kind:
            case Kind.LIST:
                return children
            case Kind.TUPLE:
                return tuple(children)
            case Kind.DEQUE:
                return deque(children, node.extra)
            case Kind.NAMED_TUPLE:
                return node.extra._make(children)
            case Kind.REGISTERED:
                cls, context = node.extra
                return pytree.SUPPORTED_NODES[cls].unflatten_fn(children, _own(context))
        mapping = dict(zip(node.keys, children, strict=True))
        if node.kind is Kind.DICT:
            return mapping
        if node.kind is Kind.DEFAULT_DICT:
            return defaultdict(node.extra, mapping)
        if node.kind is Kind.COUNTER:
            return Counter(mapping)
        ordered = OrderedDict(mapping)
        if node.extra is not None:
            ordered._metadata = _own(node.extra)  # type: ignore[attr-defined]
        return ordered

    try:
        return build(root)
    finally:
        build = None  # type: ignore[assignment]  # As in flatten().


def _own(extra: Any) -> Any:
    """A copy for one result: a tree may be built from the same nodes again, and torch writes into ``_metadata``."""
    try:
        return copy.deepcopy(extra)
    except Exception:  # Some object of the target's that cannot be copied.
        return extra


class Paths(Sequence[str]):
    """The path of every leaf. A path is made when it is read: all paths together may be far larger than the tree."""

    def __init__(self, root: Node | None) -> None:
        self._root = root

    def __len__(self) -> int:
        return leaves_below(self._root)

    def __iter__(self) -> Iterator[str]:
        """All paths, in one walk through the tree."""

        def walk(node: Node | None, path: str) -> Iterator[str]:
            if node is None:
                yield path
                return
            for i, child in enumerate(node.children):
                yield from walk(child, path + node.label(i))

        return walk(self._root, "")

    def __getitem__(self, leaf: Any) -> Any:
        if isinstance(leaf, slice):
            return [self[i] for i in range(*leaf.indices(len(self)))]
        if not 0 <= leaf < len(self):
            raise IndexError(leaf)
        node, path = self._root, []
        while node is not None:
            for i, child in enumerate(node.children):
                count = leaves_below(child)
                if leaf < count:
                    path.append(node.label(i))
                    node = child
                    break
                leaf -= count
        return "".join(path)


def leaves_below(node: Node | None) -> int:
    return 1 if node is None else node.leaves


def paths(root: Node | None) -> Paths:
    return Paths(root)


def dotted(root: Node | None, *, longest: int | None = MAX_LABEL) -> list[str]:
    """The name of every leaf: its keys joined by dots, the way state dicts name their entries.

    ``longest``: the most characters of one key, so that names can be shown and take little memory; None: all.
    """

    def walk(node: Node | None, path: list[str]) -> Iterator[str]:
        if node is None:
            yield ".".join(path)
            return
        for i, child in enumerate(node.children):
            if node.kind in MAPPINGS:
                key = str(node.keys[i]) if type(node.keys[i]) is not int else _shown(node.keys[i])
            else:
                key = node.label(i).strip(".[]'\"")
            yield from walk(child, [*path, key[:longest]])

    return list(walk(root, []))


def mappings(root: Node | None) -> Iterator[tuple[Node, list[int]]]:
    """Every mapping of a tree, with the numbers of the leaves that it holds itself, not in containers below it."""

    def walk(node: Node, first: int) -> Iterator[tuple[Node, list[int]]]:
        own: list[int] = []
        for child in node.children:
            if child is None:
                own.append(first)
            else:
                yield from walk(child, first)
            first += leaves_below(child)
        if node.kind in MAPPINGS:
            yield node, own

    return iter(()) if root is None else walk(root, 0)


# ---------------------------------------------------------------------------------------------------------- the wire


def encode(root: Node | None) -> Any:
    """Nodes as nested lists: ``0`` for a leaf, ``[kind, extra, keys, children]`` for a container.

    If all children are leaves, ``children`` is one zero byte for each instead of a list of zeros. Each such container
    of a plain kind gets the next number, counting from 1. Where the same node occurs again, the number stands for it.
    """
    trail: list[tuple[Node, int]] = []
    numbers: dict[int, int] = {}

    def walk(node: Node | None) -> Any:
        if node is None:
            return 0
        if id(node) in numbers:
            return numbers[id(node)]
        try:
            extra = _encode_extra(node)
            keys = node.keys if node.kind is Kind.REGISTERED else _encode_keys(node.keys)
        except (values.Unencodable, ValueError) as error:
            raise UnsupportedLeaf(_path(trail), f"{error}") from error
        if node.flat:
            if node.kind in _PLAIN:
                numbers[id(node)] = len(numbers) + 1
            return [int(node.kind), extra, keys, bytes(len(node.children))]
        children = []
        for i, child in enumerate(node.children):
            trail.append((node, i))
            children.append(walk(child))
            trail.pop()
        return [int(node.kind), extra, keys, children]

    return walk(root)


def _encode_keys(keys: list[Any]) -> list[Any]:
    if _all_strings(keys) and all(map(str.isascii, keys)):
        return keys
    return [key if type(key) is str and key.isascii() else values.encode(key) for key in keys]


def _all_strings(keys: Sequence[Any]) -> bool:
    return set(map(type, keys)) <= {str}


def _encode_extra(node: Node) -> Any:
    match node.kind:
        case Kind.ORDERED_DICT:
            return values.encode(node.extra)
        case Kind.DEFAULT_DICT:
            if node.extra is None:
                return None
            name = getattr(node.extra, "__name__", None)
            if name is None or _FACTORIES.get(name) is not node.extra:
                raise values.Unencodable(
                    f"a defaultdict with factory {node.extra!r}, which is code and does not travel: "
                    f"use one of {', '.join(_FACTORIES)}, or a dict"
                )
            return name
        case Kind.NAMED_TUPLE:
            return class_names.name_of(node.extra)
        case Kind.DEQUE:
            return node.extra
        case Kind.REGISTERED:
            cls, context = node.extra
            return [class_names.name_of(cls), values.encode(context)]
    return None


def decode(plain: Any, *, max_depth: int) -> tuple[Node | None, int]:
    """The inverse of :func:`encode`, and the number of leaves. ``ValueError`` for what ``encode`` never writes."""
    count = 0
    numbered: list[Node] = []

    def walk(item: Any, depth: int) -> Node | None:
        nonlocal count
        if type(item) is int:
            if item == 0:
                count += 1
                return None
            if depth > max_depth or not 0 < item <= len(numbered):
                raise ValueError("malformed tree node")
            node = numbered[item - 1]
            count += node.leaves
            return node
        if type(item) is not list or len(item) != 4 or depth > max_depth:
            raise ValueError("malformed tree node")
        code, extra, keys, children = item
        if type(code) is not int or type(keys) is not list or type(children) not in (list, bytes):
            raise ValueError("malformed tree node")
        kind, before = Kind(code), count
        node = Node(kind, [], _decode_keys(kind, keys, len(children)), _decode_extra(kind, extra, len(children)))
        if type(children) is list:
            node.children = [walk(child, depth + 1) for child in children]
        elif children.count(0) == len(children):
            node.children = [None] * len(children)
            count += len(children)
            if kind in _PLAIN:
                numbered.append(node)
        else:
            raise ValueError("malformed tree node: its leaves must be zero bytes")
        node.leaves = count - before
        return node

    try:
        return walk(plain, 1), count
    except (TypeError, LookupError, RecursionError) as error:
        raise ValueError(f"malformed tree: {error}") from error


def _decode_keys(kind: Kind, keys: list[Any], children: int) -> list[Any]:
    if kind in MAPPINGS:
        if not _all_strings(keys):
            keys = [key if type(key) is str else values.decode(key) for key in keys]
        if len(set(keys)) != len(keys) or len(keys) != children:
            raise ValueError(f"a mapping has {len(keys)} keys ({len(set(keys))} different) for {children} children")
    elif kind is Kind.REGISTERED:
        if len(keys) != children or not _all_strings(keys):
            raise ValueError(f"a registered node has {len(keys)} labels for {children} children, or labels not str")
    elif keys:
        raise ValueError("a sequence has keys")
    return keys


def _decode_extra(kind: Kind, extra: Any, children: int) -> Any:
    match kind:
        case Kind.ORDERED_DICT:
            return values.decode(extra)
        case Kind.DEFAULT_DICT:
            return None if extra is None else _FACTORIES[extra]
        case Kind.NAMED_TUPLE:
            cls: Any = class_names.find(extra)
            if not _is_named_tuple(cls) or len(cls._fields) != children:
                raise ValueError(f"{extra} is not a named tuple of {children} fields in this process")
            return cls
        case Kind.DEQUE:
            if extra is not None and (type(extra) is not int or extra < children):
                raise ValueError(f"a deque of {children} items is longer than its maxlen, or maxlen is not an int")
            return extra
        case Kind.REGISTERED:
            name, context = extra
            cls = class_names.find(name)
            # Compare by identity: any other question to the class may run code of its metaclass.
            if not any(c is cls for c in pytree.SUPPORTED_NODES) or _kind_of(cls) is not Kind.REGISTERED:
                raise ValueError(f"{name} is not registered with torch.utils._pytree in this process")
            return cls, values.decode(context)
    if extra is not None:
        raise ValueError(f"a {kind.name.lower()} has extra data")
    return None


# --------------------------------------------------------------------------------------------------------- in place


@dataclass
class Merged:
    """A source's tree and a target's, matched by key path."""

    #: The tree to return: the source's containers, and added to mappings the children that only the target has, if
    #: there are leaves in them or ``keep_empty`` says so. A sequence is the source's: nothing is ever added to it.
    root: Node | None
    #: For each leaf of ``root``: ``i`` for the source's leaf i, ``~j`` for the target's leaf j, which the source lacks.
    origin: list[int]
    #: For each leaf of the source: the number of the target's leaf at the same path, or -1.
    partner: list[int]
    #: One line for each path at which one tree has a leaf and the other a container, or containers of different kinds.
    conflicts: list[str]
    #: Leaves of the target behind the end of a shorter sequence of the source. They are not in ``root``.
    beyond: list[int] = field(default_factory=list)

    @classmethod
    def all_of_source(cls, root: Node | None, count: int) -> Merged:
        """The source's tree of ``count`` leaves, without a target."""
        return cls(root, list(range(count)), [-1] * count, [])

    @classmethod
    def all_of_target(cls, root: Node | None, count: int) -> Merged:
        """The target's tree of ``count`` leaves, whatever the source's tree is."""
        return cls(_with_own_context(root), [~leaf for leaf in range(count)], [], [])

    @property
    def only_in_target(self) -> Iterator[int]:
        """Leaves of the target that the source does not have."""
        return (~origin for origin in self.origin if origin < 0)

    def arrange(self, of_source: Sequence[Any], of_target: Sequence[Any]) -> list[Any]:
        """The leaves of ``root``, from the leaves of the source and of the target."""
        return [of_source[origin] if origin >= 0 else of_target[~origin] for origin in self.origin]


def merge(source: Node | None, target: Node | None, *, keep_empty: bool = False) -> Merged:
    """Match two trees by key path: mappings by key, sequences by position, registered nodes by class and label.

    ``keep_empty``: add also containers without leaves that only the target has.
    """
    origin: list[int] = []
    partner: list[int] = []
    conflicts: list[str] = []
    beyond: list[int] = []
    trail: list[tuple[Node, int]] = []
    next_target = 0

    def adopt(node: Node | None) -> Node | None:
        """Add a subtree that only the target has."""
        nonlocal next_target
        origin.extend(range(~next_target, ~(next_target + leaves_below(node)), -1))
        next_target += leaves_below(node)
        return _with_own_context(node)

    def fresh(node: Node | None) -> Node | None:
        """Add a subtree that only the source has."""
        origin.extend(range(len(partner), len(partner) + leaves_below(node)))
        partner.extend(repeat(-1, leaves_below(node)))
        return node

    def pair(count: int) -> None:
        """Pair the next ``count`` leaves of the source with the next ``count`` leaves of the target, in order."""
        nonlocal next_target
        origin.extend(range(len(partner), len(partner) + count))
        partner.extend(range(next_target, next_target + count))
        next_target += count

    def walk(s: Node | None, t: Node | None) -> Node | None:
        nonlocal next_target
        if s is None and t is None:
            pair(1)
            return None
        if s is None or t is None or not _same_family(s, t):
            conflicts.append(f"{_path(trail) or '<root>'}: source has {_describe(s)}, target has {_describe(t)}")
            next_target += leaves_below(t)
            return fresh(s)
        mapping = s.kind in MAPPINGS
        if _same_leaves(s, t, mapping):
            pair(len(s.children))
            return s
        at = list(accumulate(map(leaves_below, t.children), initial=next_target))
        position = {key: i for i, key in enumerate(_marks(t.keys) if mapping else range(len(t.children)))}
        keys = _marks(s.keys) if mapping else range(len(s.children))
        children: list[Node | None] = []
        before = len(origin)
        for number, (key, child) in enumerate(zip(keys, s.children, strict=True)):
            i = position.pop(key, None)
            if i is None:
                children.append(fresh(child))
            else:
                next_target = at[i]
                trail.append((s, number))
                children.append(walk(child, t.children[i]))
                trail.pop()
        all_keys = s.keys
        if mapping:
            own = [i for i in position.values() if keep_empty or leaves_below(t.children[i])]
            all_keys = [*s.keys, *(t.keys[i] for i in own)]
            for i in own:
                next_target = at[i]
                children.append(adopt(t.children[i]))
        else:
            beyond.extend(range(at[min(len(s.children), len(t.children))], at[-1]))
        next_target = at[-1]
        return Node(s.kind, children, all_keys, s.extra, len(origin) - before)

    root = walk(source, target)
    return Merged(root, origin, partner, conflicts, beyond)


def _with_own_context(node: Node | None) -> Node | None:
    """The same nodes with copies of the target's context: a plan is used again, and the target's own may change."""
    if node is None or (node.flat and node.kind in _PLAIN):
        return node
    children = list(map(_with_own_context, node.children))
    return replace(node, children=children, extra=_own_extra(node))


def _own_extra(node: Node) -> Any:
    if node.kind is Kind.REGISTERED:
        cls, context = node.extra
        return cls, _own(context)
    return _own(node.extra) if node.kind is Kind.ORDERED_DICT else node.extra


def _same_leaves(s: Node, t: Node, mapping: bool) -> bool:
    """Whether two containers of one family hold only leaves, equally many and under the same keys."""
    if len(s.children) != len(t.children) or not s.flat or not t.flat:
        return False
    # Only strings are compared here: other keys of a target may define == in any way.
    return not mapping or (_all_strings(t.keys) and s.keys == t.keys)


def _marks(keys: Sequence[Any]) -> Sequence[Any]:
    """Keys in the form in which they are compared. A NaN does not equal itself, so NaNs are replaced by a mark.

    If a mapping has several NaN keys, the first matches the first of the other mapping, and so on.
    """
    if _all_strings(keys):  # The most frequent case.
        return keys
    seen: Counter[Any] = Counter()
    marks = []
    for key in keys:
        mark = _without_nan(key)
        if mark is not key:
            seen[mark] += 1
            mark = (_NAN, mark, seen[mark])
        marks.append(mark)
    return marks


#: Stands for any NaN. Unlike a NaN it equals itself.
_NAN = object()


def _without_nan(key: Any) -> Any:
    """The key itself, or if it has a NaN in it, a copy with ``_NAN`` in its place."""
    # Decide by type: other keys of a target may define == in any way.
    if isinstance(key, (float, np.floating)):
        return _NAN if math.isnan(key) else key
    if type(key) is complex:
        return (_without_nan(key.real), _without_nan(key.imag)) if cmath.isnan(key) else key
    if type(key) is tuple:
        inside = tuple(map(_without_nan, key))
        return key if all(map(is_, inside, key)) else inside
    return key


def _same_family(s: Node, t: Node) -> bool:
    if s.kind in MAPPINGS:
        return t.kind in MAPPINGS
    if s.kind in _SEQUENCES:
        return t.kind in _SEQUENCES
    if s.kind is not t.kind or len(s.children) != len(t.children):
        return False
    if s.kind is Kind.REGISTERED:
        return s.extra[0] is t.extra[0] and s.keys == t.keys
    return s.extra is t.extra


def _describe(node: Node | None) -> str:
    if node is None:
        return "a leaf"
    if node.kind is Kind.REGISTERED:
        return f"a {node.extra[0].__name__} with {len(node.children)} children"
    if node.kind is Kind.NAMED_TUPLE:
        return f"a {node.extra.__name__} with {len(node.children)} fields"
    return f"a {node.kind.name.lower().replace('_', ' ')} of {len(node.children)}"
