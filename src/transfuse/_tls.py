"""Encryption of connections: whose certificates count, and what is made of the files, again whenever they change.

A :class:`TLS` is only names: of files, and of peers. So it can be compared, sent to another process, and kept long.
What a handshake needs is made of the files by :func:`credentials`, which looks at them before each connection: a
certificate that was renewed is used from the next connection on.
This module imports nothing of the package but the limits, and Python's own ``ssl`` when
somebody encrypts.
"""

from __future__ import annotations

import ipaddress
import logging
import os
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, TypeAlias

from transfuse._limits import TLS_VARIABLES, tls_files

if TYPE_CHECKING:
    import ssl

logger = logging.getLogger("transfuse")

#: For the names in a certificate that has expired: X509_V_FLAG_NO_CHECK_TIME, for which Python has no name.
_NO_CHECK_TIME = 0x200000


@dataclass(frozen=True)
class TLS:
    """Encrypt the connections of a call, with certificates at both ends: TLS 1.3, and nothing older.

    Args:
        certificate: a file with this end's certificate, in PEM, and those between it and the CA if there are any.
        key: a file with its private key, without a password.
        ca: a file with the certificates of the CAs that peers' certificates must come from.
        names: who a peer may be: one of these must be among the subject alternative names of its certificate. Names of
            hosts (``trainer.example``, or ``*.train.example`` for one label), addresses (``10.0.0.7``), and URIs
            (``spiffe://cluster/ns/train/sa/job``, or with ``/*`` at the end for all below). None: the names in this
            end's own certificate, as where all processes of a job have certificates for one name.

    The files are read again when they change. A connection keeps the certificates that it began with.
    """

    certificate: str | os.PathLike[str]
    key: str | os.PathLike[str]
    ca: str | os.PathLike[str]
    names: Sequence[str] | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        for name in ("certificate", "key", "ca"):
            path = getattr(self, name)
            if not isinstance(path, str | os.PathLike) or not os.fspath(path):
                raise TypeError(f"TLS: {name} takes the name of a file, got {path!r}")
            # Absolute: the keeper works in another directory.
            object.__setattr__(self, name, os.path.abspath(os.fsdecode(path)))
        names = (self.names,) if isinstance(self.names, str) else self.names
        if names is not None:
            object.__setattr__(self, "names", tuple(names))
            for one in names:
                if not isinstance(one, str) or not one.strip() or one != one.strip():
                    raise ValueError(f"TLS: names takes names of hosts, addresses and URIs, got {one!r}")
            if not names:
                raise ValueError("TLS: names is empty, so that no peer would be accepted: leave it out, or name some")

    @classmethod
    def from_environment(cls, environ: Mapping[str, str] = os.environ) -> TLS | None:
        """What ``TRANSFUSE_TLS_CERT``, ``_KEY``, ``_CA`` and ``_NAMES`` say; None if they are not set."""
        found = tls_files(environ)
        return None if found is None else cls(*found[:3], names=found[3])

    def as_environment(self) -> dict[str, str]:
        """The same for a process that is started with these variables."""
        values = self.certificate, self.key, self.ca, ",".join(self.names or ())
        return {name: os.fsdecode(value) for name, value in zip(TLS_VARIABLES, values, strict=True) if value}

    def client_context(self) -> ssl.SSLContext:
        """For a client of a hub in Python, such as ``httpx.Client(verify=tls.client_context())``.

        It shows this certificate, and checks the server's as browsers do: by the CA, and the name that was asked for.
        """
        context = _context(self, listens=False)
        context.check_hostname = True
        return context


#: What ``tls=`` takes. None: what the environment says. False: no encryption, whatever the environment says.
Encryption: TypeAlias = TLS | Literal[False] | None


def check_tls(name: str, value: object) -> Encryption:
    """Refuse what is no choice, and files that cannot be used. None becomes what the environment says, if anything."""
    if value is not None and value is not False and not isinstance(value, TLS):
        got = repr(value) if isinstance(value, bool | int | str) else type(value).__name__
        raise TypeError(f"{name} takes a transfuse.TLS(certificate, key, ca), False or None, got {got}")
    chosen = TLS.from_environment() if value is None else value
    if chosen:
        credentials(chosen)
    return chosen


def tls_of(value: Encryption, name: str = "tls") -> TLS | None:
    """What to encrypt with; None: nothing is encrypted."""
    return check_tls(name, value) or None


# ------------------------------------------------------------------------------------------------------------- names


def accepts(names: Sequence[str], found: Sequence[tuple[str, str]]) -> bool:
    """Whether one of these names stands for one of those found in a certificate, which have their kinds."""
    return any(_stands_for(name, kind, one) for name in names for kind, one in found)


