"""One result of looking at this machine."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

__all__ = ["Finding", "Status"]

#: "note" is neither good nor bad.
Status = Literal["ok", "note", "warn", "fail"]


@dataclass(frozen=True)
class Finding:
    """One finding. ``remedy`` says what the user can do about it."""

    status: Status
    about: str
    text: str
    remedy: str = ""
