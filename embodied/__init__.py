"""Embodied Loop: simulator-in-the-loop reinforcement learning for robot policies."""

__version__ = "0.1.0"
