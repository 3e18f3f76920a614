"""``State``: what a job gives to ``heal``, ``keep``, ``serve``, ``fetch`` and ``hub``, named in one way.

A state is one of these:

- a mapping, nested too, whose values are objects with ``state_dict()`` and ``load_state_dict()`` (modules, optimizers,
  schedulers), tensors, and plain values: what ``torch.distributed.checkpoint`` takes;
- one such object, or its bound method ``state_dict``;
- a callable that returns a tree, with a ``load`` that takes what could not land in place;
- a :class:`State`, which holds one of these, so that several calls share it.

:meth:`State.tree` is what travels: each object is replaced by what its ``state_dict()`` returns. What has arrived is
taken back by :class:`transfuse._job.receipt.Receipt`.
"""

from __future__ import annotations

import dataclasses
import inspect
import logging
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any, NamedTuple, cast
from weakref import WeakKeyDictionary

import torch

from transfuse import _arguments
from transfuse._errors import StateError
from transfuse._memory import device_copies
from transfuse._state import trees
from transfuse._state.leaves.block import Block, is_tensor

logger = logging.getLogger("transfuse")

#: What somebody who reads the state does while the job changes it.
Changing = Callable[[], AbstractContextManager[object]]


def is_stateful(value: object) -> bool:
    """Whether an object can say its state and take it back: a module, an optimizer, a scheduler, a loader, …"""
    if isinstance(value, type | torch.Tensor | Mapping):
        return False
    return callable(getattr(value, "state_dict", None)) and callable(getattr(value, "load_state_dict", None))


def belongs_to_rank(value: object) -> bool:
    """Whether an object is each rank's own, and no other rank's may take its place: :class:`transfuse.RNG`."""
    return bool(getattr(value, "is_rank_state", False)) and is_stateful(value)


class StatePart(NamedTuple):
    """An object of a state, or plain values of it: one value, or a container of nothing but values."""

    #: How errors name it.
    path: str
    #: The keys that lead to it.
    trail: tuple[Any, ...]
    value: Any
    #: What holds it; None for the state itself.
    parent: Any

    @property
    def is_object(self) -> bool:
        return is_stateful(self.value)

    def holds(self, path: str) -> bool:
        return path.startswith(self.path)

    def can_take(self) -> bool:
        """Whether another value can be put in the place of this one."""
        return isinstance(self.value, dict | list) or isinstance(self.parent, dict | list)

    def take(self, arrived: Any) -> None:
        """Take what has arrived for the whole state. Containers stay the same objects: somebody may hold them."""
        for key in self.trail:
            arrived = arrived[key]
        if self.is_object:
            self.value.load_state_dict(arrived)
        elif isinstance(self.value, list) and isinstance(arrived, list):
            self.value[:] = arrived
        elif isinstance(self.value, dict) and isinstance(arrived, dict):
            self.value.clear()
            self.value.update(arrived)
        else:
            self.parent[self.trail[-1]] = arrived


def _children(value: object) -> Iterable[tuple[Any, Any]] | None:
    """The key and the value of each child of a container that can hold objects; None if it is none."""
    if isinstance(value, Mapping):
        return value.items()
    return enumerate(cast("list[Any]", value)) if type(value) in (list, tuple) else None


def _places(value: Any, path: str, trail: tuple[Any, ...], parent: Any) -> tuple[list[StatePart], bool]:
    """The places in a value, and whether there is nothing but plain values in it."""
    if is_stateful(value):
        return [StatePart(path, trail, value, parent)], False
    children = _children(value)
    if children is None:
        is_plain = not is_tensor(value) and not dataclasses.is_dataclass(value)
        return [StatePart(path, trail, value, parent)] if is_plain else [], is_plain
    places: list[StatePart] = []
    all_plain = True
    for key, child in children:
        if isinstance(child, torch.Tensor):  # The most frequent case: save the call.
            all_plain = False
            continue
        found, is_plain = _places(child, path + trees.label(key), (*trail, key), value)
        places += found
        all_plain = all_plain and is_plain
    return ([StatePart(path, trail, value, parent)] if all_plain and trail else places), all_plain


def _is_plain(value: Any) -> bool:
    return _places(value, "", (0,), None)[1]


