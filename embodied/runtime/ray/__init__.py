"""The Ray backend: hosts as actors on one or many nodes."""
