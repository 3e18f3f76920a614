"""Try the NIXL route: a process makes two agents, and one reads the memory of the other."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time

import numpy as np

from transfuse._arguments import INSTALL_NIXL
from transfuse._memory import vm
from transfuse._tuning import DOCTOR_NIXL_LOOK_SECONDS, DOCTOR_NIXL_READ_SECONDS, DOCTOR_NIXL_SECONDS
from transfuse._wire import nixl_agent
from transfuse._wire.nixl_agent import Agent, NixlFailed
from transfuse.cli.doctor.finding import Finding

__all__ = ["look"]

ABOUT = "NIXL route"
#: What UCX prints about the transports of a connection, such as ``intra-node cfg#1 rma_am(tcp/lo) am(cma/memory)``.
_CONFIGURATION = re.compile(r"node cfg#\d+ (.*)")
_TRANSPORT = re.compile(r"\b[a-z]\w*/\w+")


def look() -> Finding:
    """Whether the NIXL route would work here."""
    found = nixl_agent.installed()
    if found is None:
        return Finding("note", ABOUT, "not installed, and not needed", f"to use it: {INSTALL_NIXL}")
    # In a process of its own: a library that does not suit this machine may end the process.
    try:
        done = subprocess.run(
            [sys.executable, "-m", __name__],
            env=os.environ | {"UCX_LOG_LEVEL": "info"},
            capture_output=True,
            text=True,
            errors="replace",
            timeout=DOCTOR_NIXL_SECONDS,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return _broken(found, f"the trial did not end: {type(error).__name__}")
    said = done.stdout.strip().splitlines()[-1:]
    if done.returncode or said != ["works"]:
        return _broken(found, said[0] if said and not done.returncode else f"it ended with code {done.returncode}")
    lines = _CONFIGURATION.findall(done.stdout + done.stderr)
    transports = sorted({name for line in lines for name in _TRANSPORT.findall(line)})
    through = f" through {', '.join(transports)}" if transports else ""
    return Finding("ok", ABOUT, f"NIXL {found} works: an agent reads another's memory{through}; nixl=True uses it")


def _broken(found: str, reason: str) -> Finding:
    return Finding("warn", ABOUT, f"NIXL {found} does not work here: {reason}", "leave nixl=True out; UCX_TLS may help")


def trial() -> None:
    """Let one agent read the memory of another. Raises if that fails."""
    source, receiver = Agent(), Agent()
    theirs, mine = np.arange(1 << 16), np.zeros(1 << 16, dtype=np.int64)
    for agent, array in ((source, theirs), (receiver, mine)):
        agent.register([(array.ctypes.data, array.nbytes)])
    receiver.connect(source.name, source.metadata([(theirs.ctypes.data, theirs.nbytes)]))
    size, until = np.array([mine.nbytes]), time.monotonic() + DOCTOR_NIXL_READ_SECONDS
    ends = [vm.ranges(np.array([array.ctypes.data]), size) for array in (theirs, mine)]
    transfer = receiver.post(receiver.prepare(source.name, *ends))
    while not receiver.is_done(transfer):
        if time.monotonic() > until:
            raise NixlFailed(f"a read of 512 KiB was not done after {DOCTOR_NIXL_READ_SECONDS:.0f} s")
        time.sleep(DOCTOR_NIXL_LOOK_SECONDS)
    if not np.array_equal(theirs, mine):
        raise NixlFailed("NIXL said that a read was done, but it has not brought the bytes")


if __name__ == "__main__":
    try:
        trial()
        print("works", flush=True)
    except NixlFailed as error:
        print(error, flush=True)
    os._exit(0)
