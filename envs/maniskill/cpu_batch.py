"""Builds a ManiSkill env whose batched code runs on N CPU scenes in one process, and draws its rows' initial states.

ManiSkill refuses more than one env per process on a CPU, although its batched code would work. While an env is built,
some names in its modules are replaced, so that it gets `BatchedCpuPhysics` instead of the GPU's physics. Lazy lookups
are triggered before the names are restored.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import cached_property, partial
from typing import Any

import numpy as np
import sapien
import torch
from mani_skill.agents.controllers.utils.kinematics import Kinematics
from mani_skill.envs import sapien_env
from mani_skill.envs.scene import ManiSkillScene
from mani_skill.envs.utils import randomization
from mani_skill.envs.utils.randomization.batched_rng import BatchedRNG
from mani_skill.render.utils import can_render
from mani_skill.utils.building.actor_builder import ActorBuilder
from mani_skill.utils.geometry.rotation_conversions import (
    euler_angles_to_matrix,
    matrix_to_quaternion,
    quaternion_multiply,
)
from mani_skill.utils.structs.articulation import Articulation
from mani_skill.utils.structs.articulation_joint import ArticulationJoint
from mani_skill.utils.structs.pose import Pose, to_sapien_pose

from embodied.envs.maniskill.bridge_tasks import PLATES, TWINS
from embodied.envs.maniskill.cpu_physics import BatchedCpuPhysics
from embodied.envs.maniskill.episode_draws import EpisodeDraws, Rows, RowsOfNormals, RowsOfPlaces, RowsOfUniforms
from embodied.envs.maniskill.tasks import DRAWING, action_bounds, for_robots

BETWEEN_STEPS = ("_before_simulation_step", "_after_simulation_step")  # a task's code between physics steps
RigidBody = sys.modules["mani_skill.utils.structs.base"].PhysxRigidBodyComponentStruct


def make_batched(make, num_envs: int, look, trimmed: bool = True, planes: bool = False) -> Any:
    """Returns the env built by `make(num_envs=...)`, unwrapped and reset once; `look(env, info)` observes it.
    `trimmed`: fetch only the values that the first steps read, for tasks that read the same values in all steps.
    `planes`: as in `replaced_names`."""
    with replaced_names(planes):
        env = make(num_envs=num_envs).unwrapped
        env.reset(seed=0)
        physics = env.scene.px
        if trimmed:
            physics.watch()
        action = for_robots(env, torch.zeros((num_envs, len(action_bounds(env)[0]))))
        for _ in range(2):  # triggers all lazy lookups by running a rollout's code
            look(env, env.step(action)[-1])
        env.reset(seed=0, options={"env_idx": torch.arange(num_envs)})
        if trimmed:
            physics.fetch_only_read()
    return env


@contextmanager
def replaced_names(planes: bool) -> Iterator[None]:
    """Inside, names are replaced. `planes`: put the ground into every scene. ManiSkill puts it only into the first
    scene, since scenes share it on a GPU; most listed tasks play on a table and never touch the ground."""
    changes = [
        (sapien.physx, "PhysxGpuSystem", BatchedCpuPhysics),
        (sapien_env, "CPU_SIM_BACKENDS", frozenset()),
        (sapien_env.BaseEnv, "_setup_scene", setup_scene),
        (RigidBody, "_body_data_index", named(cached_property(body_rows), "_body_data_index")),
        (Articulation, "_data_index", named(cached_property(articulation_rows), "_data_index")),
        (ArticulationJoint, "_data_index", named(cached_property(joint_rows), "_data_index")),
        (Kinematics, "_setup_cpu", solve_row_by_row),
    ]
    if planes:
        changes.append((ActorBuilder, "__init__", init_with_planes))
    before = [(owner, name, vars(owner)[name]) for owner, name, _ in changes]
    try:
        for owner, name, value in changes:
            setattr(owner, name, value)
        yield
    finally:
        for owner, name, value in before:
            setattr(owner, name, value)


INIT = ActorBuilder.__init__


def init_with_planes(builder: Any) -> None:
    INIT(builder)
    builder.set_allow_overlapping_plane_collisions(True)


def setup_scene(env: Any) -> None:
    """Replaces BaseEnv._setup_scene: a CPU scene for every env, and one physics system over them all."""
    env._set_scene_config()
    scenes = []
    for _ in range(env.num_envs):
        systems: list[Any] = [sapien.physx.PhysxCpuSystem()]
        if can_render(env._render_device):
            systems.append(sapien.render.RenderSystem(env._render_device))
        scenes.append(sapien.Scene(systems))
    scene = ManiSkillScene(
        scenes, sim_config=env.sim_config, device=env.device, parallel_in_single_scene=False, backend=env.backend
    )
    scene.px = BatchedCpuPhysics(scenes)
    scene.gpu_sim_enabled = True
    scene.px.timestep = 1.0 / env._sim_freq
    scene.px.puts_off = all(getattr(type(env), name) is getattr(sapien_env.BaseEnv, name) for name in BETWEEN_STEPS)
    env.scene = scene


SETUP_KINEMATICS = Kinematics._setup_cpu


def solve_row_by_row(kinematics: Kinematics) -> None:
    """Use a single env's inverse kinematics on a CPU, row by row: if a pose is out of reach, the arm does not move.
    ManiSkill's batched solver would take an unlimited step towards the pose."""
    SETUP_KINEMATICS(kinematics)
    kinematics.compute_ik = partial(compute_ik, kinematics)


