"""Encrypted connections: TLS 1.3 between the kernel's socket and what reads and writes it.

Python's ``ssl`` is used without a socket: a :class:`Cipher` turns bytes into records and back, in memory, under a lock
of its own, since OpenSSL's objects are not safe from two threads. All calls into the kernel stay where they are, and
so do their rules: who cuts a connection shuts down the kernel's socket, and nothing of TLS has to agree. (An
``SSLSocket`` cannot do this. It keeps its object in a call that waits for the peer, and after ``shutdown()`` it sends
in plain what it is given.) It costs no more than an ``SSLSocket``: one read from the kernel brings many records.

Both ends show certificates. When the handshake is over, each end looks at the names in the other's, and says in one
short message whether it goes on. So both know why, if not; and nothing else is said before that.

    connects                                        listens
      | -- TLS 1.3 handshake, both with certificates -> |
      | -- welcome, or a refusal ---------------------> |
      | <- welcome, or a refusal ---------------------- |
      | -- what would be said without TLS ------------> |

An end that does not encrypt is told so in plain, by what TLS itself has for that: an alert.
"""

from __future__ import annotations

import os
import socket
import struct
import threading
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from transfuse._errors import as_utf8
from transfuse._timeouts import Patience
from transfuse._tls import TLS, Credentials, accepts, credentials, names_in
from transfuse._tuning import SECURE_FRAME_BYTES, SECURE_PIECE_BYTES, SECURE_REFUSAL_BYTES

if TYPE_CHECKING:
    import ssl

#: How a handshake of TLS begins, how an alert does, and the alert that says: we have no version in common.
HANDSHAKE, ALERT = b"\x16\x03", b"\x15\x03"
NO_VERSION = ALERT + b"\x03\x00\x02\x02\x46"
_SAID = struct.Struct("<H")

#: What the other end's alerts mean, by their names in OpenSSL.
_ALERTS = {
    "CERTIFICATE_EXPIRED": "the certificate of this end has expired",
    "UNKNOWN_CA": "the certificate of this end is not from a CA that it knows",
    "CERTIFICATE_REQUIRED": "this end has shown no certificate",
    "PROTOCOL_VERSION": "it has no TLS 1.3: it was started without tls=, or is another service",
}
#: What is wrong with the other end's certificate, by OpenSSL's numbers (X509_V_ERR_…).
_FAULTS = {
    **dict.fromkeys((2, 18, 19, 20, 21), "is not from a CA in {ca}"),
    9: "is not valid yet: is the clock right?",
    10: "has expired",
    26: "is not made for this use (extendedKeyUsage needs serverAuth and clientAuth)",
}


class NotTrusted(ConnectionError):
    """The two ends do not go on. The text says what the other end is or does."""


class Cipher:
    """One end of TLS in memory: what is to be sent in plain becomes records, and records become what was sent."""

    def __init__(self, own: Credentials, *, listens: bool) -> None:
        import ssl

        self._arriving, self._leaving = ssl.MemoryBIO(), ssl.MemoryBIO()
        context = own.listening if listens else own.dialling
        self._ends = context.wrap_bio(self._arriving, self._leaving, server_side=listens)
        self._wants: type[ssl.SSLError] = ssl.SSLWantReadError
        self._fails: type[ssl.SSLError] = ssl.SSLError
        self._lock = threading.Lock()
        #: Whether the other end has said that nothing follows.
        self.has_ended = False

    def shake_hands(self) -> bool:
        """Go on with the handshake as far as what has arrived allows. Whether it is over."""
        with self._lock:
            try:
                self._ends.do_handshake()
            except self._wants:
                return False
            return True

    def names(self) -> list[tuple[str, str]]:
        """The names in the other end's certificate."""
        return names_in(self._ends.getpeercert())

    def take(self) -> bytes:
        """What has to be sent now."""
        with self._lock:
            return self._leaving.read()

    def seal(self, data: Any) -> bytes:
        """These bytes as records, which must be sent in the order in which they were made."""
        with self._lock:
            try:
                self._ends.write(data)
            except self._fails as error:
                raise _broken(error) from error
            return self._leaving.read()

    def feed(self, data: Any) -> None:
        """These bytes have come from the kernel."""
        with self._lock:
            self._arriving.write(data)

    def open_into(self, view: memoryview) -> int:
        """Fill ``view`` with what was sent, as far as it has come. Returns how many bytes."""
        at, read = 0, self._ends.read
        with self._lock:
            try:
                while at < len(view):
                    some: Any = read(len(view) - at, view[at:])  # One record at most.
                    if not some:
                        self.has_ended = True
                        break
                    at += some
            except self._wants:
                pass
            except self._fails as error:
                raise _broken(error) from error
        return at

    @property
    def has_bytes(self) -> bool:
        """Whether bytes are here that have come from the kernel and that nobody has read."""
        with self._lock:
            return bool(self._arriving.pending or self._ends.pending())


