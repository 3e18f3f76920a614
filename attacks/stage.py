"""Where attacks are played: an honest process, a hostile one, perhaps further honest ones, over a gloo group.

An attack is data: what the honest end does, what the hostile one does, and what must come of it.
"""

from __future__ import annotations

import importlib
import itertools
import logging
import os
import pathlib
import re
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, ProcessGroupGloo

import transfuse
from attacks.peer import PARCEL, Peer, Silence, pattern
from attacks.stream_peer import StreamPeer
from transfuse.testing.ranks import ProcessPool

__all__ = ["ATTACKER", "VICTIM", "Attack", "Expected", "Got", "Result", "Stage", "main", "receive", "send"]

VICTIM, ATTACKER = 0, 1
#: Ranks of honest sources beside the attacker.
HELPERS = (2, 3)
CPU = torch.device("cpu")
MIB = 1 << 20
#: Resident memory that an attack may add to the honest process.
CAP = 128 * MIB
#: What honest ends have set: small parcels, so that small states have several, and less patience than usual.
ENVIRONMENT = {
    "TRANSFUSE_PARCEL_BYTES": str(PARCEL),
    "TRANSFUSE_BURST_BYTES": str(PARCEL),
    "TRANSFUSE_MAX_WORKING_RECORDS": "100",
}
#: Over what the two ends talk: the process group, or a connection of their own.
WIRES = ("group", "stream")
#: The timeout of an honest end that is not meant to reach it.
TIMEOUT = 5.0


@dataclass(frozen=True)
class Expected:
    """What must become of the honest end."""

    #: Which end it is: "receiver" or "source".
    at: str
    #: The class of what it raises, or one of several (A|B); in a map by rank, the attacker's. None: it ends well, and
    #: what it has is exact.
    error: str | None = None
    #: A regular expression for the message.
    words: str = ""
    #: The route that its report names.
    route: str | None = None
    #: How long it may take.
    seconds: float = 12.0
    #: How much memory it may take.
    cap: int = CAP


@dataclass(frozen=True)
class Attack:
    #: In the honest process, with its group.
    honest: Callable[[Any], Got]
    #: In the hostile process.
    hostile: Callable[[Peer], object]
    expected: Expected
    #: Honest sources beside the attacker.
    helpers: int = 0
    #: The wires on which it makes sense.
    wires: tuple[str, ...] = WIRES
    #: What must become of the honest end on a stream, if that is something else.
    on_stream: Expected | None = None

    def expects(self, wire: str) -> Expected:
        return self.on_stream if wire == "stream" and self.on_stream is not None else self.expected


@dataclass(frozen=True)
class Got:
    """How an honest call has ended well."""

    exact: bool
    route: str


@dataclass(frozen=True)
class Result:
    """What became of the honest end."""

    error: str | None
    text: str
    exact: bool
    route: str
    seconds: float
    grown: int

    def faults(self, expected: Expected) -> list[str]:
        """In which ways it is not as expected."""
        found = []
        if self.error not in (expected.error or "").split("|") and (self.error or expected.error):
            found.append(f"ended with {self.error}, not with {expected.error}: {self.text}")
        elif not re.search(expected.words, self.text, re.DOTALL):
            found.append(f"does not say {expected.words!r}: {self.text}")
        if self.error is None and not self.exact:
            found.append("what has arrived is not what was sent")
        if expected.route is not None and self.route != expected.route:
            found.append(f"came by {self.route!r}, not by {expected.route!r}")
        if self.seconds > expected.seconds:
            found.append(f"took {self.seconds:.1f} s, more than {expected.seconds}")
        if self.grown > expected.cap:
            found.append(f"took {self.grown >> 20} MiB, more than {expected.cap >> 20}")
        return found


# ----------------------------------------------------------------------------------------------------- honest ends


def transport(pg: Any, target: Any = None, *, timeout: float = TIMEOUT, **options: Any) -> transfuse.PGTransport:
    callback = None if target is None else lambda: target
    options = {"same_host": False} | options
    return transfuse.PGTransport(pg, timedelta(seconds=timeout), CPU, callback, **options)


def receive(
    *,
    nbytes: int = 2 * PARCEL,
    in_place: bool = False,
    sources: Any = ATTACKER,
    step: int | None = None,
    exact: Callable[[Any], bool] | None = None,
    **options: Any,
) -> Callable[[Any], Got]:
    """A receive of ``{"w": nbytes}``."""

    def run(pg: Any) -> Got:
        w = torch.full((nbytes,), 9, dtype=torch.uint8) if in_place else None
        end = transport(pg, None if w is None else {"w": w}, **options)
        try:
            state = end.recv_checkpoint(sources, step=step)
        except transfuse.TransfuseError as error:
            if w is not None and not error.torn:
                assert bool((w == 9).all()), "a target was written, and the error does not say so"
            raise
        route = "" if end.report is None else end.report.route
        if exact is not None:
            return Got(exact(state), route)
        arrived = state["w"].numpy().tobytes() == pattern(nbytes)
        return Got(arrived and (w is None or state["w"].data_ptr() == w.data_ptr()), route)

    return run


def send(*, nbytes: int = 2 * PARCEL, to: Any = (ATTACKER,), step: int | None = None, **options: Any) -> Any:
    """A send of ``{"w": nbytes}``. Whatever the peer does, the source's bytes stay what they are."""

    def run(pg: Any) -> Got:
        w = torch.frombuffer(bytearray(pattern(nbytes)), dtype=torch.uint8)
        end = transport(pg, **options)
        try:
            end.send_checkpoint(list(to), {"w": w}, step=step)
        finally:
            assert w.numpy().tobytes() == pattern(nbytes), "the source's tensors were written"
        return Got(True, "" if end.report is None else end.report.route)

    return run


