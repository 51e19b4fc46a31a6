"""LIBERO tasks on MuJoCo: states, images, stored initial states, experts."""

__all__ = ["config", "env", "expert", "scene", "tasks"]
