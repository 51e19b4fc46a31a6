"""The expert of RollBall-v1: the hand goes behind the ball and throws it towards the goal, 1.3 m ahead.

The ball has to leave at 0.5 m/s, more than a hand reaches that holds its orientation. So the hand may pitch, it rises
while it pushes, and its movement is shared among the joints so that none is much faster than the others. The fingers
stay a little open: the ball lies between their tips and keeps its direction.
"""

from __future__ import annotations

import numpy as np

from embodied.envs.maniskill import experts

BEHIND, LOW, ROOM = 0.055, 0.035, 0.021  # the hand before the push: distance from the ball, height, room above it
OVER = 0.08  # additional height of the hand while it is not yet behind the ball
RISE = 0.22  # metres up for a metre ahead while the hand pushes
STRAIGHT = 2.5  # how strongly the push returns the hand to the line from the ball to the goal
LAST = 0.55  # distance from the arm's base at which the hand stops and the ball rolls on
GAP = -0.55  # the action of the fingers
TURN = 0.064  # metres that count as a radian of the hand's roll and yaw


class RollBallExpert:
    def __init__(self, env: experts.Scenes) -> None:
        experts.ManiSkillExpert.check(env.config)
        self._env = env

    def begin(self, rows: np.ndarray) -> None:
        """The rule has no memory."""

    def act(self) -> np.ndarray:
        """[N, 8]: the action that goes behind the ball, or throws it."""
        world = experts.look(self._env, 0)
        ball, goal = world.place("ball"), world.place("goal_region")
        onward = (goal - ball)[:, :2]
        onward /= np.maximum(np.linalg.norm(onward, axis=1, keepdims=True), 1e-9)
        across = np.column_stack([-onward[:, 1], onward[:, 0]])
        offset = world.hand[:, :2] - ball[:, :2]
        ahead, beside = (offset * onward).sum(1), (offset * across).sum(1)
        behind = (ahead < -0.03) & (np.abs(beside) < 0.012 + 0.15 * np.maximum(-ahead - 0.05, 0))
        ready = behind & (world.hand[:, 2] < LOW + ROOM)
        start = -BEHIND * onward - offset
        astray = np.linalg.norm(start, axis=1)
        height = LOW + np.where(behind, 0, OVER * np.clip((astray - 0.02) / 0.03, 0, 1))
        push = 0.3 * np.column_stack([onward, np.full(len(ball), RISE)])
        push[:, :2] -= STRAIGHT * beside[:, None] * across
        move = np.where(ready[:, None], push, np.column_stack([start, height - world.hand[:, 2]]))
        turn = experts.TURN_GAIN * experts.turn_to(world.turned, across)
        roll = np.concatenate([onward, np.zeros((len(ball), 1))], axis=1)[:, None]  # [N, 1, 3], the axis
        wanted = np.column_stack([experts.GAIN * move, TURN * (turn * roll[:, 0]).sum(1), TURN * turn[:, 2]])
        jacobian = np.concatenate(
            [world.jacobian[:, :3], TURN * roll @ world.jacobian[:, 3:], TURN * world.jacobian[:, 5:]], axis=1
        )
        joints = share_among_joints(jacobian, wanted) / (0.4 * experts.MOST)
        joints /= np.maximum(1.0, np.abs(joints).max(axis=1, keepdims=True))
        joints[(ball[:, 0] > LAST + 0.03) | ready & (world.hand[:, 0] > LAST)] = 0.0
        return np.column_stack([joints, np.full(len(ball), GAP)]).astype(np.float32)


def share_among_joints(jacobian: np.ndarray, wanted: np.ndarray) -> np.ndarray:
    """[N, J]: a joint step with jacobian [N, M, J] @ step near wanted [N, M], whose largest entry is small: joints that
    do much get less weight, five times."""
    weights = np.ones((len(wanted), jacobian.shape[2]))
    for _ in range(5):
        weighted = jacobian * weights[:, None]
        square = weighted @ jacobian.transpose(0, 2, 1) + 1e-5 * np.eye(jacobian.shape[1])
        step = (weighted.transpose(0, 2, 1) @ np.linalg.solve(square, wanted[:, :, None]))[:, :, 0]
        shares = np.abs(step) / np.maximum(np.abs(step).max(axis=1, keepdims=True), 1e-9)
        weights *= (shares + 0.1) ** -0.7
        weights = np.maximum(weights / weights.max(axis=1, keepdims=True), 1e-3)
    return step
