"""Lanes of one transfer: further connections between a source and a receiver, each with a thread at both ends.

A lane is a small conversation of its own: the receiver asks for parcels (more), the source sends them in bursts, and at
the end the receiver says that it is done (verdict). In the receiver's ledger every lane is a holder of parcels, on
behalf of its source. A lane that breaks or falls silent gives its parcels back, and the others bring them.
"""

from __future__ import annotations

import logging
import threading
import time
from abc import abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import torch

from transfuse import _workers
from transfuse._errors import PeerLost, TransfuseError
from transfuse._memory import streams
from transfuse._timeouts import Patience
from transfuse._wire.channel import Channel
from transfuse._wire.group import CPU, Group
from transfuse._wire.lanes import Entrance, NotWanted
from transfuse._wire.messages import Place
from transfuse._wire.pool import Pool
from transfuse._wire.stream import Stream

logger = logging.getLogger("transfuse")


class LaneWorkers:
    """The lanes of one end of a conversation, each with a thread. One subclass for each end."""

    def __init__(self, pool: Pool, main: Channel, entrances: Sequence[Entrance]) -> None:
        self._pool = pool
        #: Where the other end listens, if this end has to be told.
        self._place: Place | None = None
        self._main = main
        self._entrances = list(entrances)
        #: The streams of the conversation, if it involves an accelerator.
        self._streams = streams.inherit()
        self._patience = Patience(main.timeout).lane
        self._changed = threading.Condition()
        #: Lanes that use the caller's tensors now, with their channels; and whether they must not begin to any more.
        self._busy: dict[Stream, Channel] = {}
        self._over = False
        #: Lanes whose conversation has begun and has not ended.
        self._talking: set[int] = set()

    def start(self) -> None:
        for entrance in self._entrances:
            name = f"transfuse-lane-{self._main.peer}"
            _workers.run(partial(self._work, entrance), name)

    @property
    @abstractmethod
    def used(self) -> int:
        """How many lanes have moved parcels."""

    def end(self, *, well: bool) -> None:
        """Wait until no lane uses the caller's tensors any more. If not ``well``, break off those that do."""
        with self._changed:
            self._over = True
            self._changed.notify_all()
            until = time.monotonic() + 2 * self._patience
            while self._busy and time.monotonic() < until:
                if not well:
                    for lane in self._busy:
                        lane.cut()
                self._changed.wait(Patience.SLICE_SECONDS)
            if well:
                # Both ends say goodbye at about the same time. Then the next transfer finds these lanes.
                self._changed.wait_for(lambda: not self._talking, Patience.SLICE_SECONDS)
        for entrance in self._entrances:
            entrance.give_up()

    @contextmanager
    def _using(self, lane: Stream, channel: Channel) -> Iterator[None]:
        """Use the caller's tensors in this block. Raises if the transfer is over."""
        with self._changed:
            if self._over:
                raise PeerLost(channel.peer, "the transfer is over")
            self._busy[lane] = channel
        try:
            yield
        except BaseException:
            lane.cut()
            raise
        finally:
            with self._changed:
                del self._busy[lane]
                self._changed.notify_all()

    def _work(self, entrance: Entrance, _: _workers.Job) -> None:
        """Run one lane, in its thread."""
        peer, main = self._main.peer, self._main
        started = time.monotonic()
        try:
            lane = entrance.form(self._place)
        except NotWanted:
            return
        except TransfuseError as error:
            self._not_formed(error, time.monotonic() - started)
            return
        channel = Channel(Group(lane, CPU), peer, self._patience, main.limits, is_source=main.is_source)
        channel.transfer, channel.tag, channel.most_bytes = main.transfer, main.tag, main.most_bytes
        with self._changed:
            self._talking.add(lane.number)
        well = False
        try:
            with self._streams(), torch.inference_mode(False), torch.no_grad(), channel:
                self._talk(lane, channel)
            well = not channel.broken
        except BaseException as error:
            logger.info("rank %d: a further connection was given up: %s", peer, error)
        finally:
            if not well:
                lane.cut()
            self._ended(lane)
            if well:
                self._pool.keep(peer, lane, is_source=main.is_source)
            else:
                lane.close()
            with self._changed:
                self._talking.discard(lane.number)
                self._changed.notify_all()

    def _not_formed(self, error: TransfuseError, seconds: float) -> None:
        """Say that there are no lanes, once for each peer of the transport."""
        first = self._pool.give_up(self._main.peer)
        # If the transfer was over before the lane was formed, the other end may just have left.
        left = self._over and seconds < Patience(self._main.timeout).connection
        level = logging.WARNING if first and not left else logging.INFO
        text = "further connections to rank %d could not be made, going on without them: %s"
        logger.log(level, text, self._main.peer, error)

    @abstractmethod
    def _talk(self, lane: Stream, channel: Channel) -> None:
        """Run the conversation of one lane until its verdict."""

    def _ended(self, lane: Stream) -> None:
        """Called when a lane has ended, well or not."""
