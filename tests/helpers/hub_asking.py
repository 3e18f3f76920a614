"""A Hub under test: a state that says its own step, a job that serves its shards, requests by hand, and pages read."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from html.parser import HTMLParser
from pathlib import Path
from typing import Any, NamedTuple

import torch

import transfuse
from transfuse._hub.commits import Commit
from transfuse.testing.ranks import run_program
from transfuse.testing.ranks.programs import Ended

__all__ = [
    "Page",
    "Reply",
    "Steps",
    "ask",
    "connect",
    "environment",
    "kept",
    "main_commit",
    "sharded_job",
    "step_in",
    "visit",
    "wait_until",
]

HELPERS = Path(__file__).parent


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


def kept(hub: transfuse.Hub) -> list[Commit]:
    """The copies of a model that a Hub has."""
    assert hub._commits is not None
    return hub._commits._kept


def main_commit(endpoint: str | http.client.HTTPConnection) -> str:
    return str(ask(endpoint, "GET", "/api/models/live/model").json["sha"])


def environment(hub: transfuse.Hub, home: Path, **more: str) -> dict[str, str]:
    """For a process of its own: the variables are read when huggingface_hub is imported."""
    own = {"HF_ENDPOINT": hub.endpoint, "HF_HOME": str(home), "HF_HUB_DISABLE_PROGRESS_BARS": "1"}
    ours = {name: value for name, value in os.environ.items() if not name.startswith(("HF_", "PYTHONPATH"))}
    return ours | own | more


@contextlib.contextmanager
def sharded_job(folder: Path, ranks: int, program: str = "sharded_job.py") -> Iterator[list[str]]:
    """The addresses of a job that trains on."""
    ended: list[list[Ended]] = []
    thread = threading.Thread(
        target=lambda: ended.append(run_program(HELPERS / program, ranks, arguments=[str(folder)], timeout=200))
    )
    thread.start()
    try:
        files = [folder / f"address{rank}" for rank in range(ranks)]
        wait_until(lambda: bool(ended) or all(file.exists() for file in files))
        assert not ended, ended
        yield [file.read_text() for file in files]
    finally:
        (folder / "stop").touch()
        thread.join(120)
    assert [one.code for one in ended[0]] == [0] * ranks, list(map(str, ended[0]))


def wait_until(done: Callable[[], bool]) -> None:
    until = time.monotonic() + 120
    while not done():
        assert time.monotonic() < until
        time.sleep(0.02)


#: What Chromium sends.
ACCEPT = "text/html,application/xhtml+xml,application/xml;q=0.9,image/avif,image/webp,*/*;q=0.8"


class Page(HTMLParser):
    """What a page says and links to, and the elements it is made of."""

    def __init__(self, html: bytes) -> None:
        super().__init__()
        self.text, self.links, self.tags = "", list[str](), set[str]()
        self.feed(html.decode())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.links += [value or "" for name, value in attrs if name in ("href", "src")]
        assert not [name for name, _ in attrs if name.startswith("on")]

    def handle_data(self, data: str) -> None:
        self.text += data


def visit(hub: transfuse.Hub, path: str = "/", **headers: str) -> Reply:
    return ask(hub.endpoint, "GET", path, {"Accept": ACCEPT, **headers})
