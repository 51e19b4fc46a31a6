"""ManiSkill's own motion planner as an expert: it plans an episode in a separate env, and the plan is replayed here.

A plan is a list of joint targets with finger commands, for the control mode pd_joint_pos. The replay is closed-loop: it
aims a little ahead of the hand's real position on the plan, so it is as fast as this env's control mode allows, and
waits where the fingers must move first. (ManiSkill's own conversion steps one env by itself, at least once for every
waypoint.)
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import gymnasium
import numpy as np

from embodied.core.arrays import host
from embodied.core.errors import ConfigError
from embodied.envs.maniskill.config import ManiSkillConfig
from embodied.envs.maniskill.experts import JOINTS, Scenes, hand_pose
from embodied.envs.maniskill.tasks import DRAWING, quiet

SOLUTIONS = "mani_skill.examples.motionplanning.panda.solutions"
SOLVERS = {"PushCube-v1": "solvePushCube", "PickCube-v1": "solvePickCube", "StackCube-v1": "solveStackCube"}
PLANNER_UNIT = 0.1  # an action of 1: radians of a joint, or metres and radians of the hand
AHEAD, AHEAD_TURN = 0.04, 0.2  # metres and radians from the hand to its aim on the plan
THERE, THERE_TURN = 0.005, 0.03  # distance at which the hand has arrived
PATIENCE = 8  # env steps after which the plan continues although the hand has not arrived
PLANNER_GAIN = 1.5  # the controller covers only part of the requested movement within an env step


@dataclass(frozen=True)
class Plan:
    """T waypoints, and whether they solve the episode in the planner's own env."""

    joints: np.ndarray  # [T, 7]
    grip: np.ndarray  # [T], 1 open, -1 closed
    solved: bool

    def __len__(self) -> int:
        return len(self.grip)

    @cached_property
    def hands(self) -> tuple[np.ndarray, np.ndarray]:
        """Positions [T, 3] and orientations [T, 3, 3] of the hand, relative to the arm's base."""
        return hand_pose(self.joints)[:2]

    @cached_property
    def stops(self) -> np.ndarray:
        """[T]: the last waypoint at which the hand may aim from each waypoint. Where the plan repeats a waypoint or the
        fingers' command changes, the fingers move; these waypoints, and the waypoint before them, are passed one by
        one.

        joints 0.0 0.1 0.2 0.2 0.2 0.3 0.4
        grip     1   1   1  -1  -1  -1  -1
        stops    2   2   2   3   4   6   6
        """
        still = np.r_[False, (np.diff(self.joints, axis=0) == 0).all(1) | (np.diff(self.grip) != 0)]
        ends = np.where(still | np.r_[still[1:], True], np.arange(len(self)), len(self))
        return np.minimum.accumulate(ends[::-1])[::-1]


class PlanReplay:
    """An episode's progress along its plan. `turns`: the env's control mode can turn the hand."""

    def __init__(self, plan: Plan, turns: bool) -> None:
        self.plan, self.turns = plan, turns
        self.aim = 0  # the waypoint at which the hand aims
        self.waited = 0

    def advance(self, hand: np.ndarray, turned: np.ndarray) -> int:
        """The next aim, for the hand's current position and orientation."""
        before, last = self.aim, len(self.plan) - 1
        stop = self.plan.stops[self.aim]
        arrived = self.aim == stop and self._near(hand, turned, stop, THERE, THERE_TURN).all()
        if arrived or self.waited >= PATIENCE:
            self.aim = min(self.aim + 1, last)
        near = self._near(hand, turned, self.plan.stops[self.aim], AHEAD, AHEAD_TURN)
        self.aim += max((len(near) if near.all() else int(near.argmin())) - 1, 0)
        self.waited = self.waited + 1 if self.aim == before else 0
        return self.aim

    def _near(self, hand: np.ndarray, turned: np.ndarray, stop: int, metres: float, radians: float) -> np.ndarray:
        """bool: True for waypoints from the aim to `stop` within these distances."""
        places, turns = (array[self.aim : stop + 1] for array in self.plan.hands)
        near = np.linalg.norm(places - hand, axis=1) <= metres
        return near & (np.linalg.norm(turn_between(turned, turns), axis=1) <= radians) if self.turns else near


