"""Language policies: causal language models that answer text envs."""
