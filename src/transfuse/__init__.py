"""Transfuse moves a running PyTorch job's live state from healthy workers into others, exactly, from memory to memory.

Modules and packages; each imports only from those above it:

    errors, limits, rules              every error; every number that may be set; the rules that map_path= takes
    phases, report, progress, log      what a caller sees of a transfer
    state                              a state as plain data: its tree, leaves, tensors and storages
    options, arguments                 what the caller chose, checked
    plan                               which bytes go where, and which sources hold them; touches no bytes
    memory                             this process's bytes: allocate, pack, hash, land
    wire                               the messages between two ends, and the routes that bytes take
    session                            one transfer: source, receiver, and all that they share
    transport                          PGTransport
    healing                            heal: whoever is behind gets the state of those who are not
    remote                             serve and fetch, for readers outside the group
    keeper                             keep: states that outlive the restart of all workers
    live_hub                           a running job as a Hugging Face Hub
    dcp, dropin                        the same for users of torch.distributed.checkpoint, torch and torchft
    integrations                       callbacks and plug-ins for frameworks; they import only what is listed below
    cli                                the command
"""

from transfuse import log
from transfuse.errors import (
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
from transfuse.healing import heal
from transfuse.keeper import rendezvous
from transfuse.keeper.client import CommitReport, Keep, keep
from transfuse.keeper.rendezvous import rendezvous_by_default
from transfuse.keeper.restoring import KeptStep
from transfuse.live_hub.hub import Hub, hub
from transfuse.progress import Progress
from transfuse.remote.client import Peeked, fetch, peek
from transfuse.remote.server import Server, serve
from transfuse.report import Report
from transfuse.rules import Concat, MapPath, Rename, Slice, Split
from transfuse.session.partial import Partial
from transfuse.state.leaves.codec import MeshDescription
from transfuse.transport import PGTransport

__version__ = "0.12.0"

rendezvous.register()
log.sign_warnings()

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
