"""What flows and what all share: carriers, observations, episodes, randomness, errors. Imports nothing else of ours.

`types` has the carriers of robot programs, `conversations` those of text, `pictures` what these show, `arrays` the
operations on observations, `rng` named random streams, `errors` what can go wrong, `request_queue` where requests wait,
`options` and `files` the base of options and small files.
"""

__all__ = ["arrays", "conversations", "errors", "files", "options", "pictures", "request_queue", "rng", "types"]
