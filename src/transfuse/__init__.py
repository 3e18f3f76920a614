"""Transfuse moves a running PyTorch job's live state from healthy workers into others, exactly, from memory to memory.

Modules, each importing only from those before it:

    errors, limits, classes            what can go wrong, every number that may be set, naming classes
    leaves                             one codec for each kind of leaf
    boxes, trees, manifest             a state as plain data
    plan, parcels, digest, messages    what travels, in what pieces, and the messages around it
    places, matching, target           the memory it is read from, and lands in
    report, progress, talks            what a caller sees
    routes                             how bytes move
    ledger, partial, gathering         which parcels are here, from which of several sources
    source, receiver, transport        the two ends of the conversation, and PGTransport
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
from transfuse.leaves.codec import MeshDescription
from transfuse.partial import Partial
from transfuse.progress import Progress
from transfuse.renaming import Concat, MapPath, Rename, Slice, Split
from transfuse.report import Report
from transfuse.transport import PGTransport

__version__ = "0.4.0"

__all__ = [
    "Concat",
    "CorruptData",
    "LimitExceeded",
    "MapPath",
    "MeshDescription",
    "NotCovered",
    "PGTransport",
    "Partial",
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
]
