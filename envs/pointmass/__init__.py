"""The toy: a point pushed to a target."""

__all__ = ["config", "env"]
FAMILY = "toys"  # what its recipes are listed under; config/recipe_files.py reads this line
