"""Which wire tests run on: streams, unless ``TRANSFUSE_STREAMS`` is 0 (``make test-group``)."""

from __future__ import annotations

from transfuse.limits import allows_streams

__all__ = ["over_streams"]


def over_streams() -> bool:
    """Whether conversations that begin over a group go on over streams."""
    return allows_streams()
