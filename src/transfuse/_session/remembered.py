"""What a transport remembers of its transfers, so that a later transfer of the same structure does nothing twice.

A structure is a manifest without its values: a step counter does not change it. The source remembers how it has cut
parcels. The receiver remembers the manifest, which then need not be sent again, and its plan. A plan is used again only
if the target has the same outline: all that a plan depends on is read anew each time, and compared.

Nothing here holds a tensor of the caller's; a history holds copies. Any thread may call every method.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Generic, NamedTuple, TypeVar

from transfuse._limits import Limits
from transfuse._memory.as_is import ReusablePlan
from transfuse._memory.assembled import Assembly
from transfuse._plan.outline import Outline
from transfuse._plan.parcels import Parcels
from transfuse._session.history import History
from transfuse._state.leaves.codec import Coordinate
from transfuse._state.manifest import Described, LastDescription, Manifest, Wire, describe

#: How many structures, plans and ways to cut parcels are remembered: those used last.
MAX_STRUCTURES = 4
MAX_PLANS = 4
MAX_CUTS = 16

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


class Structure(NamedTuple):
    """A manifest that has been checked, and its form on the wire."""

    wire: Wire
    manifest: Manifest


class PlanKey(NamedTuple):
    """What a plan depends on, but for the target: the sources, and the options that planning reads."""

    #: For each cohort: a digest of its structure or of the structure's likeness, the coordinates that its manifest is
    #: for if they matter, and its sources with their coordinates unless any source will do.
    cohorts: tuple[tuple[bytes, tuple[Coordinate, ...], tuple[tuple[int, tuple[Coordinate, ...]], ...]], ...]
    parcel_bytes: int
    strict: bool | None
    cast: bool
    rules: str


class _Recent(Generic[K, V]):
    """A dict that forgets what has not been used for the longest time."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._items: OrderedDict[K, V] = OrderedDict()

    def __len__(self) -> int:
        return len(self._items)

    def get(self, key: K) -> V | None:
        if key in self._items:
            self._items.move_to_end(key)
        return self._items.get(key)

    def pop(self, key: K) -> V | None:
        return self._items.pop(key, None)

    def put(self, key: K, value: V) -> None:
        self._items[key] = value
        self._items.move_to_end(key)
        while len(self._items) > self._most:
            self._items.popitem(last=False)


class Remembered:
    """What a transport, or several that share it, remember."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._last = LastDescription()
        self._sent: _Recent[bytes, bool] = _Recent(MAX_STRUCTURES)
        self._cuts: _Recent[Hashable, tuple[Parcels, int | None]] = _Recent(MAX_CUTS)
        self._structures: _Recent[bytes, Structure] = _Recent(MAX_STRUCTURES)
        #: What a source with ``history=1`` last gave out to receivers with ``delta``: of each entry of its state.
        self._histories: dict[str | None, History] = {}
        self._plans: _Recent[PlanKey, tuple[Outline, ReusablePlan | Assembly]] = _Recent(MAX_PLANS)

    # -- at the source

    def describe(self, state: object, limits: Limits) -> Described:
        """Describe a state. What was computed for the last description is used again if it still holds."""
        with self._lock:
            last, self._last = self._last, LastDescription()
        try:
            return describe(state, limits, last)
        finally:
            with self._lock:
                self._last = last

    def sent(self, structure: bytes) -> bool:
        """Record that a structure is sent. Return whether it was sent before."""
        with self._lock:
            before = self._sent.get(structure) is not None
            self._sent.put(structure, True)
            return before

    def cut(self, key: Hashable, make: Callable[[], tuple[Parcels, int | None]]) -> tuple[Parcels, int | None, bool]:
        """Parcels and their digest, as ``make`` returns them; and whether they were remembered."""
        with self._lock:
            known = self._cuts.get(key)
        if known is not None:
            return *known, True
        made = make()
        with self._lock:
            self._cuts.put(key, made)
        return *made, False

    def history_of(self, entry: str | None) -> History:
        """What was given out of an entry of the state; None: of the whole."""
        with self._lock:
            return self._histories.setdefault(entry, History())

    # -- at the receiver

    def structure(self, digest: bytes) -> Structure | None:
        with self._lock:
            return self._structures.get(digest)

    def keep_structure(self, structure: Structure) -> None:
        with self._lock:
            self._structures.put(structure.manifest.structure, structure)

    @property
    def has_plans(self) -> bool:
        return bool(self._plans)

    def take_plan(self, key: PlanKey, outline: Outline) -> ReusablePlan | Assembly | None:
        """Take out the plan for such sources and such a target, if there is one: only one receive may use it."""
        with self._lock:
            known = self._plans.pop(key)
        if known is None or not outline.is_like(known[0]) or not outline.can_be_written():
            return None
        return known[1]

    def keep_plan(self, key: PlanKey, outline: Outline, plan: ReusablePlan | Assembly) -> None:
        outline.forget()
        with self._lock:
            self._plans.put(key, (outline, plan))
