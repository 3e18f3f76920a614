"""Streams: on an accelerator, every conversation works on a stream of its own.

The work that a thread queues on an accelerator runs later, in the order of the thread's current stream. If all
conversations shared the caller's stream, each would wait for the slowest. So a conversation's thread enters streams of
its own, one for each device involved. They begin after the work that the caller had queued, and when the call ends the
caller's streams wait for them.

What a conversation reports as done is complete: :func:`complete` waits for it, by asking, within a deadline. So another
thread may use the result on any stream. Devices that are not involved are not asked for anything: asking alone would
initialise them, and a forked child could then no longer use them.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext

import torch
from torch.utils import _pytree as pytree

from transfuse._errors import TransfuseError
from transfuse._state.leaves.block import tensor_in
from transfuse._tuning import DEVICE_MAX_PAUSE_SECONDS, DEVICE_MIN_PAUSE_SECONDS


class _Entered(threading.local):
    """The streams that this thread has entered, and the call that they belong to."""

    own: Sequence[torch.Stream] = ()
    call: Streams | None = None
    #: Ends with the conversation or the helper's work: it leaves the streams again.
    until: ExitStack | None = None


_entered = _Entered()


class _Spare:
    """Streams that no conversation uses now. An allocator keeps memory for each stream, so the same ones are reused."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._free: dict[torch.device, list[torch.Stream]] = {}

    def take(self, device: torch.device) -> torch.Stream:
        with self._lock:
            free = self._free.setdefault(device, [])
            # Not one that somebody's work still blocks.
            idle = next((stream for stream in reversed(free) if stream.query()), None)
            if idle is None:
                return torch.Stream(device=device)
            free.remove(idle)
            return idle

    def give_back(self, streams: Iterable[torch.Stream]) -> None:
        with self._lock:
            for stream in streams:
                self._free.setdefault(stream.device, []).append(stream)


_spare = _Spare()


class Streams:
    """The streams of one call. Create it in the calling thread, with the devices that the call involves."""

    def __init__(self, devices: Iterable[torch.device] = ()) -> None:
        involved = sorted({with_index(device) for device in devices if device.type != "cpu"}, key=str)
        #: The caller's streams, and the moment in each after which the conversations work.
        self.callers = [torch.accelerator.current_stream(device) for device in involved]
        self._begun = [stream.record_event() for stream in self.callers]
        self._lock = threading.Lock()
        #: The streams of conversations that are running, and of those that have ended. A conversation that has not
        #: caught up has fewer streams than there are callers.
        self._active: list[list[torch.Stream]] = []
        self._ended: list[list[torch.Stream]] = []

    @contextmanager
    def conversation(self) -> Iterator[None]:
        """Run a conversation's thread on streams of its own, after the work that the caller had queued."""
        own: list[torch.Stream] = []
        with self._lock:
            self._active.append(own)
        self._take(own)
        try:
            with enter(own, self):
                yield
        finally:
            with self._lock:
                self._active = [other for other in self._active if other is not own]
                self._ended.append(own)
            _spare.give_back(own)

    def _take(self, own: list[torch.Stream]) -> Sequence[torch.Stream]:
        """Give a conversation a stream for each of the caller's for which it has none. Return the new ones."""
        with self._lock:
            new = [_spare.take(stream.device) for stream in self.callers[len(own) :]]
            own += new
            self._follow(own)
        return new

    def involve(self, callers: Iterable[torch.Stream]) -> None:
        """More streams of the caller's: what the call writes to was not known at the start. See :func:`catch_up`."""
        with self._lock:
            self.callers += callers
        self.follow()

    def follow(self) -> None:
        """Let all conversations wait for what the caller's streams have queued by now."""
        with self._lock:
            self._begun = [stream.record_event() for stream in self.callers]
            for own in self._active:
                self._follow(own)

    def _follow(self, own: Sequence[torch.Stream]) -> None:
        for stream, event in zip(own, self._begun, strict=False):
            stream.wait_event(event)

    def join(self) -> None:
        """Let the caller's streams wait for what the conversations have queued. Call this in the calling thread."""
        with self._lock:
            used = [*self._active, *self._ended]
        for own in used:
            for mine, stream in zip(self.callers, own, strict=False):
                mine.wait_stream(stream)


