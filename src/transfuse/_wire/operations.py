"""Operations: sends and receives with one peer, and their failures as our errors.

The head of :mod:`.group` lists what backends do and do not do, and how operations are waited for because of that.
"""

from __future__ import annotations

import logging
import queue
import re
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from datetime import timedelta
from functools import partial
from typing import Any, cast

import torch

from transfuse._errors import PeerError, PeerLost, PeerTimeout, TransfuseError
from transfuse._memory import streams
from transfuse._memory.streams import poll
from transfuse._timeouts import Patience
from transfuse._tuning import GROUP_LEAST_SECONDS, GROUP_LONGEST_SECONDS, PROBE_FIRST_SECONDS
from transfuse._wire.group import CPU, OFFER_TAG, Group, WorkLike, new_link_tag
from transfuse._wire.messages import BLOCK_BYTES, MARK, ROOM, Message, seal

logger = logging.getLogger("transfuse")


class Posted:
    """A send or receive under way. The backend owns the tensor's memory until :meth:`wait` has returned."""

    def __init__(
        self, operations: Operations, work: WorkLike, tensor: torch.Tensor, *, polled: bool, lent: bool
    ) -> None:
        self._operations = operations
        self.work = work
        self.tensor = tensor
        #: Whether the backend is asked whether the operation is complete, instead of being waited for.
        self.polled = polled
        #: Whether the backend writes to the caller's own memory.
        self.lent = lent

    def is_complete(self) -> bool:
        """Whether a polled operation is complete, successful or not."""
        work: Any = self.work
        # torchft's works hold the backend's. They answer for themselves, and never yes.
        while type(work).__module__.startswith("torchft") and getattr(work, "_work", None) is not None:
            work = work._work
        try:
            return bool(work.is_completed())
        except Exception:
            return True  # The wait that follows raises the error.

    def wait(self) -> torch.Tensor:
        return self._poll() if self.polled else self._wait()

    def _poll(self) -> torch.Tensor:
        """Ask until the operation is complete. Every other operation that completes meanwhile renews the deadline."""
        channel, started = self._operations, time.monotonic()
        channel.progressed_at = max(channel.progressed_at, started)
        probe = PROBE_FIRST_SECONDS
        try:
            while not poll(self.is_complete, min(time.monotonic() + probe, channel.progressed_at + channel.timeout)):
                if time.monotonic() >= channel.progressed_at + channel.timeout:
                    channel.may_still_refuse = channel.agrees and not channel.is_source and not channel.broken
                    raise PeerTimeout(channel.peer, channel.phase, time.monotonic() - started)
                if channel.broken:
                    raise PeerLost(channel.peer, f"rank {channel.peer} was silent for too long and was abandoned")
                channel.probe()
                probe = min(2 * probe, channel.pulse_seconds)
            cast(Any, self.work).wait()  # It is complete, so this only raises the error with which it ended, if any.
        except TransfuseError:
            channel.broken = True
            raise
        except Exception as error:
            channel.broken = True
            raise channel.translate(error, time.monotonic() - started) from error
        channel.progressed_at = time.monotonic()
        channel.outstanding.remove(self)
        return self.tensor

    def _wait(self) -> torch.Tensor:
        channel = self._operations
        started = channel.waiting_since = time.monotonic()
        try:
            done = self.work.wait(
                timedelta(seconds=GROUP_LONGEST_SECONDS if channel.group.shares_fate else channel.timeout)
            )
        except Exception as error:
            channel.broken = channel.closed = True
            raise channel.translate(error, time.monotonic() - started) from error
        finally:
            channel.waiting_since = None
            with suppress(ValueError):
                channel.outstanding.remove(self)
        if done is False:
            channel.broken = True
            raise PeerLost(channel.peer, f"rank {channel.peer}: the backend reported failure while {channel.phase}")
        return self.tensor


class _NotPosted:
    """The work of an operation that the backend has not accepted yet."""

    def wait(self, timeout: timedelta) -> bool:
        raise RuntimeError("the operation has not been posted")

    def is_completed(self) -> bool:
        return False


_NOT_POSTED = _NotPosted()


