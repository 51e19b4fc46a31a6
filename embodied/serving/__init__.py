"""Servers that answer with a policy: `robot_server` over openpi's websocket protocol for robot policies,
`language_server` over OpenAI's HTTP API for language models."""

__all__ = ["config", "language_server", "robot_server"]
