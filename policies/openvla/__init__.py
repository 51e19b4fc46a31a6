"""OpenVLA and OpenVLA-OFT: two vision towers, a projector and a Llama that reads actions, with upstream's key names.

`policy` is the entry point and `network` has the networks. `folder` and `components` read and write the published
layout.
"""

__all__ = ["components", "config", "folder", "network", "policy"]
