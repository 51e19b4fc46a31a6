"""How a process ended, in words."""

import signal

WRITE_STACKS = signal.SIGUSR1  # tells a host to write into its log what its threads are at


def describe_exit(code: int) -> str:
    """`code` as `subprocess` gives it: negative is a signal."""
    if code >= 0:
        return f"exited with code {code}"
    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = f"signal {-code}"
    return f"was killed by {name}"
