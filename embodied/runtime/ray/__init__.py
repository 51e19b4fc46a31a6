"""The Ray backend: hosts as actors on one or many nodes.

`actors` are the hosts and their transport of large arrays, `nodes` the connection, its machines, and a run's cores and
GPUs, `guard` the parent of a host's process.
"""

__all__ = ["actors", "nodes"]
