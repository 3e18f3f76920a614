"""Every number that a user may set, and the sizes and waits that follow from these numbers.

``Limits()`` holds the defaults. ``Limits.from_environment()`` replaces each field by ``TRANSFUSE_<NAME>`` (upper case)
if that variable is set. ``Sizes`` has every rule for a size in a transfer, ``Patience`` every fraction of the timeout.
A constant that only one module needs stands in that module. This module imports nothing of the package.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field, fields

KIB = 1 << 10
MIB = 1 << 20
#: The variables of the environment that are no limits.
TLS_VARIABLES = ("TRANSFUSE_TLS_CERT", "TRANSFUSE_TLS_KEY", "TRANSFUSE_TLS_CA", "TRANSFUSE_TLS_NAMES")
OTHER_VARIABLES = (
    "TRANSFUSE_KEEPER_DIR",
    "TRANSFUSE_KEEPER_START",
    "TRANSFUSE_NIXL",
    "TRANSFUSE_PORT",
    "TRANSFUSE_RUN",
    "TRANSFUSE_SAME_HOST",
    "TRANSFUSE_STREAMS",
    *TLS_VARIABLES,
)


def _physical_memory_bytes() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Sizes in bytes unless the name says otherwise."""

    #: Largest parcel. Small enough that packing and sending overlap with four in flight, large enough to fill the wire.
    parcel_bytes: int = 4 * MIB
    #: Smallest parcel a peer may announce: bounds the number of parcels that a hostile offer can cause.
    min_parcel_bytes: int = 16 * KIB
    #: Largest parcel with ``delta``: a parcel is compared as one, then kept or fetched as one.
    block_bytes: int = 128 * KIB
    #: An offer longer than this is first sent without its description; receivers that need the description ask for it.
    brief_bytes: int = 256 * KIB
    #: Bytes between two records. Progress is reported in steps of this size.
    burst_bytes: int = 24 * MIB
    #: Bursts under way per peer. Bursts that are under way still arrive after a cancel.
    bursts_ahead: int = 2
    #: Sizes are chosen so that a link as slow as this is not taken for a dead one.
    slowest_bytes_per_second: int = 1 * MIB
    #: Receivers of a smaller state form no chain: it would not pay.
    min_relay_bytes: int = 4 * MIB
    #: For a chain, or for several sources, parcels are not made smaller than this.
    min_chained_bytes: int = 64 * KIB
    #: Staging memory that one end may use besides the tensors themselves, for all its peers together.
    staging_bytes: int = 64 * MIB
    #: Longest control message that an end accepts. (A description takes well under 1 KiB a leaf.)
    max_message_bytes: int = 256 * MIB
    #: Control messages travel in chunks of this size, so that a peer that only announces a length causes no allocation.
    chunk_bytes: int = 1 * MIB
    #: Most bytes that one receive may allocate for fresh tensors.
    max_receive_bytes: int = field(default_factory=_physical_memory_bytes)
    #: Larger ``bytes`` and numpy values travel as storages, smaller ones in the description.
    inline_bytes: int = 4 * KIB
    #: Largest pickled object that a source sends. (Receivers accept objects only with ``weights_only_objects``.)
    max_object_bytes: int = 16 * MIB
    #: Deepest nesting of a state.
    max_depth: int = 128
    #: How many signs of life, one every quarter of the timeout, a peer may send without bytes before it is given up.
    #: Every ``min_parcel_bytes`` that the peer reports as arrived allow it one more.
    max_working_records: int = 400
    #: How often a parcel with a wrong digest is asked for again.
    max_repairs: int = 3

    def __post_init__(self) -> None:
        for item in fields(self):
            if getattr(self, item.name) <= 0:
                raise ValueError(f"limit {item.name} must be positive, got {getattr(self, item.name)}")
        if self.min_parcel_bytes > self.parcel_bytes:
            raise ValueError(f"min_parcel_bytes {self.min_parcel_bytes} exceeds parcel_bytes {self.parcel_bytes}")
        if self.parcel_bytes % 16 or self.min_parcel_bytes % 16 or self.block_bytes % 16:
            raise ValueError("parcel sizes must be multiples of 16, the largest item")

    @classmethod
    def from_environment(cls, environ: Mapping[str, str] = os.environ) -> Limits:
        """The defaults, overridden by ``TRANSFUSE_…`` variables."""
        values = {}
        for item in fields(cls):
            text = environ.get(f"TRANSFUSE_{item.name.upper()}")
            if text is not None:
                try:
                    values[item.name] = int(text)
                except ValueError:
                    raise ValueError(f"TRANSFUSE_{item.name.upper()} must be a whole number, got {text!r}") from None
        return cls(**values)


