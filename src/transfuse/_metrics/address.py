"""Where a keeper answers questions about its metrics: an address of ``TRANSFUSE_KEEPER_METRICS`` or ``--metrics``."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import NamedTuple

from transfuse._limits import ports_in

VARIABLE = "TRANSFUSE_KEEPER_METRICS"


class MetricsAddress(NamedTuple):
    """A host, empty for all addresses, with the first and the last port to try; or the path of a unix socket."""

    host: str = ""
    first: int = 0
    last: int = 0
    path: str = ""

    def __str__(self) -> str:
        if self.path:
            return self.path
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{host}:{self.first}" + ("" if self.first == self.last else f"-{self.last}")


def address_in(text: str, name: str) -> MetricsAddress:
    """The address that a text gives. ``name``: of what the text is the value, for errors."""
    path = text.removeprefix("unix:")
    if path.startswith("/"):
        return MetricsAddress(path=path)
    host, _, ports = text.rpartition(":")
    found = ports_in(ports)
    if found is None or (":" in host and (host[0] + host[-1] != "[]")):
        raise ValueError(
            f"{name} must be host:port, :port (all addresses of this machine), the first and the last port to try "
            f"(:9400-9499), or the absolute path of a unix socket, got {text!r}"
        )
    return MetricsAddress(host.strip("[]"), *found)


def address_in_environment(environ: Mapping[str, str] = os.environ) -> MetricsAddress | None:
    """Where a keeper of this environment answers; None: nowhere."""
    text = environ.get(VARIABLE)
    return address_in(text, VARIABLE) if text else None
