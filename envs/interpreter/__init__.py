"""Simulators in an interpreter of their own, `env.python`."""
