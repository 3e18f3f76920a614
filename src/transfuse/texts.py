"""Text that travels, or is written down."""

from __future__ import annotations

__all__ = ["as_utf8"]


def as_utf8(text: str) -> str:
    """Text as UTF-8 can hold it: an error may quote what it cannot, the name of a file or what a peer made up."""
    return text.encode("utf-8", "backslashreplace").decode()
