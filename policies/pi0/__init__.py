"""Pi0 and Pi0.5: a PaliGemma for images and text, and an action expert that turns noise into actions by flow matching.

`policy` is the entry point. `network` has SigLIP, Gemma and both experts with upstream's key names, `inputs` prepares
text and images, `settings` has the sizes and the published names.
"""

__all__ = ["config", "policy"]
