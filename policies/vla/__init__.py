"""What vision-language-action families share: camera frames, units of actions, tokenizers, sharded weights, LoRA."""

__all__ = [
    "compiling",
    "config",
    "image_processor",
    "layers",
    "lora",
    "policy",
    "shards",
    "statistics",
    "vla_tokenizer",
]
