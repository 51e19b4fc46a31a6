"""The folder in which a policy worker leaves new weights for its servers, a version each."""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import shutil
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from torch import Tensor

from embodied.core.errors import ConfigError
from embodied.policies.policy_folder import WEIGHTS, write_tensors


class WeightFolder:
    """Keeps the current version, and every one before it until all servers that were told of it have confirmed it or
    left. All but `write` is called in one thread.

        folder.write("v3-5f0c", tensors)
        folder.use("v3-5f0c")
        with folder.reading() as at:       # a server is told of v3
            ...                            # meanwhile v4 is written and used: v3 stays
                                           # and is removed here
    """

    def __init__(self, parent: Path) -> None:
        """A new folder, with a lock on it that ends with this process: what others left there is removed."""
        try:
            parent.mkdir(parents=True, exist_ok=True)
            for left in parent.glob("weights-*"):
                with contextlib.suppress(OSError):  # somebody else removes it, or is at work there
                    lock = os.open(left, os.O_RDONLY | os.O_DIRECTORY)
                    try:
                        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                        shutil.rmtree(left)
                    finally:
                        os.close(lock)
            name = secrets.token_hex(8)
            (aside := parent / f"new-{name}").mkdir()
            self.lock = os.open(aside, os.O_RDONLY | os.O_DIRECTORY)
            fcntl.flock(self.lock, fcntl.LOCK_EX)
            self.path = aside.rename(parent / f"weights-{name}")
        except OSError as err:
            raise ConfigError(f"policy.weights={parent} cannot be written: {err.strerror or err}") from None
        self.current = ""
        self.readers: Counter[str] = Counter()

    def write(self, name: str, tensors: dict[str, Tensor]) -> None:
        """Write these tensors, by their published names. Servers are told of them after `use`."""
        if name != self.current:
            aside = self.path / "new"
            aside.mkdir(parents=True, exist_ok=True)
            write_tensors(aside / WEIGHTS, tensors)
            aside.rename(self.path / name)

    def use(self, name: str) -> None:
        """Make a version that was written the current one."""
        before, self.current = self.current, name
        self.remove(before)

    @contextlib.contextmanager
    def reading(self) -> Iterator[Path]:
        """The folder of the current version, which stays inside."""
        name = self.current
        self.readers[name] += 1
        try:
            yield self.path / name
        finally:
            self.readers[name] -= 1
            self.remove(name)

    def remove(self, name: str) -> None:
        """Remove a version, unless it is the current one or a server still reads it."""
        if name and name != self.current and not self.readers[name]:
            shutil.rmtree(self.path / name, ignore_errors=True)

    def close(self) -> None:
        if self.lock >= 0:
            shutil.rmtree(self.path, ignore_errors=True)
            os.close(self.lock)
            self.lock = -1
