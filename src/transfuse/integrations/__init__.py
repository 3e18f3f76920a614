"""Callbacks and plug-ins for frameworks: one file each, written with nothing but what ``transfuse`` exports."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from importlib import metadata

import transfuse
from transfuse._job.face import RENAMED, refuse_before
from transfuse._options import FetchKeywords, check_names

__all__ = ["check_options", "check_series", "missing"]


def missing(extra: str, error: ImportError) -> ImportError:
    """The error for an integration whose library is not installed: it names the extra to install."""
    return ImportError(f"transfuse.integrations.{extra} needs {error.name}: pip install 'transfuse[{extra}]'")


def check_series(extra: str, *series: str) -> None:
    """Refuse a library of another version than these, before it fails somewhere in the middle of an import."""
    try:
        found = metadata.version(extra)
    except metadata.PackageNotFoundError:
        return  # The import says what is missing.
    if not found.startswith(tuple(f"{one}." for one in series)):
        raise ImportError(
            f"transfuse.integrations.{extra} is written for {extra} {' and '.join(series)}, and {extra} {found} is "
            "installed: "
            f"pip install 'transfuse[{extra}]' installs one that fits"
        )


def check_options(given: tuple[object, ...], options: Mapping[str, object]) -> None:
    """Refuse arguments of a KeepCallback that have no name, or names that ``keep()`` does not take from it."""
    if given:
        raise TypeError(f"KeepCallback() takes options by name, such as KeepCallback(every=10), got {given[0]!r}")
    known = [one.name for one in inspect.signature(transfuse.keep).parameters.values() if one.kind is one.KEYWORD_ONLY]
    for name in options:
        now = name if name in known else RENAMED.get(name, name)
        if now in ("state", "load", "rank_state", "load_rank_state"):
            before = "" if now == name else f"has no {name}= any more: it "
            raise TypeError(f"KeepCallback() {before}chooses {now} itself")
    refuse_before("KeepCallback", options, known)
    check_names(transfuse.keep, [name for name in options if name not in known], FetchKeywords)
