"""``Receipt``: a state receives another one's values, as a whole. What ``heal``, ``restore`` and ``fetch`` share.

1. The state's tree is the target. It is asked for twice: tensors that lie elsewhere the second time are copies.
2. When everything is planned and no target has been written, :meth:`Receipt.check` finds what cannot land in place,
   and who will take it: objects by their ``load_state_dict``, mappings and lists for plain values, or the caller's
   ``load``. If nobody will, it raises and names the leaves.
3. When everything has landed, :meth:`Receipt.load` lets them take it, each once, and looks whether they have.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch.distributed.device_mesh import DeviceMesh

from transfuse._errors import StateError, TargetMismatch
from transfuse._job.state import State, StatePart, belongs_to_rank
from transfuse._limits import Limits
from transfuse._options import FetchKeywords, OptionKeywords
from transfuse._plan.cohorts import Cohort
from transfuse._plan.left_over import Unplaced, check_nothing_was_removed, unplaced
from transfuse._plan.match import Prepared
from transfuse._state import trees
from transfuse._state.leaves.codec import MeshDescription
from transfuse._state.leaves.dtensors import is_dtensor
from transfuse._state.returned_copies import ReturnedCopies


class Receipt:
    """One receive into a state. ``ask`` calls what may take long, and does what the caller has to do meanwhile."""

    def __init__(self, state: State, ask: Callable[[Callable[[], Any]], Any] = lambda call: call()) -> None:
        self._state = state
        self.target = ask(state.tree)
        self._copies = ReturnedCopies(self.target, ask(state.tree))
        self._places = [place for place in state.places() if not belongs_to_rank(place.value)]
        #: Objects and plain values that take what could not land in place.
        self._takers: list[StatePart] = []

    @property
    def has_copies(self) -> bool:
        """Whether the target has copies of what the state holds."""
        return bool(self._copies.paths)

    def mesh(self) -> Callable[[MeshDescription], DeviceMesh] | None:
        """For the option ``mesh``: DTensors that arrive fresh, as new moments, get one of the target's own."""
        _, leaves = trees.flatten(self.target, max_depth=Limits.from_environment().max_depth)
        found = (leaf.device_mesh for leaf in leaves if is_dtensor(leaf))
        meshes = list({id(mesh): mesh for mesh in found}.values())
        return (lambda described: _most_like(described, meshes)) if meshes else None

    def permit(
        self,
        cohorts: Sequence[Cohort],
        target: Prepared,
        *,
        options: FetchKeywords | OptionKeywords,
        vote: Callable[[Exception | None], object],
    ) -> None:
        """For calls of several ranks: everything is planned, and no target has been touched.

        ``vote`` tells the others what is wrong here, if anything, and raises if something is wrong elsewhere.
        """
        failure: Exception | None = None
        try:
            self.check(cohorts, target, options)
        except Exception as error:
            failure = error
        vote(failure)
        if failure is not None:
            raise failure

    def check(self, cohorts: Sequence[Cohort], target: Prepared, options: FetchKeywords | OptionKeywords) -> None:
        """Raise if the target is not like the sources', or something can neither land nor be taken by somebody."""
        check_nothing_was_removed(cohorts, target, options)
        homeless = self.find_takers(cohorts, target, options)
        if self._state.loads is None and self._state.is_made:
            self._copies.refuse()
        if self._state.loads is None and homeless:
            self._refuse(homeless)

    def find_takers(
        self, cohorts: Sequence[Cohort], target: Prepared, options: FetchKeywords | OptionKeywords
    ) -> list[str]:
        """Find who takes what cannot land in place. Returns the paths of leaves that nobody takes.

        Raises if a list of the source ends before an object of the target's list: nothing can be given to that.
        """
        if self._state.is_made:
            return [each.path for each in unplaced(cohorts, target)]
        places = self._places
        takers: dict[Any, StatePart] = {}
        homeless, absent = list[str](), list[str]()
        copies = [Unplaced(path, is_value=False) for path in self._copies.paths]
        for path, is_value, is_beyond in [*unplaced(cohorts, target), *copies]:
            # Several: a path shows only the beginning of a long key.
            found = [place for place in places if place.holds(path)]
            if is_beyond and not any(trees.leads(cohorts[0].manifest.root, place.trail) for place in found):
                absent.append(path)
                continue
            able = [place for place in found if place.is_object or (is_value and place.can_take())]
            # An object that is there twice is given its state once.
            takers |= {id(place.value) if place.is_object else place.trail: place for place in able}
            if not able:
                homeless.append(path)
        if absent and options.get("strict") is not False:
            raise TargetMismatch([f"{path}: only in the target" for path in absent])
        self._takers = list(takers.values())
        return homeless

    def _refuse(self, homeless: list[str]) -> None:
        names = ", ".join(path or "<root>" for path in homeless[:10]) + (", …" if len(homeless) > 10 else "")
        if self._state.is_made:
            raise StateError(
                f"{len(homeless)} leaves cannot land in what state_dict() returns, and there is no load= to get them: "
                f"{names}"
            )
        raise StateError(
            f"{len(homeless)} leaves cannot land in the state that was given, and no object in it takes them: {names}. "
            "Give the objects themselves (the optimizer, not optimizer.state_dict()), or a callable with load="
        )

    def load(self, arrived: Any) -> None:
        """After everything has landed: let the objects take what could not land in place, each once."""
        if self._state.loads is not None:
            self._state.loads(arrived)
            self._takers = []
        for place in self._takers:
            try:
                place.take(arrived)
            except Exception as error:
                call = f"{place.path}: {type(place.value).__name__}.load_state_dict()"
                raise StateError(f"{call} has raised {type(error).__name__}: {error}") from error
        self._copies.check_taken(self._state.tree)


def _most_like(described: MeshDescription, meshes: Sequence[DeviceMesh]) -> DeviceMesh:
    """The mesh for a DTensor that was on another one: of the same names and shape, or of as many dimensions."""

    def likeness(mesh: DeviceMesh) -> tuple[bool, bool, bool]:
        names, shape = mesh.mesh_dim_names, tuple(mesh.shape)
        return mesh.ndim == len(described.shape), names == described.dim_names, shape == described.shape

    return max(meshes, key=likeness)
