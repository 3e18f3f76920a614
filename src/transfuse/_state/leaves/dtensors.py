"""Whether something is a DTensor, asked without importing ``torch.distributed.tensor``.

The import takes half a second, more than all of transfuse. Keepers, commands and jobs without DTensors do without it:
where nobody has imported it, nothing is a DTensor.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, TypeGuard

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


def is_dtensor(leaf: object) -> TypeGuard[DTensor]:
    return is_dtensor_class(type(leaf))


def is_dtensor_class(cls: type) -> bool:
    # Another thread may be importing the module: it is there, and its class is not yet.
    known = getattr(sys.modules.get("torch.distributed.tensor"), "DTensor", None)
    return known is not None and issubclass(cls, known)
