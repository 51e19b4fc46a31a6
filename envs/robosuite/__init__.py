"""robosuite's tasks."""

__all__ = ["config", "env"]
