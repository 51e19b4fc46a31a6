"""SmolVLA: a small vision-language model, an action expert that reads its first layers, and flow matching."""

__all__ = ["config", "policy"]
