"""Scenes of a WidowX arm before a photograph: the bridge twins and PutOnPlate-25."""

__all__ = ["bridge_expert", "put_on_plate", "scene"]
