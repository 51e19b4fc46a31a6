"""Data and tools of all packages: carriers, observations, episodes, randomness, errors. Imports no other package of
ours.

`types` has the carriers of robot programs, `conversations` the carriers of text, `pictures` the pictures in
conversations. `arrays` has operations on observations, `rng` named random streams, `errors` the exceptions,
`request_queue` the queue of waiting requests, `robot_messages` the messages between robots and servers. `options` is
the base of options models, `plugins` finds plug-ins, `files` reads and writes small files, `hub` downloads data sets,
`vulkan_driver` finds the driver that simulators need.
"""

__all__ = [
    "arrays",
    "conversations",
    "errors",
    "files",
    "options",
    "pictures",
    "request_queue",
    "rng",
    "robot_messages",
    "types",
]
