"""One short YAML file per recipe."""

__all__: list[str] = []
