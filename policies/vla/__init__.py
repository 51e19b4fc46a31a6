"""Shared by vision-language-action families: image processing, units of actions, tokenizers, LoRA, flow matching."""

__all__ = ["config", "flow", "image_processor", "layers", "lora", "policy", "statistics"]
