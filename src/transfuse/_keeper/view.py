"""What the keeper of this process says about itself, for a page that looks at the process from outside."""

from __future__ import annotations

import json
import pathlib
import weakref
from typing import Any

from transfuse._errors import TransfuseError, as_utf8
from transfuse._keeper import frames
from transfuse._keeper.attach import SOCKET_NAME
from transfuse._keeper.frames import KeeperLink

#: The directory of the keeper in which each of these keeps states.
_directories: weakref.WeakKeyDictionary[object, pathlib.Path] = weakref.WeakKeyDictionary()


def watch(keeping: object, directory: pathlib.Path) -> None:
    """This keeps states in the keeper of this directory, until `forget`."""
    _directories[keeping] = directory


def forget(keeping: object) -> None:
    _directories.pop(keeping, None)


def keepers_seen(seconds: float) -> list[dict[str, Any]]:
    """The status of each keeper that this process keeps states in. Each has ``seconds`` to answer.

    A connection of its own asks: that of the process may be waiting for an answer just now.
    """
    return [_look(directory, seconds) for directory in sorted(set(_directories.values()))]


def _look(directory: pathlib.Path, seconds: float) -> dict[str, Any]:
    try:
        link = KeeperLink.to(str(directory / SOCKET_NAME), seconds)
        try:
            found: dict[str, Any] = json.loads(link.ask(frames.Status(), frames.StatusReply, seconds).text)
            return found
        finally:
            link.close()
    except TransfuseError as error:
        return {"directory": str(directory), "error": as_utf8(str(error))}
