"""Transfuse moves a running PyTorch job's live state from healthy workers into others, exactly, from memory to memory.

Modules and packages; each imports only from those above it:

    _errors, _limits, _rules           every error; every number that may be set; the rules that map_path= takes
    _phases, _report, _progress, _log  what a caller sees of a transfer
    _state                             a state as plain data: its tree, leaves, tensors and storages
    _options, _arguments               what the caller chose, checked
    _plan                              which bytes go where, and which sources hold them; touches no bytes
    _memory                            this process's bytes: allocate, pack, hash, land
    _wire                              the messages between two ends, and the routes that bytes take
    _session                           one transfer: source, receiver, and all that they share
    _transport                         PGTransport
    _heal                              heal: ranks that are behind get the state of those that are not
    _remote                            serve and fetch, for readers outside the group
    _keeper                            keep: states that outlive the restart of all workers
    _hub                               a running job as a Hugging Face Hub
    dcp, dropin                        the same for users of torch.distributed.checkpoint, torch and torchft
    integrations                       callbacks and plug-ins for frameworks; they import only what is listed below
    cli                                the command

Names without an underscore are public; so are testing, for tests of the user's own, and what is listed below.
"""

from transfuse import _log
from transfuse._errors import (
    CorruptData,
    LimitExceeded,
    NotCovered,
    PeerError,
    PeerLost,
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
from transfuse._heal import heal
from transfuse._hub.hub import Hub, hub
from transfuse._keeper import rendezvous
from transfuse._keeper.client import Keep, keep
from transfuse._keeper.commits import CommitReport
from transfuse._keeper.rendezvous import rendezvous_by_default
from transfuse._keeper.restoring import KeptStep
from transfuse._progress import Progress
from transfuse._remote.client import Peeked, fetch, peek
from transfuse._remote.server import Server, serve
from transfuse._report import Report
from transfuse._rules import Concat, MapPath, Rename, Slice, Split
from transfuse._session.partial import Partial
from transfuse._state.leaves.codec import MeshDescription
from transfuse._transport import PGTransport

__version__ = "0.13.0"

rendezvous.register()
_log.sign_warnings()

__all__ = [
    "CommitReport",
    "Concat",
    "CorruptData",
    "Hub",
    "Keep",
    "KeptStep",
    "LimitExceeded",
    "MapPath",
    "MeshDescription",
    "NotCovered",
    "PGTransport",
    "Partial",
    "Peeked",
    "PeerError",
    "PeerLost",
    "PeerRefused",
    "PeerTimeout",
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
    "StateError",
    "StepMismatch",
    "TargetMismatch",
    "TornState",
    "TransfuseError",
    "UnsupportedLeaf",
    "__version__",
    "fetch",
    "heal",
    "hub",
    "keep",
    "peek",
    "rendezvous_by_default",
    "serve",
]