def port_range(environ: Mapping[str, str] = os.environ) -> tuple[int, int]:
    """The first and the last port on which a process may listen for streams (``TRANSFUSE_PORT``). 0: any free port."""
    text = environ.get("TRANSFUSE_PORT", "0")
    found = ports_in(text)
    if found is None:
        raise ValueError(f"TRANSFUSE_PORT must be a port, or the first and the last one (29600-29699), got {text!r}")
    return found


def ports_in(text: str) -> tuple[int, int] | None:
    """The first and the last port that a text names, as ``9400`` or ``9400-9499``; None if it names none."""
    first, dash, last = text.partition("-")
    ports = [int(port) if port.isdecimal() else -1 for port in (first, last if dash else first)]
    if not 0 <= ports[0] <= ports[1] < 1 << 16 or (dash and not ports[0]):
        return None
    return ports[0], ports[1]


def asks_for_nixl(environ: Mapping[str, str] = os.environ) -> bool:
    """Whether the environment asks for the NIXL route (``TRANSFUSE_NIXL`` is 1)."""
    return _flag("TRANSFUSE_NIXL", "0", environ)


def allows_same_host(environ: Mapping[str, str] = os.environ) -> bool:
    """Whether the environment allows the memory route (``TRANSFUSE_SAME_HOST`` is not 0)."""
    return _flag("TRANSFUSE_SAME_HOST", "1", environ)


def allows_streams(environ: Mapping[str, str] = os.environ, *, encrypted: bool = False) -> bool:
    """Whether the environment allows connections of our own (``TRANSFUSE_STREAMS`` is not 0).

    If gloo is told to encrypt, everything stays on the group, unless connections of our own are ``encrypted`` too.
    """
    stays = environ.get("GLOO_DEVICE_TRANSPORT") == "TCP_TLS" and not encrypted
    return _flag("TRANSFUSE_STREAMS", "1", environ) and not stays


def tls_files(environ: Mapping[str, str] = os.environ) -> tuple[str, str, str, list[str] | None] | None:
    """The files of certificate, key and CA that the environment names, and the names of peers; None: it names none."""
    certificate, key, ca, listed = (environ.get(name, "") for name in TLS_VARIABLES)
    names = [name.strip() for name in listed.split(",") if name.strip()]
    if not (certificate or key or ca or names):
        return None
    for name, path in zip(TLS_VARIABLES, (certificate, key, ca), strict=False):
        if not path:
            raise ValueError(f"encryption needs all of TRANSFUSE_TLS_CERT, _KEY and _CA, and {name} is not set")
    return certificate, key, ca, names or None


def may_start_keeper(environ: Mapping[str, str] = os.environ) -> bool:
    """Whether workers start the keeper of their host if there is none (``TRANSFUSE_KEEPER_START`` is not 0)."""
    return _flag("TRANSFUSE_KEEPER_START", "1", environ)


def check_environment(environ: Mapping[str, str] = os.environ) -> None:
    """Raise ``ValueError`` if a variable of the environment has a value that no transfer can work with."""
    Limits.from_environment(environ)
    for check in (allows_same_host, allows_streams, asks_for_nixl, may_start_keeper, port_range, tls_files):
        check(environ)


def _flag(name: str, default: str, environ: Mapping[str, str]) -> bool:
    text = environ.get(name, default)
    if text not in ("0", "1"):
        raise ValueError(f"{name} must be 0 or 1, got {text!r}")
    return text == "1"
