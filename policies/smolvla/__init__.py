"""SmolVLA: a small vision-language model whose first layers an action expert reads, and flow matching."""

__all__ = ["config", "network", "policy"]
