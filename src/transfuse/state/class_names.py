"""Names of classes on the wire. A name from a peer only ever finds what this process has already imported.

Looking a name up runs no code of anyone's: no import, no module ``__getattr__``, no descriptor, no metaclass hook.
This module imports nothing of the package.
"""

from __future__ import annotations

import sys
from types import MappingProxyType, ModuleType
from typing import Any

__all__ = ["MAX_NAME", "find", "name_of"]

#: The longest name in characters, so that a peer's name stays cheap to check and fit to be shown.
MAX_NAME = 512

# The slots themselves. `vars(x)` would ask x first, and a lazily imported module answers by importing.
_module_dict: Any = vars(ModuleType)["__dict__"]
_class_dict: Any = vars(type)["__dict__"]


def name_of(cls: type) -> str:
    """``module:qualname`` of a class; ``ValueError`` if :func:`find` would not lead back to it."""
    if "<locals>" in cls.__qualname__:
        raise ValueError(f"class {cls.__qualname__} is local to a function; define it at the top of its module")
    name = f"{cls.__module__}:{cls.__qualname__}"
    try:
        found = find(name)
    except LookupError as e:
        raise ValueError(f"class {cls.__qualname__} cannot be found by its name: {e}") from None
    if found is not cls:
        raise ValueError(f"another class has taken the name {name}")
    return name


def find(name: str) -> type:
    """The class of this name among the imported modules, else ``LookupError``."""
    if type(name) is not str or len(name) > MAX_NAME:
        raise LookupError(f"a class name is a string of at most {MAX_NAME} characters")
    module_name, colon, qualname = name.partition(":")
    steps = qualname.split(".")
    if not colon or not all(part.isidentifier() for part in (*module_name.split("."), *steps)):
        raise LookupError(f"not of the form module:qualname: {name!a}")
    here: object = sys.modules.get(module_name)
    # `issubclass(type(x), …)` where `isinstance` would do: that one also believes what x says about its class.
    if not issubclass(type(here), ModuleType):
        raise LookupError(f"module {module_name!a} is not imported here")
    scope: dict[str, object] | MappingProxyType[str, object] = _module_dict.__get__(here)
    for step in steps:
        if step not in scope:
            raise LookupError(f"no {step!a} on the way to {name!a}")
        here = scope[step]
        if not issubclass(type(here), type):
            raise LookupError(f"{step!a} in {name!a} is not a class")
        scope = _class_dict.__get__(here)
    assert isinstance(here, type)
    return here
