"""robosuite's operational space controller and gripper for all rows, as kernels of Warp.

A thread works for one row, in double precision, with arrays that MuJoCo Warp has computed in single precision. Rules
and constants are those of robosuite 1.4's OSC_POSE with fixed impedance and of its PandaGripper.
"""

from __future__ import annotations

from typing import Any

import warp as wp

JOINTS = 7
F = wp.float64
Mat7 = wp.types.matrix((7, 7), F)
Mat6 = wp.types.matrix((6, 6), F)
Mat67 = wp.types.matrix((6, 7), F)
Vec7 = wp.types.vector(7, F)
Vec6 = wp.types.vector(6, F)

REACH = wp.constant(F(0.05))  # metres of an action of 1
TURN = wp.constant(F(0.5))  # radians
STIFFNESS = wp.constant(F(150.0))
DAMPING = wp.constant(F(24.49489742783178))  # critical: twice the root of the stiffness
POSTURE = wp.constant(F(10.0))  # stiffness that holds the posture, in the null space
POSTURE_DAMPING = wp.constant(F(6.324555320336759))
GRIPPER_SPEED = wp.constant(F(0.01))  # of the range per physics step


@wp.func
def double3(v: wp.vec3):
    return wp.vec3d(F(v[0]), F(v[1]), F(v[2]))


@wp.func
def clipped(x: F, limit: F):
    return wp.min(wp.max(x, -limit), limit)


@wp.func
def inverse(a: Any, size: int):
    """Of a square matrix, by elimination without pivoting: it is positive definite."""
    b = a
    for k in range(size):
        pivot = F(1.0) / b[k, k]
        b[k, k] = F(1.0)
        for j in range(size):
            b[k, j] = b[k, j] * pivot
        for i in range(size):
            if i != k:
                factor = b[i, k]
                b[i, k] = F(0.0)
                for j in range(size):
                    b[i, j] = b[i, j] - factor * b[k, j]
    return b


@wp.kernel(enable_backward=False)
def set_goals(
    actions: wp.array2d[F],
    hand: int,  # the site between the fingers
    site_xpos: wp.array2d[wp.vec3],
    site_xmat: wp.array2d[wp.mat33],
    is_fresh: wp.array1d[int],  # 1 until the first action of an episode
    goal_pos: wp.array1d[wp.vec3d],
    goal_mat: wp.array1d[wp.mat33d],
    seen_pos: wp.array1d[wp.vec3d],  # the hand where robosuite's reset saw it last
    seen_mat: wp.array1d[wp.mat33d],
):
    """The pose that an action asks for. robosuite's controller does not look again before its first action after a
    reset, nor does this."""
    row = wp.tid()
    if is_fresh[row] == 0:
        seen_pos[row] = double3(site_xpos[row, hand])
        seen_mat[row] = wp.mat33d(site_xmat[row, hand])
    is_fresh[row] = 0
    shift = wp.vec3d()
    turn = wp.vec3d()
    for i in range(3):
        shift[i] = REACH * clipped(actions[row, i], F(1.0))
        turn[i] = TURN * clipped(actions[row, 3 + i], F(1.0))
    goal_pos[row] = seen_pos[row] + shift
    angle = wp.length(turn)
    if angle > F(0.0):  # without a turn, the goal stays
        goal_mat[row] = wp.quat_to_matrix(wp.quat_from_axis_angle(turn / angle, angle)) * seen_mat[row]


@wp.func
def hand_jacobian(row: int, place: wp.vec3d, anchors: wp.array2d[wp.vec3], axes: wp.array2d[wp.vec3]):
    jacobian = Mat67()
    for joint in range(7):
        axis = double3(axes[row, joint])
        lever = wp.cross(axis, place - double3(anchors[row, joint]))
        for i in range(3):
            jacobian[i, joint] = lever[i]
            jacobian[3 + i, joint] = axis[i]
    return jacobian


@wp.func
def arm_inertia(
    row: int, inertia: wp.array2d[float], rowadr: wp.array1d[int], rownnz: wp.array1d[int], colind: wp.array1d[int]
):
    mass = Mat7()
    for joint in range(7):
        for k in range(rownnz[joint]):
            column = colind[rowadr[joint] + k]
            mass[joint, column] = F(inertia[row, rowadr[joint] + k])
            mass[column, joint] = mass[joint, column]
    return mass