def help_out(pg: Any) -> None:
    """An honest source beside the attacker. What becomes of it is not looked at."""
    w = torch.frombuffer(bytearray(pattern(2 * PARCEL)), dtype=torch.uint8)
    try:
        transport(pg, timeout=2 * TIMEOUT).send_checkpoint([VICTIM], {"w": w})
    except transfuse.TransfuseError as error:
        logging.getLogger("attacks").info("helper: %s", error)


# -------------------------------------------------------------------------------------------------------- the stage


def play(rank: int, module: str, name: str, wire: str, number: int) -> Result | None:
    """In a worker: this rank's part of an attack."""
    attack: Attack = importlib.import_module(module).ATTACKS[name]
    os.environ.update(ENVIRONMENT | {"TRANSFUSE_STREAMS": str(int(wire == "stream"))})
    store = PrefixStore(f"attack{number}", dist.distributed_c10d._get_default_store())
    options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._timeout = timedelta(seconds=60)
    options._devices = [ProcessGroupGloo.create_device(hostname="127.0.0.1")]
    pg = ProcessGroupGloo(store, rank, 2 + attack.helpers, options)
    if rank == VICTIM:
        try:
            return _suffer(attack, pg)
        finally:
            store.set("over", "1")
    if rank == ATTACKER:
        peer = (StreamPeer if wire == "stream" else Peer)(pg, rank, VICTIM)
        try:
            attack.hostile(peer)
        except Silence as silence:
            logging.getLogger("attacks").info("attacker: %s", silence)
    else:
        help_out(pg)
    # What was posted stays posted until the honest end is done.
    store.wait(["over"], timedelta(seconds=60))
    return None


def _suffer(attack: Attack, pg: Any) -> Result:
    logging.getLogger("transfuse").setLevel(logging.ERROR)
    before, began = _reset_peak(), time.monotonic()
    error, got = None, Got(False, "")
    try:
        got = attack.honest(pg)
    except transfuse.TransfuseError as caught:
        error = getattr(caught, "causes", {}).get(ATTACKER, caught)
    seconds, grown = time.monotonic() - began, _peak() - before
    return Result(type(error).__name__ if error else None, str(error or ""), got.exact, got.route, seconds, grown)


def _status(field: str) -> int:
    text = pathlib.Path("/proc/self/status").read_text()
    return int(re.search(rf"{field}:\s+(\d+)", text)[1]) << 10  # type: ignore[index]


def _reset_peak() -> int:
    """Let the peak of resident memory begin anew; how much is resident now."""
    try:
        pathlib.Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return _peak()
    return _status("VmRSS")


def _peak() -> int:
    return _status("VmHWM")


def left(rank: int, seconds: float) -> list[str]:
    """In a worker: threads of the library that have not ended after ``seconds``."""
    until = time.monotonic() + seconds
    while True:
        # The port of the process stays.
        names = [thread.name for thread in threading.enumerate() if thread.name.startswith("transfuse")]
        names = [name for name in names if name != "transfuse-streams"]
        if not names or time.monotonic() > until:
            return names
        time.sleep(0.05)


class Stage:
    """Processes for many attacks, one after another."""

    def __init__(self) -> None:
        # With a number of its own for each attack; a group that failed serves no other.
        self._numbers = itertools.count(os.getpid() * 1000)
        self._pool = ProcessPool(2 + len(HELPERS), method="forkserver")

    def __enter__(self) -> Stage:
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.close()

    def left(self, seconds: float) -> list[str]:
        """What the attacks so far have left in the honest process, that does not end by itself within some seconds."""
        names: list[str] = self._pool.run(left, seconds, ranks=[VICTIM], deadline=seconds + 20)[0].get()
        return names

    def play(self, module: str, name: str, wire: str) -> Result:
        """Play one attack on one wire. It raises if the honest process dies or does not come back."""
        attack: Attack = importlib.import_module(module).ATTACKS[name]
        ranks = range(2 + attack.helpers)
        deadline = attack.expects(wire).seconds + 20
        outcomes = self._pool.run(play, module, name, wire, next(self._numbers), ranks=ranks, deadline=deadline)
        result: Result = outcomes[VICTIM].get()
        for outcome in outcomes[1:]:
            outcome.get()
        return result


def main(module: str, names: list[str] | None = None) -> int:
    """Play the attacks of a module, and print what happened against what was expected. 1 if anything did not."""
    attacks: dict[str, Attack] = importlib.import_module(module).ATTACKS
    failed = 0
    played = [(name, wire) for name in names or attacks for wire in attacks[name].wires]
    with Stage() as stage:
        for name, wire in played:
            expected = attacks[name].expects(wire)
            try:
                result = stage.play(module, name, wire)
                faults = result.faults(expected)
                text = result.text.split("\n")[0][:150]
                what = f"{result.error or 'ended well'} {text} ({result.seconds:.2f} s, {result.grown >> 20} MiB)"
            except BaseException as error:
                if not isinstance(error, Exception):
                    raise
                what, faults = repr(error), [str(error)]
            failed += bool(faults)
            print(f"{'FAIL' if faults else 'ok  '} {name} ({wire})")
            print(f"       expected: {expected.error or 'ends well'} at the {expected.at}, /{expected.words}/")
            print(f"       happened: {what}")
            for fault in faults:
                print(f"       {fault}")
    print(f"{module}: {len(played) - failed} as expected, {failed} not")
    return 1 if failed else 0
