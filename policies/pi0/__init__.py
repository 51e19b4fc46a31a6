"""Pi0 and Pi0.5: a PaliGemma for images and text, and an expert that turns noise into actions by flow matching."""

__all__ = ["config", "policy"]
