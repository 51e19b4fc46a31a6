"""Any single Gymnasium env."""

__all__ = ["config", "env"]
FAMILY = "toys"  # what its recipes are listed under; config/recipe_files.py reads this line
