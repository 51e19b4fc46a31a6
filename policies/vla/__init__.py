"""Shared by vision-language-action families: image processing, units of actions, LoRA, and flow matching."""

__all__ = ["config", "flow", "flow_network", "image_processor", "layers", "lora", "policy", "statistics"]