def compute_ik(
    kinematics: Kinematics,
    pose: Any,
    q0: torch.Tensor,
    is_delta_pose: bool = False,
    current_pose: Any = None,
    solver_config: Any = None,
) -> torch.Tensor:
    """Joint positions [N, J] that bring the hand to a pose, or by a movement [N, 6] from its current pose."""
    if is_delta_pose:
        turn = matrix_to_quaternion(euler_angles_to_matrix(pose[:, 3:], "XYZ"))
        pose = Pose.create_from_pq(current_pose.p + pose[:, :3], quaternion_multiply(turn, current_pose.q))
    solution = q0[:, kinematics.active_joint_indices].clone()
    starts = q0[:, kinematics.pmodel_active_joint_indices].numpy()
    for row, start in enumerate(starts):
        joints, solved, _ = kinematics.pmodel.compute_inverse_kinematics(
            kinematics.end_link_idx,
            to_sapien_pose(pose.raw_pose[row]),
            initial_qpos=start,
            active_qmask=kinematics.qmask,
            max_iterations=100,
        )
        if solved:
            solution[row] = torch.from_numpy(joints[kinematics.pmodel_controlled_joint_indices])
    return solution


def body_rows(struct: Any) -> torch.Tensor:
    return torch.tensor([struct.px.body_index[id(body)] for body in struct._bodies])


def articulation_rows(struct: Any) -> torch.Tensor:
    return torch.tensor([struct.px.articulation_index[id(a)] for a in struct._objs], dtype=torch.int32)


def joint_rows(struct: Any) -> torch.Tensor:
    rows = [struct.scene.px.articulation_index[id(a)] for a in struct._physx_articulations]
    return torch.tensor(rows, dtype=torch.int32)


def named(prop: cached_property, name: str) -> cached_property:
    prop.__set_name__(None, name)
    return prop


# Resets of some rows, each from its own seed.
#
# ManiSkill's reset seeds one generator for all rows that it resets together. Here every row has its own seed and gets
# the same draws as a single env with that seed; the rest is done once for all rows. If a task draws for all rows in one
# call, it gets the rows' own draws stacked.

# Tasks whose rows drawn in one call get what each gets alone; other tasks are tried when they are built.
DRAWN_TOGETHER = (
    *("PushCube-v1", "PullCube-v1", "PickCube-v1", "LiftPegUpright-v1", "PlaceSphere-v1", "RollBall-v1"),
    *("PokeCube-v1", "StackCube-v1", "PullCubeTool-v1", "PegInsertionSide-v1", *TWINS),
)
TRIED_ROWS, TRIALS = 16, 4
WRITTEN = ("rigid_body_data", *(f"articulation_{name}" for name in ("qpos", "qvel", "target_qpos", "target_qvel")))


@torch.no_grad()
def begin_episodes(env: Any, rows: np.ndarray, seeds: list[int], states: list[int]) -> dict[str, Any]:
    """Reset these rows, to a task's stored states if `states` are not -1; returns ManiSkill's info of all rows."""
    scene, physics = env.scene, env.scene.px
    on_cpu = isinstance(physics, BatchedCpuPhysics)
    chosen = Rows.of(rows, env.device)
    scene._reset_mask = chosen
    env._elapsed_steps[chosen] = 0
    if on_cpu:
        physics.refresh(rows.tolist())
    stand_still(env)
    env.agent.reset()
    initialize(env, rows, seeds, states)
    scene._reset_mask = chosen
    scene._gpu_apply_all()
    if on_cpu:  # only these rows changed
        physics.refresh(rows.tolist())
        physics.hide_unread(rows.tolist())
        scene._needs_fetch = False
    else:
        physics.gpu_update_articulation_kinematics()
        scene._gpu_fetch_all()
    controllers = env.agent.controller.values() if isinstance(env.agent.controller, dict) else [env.agent.controller]
    for controller in controllers:
        controller.reset()  # of these rows: other rows keep their targets
    scene._reset_mask = env.every_row
    return env.get_info()


def initialize(env: Any, rows: np.ndarray, seeds: list[int], states: list[int]) -> None:
    stored = [state >= 0 for state in states]
    if env.draws_together and all(stored) == any(stored):
        initialize_together(env, rows, seeds, states)
    else:
        initialize_one_by_one(env, rows, seeds, states)


