"""Trees: a state's containers as plain data, and back.

:func:`flatten` takes a state apart into nodes and leaves, :func:`unflatten` puts it together, :func:`encode` and
:func:`decode` carry nodes over the wire, :func:`merge` lays a source's tree over a target's. A container's class is
named, and on the other side found among those already imported and registered: nothing a peer names is imported.
"""

from __future__ import annotations

import abc
import enum
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils import _pytree as pytree

from transfuse import classes
from transfuse.errors import UnsupportedLeaf
from transfuse.leaves import values

__all__ = ["Kind", "Merged", "Node", "decode", "encode", "flatten", "merge", "paths", "unflatten"]


class Kind(enum.IntEnum):
    DICT = 1
    ORDERED_DICT = 2
    DEFAULT_DICT = 3
    LIST = 4
    TUPLE = 5
    NAMED_TUPLE = 6
    DEQUE = 7
    REGISTERED = 8


_MAPPINGS = {Kind.DICT, Kind.ORDERED_DICT, Kind.DEFAULT_DICT}
_SEQUENCES = {Kind.LIST, Kind.TUPLE, Kind.DEQUE}

#: Factories that a defaultdict may name. A factory is code: only these travel.
_FACTORIES: dict[str, Callable[[], Any]] = {
    f.__name__: f
    for f in (list, dict, set, int, float, str, tuple, bool, bytes, frozenset, complex, OrderedDict, deque)
}


#: Characters of one step of a path: a peer chooses how long its keys are.
MAX_LABEL = 200


def _shown(key: Any) -> str:
    try:
        text = repr(key)
    except Exception:  # an int of more digits than Python prints
        return f"<{type(key).__name__}>"
    return text if len(text) <= MAX_LABEL else text[:MAX_LABEL] + "…"


@dataclass(slots=True)
class Node:
    """One container. ``children`` holds a node for each container below and ``None`` for each leaf.

    ``keys`` are a mapping's keys, a registered node's labels (for display), and empty for sequences.
    ``extra``: ``_metadata`` (ordered dict), factory (default dict), class (named tuple), maxlen (deque),
    (class, context) (registered).
    """

    kind: Kind
    children: list[Node | None]
    keys: list[Any] = field(default_factory=list)
    extra: Any = None

    def label(self, i: int) -> str:
        """How the path goes on from here to child i."""
        if self.kind in _MAPPINGS:
            return f"[{_shown(self.keys[i])}]"
        if self.kind is Kind.REGISTERED:
            return str(self.keys[i])[:MAX_LABEL]
        return f".{self.extra._fields[i]}" if self.kind is Kind.NAMED_TUPLE else f"[{i}]"


def flatten(state: object, *, max_depth: int) -> tuple[Node | None, list[Any]]:
    """Take a state apart. What is no known container is a leaf, and its own codec's business."""
    leaves: list[Any] = []
    trail: list[tuple[Node, int]] = []

    def refuse(reason: str) -> UnsupportedLeaf:
        return UnsupportedLeaf("".join(node.label(i) for node, i in trail), reason)

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
        if kind in _MAPPINGS:
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
        for i, child in enumerate(children):
            if type(child) is torch.Tensor:  # Most are: spare them the call.
                leaves.append(child)
                node.children.append(None)
            else:
                trail.append((node, i))
                node.children.append(walk(child))
                trail.pop()
        return node

    return walk(state), leaves


def _kind_of(cls: type) -> Kind | None:
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
    """Whether a class that a peer has named is a named tuple, without asking its metaclass."""
    fields = [_class_dict.__get__(c).get("_fields") for c in _mro.__get__(cls)]
    plain = type(cls) in (type, abc.ABCMeta)
    return plain and issubclass(cls, tuple) and any(fields) and _kind_of(cls) is Kind.NAMED_TUPLE


_class_dict: Any = vars(type)["__dict__"]
_mro: Any = vars(type)["__mro__"]

