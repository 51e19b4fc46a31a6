"""Servers that answer with a policy.

`robot_server` and `robot_protocol` speak openpi's websocket protocol for robot policies; `language_server`, `openai`
and `generation` speak OpenAI's HTTP API for language models. `http_requests` has their requests, `config` the options.
"""

__all__ = ["config", "language_server", "robot_protocol", "robot_server"]
