"""The folder in which a policy worker writes new weights for its servers, one folder per version."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from torch import Tensor

from embodied.core.errors import ConfigError
from embodied.core.files import locked_folder
from embodied.policies.policy_folder import WEIGHTS, write_tensors


class WeightFolder:
    """Keeps the current version, and an earlier version until all servers that load it have confirmed it or left. All
    methods except `write` are called in one thread.

        folder.write("v3-5f0c", tensors)
        folder.use("v3-5f0c")
        with folder.reading() as at:       # a server loads v3
            ...                            # meanwhile v4 is written and used: v3 stays
                                           # and is removed here
    """

    def __init__(self, parent: Path) -> None:
        """Creates a folder, with a lock that ends with this process. Unlocked folders of ended processes are
        removed."""
        try:
            parent.mkdir(parents=True, exist_ok=True)
            self.path, self.lock = locked_folder(parent, "weights")
        except OSError as err:
            raise ConfigError(f"policy.weights={parent} cannot be written: {err.strerror or err}") from None
        self.current = ""
        self.readers: Counter[str] = Counter()

    def write(self, name: str, tensors: dict[str, Tensor]) -> None:
        """Write these tensors, by their published names. Servers load them after `use`."""
        if name != self.current:
            aside = self.path / "new"
            aside.mkdir(parents=True, exist_ok=True)
            write_tensors(aside / WEIGHTS, tensors)
            aside.rename(self.path / name)

    def use(self, name: str) -> None:
        """Make a written version the current one."""
        before, self.current = self.current, name
        self.remove(before)

    @contextlib.contextmanager
    def reading(self) -> Iterator[Path]:
        """Yields the folder of the current version, which is kept inside."""
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
