"""What vision-language-action families share: camera frames, units of actions, tokenizers, sharded weights, LoRA."""
