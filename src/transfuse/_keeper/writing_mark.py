"""Who writes to a directory: two jobs that share one by mistake would remove each other's steps.

A writer says in ``writer.json`` that it lives, by a number that it counts on. A new one looks there first.
A writer whose process has ended on this host is followed at once. Any other one is watched: if its number stands still
for a few beats it is gone.
"""

from __future__ import annotations

import logging
import os
import secrets
import socket
import threading
import time
from contextlib import suppress

import msgspec

from transfuse._errors import TransfuseError
from transfuse._keeper.runs import Process, boot_id
from transfuse._keeper.storage import StepWriter, Storage, StorageTrouble
from transfuse._tuning import WRITER_AGAIN_SECONDS, WRITER_BEAT_SECONDS, WRITER_SETTLE_SECONDS

logger = logging.getLogger("transfuse.keeper")

#: How many beats a writer is watched.
BEATS = 3


def _here() -> str:
    """This host, and the namespace in which pids mean something."""
    return f"{socket.gethostname()} {boot_id()} {os.stat('/proc/self/ns/pid').st_ino}"


class WritingMark:
    """This keeper's word in a directory that it writes there."""

    def __init__(self, storage: Storage, name: str = "") -> None:
        """``name``: random, and the same for all that write for this job."""
        self._storage = storage
        self.name = name or secrets.token_hex(16)
        self._stopped = threading.Event()
        self._beating: threading.Thread | None = None
        me = Process.of(os.getpid())
        assert me is not None
        self._writer = StepWriter(self.name, _here(), me.pid, str(me.started), 0)
        #: Why this one must not write, and until when that is believed.
        self._refusal, self._until = "", 0.0

    def claim(self) -> None:
        """See to it that this one may write. Raises what to do if somebody else does: some beats later, perhaps."""
        if time.monotonic() < self._until:
            raise StorageTrouble(self._refusal)
        found = self._storage.writer()
        if found is not None and found.id != self.name and not _has_ended(found):
            self._watch(found)
        if found is None or found.id != self.name:
            self._storage.take(self._writer)
            self._stopped.wait(WRITER_SETTLE_SECONDS)
            self.check()
        if self._beating is None or not self._beating.is_alive():
            self._beating = threading.Thread(target=self._beat, name="transfuse-storage-beat", daemon=True)
            self._beating.start()

    def check(self) -> None:
        """Raise if somebody else has begun to write meanwhile."""
        found = self._storage.writer()
        if found is None:
            self._storage.take(self._writer)
        elif found.id != self.name:
            raise self._refuse(found)

    def _watch(self, found: StepWriter) -> None:
        for _ in range(BEATS):
            if self._stopped.wait(WRITER_BEAT_SECONDS):
                raise StorageTrouble("the keeper ends")
            now = self._storage.writer()
            if now is None or now.id == self.name or _has_ended(now):
                return
            if (now.id, now.beat) != (found.id, found.beat):
                raise self._refuse(now)
        logger.info("process %d on host %s wrote to %s, and has ended", found.pid, _host(found), self._storage.where)

    def _refuse(self, found: StepWriter) -> StorageTrouble:
        self._refusal = (
            f"another job writes to the directory {self._storage.where}: process {found.pid} on host {_host(found)}. "
            "Give each run a directory= of its own, or end that job"
        )
        self._until = time.monotonic() + WRITER_AGAIN_SECONDS
        return StorageTrouble(self._refusal)

    def _beat(self) -> None:
        while not self._stopped.wait(WRITER_BEAT_SECONDS):
            with suppress(TransfuseError, OSError):
                found = self._storage.writer()
                if found is not None and found.id != self.name:
                    return
                self._writer = msgspec.structs.replace(self._writer, beat=self._writer.beat + 1)
                self._storage.take(self._writer)
        with suppress(TransfuseError, OSError):
            found = self._storage.writer()
            if found is not None and found.id == self.name:
                # Nobody has to wait for beats.
                self._storage.take(msgspec.structs.replace(self._writer, pid=0, beat=self._writer.beat + 1))

    def stop(self) -> None:
        """This one writes no more."""
        self._stopped.set()

    def join(self, until: float) -> None:
        if self._beating is not None:
            self._beating.join(max(0.0, until - time.monotonic()))


def _has_ended(writer: StepWriter) -> bool:
    """Whether a writer is known to have ended: it has said so, or its process is gone from this host."""
    if not writer.pid:
        return True
    return writer.host == _here() and not Process(writer.pid, int(writer.started)).alive()


def _host(writer: StepWriter) -> str:
    return writer.host.partition(" ")[0]
