"""Who runs where: grammar, modes, plans. Pure planning; imports nothing else of the toolkit."""

from embodied.placement.grammar import PlacementError
from embodied.placement.plan import Host, Offer, PlacementPlan, make_plan, named_kinds, named_nodes

__all__ = ["Host", "Offer", "PlacementError", "PlacementPlan", "make_plan", "named_kinds", "named_nodes"]
