"""``transfuse bench``: cases, peers, the machine's limits, and what comes out of them."""

from __future__ import annotations

from transfuse.cli.bench.command import bench

__all__ = ["bench"]
