"""Envs that speak: tasks in words, whose answers are scored."""