def _expand(value: Any, takes: Callable[[object], bool]) -> Any:
    """The value, with what ``state_dict()`` returns in place of each object in it. The rest stays as it is."""
    if is_stateful(value):
        return value.state_dict() if takes(value) else {}
    if isinstance(value, Mapping):
        others = {key: child for key, child in value.items() if not isinstance(child, torch.Tensor)}
        left_out = {key for key, child in others.items() if is_stateful(child) and not takes(child)}
        made = {key: _expand(child, takes) for key, child in others.items() if key not in left_out}
        if not left_out and all(made[key] is child for key, child in others.items()):
            return value
        return {key: made.get(key, child) for key, child in value.items() if key not in left_out}
    if type(value) in (list, tuple):
        children = [_expand(child, takes) for child in value]
        same = all(one is other for one, other in zip(children, value, strict=True))
        return value if same else type(value)(children)
    return value


def _holds_objects(value: object) -> bool:
    return is_stateful(value) or any(_holds_objects(child) for _, child in _children(value) or ())


def _load_all(given: Any, arrived: Any, path: str, parent: Any, key: Any) -> None:
    """Put what has arrived into a value: objects and tensors keep their identity, and so do containers."""
    if is_stateful(given):
        given.load_state_dict(arrived)
        return
    children, others = _children(given), _children(arrived)
    if children is not None and others is not None and isinstance(given, Mapping) is isinstance(arrived, Mapping):
        mine, theirs = dict(children), dict(others)
        if mine.keys() == theirs.keys() or _holds_objects(given):
            for name in [name for name in mine if name in theirs]:
                _load_all(mine[name], theirs[name], path + trees.label(name), given, name)
            apart = [path + trees.label(name) for name in mine.keys() ^ theirs.keys()]
            if apart:
                logger.warning("only the state given or the state restored has %s", ", ".join(sorted(apart)))
            return
    if isinstance(given, Block):
        if not isinstance(arrived, Block) or (given.start, given.shape) != (arrived.start, arrived.shape):
            raise StateError(f"{path or '<root>'} is {_shown(given)}, and what was restored is {_shown(arrived)}")
        given, arrived = given.tensor, arrived.tensor
    if isinstance(given, torch.Tensor):
        if not isinstance(arrived, torch.Tensor) or (given.shape, given.dtype) != (arrived.shape, arrived.dtype):
            raise StateError(f"{path or '<root>'} is {_shown(given)}, and what was restored is {_shown(arrived)}")
        with torch.no_grad():
            device_copies.fill(given, arrived)
        return
    place = StatePart(path, (key,), given, parent)
    if place.can_take():
        place.take({key: arrived})
    elif not _is_plain(given) or given != arrived:
        raise StateError(
            f"{path or '<root>'} cannot be replaced by {_shown(arrived)} where it is: put values into a mapping or a "
            "list, or give load_rank_state="
        )


def _shown(value: object) -> str:
    if isinstance(value, torch.Tensor):
        return f"a tensor of {value.dtype} and shape {list(value.shape)}"
    return repr(value) if isinstance(value, Block) else f"a {type(value).__name__}"


