"""A run on disk, where its policy comes from, whether machines can hold it, and what is around every command.

`launch` and `ending` are around every command; `run_folder`, `checkpoints` and `run_group` are on disk,
`policy_source`, `first_run` and `hub` find policies, `devices` and `memory_check` look at machines,
`rehearsal` is a dry run's, `published_comparison` an evaluation's, `seeds_and_sweeps` starts many runs,
`text_checks` is what policies that speak must fit, `shared_replay` predicts runs that share devices.
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
