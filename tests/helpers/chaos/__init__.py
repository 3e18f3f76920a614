"""Chaos: transfers between real processes, each disturbed in one way, all of it derived from one number.

``Scenario.draw(seed)`` draws a state, sources and receivers, options, and a fault with the point at which it strikes.
:class:`Yard` runs scenarios in processes of its own and says in complaints whatever is not as it must be:

- a receiver that returns holds exactly the source's state; one that raises tells the truth about what it touched, what
  it has and what it lacks; what was not to be touched was not;
- a source says of each receiver what became of it, and calls complete only those that are;
- with another healthy source left, or with a fault that costs nobody anything, nothing fails;
- everything ends in time; no process, thread or file is left behind; nothing lands after a call has returned.

``python -m chaos --seed N`` in ``tests/helpers`` replays one, ``--count K`` goes on with the next ones.
"""

from __future__ import annotations

from chaos.replay import CAMPAIGNS, main
from chaos.scenarios import (
    ANY_FAULT,
    HEADER,
    KIB,
    MIB,
    SLACK,
    Fault,
    FaultKind,
    Kind,
    Make,
    Mode,
    Plant,
    Receiving,
    Scenario,
    Thaw,
    When,
    corrupt,
    freeze_a_source,
    kill_a_receiver,
    kill_a_source,
    undisturbed,
)
from chaos.states import apart, build, invert, memory_of, raw, target_for, tensors_of, walk
from chaos.wires import Boom, Wire
from chaos.worker import Evidence, Leftovers, act, inspect, prepare
from chaos.yard import Result, Yard

__all__ = [
    "ANY_FAULT",
    "CAMPAIGNS",
    "HEADER",
    "KIB",
    "MIB",
    "SLACK",
    "Boom",
    "Evidence",
    "Fault",
    "FaultKind",
    "Kind",
    "Leftovers",
    "Make",
    "Mode",
    "Plant",
    "Receiving",
    "Result",
    "Scenario",
    "Thaw",
    "When",
    "Wire",
    "Yard",
    "act",
    "apart",
    "build",
    "corrupt",
    "freeze_a_source",
    "inspect",
    "invert",
    "kill_a_receiver",
    "kill_a_source",
    "main",
    "memory_of",
    "prepare",
    "raw",
    "target_for",
    "tensors_of",
    "undisturbed",
    "walk",
]