_SIMPLE: dict[type, Kind] = {
    dict: Kind.DICT,
    OrderedDict: Kind.ORDERED_DICT,
    defaultdict: Kind.DEFAULT_DICT,
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
        # For labels only: the context that torch's own dataclass nodes return here does not unflatten.
        labels = [str(key) for key, _ in definition.flatten_with_keys_fn(item)[0]]
    return children, labels, context


def unflatten(root: Node | None, leaves: list[Any]) -> Any:
    """Put a state together. ``ValueError`` where a class refuses the children that a peer gave it."""
    supply = iter(leaves)

    def build(node: Node | None) -> Any:
        if node is None:
            return next(supply)
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
                return pytree.SUPPORTED_NODES[cls].unflatten_fn(children, context)
        mapping = dict(zip(node.keys, children, strict=True))
        if node.kind is Kind.DICT:
            return mapping
        if node.kind is Kind.DEFAULT_DICT:
            return defaultdict(node.extra, mapping)
        ordered = OrderedDict(mapping)
        if node.extra is not None:
            ordered._metadata = node.extra  # type: ignore[attr-defined]
        return ordered

    return build(root)


class Paths(Sequence[str]):
    """The path of every leaf, each made when somebody reads it: together they may be far larger than the tree."""

    def __init__(self, root: Node | None) -> None:
        self._root = root
        self._counts: dict[int, int] = {}
        self._length = self._count(root)

    def _count(self, node: Node | None) -> int:
        if node is None:
            return 1
        count = self._counts[id(node)] = sum(self._count(child) for child in node.children)
        return count

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, leaf: Any) -> Any:
        if isinstance(leaf, slice):
            return [self[i] for i in range(*leaf.indices(len(self)))]
        if not 0 <= leaf < len(self):
            raise IndexError(leaf)
        node, path = self._root, []
        while node is not None:
            for i, child in enumerate(node.children):
                count = 1 if child is None else self._counts[id(child)]
                if leaf < count:
                    path.append(node.label(i))
                    node = child
                    break
                leaf -= count
        return "".join(path)


def paths(root: Node | None) -> Paths:
    return Paths(root)


# ---------------------------------------------------------------------------------------------------------- the wire


def encode(root: Node | None) -> Any:
    """Nodes as nested lists: ``0`` for a leaf, ``[kind, extra, keys, children]`` for a container."""

    def walk(node: Node | None, path: str) -> Any:
        if node is None:
            return 0
        try:
            extra = _encode_extra(node)
            if node.kind is Kind.REGISTERED:
                keys: list[Any] = node.keys
            else:
                keys = [key if type(key) is str and key.isascii() else values.encode(key) for key in node.keys]
        except (values.Unencodable, ValueError) as error:
            raise UnsupportedLeaf(path, f"{error}") from error
        children = [0 if child is None else walk(child, path + node.label(i)) for i, child in enumerate(node.children)]
        return [int(node.kind), extra, keys, children]

    return walk(root, "")


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
                    f"a defaultdict with factory {node.extra!r}; a factory is code and does not travel: "
                    f"use one of {', '.join(_FACTORIES)}, or a dict"
                )
            return name
        case Kind.NAMED_TUPLE:
            return classes.name_of(node.extra)
        case Kind.DEQUE:
            return node.extra
        case Kind.REGISTERED:
            cls, context = node.extra
            return [classes.name_of(cls), values.encode(context)]
    return None


def decode(plain: Any, *, max_depth: int) -> tuple[Node | None, int]:
    """The inverse of :func:`encode`, and the number of leaves. ``ValueError`` for anything that it did not write."""
    count = 0

    def walk(item: Any, depth: int) -> Node | None:
        nonlocal count
        if type(item) is int and item == 0:
            count += 1
            return None
        if type(item) is not list or len(item) != 4 or depth > max_depth:
            raise ValueError("malformed tree node")
        code, extra, keys, children = item
        if type(code) is not int or type(keys) is not list or type(children) is not list:
            raise ValueError("malformed tree node")
        kind = Kind(code)
        node = Node(kind, [])
        if kind in _MAPPINGS:
            node.keys = [key if type(key) is str else values.decode(key) for key in keys]
            if len(set(node.keys)) != len(node.keys) or len(node.keys) != len(children):
                raise ValueError("a mapping with repeated keys or keys that do not match its children")
        elif kind is Kind.REGISTERED:
            if len(keys) != len(children) or any(type(key) is not str for key in keys):
                raise ValueError("a registered node whose labels do not match its children")
            node.keys = keys
        elif keys:
            raise ValueError("a sequence with keys")
        node.extra = _decode_extra(kind, extra, len(children))
        node.children = [walk(child, depth + 1) for child in children]
        return node

    try:
        return walk(plain, 1), count
    except (TypeError, LookupError, RecursionError) as error:
        raise ValueError(f"malformed tree: {error}") from error


