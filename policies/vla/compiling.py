"""Acting with functions that torch.compile has fused, on GPUs also replayed as CUDA graphs.

Learning is not compiled. What is fused rounds as separate operations do, so that log-probs are still the learner's; for
other numbers of rows or lengths of prompts a function is compiled once more, and then for any.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from functools import cache
from typing import Any

import torch

from embodied.core.errors import ConfigError

COMPILERS = ("g++", "clang++", "c++")


def for_acting(config: Any, function: Callable, device: torch.device) -> Callable:
    """The function, compiled where this policy acts so."""
    return compiled(function, device.type) if config.compile and torch.is_inference_mode_enabled() else function


@cache
def compiled(function: Callable, device: str) -> Callable:
    """A function of modules and tensors on this kind of device; a module comes as an argument, so that copies of a
    policy share the program."""
    if device == "cpu" and not any(map(shutil.which, (os.environ.get("CXX", ""), *COMPILERS))):
        raise ConfigError(
            "policy.compile=true needs a C++ compiler where it acts on a CPU, and there is none: install g++ "
            "(apt install g++), or set policy.compile=false"
        )
    options = {"triton.cudagraphs": device == "cuda", "emulate_precision_casts": True, "compile_threads": 1}
    return torch.compile(function, options=options)
