"""``transfuse doctor``: which routes work here, and why not."""

from __future__ import annotations

from transfuse.cli.doctor.command import doctor

__all__ = ["doctor"]
