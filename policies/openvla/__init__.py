"""OpenVLA: two vision towers, a projector and a Llama that writes actions as tokens. Upstream's key names, our code.

`policy` is the way in. `vision` and `llama` are the networks, `images`, `text` and `actions` what goes in and out,
`settings` the sizes, `folder` the published layout on disk.
"""
