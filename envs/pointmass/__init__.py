"""The toy: a point pushed to a target."""
