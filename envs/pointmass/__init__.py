"""The toy: a point pushed to a target."""

__all__ = ["config", "env"]
