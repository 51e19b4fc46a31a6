"""Policies elsewhere: a server at policy.url=ws://... acts."""

__all__ = ["client", "policy"]
