"""Any single Gymnasium env."""

__all__ = ["config", "env"]
