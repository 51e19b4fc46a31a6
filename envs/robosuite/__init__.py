"""robosuite's tasks."""
