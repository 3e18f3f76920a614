"""The fixtures for tests on an accelerator."""

from device.fixtures import accelerator, device, nothing_is_left

__all__ = ["accelerator", "device", "nothing_is_left"]
