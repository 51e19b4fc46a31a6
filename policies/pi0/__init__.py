"""Pi0 and Pi0.5: a PaliGemma that sees and reads, and an action expert that makes actions of noise by flow matching.

`policy` is the way in. `siglip`, `gemma` and `network` are the networks with upstream's key names, `flow` the steps
from noise to actions, `images`, `text` and `normalize` what goes in and out, `settings` the sizes, `folder` the layouts
that others publish.
"""
