"""An extension of griffe: docstrings and comments of this package, as the reference shows them.

Roles (:class:`X`) become code, a double colon before an indented block becomes one, so do doctests, and a comment of
`#:` lines above an attribute becomes its docstring.
"""

from __future__ import annotations

import pathlib
import re
from typing import Any

import griffe

__all__ = ["Docstrings"]

_DOCTEST = re.compile(r"^>>> .*(?:\n.+)*", re.M)
_ROLE = re.compile(r":(?:class|meth|func|attr|mod|data|exc):`~?([^`]+)`")


def _plain(text: str) -> str:
    # Left as they are, doctests would be quotations, and their asterisks emphasis.
    text = _DOCTEST.sub(lambda found: f"```pycon\n{found[0]}\n```", text)
    return re.sub(r"::$", ":", _ROLE.sub(r"`\1`", text), flags=re.M)


class Docstrings(griffe.Extension):
    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = _plain(obj.docstring.value)

    def on_attribute(self, *, attr: griffe.Attribute, **_: Any) -> None:
        if attr.docstring is not None or attr.lineno is None or not isinstance(attr.filepath, pathlib.Path):
            return
        lines = attr.filepath.read_text().splitlines()[: attr.lineno - 1]
        comment: list[str] = []
        while lines and (found := re.fullmatch(r"\s*#: ?(.*)", lines.pop())):
            comment.insert(0, found[1])
        if comment:
            attr.docstring = griffe.Docstring(_plain("\n".join(comment)), parent=attr)
