"""The Ray backend: hosts as actors on one or many nodes.

`actors` are the hosts, `nodes` the connection and what is there, `reservation` what a run holds of it,
`own_cluster` a Ray of one's own, `object_store` how large arrays travel, `guard` the parent of a host's process
there.
"""

__all__ = ["actors", "nodes", "own_cluster"]
