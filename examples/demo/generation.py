"""A worker's side of one generation of the group: calls that the worker can abandon when a member has died.

On gloo a collective whose peer has died may wait until its timeout: only the neighbours of the dead rank learn of it.
So each blocking call runs in a thread of its own. The parent sees processes end; when it says that this generation is
over, the worker abandons the call. An abandoned group is never used again and never destroyed: the process ends
without that.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from datetime import timedelta
from queue import SimpleQueue
from typing import Any, TypeVar

import torch
from examples.demo.words import Go, Over, Word
from torch._C._distributed_c10d import PrefixStore, ProcessGroupGloo, TCPStore

from transfuse.testing.ranks.worker import HOST

__all__ = ["Generation", "GenerationOver", "Parent"]

TIMEOUT = timedelta(seconds=30)

T = TypeVar("T")


class GenerationOver(Exception):
    """The group has lost a member, or is broken."""


class Parent:
    """The connection to the parent. A thread listens, so that the worker hears at once that a generation is over."""

    def __init__(self, say: Callable[[Word], None], hear: Callable[[], Go | Over]) -> None:
        #: Any thread may send: the library's warnings come from threads of its own.
        self.say, self._hear = say, hear
        self._orders: SimpleQueue[Go] = SimpleQueue()
        self.changed = threading.Condition()
        #: The last generation that is over.
        self.over = -1
        threading.Thread(target=self._listen, name="listen", daemon=True).start()

    def order(self) -> Go:
        """Return the next order. If its generation is over already, forming the group fails as usual."""
        return self._orders.get()

    def _listen(self) -> None:
        while True:
            try:
                order = self._hear()
            except (EOFError, OSError):
                return  # The parent has ended, and this process will end with it.
            if isinstance(order, Over):
                with self.changed:
                    self.over = order.generation
                    self.changed.notify_all()
            else:
                self._orders.put(order)


class Generation:
    """The group of one generation, of all ranks."""

    def __init__(self, number: int, rank: int, size: int, port: int, parent: Parent) -> None:
        self.number, self.rank, self.size = number, rank, size
        self._parent = parent
        self.group = self._call(lambda: _join(number, rank, size, port))

    def sum(self, *tensors: torch.Tensor) -> None:
        """Sum these tensors over all ranks. If this raises, the group still owns their memory."""
        self._call(lambda: [work.wait() for work in [self.group.allreduce([tensor]) for tensor in tensors]])

    def gather(self, number: int) -> list[int]:
        """Every rank's number, by rank."""
        numbers = torch.zeros(self.size, dtype=torch.int64)
        numbers[self.rank] = number
        self.sum(numbers)
        return numbers.tolist()

    def _call(self, function: Callable[[], T]) -> T:
        result: Future[T] = Future()

        def run() -> None:
            try:
                result.set_result(function())
            except BaseException as error:
                result.set_exception(error)
            with self._parent.changed:
                self._parent.changed.notify_all()

        threading.Thread(target=run, name=f"generation-{self.number}", daemon=True).start()
        with self._parent.changed:
            self._parent.changed.wait_for(lambda: result.done() or self._parent.over >= self.number)
        if not result.done():
            raise GenerationOver("the parent said so")
        if error := result.exception():
            raise GenerationOver(str(error)) from error
        return result.result()


def _join(number: int, rank: int, size: int, port: int) -> Any:
    # Any: torch's stubs do not know that a backend can send, receive and reduce.
    store = TCPStore(HOST, port, None, False, TIMEOUT)
    return ProcessGroupGloo(PrefixStore(f"generation-{number}", store), rank, size, TIMEOUT)
