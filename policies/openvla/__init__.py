"""OpenVLA: two vision towers, a projector and a Llama that generates actions as tokens, with upstream's key names.

`policy` and `oft` are the entry points, built on `prismatic`. `vision` and `llama` are the networks, `tokens` the
prompt and action tokens, `settings` the sizes, `folder` and `components` the published layout.
"""

__all__ = ["config", "policy", "settings"]
