"""Scenes of a WidowX arm before a photograph: the bridge twins and PutOnPlate-25."""
