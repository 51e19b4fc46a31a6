"""Any single Gymnasium env."""

FAMILY = "toys"  # what its recipes are listed under; config/recipe_files.py reads this line
