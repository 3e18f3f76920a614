"""The control connection: both ends prove that they know the secret before they say anything else.

    reader                                     server
      | -- hello: magic, version, a nonce ------> |
      | <- hello: magic, version, a nonce ------- |
      | -- proof: HMAC of both hellos ----------> |  wrong: the server closes and has revealed nothing
      | <- proof: HMAC of both hellos ----------- |  wrong: the reader closes and has revealed nothing
      | <- frames, each with an HMAC -----------> |  under a key of this connection's own

The reader proves first: a stranger that only connects gets nothing that was made with the secret. After the frames the
connection can become a stream (:meth:`ControlConnection.release`), over which two ends hold a conversation.

With ``tls=`` all of this is said within TLS (:mod:`.secure`); without, nothing is encrypted.

Here *server* is the end that listens, and *reader* the end that connects.
"""

from __future__ import annotations

import encodings.idna  # noqa: F401 - sockets import it at their first connection, which may be too late to read files
import errno
import hashlib
import hmac
import ipaddress
import resource
import secrets
import socket
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, TypeVar, overload

import msgspec

from transfuse._errors import LimitExceeded, PeerLost, PeerNotTrusted, PeerRefused, PeerTimeout, ProtocolError
from transfuse._tls import TLS
from transfuse._tuning import HANDSHAKE_MAX_FRAME_BYTES
from transfuse._wire import secure
from transfuse._wire.framed import AnySocket, Closed, Framed, Malformed, Vocabulary, own
from transfuse._wire.secure import NotTrusted

MAGIC = b"TFUSDOOR"
VERSION = 2
NONCE_BYTES = PROOF_BYTES = 32
HELLO_BYTES = len(MAGIC) + 1 + NONCE_BYTES
#: The key of ends that have no token. It is public, so everybody can prove it.
PUBLIC_KEY = hashlib.sha256(b"no token").digest()
#: What a reader is told whose proof was not accepted. The server says nothing to strangers.
NO_TOKEN = (
    "no token was given here, and the server was started with one (or is ending): pass token= (for a hub: "
    "server_token=), or set TRANSFUSE_TOKEN for a command"
)
WRONG_TOKEN = "it was started with another token than the one given here, or with none, or is ending"
#: The ranks of the two ends, as errors and reports name them.
SERVER, READER = 0, 1


class Wait(msgspec.Struct, tag="wait", frozen=True, forbid_unknown_fields=True):
    """Server to reader: wait, I am alive."""


class Come(msgspec.Struct, tag="come", frozen=True, forbid_unknown_fields=True):
    """Reader to server: may I come in? Server to reader: there is room, come in."""


class Join(msgspec.Struct, tag="join", frozen=True, forbid_unknown_fields=True):
    """The end that connects: this is the connection of that number, which you expect. It is a stream from now on."""

    number: int


