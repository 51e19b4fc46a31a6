"""The Ray backend: hosts as actors on one or many nodes.

`actors` are the hosts, `nodes` the connection and its machines, `reservation` a run's cores and GPUs, `own_cluster` a
Ray for one run, `object_store` the transport of large arrays, `guard` the parent of a host's process.
"""

__all__ = ["actors", "nodes", "own_cluster"]
