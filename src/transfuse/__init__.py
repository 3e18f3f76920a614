"""Transfuse moves a running PyTorch job's live state from healthy workers into others, exactly, from memory to memory.

Modules, each importing only from those before it:

    errors, limits, classes            what can go wrong, every number that may be set, naming classes
    leaves, sharding                   one codec for each kind of leaf; which rank holds what of a global tensor
    boxes, trees, manifest             a state as plain data
    plan, holdings, picks, parcels     what travels, and in what pieces
    contents                           what a state holds, to show
    digest, messages                   what is said about it
    places, matching, target           the memory it is read from, and lands in as it is
    renaming, cohorts, spots, needs    what is needed here of what the sources hold
    pieces, assembly                   a state put together from these
    phases, report, progress, talks    what a caller sees
    routes                             how bytes move
    accepting, agreement, ledger       which sources are of one mind, which parcels are here and who brings the others
    receive, source, receiver          a receive from all its sources; the two ends of each conversation
    transport, dcp                     PGTransport; the same for users of torch.distributed.checkpoint
    door, private, serving, fetching   the same for readers outside the group
"""

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
from transfuse.progress import Progress
from transfuse.remote.client import Peeked, fetch, peek
from transfuse.remote.server import Server, serve
from transfuse.report import Report
from transfuse.rules import Concat, MapPath, Rename, Slice, Split
from transfuse.session.partial import Partial
from transfuse.state.leaves.codec import MeshDescription
from transfuse.transport import PGTransport

__version__ = "0.5.1"

__all__ = [
    "Concat",
    "CorruptData",
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
    "peek",
    "serve",
]
