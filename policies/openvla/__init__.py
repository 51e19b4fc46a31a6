"""OpenVLA: two vision towers, a projector and a Llama that writes actions as tokens. Upstream's key names, our code.

`policy` and `oft` are the ways in. `vision` and `llama` are the networks, `text` and `action_tokens` what goes in and
out, `settings` the sizes, `folder` the published layout on disk.
"""
