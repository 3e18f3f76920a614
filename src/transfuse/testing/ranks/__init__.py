"""Ranks on this machine, each with a gloo group over 127.0.0.1: for tests, measurements and demonstrations.

- :class:`Ranks`: threads of this process. Milliseconds; for the conversation.
- :class:`Fleet`: fresh processes, which may be killed, frozen and started again.
- :class:`ProcessPool`: processes that are kept for many functions, since to import torch takes seconds.
- :func:`listening`: one function on fresh processes, and what they say while it runs.
- :func:`run_program`: a program as ``torchrun`` would run it, forked from a process that has imported torch.

Whatever happens inside, the parent comes back by its deadline and names the ranks that have not. No process outlives
its parent. Nothing looks up a name or listens on an interface of the outside world.
"""

from transfuse.testing.ranks.fleet import Fleet, ProcessPool, listening, threads_for
from transfuse.testing.ranks.foreground import FOREGROUND, come_to_foreground
from transfuse.testing.ranks.inside import announce, hear, say, store
from transfuse.testing.ranks.outcome import Died, Late, Outcome, RanksFailed, RemoteError
from transfuse.testing.ranks.programs import Ended, run_program
from transfuse.testing.ranks.threads import Ranks
from transfuse.testing.ranks.worker import Worker, interrupts_held, loopback_store, preload, server_threads

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
