"""A run on disk, the source of its policy, checks of machines and memory, and the common parts of commands.

`launch` and `ending` begin and end every command; `run_folder`, `checkpoints` and `run_group` write files,
`policy_source`, `first_run` and `hub` find policies, `devices` and `memory_check` check machines, `rehearsal` is for
dry runs, `published_comparison` for evaluations, `seeds_and_sweeps` starts many runs, `text_checks` checks language
policies, `shared_replay` predicts runs that share devices.
"""

__all__ = [
    "checkpoints",
    "devices",
    "ending",
    "first_run",
    "hub",
    "launch",
    "lease_server",
    "memory_check",
    "policy_source",
    "published_comparison",
    "rehearsal",
    "run_folder",
    "run_group",
    "seeds_and_sweeps",
    "share_plan",
    "shared_replay",
    "shared_runs",
]
