"""Ranks on this machine, each with a gloo group over 127.0.0.1: for tests, measurements and demonstrations.

- :class:`Ranks`: threads of this process, started in milliseconds.
- :class:`Fleet`: fresh processes, which may be killed, frozen and started again.
- :class:`ProcessPool`: processes that are kept for many functions, since importing torch takes seconds.
- :func:`listening`: one function on fresh processes, and what they say while it runs.
- :func:`run_program`: a program as ``torchrun`` would run it, forked from a process that has imported torch.

Whatever the ranks do, the parent returns by its deadline and names the ranks that have not ended. No process outlives
its parent. Nothing looks up a host name or listens on an interface other than loopback.
"""

from transfuse.testing.ranks.fleet import Fleet, ProcessPool, listening, threads_for
from transfuse.testing.ranks.foreground import FOREGROUND, come_to_foreground
from transfuse.testing.ranks.inside import announce, hear, say, store
from transfuse.testing.ranks.outcome import Died, Late, Outcome, RanksFailed, RemoteError
from transfuse.testing.ranks.programs import Ended, run_program
from transfuse.testing.ranks.threads import Ranks
from transfuse.testing.ranks.worker import Worker, freeze, interrupts_held, loopback_store, preload, server_threads

__all__ = [
    "FOREGROUND",
    "Died",
    "Ended",
    "Fleet",
    "Late",
    "Outcome",
    "ProcessPool",
    "Ranks",
    "RanksFailed",
    "RemoteError",
    "Worker",
    "announce",
    "come_to_foreground",
    "freeze",
    "hear",
    "interrupts_held",
    "listening",
    "loopback_store",
    "preload",
    "run_program",
    "say",
    "server_threads",
    "store",
    "threads_for",
]
