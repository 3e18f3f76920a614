"""Names of classes on the wire. A name from a peer finds only a class that this process has already imported.

Looking up a name runs no foreign code: no import, no module ``__getattr__``, no descriptor, no metaclass hook.
This module imports nothing of the package.
"""

from __future__ import annotations

import sys
from types import MappingProxyType, ModuleType
from typing import Any

#: The longest name, in characters: a peer's name must be cheap to check and short enough for a message.
MAX_NAME = 512

# The slots themselves. `vars(x)` would ask x first, and a lazily imported module would then run its import.
_module_dict: Any = vars(ModuleType)["__dict__"]
_class_dict: Any = vars(type)["__dict__"]


def name_of(cls: type) -> str:
    """``module:qualname`` of a class; ``ValueError`` if :func:`find` would not return the same class."""
    if "<locals>" in cls.__qualname__:
        raise ValueError(f"class {cls.__qualname__} is local to a function; define it at the top of its module")
    name = f"{cls.__module__}:{cls.__qualname__}"
    try:
        found = find(name)
    except LookupError as e:
        raise ValueError(f"class {cls.__qualname__} cannot be found by its name: {e}") from None
    if found is not cls:
        raise ValueError(f"another class has taken the name {name}; give the two classes different names")
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
    # `issubclass(type(x), …)` and not `isinstance`, which also trusts what x itself says about its class.
    if not issubclass(type(here), ModuleType):
        raise LookupError(f"module {module_name!a} is not imported here")
    scope: dict[str, object] | MappingProxyType[str, object] = _module_dict.__get__(here)
    for step in steps:
        if step not in scope:
            raise LookupError(f"there is no {step!a} in {name!a}")
        here = scope[step]
        if not issubclass(type(here), type):
            raise LookupError(f"{step!a} in {name!a} is not a class")
        scope = _class_dict.__get__(here)
    assert isinstance(here, type)
    return here
