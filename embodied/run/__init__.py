"""A run on disk, the source of its policy, checks of machines and memory, and the common parts of commands.

`launch` and `ending` begin and end every command; `run_folder` writes files and checkpoints, `run_group` lists
several runs, `policy_source` finds policies, `devices` and `memory_check` check machines and memory, `rehearsal` is for
dry runs, `published_models` for evaluations.
"""
