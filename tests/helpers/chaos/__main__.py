"""``python -m chaos``: play scenarios again."""

from __future__ import annotations

import contextlib
import sys

from chaos.replay import main

with contextlib.suppress(KeyboardInterrupt):
    sys.exit(main())
