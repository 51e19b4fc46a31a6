"""The machine: its devices (`discovery`), packages, drivers and load (`machine`, `vulkan_driver`), and `probes`."""

__all__ = ["discovery", "machine", "probes", "vulkan_driver"]
