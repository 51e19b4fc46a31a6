"""Who runs where: grammar, modes, plans. Pure planning; imports nothing else of the toolkit."""

from embodied.placement.grammar import PlacementError
from embodied.placement.placement_plan import Host, PlacementPlan, make_plan, named_nodes
from embodied.placement.topology import Topology

__all__ = ["Host", "PlacementError", "PlacementPlan", "Topology", "make_plan", "named_nodes"]
