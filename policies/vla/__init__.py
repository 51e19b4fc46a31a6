"""What vision-language-action families share: camera frames, units of actions, tokenizers, LoRA."""

__all__ = ["config", "image_processor", "layers", "lora", "policy", "statistics", "vla_tokenizer"]
