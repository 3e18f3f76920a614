"""A wire on which a fault strikes."""

from __future__ import annotations

import collections
import random
import threading
import time
from collections.abc import Callable
from typing import Any

import torch

from chaos.scenarios import HEADER, Kind, Scenario
from tampering import Passing
from transfuse._wire.messages import MAGIC

# ------------------------------------------------------------------------------------------------------------ wires


class Boom(Exception):
    """What a progress callback raises."""


class Wire(Passing):
    """A process group through which a fault strikes: it sees, delays and damages what goes through."""

    def __init__(self, pg: Any, plan: Scenario, rank: int, strike: Callable[[], None], payload: int) -> None:
        super().__init__(pg)
        self._plan, self._rank, self._strike = plan, rank, strike
        self._payload = max(payload, 1)
        self._lock = threading.Lock()
        self._rng = random.Random(plan.fault.seed)
        self._bodies: collections.Counter[int] = collections.Counter()
        self._slept = 0.0
        self.ops = self.nbytes = self.damaged = 0
        self.struck = False
        self.timer: threading.Timer | None = None
        self.mine = plan.fault.victim == rank

    def send(self, tensors: list[torch.Tensor], rank: int, tag: int) -> Any:
        (tensor,) = tensors
        fault = self._plan.fault
        if self.mine:
            kind = self._kind(tensor, rank)
            self._see(tensor.numel() if kind == "parcel" and self._plan.victim_is_source else 0)
            if fault.kind == "corrupt" and self.struck and self.damaged < fault.count:
                tensor = self._damage(tensor, kind)
        return super().send([tensor], rank, tag)

    def recv(self, tensors: list[torch.Tensor], rank: int, tag: int) -> Any:
        if self.mine:
            self._see(tensors[0].numel() if not self._plan.victim_is_source and tensors[0].numel() > 4096 else 0)
        return super().recv(tensors, rank, tag)

    def _see(self, nbytes: int) -> None:
        fault = self._plan.fault
        with self._lock:
            self.ops += 1
            self.nbytes += nbytes
            due = (fault.when == "ops" and self.ops >= fault.at) or (
                fault.when == "bytes" and self.nbytes >= fault.at * self._payload and self.nbytes > 0
            )
            starts = self.ops == 1 and fault.when == "ms"
            strikes = due and not self.struck
            self.struck |= due
            pause = 0.0
            if fault.kind == "delay" and due and self._slept < 0.5 and self._rng.random() < 0.2:
                pause = self._rng.uniform(0.001, 0.05)
                self._slept += pause
        if starts:
            self.timer = threading.Timer(fault.at / 1000, self._strike)
            self.timer.daemon = True
            self.timer.start()
        if strikes:
            self._strike()
        if pause:
            time.sleep(pause)

    def _kind(self, tensor: torch.Tensor, rank: int) -> Kind:
        head = bytes(tensor[: HEADER.size].numpy()) if tensor.numel() >= HEADER.size else b""
        with self._lock:
            if head.startswith(MAGIC) and tensor.numel() > HEADER.size:
                return "digests"
            if head.startswith(MAGIC):
                self._bodies[rank] += HEADER.unpack(head)[5]
                return "header"
            if tensor.numel() == 1:
                return "mark"
            if self._bodies[rank] > 0:
                self._bodies[rank] -= tensor.numel()
                return "body"
            return "parcel"

    def _damage(self, tensor: torch.Tensor, kind: Kind) -> torch.Tensor:
        """Flip bits, if this is what is to be damaged: anywhere in a header, or in the length that it announces."""
        what = self._plan.fault.what
        low, high = 0, tensor.numel()
        if what == "length" and kind == "header":
            low, high = 24, 32
        elif what == "digests" and kind == "digests":
            low = HEADER.size
        elif what != kind:
            return tensor
        with self._lock:
            if self.damaged >= self._plan.fault.count or high <= low:
                return tensor
            self.damaged += 1
            tensor = tensor.clone()
            places = self._rng.sample(range(8 * low, 8 * high), min(self._plan.fault.bits, 8 * (high - low)))
        for place in places:
            tensor[place // 8] ^= 1 << place % 8
        return tensor
