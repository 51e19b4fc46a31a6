"""What flows and what all share: carriers, observations, episodes, randomness, errors. Imports nothing else of ours."""
