"""Text envs: tasks in words, with answers that are scored."""
