"""What this machine offers and lacks: devices (`discovery`), packages and drivers (`machine`, `vulkan_driver`), and how
busy it is (`cpu_load`)."""

__all__ = ["cpu_load", "discovery", "machine", "probes", "vulkan_driver"]
