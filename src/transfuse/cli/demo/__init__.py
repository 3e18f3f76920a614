"""``transfuse demo``: a training job whose workers are killed, and healed by their peers before your eyes."""

from __future__ import annotations

from transfuse.cli.demo.command import demo

__all__ = ["demo"]
