"""Language policies: causal language models that answer text envs."""

__all__ = ["config", "engine", "folder", "http_messages", "language_worker", "packing", "policy", "slot_engine"]
