"""A state that has arrived and is verified, and is held aside until the caller has it installed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from transfuse._errors import StateError, some_of
from transfuse._memory.building import Builder
from transfuse._memory.held import HeldLanding
from transfuse._memory.streams import devices_of
from transfuse._plan.match import prepare
from transfuse._plan.outline import Outline, outline
from transfuse._session.context import Context
from transfuse._session.planning import Accepted


class HeldState:
    """What a receive that holds has brought. It may be installed again if that has failed or was interrupted."""

    def __init__(self, accepted: Accepted, landing: HeldLanding, context: Context, outline: Outline | None) -> None:
        """Build the state, and examine it. No target is written."""
        self._builder = Builder(landing.manifest, accepted.build_context, accepted.registry)
        self._landing = landing
        landing.kept = accepted.kept
        self._built = landing.build(self._builder)
        self._target = accepted.target
        self._outline = outline
        #: Whether an install has begun to write.
        self._began = False
        self._limits, self._seconds = context.limits, context.timeout
        #: Lets later receives use the plan again. Called when this one needs it no more.
        self.remember: Callable[[], None] = lambda: None
        context.report.held_bytes = landing.nbytes

    @property
    def state(self) -> Any:
        """The tree of the state, whose targets have their old bytes until :meth:`install`."""
        return self._built.state

    @property
    def devices(self) -> set[Any]:
        """The accelerators on which targets lie."""
        return devices_of(self._target.leaves)

    def check_target(self, tree: Callable[[], object] | None) -> None:
        """Raise if the targets are no longer those for which this was planned. No target is written.

        ``tree``: returns the target's tree of now. None: it is made of the same tensors.
        """
        if self._outline is None:
            return
        target = prepare(self._target.target if tree is None else tree(), self._limits)
        now = outline(target, self._limits)
        if now is None or not now.is_like(self._outline):
            raise StateError(
                "the target is not what it was when this was fetched: tensors have moved, or have another shape, type "
                "or storage. Nothing was written; fetch again"
            )
        if not now.can_be_written():
            raise StateError("memory of the target can no longer be written. Nothing was written; fetch again")

    def check_kept(self) -> None:
        """Raise if what the targets had already is no longer there. No target is written."""
        changed = self._landing.changed(self._seconds)
        if changed:
            done = "An install that failed has written some of them" if self._began else "Nothing was written"
            raise StateError(
                f"{len(changed)} leaves have changed since they were compared with the source's, and delta=True "
                f"has kept parts of them: {some_of(changed)}. {done}; fetch again, or change nothing of the "
                "target before install()"
            )

    def install(self) -> None:
        """Write the targets."""
        self._began = True
        try:
            self._landing.install(self._seconds)
        finally:
            self._landing.bump_versions()
        for leaf, target in self._built.settling:
            self._builder.settle(leaf, target)
