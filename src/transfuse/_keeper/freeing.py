"""Give slots' memory back beside other work: to unmap tens of GiB takes seconds, and workers wait for answers."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from contextlib import suppress

from transfuse._keeper.slot_file import SlotFile


class Freeing:
    """Closes slots in a thread of its own. A thread that needs the memory calls `settle`, without the keeper's lock."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._files: list[SlotFile] = []
        self._is_running = False

    def add(self, files: Sequence[SlotFile]) -> None:
        """Close these soon. Nobody uses them any more."""
        with self._changed:
            self._files += files
            if self._files and not self._is_running:
                thread = threading.Thread(target=self._run, name="transfuse-freeing", daemon=True)
                with suppress(RuntimeError):  # No thread could be started. The next call tries again.
                    thread.start()
                    self._is_running = True

    def settle(self) -> None:
        """Wait until the memory of all that were added has been given back."""
        with self._changed:
            self._changed.wait_for(lambda: not self._is_running)

    def _run(self) -> None:
        while True:
            with self._changed:
                if not self._files:
                    self._is_running = False
                    self._changed.notify_all()
                    return
                file = self._files.pop()
            # Somebody in this process may still look at it; then the memory goes with the last who does.
            with suppress(BufferError, OSError):
                file.close()
            del file
