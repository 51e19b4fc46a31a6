"""A policy behind a websocket that speaks openpi's protocol: `protocol` reads and writes messages, `server` admits
clients and batches their requests, `config` holds the options."""

__all__ = ["BadMessage", "ServeConfig", "Server"]


def __getattr__(name: str) -> object:
    """Import a public name on first use: the server needs torch."""
    from importlib import import_module

    modules = {"BadMessage": "protocol", "ServeConfig": "config", "Server": "server"}
    if name in modules:
        return getattr(import_module(f"{__name__}.{modules[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