class Ready(msgspec.Struct, tag="ready", frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Reader to server: I can begin. Server to reader: the state holds still, begin."""

    #: From a reader that wants one entry of the state, a mapping: the entry's key.
    entry: str | None = None


class ReaderRefused(msgspec.Struct, tag="refused", frozen=True, forbid_unknown_fields=True):
    """Server to reader: refused, with the cause."""

    kind: str
    cause: str


Frame = Wait | Come | Join | Ready | ReaderRefused
#: What is said after a handshake, unless the two ends have a vocabulary of their own. Frames carry only addresses and
#: causes of failures, so they are short.
VOCABULARY = Vocabulary(msgspec.msgpack.Decoder(Frame), HANDSHAKE_MAX_FRAME_BYTES)
_F = TypeVar("_F")


class ControlConnection(Framed):
    """One control connection. ``name`` is the other end's name for messages; ``rank`` is its rank in errors."""

    def __init__(self, sock: socket.socket, name: str, rank: int, vocabulary: Vocabulary = VOCABULARY) -> None:
        super().__init__(sock, vocabulary, has_key=True)
        self.name = name
        self.rank = rank
        #: Whether the socket was given away.
        self.is_released = False
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    @property
    def local_host(self) -> str:
        """This machine's address on the interface that leads to the other end."""
        return str(self._socket.getsockname()[0])

    @property
    def is_proved(self) -> bool:
        """Whether both ends have proved that they know the secret."""
        return bool(self._sending_key)

    def release(self) -> AnySocket:
        """Give the socket away: no frames follow. It belongs to the caller now, and closing this does nothing."""
        self.is_released = True
        return self._socket

    def hang_up(self) -> None:
        """Called from another thread: stop receiving, which ends a wait for the other end. Sending still works."""
        if not self.is_released:
            with suppress(OSError):
                self._socket.shutdown(socket.SHUT_RD)

    def close(self) -> None:
        if not self.is_released:
            super().close()

    # ---------------------------------------------------------------------------------------------------- frames

    @overload
    def expect(self, kind: type[_F], seconds: float, phase: str, most_waits: int) -> _F: ...

    @overload
    def expect(self, kind: tuple[type, ...], seconds: float, phase: str, most_waits: int) -> Any: ...

    def expect(self, kind: Any, seconds: float, phase: str, most_waits: int) -> Any:
        """Return the next frame, which must be a ``kind``; raise a refusal. A ``Wait`` frame buys ``seconds`` more."""
        started = time.monotonic()
        for _ in range(most_waits + 1):
            frame, _ = self.receive(time.monotonic() + seconds, phase)
            if isinstance(frame, ReaderRefused):
                raise PeerRefused(self.rank, frame.kind[:200], frame.cause[:4000], name=self.name)
            if isinstance(frame, kind):
                return frame
            if not isinstance(frame, Wait):
                raise ProtocolError(self.rank, f"{self.name} sent {type(frame).__name__} while {phase}")
            if most_waits == 0:
                raise ProtocolError(self.rank, f"{self.name} sent Wait while {phase}: only a server may")
        raise PeerTimeout(self.rank, f"{phase} ({self.name})", time.monotonic() - started)

    def _explain(self, error: Exception, phase: str, seconds: float) -> Exception:
        if isinstance(error, Malformed):
            return ProtocolError(self.rank, f"{self.name} {error}")
        if isinstance(error, TimeoutError):
            return PeerTimeout(self.rank, f"{phase} ({self.name})", seconds)
        if isinstance(error, Closed):
            return PeerLost(self.rank, f"{self.name} closed the connection while {phase}")
        if isinstance(error, NotTrusted):
            return PeerNotTrusted(self.rank, f"{self.name} {error}")
        return PeerLost(self.rank, f"{self.name}: connection lost while {phase}: {error}")

    # ------------------------------------------------------------------------------------------------- handshake

    def encrypt(self, tls: TLS, deadline: float, *, listens: bool) -> None:
        """Encrypt all that is said from now on. Both ends must, before they say anything else."""
        plain, phase = self._socket, "agreeing on TLS"
        assert isinstance(plain, socket.socket)
        left = deadline - time.monotonic()
        self._socket = self._do(partial(secure.secured, plain, tls, left, listens=listens), deadline, phase)

    def admit(self, key: bytes, deadline: float, tls: TLS | None = None) -> None:
        """The server's side: admit a reader that proves that it knows ``key``."""
        if tls is not None:
            self.encrypt(tls, deadline, listens=True)
        theirs = self._hear_hello(deadline)
        mine = self._say_hello(deadline)
        self._compare_versions(theirs)
        said = theirs + mine
        proof = self._receive_bytes(PROOF_BYTES, deadline, "waiting for a proof of the token")
        if not hmac.compare_digest(proof, _proof(key, b"reader", said)):
            raise ProtocolError(self.rank, f"{self.name} {_fault(key, proof, said)}")
        self._send_bytes(_proof(key, b"server", said), deadline, "proving the token")
        self._open(key, said, b"to reader", b"to server")

    def enter(self, key: bytes, deadline: float) -> None:
        """The reader's side: prove that this end knows ``key``, then check that the server does."""
        mine = self._say_hello(deadline)
        theirs = self._hear_hello(deadline)
        self._compare_versions(theirs)
        said = mine + theirs
        self._send_bytes(_proof(key, b"reader", said), deadline, "proving the token")
        try:
            proof = self._receive_bytes(PROOF_BYTES, deadline, "waiting for the server's proof of the token")
        except PeerLost as error:
            kind, cause = ("NoToken", NO_TOKEN) if key == PUBLIC_KEY else ("WrongToken", WRONG_TOKEN)
            raise PeerRefused(self.rank, kind, cause, name=self.name) from error
        if not hmac.compare_digest(proof, _proof(key, b"server", said)):
            raise ProtocolError(self.rank, f"{self.name} does not know the token: it is another server, or a false one")
        self._open(key, said, b"to server", b"to reader")

    def _say_hello(self, deadline: float) -> bytes:
        hello = MAGIC + bytes([VERSION]) + secrets.token_bytes(NONCE_BYTES)
        self._send_bytes(hello, deadline, "saying hello")
        return hello

    def _hear_hello(self, deadline: float) -> bytes:
        phase = "waiting for a hello"
        hello = self._receive_bytes(len(secure.HANDSHAKE), deadline, phase)
        if hello in (secure.HANDSHAKE, secure.ALERT):
            if hello == secure.HANDSHAKE and isinstance(self._socket, socket.socket):
                secure.refuse_in_plain(self._socket)
            raise PeerNotTrusted(self.rank, f"{self.name} encrypts, and this end does not: give both the same tls=")
        hello += self._receive_bytes(HELLO_BYTES - len(hello), deadline, phase)
        if not hello.startswith(MAGIC):
            raise ProtocolError(
                self.rank, f"{self.name} does not speak transfuse's protocol for readers: is it another service?"
            )
        return hello

    def _compare_versions(self, theirs: bytes) -> None:
        """Compare versions. Called once both ends have said hello, so that both learn of a difference."""
        version = theirs[len(MAGIC)]
        if version != VERSION:
            raise ProtocolError(
                self.rank,
                f"{self.name} speaks version {version} for readers, this end version {VERSION}: upgrade the older end",
            )

    def _open(self, key: bytes, said: bytes, sending: bytes, receiving: bytes) -> None:
        session = hmac.digest(key, b"session " + said, hashlib.sha256)
        self._sending_key = hmac.digest(session, sending, hashlib.sha256)
        self._receiving_key = hmac.digest(session, receiving, hashlib.sha256)


def _proof(key: bytes, who: bytes, said: bytes) -> bytes:
    return hmac.digest(key, b"transfuse " + who + b" " + said, hashlib.sha256)


def _fault(key: bytes, proof: bytes, said: bytes) -> str:
    """What is wrong with a reader's token."""
    if key == PUBLIC_KEY:
        return "gave a token, and this server was started without one"
    if hmac.compare_digest(proof, _proof(PUBLIC_KEY, b"reader", said)):
        return "gave no token, and this server was started with one"
    return "does not know the token"


def check_token(token: object, name: str = "token") -> None:
    """Refuse what is neither text nor bytes, and what is empty."""
    if not isinstance(token, str | bytes):
        raise TypeError(f"{name} takes text or bytes, got {type(token).__name__}")  # Never show what it holds.
    if not token:
        raise ValueError(f"{name} is empty: leave it out, or make one with secrets.token_hex(32)")


def key_of(token: str | bytes | None) -> bytes:
    """The key for a token. Without a token the key is public, so everybody can prove it."""
    if token is None:
        return PUBLIC_KEY
    check_token(token)
    return hashlib.sha256(b"token " + (token.encode() if isinstance(token, str) else token)).digest()


def split_address(address: str) -> tuple[str, int]:
    """Split ``host:port`` or ``[host]:port``."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 1 << 16 or (":" in host and host[0] + host[-1] != "[]"):
        raise ValueError(f"an address is host:port, or [host]:port with IPv6, got {address!r}")
    return host.strip("[]"), int(port)


def check_addresses(addresses: Sequence[object]) -> None:
    """Refuse a text that is no address, and an address that appears twice."""
    for one in addresses:
        if isinstance(one, str):
            split_address(one)
    if len(set(addresses)) != len(addresses):
        raise ValueError(f"an address appears twice in {list(addresses)}: give each server once")


def is_loopback(host: str) -> bool:
    """Whether an address or name of a host is this machine's own."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def join_address(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def check_descriptors(error: OSError, purpose: str) -> None:
    """Raise :class:`LimitExceeded` if this process, or its host, has no file descriptors left."""
    if error.errno in (errno.EMFILE, errno.ENFILE):
        most = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        raise LimitExceeded(
            f"{purpose} takes a file descriptor, and none is free: raise the limit of the process (ulimit -n, now "
            f"{most}), or close files that it does not need"
        ) from error


def _connected(where: tuple[str, int], seconds: float) -> socket.socket:
    """A socket that is connected to one of the addresses that a name stands for."""
    found = socket.getaddrinfo(*where, type=socket.SOCK_STREAM)
    for number, (family, kind, protocol, _, address) in enumerate(found, start=1):
        sock = socket.socket(family, kind, protocol)
        own(sock)  # Not create_connection(): a fork while it connects would leave a copy in the child.
        try:
            sock.settimeout(seconds)
            sock.connect(address)
        except BaseException as error:
            sock.close()
            if number == len(found) or not isinstance(error, OSError):
                raise
        else:
            return sock
    raise OSError("the name stands for no address")


def connect(
    address: str,
    key: bytes,
    seconds: float,
    rank: int,
    connected: Callable[[ControlConnection], object] = lambda _: None,
    vocabulary: Vocabulary = VOCABULARY,
    *,
    tls: TLS | None = None,
) -> ControlConnection:
    """Connect to a server as a reader, and prove the token. ``connected`` gets the connection before that."""
    started = time.monotonic()
    deadline = started + seconds
    try:
        sock = _connected(split_address(address), seconds)
    except TimeoutError:
        raise PeerTimeout(rank, f"connecting to {address}", time.monotonic() - started) from None
    except OSError as error:
        check_descriptors(error, f"connecting to {address}")
        raise PeerLost(rank, f"{address} cannot be reached: {error}; is a server there, on this interface?") from error
    control = ControlConnection(sock, address, rank, vocabulary)
    try:
        connected(control)
        if tls is not None:
            control.encrypt(tls, deadline, listens=False)
        control.enter(key, deadline)
    except BaseException:
        control.close()
        raise
    return control
