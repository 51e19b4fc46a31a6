"""Servers that answer with a policy: `robot_server` over the websocket protocols of openpi and vla-eval for robots,
`language_server` over OpenAI's HTTP API for language models."""