def _broken(error: ssl.SSLError) -> ConnectionError:
    alert = _alert_in(error)
    if alert is not None:
        return NotTrusted(f"ended the connection: {alert}")
    return ConnectionAbortedError(f"the encrypted bytes are damaged, or not from the other end: {error.reason}")


class SecureSocket:
    """A connection that is encrypted, with those methods of a socket that frames and HTTP use."""

    def __init__(self, plain: socket.socket, cipher: Cipher) -> None:
        #: The kernel's socket.
        self.plain = plain
        self.cipher = cipher
        self._looked_at = b""

    def fileno(self) -> int:
        return self.plain.fileno()

    def getsockname(self) -> Any:
        return self.plain.getsockname()

    def setsockopt(self, level: int, option: int, value: int | bytes) -> None:
        self.plain.setsockopt(level, option, value)

    def settimeout(self, seconds: float | None) -> None:
        self.plain.settimeout(seconds)

    def shutdown(self, how: int) -> None:
        self.plain.shutdown(how)

    def close(self) -> None:
        self.plain.close()

    def has_bytes(self) -> bool:
        """Whether something has come that nobody has read. The kernel knows nothing of it."""
        return bool(self._looked_at) or self.cipher.has_bytes

    def sendall(self, data: bytes) -> None:
        view, deadline = memoryview(data), _Deadline(self.plain)
        for at in range(0, len(view), SECURE_PIECE_BYTES):
            deadline.send(self.cipher.seal(view[at : at + SECURE_PIECE_BYTES]))

    def send(self, data: memoryview) -> int:
        """As a socket's: a part of it may be sent."""
        part = data[:SECURE_FRAME_BYTES]
        _Deadline(self.plain).send(self.cipher.seal(part))
        return len(part)

    def recv(self, count: int, flags: int = 0) -> bytes:
        if not self._looked_at:
            data = bytearray(count)
            self._looked_at = bytes(data[: self._receive(data)])
        found = self._looked_at[:count]
        if not flags & socket.MSG_PEEK:
            self._looked_at = self._looked_at[count:]
        return found

    def recv_into(self, buffer: Any) -> int:
        found = self.recv(len(buffer)) if self._looked_at else b""
        buffer[: len(found)] = found
        return len(found) or self._receive(buffer)

    def _receive(self, buffer: Any) -> int:
        """As much as is here; if nothing is, wait for it. 0: the connection has ended."""
        view, deadline = memoryview(buffer), _Deadline(self.plain)
        while not (count := self.cipher.open_into(view)) and not self.cipher.has_ended:
            if not (data := deadline.receive()):
                return 0
            self.cipher.feed(data)
        return count


class _Deadline:
    """Calls into the kernel that together take as long as one call may."""

    def __init__(self, plain: socket.socket) -> None:
        self._plain = plain
        seconds = plain.gettimeout()
        self._until = None if seconds is None else time.monotonic() + seconds

    def begin(self) -> None:
        if self._until is not None:
            left = self._until - time.monotonic()
            if left <= 0:
                raise TimeoutError("timed out")
            self._plain.settimeout(left)

    def send(self, data: bytes) -> None:
        self.begin()
        self._plain.sendall(data)

    def receive(self) -> bytes:
        self.begin()
        return self._plain.recv(SECURE_FRAME_BYTES)


# --------------------------------------------------------------------------------------------------------- handshake


def secured(
    plain: socket.socket, tls: TLS, seconds: float, *, listens: bool, to_plain: bytes | None = None
) -> SecureSocket:
    """Encrypt a connection. Raises :class:`NotTrusted` if one end does not accept the other, and both know why.

    ``seconds``: for all of it. ``to_plain``: the other end is a client of HTTP, to which nothing is said but this, if
    it does not encrypt. Its name is left to the caller (:func:`why_not`). None: both ends are ours.
    """
    plain.settimeout(seconds)
    deadline, own = _Deadline(plain), credentials(tls)
    found = SecureSocket(plain, Cipher(own, listens=listens))
    try:
        _shake_hands(found.cipher, deadline, own, to_plain=(to_plain or NO_VERSION) if listens else b"")
        if to_plain is None:
            _agree(found, deadline, why_not(tls, found.cipher))
    except NotTrusted:
        say_goodbye(plain)
        raise
    return found


