"""Text envs: tasks in words, with answers that are scored."""

__all__ = [
    "config",
    "math",
    "picture_questions",
    "reasoning_gym",
    "reverse_text",
    "scoring_process",
    "sort",
    "sums",
    "text_env",
    "text_env_checker",
    "verifiers",
    "worker",
]