class State:
    """A job's state: objects, tensors and values, in one of the forms that every call takes. Calls can share it.

    Args:
        state: a mapping, nested too, of objects with ``state_dict()`` and ``load_state_dict()``, tensors and values;
            one such object; or a callable that returns a tree.
        load: with a callable: called with the whole state after it has been received. Objects need none: those for
            which something could not land in place get it through their own ``load_state_dict``.
        hooks: announce each ``optimizer.step()`` of an optimizer in the mapping as a change, while somebody serves or
            keeps this state. False: only :meth:`mutating` announces changes.
    """

    def __init__(self, state: object, *, load: Callable[[Any], object] | None = None, hooks: bool = True) -> None:
        _arguments.check_callable("load", load)
        _arguments.check_flags(hooks=hooks)
        if load is None and inspect.ismethod(state) and state.__name__ == "state_dict" and is_stateful(state.__self__):
            state = state.__self__
        kind = f"the class {state.__name__}" if isinstance(state, type) else type(state).__name__
        is_class = isinstance(state, type) and hasattr(state, "state_dict")
        if state is None or is_class or isinstance(state, str | bytes | Iterator):
            raise TypeError(
                "state takes a mapping of objects, tensors and values, an object with state_dict() and "
                f"load_state_dict(), or a callable that returns a tree, got {kind}"
            )
        self._given = state
        self.loads = load
        #: Whether a callable makes the tree: then only ``load`` can take back what does not land in place.
        self.is_made = callable(state) and not is_stateful(state)
        self._hooks = _Hooks(self) if hooks else None
        self._lock = threading.Lock()
        self._readers: list[Changing] = []

    @classmethod
    def of(cls, state: object, load: Callable[[Any], object] | None = None) -> State:
        """The state that a call was given: as it is if it is a :class:`State`, or a new one."""
        if not isinstance(state, cls):
            return cls(state, load=load)
        if load is not None:
            raise TypeError("load= belongs to the State: transfuse.State(state_dict, load=...)")
        return state

    def tree(self) -> Any:
        """The tree that travels: each object is replaced by what its ``state_dict()`` returns now.

        Objects that belong to each rank alone (:class:`transfuse.RNG`) are left out.
        """
        if self.is_made:
            return self._given()  # type: ignore[operator]
        return _expand(self._given, lambda value: not belongs_to_rank(value))

    def whole_tree(self) -> Any:
        """The same with all objects: for a state that is a rank's own as a whole."""
        return self._given() if self.is_made else _expand(self._given, lambda value: True)  # type: ignore[operator]

    def rank_tree(self) -> Any:
        """The objects that belong to this rank alone, by their paths; empty if there are none."""
        return {place.path: place.value.state_dict() for place in self.places() if belongs_to_rank(place.value)}

    def load_rank_tree(self, arrived: Any) -> None:
        for place in self.places():
            if place.path in arrived:
                place.value.load_state_dict(arrived[place.path])

    def load_all(self, arrived: Any) -> None:
        """Put all that has arrived into the objects, tensors and containers of a state that no callable makes."""
        if not self.is_made:
            _load_all(self._given, arrived, "", None, None)

    def places(self) -> list[StatePart]:
        """The objects of a state that is not made by a callable, and the plain values in it."""
        return [] if self.is_made else _places(self._given, "", (), None)[0]

    # --------------------------------------------------------------------------------------------------- changes

    @contextmanager
    def mutating(self) -> Iterator[None]:
        """Change the state within this block. All who serve, keep or publish this state are waited for, together.

        Blocks may be nested, and ``optimizer.step()`` is one by itself if the optimizer is in the mapping.
        """
        with self._lock:
            readers = list(self._readers)
        with ExitStack() as stack:
            for changing in readers:
                stack.enter_context(changing())
            yield

    def join(self, changing: Changing) -> None:
        """Somebody reads this state from now on, and enters ``changing()`` while the job changes it."""
        with self._lock:
            self._readers.append(changing)
        hooks = self._hooks
        for place in self.places():
            if hooks is not None and isinstance(place.value, torch.optim.Optimizer):
                hooks.add(place.value)

    def leave(self, changing: Changing) -> None:
        """The reader reads no more. With the last one the hooks go."""
        with self._lock:
            if changing in self._readers:
                self._readers.remove(changing)
            is_last = not self._readers
        if is_last and self._hooks is not None:
            self._hooks.remove()


class _Hooks:
    """Hooks on optimizers, so that ``optimizer.step()`` is a block of :meth:`State.mutating`."""

    def __init__(self, state: State) -> None:
        # A cycle would keep the state's tensors until garbage is collected.
        self._state = weakref.ref(state)
        self._handles: WeakKeyDictionary[torch.optim.Optimizer, list[Any]] = WeakKeyDictionary()
        #: The block that each optimizer's step is in. A step that raises leaves its block to the next step.
        self._open: WeakKeyDictionary[torch.optim.Optimizer, ExitStack] = WeakKeyDictionary()

    def add(self, optimizer: torch.optim.Optimizer) -> None:
        if optimizer not in self._handles:
            self._handles[optimizer] = [
                optimizer.register_step_pre_hook(self._begin),
                optimizer.register_step_post_hook(self._end),
            ]

    def remove(self) -> None:
        for optimizer, handles in list(self._handles.items()):
            for handle in handles:
                handle.remove()
            self._end(optimizer)
        self._handles.clear()

    def _begin(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        self._end(optimizer)
        if (state := self._state()) is None:
            return
        stack = ExitStack()
        stack.enter_context(state.mutating())
        self._open[optimizer] = stack

    def _end(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        stack = self._open.pop(optimizer, None)
        if stack is not None:
            stack.close()
