"""The machine: its devices (`discovery`), packages and drivers (`machine`, `vulkan_driver`), and load (`cpu_load`)."""

__all__ = ["cpu_load", "discovery", "machine", "probes", "vulkan_driver"]
