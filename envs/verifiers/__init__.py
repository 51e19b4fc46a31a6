"""Environments of the package verifiers, as text envs: played in an interpreter of their own."""
