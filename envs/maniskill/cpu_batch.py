"""Building a ManiSkill env whose batched code runs on N CPU scenes in one process.

ManiSkill refuses more than one env per process on a CPU, although its batched code would do. While an env is built,
a few names
of its modules are replaced so that it gets `BatchedCpuPhysics` where it expects the GPU's; then everything is put
back. What the env looks up lazily is looked up once before that, so nothing of the replacement is needed later.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property
from typing import Any

import sapien
import torch
from mani_skill.agents.controllers.utils.kinematics import Kinematics
from mani_skill.envs import sapien_env
from mani_skill.envs.scene import ManiSkillScene
from mani_skill.render.utils import can_render
from mani_skill.utils.building.actor_builder import ActorBuilder
from mani_skill.utils.structs.articulation import Articulation
from mani_skill.utils.structs.articulation_joint import ArticulationJoint

from embodied.envs.maniskill.cpu_physics import BatchedCpuPhysics

RigidBody = sys.modules["mani_skill.utils.structs.base"].PhysxRigidBodyComponentStruct


def make_batched(make, num_envs: int, look, trimmed: bool = True) -> Any:
    """The env that `make(num_envs=...)` builds, unwrapped, reset once and ready; `look(env, info)` observes it.
    `trimmed`: fetch only what the first steps read, for tasks that are known to read the same in all steps."""
    with replaced_names(planes=not trimmed):
        env = make(num_envs=num_envs).unwrapped
        env.reset(seed=0)
        physics = env.scene.px
        if trimmed:
            physics.watch()
        action = torch.zeros((num_envs, env.single_action_space.shape[0]))
        for _ in range(2):  # everything that is looked up lazily, by the code that a rollout runs
            look(env, env.step(action)[-1])
        env.reset(seed=0, options={"env_idx": torch.arange(num_envs)})
        if trimmed:
            physics.settle()
    return env


@contextmanager
def replaced_names(planes: bool) -> Iterator[None]:
    """`planes`: the ground is in every scene. ManiSkill puts it into the first alone, since a GPU's scenes share it;
    the listed tasks play on a table and never touch it."""
    changes = [
        (sapien.physx, "PhysxGpuSystem", BatchedCpuPhysics),
        (sapien_env, "CPU_SIM_BACKENDS", frozenset()),
        (sapien_env.BaseEnv, "_setup_scene", setup_scene),
        (RigidBody, "_body_data_index", named(cached_property(body_rows), "_body_data_index")),
        (Articulation, "_data_index", named(cached_property(articulation_rows), "_data_index")),
        (ArticulationJoint, "_data_index", named(cached_property(joint_rows), "_data_index")),
        (Kinematics, "_setup_cpu", Kinematics._setup_gpu),
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
    """In place of BaseEnv._setup_scene: a CPU scene for every env, and one physics system over them all."""
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
    env.scene = scene


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