class PlannerExpert:
    def __init__(self, env: Scenes, tick: Callable[[], None] = lambda: None) -> None:
        self.check(env.config)
        mode = env.config.control_mode
        self._env, self._control = env, CONTROLS[mode]
        self._turns = mode != "pd_ee_delta_pos"
        self.planner, self._tick = MotionPlanner(env), tick
        self.replays: dict[int, PlanReplay] = {}  # by row

    @staticmethod
    def check(config: ManiSkillConfig) -> None:
        task, mode = config.task, config.control_mode
        if task not in SOLVERS or mode not in CONTROLS:
            raise ConfigError(
                f"collect.expert=planner does not play env.task={task} with env.control_mode={mode}; it plays "
                f"{', '.join(SOLVERS)} with {', '.join(CONTROLS)}"
            )

    def begin(self, rows: np.ndarray) -> None:
        seeds = np.concatenate([scene._episode_seed for scene in self._env.envs])
        for row in rows.tolist():
            self._tick()
            self.replays[row] = PlanReplay(self.planner.plan(int(seeds[row])), self._turns)

    def act(self) -> np.ndarray:
        qpos = np.concatenate([host(scene.agent.robot.get_qpos()) for scene in self._env.envs]).astype(np.float64)
        joints = qpos[:, :JOINTS]
        hand, turned, _ = hand_pose(joints)
        aims = joints.copy()
        grip = np.ones(len(aims))
        for row, replay in self.replays.items():
            at = replay.advance(hand[row], turned[row])
            aims[row], grip[row] = replay.plan.joints[at], replay.plan.grip[at]
        moves = self._control(self._env, joints, aims)
        return np.concatenate([moves, grip[:, None]], axis=1).astype(np.float32)


class MotionPlanner:
    """ManiSkill's solution of a task, run in a bare env with the solution's control mode."""

    def __init__(self, env: Scenes) -> None:
        self._solve = solver(env.config.task)
        plain = {"backend": "cpu", "control_mode": "pd_joint_pos"}
        plain |= {"state": "proprio", "cameras": (), "privileged": False}
        self._env = ActionRecorder(env.make_single(plain))

    def plan(self, seed: int) -> Plan:
        """The plan of the episode with this seed; if the planner fails, its partial plan."""
        with quiet():
            self._solve(self._env, seed=seed)
        steps = np.array(self._env.actions, np.float64)
        return Plan(steps[:, :JOINTS], steps[:, JOINTS], self._env.solved)


class ActionRecorder(gymnasium.Wrapper):
    """Records the planner's actions. Its scene is rebuilt for every episode: in a used scene contacts, and so the plan,
    differ in their last digits."""

    def reset(self, *, seed: int | None = None, options: dict | None = None) -> Any:
        self.actions: list[np.ndarray] = []
        self.solved = False
        with DRAWING:
            return super().reset(seed=seed, options={"reconfigure": True})

    def step(self, action: np.ndarray) -> Any:
        self.actions.append(np.array(action))
        result = super().step(action)
        self.solved |= bool(result[4]["success"])
        return result


def solver(task: str) -> Callable[..., Any]:
    try:
        with quiet():
            return getattr(importlib.import_module(SOLUTIONS), SOLVERS[task])
    except ImportError as err:
        raise ConfigError(
            f"ManiSkill's motion planner cannot be loaded here: {err}. It needs mplib, which exists only for Linux: "
            "python -m pip install mplib==0.1.1; or leave out collect.expert=planner"
        ) from None


def turn_between(turned: np.ndarray, wanted: np.ndarray) -> np.ndarray:
    """[N, 3]: rotation vectors from one orientation to another, in the frame of the arm's base."""
    from scipy.spatial.transform import Rotation

    return Rotation.from_matrix(wanted @ np.swapaxes(turned, -1, -2)).as_rotvec()


def by_joint_targets(env: Scenes, joints: np.ndarray, aims: np.ndarray) -> np.ndarray:
    """Exact for control modes that add each action to the previous target."""
    asked = np.concatenate([host(scene.agent.controller.controllers["arm"]._target_qpos) for scene in env.envs])
    return scaled_moves((aims - asked) / PLANNER_UNIT)


def by_hand(env: Scenes, joints: np.ndarray, aims: np.ndarray) -> np.ndarray:
    return scaled_moves(PLANNER_GAIN * (hand_pose(aims)[0] - hand_pose(joints)[0]) / PLANNER_UNIT)


def by_hand_and_turn(env: Scenes, joints: np.ndarray, aims: np.ndarray) -> np.ndarray:
    turn = turn_between(hand_pose(joints)[1], hand_pose(aims)[1])
    turn = -PLANNER_GAIN * turn / PLANNER_UNIT  # in ManiSkill an action of 1 turns by -0.1
    turn /= np.maximum(1.0, np.linalg.norm(turn, axis=1, keepdims=True))
    return np.concatenate([by_hand(env, joints, aims), turn], axis=1)


def scaled_moves(moves: np.ndarray) -> np.ndarray:
    """Scales moves into [-1, 1], keeping the direction."""
    return moves / np.maximum(1.0, np.abs(moves).max(axis=1, keepdims=True))


CONTROLS: dict[str, Callable[[Scenes, np.ndarray, np.ndarray], np.ndarray]] = {
    "pd_joint_delta_pos": lambda env, joints, aims: scaled_moves(PLANNER_GAIN * (aims - joints) / PLANNER_UNIT),
    "pd_joint_target_delta_pos": by_joint_targets,
    "pd_ee_delta_pos": by_hand,
    "pd_ee_delta_pose": by_hand_and_turn,
}