def _shake_hands(cipher: Cipher, deadline: _Deadline, own: Credentials, *, to_plain: bytes) -> None:
    import ssl

    is_first = True
    try:
        while not cipher.shake_hands():
            if data := cipher.take():
                deadline.send(data)
            data = deadline.receive()
            if not data:
                raise NotTrusted("closed the connection during the TLS handshake: was it started without tls=?")
            if is_first and not any(kind.startswith(data[:2]) for kind in (HANDSHAKE, ALERT)):
                deadline.send(to_plain)
                raise NotTrusted("does not encrypt, and this end does: give both the same tls=")
            is_first = False
            cipher.feed(data)
        if data := cipher.take():
            deadline.send(data)
    except ssl.SSLError as error:
        with suppress(OSError):
            deadline.send(cipher.take())  # The alert that tells the other end.
        raise NotTrusted(_fault_in(error, own)) from error


def why_not(tls: TLS, cipher: Cipher) -> str:
    """Why the other end's certificate, which is from the right CA, is not accepted; empty: it is."""
    own, found = credentials(tls), cipher.names()
    if accepts(own.names, found):
        return ""
    shown = ", ".join(value for _, value in found[:10]) or "no name"
    return f"has a certificate for {shown}, and names= allows only {', '.join(own.names[:10])}"


def _said(refusal: str) -> bytes:
    """The word after the handshake: what the other end is told does not list whom this end accepts."""
    told = as_utf8(refusal.partition(", and names=")[0]).encode()[:SECURE_REFUSAL_BYTES]
    return _SAID.pack(len(told)) + told


def _agree(found: SecureSocket, deadline: _Deadline, refusal: str) -> None:
    """Say whether this end goes on, and hear whether the other end does."""
    with suppress(OSError):  # It may have refused meanwhile. What it says about that is read below.
        deadline.send(found.cipher.seal(_said(refusal)))
    try:
        (length,) = _SAID.unpack(_receive_all(found, deadline, _SAID.size))
        if length > SECURE_REFUSAL_BYTES:
            raise NotTrusted("does not speak transfuse's protocol: is it another service?")
        if length:
            told = _receive_all(found, deadline, length).decode("utf-8", "replace")
            raise NotTrusted(f"does not accept this end, which {told}: see names= there")
    except OSError as error:
        if refusal:
            raise NotTrusted(refusal) from error
        raise
    if refusal:
        raise NotTrusted(refusal)


def _receive_all(found: SecureSocket, deadline: _Deadline, count: int) -> bytes:
    data = b""
    while len(data) < count:
        deadline.begin()
        some = found.recv(count - len(data))
        if not some:
            raise NotTrusted("closed the connection after the TLS handshake: its log says why")
        data += some
    return data


def say_goodbye(plain: socket.socket) -> None:
    """Send no more, and drop what comes, for a moment: so the other end can read what it was told last."""
    until = time.monotonic() + Patience.GOODBYE_SECONDS
    with suppress(OSError):
        plain.shutdown(socket.SHUT_WR)
        while (left := until - time.monotonic()) > 0:
            plain.settimeout(left)
            if not plain.recv(SECURE_FRAME_BYTES):
                return


def refuse_in_plain(plain: socket.socket) -> None:
    """Tell an end that has begun to encrypt that this one does not."""
    with suppress(OSError):
        plain.sendall(NO_VERSION)
        say_goodbye(plain)


def _alert_in(error: ssl.SSLError) -> str | None:
    """What the other end has said by an alert; None: this end has found something wrong."""
    _, is_alert, alert = (error.reason or "").partition("_ALERT_")
    if not is_alert:
        return None
    return _ALERTS.get(alert, f"it does not accept the certificate of this end ({alert.replace('_', ' ').lower()})")


def _fault_in(error: ssl.SSLError, own: Credentials) -> str:
    alert = _alert_in(error)
    if alert is not None:
        return f"refuses to go on: {alert}"
    number = getattr(error, "verify_code", 0)
    if number:
        why = _FAULTS.get(number, f"is not accepted: {getattr(error, 'verify_message', '')}")
        return f"has a certificate that {why.format(ca=os.fspath(own.ca))}"
    if error.reason == "PEER_DID_NOT_RETURN_A_CERTIFICATE":
        return "has shown no certificate"
    if error.reason in ("UNSUPPORTED_PROTOCOL", "NO_PROTOCOLS_AVAILABLE", "WRONG_SSL_VERSION"):
        return "has no TLS 1.3"
    return f"could not agree on TLS: {error.reason or error}"