def _decode_extra(kind: Kind, extra: Any, children: int) -> Any:
    match kind:
        case Kind.ORDERED_DICT:
            return values.decode(extra)
        case Kind.DEFAULT_DICT:
            return None if extra is None else _FACTORIES[extra]
        case Kind.NAMED_TUPLE:
            cls: Any = classes.find(extra)
            if not _is_named_tuple(cls) or len(cls._fields) != children:
                raise ValueError(f"{extra} is no named tuple of {children} fields here")
            return cls
        case Kind.DEQUE:
            if extra is not None and (type(extra) is not int or extra < children):
                raise ValueError("a deque longer than its maxlen")
            return extra
        case Kind.REGISTERED:
            name, context = extra
            cls = classes.find(name)
            # By identity: a metaclass may answer anything else with code.
            if not any(c is cls for c in pytree.SUPPORTED_NODES) or _kind_of(cls) is not Kind.REGISTERED:
                raise ValueError(f"{name} is not registered with torch.utils._pytree in this process")
            return cls, values.decode(context)
    if extra is not None:
        raise ValueError("a plain container with extra data")
    return None


# --------------------------------------------------------------------------------------------------------- in place


@dataclass
class Merged:
    """A source's tree laid over a target's, matched by key path."""

    #: The tree to return: the source's containers, with what only the target has added to them.
    root: Node | None
    #: For each leaf of ``root``: ``i`` for the source's leaf i, ``~j`` for leaf j that only the target has.
    origin: list[int]
    #: For each leaf of the source: the number of the target's leaf at the same path, or -1.
    partner: list[int]
    #: Where a leaf meets a container, or containers of different families meet.
    conflicts: list[str]


def merge(source: Node | None, target: Node | None) -> Merged:
    """Match two trees by key path: mappings by key, sequences by position, registered nodes by class and label."""
    origin: list[int] = []
    partner: list[int] = []
    conflicts: list[str] = []
    next_target = 0

    def skip(node: Node | None) -> None:
        nonlocal next_target
        if node is None:
            next_target += 1
        else:
            for child in node.children:
                skip(child)

    def adopt(node: Node | None) -> Node | None:
        """Take over a subtree that only the target has."""
        nonlocal next_target
        if node is None:
            origin.append(~next_target)
            next_target += 1
            return None
        return Node(node.kind, [adopt(child) for child in node.children], node.keys, node.extra)

    def fresh(node: Node | None) -> Node | None:
        """Take over a subtree that only the source has."""
        if node is None:
            origin.append(len(partner))
            partner.append(-1)
            return None
        return Node(node.kind, [fresh(child) for child in node.children], node.keys, node.extra)

    def starts(node: Node) -> list[int]:
        """The number of the first leaf of each child, counting from the target's next leaf."""
        nonlocal next_target
        before, result = next_target, []
        for child in node.children:
            result.append(next_target)
            skip(child)
        result.append(next_target)
        next_target = before
        return result

    def walk(s: Node | None, t: Node | None, path: str) -> Node | None:
        nonlocal next_target
        if s is None and t is None:
            origin.append(len(partner))
            partner.append(next_target)
            next_target += 1
            return None
        if s is None or t is None or not _same_family(s, t):
            conflicts.append(f"{path or '<root>'}: source has {_describe(s)}, target has {_describe(t)}")
            skip(t)
            return fresh(s)
        mapping = s.kind in _MAPPINGS
        at = starts(t)
        end = at[-1]
        place = {key: i for i, key in enumerate(t.keys)} if mapping else {i: i for i in range(len(t.children))}
        keys = s.keys if mapping else range(len(s.children))
        children: list[Node | None] = []
        for number, (key, child) in enumerate(zip(keys, s.children, strict=True)):
            i = place.pop(key, None)
            if i is None:
                children.append(fresh(child))
            else:
                next_target = at[i]
                children.append(walk(child, t.children[i], path + s.label(number)))
        extra_keys = list(place)
        for i in place.values():
            next_target = at[i]
            children.append(adopt(t.children[i]))
        next_target = end
        maxlen = s.extra if s.kind is Kind.DEQUE else None
        if maxlen is not None and len(children) > maxlen:
            maxlen = len(children)
        return Node(
            s.kind, children, [*s.keys, *extra_keys] if mapping else s.keys, maxlen if s.kind is Kind.DEQUE else s.extra
        )

    root = walk(source, target, "")
    return Merged(root, origin, partner, conflicts)


def _same_family(s: Node, t: Node) -> bool:
    if s.kind in _MAPPINGS:
        return t.kind in _MAPPINGS
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