class OwnStreams:
    """A stream on each device for one purpose and for long: what is queued there later runs later."""

    def __init__(self) -> None:
        self._own: dict[torch.device, torch.Stream] = {}

    def follow(self, devices: Iterable[torch.device]) -> None:
        """Go on after what the caller has queued on its current streams by now."""
        for device in devices:
            self._on(device).wait_event(torch.accelerator.current_stream(device).record_event())

    def entered(self, devices: Iterable[torch.device]) -> AbstractContextManager[None]:
        """Queue on these streams in a block."""
        return enter([self._on(device) for device in devices], None)

    def events(self, devices: Iterable[torch.device]) -> dict[torch.device, torch.Event]:
        return {device: self._on(device).record_event() for device in devices}

    def _on(self, device: torch.device) -> torch.Stream:
        if device not in self._own:
            self._own.setdefault(device, torch.Stream(device=device))
        return self._own[device]


class ChangeMarks:
    """Where blocks that change a state have ended on accelerators: readers of the state come after these moments.

    Two blocks may end on two streams that know nothing of each other, so there is a mark for each stream.
    """

    def __init__(self) -> None:
        #: A stream instead of an event: it was not known that the state lies there, and an event would initialise the
        #: device. Then the reader comes after all that is queued there by the time it comes.
        self._marks: dict[tuple[torch.device, int], torch.Event | torch.Stream] = {}

    def set(self, devices: Iterable[torch.device]) -> None:
        """A block ends, in this thread. ``devices``: where the state is known to lie."""
        known = set(devices)
        for index in range(torch.accelerator.device_count() if is_initialized() else 0):
            stream = torch.accelerator.current_stream(index)
            where = stream.device, stream.stream_id
            if stream.device not in known:
                self._marks[where] = stream
            elif not stream.is_capturing():  # What a capture has recorded does not run, and nobody may wait for it.
                self._marks[where] = stream.record_event()

    def hold_back(self) -> None:
        """Let the current streams of this thread wait for all that the blocks had queued."""
        for (device, stream_id), mark in list(self._marks.items()):
            mine = torch.accelerator.current_stream(device)
            if mine.stream_id == stream_id:
                continue
            if not isinstance(mark, torch.Stream):
                mine.wait_event(mark)
            elif not mark.is_capturing():
                mine.wait_stream(mark)

    def have_passed(self, seconds: float) -> bool:
        """Wait for the devices to do what the blocks had queued. False: ``seconds`` have passed, and they have not."""
        until = time.monotonic() + seconds
        return all(poll(mark.query, until) for mark in list(self._marks.values()) if isinstance(mark, torch.Event))


def inherit() -> Callable[[], AbstractContextManager[None]]:
    """A context for helper threads of this thread: they work on the streams that this thread has entered."""
    own, call = _entered.own, _entered.call
    return (lambda: enter(own, call)) if own else nullcontext


@contextmanager
def enter(own: Sequence[torch.Stream], call: Streams | None) -> Iterator[None]:
    before = _entered.own, _entered.call, _entered.until
    with ExitStack() as entered:
        for stream in own:
            entered.enter_context(again(stream))
        _entered.own, _entered.call, _entered.until = own, call, entered
        try:
            yield
        finally:
            _entered.own, _entered.call, _entered.until = before


def involve(callers: Iterable[torch.Stream]) -> None:
    """Let this thread's call follow and join these streams of the caller's, too. Call it :func:`for_the_caller`."""
    callers, call, until = list(callers), _entered.call, _entered.until
    if call is not None and until is not None:
        call.involve(callers)
        for stream in callers:
            until.enter_context(again(stream))


