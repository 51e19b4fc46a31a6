"""ManiSkill's motion planner, which demonstrates with `collect.expert=planner`."""

__all__ = ["planner_expert"]
