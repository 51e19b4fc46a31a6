"""The toy: a point pushed to a target."""

FAMILY = "toys"  # what its recipes are listed under; config/recipe_files.py reads this line
