"""Small files that the package needs at run time."""
