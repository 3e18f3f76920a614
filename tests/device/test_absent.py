"""Processes that do not use their accelerator, or have none: it is not touched, and states arrive all the same."""

from __future__ import annotations

import pytest

from device.kind import imitation_only
from device.processes import run_program, run_two

pytestmark = [pytest.mark.usefixtures("device"), imitation_only]

_FORK = """
from transfuse.testing.ranks import Ranks
state = {"w": torch.arange(300000.0), "t": torch.arange(600.0).view(20, 30).t()}

def move(same_host):
    own = {"w": torch.zeros(300000), "t": torch.zeros(30, 20)}
    def work(rank, pg):
        options = {"same_host": same_host, "verify": True}
        if rank == 0:
            return transfuse.PGTransport(pg, 20, "cpu", **options).send_checkpoint([1], state)
        fresh = None if same_host else lambda: own
        return transfuse.PGTransport(pg, 20, "cpu", fresh, **options).recv_checkpoint(0)
    with Ranks(2) as ranks:
        got = ranks.run(work)[1]
    return all(torch.equal(got[name], leaf) for name, leaf in state.items())

assert torch.accelerator.is_available() and not phantom.is_initialized()
found = [move(False), move(True), phantom.is_initialized()]
child = os.fork()
if child == 0:
    fine = False
    try:
        fine = move(False) and move(True) and not phantom.is_initialized()
    finally:
        os._exit(0 if fine else 1)
found.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
# After the parent has used its device, a forked child can still move what lies in main memory.
torch.zeros(3, device="phantom")
assert phantom.is_initialized()
child = os.fork()
if child == 0:
    fine = False
    try:
        fine = move(False)
    finally:
        os._exit(0 if fine else 1)
found.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
print(json.dumps(found), flush=True)
os._exit(0)
"""


@pytest.mark.long  # The accelerator is built here.
def test_main_memory_alone_leaves_the_accelerator_alone() -> None:
    in_parent, from_memory, initialised, in_child, in_later_child = run_program(_FORK)
    assert in_parent
    assert from_memory
    assert not initialised
    assert (in_child, in_later_child) == (0, 0)


_NONE = """
import logging
said = []
handler = logging.Handler()
handler.emit = lambda record: said.append(record.getMessage())
logging.getLogger("transfuse").addHandler(handler)
values = torch.arange(300000.0)
if rank == 0:
    state = {"w": values.to("phantom"), "t": values[:600].view(20, 30).to("phantom").t(), "n": 1}
    for _ in range(2):
        transfuse.PGTransport(pg, 30, "cpu").send_checkpoint([1], state)
    print(json.dumps(None), flush=True)
else:
    phantom.set_available(False)
    for _ in range(2):
        got = transfuse.PGTransport(pg, 30, "cpu").recv_checkpoint(0)
    assert torch.equal(got["w"], values) and torch.equal(got["t"], values[:600].view(20, 30).t())
    warned = [text for text in said if "main memory" in text]
    print(json.dumps([str(got["w"].device), str(got["t"].device), len(warned), phantom.is_initialized()]), flush=True)
"""


def test_a_receiver_without_an_accelerator_gets_leaves_in_main_memory() -> None:
    _, (first, second, warnings, initialised) = run_two(_NONE)
    assert (first, second) == ("cpu", "cpu")
    assert warnings == 1
    assert not initialised
