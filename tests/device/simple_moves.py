"""Transfers between ranks with the make-believe accelerator, the short way."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any

import torch

import transfuse
from device import phantom

__all__ = ["MIB", "at_once", "bits", "causes_of", "receive", "send", "state", "zeros"]

MIB = 1 << 20


def state(device: str | torch.device = "phantom", *, seed: float = 1.0, count: int = 6) -> dict[str, torch.Tensor]:
    """Tensors of 1 MiB, all values of which are different; and one that is not one run of memory."""
    values = torch.arange(count * (MIB // 4), dtype=torch.float32).mul_(seed).add_(seed)
    tensors = {f"w{number}": part.to(device) for number, part in enumerate(values.chunk(count))}
    return tensors | {"turned": torch.arange(60_000.0).mul_(seed).view(200, 300).to(device).t()}


def zeros(like: Mapping[str, torch.Tensor], device: str | torch.device = "phantom") -> dict[str, torch.Tensor]:
    return {name: torch.zeros(tensor.shape, dtype=tensor.dtype, device=device) for name, tensor in like.items()}


def bits(tree: Mapping[str, torch.Tensor]) -> dict[str, bytes]:
    """What the tensors hold, in the order of the calling thread's current stream."""
    return {name: tensor.detach().cpu().contiguous().numpy().tobytes() for name, tensor in tree.items()}


def send(pg: Any, to: int | list[int], tensors: Any, seconds: float, device: str | None = None, **options: Any) -> None:
    """Send, on the current device of the accelerator unless another one is given."""
    transport = transfuse.PGTransport(pg, timedelta(seconds=seconds), device or _current(), **options)
    transport.send_checkpoint([to] if isinstance(to, int) else to, tensors)


def receive(
    pg: Any, source: int | list[int], seconds: float, target: Any = None, device: str | None = None, **options: Any
) -> Any:
    give = None if target is None else lambda: target
    transport = transfuse.PGTransport(pg, timedelta(seconds=seconds), device or _current(), give, **options)
    return transport.recv_checkpoint(source)


def _current() -> str:
    return f"phantom:{torch.accelerator.current_device_index()}"


def causes_of(error: BaseException | None) -> dict[int, BaseException]:
    """The peers that an error of a transfer names, and what it says of each."""
    if isinstance(error, (transfuse.SendFailed, transfuse.ReceiveFailed)):
        return dict(error.causes)
    assert isinstance(error, transfuse.PeerError), repr(error)
    return {error.rank: error}


def at_once(device: int | None, *jobs: Callable[[], Any], pause: float = 0.0, deadline: float = 30.0) -> list[Any]:
    """Run each job in a thread of its own on this device, one ``pause`` after the other; return or raise."""
    ends: list[Any] = [TimeoutError("a thread has not ended")] * len(jobs)

    def one(number: int) -> None:
        if device is not None:
            phantom.set_device(device)
        try:
            ends[number] = jobs[number]()
        except BaseException as error:
            ends[number] = error

    threads = [threading.Thread(target=one, args=(number,), daemon=True) for number in range(len(jobs))]
    for thread in threads:
        thread.start()
        thread.join(pause)
    for thread in threads:
        thread.join(deadline)
    for end in ends:
        if isinstance(end, BaseException):
            raise end
    return ends
