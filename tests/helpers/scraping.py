"""Ask a keeper for its metrics, and read them with Prometheus' own parser."""

from __future__ import annotations

import socket
import urllib.error
import urllib.request
from contextlib import closing

from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from keeping import Home, until

__all__ = ["Scrape", "get", "metrics_of", "scrape"]


def get(address: str, path: str) -> tuple[int, str]:
    """The status and the body of an answer."""
    try:
        with urllib.request.urlopen(f"http://{address}{path}", timeout=30) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


class Scrape:
    """The samples of one answer."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.families = {family.name: family for family in text_string_to_metric_families(text)}
        self.samples: list[Sample] = [one for family in self.families.values() for one in family.samples]

    def __call__(self, name: str, **labels: str) -> float | None:
        """The sum of the samples with this name and these labels, among others; None: there is none."""
        found = [
            one.value
            for one in self.samples
            if one.name == f"transfuse_{name}" and labels.items() <= one.labels.items()
        ]
        return sum(found) if found else None

    @property
    def label_names(self) -> dict[str, set[str]]:
        return {one.name: set(one.labels) for one in self.samples}


def metrics_of(home: Home, run: str = "job") -> str:
    """Where the keeper of a run tells its metrics."""
    address: str = until(lambda: home.status(run)["metrics"])
    return address


def scrape(address: str) -> Scrape:
    status, text = get(address, "/metrics")
    assert status == 200, text
    return Scrape(text)


def free_port() -> int:
    with closing(socket.create_server(("127.0.0.1", 0))) as sock:
        return int(sock.getsockname()[1])