class Operations:
    """The operations of one conversation with one peer. One thread at a time posts and waits."""

    def __init__(self, group: Group, peer: int, timeout: float, *, is_source: bool) -> None:
        self.group = group
        self.peer = peer
        #: Whether this end is the source. Needed when a rank talks to itself.
        self.is_source = is_source
        self._loopback = group.switchboard.loop() if peer == group.rank() else None
        self.timeout = timeout
        #: How long the peer waits for a sign of life: this end's own timeout until the peer has said.
        self.peer_timeout = timeout
        #: What the conversation is doing. Errors quote it.
        self.phase = "starting"
        self.tag = OFFER_TAG
        self.outstanding: deque[Posted] = deque()
        self.waiting_since: float | None = None
        self.given_up = False
        self.broken = False
        #: Whether the backend has reported the connection as gone. Then it writes no more to tensors that were posted.
        self.closed = False
        #: When an operation on the accelerator was last complete.
        self.progressed_at = 0.0
        #: Whether parcels travel through main memory instead of the group's device.
        self.through_host = False
        #: Whether this receiver can tell its source why it stops, although operations on the accelerator are stuck.
        self.may_still_refuse = False
        #: Whether operations on the accelerator were left behind, which the peer may still answer.
        self.has_stuck = False
        #: What the group has reserved for this conversation (:meth:`.group.Group.turn`).
        self.turn = ExitStack()
        self._rests = False

    @property
    def device(self) -> torch.device:
        """Where parcels travel."""
        return CPU if self.through_host else self.group.device

    @property
    def is_lower(self) -> bool:
        """Whether this rank is lower than its peer."""
        return (self.group.rank() or 0) < self.peer

    @property
    def agrees(self) -> bool:
        """Whether both ends agree about the turn of every request before they post parcels."""
        return self.group.agrees and self._loopback is None

    def may_post(self) -> bool:
        """Whether it is this conversation's turn to post operations on the accelerator."""
        return True

    def probe(self) -> None:
        """Find out whether the peer is still there, while an operation on the accelerator takes long."""

    # -- posting

    def post_send(self, tensor: torch.Tensor, tag: int | None = None) -> Posted:
        if self._loopback is not None:
            return self._post(partial(self._loopback.send, by_source=self.is_source), tensor, tag)
        return self._post(lambda tensor, tag: self.group.pg.send([tensor], self.peer, tag), tensor, tag)

    def post_recv(self, tensor: torch.Tensor, tag: int | None = None, *, lent: bool = False) -> Posted:
        """Post a receive. ``lent``: the tensor is the caller's own memory, not staging."""
        if self._loopback is not None:
            return self._post(partial(self._loopback.recv, by_source=self.is_source), tensor, tag, lent=lent)
        return self._post(lambda tensor, tag: self.group.pg.recv([tensor], self.peer, tag), tensor, tag, lent=lent)

    def _post(self, operation: Any, tensor: torch.Tensor, tag: int | None, *, lent: bool = False) -> Posted:
        polled = self.group.polls and tensor.device.type != "cpu" and self._loopback is None
        post = partial(operation, tensor, self.tag if tag is None else tag)
        posted = Posted(self, _NOT_POSTED, tensor, polled=polled, lent=lent)
        # First, so that a thread that takes the queue away from this conversation counts this operation as stuck.
        self.outstanding.append(posted)
        try:
            if polled and not self.may_post():
                raise PeerLost(
                    self.peer,
                    f"rank {self.peer} was silent for too long while {self.phase}, and its turn on {tensor.device} "
                    "was given to others",
                )
            if polled and self.peer not in self.group.switchboard.connected:
                self._post_first(post, posted)
            else:
                posted.work = post()
        except PeerTimeout:
            self.broken = True  # The operation may still get through, so it stays outstanding.
            raise
        except TransfuseError:
            self.broken = True
            self.outstanding.remove(posted)
            raise
        except Exception as error:
            self.broken = True
            self.outstanding.remove(posted)
            raise self.translate(error, 0.0) from error
        posted.polled = polled and hasattr(posted.work, "is_completed")
        return posted

    def _post_first(self, post: Callable[[], WorkLike], posted: Posted) -> None:
        """Post the first operation with a peer. It may block until the peer posts too, which may be never."""
        answers: queue.SimpleQueue[Exception | None] = queue.SimpleQueue()
        inherited = streams.inherit()

        def run() -> None:
            try:
                with inherited(), torch.inference_mode(False), torch.no_grad():
                    posted.work = post()
                answers.put(None)
            except Exception as error:
                answers.put(error)

        threading.Thread(target=run, name=f"transfuse-connect-{self.peer}", daemon=True).start()
        try:
            error = answers.get(timeout=self.timeout)
        except queue.Empty:
            self.group.switchboard.pin()
            raise PeerTimeout(self.peer, f"{self.phase} (connecting on {self.group.device})", self.timeout) from None
        if error is not None:
            raise error
        self.group.switchboard.connected.add(self.peer)

    # -- failures

    def translate(self, error: Exception, elapsed: float) -> PeerError:
        """Turn a backend's exception into one of ours."""
        # gloo's messages begin with a source path of its build machine and end with advice.
        text = re.sub(r"^\[\S+\] ", "", str(error).split("\n")[0]).split(". This is typically")[0]
        if self.given_up or elapsed >= 0.9 * self.timeout or re.search("timed out|timing out", text.lower()):
            late = PeerTimeout(self.peer, self.phase, elapsed)
            if self.peer == self.group.rank():
                late.add_note("This rank is its own peer: send in one thread, receive in another, on the same group.")
            return late
        return PeerLost(self.peer, f"rank {self.peer}: connection lost while {self.phase}: {text}")

    def leave_stuck(self) -> None:
        """Leave operations on the accelerator behind that the peer has not answered and may never answer.

        If one of them may still write to the caller's memory, the communicators are aborted.
        """
        stuck = self.unanswered()
        if not stuck:
            return
        self.has_stuck = True
        self.group.switchboard.pin()
        self.group.leave_stuck(self.peer, stuck)
        if any(posted.lent for posted in stuck):
            aborted = self.group.abort(self.timeout)
            logger.warning(
                "rank %d fell silent while %s, and the backend might still have written to the targets: %s",
                self.peer,
                self.phase,
                "its communicators were aborted; make a new group"
                if aborted
                else "it cannot be aborted, so do not use the targets again; end this process",
            )

    def unanswered(self) -> list[Posted]:
        return [posted for posted in self.outstanding.copy() if posted.polled and not posted.is_complete()]

    # -- what the watch asks

    @property
    def pulse_seconds(self) -> float:
        """Seconds between two signs of life. The peer's timeout can shorten them only within limits."""
        return Patience(self.timeout).pulse(self.peer_timeout)

    @property
    def shares_fate(self) -> bool:
        return self.group.shares_fate

    @contextmanager
    def resting(self) -> Iterator[None]:
        """Mark this channel as waiting for another one. Then the watch may end the other one's wait all the same."""
        self._rests = True
        try:
            yield
        finally:
            self._rests = False

    def overdue(self) -> bool:
        """Whether this conversation has waited longer than its timeout, or only waits for another one (resting)."""
        since = self.waiting_since
        return self._rests or (since is not None and time.monotonic() - since > self.timeout)

    def break_off(self) -> None:
        """Close the connection, to end waits that would not end by themselves. The watch calls this.

        The wait that expires is for a receive of its own, on a tag that nobody sends to. A second wait for a receive
        that is already awaited might see it complete just now, and then the first wait would never end.
        """
        if self.outstanding:
            with suppress(Exception):
                nothing = self.post_recv(self.empty(1), new_link_tag())
                self.outstanding.remove(nothing)
                nothing.work.wait(timedelta(seconds=GROUP_LEAST_SECONDS))

    # -- messages

    def pieces(
        self, kind: Message, transfer: int, note: int, body: bytes | torch.Tensor, chunk_bytes: int
    ) -> Iterator[torch.Tensor]:
        """What is sent over a group, one after the other: a block, which begins with the header; chunks with marks."""
        data = memoryview(body) if isinstance(body, bytes) else body.numpy().data
        yield self.wire((seal(kind, transfer, note, data) + bytes(data[:ROOM])).ljust(BLOCK_BYTES, b"\0"))
        if len(data) > ROOM:
            rest = (self.wire(body) if isinstance(body, bytes) else body.to(self.group.control))[ROOM:]
            for at in range(0, rest.numel(), chunk_bytes):
                yield rest[at : at + chunk_bytes]
                yield self.wire(MARK)

    def recv_chunk(self, count: int) -> memoryview:
        """A chunk of a message. Its mark proves that it has arrived; a wait for the chunk itself might never end."""
        chunk = self.post_recv(self.empty(count))
        self.post_recv(self.empty(len(MARK))).wait()
        return chunk.wait().cpu().numpy().data

    def wire(self, data: bytes) -> torch.Tensor:
        """Bytes as a tensor that the backend can send as a message: writable memory on the device for messages."""
        return torch.frombuffer(bytearray(data), dtype=torch.uint8).to(self.group.control) if data else self.empty(0)

    def empty(self, count: int) -> torch.Tensor:
        """Memory for a message. Zeros: gloo accepts a message that is too short, and memory may hold an earlier one."""
        return torch.zeros(count, dtype=torch.uint8, device=self.group.control)
