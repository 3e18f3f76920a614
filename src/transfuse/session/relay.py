"""A receiver's part in a chain: parcels come from the neighbour before, and go to the one after while others arrive.

Whatever is in flight between two receivers lies in staging, never in their tensors: a neighbour that falls silent is
left, and the source brings the rest.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Sequence

import numpy as np
import torch

from transfuse.errors import PeerError, PeerTimeout
from transfuse.memory.packing import Land
from transfuse.phases import RELAYING
from transfuse.plan.parcels import Parcels
from transfuse.progress import Progress
from transfuse.session.bursts import Incoming, Outgoing, Shape
from transfuse.session.threads import Caller
from transfuse.wire.group import Line
from transfuse.wire.messages import Link

__all__ = ["Gate", "Relay"]

logger = logging.getLogger("transfuse")


class Gate:
    """Which parcels have landed here, with their digests: those can be passed on."""

    def __init__(self, count: int) -> None:
        self._changed = threading.Condition()
        self._landed = np.zeros(count, dtype=bool)
        self._digests = np.zeros(count, dtype=np.uint64)
        self._cause: BaseException | None = None

    def landed(self, numbers: Sequence[int], digests: Sequence[int]) -> None:
        """These are here, or what arrived in their place: whoever gets them next compares them too."""
        with self._changed:
            self._landed[numbers] = True
            if digests:
                self._digests[numbers] = np.array(digests, dtype=np.uint64)
            self._changed.notify_all()

    def landed_among(self, numbers: Sequence[int]) -> list[int]:
        with self._changed:
            return [n for n in numbers if self._landed[n]]

    def close(self, cause: BaseException) -> None:
        """No more will land."""
        with self._changed:
            self._cause = self._cause or cause
            self._changed.notify_all()

    def wait(self, numbers: Sequence[int]) -> BaseException | None:
        with self._changed:
            self._changed.wait_for(lambda: self._cause is not None or bool(self._landed[numbers].all()))
            return None if self._landed[numbers].all() else self._cause

    def digest(self, number: int) -> int:
        return int(self._digests[number])


class _Side:
    """One neighbour: its line, and the thread that talks with it."""

    def __init__(self, line: Line, link: Link, talk: Callable[[Line], None]) -> None:
        self.line = line
        line.tag, line.transfer = link.tag, link.transfer
        self._talk = talk
        self.ended: queue.SimpleQueue[BaseException | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=f"transfuse-link-{line.peer}", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def _run(self) -> None:
        error: BaseException | None = None
        try:
            with torch.inference_mode(False), torch.no_grad(), self.line:
                self._talk(self.line)
        except BaseException as caught:
            error = caught
        self.ended.put(error)

    def wait(self, progress: Callable[[], int], patience: float, leave: Callable[[], object]) -> BaseException | None:
        """Wait for its end, for as long as there is progress; how it failed, if it did."""
        seen, since = progress(), time.monotonic()
        while True:
            try:
                error = self.ended.get(timeout=max(0.01, min(patience / 8, 0.5)))
                self._thread.join()
                return error
            except queue.Empty:
                if progress() != seen:
                    seen, since = progress(), time.monotonic()
                elif time.monotonic() - since >= patience:
                    leave()
                    return PeerTimeout(self.line.peer, self.line.phase, patience)


class Relay:
    """Takes the parcels of one receive from a neighbour, and passes them on to another."""

    def __init__(self, source: Line, cut: Parcels, landing: Land, shape: Shape, caller: Caller) -> None:
        self._source = source
        self._cut = cut
        self._landing = landing
        self._shape = shape
        self._caller = caller
        self.gate = Gate(len(cut))
        self._after: _Side | None = None
        self._outgoing: Outgoing | None = None
        self._passed_on = Progress()

    def _line_to(self, peer: int) -> Line:
        return Line(self._source.group, peer, self._source.timeout, self._source.limits)

    def start(self, downstream: Link, numbers: Sequence[int]) -> None:
        """Begin to pass these parcels on, each as soon as it has landed."""

        def talk(line: Line) -> None:
            line.phase = "passing parcels on"
            outgoing.send(numbers)

        line = self._line_to(downstream.rank)

        def ready(some: Sequence[int]) -> BaseException | None:
            # What holds this line up is another one's wait, which may be overdue.
            with line.resting():
                return self.gate.wait(some)

        outgoing = self._outgoing = Outgoing(
            line,
            self._cut,
            self._landing,
            self._shape,
            Caller(watching=False),
            self._passed_on,
            digest=lambda number, _: self.gate.digest(number),
            ready=ready,
            always_staged=True,
        )
        self._after = _Side(line, downstream, talk)
        self._after.start()

    def take(
        self,
        upstream: Link,
        numbers: Sequence[int],
        progress: Progress,
        landed: Callable[[Sequence[int], Sequence[int], Sequence[int]], object],
        patience: float,
    ) -> list[int]:
        """Receive these parcels from the neighbour before, as far as they come; those with a wrong digest."""
        line = self._line_to(upstream.rank)
        incoming = Incoming(
            line,
            self._cut,
            self._landing,
            self._shape,
            self._caller,
            progress,
            landed=landed,
            always_staged=True,
        )

        def talk(line: Line) -> None:
            line.phase = RELAYING
            incoming.take(numbers)

        side = _Side(line, upstream, talk)
        side.start()
        error = side.wait(lambda: progress.bytes, patience, incoming.leave)
        if error is self._caller.cause and error is not None:
            raise error
        if isinstance(error, PeerError):
            logger.info("rank %d no longer passes parcels on (%s); the source brings the rest", upstream.rank, error)
        elif error is not None:
            raise error
        return incoming.wrong

    def finish(self, cause: BaseException | None = None) -> None:
        """Wait until the neighbour after has everything, or is gone; with a cause, until it has been told."""
        if cause is not None:
            self.gate.close(cause)
        if self._after is None or self._outgoing is None:
            return
        side = self._after
        error = side.wait(lambda: self._passed_on.bytes, self._source.timeout, self._outgoing.leave)
        if error is not None and error is not cause:
            # It gets the rest from the source: nothing that concerns this receive.
            logger.info("rank %d did not take what was passed on: %s", side.line.peer, error)
