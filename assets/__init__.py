"""Small files that the package needs at run time."""

__all__: list[str] = []
