"""robosuite's operational space controller and gripper for all rows, as one kernel of Warp.

A thread computes the torques of one row in double precision, from arrays that MuJoCo Warp has computed in single
precision. The rules and constants are those of robosuite 1.4's OSC_POSE with fixed impedance and PandaGripper.
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
def inverse7(a: Mat7):
    b = a
    for k in range(7):
        pivot = F(1.0) / b[k, k]
        b[k, k] = F(1.0)
        for j in range(7):
            b[k, j] = b[k, j] * pivot
        for i in range(7):
            if i != k:
                factor = b[i, k]
                b[i, k] = F(0.0)
                for j in range(7):
                    b[i, j] = b[i, j] - factor * b[k, j]
    return b


@wp.func
def inverse6(a: Mat6):
    b = a
    for k in range(6):
        pivot = F(1.0) / b[k, k]
        b[k, k] = F(1.0)
        for j in range(6):
            b[k, j] = b[k, j] * pivot
        for i in range(6):
            if i != k:
                factor = b[i, k]
                b[i, k] = F(0.0)
                for j in range(6):
                    b[i, j] = b[i, j] - factor * b[k, j]
    return b


@wp.func
def doubled(v: wp.vec3):
    return wp.vec3d(F(v[0]), F(v[1]), F(v[2]))


@wp.func
def clipped(x: F, limit: F):
    return wp.min(wp.max(x, -limit), limit)


@wp.kernel(enable_backward=False)
def control(
    begins: bool,  # an env step, whose action sets new goals
    actions: wp.array2d[F],
    hand: int,  # the site between the fingers
    limits: wp.array1d[F],  # torques of the joints
    grip: wp.array2d[F],  # of the two fingers: middle and half of the control's range
    posture: wp.array2d[F],  # joints to hold in the null space
    seen_pos: wp.array1d[wp.vec3d],  # the hand where robosuite's reset saw it last
    seen_mat: wp.array1d[wp.mat33d],
    is_fresh: wp.array1d[int],  # 1 until the first action of an episode
    m_rowadr: wp.array1d[int],
    m_rownnz: wp.array1d[int],
    m_colind: wp.array1d[int],
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
    gripper: wp.array2d[F],
    ctrl: wp.array2d[float],
):
    row = wp.tid()
    place = doubled(site_xpos[row, hand])
    turned32 = site_xmat[row, hand]
    turned = wp.mat33d()
    for i in range(3):
        for j in range(3):
            turned[i, j] = F(turned32[i, j])

    if begins:
        shift = wp.vec3d()
        turn = wp.vec3d()
        for i in range(3):
            shift[i] = REACH * clipped(actions[row, i], F(1.0))
            turn[i] = TURN * clipped(actions[row, 3 + i], F(1.0))
        # robosuite's controller does not look again before its first action after a reset, nor do we.
        start = place
        start_turned = turned
        if is_fresh[row] == 1:
            start = seen_pos[row]
            start_turned = seen_mat[row]
            is_fresh[row] = 0
        goal_pos[row] = start + shift
        angle = wp.length(turn)
        if angle > F(0.0):
            q = wp.quat_from_axis_angle(turn / angle, angle)
            goal_mat[row] = wp.quat_to_matrix(q) * start_turned

    # Jacobian of the hand, its velocity, the arm's inertia and joints
    jac = Mat67()
    speed = Vec6()
    mass = Mat7()
    for joint in range(7):
        axis = doubled(axes[row, joint])
        lever = wp.cross(axis, place - doubled(anchors[row, joint]))
        for i in range(3):
            jac[i, joint] = lever[i]
            jac[3 + i, joint] = axis[i]
        for i in range(6):
            speed[i] = speed[i] + jac[i, joint] * F(qvel[row, joint])
        for k in range(m_rownnz[joint]):
            column = m_colind[m_rowadr[joint] + k]
            value = F(inertia[row, m_rowadr[joint] + k])
            mass[joint, column] = value
            mass[column, joint] = value

    inverse = inverse7(mass)
    spread = jac * inverse  # [6, 7]
    mobility = spread * wp.transpose(jac)  # [6, 6]
    of_place = wp.mat33d()
    of_turn = wp.mat33d()
    for i in range(3):
        for j in range(3):
            of_place[i, j] = mobility[i, j]
            of_turn[i, j] = mobility[3 + i, 3 + j]

    wanted = goal_mat[row]
    error = wp.vec3d()
    for i in range(3):
        now = wp.vec3d(turned[0, i], turned[1, i], turned[2, i])
        then = wp.vec3d(wanted[0, i], wanted[1, i], wanted[2, i])
        error = error + F(0.5) * wp.cross(now, then)
    away = goal_pos[row] - place
    force = wp.vec3d()
    torque = wp.vec3d()
    for i in range(3):
        force[i] = STIFFNESS * away[i] - DAMPING * speed[i]
        torque[i] = STIFFNESS * error[i] - DAMPING * speed[3 + i]
    force = wp.inverse(of_place) * force
    torque = wp.inverse(of_turn) * torque

    pull = Vec7()
    for joint in range(7):
        pull[joint] = POSTURE * (posture[row, joint] - F(qpos[row, joint])) - POSTURE_DAMPING * F(qvel[row, joint])
    pull = mass * pull
    # Null space: the transpose of 1 - mass^-1 J^T (J mass^-1 J^T)^-1 J
    pull = pull - wp.transpose(jac) * (inverse6(mobility) * (spread * pull))

    for joint in range(7):
        value = F(bias[row, joint]) + pull[joint]
        for i in range(3):
            value = value + jac[i, joint] * force[i] + jac[3 + i, joint] * torque[i]
        ctrl[row, joint] = float(clipped(value, limits[joint]))

    closes = wp.sign(actions[row, 6])
    if actions[row, 6] == F(0.0):
        closes = F(0.0)
    for finger in range(2):
        side = F(2 * finger - 1)
        gripper[row, finger] = clipped(gripper[row, finger] + side * GRIPPER_SPEED * closes, F(1.0))
        ctrl[row, 7 + finger] = float(grip[finger, 0] + grip[finger, 1] * gripper[row, finger])


@wp.kernel(enable_backward=False)
def find_contacts(
    num_contacts: wp.array1d[int],
    geoms: wp.array1d[wp.vec2i],
    worlds: wp.array1d[int],
    firsts: wp.array1d[int],  # of each geom: the pairs of which it is in the first part, as bits
    seconds: wp.array1d[int],
    touching: wp.array1d[int],
):
    at = wp.tid()
    if at < num_contacts[0]:
        a = geoms[at][0]
        b = geoms[at][1]
        if a >= 0 and b >= 0:
            wp.atomic_or(touching, worlds[at], (firsts[a] & seconds[b]) | (firsts[b] & seconds[a]))


def launch(kernel: Any, dim: int, *args: Any) -> None:
    wp.launch(kernel, dim=dim, inputs=list(args))
