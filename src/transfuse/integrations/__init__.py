"""Callbacks and plug-ins for frameworks: one file each, written with nothing but what ``transfuse`` exports."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import metadata

__all__ = ["check_options", "check_series", "missing"]


def missing(extra: str, error: ImportError) -> ImportError:
    """The error for an integration whose library is not installed: it names the extra to install."""
    return ImportError(f"transfuse.integrations.{extra} needs {error.name}: pip install 'transfuse[{extra}]'")


def check_series(extra: str, series: str) -> None:
    """Refuse a library of another version than ``series``, before it fails somewhere in the middle of an import."""
    try:
        found = metadata.version(extra)
    except metadata.PackageNotFoundError:
        return  # The import says what is missing.
    if not found.startswith(f"{series}."):
        raise ImportError(
            f"transfuse.integrations.{extra} is written for {extra} {series}, and {extra} {found} is installed: "
            f"pip install 'transfuse[{extra}]' installs one that fits"
        )


def check_options(given: tuple[object, ...], options: Mapping[str, object]) -> None:
    """Refuse arguments of a KeepCallback that have no name, and options of ``keep()`` that the callback chooses."""
    if given:
        raise TypeError(f"KeepCallback() takes options by name, such as KeepCallback(every=10), got {given[0]!r}")
    for name in ("state", "load", "rank_state", "load_rank_state"):
        if name in options:
            raise TypeError(f"KeepCallback() chooses {name} itself")
