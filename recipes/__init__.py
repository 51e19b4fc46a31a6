"""One short YAML file per recipe."""
