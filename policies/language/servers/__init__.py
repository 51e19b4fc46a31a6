"""Servers as the engine, `policy.engine=http`: ours, vLLM's, or others that speak OpenAI's completions."""

__all__ = ["http_engine", "remote_server", "server_pool"]
