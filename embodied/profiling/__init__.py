"""The costs of a recipe's parts on these devices: measured, stored, used by plan, benchmark and placement=auto.

`measure` is the command, `stored_profiles` finds the profile of a recipe, `timed_run` times iterations under one plan.
"""

__all__ = ["measure", "stored_profiles", "timed_run"]