def choose_drawing(env: Any) -> None:
    """Find out how a new env's initial states are drawn. The env has to be reset afterwards."""
    known = env.spec.id in DRAWN_TOGETHER or env.spec.id.startswith(PLATES)
    everyone = np.arange(env.num_envs)
    env.every_row = (
        Rows.of(everyone, env.device) if known else env.scene._reset_mask
    )  # other tasks may take it for a mask
    env.draws_together = known or draws_together(env)


def draws_together(env: Any) -> bool:
    """True if rows drawn in one call get what each row gets alone, bit for bit: tried with several seeds, since a task
    may draw until something is free."""
    rows, mask = np.arange(min(env.num_envs, TRIED_ROWS)), env.scene._reset_mask
    found = []
    for way in (initialize_together, initialize_one_by_one):
        with suppress(Exception):
            for trial in range(TRIALS):
                env.scene._reset_mask = Rows.of(rows, env.device)
                way(env, rows, [TRIED_ROWS * trial + row for row in rows.tolist()], [-1] * len(rows))
                found.append(drawn_state(env, rows))
    env.scene._reset_mask = mask
    return len(found) == 2 * TRIALS and all(map(np.array_equal, found[:TRIALS], found[TRIALS:]))


def drawn_state(env: Any, rows: np.ndarray) -> np.ndarray:
    """All numbers that an initialization may have written: of the physics, and the env's own with a row per env."""
    physics, count = env.scene.px, env.num_envs
    arrays = [getattr(physics, f"cuda_{name}").torch() for name in WRITTEN]
    own = [value for _, value in sorted(vars(env).items()) if type(value) is torch.Tensor and len(value.shape)]
    arrays += [value[rows] for value in own if len(value) == count]
    return np.concatenate([np.nan_to_num(array.cpu().numpy().astype(np.float64), nan=7.0).ravel() for array in arrays])


def initialize_together(env: Any, rows: np.ndarray, seeds: list[int], states: list[int]) -> None:
    """The same draws as `initialize_one_by_one`, in one call of the task's code, with the scene's mask as `Rows`."""
    draws, before = EpisodeDraws(np.array(seeds)), (env._episode_rng, env._batched_episode_rng)
    env._episode_seed[rows] = seeds
    env._episode_rng = RowsOfNormals(draws)
    env._batched_episode_rng = None  # such a task draws nothing from generators of single rows
    options = {"episode_id": torch.tensor(states)} if states[0] >= 0 else {}
    try:
        with replaced_draws(RowsOfUniforms(draws, env.device)):
            env._initialize_episode(env.scene._reset_mask.as_subclass(torch.Tensor), options)
    finally:
        env._episode_rng, env._batched_episode_rng = before


def initialize_one_by_one(env: Any, rows: np.ndarray, seeds: list[int], states: list[int]) -> None:
    with own_draws(env.device) as seed_draws:
        for row, seed, state in zip(rows.tolist(), seeds, states, strict=True):
            env.scene._reset_mask = torch.arange(env.num_envs, device=env.device) == row
            own = BatchedRNG.from_seeds([seed], backend=env._batched_rng_backend)
            env._episode_seed[row] = seed
            env._batched_episode_rng[np.array([row])] = own
            env._episode_rng = own[0]
            seed_draws(seed)
            options = {"episode_id": torch.tensor([state])} if state >= 0 else {}
            env._initialize_episode(torch.tensor([row], device=env.device), options)


@contextmanager
def replaced_draws(rand: RowsOfUniforms) -> Iterator[None]:
    places = type("RowsOfPlaces", (RowsOfPlaces,), {"rand": rand})
    with DRAWING, ExitStack() as stack:
        for owner, name, value in (
            (torch, "rand", rand.rand),
            (torch, "randint", rand.randint),
            (randomization, "UniformPlacementSampler", places),
        ):
            stack.callback(setattr, owner, name, getattr(owner, name))
            setattr(owner, name, value)
        yield


@contextmanager
def own_draws(device: torch.device) -> Iterator[Callable[[int], Any]]:
    """Yields a function that seeds ManiSkill's generators; afterwards torch's generators are restored."""
    with DRAWING:
        if device.type == "cpu":  # torch.manual_seed would also write a stack trace for an absent GPU: 0.5 ms
            before = torch.default_generator.get_state()
            try:
                yield torch.default_generator.manual_seed
            finally:
                torch.default_generator.set_state(before)
            return
        with torch.random.fork_rng():
            yield torch.manual_seed


def stand_still(env: Any) -> None:
    """Zero the velocities of the rows in the mask; applied together with their new poses."""
    zero = torch.zeros(3, device=env.device)
    for actor in env.scene.actors.values():
        if actor.px_body_type == "dynamic":
            actor.set_linear_velocity(zero)
            actor.set_angular_velocity(zero)
    for articulation in env.scene.articulations.values():
        articulation.set_qvel(torch.zeros(articulation.max_dof, device=env.device))
        articulation.set_root_linear_velocity(zero)
        articulation.set_root_angular_velocity(zero)
