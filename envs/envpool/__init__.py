"""EnvPool's tasks."""
