"""One call of a transport: its :class:`Context`, a receive's :class:`ReceiveRequest`, and what a failed one leaves."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch

from transfuse._limits import Limits
from transfuse._memory.fresh import FreshMemory
from transfuse._options import Options
from transfuse._plan.catalogue import Late
from transfuse._plan.cohorts import Cohort
from transfuse._plan.match import Prepared
from transfuse._plan.outline import Outline
from transfuse._progress import Progress
from transfuse._report import Report
from transfuse._session.remembered import Remembered
from transfuse._session.threads import Caller
from transfuse._state.tensors import Bools
from transfuse._wire.pool import Pool

#: Called once with the sources' descriptions and the target, when all that can be known beforehand is known, and before
#: a byte of a target is written. It raises to forbid the receive.
Permit = Callable[[Sequence[Cohort], Prepared], object]


@dataclass(frozen=True, kw_only=True)
class Context:
    """What all conversations of one call share: limits, timeout, report and progress."""

    #: The peers, as ranks within the group.
    ranks: tuple[int, ...]
    limits: Limits
    #: Where the backend wants its tensors.
    device: torch.device
    #: The timeout, in seconds.
    timeout: float
    caller: Caller
    report: Report
    #: How far the transfer with each peer is, and a function that shows this progress.
    progress: dict[int, Progress]
    show: Callable[[], object] = lambda: None
    #: The transport's lanes, and what it remembers of its earlier transfers.
    lanes: Pool | None = None
    remembered: Remembered = field(default_factory=Remembered)
    #: Whether the group allows conversations with its peers only one after another.
    one_by_one: bool = False


@dataclass(eq=False)
class Partial:
    """The part of a state that a failed receive has. Pass it to ``recv_checkpoint(…, resume=…)`` once, then drop it."""

    step: int | None
    #: The likeness that the sources' offers had.
    likeness: bytes
    parcel_bytes: int
    #: Identifies the plan: what lands where, in which parcels.
    fingerprint: int
    #: Which parcels have arrived, and how many bytes each has.
    landed: Bools
    nbytes: npt.NDArray[np.int64]
    #: The memory of parcels that have no target or landed in a copy (``atomic``). All others lie in the targets.
    memory: FreshMemory
    #: Paths of the target leaves that are half-written.
    torn: tuple[str, ...]
    #: Whether a receive has resumed from this: ``memory`` then belongs to that receive.
    spent: bool = False

    @property
    def received_bytes(self) -> int:
        return int(self.nbytes[self.landed].sum())

    def __repr__(self) -> str:
        return f"Partial(step={self.step}, {self.received_bytes} of {int(self.nbytes.sum())} bytes)"


@dataclass(frozen=True, kw_only=True)
class ReceiveRequest:
    """What the caller of a receive asks for."""

    step: int | None = None
    #: The tree that the ``state_dict`` callback returned (later prepared), or None to receive fresh tensors.
    target: object | None = None
    #: The outline of a target that has been prepared, if it was made beforehand.
    outline: Outline | None = None
    #: What the callback raised.
    failure: BaseException | None = None
    #: Instead of a target: a function that gets the catalogue of all leaves and chooses the targets.
    late: Late | None = None
    #: What an earlier, failed receive left.
    resume: Partial | None = None
    #: Sources that the caller named but that cannot be reached, and why.
    absent: Mapping[str, BaseException] = field(default_factory=dict)
    #: Asked before the first byte lands in a target; with ``atomic`` after the last one has arrived.
    permit: Permit | None = None
    #: Whether each source is asked for the digest of its content.
    version: bool = False
    #: Whether the target is only compared: nothing is fetched, and nothing is written.
    only_compares: bool = False
    #: Hold what arrives aside. The result is an :class:`~transfuse._session.held_state.HeldState`.
    hold: bool = False
    options: Options = field(default_factory=Options)
