"""The base of envs on MuJoCo and robosuite, and one episode's own random numbers for robosuite's objects."""

from __future__ import annotations

import contextlib
import random
import threading
from collections.abc import Iterator
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import numpy as np

from embodied.core.errors import MissingAsset
from embodied.core.types import ActionSpec, EnvSpec
from embodied.envs.capabilities import EvaluationProtocol
from embodied.envs.mujoco import rendering
from embodied.envs.vector_env import ReplayedEnv

VERSIONS = ("3.3.0", "3.3.1", "3.3.2")  # images differ from 3.3.3 on, places of objects from 3.4 on

_drawing = threading.Lock()


class MujocoEnv(ReplayedEnv):
    draws_on_gpus = True

    @classmethod
    def check(cls, config: Any) -> None:
        config.needs.check(f"env.name={config.name}", MissingAsset)
        if config.cameras and config.renderer != "warp":
            rendering.opengl()

    @classmethod
    def spec_of(cls, config: Any, num_actions: int, **more: Any) -> EnvSpec:
        """The spec of this config, with its square images."""
        return EnvSpec(
            action=ActionSpec(num_actions),
            images=dict.fromkeys(config.cameras, (config.image_size, config.image_size, 3)),
            backend=f"mujoco {version('mujoco')}, robosuite {version('robosuite')}",
            **more,
        )

    def __init__(self, config: Any, num_envs: int, env_spec: EnvSpec) -> None:
        if config.renderer == "cores":
            rendering.draw_on_cores()
        super().__init__(config, num_envs, env_spec)

    def video_problem(self) -> str:
        return rendering.opengl_problem()

    def drawn_by(self) -> str:
        return rendering.renderer_name()

    def free_gpu_memory(self) -> bool:
        """Close what draws: MuJoCo simulates in the host's memory. The next image makes it anew."""
        self._close_painters()
        rendering.free_context()
        return True

    def _close_painters(self) -> None:
        raise NotImplementedError


def in_mujoco(protocol: EvaluationProtocol) -> EvaluationProtocol:
    """The protocol if one of VERSIONS of MuJoCo is installed, else a protocol whose name contains the installed
    version."""
    try:
        installed = version("mujoco")
    except PackageNotFoundError:  # planned here, played on another machine
        return protocol
    if installed in VERSIONS:
        return replace(protocol, rules=f"{protocol.rules}; MuJoCo {installed}")
    rules = f"{protocol.rules}; MuJoCo {installed} simulates otherwise than {VERSIONS[-1]}, that of {protocol.name}"
    return replace(protocol, name=f"{protocol.name}+mujoco{installed}", rules=rules)


class Draws:
    """One episode's own random numbers, for code that draws from the global generators, as robosuite's does."""

    def __init__(self, seed: int) -> None:
        self._numpy = np.random.RandomState(seed).get_state()
        self._python = random.Random(seed).getstate()

    @contextlib.contextmanager
    def used(self) -> Iterator[None]:
        """In this context the global random generators continue from this state."""
        with _drawing:
            before = np.random.get_state(), random.getstate()
            np.random.set_state(self._numpy)
            random.setstate(self._python)
            try:
                yield
            finally:
                self._numpy, self._python = np.random.get_state(), random.getstate()
                np.random.set_state(before[0])
                random.setstate(before[1])
