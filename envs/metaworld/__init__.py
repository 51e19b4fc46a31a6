"""MetaWorld's tasks."""
