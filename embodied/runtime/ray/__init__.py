"""The Ray backend: hosts on one or many nodes.

`actors` are the backend and its agents, `nodes` the connection, its machines, and a run's cores and
GPUs.
"""

__all__ = ["actors", "nodes"]
