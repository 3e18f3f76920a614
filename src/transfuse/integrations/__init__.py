"""Callbacks and plug-ins for frameworks: one file each, written with nothing but what ``transfuse`` exports."""

from __future__ import annotations

__all__ = ["missing"]


def missing(extra: str, error: ImportError) -> ImportError:
    """The error for an integration whose library is not installed: it names the extra to install."""
    return ImportError(f"transfuse.integrations.{extra} needs {error.name}: pip install 'transfuse[{extra}]'")
