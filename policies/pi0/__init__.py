"""Pi0 and Pi0.5: a PaliGemma that sees and reads, and an action expert that turns noise into actions by flow matching.

`policy` is the way in, with the steps from noise to actions. `network` holds SigLIP, Gemma and both experts under
upstream's key names, `inputs` turns words and images into what they take, `settings` has the sizes and the names
that others publish.
"""

__all__ = ["config", "policy"]
