"""Text envs: tasks in words, with answers that are scored."""

__all__ = ["config", "math", "scoring_process", "text_env", "text_env_checker", "toys", "worker"]