def _stands_for(name: str, kind: str, found: str) -> bool:
    if "://" in name:
        below = name.endswith("/*") and found.startswith(name[:-1]) and len(found) >= len(name)
        return kind == "URI" and (found == name or below)
    with suppress(ValueError):
        address = ipaddress.ip_address(name)
        return kind == "IP Address" and ipaddress.ip_address(found) == address
    name, found = name.lower().rstrip("."), found.lower().rstrip(".")
    label, _, rest = found.partition(".")
    return kind == "DNS" and (found == name or (name[:2] == "*." and bool(label) and rest == name[2:]))


def names_in(certificate: Mapping[str, object] | None) -> list[tuple[str, str]]:
    """The subject alternative names of a certificate, with their kinds."""
    found: object = (certificate or {}).get("subjectAltName", ())
    return [(str(kind), str(value)) for kind, value in found]  # type: ignore[attr-defined]


# ------------------------------------------------------------------------------------------------------- credentials


class Credentials:
    """What is made of the files of a :class:`TLS`, for the connections that begin now."""

    def __init__(self, tls: TLS) -> None:
        self.ca = tls.ca
        self.listening, self.dialling = _context(tls, listens=True), _context(tls, listens=False)
        #: Whom to accept.
        self.names = tuple(tls.names) if tls.names is not None else _own_names(tls)


_Stamp: TypeAlias = tuple[tuple[int, int, int], ...]
_lock = threading.Lock()
_made: dict[TLS, tuple[_Stamp, Credentials]] = {}
#: The state of the files that were complained of last.
_complained: dict[TLS, object] = {}


def credentials(tls: TLS) -> Credentials:
    """What the files say now. Files that cannot be used any more, as in the middle of a renewal, change nothing."""
    with _lock:
        known = _made.get(tls)
        stamp: object = None
        try:
            stamp = found = tuple(_stamp_of(path) for path in (tls.certificate, tls.key, tls.ca))
            if known is None or known[0] != found:
                known = _made[tls] = found, Credentials(tls)
                _complained.pop(tls, None)
        except (OSError, ValueError) as error:
            if known is None:
                raise ValueError(str(error)) from error
            if _complained.get(tls, _complained) != stamp:
                _complained[tls] = stamp
                logger.warning("tls: going on with the certificates from before, since the new ones fail: %s", error)
        return known[1]


def _stamp_of(path: str | os.PathLike[str]) -> tuple[int, int, int]:
    try:
        found = os.stat(path)
    except OSError as error:
        raise ValueError(f"tls: {os.fspath(path)} cannot be read: {error.strerror}") from error
    return found.st_mtime_ns, found.st_size, found.st_ino


def _context(tls: TLS, *, listens: bool) -> ssl.SSLContext:
    import ssl

    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER if listens else ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False  # By a list of names instead, at both ends.
    context.verify_mode = ssl.CERT_REQUIRED
    context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN  # The CA that is named counts, be it a root or not.
    if listens:
        context.num_tickets = 0  # Connections begin anew each time: nothing comes that nobody waits for.
    _load(context, tls)
    try:
        context.load_verify_locations(tls.ca)
    except OSError as error:
        raise ValueError(f"tls: ca={tls.ca} holds no certificates in PEM that can be read: {_why(error)}") from error
    return context


def _load(context: ssl.SSLContext, tls: TLS) -> None:
    def no_password() -> str:
        raise ValueError(f"tls: the key in {tls.key} has a password: give one without (openssl pkey -in … -out …)")

    try:
        context.load_cert_chain(tls.certificate, tls.key, no_password)
    except OSError as error:
        both = f"certificate={tls.certificate} and key={tls.key}"
        raise ValueError(f"tls: {both} do not go together, or are no PEM that can be read: {_why(error)}") from error


def _why(error: OSError) -> str:
    return getattr(error, "reason", None) or error.strerror or str(error)


def _own_names(tls: TLS) -> tuple[str, ...]:
    """The names in one's own certificate. It is shown to a peer within this process, which tells what it sees."""
    import ssl

    shows, sees = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    _load(shows, tls)
    sees.check_hostname = False
    sees.load_verify_locations(tls.certificate)
    # It counts by itself, expired or not: whether others accept it is theirs to say.
    sees.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN | _NO_CHECK_TIME
    there, back = ssl.MemoryBIO(), ssl.MemoryBIO()
    ends = sees.wrap_bio(back, there), shows.wrap_bio(there, back, server_side=True)
    try:
        for end in (*ends, *ends):
            with suppress(ssl.SSLWantReadError):
                end.do_handshake()
    except ssl.SSLError as error:
        raise ValueError(f"tls: certificate={tls.certificate} cannot be used: {_why(error)}") from error
    names = tuple(name for kind, name in names_in(ends[0].getpeercert()) if kind in ("DNS", "URI", "IP Address"))
    if not names:
        raise ValueError(
            f"tls: certificate={tls.certificate} has no subject alternative names that peers could share: pass names="
        )
    return names


def _after_fork() -> None:
    global _lock
    _lock = threading.Lock()


os.register_at_fork(after_in_child=_after_fork)
