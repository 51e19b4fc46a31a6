"""Servers that answer with a policy. `server` and `protocol` speak openpi's websocket protocol for robot policies;
`language`, `openai_protocol` and `generation` speak OpenAI's HTTP API for language models. `config` holds the options.
"""

__all__ = ["config", "protocol", "server"]
