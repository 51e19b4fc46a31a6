"""Where each role runs: grammar, modes, plans, planner. Only arithmetic; imports no other part of the toolkit."""

from embodied.placement.grammar import PlacedRole, roles_of
from embodied.placement.placement_plan import PlacementPlan, PlannedHost, make_plan, named_nodes
from embodied.placement.topology import PlacementError, Topology

__all__ = [
    "PlacedRole",
    "PlacementError",
    "PlacementPlan",
    "PlannedHost",
    "Topology",
    "make_plan",
    "named_nodes",
    "roles_of",
]
