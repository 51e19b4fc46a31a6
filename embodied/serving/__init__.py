"""A policy behind a websocket that speaks openpi's protocol: `protocol` reads and writes messages, `server` admits
clients and batches their requests, `config` holds the options."""

__all__ = ["config", "protocol", "server"]
