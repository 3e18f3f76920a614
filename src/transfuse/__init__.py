"""Transfuse moves a running PyTorch job's live state from healthy workers into others, exactly, from memory to memory.

Modules and packages; each imports only from those above it:

    _errors, _limits, _rules           every error; every number that may be set; the rules that map_path= takes
    _phases, _report, _progress, _log  what a caller sees of a transfer
    _tls                               how connections are encrypted
    _state                             a state as plain data: its tree, leaves, tensors and storages
    _options, _arguments               what the caller chose, checked
    _plan                              which bytes go where, and which sources hold them; touches no bytes
    _memory                            this process's bytes: allocate, pack, hash, land
    _wire                              the messages between two ends, and the routes that bytes take
    _metrics                           what operators see: numbers for Prometheus, events, a page for torch's debugger
    _session                           one transfer: source, receiver, and all that they share
    _transport                         PGTransport
    _heal                              heal: ranks that are behind get the state of those that are not
    _job                               State and RNG: what a job hands in, and what takes back what has arrived
    _remote                            serve and fetch, for readers outside the group
    _keeper                            keep: states that outlive the restart of all workers
    _hub                               a running job as a Hugging Face Hub
    dcp, dropin                        the same for users of torch.distributed.checkpoint, torch and torchft
    integrations                       callbacks and plug-ins for frameworks; they import only what is listed below
    cli                                the command

Names without an underscore are public; so are testing, for tests of the user's own, and what is listed below.

``import transfuse`` brings the errors, and no torch, which takes a second and a half: the keeper and the command need
none. The first other name that is used brings all the rest at once, so no later call has to read a module's file, which
a process that has no descriptor free, or has become another user, could not.
"""

import importlib
import typing

from transfuse import _errors, _log
from transfuse._errors import (
    CorruptData,
    LimitExceeded,
    NotCovered,
    PeerError,
    PeerLost,
    PeerNotTrusted,
    PeerRefused,
    PeerTimeout,
    ProtocolError,
    ReceiveFailed,
    SendFailed,
    SourceMutated,
    SourcesDiffer,
    StateError,
    StepMismatch,
    TargetMismatch,
    TornState,
    TransfuseError,
    UnsupportedLeaf,
)
from transfuse._keeper import scheme

if typing.TYPE_CHECKING:
    from transfuse._heal import heal
    from transfuse._hub.hub import Hub, hub
    from transfuse._job.generations import regroup, supervise
    from transfuse._job.loader import Loader
    from transfuse._job.rng import RNG
    from transfuse._job.state import State
    from transfuse._keeper.client import Keep, keep
    from transfuse._keeper.commits import CommitReport
    from transfuse._keeper.rendezvous import rendezvous_by_default
    from transfuse._keeper.restoring import KeptStep
    from transfuse._progress import Progress
    from transfuse._remote.client import Fetched, Peeked, fetch, peek
    from transfuse._remote.server import Server, serve
    from transfuse._remote.verifying import Verified, verify
    from transfuse._report import Report, Step, Version
    from transfuse._rules import Concat, MapPath, Rename, Slice, Split
    from transfuse._session.context import Partial
    from transfuse._session.pending import Pending
    from transfuse._state.leaves.block import Block
    from transfuse._state.leaves.codec import MeshDescription
    from transfuse._tls import TLS
    from transfuse._transport import PGTransport

__version__ = "0.16.0"

__all__ = [
    "RNG",
    "TLS",
    "Block",
    "CommitReport",
    "Concat",
    "CorruptData",
    "Fetched",
    "Hub",
    "Keep",
    "KeptStep",
    "LimitExceeded",
    "Loader",
    "MapPath",
    "MeshDescription",
    "NotCovered",
    "PGTransport",
    "Partial",
    "Peeked",
    "PeerError",
    "PeerLost",
    "PeerNotTrusted",
    "PeerRefused",
    "PeerTimeout",
    "Pending",
    "Progress",
    "ProtocolError",
    "ReceiveFailed",
    "Rename",
    "Report",
    "SendFailed",
    "Server",
    "Slice",
    "SourceMutated",
    "SourcesDiffer",
    "Split",
    "State",
    "StateError",
    "Step",
    "StepMismatch",
    "TargetMismatch",
    "TornState",
    "TransfuseError",
    "UnsupportedLeaf",
    "Verified",
    "Version",
    "__version__",
    "fetch",
    "heal",
    "hub",
    "keep",
    "peek",
    "regroup",
    "rendezvous_by_default",
    "serve",
    "supervise",
    "verify",
]

#: The modules of the names that need torch, as above.
_HOMES = {
    "_heal": ("heal",),
    "_hub.hub": ("Hub", "hub"),
    "_job.generations": ("regroup", "supervise"),
    "_job.loader": ("Loader",),
    "_job.rng": ("RNG",),
    "_job.state": ("State",),
    "_keeper.client": ("Keep", "keep"),
    "_keeper.commits": ("CommitReport",),
    "_keeper.rendezvous": ("rendezvous_by_default",),
    "_keeper.restoring": ("KeptStep",),
    "_progress": ("Progress",),
    "_remote.client": ("Fetched", "Peeked", "fetch", "peek"),
    "_remote.server": ("Server", "serve"),
    "_remote.verifying": ("Verified", "verify"),
    "_report": ("Report", "Step", "Version"),
    "_rules": ("Concat", "MapPath", "Rename", "Slice", "Split"),
    "_session.context": ("Partial",),
    "_session.pending": ("Pending",),
    "_state.leaves.block": ("Block",),
    "_state.leaves.codec": ("MeshDescription",),
    "_tls": ("TLS",),
    "_transport": ("PGTransport",),
}


def _adopt(module: typing.Any, names: list[str] | tuple[str, ...]) -> None:
    """Offer what a module defines. Classes are named as they are found: in tracebacks, and where they are pickled."""
    for name in names:
        globals()[name] = found = getattr(module, name)
        if isinstance(found, type):
            found.__module__ = __name__


if not typing.TYPE_CHECKING:

    def __getattr__(name):
        if name not in __all__:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        for home, names in _HOMES.items():
            _adopt(importlib.import_module(f"{__name__}.{home}"), names)
        return globals()[name]


def __dir__() -> list[str]:
    return __all__


_adopt(_errors, _errors.__all__)
scheme.announce()
_log.sign_warnings()