def catch_up() -> None:
    """In a conversation's thread: enter streams for those that its call has involved since the conversation began."""
    call, own, until = _entered.call, _entered.own, _entered.until
    if call is not None and until is not None and isinstance(own, list):
        for stream in call._take(own):
            until.enter_context(again(stream))


def again(stream: torch.Stream) -> torch.Stream:
    """Another object for the same stream: an object remembers only one entry, and threads would share that memory."""
    return torch.Stream(stream_id=stream.stream_id, device_index=stream.device_index, device_type=stream.device_type)


def entered() -> set[torch.device]:
    """The devices on which this thread has entered streams."""
    return {stream.device for stream in _entered.own}


def are_entered(devices: Iterable[torch.device]) -> bool:
    """Whether this thread has entered streams on all these devices."""
    return set(devices) <= entered()


def are_involved() -> bool:
    """Whether this thread has entered streams: its call involves an accelerator."""
    return bool(_entered.own)


@contextmanager
def for_the_caller() -> Iterator[None]:
    """Allocate memory that the caller will own: an allocator reuses memory in the order of its own stream.

    So what used that memory before may still be queued on the caller's stream: the conversations wait for it.
    """
    call = _entered.call
    with ExitStack() as entered:
        for stream in () if call is None else list(call.callers):
            entered.enter_context(again(stream))
        before, _entered.until = _entered.until, entered
        try:
            yield
        finally:
            _entered.until = before
    if call is not None:
        call.follow()


def complete(seconds: float) -> None:
    """Wait until all that this thread has queued on its streams is done. Raise after ``seconds``."""
    reach([stream.record_event() for stream in _entered.own], seconds)


def reach(events: Iterable[torch.Event], seconds: float) -> None:
    """Wait until streams have passed these events, at most ``seconds`` for each. Raise after that."""
    for event in events:
        if not poll(event.query, time.monotonic() + seconds):
            raise TransfuseError(
                f"{event.device}: the work that was queued before and during the transfer has not ended after "
                f"{seconds:g} s; synchronize the device before the transfer, or raise the timeout"
            )


def poll(done: Callable[[], bool | None], until: float) -> bool:
    """Ask until the answer is yes, or until this time of the monotonic clock. Return the answer.

    An answer of None says that nobody may ask now. Such time does not count.
    """
    pause = DEVICE_MIN_PAUSE_SECONDS
    while not (answer := done()):
        began = time.monotonic()
        if began > until:
            return False
        time.sleep(pause)
        pause = min(2 * pause, DEVICE_MAX_PAUSE_SECONDS)
        if answer is None:
            until += time.monotonic() - began
    return True


def with_index(device: torch.device) -> torch.device:
    """The same device with its index: without one, a device means the one that is current now."""
    if device.type == "cpu" or device.index is not None:
        return device
    accelerator = torch.accelerator.current_accelerator()
    if accelerator is None or accelerator.type != device.type:
        return device
    return torch.device(device.type, torch.accelerator.current_device_index())


def is_initialized() -> bool:
    """Whether this process has used its accelerator. If not, no tensor can be there. Asking does not initialise it."""
    accelerator = torch.accelerator.current_accelerator()
    if accelerator is None:
        return False
    asked = getattr(torch.get_device_module(accelerator), "is_initialized", None)
    return bool(asked()) if callable(asked) else True


def current() -> list[torch.device]:
    """The accelerator that is current now, if this process has used one; otherwise none."""
    accelerator = torch.accelerator.current_accelerator() if is_initialized() else None
    return [] if accelerator is None else [with_index(torch.device(accelerator.type))]


def devices_of(tree: object) -> set[torch.device]:
    """The accelerators on which tensors of a tree lie."""
    if not is_initialized():
        return set()
    tensors = map(tensor_in, pytree.tree_iter(tree))
    found = {tensor.device for tensor in tensors if isinstance(tensor, torch.Tensor)}
    return {device for device in found if device.type not in ("cpu", "meta")}
