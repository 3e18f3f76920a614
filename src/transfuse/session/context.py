"""One call of a transport: its :class:`Context`, which both ends have, and a receive's :class:`Request`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch

from transfuse.limits import Limits
from transfuse.memory.needed_blocks import Late
from transfuse.options import Options
from transfuse.progress import Progress
from transfuse.report import Report
from transfuse.session.partial import Partial
from transfuse.session.threads import Caller

__all__ = ["Context", "Request"]


@dataclass(frozen=True, kw_only=True)
class Context:
    """In what a call is made, and whom it tells how it goes."""

    #: The peers, as ranks within the group.
    ranks: tuple[int, ...]
    limits: Limits
    #: Where the backend wants its tensors.
    device: torch.device
    #: The timeout, in seconds.
    timeout: float
    caller: Caller
    report: Report
    #: How far the transfer with each peer is, and a function that shows it.
    progress: dict[int, Progress]
    show: Callable[[], object] = lambda: None
    #: The group's peers can only be talked to one after the other.
    one_by_one: bool = False


@dataclass(frozen=True, kw_only=True)
class Request:
    """What a receive is asked for."""

    step: int | None = None
    #: The state_dict callback's tree (later prepared), or None to receive fresh; ``failure`` if the callback raised.
    target: object | None = None
    failure: BaseException | None = None
    #: Instead of a target: called with what there is, says what of it goes where.
    late: Late | None = None
    #: What an earlier receive has left.
    resume: Partial | None = None
    #: Sources that the caller named and that cannot even be asked, and why.
    absent: Mapping[str, BaseException] = field(default_factory=dict)
    options: Options = field(default_factory=Options)
