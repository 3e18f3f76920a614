"""A small file that readers see whole, or not at all."""

from __future__ import annotations

import os
import pathlib
from contextlib import suppress


def write_whole(path: pathlib.Path, text: str, mode: int = 0o600) -> None:
    """Write a file under another name, and give it its name when it is whole. One process at a time does that."""
    new = path.with_suffix(".new")
    fd = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, mode)
    try:
        with os.fdopen(fd, "w") as file:
            file.write(text)
        new.rename(path)
    except OSError:
        with suppress(OSError):
            new.unlink()
        raise
