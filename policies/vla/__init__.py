"""What vision-language-action families share: camera frames, units of actions, tokenisers, sharded weights, LoRA."""
