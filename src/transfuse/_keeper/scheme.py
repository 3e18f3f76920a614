"""``transfuse://`` is known to torch, whichever of the two is imported first. This module imports no torch.

Its classes have no base: ``importlib.abc`` alone takes longer to import than all that ``import transfuse`` brings.
"""

from __future__ import annotations

import importlib
import sys
from contextlib import suppress
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence
    from importlib.abc import Loader
    from importlib.machinery import ModuleSpec

SCHEME = "transfuse"
#: The module of torch's that has to be told.
_THEIRS = "torch.distributed.rendezvous"


def announce() -> None:
    """Tell torch what ``transfuse://`` means: now, or as soon as it is imported."""
    if _THEIRS in sys.modules:
        _tell(importlib.import_module(_THEIRS))  # Another thread may be importing it just now.
    else:
        sys.meta_path.insert(0, _TorchFinder())


def _tell(theirs: ModuleType) -> None:
    with suppress(RuntimeError):  # It knows already: this package was imported twice.
        theirs.register_rendezvous_handler(SCHEME, _join)


def _join(*args: Any, **kwargs: Any) -> Any:
    from transfuse._keeper.rendezvous import join

    return join(*args, **kwargs)


class _TorchFinder:
    """Lets the other finders find torch's module, and has it told once it is there."""

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name != _THEIRS:
            return None
        found = (other.find_spec(name, path, target) for other in list(sys.meta_path) if other is not self)
        spec = next((one for one in found if one is not None), None)
        if spec is not None and spec.loader is not None:
            spec.loader = _Telling(spec.loader, self)  # type: ignore[assignment]
        return spec


class _Telling:
    def __init__(self, loader: Loader, finder: _TorchFinder) -> None:
        self._loader, self._finder = loader, finder

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        assert module.__spec__ is not None
        module.__spec__.loader = module.__loader__ = self._loader  # As if this had never been here.
        self._loader.exec_module(module)
        _tell(module)
        sys.meta_path.remove(self._finder)
