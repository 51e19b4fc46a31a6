"""What this machine offers and lacks: devices (`discovery`), packages and drivers (`machine`, `vulkan_driver`), and how
busy it is (`load`)."""

__all__ = ["discovery", "load", "machine", "probes", "vulkan_driver"]