@wp.func
def turn_between(now: wp.mat33d, then: wp.mat33d):
    """Half the sum of the cross products of their axes: for small angles, axis times angle."""
    turn = wp.vec3d()
    for i in range(3):
        turn = turn + F(0.5) * wp.cross(
            wp.vec3d(now[0, i], now[1, i], now[2, i]), wp.vec3d(then[0, i], then[1, i], then[2, i])
        )
    return turn


@wp.func
def wrench(away: wp.vec3d, turn: wp.vec3d, speed: Vec6, mobility: Mat6):
    """Force and torque of the hand. Positions and rotations are uncoupled."""
    of_place = wp.mat33d()
    of_turn = wp.mat33d()
    force = wp.vec3d()
    torque = wp.vec3d()
    for i in range(3):
        force[i] = STIFFNESS * away[i] - DAMPING * speed[i]
        torque[i] = STIFFNESS * turn[i] - DAMPING * speed[3 + i]
        for j in range(3):
            of_place[i, j] = mobility[i, j]
            of_turn[i, j] = mobility[3 + i, 3 + j]
    force = wp.inverse(of_place) * force
    torque = wp.inverse(of_turn) * torque
    return Vec6(force[0], force[1], force[2], torque[0], torque[1], torque[2])


@wp.kernel(enable_backward=False)
def set_torques(
    hand: int,
    limits: wp.array1d[F],
    posture: wp.array2d[F],  # joints to hold in the null space
    rowadr: wp.array1d[int],
    rownnz: wp.array1d[int],
    colind: wp.array1d[int],
    qpos: wp.array2d[float],
    qvel: wp.array2d[float],
    inertia: wp.array2d[float],
    bias: wp.array2d[float],
    anchors: wp.array2d[wp.vec3],
    axes: wp.array2d[wp.vec3],
    site_xpos: wp.array2d[wp.vec3],
    site_xmat: wp.array2d[wp.mat33],
    goal_pos: wp.array1d[wp.vec3d],
    goal_mat: wp.array1d[wp.mat33d],
    ctrl: wp.array2d[float],
):
    """Torques of the arm's joints."""
    row = wp.tid()
    place = double3(site_xpos[row, hand])
    jacobian = hand_jacobian(row, place, anchors, axes)
    mass = arm_inertia(row, inertia, rowadr, rownnz, colind)
    speeds = Vec7()
    pull = Vec7()
    for joint in range(7):
        speeds[joint] = F(qvel[row, joint])
        pull[joint] = POSTURE * (posture[row, joint] - F(qpos[row, joint])) - POSTURE_DAMPING * speeds[joint]
    spread = jacobian * inverse(mass, 7)  # [6, 7]
    mobility = spread * wp.transpose(jacobian)
    turn = turn_between(wp.mat33d(site_xmat[row, hand]), goal_mat[row])
    force = wrench(goal_pos[row] - place, turn, jacobian * speeds, mobility)
    pull = mass * pull  # the part in the null space of the hand's movement acts
    pull = pull - wp.transpose(jacobian) * (inverse(mobility, 6) * (spread * pull))
    pull = pull + wp.transpose(jacobian) * force
    for joint in range(7):
        ctrl[row, joint] = float(clipped(F(bias[row, joint]) + pull[joint], limits[joint]))


@wp.kernel(enable_backward=False)
def move_fingers(
    actions: wp.array2d[F],
    range_: wp.array2d[F],  # of the two fingers' targets: middle and half
    gripper: wp.array2d[F],  # the targets in the range of -1 to 1
    ctrl: wp.array2d[float],
):
    """Targets of the fingers, which move at a constant speed while the action is not 0."""
    row, finger = wp.tid()
    closes = wp.sign(actions[row, 6])
    if actions[row, 6] == F(0.0):
        closes = F(0.0)
    side = F(2 * finger - 1)
    gripper[row, finger] = clipped(gripper[row, finger] + side * GRIPPER_SPEED * closes, F(1.0))
    ctrl[row, 7 + finger] = float(range_[finger, 0] + range_[finger, 1] * gripper[row, finger])


def launch(kernel: Any, dim: Any, *args: Any) -> None:
    wp.launch(kernel, dim=dim, inputs=list(args))
