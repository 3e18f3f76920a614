"""A Hub under test: a state that says its own step, and requests by hand."""

from __future__ import annotations

import http.client
import json
import socket
from contextlib import closing
from typing import Any, NamedTuple

import torch

import transfuse

__all__ = ["Reply", "Steps", "ask", "connect", "main_commit", "step_in"]


class Steps:
    """A state whose every element is a known function of its step."""

    def __init__(self, tensors: int = 6, size: int = 1000) -> None:
        self.step = 0
        self.state = {f"layer.{i}.weight": torch.empty(size + i) for i in range(tensors)}
        self.hub: transfuse.Hub | None = None
        self._fill()

    def _fill(self) -> None:
        for i, tensor in enumerate(self.state.values()):
            tensor.fill_(self.step * 100 + i)

    def advance(self) -> None:
        """The next step, one tensor after the other: a reader in between sees two steps."""
        assert self.hub is not None
        with self.hub.mutating():
            self.step += 1
            self._fill()

    def open(self, **options: Any) -> transfuse.Hub:
        self.hub = transfuse.hub(self.state, step=lambda: self.step, **options)
        return self.hub


def step_in(tensors: dict[str, Any]) -> int:
    """The one step of which all these tensors are; an assertion fails if they are of several."""
    found = set()
    for name, tensor in tensors.items():
        number = int(name.split(".")[1])
        values = {float(value) for value in (tensor.min(), tensor.max())}
        assert len(values) == 1, f"{name} has elements of several steps: {values}"
        found.add((values.pop() - number) / 100)
    assert len(found) == 1, f"steps {sorted(found)} in one commit"
    return int(found.pop())


class Reply(NamedTuple):
    status: int
    headers: http.client.HTTPMessage
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)


def _place(endpoint: str) -> tuple[str, int]:
    host, port = endpoint.removeprefix("http://").rsplit(":", 1)
    return host, int(port)


def ask(
    endpoint: str | http.client.HTTPConnection,
    method: str,
    path: str,
    headers: dict[str, str] | None = None,
    body: bytes | None = None,
) -> Reply:
    """One request, on a connection of its own unless one is given."""
    if isinstance(endpoint, str):
        with closing(http.client.HTTPConnection(*_place(endpoint), timeout=60)) as connection:
            return ask(connection, method, path, headers, body)
    endpoint.request(method, path, body, headers or {})
    response = endpoint.getresponse()
    return Reply(response.status, response.headers, response.read())


def connect(endpoint: str) -> socket.socket:
    sock = socket.create_connection(_place(endpoint), timeout=60)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    return sock


def main_commit(endpoint: str | http.client.HTTPConnection) -> str:
    return str(ask(endpoint, "GET", "/api/models/live/model").json["sha"])
