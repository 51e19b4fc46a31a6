"""Counts what goes between a device and its host, with tensors on the CPU in the device's place.

Inside `with Transfers() as moved:` reads of tensors (`.cpu()`, `.item()`, `bool(tensor)`, numpy's view of one), uploads
of arrays, and selections by a mask, which wait for its count, are noted by the line of ours that makes them, in this
thread. What a simulator does by itself, here or in its own package, is its device's business.
"""

import sys
from collections import Counter
from contextlib import ExitStack
from pathlib import Path
from threading import get_ident
from unittest.mock import patch

import numpy as np
import torch
from torch.overrides import TorchFunctionMode

READS = "cpu item tolist numpy __array__ __bool__ __int__ __float__ __index__ nonzero".split()
SIMULATED = ("cpu_physics.py", "watched_env.py")
RESETS = ("cpu_batch.py", "episode_draws.py")
ROOT = Path(__file__).parents[2]


class Transfers(TorchFunctionMode):
    def __init__(self) -> None:
        super().__init__()
        self.lines: Counter[str] = Counter()  # "function file:line"
        self.of_resets: Counter[str] = Counter()  # the same of what begins ManiSkill's episodes

    def __enter__(self):
        self.patches = ExitStack()
        for name in ("from_numpy", "as_tensor", "tensor"):
            self.patches.enter_context(patch.object(torch, name, self._uploading(name, getattr(torch, name))))
        self.thread = get_ident()
        return super().__enter__()

    def __exit__(self, *raised):
        self.patches.close()
        return super().__exit__(*raised)

    def __torch_function__(self, func, types, args=(), kwargs=None):
        name = getattr(func, "__name__", "")
        indexes = name in ("__getitem__", "__setitem__") and selects(args[1])
        if indexes or name in READS or (name == "to" and "cpu" in args[1:]):
            self._note(name)
        return func(*args, **(kwargs or {}))

    def _uploading(self, name, function):
        def watched(data, *args, **options):
            if not isinstance(data, torch.Tensor) and get_ident() == self.thread:
                self._note(name)
            return function(data, *args, **options)

        return watched

    def _note(self, name):
        if where := caller(name):
            counter = self.of_resets if where.partition(":")[0].endswith(RESETS) else self.lines
            counter[f"{name} {where}"] += 1


def selects(index) -> bool:
    """True if an index is uploaded, or has to be counted first."""
    parts = index if isinstance(index, tuple) else (index,)
    return any(isinstance(part, np.ndarray) or getattr(part, "dtype", None) == torch.bool for part in parts)


def caller(name: str) -> str:
    """The line of ours that asked for this; empty where a simulator or torch did."""
    frame = sys._getframe(1)
    while frame.f_code.co_filename == __file__ or "/torch/" in frame.f_code.co_filename:
        frame = frame.f_back
    if (frame.f_code.co_name, name) == ("host", "numpy"):  # of the copy that `cpu` has made
        return ""
    while Path(frame.f_code.co_filename).name == "arrays.py" or "comp>" in frame.f_code.co_name:
        frame = frame.f_back  # whoever uses its helpers is more telling
    path = Path(frame.f_code.co_filename)
    ours = path.is_relative_to(ROOT) and ".venv" not in path.parts
    return f"{path.relative_to(ROOT)}:{frame.f_lineno}" if ours and path.name not in SIMULATED else ""
